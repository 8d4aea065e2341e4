"""The questions: which configurations answer them, on which machine, and what is left out or refused."""

import dataclasses
from typing import Any

import pytest
from setups import IMAGES, MACHINES
from setups import machine_setup as setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import LOADER_ALONE, PRECISIONS
from ddpm_lab.declared import options
from ddpm_lab.plan import PRESETS, Experiment, Family, scaling
from ddpm_lab.questions.amp import amp
from ddpm_lab.questions.ask import ask, questions
from ddpm_lab.questions.batch_size import batch_size
from ddpm_lab.questions.bottleneck import SIZES
from ddpm_lab.questions.multi_gpu import multi_gpu
from ddpm_lab.questions.profile import profile
from ddpm_lab.questions.torch_compile import torch_compile
from ddpm_lab.questions.workers import workers


def labels(experiment: Experiment) -> list[list[str]]:
    """Baseline and candidates of each family that answers the question."""
    shown = [f for f in experiment.families if not f.together]
    return [[f.baseline_label, *(label for label, _ in f.candidates)] for f in shown]


def batches(experiment: Experiment) -> list[int]:
    """Global batch size of each family that answers the question."""
    return [f.baseline.global_batch_size for f in experiment.families if not f.together]


def of_kind(experiment: Experiment, kind: str) -> tuple[Family, ...]:
    """Families of one kind of scaling."""
    return tuple(f for f in experiment.families if scaling(f.name) == kind)


def members(family: Family) -> list[Any]:
    """All configurations of a family."""
    return [family.baseline, *(c for _, c in family.candidates)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", questions())
def test_every_default_grid_can_run_and_compares_like_with_like(name: str, preset: str) -> None:
    for machine in MACHINES:
        here = setup(machine, preset)
        experiment = questions()[name](here)
        assert experiment.name == name
        assert experiment.families or experiment.profiles
        names = [f.name for f in experiment.families]
        assert len(set(names)) == len(names)
        assert all(family in names for family, _, _ in experiment.left_out)
        for family in experiment.families:
            ids = [config.run_id for config in members(family)]
            assert len(set(ids)) == len(ids), "a candidate is the baseline, or there twice"
            if scaling(family.name) == "weak":
                assert len({config.rank_batch_size for config in members(family)}) == 1
            # Equal images in batches of several sizes: trained, or as large as a rank's.
            elif name != "quality" and not family.together:
                varies = name == "batch_size" or family.name.endswith(SIZES)
                assert (len({config.global_batch_size for config in members(family)}) > 1) == varies
            assert len({family.baseline_label, *(label for label, _ in family.candidates)}) == len(ids)
            for config in members(family):
                assert (config.data_sha256, config.seed, config.oversubscribe) == ("abc", 0, False)
                assert config.world_size <= (here.gpus if config.device == "cuda" else here.usable_cores)
                assert config.loader_workers <= here.usable_cores
                assert config.device == here.device or family.mechanism


# --- several ranks ---------------------------------------------------------------------------------------------------


def test_multi_gpu_grids() -> None:
    powers = [2**k for k in range(7)]
    for machine, preset, sizes, ranks in (
        ("2 cores", "smoke", [16], [1, 2]),
        ("64 cores", "quick", [16, 32], [1, 2]),
        ("64 cores", "full", [32, 64, 128, 256, 512], powers),
        ("8 GPUs", "full", [32, 64, 128, 256, 512], powers[:4]),
    ):
        experiment = multi_gpu(setup(machine, preset))
        strong, weak = of_kind(experiment, "strong"), of_kind(experiment, "weak")
        assert [f.baseline.global_batch_size for f in strong] == sizes
        assert [f.baseline.global_batch_size for f in weak] == {"smoke": [], "quick": sizes[:1], "full": sizes}[preset]
        left_out = [(name, label) for name, label, _ in experiment.left_out]
        assert left_out == ([("tiny, batch 32", "64 ranks")] if (machine, preset) == ("64 cores", "full") else [])
        for family in (*strong, *weak):
            missing = {64} if (family.name, "64 ranks") in left_out else set()
            assert [c.world_size for c in members(family)] == [n for n in ranks if n not in missing]


def test_one_device_measures_one_rank_and_says_why_not_two() -> None:
    experiment = multi_gpu(setup("1 core"))
    assert labels(experiment) == [["1 rank"], ["1 rank"]]
    assert [row[:2] for row in experiment.left_out] == [(f"tiny, batch {n}", "2 ranks") for n in (16, 32)]
    over = multi_gpu(setup("1 core", oversubscribe=True), scaling="strong")
    assert labels(over) == [["1 rank", "2 ranks"]] * 2
    assert [c.oversubscribe for c in members(over.families[0])] == [False, True]
    # One GPU is never shared: the mechanism is shown on the CPU.
    *on_gpu, mechanism = multi_gpu(setup("1 GPU", network="ddpm"), precision="tf32").families
    assert labels(multi_gpu(setup("1 GPU")))[:2] == [["1 GPU"]] * 2
    assert not any(f.candidates or f.mechanism for f in on_gpu)
    assert mechanism.mechanism
    assert [(c.device, c.world_size, c.network, c.precision) for c in members(mechanism)] == [
        ("cpu", 1, "tiny", "fp32"),
        ("cpu", 2, "tiny", "fp32"),
    ]
    assert not any(f.mechanism for m in ("8 GPUs", "2 cores") for f in multi_gpu(setup(m)).families)


def test_ranks_asked_for_by_name_are_measured_or_refused() -> None:
    three = multi_gpu(setup("8 GPUs"), world_sizes=[8, 3, 3], global_batch_sizes=[48], scaling="strong")
    assert labels(three) == [["1 GPU", "3 GPUs", "8 GPUs"]]
    over = multi_gpu(setup(oversubscribe=True), world_sizes=[2, 4])
    assert [c.oversubscribe for c in members(over.families[0])] == [False, False, True]
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("64 cores", {"world_sizes": [1, 3], "global_batch_sizes": [32]}, "32 cannot be shared by 3 ranks"),
        ("8 GPUs", {"world_sizes": [9]}, "9 ranks need 9 GPUs, this machine has 8"),
        ("2 cores", {"world_sizes": [4]}, r"4 CPU ranks need 4 cores, 2 are usable here.*oversubscribe"),
    ]
    for here, grid, words in refused:
        with pytest.raises(ConfigError, match=words):
            ask("multi_gpu", setup(here), **grid)


# --- precision, workers, compiling, batch sizes, profiles -------------------------------------------------------------


def test_amp_grids() -> None:
    for preset in PRESETS:
        assert labels(amp(setup("8 GPUs", preset))) == [["fp32", "bf16", "fp16", "tf32"]] * (1 + (preset == "full"))
    assert [f.baseline.world_size for f in amp(setup("8 GPUs", "full")).families] == [1, 8]
    assert [batches(amp(setup(machine))) for machine in ("8 GPUs", "2 cores")] == [[128], [8]]
    assert batches(amp(setup("2 cores", "full"))) == [128, 128]
    on_cpu = amp(setup())
    assert labels(on_cpu) == [["fp32", "bf16"]]
    assert [label for _, label, _ in on_cpu.left_out] == ["tf32", "fp16"]
    large = amp(setup(images=dataclasses.replace(IMAGES, image_size=64)))
    assert large.families[0].name == "tiny, batch 8, 64x64 pixels, 1 rank"


def test_a_batch_is_rounded_up_to_what_the_ranks_can_share_unless_it_was_given() -> None:
    assert batches(amp(setup("8 GPUs"), world_sizes=[6])) == [132]
    assert batches(amp(setup("8 GPUs"), world_sizes=[1, 6], global_batch_size=60)) == [60, 60]
    with pytest.raises(ConfigError, match=r"global_batch_size 64 cannot be shared by 6 ranks.*multiple of 6"):
        amp(setup("8 GPUs"), world_sizes=[6], global_batch_size=64)


def test_workers_grids() -> None:
    """Without workers first; the most workers right after, since they say most where time is short."""
    for machine, preset, expected in (
        ("1 core", "quick", [0, 1]),
        ("2 cores", "smoke", [0, 1]),
        ("2 cores", "quick", [0, 2, 1]),
        ("64 cores", "full", [0, 20, 1, 2, 4, 8, 12, 16]),
    ):
        experiment = workers(setup(machine, preset))
        alone = [f for f in experiment.families if f.name.startswith("loader alone, ")]
        training = [f for f in experiment.families if f.name.startswith("training, ")]
        assert [*training, *alone] == list(experiment.families)
        assert len(alone) == (preset != "quick")  # which keeps its time for the questions with a verdict
        for family in experiment.families:
            assert [c.loader_workers for c in members(family)] == expected
            assert {(c.loader, c.workload == LOADER_ALONE) for c in members(family)} == {("files", family in alone)}
        assert [f.baseline.precision for f in training] == (["fp32", "bf16"] if preset == "full" else ["fp32"])
    for limited, kind in ((False, "usable"), (True, "free")):
        left_out = workers(setup("1 core", limited=limited)).left_out
        assert {row[1:] for row in left_out} == {("2 workers", f"more than the 1 {kind} core")}
    assert labels(workers(setup(), worker_counts=[1, 2, 2])) == [["1 worker", "2 workers"]]


def test_torch_compile_grids() -> None:
    for machine in MACHINES:
        for preset in PRESETS:
            here = setup(machine, preset)
            experiment = torch_compile(here)
            ways = ["eager", "compiled", *(["compiled block by block"] if preset == "full" else [])]
            assert labels(experiment) == [ways] * len(experiment.families)
            worlds = [f.baseline.world_size for f in experiment.families]
            assert worlds == (sorted({1, here.most_ranks}) if preset == "full" else [1])
            for family in experiment.families:
                eager, *compiled = members(family)
                assert eager.precision == "bf16"
                hows = ("whole", "regional")[: len(ways) - 1]
                assert compiled == [dataclasses.replace(eager, compile=how) for how in hows]
                assert eager.loader_workers == (min(4, here.usable_cores) if preset == "full" else 0)


def test_batch_size_grids() -> None:
    for machine, preset, count, first, most in (
        ("2 cores", "smoke", 2, 8, 32),
        ("2 cores", "full", 5, 32, 1024),
        ("1 GPU", "quick", 5, 128, 65_536),
        ("8 GPUs", "full", 8, 32, 65_536),
    ):
        (family,) = batch_size(setup(machine, preset)).families
        assert [c.global_batch_size for c in members(family)] == [first * 2**i for i in range(count)]
        assert family.search_up_to == most
        # Nothing but the batch differs, so that all sizes share what one search has found.
        assert all(c.differences(family.baseline).keys() <= {"global_batch_size"} for c in members(family))
    (asked,) = batch_size(setup(), global_batch_sizes=[2000, 24, 24]).families
    assert ([c.global_batch_size for c in members(asked)], asked.search_up_to) == ([24, 2000], 2000)
    (three,) = batch_size(setup("8 GPUs"), world_size=3, precision="bf16").families
    assert all(c.global_batch_size % 3 == 0 for c in members(three))


def test_a_profile_supplies_no_speed() -> None:
    experiment = profile(setup("8 GPUs"), world_size=2, precision="tf32", global_batch_size=64)
    assert experiment.families == ()
    ((family, label, config),) = experiment.profiles
    assert (family, label) == ("tiny, batch 64, 2 GPUs", "tf32, 2 GPUs")
    assert (config.purpose, config.world_size, config.precision) == ("profile", 2, "tf32")


# --- refusals, primary comparisons, free cores ------------------------------------------------------------------------


def test_a_parameter_says_what_it_may_be_also_where_it_may_be_none() -> None:
    for function, optional in ((profile, False), (torch_compile, True)):
        found = options(function)["precision"]
        assert (found.kind, found.opt.choices, found.default is None) == (str, PRECISIONS, optional)


@pytest.mark.parametrize(
    ("name", "grid", "words"),
    [
        ("profile", {"world_size": 0}, ["world_size", "0", "at least 1"]),
        ("profile", {"precision": "fp16"}, ["'fp16'", "CUDA"]),
        ("profile", {"global_batch_size": 15, "world_size": 2}, ["15", "2 ranks"]),
        ("multi_gpu", {"world_sizes": 2}, ["world_sizes", "2", "list"]),
        ("multi_gpu", {"global_batch_sizes": [16, -4]}, ["global_batch_sizes", "-4", "at least 1"]),
        ("amp", {"precisions": ["fp7"]}, ["precisions", "'fp7'", "fp32, tf32, fp16, bf16"]),
        ("amp", {"global_batch_size": "16"}, ["global_batch_size", "'16'"]),
        ("workers", {"precisions": ["fp16"]}, ["precisions", "'fp16'", "fp32, bf16"]),
        ("batch_size", {"global_batch_sizes": [3], "world_size": 2}, ["3", "2 ranks"]),
        ("torch_compile", {"loader_workers": -1}, ["loader_workers", "-1", "at least 0"]),
        ("torch_compile", {"loader_workers": 3}, ["loader_workers", "3", "2 cores"]),
    ],
)
def test_wrong_values_are_refused_in_a_sentence(name: str, grid: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ask(name, setup(), **grid)
    assert "\n" not in str(refusal.value)
    assert not [word for word in words if word not in str(refusal.value)]


def test_a_question_has_one_primary_comparison() -> None:
    rows: list[tuple[str, str, str, dict[str, Any], str]] = [
        ("amp", "8 GPUs", "full", {}, "bf16"),
        ("multi_gpu", "2 cores", "quick", {}, "2 ranks"),
        ("multi_gpu", "8 GPUs", "full", {}, "8 GPUs"),
        ("workers", "64 cores", "full", {}, "2 workers"),
        ("workers", "64 cores", "quick", {"worker_counts": [0, 4, 8]}, "8 workers"),
        ("torch_compile", "2 cores", "full", {}, "compiled"),
        ("batch_size", "2 cores", "quick", {}, "batch 32"),
        ("exchange", "2 cores", "quick", {}, "bf16 hook"),
    ]
    for name, machine, preset, grid, primary in rows:
        first, *others = ask(name, setup(machine, preset), **grid).families
        assert first.primary == primary
        assert [label for label, _ in first.candidates].count(primary) == 1
        assert not any(f.primary for f in others)
    for name in ("multi_gpu", "workers"):  # one that needs more cores is left out, and not replaced
        experiment = ask(name, setup("1 core", limited=True))
        assert experiment.families[0].primary not in dict(experiment.families[0].candidates)
        assert all("free" in reason for _, _, reason in experiment.left_out)


def test_configurations_for_free_cores_say_their_threads() -> None:
    here = setup("64 cores", usable_cores=3, limited=True)
    assert [here.config(world_size=n, global_batch_size=n).threads for n in (1, 2, 3)] == [3, 1, 1]
    assert setup("64 cores").config().threads == 0, "all that there are"
    assert setup("8 GPUs", limited=True).config().threads == 0
    with pytest.raises(ConfigError, match="1 are free, since other processes take the rest"):
        amp(setup("1 core", limited=True), world_sizes=[2])
