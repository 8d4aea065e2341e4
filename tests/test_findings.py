"""Findings and tables say what the records hold, and no more."""

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import claimed
import peer_records
import pytest
import records as make
from cells import column
from drawn_studies import STUDIES
from scaled_records import exchanged
from setups import setup

from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.explain import findings, phrases, show, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import plain
from ddpm_lab.plan import LEVERS, OURS
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer, ask, questions
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")
BASE = RunConfig(global_batch_size=8)


def amp(ratio: float = 1.62, **values: Any) -> Study:
    return make.study(make.sets({"bf16": (BF16, ratio)}, **values))


GOLDEN: dict[str, Callable[[], Study]] = {
    "amp": lambda: amp(failures={"fp16": (RunConfig(seed=9), "oom", "90 GiB asked")}, crowded=[(0, 0), (0, 1)]),
    "batch_size": STUDIES["batch sizes"],
    "claims": lambda: claimed.study([*claimed.sets(), *claimed.wrong()]),
    "exchange": lambda: make.study(exchanged(1.25)),
    "multi_gpu": STUDIES["strong and weak, two CPU ranks"],
    "nothing": STUDIES["nothing"],
    "peers": lambda: peer_records.WHOLE,
    "profile": lambda: make.study([make.time_budget()], "profile"),
    "quality": STUDIES["quality"],
    "recommendation": STUDIES["recommendation"],
    "recommendation_searched": STUDIES["recommendation, searched"],
    "torch_compile": STUDIES["compiled, costs"],
    "workers": STUDIES["loader"],
}


def test_bf16_is_told_beside_tf32_which_torch_uses_anyway() -> None:
    """From the sets that have both: a format can be faster than fp32 and slower than what runs without a word."""
    quiet: dict[str, Any] = {"set_noise": 1e-4, "turn_noise": 1e-4}
    both = make.sets({"bf16": (BF16, 1.2), "tf32": (RunConfig(device="cuda", precision="tf32"), 1.5)}, **quiet)
    told = " ".join(answer(make.study(both)).finding.notes)
    assert "unless told otherwise, 1.50 (" in told
    assert "bf16 beside tf32: 0.80 (" in told
    as_baseline = amp(baseline=RunConfig(device="cuda", precision="tf32"), baseline_label="tf32")
    for other in (amp(), as_baseline):
        assert "tf32" not in " ".join(answer(other).finding.notes)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_question_is_shown_as_before(name: str, request: pytest.FixtureRequest, capsys: Any) -> None:
    """Finding and table of a fixed study; ``pytest --update-golden`` accepts a change: read its diff."""
    study = GOLDEN[name]()
    show.finding(answer(study))
    show.table(answer(study))
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    known = Path(__file__).parent / "data" / "findings" / f"{name}.txt"
    assert "nan" not in shown
    if request.config.getoption("--update-golden"):
        known.parent.mkdir(exist_ok=True)
        known.write_text(shown)
    assert shown == known.read_text()


def failed(role: str, config: RunConfig = BF16, **values: Any) -> RunRecord:
    reason = {"status": "crashed", "reason": "the reason"}
    return make.record(config, role=role, label="bf16", baseline_id=RunConfig().run_id, **reason | values)


@pytest.mark.parametrize(
    "records",
    [
        make.sets({}, failures={"fp16": (BF16, "oom", "the reason")}),
        [failed("baseline", RunConfig()), failed("candidate")],
        [failed("cold", RunConfig(compile="whole"))],
        [failed("profile", experiment="profile")],
    ],
)
def test_a_failure_is_told_with_its_reason(records: list[RunRecord]) -> None:
    found = answer(make.study(records)).finding
    assert found.status == findings.FAILED
    assert any("the reason" in note for note in found.notes)


def test_a_mechanism_is_named_and_its_speed_is_not() -> None:
    ranks = {"4 ranks": (RunConfig(world_size=4, oversubscribe=True), 1.77)}
    records = make.sets(ranks, experiment="multi_gpu", mechanism_only=["4 ranks"])
    first = next(r for r in records if r.label == "4 ranks")
    once = replace(first, status="crashed", reason="the reason", windows=(), set_id="before")
    shown = answer(make.study([once, *records]))
    assert shown.finding.status == MECHANISM_ONLY
    assert "4 ranks" in shown.finding.headline
    assert MECHANISM_ONLY in plain(shown.table())
    assert "1.7" not in shown.finding.claim + plain(shown.table())


# --- headlines and commands ---


def rows(study: Study) -> list[Comparison]:
    return [c for c in comparisons(study) if c.role == "candidate"]


def row(ratio: float, baseline: RunConfig = BASE, label: str = "bf16", **values: Any) -> Comparison:
    """The comparison of bf16 with fp32, with a planted ratio."""
    bf16 = replace(baseline, precision="bf16")
    return rows(make.study(make.sets({label: (bf16, ratio)}, baseline=baseline, **values)))[0]


def test_the_answer_is_about_the_primary_comparison_with_all_cores_where_there_is_one() -> None:
    bf16, one = replace(BASE, precision="bf16"), replace(BASE, threads=1)
    both = {"bf16": (bf16, 1.1), "compiled": (replace(BASE, compile="whole"), 3.0)}
    assert findings.lead(rows(make.study(make.sets(both, baseline=BASE)))).label == "bf16", "however fast others are"
    none = make.study(make.sets(both, baseline=BASE, primary=""))
    assert findings.lead(rows(none)).label == "compiled", "the fastest where no comparison is primary"
    some = make.sets({"bf16": (replace(bf16, threads=1), 0.7)}, baseline=one, family="1 of 2 cores")
    for ratio, noise, threads in ((1.3, 0.005, 0), (1.0, 0.1, 1)):
        every = make.sets({"bf16": (bf16, ratio)}, baseline=BASE, family="2 cores", set_noise=noise, seed=1)
        assert findings.lead(rows(make.study([*some, *every]))).config.threads == threads


def test_a_way_out_is_the_command_that_would_answer() -> None:
    reached = replace(row(1.0, set_noise=0.002), verdict=stats.INCONCLUSIVE)
    sides = row(1.6, label="my side", baseline_label="main", experiment="compare", count=2)
    ranks: dict[str, Any] = {"experiment": "multi_gpu", "count": 2}
    large = row(1.6, RunConfig(image_size=64, network="seed", global_batch_size=32), count=2)
    own = RunConfig(workload=OWN, options=(("make", "mine:make"), ("number_format", "own")), global_batch_size=8)
    a_step = "ddpm-lab run bottleneck --network tiny --batch-size 8 --precision fp32 --loader packed --compile off"
    two = rows(make.study(make.sets({"2 ranks": (replace(own, world_size=2), 1.6)}, baseline=own, **ranks)))[0]
    for found, command in (
        (row(1.6), ""),
        (row(1.6, count=2), "ddpm-lab run amp --batch-size 8"),
        (reached, "ddpm-lab run amp --batch-size 8"),  # a resolution that is reached asks for nothing
        (sides, "ddpm-lab compare main 'my side'"),
        (replace(reached, experiment="compare"), "ddpm-lab compare fp32 bf16 --resolution 1.5%"),  # where it has ended
        (replace(reached, experiment="bottleneck"), f"{a_step} --only bf16"),  # which adds sets
        (row(1.6, experiment="bottleneck", count=2), f"{a_step} --only bf16 --resolution 2%"),
        (large, "ddpm-lab run amp --network seed --image-size 64 --data DATA --batch-size 32"),
        (row(1.6, replace(BASE, device="cuda"), count=2), "ddpm-lab run amp --network tiny --batch-size 8"),
        (row(1.6, replace(BASE, seed=3), count=2), "ddpm-lab run amp --seed 3 --batch-size 8"),
        (row(1.6, replace(BASE, network="seed"), experiment="peers", count=2), "ddpm-lab run peers --batch-size 8"),
        (row(1.6, experiment="quality", count=2), "ddpm-lab run quality --batch-size 8"),
        (two, "ddpm-lab run multi_gpu --workload mine:make --batch-sizes 8 --world-sizes 2"),
    ):
        shown = make.study(make.sets({}, data_name="1 of my images" if found is large else "synthetic images"))
        assert findings.way_out_of(shown, found) == command
    assert " --resolution 3% (about " in findings.way_out_of(amp(), row(1.0, set_noise=0.03))


def test_a_command_names_the_cpu_of_a_machine_with_gpus_and_the_folder_whose_records_it_goes_on_with() -> None:
    here = make.study(make.on(make.GPUS, make.sets({"bf16": (BF16, 1.6)}, count=2)))
    there = replace(here, output_dir=Path("my results"))
    for study, words in ((here, ""), (replace(there, published=True), ""), (there, "--output-dir 'my results' ")):
        assert answer(study).finding.way_out == f"ddpm-lab run amp --device cpu {words}--batch-size 32"
        assert f"--batch-size 32 --device cpu {words}--precision" in findings.command_of_step(study, RunConfig())
    assert "--device" not in findings.command_of_step(here, RunConfig(device="cuda")), "that is the usual one there"


def test_a_command_names_images_where_they_were_ones_own(tmp_path: Path) -> None:
    mine = make.sets({"2 workers": (RunConfig(data_sha256="ab"), 1.0)}, baseline=RunConfig(data_sha256="ab", seed=1))
    both = [*make.sets({"bf16": (BF16, 1.6)}, count=2), *(replace(r, data_name="1 of my images") for r in mine)]
    gone, here = (replace(mine[0].config, data=str(tmp_path / name)) for name in ("deleted", "my images"))
    Path(here.data).mkdir()
    found = [findings.where_of(make.study(both), config) for config in (BF16, mine[0].config, gone, here)]
    assert found == [[], ["--data", "DATA"], ["--data", "DATA"], ["--data", f"'{here.data}'"]]


def test_of_several_networks_a_headline_names_its_own() -> None:
    seed = RunConfig(network="seed")
    other = make.sets({"bf16": (replace(seed, precision="bf16"), 1.8)}, baseline=seed, family="seed, batch 32, 1 rank")
    both = make.study([*make.sets({"bf16": (BF16, 0.58)}), *other])
    assert answer(both).finding.headline.endswith("slower than fp32 (tiny, batch 32, 1 rank)")
    assert answer(amp()).finding.headline.endswith("than fp32")
    changes = [replace(r, experiment="bottleneck", primary=False) for r in both.records]
    headline = answer(make.study(changes)).finding.headline
    assert headline == "bf16 is 80 % faster than fp32 (seed, batch 32, 1 rank)", "and not 0.58 of the other"


def test_on_a_machine_with_gpus_an_answer_is_theirs_and_one_of_the_cpu_says_so() -> None:
    """Whichever was measured first."""
    gpu, two = RunConfig(device="cuda"), {"bf16": (BF16, 0.8)}
    cpu = make.on(make.GPUS, make.sets(two))
    both = [*cpu, *make.on(make.GPUS, make.sets({"bf16": (replace(BF16, device="cuda"), 1.5)}, baseline=gpu, seed=1))]
    for records, ratio, end in ((cpu, 0.8, " on the CPU"), (both, 1.5, " (tiny, batch 32, 1 rank (device cuda))")):
        found = answer(make.study(records)).finding
        assert found.ratio == pytest.approx(ratio, rel=0.02)
        assert found.headline.endswith(f"than fp32{end}")


def asked_otherwise() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every question whose command names its comparison, with each option that several have at another value."""
    others = {"global_batch_size": 48, "precision": "bf16", "world_size": 2, "world_sizes": [2]}
    for name in sorted(questions().keys() - {"bottleneck", "claims", "peers", "profile", "quality"}):
        taken = inspect.signature(questions()[name]).parameters
        yield from ((name, "quick", {option: value}) for option, value in others.items() if option in taken)


@pytest.mark.parametrize(
    ("name", "preset", "grid"),
    [
        ("amp", "full", {}),
        ("amp", "quick", {"world_sizes": [2], "global_batch_size": 64}),
        ("batch_size", "full", {"precision": "bf16", "world_size": 2}),
        ("exchange", "quick", {"world_sizes": [4], "precision": "bf16"}),
        ("multi_gpu", "quick", {"precision": "bf16", "loader_workers": 2}),
        ("multi_gpu", "quick", {"scaling": "weak", "world_sizes": [8], "global_batch_sizes": [4]}),
        ("torch_compile", "full", {}),
        ("workers", "full", {"precisions": ["bf16"]}),
        ("workers", "quick", {"worker_counts": [1, 2]}),
        *asked_otherwise(),
    ],
)
def test_the_command_of_a_page_measures_the_comparison_that_it_is_about(
    name: str, preset: str, grid: dict[str, Any]
) -> None:
    """With no preset, and nothing else of what was typed before."""
    family = ask(name, setup(preset, cores=8), **grid).families[0]
    primary = family.primary or family.candidates[0][0]
    named: dict[str, Any] = {"family": family.name, "primary": primary, "experiment": name, "count": 2}
    sides = {label: (config, 1.0) for label, config in family.candidates}
    asked = answer(make.study(make.sets(sides, baseline=family.baseline, **named))).finding.way_out
    words = shlex.split(asked.removeprefix(f"ddpm-lab run {name} "))
    typed = {option[2:].replace("-", "_"): value for option, value in zip(words[::2], words[1::2], strict=True)}
    again = {n.replace("batch", "global_batch"): _value(v, several=n in SEVERAL) for n, v in typed.items()}
    measured = ask(name, setup("quick", cores=8), **again).families
    wanted = (family.baseline.run_id, dict(family.candidates)[primary].run_id)
    assert wanted in {(f.baseline.run_id, config.run_id) for f in measured for _, config in f.candidates}


@pytest.mark.parametrize("name", ["nothing", "claims"])
def test_no_command_is_advised_without_the_output_folder(name: str) -> None:
    """One that lacks options which were typed would measure something else, elsewhere."""
    shown = replace(GOLDEN[name](), output_dir=Path("/else/where"))
    told = answer(shown)
    texts = [told.finding.claim, *(cell for row in told.table() for cell in row.values())]
    commands = [text for text in texts if "ddpm-lab run" in text]
    assert all("ddpm-lab run --output-dir /else/where " in text for text in commands)
    assert bool(commands) == (name == "claims")


SEVERAL = {"batch_sizes", "world_sizes", "precisions", "worker_counts"}


def _value(typed: str, *, several: bool) -> Any:
    values = [int(v) if v.isdigit() else v for v in typed.split(",")]
    return values if several else values[0]


def test_a_trial_that_fails_is_told_with_its_reason() -> None:
    _, trial, *_ = make.trials({"bf16": (RunConfig(precision="bf16"), 0.0)})
    failed = replace(trial, status="refused", reason="it loaded helper", quality=None)
    shown = replace(make.study(make.sets({})), trials=(failed,))
    assert findings.untrained(shown) == f"Not trained as planned: {trial.label} (refused: it loaded helper)."
    assert not findings.untrained(replace(shown, trials=(failed, trial))), "another try went well"


def test_levers_are_shown_apart_and_other_networks_as_families() -> None:
    ours, family, common, whole = peer_records.OWN, peer_records.FAMILY, peer_records.COMMON, peer_records.WHOLE
    change = {"NCHW": (replace(ours, channels_last=False), 0.9)}
    rows = make.sets(change, baseline=ours, family=family + LEVERS, count=9, **common)
    small = replace(ours, network="ddpm", global_batch_size=8)
    rival = {"slow": (replace(small, workload="peer:a"), 0.5)}
    there = make.sets(rival, baseline=small, baseline_label=OURS, family="ddpm, batch 8", count=7, **common)
    both = peer_records.study(*whole.records, *rows, *there)
    assert "NCHW" not in {r.label for r in peers.other_trainers(both)}
    assert answer(both).finding.ratio == answer(whole).finding.ratio, "of the network that its evidence is about"
    (lever,) = (c for c in comparisons(both) if c.label == "NCHW")
    assert findings.command_of(both, lever) == "ddpm-lab run peers --batch-size 32 --parts levers"
    (levers,) = (rows for caption, rows in answer(both).tables() if caption.startswith("What each setting"))
    assert column(levers, "Configuration")[-1] == "NCHW"
    families = ["ddpm, batch 8", family, family + peers.BOTH_FP32]
    own = [row for row in answer(both).table() if row["Configuration"] == f"{OURS} (baseline)"]
    assert sorted(row["Family"] for row in own) == families
    assert len(answer(both).figure().axes) == len(families)
    alone = answer(peer_records.study(*(r for r in both.records if r.family.endswith(LEVERS)))).finding
    assert (alone.status, alone.verdict) == ("answered", "slower"), "asked for alone, the levers are the answer"


def test_a_headline_says_how_much_faster_or_slower() -> None:
    exact: dict[str, Any] = {"set_noise": 0.0, "turn_noise": 1e-4}
    for ratio, headline in (
        (0.74, "bf16 is 26 % slower than fp32"),
        (2.3, "bf16 is 2.3 times as fast as fp32"),
        (120.0, "bf16 is 120 times as fast as fp32"),
        (0.004, "bf16 is 0.0040 times as fast as fp32"),
        (1.0, "bf16 is as fast as fp32, within 3 %"),
    ):
        assert findings.headline_of(row(ratio, **exact)) == headline
        assert findings.headline_of(row(ratio, replace(BASE, threads=1), **exact)) == f"{headline} on 1 core"
    wide = row(1.0, set_noise=0.04)
    assert all(phrases.difference(end) in findings.headline_of(wide) for end in wide.ratio.ends)
    assert "(3)" in findings.headline_of(row(1.6, count=3))
    found = make.sets({"mine": (BF16, 1.5)}, experiment="compare", baseline_label="main")
    assert answer(make.study(found)).finding.headline.startswith("mine is"), "as its owner wrote it"
