"""The questions: which configurations answer them, on which machine, and what is left out or refused."""

from typing import Any

import pytest
from setups import MACHINES
from setups import machine_setup as setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.plan import PRESETS, Experiment, Family, scaling
from ddpm_lab.questions.ask import ask, questions
from ddpm_lab.questions.bottleneck import SIZES
from ddpm_lab.questions.multi_gpu import multi_gpu


def labels(experiment: Experiment) -> list[list[str]]:
    """Baseline and candidates of each family that answers the question."""
    shown = [f for f in experiment.families if f.primary or not f.together]
    return [[f.baseline_label, *(label for label, _ in f.candidates)] for f in shown]


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
            assert not family.primary or family.primary in dict(family.candidates), "the answer is about one of them"
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


def test_one_device_measures_one_rank_and_says_why_not_two() -> None:
    experiment = multi_gpu(setup("1 core"))
    assert labels(experiment) == [["1 rank"], ["1 rank"]]
    assert [row[:2] for row in experiment.left_out] == [(f"tiny, batch {n}", "2 ranks") for n in (16, 32)]
    # One GPU is never shared: the mechanism is shown on the CPU.
    *on_gpu, mechanism = multi_gpu(setup("1 GPU", network="ddpm"), precision="tf32").families
    assert labels(multi_gpu(setup("1 GPU")))[:2] == [["1 GPU"]] * 2
    assert not any(f.candidates or f.mechanism for f in on_gpu)
    assert mechanism.mechanism
    assert [(c.device, c.world_size, c.network) for c in members(mechanism)] == [("cpu", n, "tiny") for n in (1, 2)]


# --- refusals, primary comparisons, free cores ------------------------------------------------------------------------

ONE_CELL: dict[str, list[Any]] = {
    **{"precision": ["fp32"], "memory": ["nchw"], "compile": ["off"], "freed_memory": ["default"]},
    **{"ranks": [1], "loader": ["packed"], "batch": [8]},
}


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
        ("torch_compile", {"loader_workers": 3}, ["loader_workers", "3", "2 cores"]),
        ("bottleneck", {"precison": "bf16"}, ["precision"]),
        ("bottleneck", {"workload": "mine:step"}, ["workload is 'mine:step'"]),
        ("bottleneck", {"only": ["bf17"]}, ["only is 'bf17'"]),
        ("search", {"only": {"speed": ["all"]}}, ["only is 'speed'"]),
        ("search", {"only": {"precision": ["fp16"]}}, ["only precision has 'fp16'"]),
        ("search", {"only": {"memory": "nchw"}}, ["give a list"]),
        ("search", {"only": ["precision"]}, ["only is"]),
        ("search", {"only": ONE_CELL}, ["nothing is left"]),
        ("amp", {"seeds": -1}, ["seeds", "-1"]),
        ("amp", {"images": 400}, ["images", "400", "seeds"]),
        ("multi_gpu", {"seeds": 2, "images": 16, "global_batch_sizes": [64]}, ["images", "16", "64"]),
        ("workers", {"seeds": 8}, ["seeds", "8", "workers", "amp"]),
    ],
)
def test_wrong_values_are_refused_in_a_sentence(name: str, grid: dict[str, Any], words: list[str]) -> None:
    here = setup(network=grid.pop("network", "tiny"))
    with pytest.raises(ConfigError) as refusal:
        ask(name, here, **grid)
    assert "\n" not in str(refusal.value)
    assert not [word for word in words if word not in str(refusal.value)]
