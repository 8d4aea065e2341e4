"""What a search's records say: each step's gain, what is recommended, what comes next, how long a training takes."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted_search as planted
import pytest
import records as make
from cells import column

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, findings, stats
from ddpm_lab.explain.frames import study
from ddpm_lab.explain.questions import recommendation as words
from ddpm_lab.explain.questions.recommendation import (
    Recommendation,
    next_change,
    recommendation,
    training_seconds,
    write_settings,
)
from ddpm_lab.ledger import Ledger
from ddpm_lab.questions.answers import answer
from ddpm_lab.record import LedgerError
from ddpm_lab.space import Value
from ddpm_lab.training.training_run import plan_training

BF16, TWO = {"precision": "bf16"}, {"world_size": 2}
LOADERS = (Value("packed", "packed", {}), Value("files", "files", {"loader": "files"}))
"""Two that learn the very same."""


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
        if r.experiment == "recommendation" and all(getattr(r, name, None) == value for name, value in where.items())
        else r
        for r in records
    ]


def again_of_bf16(records: list[Any], factor: float) -> list[Any]:
    for run_id in {r.run_id for r in records if r.config.precision == "bf16"}:
        records = again(records, factor, run_id=run_id)
    return records


def test_each_step_is_compared_with_the_one_before_in_the_same_sets() -> None:
    records = planted.searched(noise=0.02)
    found = judged(records)
    assert [step.label for step in found.steps] == ["2 ranks", "bf16"]
    assert found.best.label == "bf16, 2 ranks"
    # A known answer, and an independent one: throughput over throughput, set by set.
    assert [s.gain.value for s in found.steps] == pytest.approx([1.5, 1.2 * planted.TOGETHER], rel=0.03)
    sets: dict[str, dict[str, float]] = {}
    for r in records:
        if r.experiment == "recommendation" and r.windows and r.role != "twin":
            sets.setdefault(r.set_id, {})[r.run_id] = float(np.median([w.seconds_per_image for w in r.windows]))
    one, both = (planted.SPACE.cells[c].run_id for c in (found.steps[0].cell, found.steps[1].cell))
    by_hand = np.exp(np.mean([math.log(s[one] / s[both]) for s in sets.values()]))
    assert found.steps[1].gain.value == pytest.approx(by_hand, rel=0.01)
    assert found.best.ratio.value == pytest.approx(math.prod(s.gain.value for s in found.steps), rel=0.02)
    assert [s.gain.sets for s in found.steps] == [6, 6]


def test_sets_that_others_disturbed_are_no_part_of_a_step() -> None:
    records = planted.searched()
    lost = next(r.set_id for r in records if r.experiment == "recommendation")
    quiet = of([r for r in records if r.set_id != lost])
    busy = [
        replace(r, windows=tuple(replace(w, others_cores=1.0) for w in r.windows)) if r.set_id == lost else r
        for r in again(records, 2, set_id=lost)
    ]
    assert [s.gain for s in of(busy).steps] == [s.gain for s in quiet.steps]
    assert [s.gain.sets for s in of(busy).steps] == [5, 5]


def test_the_first_step_is_over_the_mean_of_the_baseline_and_its_repeat() -> None:
    slower = again(planted.searched(noise=0.0), 1.04, role="twin")
    first, _ = of(slower).steps
    assert first.gain.value == pytest.approx(1.5 * math.sqrt(1.04), rel=0.01)
    assert first.gain.value == pytest.approx(first.row.ratio.value)


def look(sets: list[str], day: int) -> Any:
    """An answer of the search that was shown, and what it rested on."""
    return make.record(
        planted.BASE,
        role="look",
        experiment="recommendation",
        set_id="",
        look={"sets": sets, "log_ratios": {}},
        environment=make.environment(date=f"2026-01-{day:02d}T10:00:00+00:00"),
    )


def test_the_answers_that_were_shown_are_counted_and_what_was_called_stays() -> None:
    records = planted.searched(sets=12)
    sets = list(dict.fromkeys(r.set_id for r in records if r.experiment == "recommendation" and r.set_id))
    of_two = (look(sets, 6), look(sets[:6], 5))
    assert [s.gain.sets for s in of(records, looks=of_two).steps] == [6, 6]


@pytest.mark.parametrize(("p", "word"), [(0.01, decisions.INCONCLUSIVE), (0.001, decisions.FASTER)])
def test_a_later_look_at_a_step_is_held_to_its_level(p: float, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sets left both open; of twelve 0.75 % is asked, where 3.5 % was asked of the first."""

    def estimate(logs: Any, spread: Any = None) -> Any:
        found = stats.estimate(logs, spread)
        return replace(found, low=0.9, high=1.2, p=p if found.sets == 12 else 0.5)

    monkeypatch.setattr(decisions, "estimate", estimate)
    records = planted.searched(sets=12)
    sets = list(dict.fromkeys(r.set_id for r in records if r.experiment == "recommendation" and r.set_id))
    steps = of(records, looks=(look(sets[:6], 5), look(sets, 6))).steps
    assert [s.gain.sets for s in steps] == [12, 12]
    assert {s.verdict for s in steps} == {word}


def test_the_winners_own_sets_give_the_ratio_and_not_those_that_chose_it() -> None:
    records = planted.searched()
    known = judged(records).best.ratio.value
    assert judged(again_of_bf16(records, 1.1)).best.ratio.value < known
    searched = [
        replace(r, windows=tuple(replace(w, seconds=w.seconds / 2) for w in r.windows))
        if r.experiment == "search" and r.role == "candidate"
        else r
        for r in records
    ]
    assert judged(searched).best.ratio.value == known


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


def test_nor_is_another_batch_recommended_that_is_not_judged() -> None:
    batch = {**BF16, **TWO, "global_batch_size": 16}
    other = planted.searched(winner=(1, 1, 0, 1), among=list(planted.SPACE.cells))
    assert [s.label for s in of(other).steps] == ["2 ranks", "bf16", "batch 16"], "the batch comes last"
    for records in (other, planted.searched(replace(planted.SPACE, any_batch=True), winner=(1, 1, 0, 1))):
        assert counts(records) == (0, 3)
        assert counts(records, trials(batch, 0.0)) == (3, 3)
        assert counts(records, trials(batch, 0.02)) == (0, 2)


def test_what_is_known_to_be_as_good_is_recommended_although_more_is_faster() -> None:
    """Another loader learns the very same; what bf16 costs is not known."""
    space = replace(planted.SPACE, settings={"loader": LOADERS, **planted.SPACE.settings})
    found = of(planted.searched(space, {**planted.GAINS, "files": 1.4}, winner=(1, 1, 0, 0, 0)))
    assert [s.label for s in found.steps] == ["files", "bf16"]
    assert (found.count, found.reach) == (1, 2)
    _, text, row = words.answer(found)
    assert row is not None
    assert row.label == "files"
    assert "ddpm-lab recommend --seeds 8 " in text


def test_a_loader_that_learns_the_same_has_the_quality_of_the_step_before() -> None:
    space = replace(planted.SPACE, settings={"loader": LOADERS, **planted.SPACE.settings})
    records = planted.searched(space, {**planted.GAINS, "files": 1.4}, winner=(1, 0, 0, 0, 0))
    assert of(records).judged.reason == "the same arithmetic"
    pair = make.trials(
        {"files": (replace(planted.BASE, loader="files"), 0.0)}, baseline=planted.BASE, seeds=1, images=160
    )
    same = [
        replace(
            t,
            config=replace(t.config, workload=RunConfig().workload, options=(("images", 160), ("draws", 0))),
            quality={"steps": 20, "weights_sha256": "x", "trainer": "code-1"},
        )
        for t in pair
    ]
    assert of(records, trials=tuple(same)).judged.reason == "after 20 steps"
    other = [replace(t, quality={**(t.quality or {}), "weights_sha256": t.label}) for t in same]
    differs = of(records, trials=tuple(other))
    assert differs.steps[0].judged.verdict == "not enough data", "a loader that was seen to differ"
    assert differs.count == 0


def test_one_set_recommends_nothing() -> None:
    found = of(planted.searched(sets=1))
    said = answer(planted.study(planted.searched(sets=1))).finding
    assert found.count == 0
    assert (said.status, said.sets) == (decisions.TOO_FEW, 1)
    nothing = planted.searched(gains={"bf16": 0.8, "2 ranks": 0.7, "joined kernels": 0.9, "batch 16": 0.9})
    assert of(nothing).steps == ()
    assert answer(planted.study(nothing)).finding.status == findings.ANSWERED


def test_the_finding_says_what_was_tried_what_not_and_what_comes_next() -> None:
    shown_study = planted.study(planted.searched(), train_images=1_000_000)
    said = answer(shown_study).finding
    assert "Left out: tf32 (needs a CUDA device) and fp16 (needs a CUDA device)." in said.claim
    assert "Not tried: batch 16" in said.claim
    assert said.way_out == "ddpm-lab recommend --seeds 8 --network tiny --batch-size 8"
    assert said.ratio == pytest.approx(1.62, rel=0.03)
    assert said.sets == 6
    shown = answer(shown_study).table()
    assert column(shown, "Configuration") == ["baseline", "+ 2 ranks", "+ bf16"]
    assert column(shown, "Recommended") == ["yes", "", ""]
    known = replace(shown_study, trials=tuple(trials({**BF16, **TWO}, 0.0)))
    assert answer(known).finding.status == findings.ANSWERED
    assert column(answer(known).table(), "Recommended") == ["", "", "yes"]
    assert "1,000,000 images" in shown[0]
    assert "Compiling pays off" not in shown[0]
    assert len(words.tried_table(of(list(shown_study.records)))) == 6


def test_the_next_change_is_the_one_that_is_expected_to_gain_most() -> None:
    change = next_change(of(planted.searched()))
    assert change is not None
    assert change == (
        "batch 16",
        "ddpm-lab recommend --only precision=bf16 --only ranks=2 --only memory=channels_last --only batch=8,16 "
        "--any-batch --seeds 8 --network tiny",
    )
    done = {"bf16": 1.2, "2 ranks": 1.5, "joined kernels": 0.5, "batch 16": 0.5}
    assert next_change(of(planted.searched(replace(planted.SPACE, any_batch=True), done))) is None


def test_a_change_that_measured_slower_again_is_not_tried_next() -> None:
    """One set settles nothing, so nothing is recommended; but what it measured counts, not what was expected."""
    gains = {"bf16": 1.2, "2 ranks": 0.8, "joined kernels": 0.8, "batch 16": 0.8}
    records = planted.searched(gains=gains, sets=1, winner=(1, 0, 0, 0))

    def following(factor: float) -> str:
        found = of(again_of_bf16(records, factor))
        change = next_change(found)
        return change[0] if change and not found.count else ""

    assert following(0.6) == "bf16"
    assert following(1.5) != "bf16"


def test_a_training_takes_its_images_over_the_speed_and_pays_compiling_once() -> None:
    found = judged(planted.searched(), train_images=1_000_000)
    plain, best = training_seconds(found, found.baseline), training_seconds(found, found.best, 100.0)
    assert plain == pytest.approx(1e6 * 0.010 / 8, rel=0.05)
    assert best - 100 == pytest.approx(plain / found.best.ratio.value, rel=0.02)
    assert words.training_images(of(planted.searched())) == 800_000 * 8


def test_compiling_pays_off_after_its_seconds_over_what_a_step_saves() -> None:
    compiles = (Value("off", "eager", {}), Value("whole", "compiled", {"compile": "whole"}))
    space = replace(planted.SPACE, settings={"compile": compiles, **planted.SPACE.settings})
    records = planted.searched(space, {"compiled": 1.25}, winner=(1, 0, 0, 0, 0), noise=1e-4)
    told = next(r for r in records if r.role == "space")
    config = space.cells[1, 0, 0, 0, 0]
    colds = make.cold(config, [30.0], experiment="recommendation", family=told.family, baseline_id=told.baseline_id)
    (step,) = of([*records, *colds]).steps
    assert step.cold_seconds == pytest.approx(30)
    assert step.pays_off_steps == pytest.approx(30 / (0.010 * (1 - 1 / 1.25)), rel=0.05)
    assert words.table(of([*records, *colds]))[1]["Compiling pays off"].startswith("after ")
    assert words.table(of(records))[1]["Compiling pays off"] == "compile time unknown"


def test_records_of_several_machines_are_refused_unless_they_are_asked_for() -> None:
    here, there = planted.searched(), make.on(make.GPUS, planted.searched(seed=9))
    with pytest.raises(LedgerError, match=r"come from 2 machines: choose one by name or key, or all to pool them: "):
        study([*here, *there], "recommendation")
    one = study([*here, *there], "recommendation", machine="Example CPU 9000, 2 cores")
    both = study([*here, *there], "recommendation", machine="all")
    assert [of(list(s.records)).best.sets for s in (one, both)] == [6, 12]
    assert answer(both).finding.hardware.startswith("2 machines: ")


@pytest.mark.parametrize(("sets", "known"), [(6, True), (6, False), (1, True)])
def test_the_file_is_what_train_takes(tmp_path: Path, synthetic: RunConfig, sets: int, known: bool) -> None:
    space = replace(planted.SPACE, baseline=synthetic)
    winner = replace(synthetic, precision="bf16", world_size=2)
    told = make.trials({"it": (winner, 0.0)}, baseline=synthetic, images=800)
    shown_study = planted.study(
        planted.searched(space, sets=sets), output_dir=tmp_path, trials=tuple(told) if known else ()
    )
    path = write_settings(shown_study)
    assert path == tmp_path / "recommended.toml"
    settings = tomllib.loads(path.read_text())
    assert settings["train"] == {"steps": 800_000}
    recommended = sets == 6 and known
    assert (settings["precision"], settings["world_size"]) == (("bf16", 2) if recommended else ("fp32", 1))
    assert ("so these are the settings of the baseline" in path.read_text()) != recommended
    config, schedule, _ = plan_training({"oversubscribe": True}, {}, file=path, cache=tmp_path / "cache")
    wanted = of(list(shown_study.records), trials=shown_study.trials).config
    assert config.differences(wanted).keys() <= {"purpose", "workload", "oversubscribe"}
    assert config.data == synthetic.data
    assert schedule.steps == 800_000
    assert write_settings(make.study(make.sets({}), "recommendation")) is None
    (tmp_path / "recommended.toml").write_text(path.read_text().replace('"bf16"', '"half"').replace('"fp32"', '"half"'))
    with pytest.raises(ConfigError, match="precision is 'half'"):
        plan_training({}, {}, file=path, cache=tmp_path / "cache")


def test_a_ledger_keeps_the_space(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.jsonl")
    ledger.append(planted.searched())
    records, damaged = ledger.read()
    assert not damaged
    assert judged(records).best.ratio.value == judged(planted.searched()).best.ratio.value
