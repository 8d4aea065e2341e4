"""The bottleneck: what is asked, a planted machine's fault comes first with its gain, targets, verdict, the report."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make
from bottleneck_records import profiled, study, told
from setups import setup

from ddpm_lab.cli.measure import bottleneck_report, bottleneck_study
from ddpm_lab.config import OWN, ExchangeConfig, RunConfig
from ddpm_lab.explain import charts, findings, phrases
from ddpm_lab.explain.selection import Study
from ddpm_lab.measure import hardware
from ddpm_lab.measure.shortfall import Held
from ddpm_lab.plan import Experiment
from ddpm_lab.questions import bottleneck as question
from ddpm_lab.questions import planning
from ddpm_lab.questions import recommendation as ranked
from ddpm_lab.questions.bottleneck import MET, MISSED, NO_TARGET, UNKNOWN, bottleneck, changes, fitting, markdown
from ddpm_lab.questions.recommendation import Change
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import own_data

CONFIG = RunConfig(global_batch_size=8)
FILES = RunConfig(loader="files", global_batch_size=8)
BF16 = replace(CONFIG, precision="bf16")
COMPILED = replace(CONFIG, compile="whole")
STARVED = {"data": 60.0, "copy": 1.0, "forward": 20.0, "backward": 15.0, "optimizer": 4.0}
BUSY = {"data": 2.0, "copy": 1.0, "forward": 36.0, "backward": 56.0, "optimizer": 5.0}


# --- what is asked ----------------------------------------------------------------------------------------------------

PLAIN = RunConfig()
CONFIGS = (
    PLAIN,
    replace(PLAIN, loader="files", loader_workers=1),
    replace(PLAIN, precision="bf16", compile="whole"),
    replace(PLAIN, world_size=2, exchange=ExchangeConfig(bucket_mb=5)),
    replace(PLAIN, device="cuda", global_batch_size=128),
)
FOLLOW = {"loader_workers", "kernels", "compile_mode", "nodes", "exchange"}


def test_each_is_one_change_away_and_none_is_there_twice() -> None:
    for config in CONFIGS:
        found = changes(config, usable_cores=2, most_ranks=2)
        assert config not in found.values()
        assert len({other.run_id for other in found.values()}) == len(found)
        for other in found.values():
            assert other.loader_workers <= 2
            assert len(other.differences(config).keys() - FOLLOW) <= 1


def labels(found: Experiment) -> list[str]:
    return [label for family in found.families for label, _ in family.candidates]


def test_compiles_that_take_more_than_half_of_the_time_are_left_out_with_the_reason() -> None:
    asked = bottleneck(setup(), only=["bf16", "compiled", "batch 64"])
    short = fitting(asked, 119, Held())
    assert labels(short) == ["bf16", "batch 64"]
    assert [row[:2] for row in short.left_out] == [(asked.families[0].name, "compiled")]
    assert fitting(asked, 600, Held()) == asked
    compiled = dict(asked.families[0].candidates)["compiled"]
    done = make.record(compiled, role="cold", label="x", compile_cache="cold", stages={"compile": 150.0})
    assert fitting(asked, 119, Held([done])) == asked, "it is compiled already"


def test_networks_stand_side_by_side_on_one_scale() -> None:
    """Each change at its ratio in each network's row, a gap where none was measured; one network has no such view."""
    planted = {"tiny": {"bf16": 0.8, "fused kernels": 1.2}, "seed": {"bf16": 1.6}}
    shown = list[RunRecord]()
    for network, ratios in planted.items():
        assert question.answer(study(*shown)).figures() == []
        base = replace(CONFIG, network=network)
        changed = {"bf16": replace(base, precision="bf16"), "fused kernels": replace(base, channels_last=True)}
        rows = {name: (changed[name], ratio) for name, ratio in ratios.items()}
        family = f"{network}, batch 8, 1 rank{question.CHANGES}"
        shown += make.sets(rows, baseline=base, experiment="bottleneck", family=family)
    ((_, figure, name),) = question.answer(study(*shown)).figures()
    assert name == "by_network"
    assert [ax.get_title("left") for ax in figure.axes] == ["bf16", "fused kernels"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    names = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_yticklabels()]
    assert names == ["tiny, batch 8 (0.044 M)", "seed, batch 8 (10 M)"]
    places = charts.centres([charts.Row(name=name) for name in names])
    for ax, change in zip(figure.axes, ("bf16", "fused kernels"), strict=True):
        points = [np.ravel([line.get_xdata(), line.get_ydata()]) for line in ax.lines if line.get_marker() == "o"]
        wanted = [(r[change], y) for r, y in zip(planted.values(), places, strict=True) if change in r]
        assert np.array(points) == pytest.approx(np.array(wanted), rel=0.03)


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (({"bf16": 0.8}, {"bf16": 1.6}), "depends on the network"),
        (({"bf16": 0.8}, {}, {"bf16": 1.6}), "depends on the batch"),
        (({"bf16": 0.8}, {}, {}, {"bf16": 1.6}), "depends on network and batch"),
        (({"bf16": 0.8}, {"bf16": 1.6}, {"bf16": 3.0}), "to 1.6"),  # of three sets, without a verdict
        (({"bf16": 1.4}, {"bf16": 1.5}), "What each change is worth"),
        (({"bf16": 1.4}, {"fused kernels": 0.8}), "What each change is worth"),
        (({}, {}), ""),  # every change failed
        (({"bf16": 1.4}, {}), ""),
        (({"bf16": 0.8}, *7 * [{"bf16": 1.6}]), "network and batch"),
    ],
)
def test_side_by_side_says_what_a_change_depends_on(planted: tuple[dict[str, float], ...], says: str) -> None:
    shown = list[RunRecord]()
    for i, ratios in enumerate(planted):
        base = replace(CONFIG, network=("tiny", "seed")[i % 2], global_batch_size=8 << i // 2)
        changed = {"bf16": replace(base, precision="bf16"), "fused kernels": replace(base, kernels="fused")}
        rows = {name: (changed[name], ratio) for name, ratio in ratios.items()}
        lost = {} if rows else {"bf16": (changed["bf16"], "crashed", "no compiler")}
        family = f"{base.network}, batch {base.global_batch_size}{question.CHANGES}"
        how: dict[str, Any] = {"count": 3 if 3.0 in ratios.values() else 6, "failures": lost}
        shown += make.sets(rows, baseline=base, experiment="bottleneck", family=family, **how)
    titles = [figure.subfigs[0].texts[0].get_text() for _, figure, _ in question.answer(study(*shown)).figures()]
    assert [says in title.replace("\n", " ") for title in titles] == [True] * bool(says)


def test_of_many_changes_those_are_drawn_that_gain_here_and_lose_there_and_the_largest() -> None:
    shown = list[RunRecord]()
    for network, gain in (("tiny", 0.9), ("seed", 1.1)):
        base = replace(CONFIG, network=network)
        others: list[dict[str, Any]] = [
            {"channels_last": True},
            {"freed_memory": "kept"},
            {"read_loss": not base.read_loss},
            {"seed": 7},
        ]
        rows = {f"by {1.2 + n / 10}": (replace(base, **change), 1.2 + n / 10) for n, change in enumerate(others)}
        rows["bf16"] = replace(base, precision="bf16"), gain
        shown += make.sets(rows, baseline=base, experiment="bottleneck", family=f"{network}, batch 8{question.CHANGES}")
    ((_, figure, _),) = question.answer(study(*shown)).figures()
    assert [ax.get_title("left") for ax in figure.axes] == ["by 1.3", "by 1.4", "by 1.5", "bf16"]
    assert "Not drawn: by 1.2." in figure.subfigs[2].texts[0].get_text().replace("\n", " ")


# --- changes ----------------------------------------------------------------------------------------------------------


def by_title(shown: Study, title: str) -> Change:
    return next(a for a in question.considered(shown) if a.title == title)


def measured(phases: dict[str, float], **ratios: float) -> Study:
    changed = {"bf16": BF16, "compiled": COMPILED}
    found = {name: (changed[name], ratio) for name, ratio in ratios.items()}
    return study(profiled(CONFIG, phases), *told(CONFIG, found, step_seconds=0.1))


def about(shown: Study) -> question.Subject:
    found = question.subject(shown)
    assert found is not None
    return found


def target(shown: Study, name: str) -> dict[str, str]:
    return next(row for row in question.targets(shown, about(shown)) if row["Target"].startswith(name))


@pytest.mark.parametrize(
    ("config", "phases", "ratios"),
    [
        (FILES, {"data": 30.0, "forward": 16.0, "optimizer": 2.0}, {"packed data": 48 / 18, "bf16": 0.97}),
        (CONFIG, {"forward": 8.0, "optimizer": 22.0}, {"batch 64": (30 / 8) / (86 / 64)}),
        (CONFIG, {"forward": 16.0, "optimizer": 2.0}, {"bf16": 1.55}),
        (COMPILED, {"forward": 22.0, "optimizer": 2.0}, {"eager": 24 / 18}),
    ],
    ids=["slow loader", "tiny batch", "accidental fp32", "compile that never pays off"],
)
def test_what_is_wrong_comes_first_with_what_curing_it_is_worth(
    config: RunConfig, phases: dict[str, float], ratios: dict[str, float]
) -> None:
    offered = changes(config, usable_cores=2, most_ranks=2)
    planted = {name: (offered[name], ratio) for name, ratio in ratios.items()}
    sets = told(config, planted, step_seconds=sum(phases.values()) / 1e3)
    first, *others = question.advice(study(profiled(config, phases), *sets))
    cure, gain = next(iter(ratios.items()))
    assert (first.title, first.status) == (cure, ranked.FASTER)
    assert first.low <= gain <= first.high
    assert all(a.rank >= first.rank for a in others)


def test_what_is_not_measured_is_ordered_by_the_phases_it_acts_on_and_promises_nothing() -> None:
    shown = study(profiled(FILES, {"data": 60.0, "forward": 30.0, "optimizer": 10.0}))
    found = question.advice(shown)
    assert {(a.status, a.expected) for a in found} == {(ranked.NOT_MEASURED, phrases.DASH)}
    shares = [by_title(shown, name).share for name in ("packed data", "compiled", "batch 64")]
    assert shares == pytest.approx([0.6, 0.3, 0])
    assert found[0].title == "packed data"
    assert all(a.rationale and a.command.startswith("ddpm-lab run bottleneck") for a in found)
    bare = study(*make.sets({}))
    assert question.advice(bare) == ()
    assert "No time budget is recorded" in markdown(bare)


def test_what_is_resolved_goes_first() -> None:
    resolved = {
        "bf16": (replace(FILES, precision="bf16"), 1.08),
        "compiled": (replace(FILES, compile="whole"), 1.30),
        "batch 16": (replace(FILES, global_batch_size=16), 0.8),
        "2 ranks": (replace(FILES, world_size=2), 1.0),
    }
    unsure = {"batch 32": (replace(FILES, global_batch_size=32), 1.2)}
    budget = profiled(FILES, {"data": 60.0, "forward": 40.0})
    shown = study(budget, *told(FILES, resolved), *told(FILES, unsure, set_noise=0.3, seed=1, count=6))
    assert [a.title for a in question.advice(shown)[:2]] == ["compiled", "bf16"]
    statuses = [by_title(shown, name).status for name in ("batch 32", "batch 16", "2 ranks")]
    assert statuses == [ranked.INCONCLUSIVE, ranked.SLOWER, ranked.NO_GAIN]
    few = study(budget, *told(FILES, resolved, count=3))
    assert by_title(few, "2 ranks").status == ranked.INCONCLUSIVE, "three sets do not show that nothing is gained"


def test_other_code_other_baselines_failures_and_notes_are_no_measurements_of_this() -> None:
    budget, measured = profiled(CONFIG, BUSY), told(CONFIG, {"bf16": (BF16, 1.5)})
    other_code = [replace(r, code_version="code-2") for r in measured]
    elsewhere = told(BF16, {"compiled": (replace(BF16, compile="whole"), 1.5)})
    race = [replace(r, experiment="search", set_id=f"s{r.set_id}") for r in measured]
    shown = study(budget, *other_code, *elsewhere, *race)
    assert {by_title(shown, name).status for name in ("bf16", "compiled")} == {ranked.NOT_MEASURED}
    lost = told(CONFIG, {}, failures={"compiled": (COMPILED, "unsupported", "no C++ compiler")})
    failed = by_title(study(budget, *lost), "compiled")
    assert (failed.status, "no C++ compiler" in failed.evidence) == (ranked.FAILED, True)
    note = make.record(CONFIG, role="note", label="compiled", status="left out", reason="it takes too long")
    note = replace(note, experiment="bottleneck", family="one change at a time", baseline_id=CONFIG.run_id)
    left_out = by_title(study(budget, note, *measured), "compiled")
    assert (left_out.status, "it takes too long" in left_out.evidence) == (ranked.NOT_MEASURED, True)


def test_commands_name_the_present_settings_and_the_change() -> None:
    config = RunConfig(loader="files", loader_workers=2, precision="bf16", global_batch_size=8)
    first = question.advice(study(profiled(config, {"data": 50.0, "forward": 50.0})))[0]
    assert first.command == (
        "ddpm-lab run bottleneck --network tiny --batch-size 8 --precision bf16 --loader files --loader-workers 2 "
        "--compile off --only 'packed data' --resolution 2%"
    )
    fused = replace(config, loader="packed", loader_workers=0, kernels="fused", freed_memory="kept")
    asked = "--batch-size 8 --precision bf16 --loader packed --compile off"
    assert findings.command_of_step(study(), fused).endswith(asked), "it chooses the others again"
    assert first.current == 'loader = "files", loader_workers = 2'
    assert first.recommended == 'loader = "packed", loader_workers = 0'


# --- verdict, targets, report -----------------------------------------------------------------------------------------


def test_the_verdict_names_what_takes_most() -> None:
    for phases, words in (
        (STARVED, ["limited by I/O", "compute share 39 %, I/O 60 %"]),
        (BUSY, ["limited by compute", "compute share 97 %, I/O 2.0 %"]),
        ({"copy": 50.0, "forward": 49.0, "data": 1.0}, ["limited by memory transfer, 50 %"]),
        ({"forward": 75.0, "data": 25.0}, ["limited by compute", "above its target"]),
    ):
        said = question.verdict(about(study(profiled(CONFIG, phases))))
        assert not [word for word in words if word not in said]
    unexplained = study(profiled(FILES, {"data": 60.0, "forward": 40.0}, residual=30.0))
    assert "no bottleneck is named" in question.verdict(about(unexplained))


def with_state(share: float, cpu: float, others: float | None = 0.0) -> Study:
    """A busy step on a machine whose memory and cores are used so."""
    record = profiled(CONFIG, BUSY)
    assert record.profile is not None
    assert record.environment.ram_bytes is not None
    budget = {**record.profile["budget"], "state": {"cpu_utilisation_percent": cpu}, "others_cores": others}
    rank = replace(make.rank_record(0), peak_rss_bytes=int(share * record.environment.ram_bytes))
    return study(replace(record, profile={**record.profile, "budget": budget}, ranks=(rank,)))


def test_targets_are_met_missed_or_not_measured() -> None:
    for shown, name, status, now in (
        (study(profiled(CONFIG, BUSY)), "compute share", MET, "97 %"),
        (study(profiled(CONFIG, BUSY)), "CPU utilisation", UNKNOWN, UNKNOWN),
        (study(profiled(CONFIG, BUSY)), "time of 50", UNKNOWN, ""),
        (measured(STARVED, bf16=1.4), "compute share", MISSED, "39 %"),
        (measured(STARVED, bf16=1.4), "I/O share", MISSED, "60 %"),
        (measured(BUSY, bf16=1.4), "time of 50", MISSED, ""),
        (measured(BUSY, bf16=0.7), "time of 50", MET, ""),
        (with_state(0.5, 90.0), "memory in use", NO_TARGET, "50 %"),
        (with_state(0.1, 50.0), "CPU utilisation", MISSED, "50 %"),
        # The cores were busy for 95 % of the time, and what others took of that counts for nothing.
        (with_state(0.5, 95.0, 0.1), "CPU utilisation", MET, "90 %"),
        (with_state(0.5, 95.0, 1.0), "CPU utilisation", UNKNOWN, UNKNOWN),
        (with_state(0.5, 95.0, None), "CPU utilisation", UNKNOWN, UNKNOWN),
    ):
        found = target(shown, name)
        assert (found["Status"], found["Now"].startswith(now)) == (status, True), (name, found)


def test_what_is_recommended_is_known_to_cost_nothing() -> None:
    """However much faster another change is."""
    larger = {"batch 64": (replace(CONFIG, global_batch_size=64), 1.5)}
    kept = {"freed memory kept": (replace(CONFIG, freed_memory="kept"), 1.1)}
    for planted, first in (
        (larger, "First to be judged: batch 64 ("),
        (larger | kept, "First recommendation: freed mem"),
    ):
        shown = study(profiled(CONFIG, BUSY), *told(CONFIG, planted))
        assert question.advice(shown)[0].title == "batch 64"
        assert [line for line in question.summary(shown) if line.startswith(first)]


def test_the_report_has_all_that_is_asked_for() -> None:
    text = markdown(measured(BUSY, bf16=1.4, compiled=0.8), [("drawn", "a.png")])
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    names = "Executive summary, Bottleneck identification, Current configuration, Recommendations, Targets"
    assert ", ".join(sections) == f"{names}, No action needed, Method"
    assert "![drawn](a.png)" in sections["Bottleneck identification"]
    assert "| waiting for data | I/O |" in re.sub(" +", " ", sections["Bottleneck identification"])
    (first,) = re.findall(r"### 1\. bf16\n(.*?)\n\n(?!-)", sections["Recommendations"], re.DOTALL)
    for said in ("**Rationale", "**Expected gain", "**Evidence", "--only bf16", '`precision = "fp32"`'):
        assert said in first
    for said in ("waiting for data: 2.0 %", "compiled: slower, 0.8"):
        assert said in sections["No action needed"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_records_become_a_report_and_a_page_in_one_file(tmp_path: Path) -> None:
    records = [profiled(CONFIG, {"data": 5.0, "forward": 95.0}), *told(CONFIG, {"bf16": (BF16, 1.4)})]
    values = bottleneck_report(replace(study(*records), output_dir=tmp_path))
    assert values["advice"][0]["title"] == "bf16"
    assert 1.3 < values["advice"][0]["low"] < 1.4
    text, page = ((tmp_path / "reports" / f"bottleneck_report.{kind}").read_text() for kind in ("md", "html"))
    assert "bottleneck_report_profile.png" in text
    assert page.count("data:image/png;base64,") == 2
    assert not {".png", "<script"} & set(re.findall(r"\.png|<script", page))


def test_what_is_the_same_is_judged_by_the_resolution_that_was_asked_for(tmp_path: Path, data: Path) -> None:
    asked: dict[str, Any] = {
        "output_dir": tmp_path,
        "data": str(data),
        "image_size": 8,
        "network": "tiny",
        "device": "cpu",
    }
    planned = planning.plan_question("bottleneck", minutes=0, resolution=0.1, quiet=True, **asked)
    assert "more minutes" in bottleneck_report(bottleneck_study(planned))["headline"], "no ledger is there yet"
    own = RunConfig(workload=OWN, options=(("make", "mine:make"),), data_sha256=f"{own_data('mine:make')}1")
    later = make.environment(hardware.machine(), "2026-01-06T10:00:00+00:00")
    users = make.sets({"bf16": (replace(own, precision="bf16"), 0.7)}, baseline=own)
    labs = make.on(hardware.machine(), make.sets({"bf16": (BF16, 1.3)}))
    planned.ledger.append([*labs, *(replace(r, environment=later) for r in users)])
    found = bottleneck_study(planned)
    assert (found.resolution, {r.config.work_name for r in found.records}) == (0.1, {"tiny"})
