"""The recommendation: each step's gain, what is recommended, what comes next, the file of settings, the command."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted_search as planted
import psutil
import pytest
import records as make
from conftest import Call, alive

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import LOADER_ALONE, ExchangeConfig, RunConfig
from ddpm_lab.explain import decisions, findings, quality
from ddpm_lab.explain.frames import Study
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import RECOMMENDATION, SEARCH, WEAK
from ddpm_lab.questions import experiments
from ddpm_lab.questions import recommendation as question
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.recommend import recommend
from ddpm_lab.questions.recommendation import Recommendation, next_change, recommendation, write_settings
from ddpm_lab.record import RunRecord
from ddpm_lab.space import Value
from ddpm_lab.training.training_run import plan_training

BF16, TWO = {"precision": "bf16"}, {"world_size": 2}
LOADERS = (Value("packed", "packed", {}), Value("files", "files", {"loader": "files"}))
"""Two that learn the very same."""


# --- what a search found ----------------------------------------------------------------------------------------------


def of(records: list[Any], **changes: Any) -> Recommendation:
    found = recommendation(planted.study(records, **changes))
    assert found is not None
    return found


def trials(changes: dict[str, Any], worse: float, **values: Any) -> list[Any]:
    return make.trials({"it": (replace(planted.BASE, **changes), worse)}, baseline=planted.BASE, images=800, **values)


def judged(records: list[Any], **changes: Any) -> Recommendation:
    """The same where trials call bf16 with two ranks not worse."""
    return of(records, trials=tuple(trials({**BF16, **TWO}, 0.0)), **changes)


def again(records: list[Any], factor: float, **where: Any) -> list[Any]:
    """The records with other seconds in those windows of the sets after the search whose record is so."""
    return [
        replace(r, windows=tuple(replace(w, seconds=factor * w.seconds) for w in r.windows))
        if r.experiment == RECOMMENDATION and all(getattr(r, name, None) == value for name, value in where.items())
        else r
        for r in records
    ]


def test_each_step_is_compared_with_the_one_before_in_the_same_sets() -> None:
    records = planted.searched(noise=0.02)
    found = judged(records)
    assert [step.label for step in found.steps] == ["2 ranks", "bf16"]
    assert found.best.row.label == "bf16, 2 ranks"
    # A known answer, and an independent one: throughput over throughput, set by set.
    assert [s.gain.value for s in found.steps] == pytest.approx([1.5, 1.2 * planted.TOGETHER], rel=0.03)
    sets: dict[str, dict[str, float]] = {}
    for r in records:
        if r.experiment == RECOMMENDATION and r.windows and r.role != "twin":
            sets.setdefault(r.set_id, {})[r.run_id] = float(np.median([w.seconds_per_image for w in r.windows]))
    one, both = (planted.SPACE.cells[step.cell].run_id for step in found.steps)
    by_hand = np.exp(np.mean([math.log(s[one] / s[both]) for s in sets.values()]))
    assert found.steps[1].gain.value == pytest.approx(by_hand, rel=0.01)
    assert found.best.row.ratio.value == pytest.approx(math.prod(s.gain.value for s in found.steps), rel=0.02)
    assert [s.gain.sets for s in found.steps] == [6, 6]


def test_the_first_step_is_over_baseline_and_repeat_and_disturbed_sets_do_not_count() -> None:
    first, _ = of(again(planted.searched(noise=0.0), 1.04, role="twin")).steps
    assert first.gain.value == pytest.approx(1.5 * math.sqrt(1.04), rel=0.01)
    assert first.gain.value == pytest.approx(first.row.ratio.value)
    records = planted.searched()
    lost = next(r.set_id for r in records if r.experiment == RECOMMENDATION)
    busy = [
        replace(r, windows=tuple(replace(w, others_cores=1.0) for w in r.windows)) if r.set_id == lost else r
        for r in again(records, 2, set_id=lost)
    ]
    quiet = of([r for r in records if r.set_id != lost])
    assert [s.gain for s in of(busy).steps] == [s.gain for s in quiet.steps]
    assert [s.gain.sets for s in of(busy).steps] == [5, 5]


def look(sets: list[str], day: int) -> Any:
    """An answer of the search that was shown, and what it rested on."""
    told: dict[str, Any] = {"sets": sets, "log_ratios": {}}
    where = make.environment(date=f"2026-01-{day:02d}T10:00:00+00:00")
    return make.record(planted.BASE, role="look", experiment=RECOMMENDATION, set_id="", look=told, environment=where)


def test_the_answers_that_were_shown_are_counted_and_what_was_called_stays() -> None:
    records = planted.searched(sets=12)
    sets = list(dict.fromkeys(r.set_id for r in records if r.experiment == RECOMMENDATION and r.set_id))
    looks = (look(sets, 6), look(sets[:6], 5))
    assert [s.gain.sets for s in of(records, looks=looks).steps] == [6, 6]
    assert [s.gain.sets for s in of(records).steps] == [12, 12]


def test_the_winners_own_sets_give_the_ratio_and_not_those_that_chose_it() -> None:
    records = planted.searched()
    last = judged(records).steps[-1].row
    slower = judged(again(records, 1.1, run_id=last.run_id)).steps[-1].row
    assert slower.ratio.value == pytest.approx(last.ratio.value / 1.1)
    searched = [
        replace(r, windows=tuple(replace(w, seconds=w.seconds / 2) for w in r.windows))
        if r.experiment == SEARCH and r.role == "candidate"
        else r
        for r in records
    ]
    assert judged(searched).steps[-1].row.ratio == last.ratio


def counts(records: list[Any], *tried: list[Any]) -> tuple[int, int]:
    """Steps that are recommended, and steps that are faster and not known to be worse."""
    found = of(records, trials=tuple(t for each in tried for t in each))
    return found.count, found.reach


def test_only_what_trials_call_not_worse_is_recommended() -> None:
    both, records = {**BF16, **TWO}, planted.searched()
    assert counts(records) == (0, 2), "nobody knows what they cost"
    assert counts(records, trials(both, 0.0)) == (2, 2)
    assert counts(records, trials(both, 0.02)) == (0, 1)
    assert counts(records, trials(both, 0.02), trials(TWO, 0.0)) == (1, 1)
    assert counts(records, trials(TWO, 0.0)) == (1, 2)
    assert counts(records, trials(both, 0.0005, gain=0.001, seed_noise=0.005)) == (0, 1), "worse, if by little"
    assert counts(records, trials(both, 0.0, seeds=3)) == (0, 2), "not enough data"
    batch = {**both, "global_batch_size": 16}
    other = planted.searched(winner=(1, 1, 0, 1), among=list(planted.SPACE.cells))
    assert [s.label for s in of(other).steps] == ["2 ranks", "bf16", "batch 16"], "the batch comes last"
    for records in (other, planted.searched(replace(planted.SPACE, any_batch=True), winner=(1, 1, 0, 1))):
        assert counts(records) == (0, 3)
        assert counts(records, trials(batch, 0.0)) == (3, 3)
        assert counts(records, trials(batch, 0.02)) == (0, 2)


def test_nothing_false_is_recommended() -> None:
    """Of 20 machines on which no setting changes the speed, and none costs quality, at most one is called faster."""
    good = tuple(trials({**TWO, "kernels": "fused"}, 0.0) + trials(TWO, 0.0) + trials({"kernels": "fused"}, 0.0))
    called = 0
    for seed in range(20):
        found = of(planted.searched(gains={}, winner=(0, 1, 1, 0), noise=0.02, seed=seed), trials=good)
        assert len(found.steps) == 2
        called += found.count > 0
    assert called <= 1


def test_a_loader_that_learns_the_same_has_the_quality_of_the_step_before() -> None:
    """It is recommended although more is faster: what bf16 costs is not known."""
    space = replace(planted.SPACE, settings={"loader": LOADERS, **planted.SPACE.settings})
    gains = {**planted.GAINS, "files": 1.4}
    found = of(planted.searched(space, gains, winner=(1, 1, 0, 0, 0)))
    assert [s.label for s in found.steps] == ["files", "bf16"]
    assert (found.count, found.reach, found.best.judged.reason) == (1, 2, "the same arithmetic")
    records = planted.searched(space, gains, winner=(1, 0, 0, 0, 0))
    files = replace(planted.BASE, loader="files")
    pair = make.trials({"files": (files, 0.0)}, baseline=planted.BASE, seeds=1, images=160)
    ended = {"steps": 20, "weights_sha256": "x", "trainer": "code-1"}
    options = (("images", 160), ("draws", 0))
    workload = RunConfig().workload
    same = [replace(t, config=replace(t.config, workload=workload, options=options), quality=ended) for t in pair]
    assert of(records, trials=tuple(same)).best.judged.reason == "after 20 steps"
    other = [replace(t, quality={**ended, "weights_sha256": t.label}) for t in same]
    assert of(records, trials=tuple(other)).count == 0


def test_the_next_change_is_the_one_that_is_expected_to_gain_most() -> None:
    assert next_change(of(planted.searched())) == (
        "batch 16",
        "ddpm-lab recommend --only precision=bf16 --only ranks=2 --only memory=channels_last --only batch=8,16 "
        "--any-batch --seeds 8 --network tiny",
    )
    done = {"bf16": 1.2, "2 ranks": 1.5, "joined kernels": 0.5, "batch 16": 0.5}
    assert next_change(of(planted.searched(replace(planted.SPACE, any_batch=True), done))) is None
    # One set settles nothing, so nothing is recommended; but what it measured counts, not what was expected.
    gains = {"bf16": 1.2, "2 ranks": 0.8, "joined kernels": 0.8, "batch 16": 0.8}
    records = planted.searched(gains=gains, sets=1, winner=(1, 0, 0, 0))
    bf16 = planted.SPACE.cells[1, 0, 0, 0].run_id
    following = [next_change(of(again(records, factor, run_id=bf16))) for factor in (0.6, 1.5)]
    assert [change and change[0] == "bf16" for change in following] == [True, False]


def test_a_search_that_finds_nothing_shows_what_it_tried() -> None:
    records = planted.searched(gains=dict.fromkeys(planted.GAINS, 0.8), winner=(0, 0, 0, 0))
    answer = question.answer(study(records))
    assert (answer.finding.status, answer.finding.headline) == (
        findings.ANSWERED,
        "Keep the baseline: a search found nothing faster",
    )
    (axes,) = (ax for part in answer.figure().subfigs for ax in part.axes)
    tried = [row["Configuration"] for row in question.tried_table(of(records))]
    assert len(axes.get_yticks()) == len(tried) >= 4


def test_a_training_takes_its_images_over_the_speed_and_pays_compiling_once() -> None:
    found = judged(planted.searched(), train_images=1_000_000)
    plain, best = found.training_seconds(0), found.training_seconds(2)
    assert plain == pytest.approx(1e6 * 0.010 / 8, rel=0.05)
    assert best == pytest.approx(plain / found.best.row.ratio.value, rel=0.02)
    assert of(planted.searched()).training_images == 800_000 * 8
    compiles = (Value("off", "eager", {}), Value("whole", "compiled", {"compile": "whole"}))
    space = replace(planted.SPACE, settings={"compile": compiles, **planted.SPACE.settings})
    records = planted.searched(space, {"compiled": 1.25}, winner=(1, 0, 0, 0, 0), noise=1e-4)
    told = next(r for r in records if r.role == "space")
    config = space.cells[1, 0, 0, 0, 0]
    colds = make.cold(config, [30.0], experiment=RECOMMENDATION, family=told.family, baseline_id=told.baseline_id)
    known, unknown = of([*records, *colds]), of(records)
    (step,) = known.steps
    assert step.compiled is not None
    assert step.compiled.steps == pytest.approx(30 / (0.010 * (1 - 1 / 1.25)), rel=0.05)
    assert known.training_seconds(1) - unknown.training_seconds(1) == pytest.approx(30)
    pays_off = [question.steps_table(found)[1]["Compiling pays off"] for found in (known, unknown)]
    assert [text.partition(" ")[0] for text in pays_off] == ["after", "unknown"]


@pytest.mark.parametrize(("sets", "known"), [(6, True), (6, False), (1, True)])
def test_the_file_is_what_train_takes(tmp_path: Path, synthetic: RunConfig, sets: int, known: bool) -> None:
    space = replace(planted.SPACE, baseline=synthetic)
    told = make.trials(
        {"it": (replace(synthetic, precision="bf16", world_size=2), 0.0)}, baseline=synthetic, images=800
    )
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.append(planted.searched(space, sets=sets))
    records, damaged = ledger.read()  # which keeps the space
    assert not damaged
    shown = planted.study(records, output_dir=tmp_path, trials=tuple(told) if known else ())
    path = write_settings(shown)
    assert path == tmp_path / "recommended.toml"
    settings = tomllib.loads(path.read_text())
    assert settings["train"] == {"steps": 800_000}
    recommended = sets == 6 and known
    assert (settings["precision"], settings["world_size"]) == (("bf16", 2) if recommended else ("fp32", 1))
    config, schedule, _ = plan_training({"oversubscribe": True}, {}, file=path, cache=tmp_path / "cache")
    wanted = of(list(shown.records), trials=shown.trials).best.row.config
    assert config.differences(wanted).keys() <= {"purpose", "workload", "oversubscribe"}
    assert (config.data, schedule.steps) == (synthetic.data, 800_000)
    assert write_settings(make.study(make.sets({}), RECOMMENDATION)) is None
    path.write_text(path.read_text().replace('"bf16"', '"half"').replace('"fp32"', '"half"'))
    with pytest.raises(ConfigError, match="precision is 'half'"):
        plan_training({}, {}, file=path, cache=tmp_path / "cache")


# --- what all questions came to ---------------------------------------------------------------------------------------

NARROW, KEPT = RunConfig(precision="bf16"), RunConfig(freed_memory="kept")
"""Keeping freed memory is the same arithmetic: its quality needs no trials."""


def study(*records: Sequence[RunRecord], harm: float | None = None) -> Study:
    """All questions of a machine; with ``harm`` bf16 was tried too, and its loss ends so much higher."""
    found = make.study([r for part in records for r in part], RECOMMENDATION)
    return replace(found, trials=() if harm is None else tuple(make.trials({"bf16": (NARROW, harm)})))


def amp(ratio: float = 1.3, **values: Any) -> list[RunRecord]:
    return make.sets({"bf16": (NARROW, ratio)}, **values)


def memory(ratio: float = 1.1, **values: Any) -> list[RunRecord]:
    return make.sets({"freed memory kept": (KEPT, ratio)}, **{"experiment": "bottleneck", **values})


BOTH, ALL = replace(NARROW, freed_memory="kept"), "bf16, freed memory kept"


def together(ratio: float) -> list[RunRecord]:
    return make.sets({ALL: (BOTH, ratio)}, experiment=RECOMMENDATION, family="tiny, together")


OPEN = amp(1.0, set_noise=0.04)
IN_BF16 = make.sets(
    {"compiled": (replace(NARROW, compile="whole"), 1.47)}, baseline=NARROW, experiment="torch_compile", family="bf16"
)


@pytest.mark.parametrize(
    ("records", "harm", "label", "status", "way_out"),
    [
        ((amp(), memory(), together(1.35)), 0.0, ALL, findings.ANSWERED, ""),
        ((amp(), memory(), together(1.35)), None, "freed memory kept", findings.ANSWERED, ""),
        ((amp(), memory(), together(0.9)), 0.0, "bf16", findings.ANSWERED, ""),
        ((amp(), memory()), 0.05, "freed memory kept", findings.ANSWERED, ""),
        ((amp(0.8), memory()), 0.0, "freed memory kept", findings.ANSWERED, ""),
        ((amp(), memory()), 0.0, "bf16", findings.ANSWERED, ""),
        ((amp(),), None, "bf16", question.UNTRIED, "ddpm-lab run amp --batch-size 32 --seeds 8"),
        ((amp(data_name="1 image from my"),), None, "bf16", question.UNTRIED, "ddpm-lab run amp --data DATA --batch"),
        ((amp(),), 0.05, None, findings.ANSWERED, ""),
        ((amp(0.7), IN_BF16), 0.0, None, findings.ANSWERED, ""),  # in a format that is slower itself
        ((OPEN,), None, None, decisions.INCONCLUSIVE, "ddpm-lab run amp --batch-size 32 --resolution 3%"),
        ((OPEN, memory(0.8)), None, None, findings.ANSWERED, "ddpm-lab run amp"),
        ((amp(1.6, count=3),), 0.0, None, decisions.TOO_FEW, "make report"),
        ((), None, None, quality.NOT_MEASURED, "ddpm-lab report"),
    ],
)
def test_the_answer_is_the_fastest_that_was_measured_and_is_not_worse(
    records: Any, harm: float | None, label: str | None, status: str, way_out: str
) -> None:
    found = answer(study(*records, harm=harm)).finding
    assert (bool(found.sets), found.status) == (label is not None, status)
    assert (label or "") in found.headline
    # Measured together, and no product of 1.3 and 1.1.
    assert not label or found.ratio == pytest.approx({ALL: 1.35, "bf16": 1.3}.get(label, 1.1), rel=0.02)
    assert found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out)


def test_what_trials_cannot_judge_or_call_slightly_worse_has_no_way_out() -> None:
    """No loss is known at which harm shows in the network "seed"."""
    base, bf16 = RunConfig(network="seed"), RunConfig(network="seed", precision="bf16")
    tried = make.trials({"bf16": (bf16, 0.0)}, baseline=base)
    seed = make.study(make.sets({"bf16": (bf16, 1.3)}, baseline=base), RECOMMENDATION)
    found = answer(replace(seed, trials=tuple(tried))).finding
    assert (found.status, found.way_out) == (question.UNTRIED, "")
    slight = tuple(make.trials({"bf16": (NARROW, 0.0005)}, gain=0.001, seed_noise=0.005))
    found = answer(replace(study(amp()), trials=slight)).finding
    assert (found.sets, found.status, found.way_out) == (0, findings.ANSWERED, "")


def test_what_is_no_change_of_a_training_is_left_out_of_the_table() -> None:
    """Other trainers, other work, the loader alone, ranks that exchange nothing, and steps with more images."""
    two, alone = RunConfig(world_size=2), RunConfig(loader="files", workload=LOADER_ALONE)
    silent = replace(two, exchange=ExchangeConfig(enabled=False))
    weak: dict[str, Any] = {"experiment": "multi_gpu", "family": f"tiny, batch 32 per rank{WEAK}"}
    others = [
        make.sets({"another trainer": (RunConfig(read_loss=True), 9.0)}, experiment="peers"),
        make.sets({"batch 64": (RunConfig(global_batch_size=64), 9.0)}, experiment="batch_size"),
        make.sets({"2 workers": (replace(alone, loader_workers=2), 9.0)}, baseline=alone, experiment="workers"),
        make.sets({"no exchange": (silent, 9.0)}, baseline=two, experiment="exchange"),
        make.sets({"2 ranks": (replace(two, global_batch_size=64), 1.9)}, **weak),
    ]
    shown = question.changes_table(study(amp(), memory(0.8), *others, harm=0.0))
    usable = [(row["Change"], row["May be recommended"]) for row in shown]
    assert usable == [("bf16", "yes"), ("freed memory kept", "no")]


def test_what_may_be_recommended_is_combined_as_far_as_it_can_be() -> None:
    fewer: tuple[Study, ...] = (
        study(amp(), memory()),  # quality unknown
        study(amp(), memory(), harm=0.05),
        study(amp(count=3), memory(), harm=0.0),
        study(amp(0.7), IN_BF16, harm=0.0),
        study(),
    )
    assert [question.combination(one) for one in fewer] == [None] * len(fewer)
    fine = study(amp(), memory(), together(1.35), harm=0.0)
    harmed = replace(fine, trials=(*fine.trials, *make.trials({"both": (BOTH, 0.05)})))
    assert answer(harmed).finding.headline.startswith("Use bf16: 30 % faster than fp32")
    files = RunConfig(loader="files")
    on_files: dict[str, Any] = {"baseline": files, "baseline_label": "0 workers", "experiment": "workers"}
    steps = {f"{n} workers": (replace(files, loader_workers=n), 1 + n / 10) for n in (2, 4)}
    kept = make.sets({"freed memory kept": (replace(files, freed_memory="kept"), 1.1)}, **on_files, family="memory")
    for primary in (2, 4):  # of a setting one value is combined, the primary one first
        found = question.combination(study(make.sets(steps, **on_files, primary=f"{primary} workers"), kept))
        assert found is not None
        assert found.candidates[0][1] == replace(files, loader_workers=primary, freed_memory="kept")
    workers = make.sets(steps, **on_files, family="training")  # measured with another loader
    found = question.combination(study(amp(), memory(), workers, harm=0.0))
    assert found is not None
    assert (found.baseline, *found.candidates) == (RunConfig(), (ALL, BOTH))


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_answers_from_records_and_refuses_mixed_machines(call: Call, tmp_path: Path) -> None:
    assert experiments.recommendation(output_dir=tmp_path).study.records == (), "quick without minutes measures nothing"
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    Ledger(here).append(planted.searched())
    Ledger(there).append(make.on(make.GPUS, planted.searched(seed=9)))
    code, out, _ = call("recommend", "--ledger", here, "--output-dir", tmp_path, "--train-images", 1000, "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["sets"]) == (0, "faster", 6)
    assert found["low"] < found["ratio"] < found["high"]
    assert not (tmp_path / "recommended.toml").exists(), "records of another machine recommend nothing for this one"
    code, out, err = call("recommend", "--ledger", here, there, "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: the records come from 2 machines: choose one")
    code, out, _ = call("recommend", "--ledger", here, there, "--machine", "all", "--output-dir", tmp_path)
    assert code == 0
    assert "12 sets" in out
    assert "2 machines: " in out


def test_what_makes_no_sense_is_refused_in_a_sentence(call: Call, tmp_path: Path) -> None:
    for options, words in (
        (("--minutes", "0.1"), "minutes is 0.1: a search and the sets that measure again"),
        (("--only", "precision"), "--only is 'precision': give a setting and its values"),
        (("--only", "speed=all"), "only is 'speed': choose one of precision"),
        (("--train-images", "0"), "train_images is 0: give a whole number of at least 1"),
        (("--resolution", "much"), "a share is 'much'"),
        (("--sets", "0"), "sets is 0"),
        (("--images", "100"), "images is 100, and without seeds"),
    ):
        code, out, err = call("recommend", "--device", "cpu", "--output-dir", tmp_path, *options)
        assert (code, out) == (2, "")
        assert f"ddpm-lab: {words}" in err
    for minutes in (-5, math.nan, math.inf, True):
        with pytest.raises(ConfigError, match=r"minutes is .*: a search and the sets"):
            recommend(minutes=minutes, output_dir=tmp_path)
    assert not (tmp_path / "trace_output" / "ledger.jsonl").exists()


@pytest.mark.slow
def test_a_killed_search_goes_on_and_its_answer_trains(tmp_path: Path, call: Call) -> None:
    """A smoke search killed after its first set is not begun again, and the file that it ends in trains two steps."""
    command = [sys.executable, "-m", "ddpm_lab", "recommend", "--preset", "smoke", "--device", "cpu"]
    command += ["--output-dir", str(tmp_path)]
    ledger = Ledger(tmp_path / "trace_output" / "ledger.jsonl")

    def measured(experiment: str) -> list[RunRecord]:
        return [r for r in ledger.read()[0] if r.experiment == experiment and r.set_id]

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 300
        while not measured(SEARCH) and time.monotonic() < deadline:
            time.sleep(0.1)
        everything = [p.pid for p in psutil.Process(run.pid).children(recursive=True)]
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while alive(everything) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(everything) == []
    before = measured(SEARCH)
    assert {r.role for r in before} == {"baseline", "twin", "candidate"}
    subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert [r.set_id for r in measured(SEARCH)] == [r.set_id for r in before], "the set is not measured again"
    fresh = measured(RECOMMENDATION)
    assert len({r.set_id for r in fresh}) == 1
    assert {r.set_id for r in fresh}.isdisjoint(r.set_id for r in before)
    assert (tmp_path / "image_output" / "06_recommendation.png").is_file()
    folder = tmp_path / "run"
    code, _, err = call(
        *("train", "--config", tmp_path / "recommended.toml", "--steps", 2, "--output-dir", folder),
        *("--sample-every", 0, "--evaluate-every", 0),
    )
    assert code == 0, err
    assert (folder / "checkpoints" / "step-00000002.pt").is_file()
