"""The question: the configuration asked about is the baseline of everything, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import records as make
from setups import setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure.held import Held
from ddpm_lab.plan import Experiment
from ddpm_lab.questions.ask import ask
from ddpm_lab.questions.bottleneck import bottleneck, check_memory, fitting
from ddpm_lab.record import RunRecord


def test_the_present_settings_are_profiled_and_are_every_baseline() -> None:
    found = bottleneck(setup(), global_batch_size=16, loader="files", loader_workers=1, precision="bf16")
    ((_, _, profile),) = found.profiles
    assert len(found.families) == 2
    for family in found.families:
        assert family.baseline.differences(profile).keys() == {"purpose"}
        assert (family.baseline.loader, family.baseline.precision) == ("files", "bf16")


def labels(found: Experiment) -> list[str]:
    return [label for family in found.families for label, _ in family.candidates]


def test_smoke_measures_a_few_changes_and_names_choose() -> None:
    assert len(labels(bottleneck(setup("smoke")))) == 4
    assert labels(bottleneck(setup(), only=["batch 64", "bf16"])) == ["bf16", "batch 64"]
    assert len(labels(bottleneck(setup()))) > 6


def test_a_compile_that_takes_the_time_of_all_is_left_out_with_the_reason() -> None:
    asked = bottleneck(setup(), only=["bf16", "compiled", "batch 64"])
    short = fitting(asked, 120, Held())
    assert labels(short) == ["bf16", "batch 64"]
    ((family, label, reason),) = short.left_out
    assert (family, label) == (asked.families[0].name, "compiled")
    assert reason == "does not fit into the time: its cold compile takes about 60 s"
    assert fitting(asked, 600, Held()) == asked
    compiled = dict(asked.families[0].candidates)["compiled"]
    slow = make.record(
        replace(compiled, seed=1), role="cold", label="x", compile_cache="cold", stages={"compile": 150.0, "start": 1.0}
    )
    assert labels(fitting(asked, 290, Held([slow]))) == ["bf16", "batch 64"], "this machine was seen to take longer"
    assert fitting(asked, 120, Held([replace(slow, config=compiled)])) == asked, "it is compiled already"


def test_a_batch_beyond_the_memory_is_refused_in_a_sentence() -> None:
    """By its images alone, or by a line through the peaks of smaller batches: 1 GiB, and 64 MiB for an image."""
    config = setup().config(global_batch_size=99_999_999, world_size=1)
    with pytest.raises(
        ConfigError, match=r"^global_batch_size is 99,999,999: .* the machine has 8.0 GiB; give a"
    ) as no:
        check_memory(config, (), available_bytes=8 * 2**30, where="the machine")
    assert "\n" not in str(no.value)

    def peak(batch: int, **other: Any) -> RunRecord:
        rank = replace(make.rank_record(0), peak_rss_bytes=2**30 + batch * 2**26)
        return make.record(replace(config, global_batch_size=batch, **other), ranks=(rank,))

    known = [peak(8), peak(32), peak(64, seed=1)]
    for batch, fits in ((64, True), (111, True), (113, False)):
        asked = replace(config, global_batch_size=batch)
        check_memory(asked, known[:1], available_bytes=8 * 2**30, where="the machine")
        if fits:
            check_memory(asked, known, available_bytes=8 * 2**30, where="the machine")
        else:
            with pytest.raises(ConfigError, match=r"needs at least about 8\.1 GiB"):
                check_memory(asked, known, available_bytes=8 * 2**30, where="the machine")


def test_compiles_share_the_time() -> None:
    asked = bottleneck(setup(), compile="whole", only=["bf16", "eager", "batch 16", "batch 32"])
    assert labels(fitting(asked, 200, Held())) == ["bf16", "eager"]
    assert labels(fitting(asked, 300, Held())) == ["bf16", "eager", "batch 16"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precison": "bf16"}, ["'precison'", "precision"]),
        ({"workload": "mine:step"}, ["workload", "'mine:step'", "leave it out"]),
        ({"loader": "files", "loader_workers": 9}, ["loader_workers", "9", "2 cores"]),
        ({"world_size": 3}, ["3 CPU ranks"]),
        ({"only": ["bf17"]}, ["only", "'bf17'", "batch 64"]),
        ({"only": []}, ["only", "list"]),
        ({"precision": "fp16"}, ["'fp16'", "CUDA"]),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ask("bottleneck", setup(), **settings)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)
