"""What wrong ways make of a number, from planted records whose numbers are known."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import claimed
import pytest
import records as make
from claimed import STEP

from ddpm_lab.explain import figures, frames, tables
from ddpm_lab.explain.faults import Fault, faults, table
from ddpm_lab.record import RunRecord


def fault(key: str, records: Sequence[RunRecord], **values: Any) -> Fault:
    (found,) = [f for f in faults(claimed.study(records, **values)) if f.key == key]
    return found


def profiled(total: float, loop: float = 0.06, inclusive: float = 0.3, exclusive: float = 0.1) -> dict[str, Any]:
    events = {"inclusive_seconds": inclusive, "exclusive_seconds": exclusive}
    return {"steps": 6, "seconds": total, "loop_seconds": loop, **events}


def around(rel: float) -> float:
    """Some spread over repeats whose geometric mean is 1."""
    return math.exp(rel)


SPREAD = (-0.02, -0.01, 0.0, 0.0, 0.01, 0.02)


def test_start_up_is_multiplied_with_the_steps() -> None:
    """1 s of start-up and six steps of 20 ms, 300 times over, where 1,800 steps of 10 ms take 18 s."""
    ways = claimed.wrong(
        stages={"start": 0.7, "build": 0.3}, fresh=lambda i: {"step_seconds": [0.02 * around(SPREAD[i])] * 6}
    )
    found = fault("multiplied", [*claimed.sets(), *ways])
    assert found.ratio == pytest.approx(300 * 1.12 / (1800 * STEP), rel=0.01)
    assert found.low < 300 * 1.12 / (1800 * STEP) < found.high
    assert "89 % of what was multiplied is start-up" in found.did
    cold = fault("cold", [*claimed.sets(), *ways])
    assert cold.ratio == pytest.approx(2, rel=0.01)


def test_a_right_way_reads_what_is_true() -> None:
    """Nothing is off where nothing was done wrong: the ratio is 1, and its interval holds that."""
    ways = claimed.wrong(
        stages={"start": 0.0, "build": 0.0},
        fresh=lambda i: {"step_seconds": [STEP * around(SPREAD[i])] * 6},
        profiled=lambda i: profiled(6 * STEP * around(SPREAD[i])),
    )
    for key in ("multiplied", "cold", "profiler"):
        found = fault(key, [*claimed.sets(), *ways])
        assert found.low < 1 < found.high, key
        assert found.ratio == pytest.approx(1, rel=0.02)


def test_compiling_in_the_step_time_turns_the_answer_around() -> None:
    compiled = claimed.CONFIGS["compiled"]
    run = {"experiment": "claims", "family": "tiny, batch 8", "baseline_id": claimed.BASE.run_id}
    cold = make.record(
        compiled,
        role="cold",
        label="compiled",
        set_id="cold",
        stages={"compile": 19.9, "warmup": 0.1},
        warmup_steps=10,
        compile_cache="cold",
        **run,
    )
    found = fault("compiling", [*claimed.sets(), cold])
    assert found.ratio == pytest.approx(2 / (STEP / 1.5), rel=0.01)
    assert math.isnan(found.low), "one compile has no interval"
    assert "looks 0.0050 times as fast as eager" in found.did
    assert "it is 1.50" in found.did
    assert "pays off after 5,9" in found.did, "19.9 s over a third of 10 ms a step"


def test_a_profiler_in_the_timer_turns_precision_around() -> None:
    records = [
        *claimed.sets(),
        *claimed.wrong(profiled=profiled(0.6)),
        *claimed.wrong("bf16", profiled=profiled(0.5)),
    ]
    found = fault("profiler", records)
    assert found.ratio == pytest.approx(10, rel=0.01)
    assert "90 % of the reported time lies outside the steps" in found.did
    assert "bf16 reads 1.20 times as fast as fp32, and is 0.80" in found.did
    assert found.compared == "bf16 reads 1.20 times as fast as fp32"


def test_bars_of_unequal_work() -> None:
    """48 images in one bar and 32 in the other: what is left out, half as much again, is all that is wrong."""
    small = {"steps": 6, "images": 48, "seconds": 48 * STEP / 8}
    large = {"steps": 1, "images": 32, "seconds": 32 * STEP / 8 / 1.25}
    records = [*claimed.sets(), *claimed.wrong(bars=small), *claimed.wrong("batch 32", bars=large)]
    found = fault("unequal", records)
    assert found.ratio == pytest.approx(1.5, rel=0.01)
    assert "holds 32 images, that of batch 8 48" in found.did


def test_single_runs_differ_where_nothing_was_changed() -> None:
    ways = claimed.wrong(bars=lambda i: {"steps": 6, "images": 48, "seconds": 0.06 * (1 + 0.1 * i)})
    found = fault("single", [*claimed.sets(), *ways])
    assert found.ratio == pytest.approx(1.5)
    assert "up to 50 %" in found.did
    assert not fault("single", [*claimed.sets(), *ways[:1]]).shown, "one run differs from nothing"


def test_one_labelled_two_reads_one_and_is_refused() -> None:
    ways = claimed.wrong(runs={"steps": 3, "seconds": [0.03] * 50}, labelled_two=[REFUSED := claimed.REFUSED])
    found = fault("label", [*claimed.sets(), *ways])
    assert found.ratio == pytest.approx(1 / 1.8, rel=0.01)
    assert f"The witness refuses such a record: {REFUSED}." in found.did
    alone = fault("label", [*claimed.sets({"bf16": 0.8}), *ways])
    assert "2 ranks were not measured" in alone.did


def test_the_gradient_call_of_one_rank_communicates_nothing() -> None:
    phases = {"forward": 0.06, "backward": 0.10, "optimizer": 0.03, "ema": 0.002, "data": 0.008}
    found = fault("gradient", claimed.wrong(phases={"steps": 20, "seconds": 0.2, "cpu_seconds": 0.4, "phases": phases}))
    assert found.ratio == math.inf
    assert "reads 5.00 ms a step, 50 % of it" in found.did


def test_a_compute_share_is_no_utilisation() -> None:
    """One of two cores computes: the share of the step is 96 %, and half of the processor is idle."""
    phases = {"forward": 0.06, "backward": 0.10, "optimizer": 0.03, "ema": 0.002, "data": 0.008}
    ways = claimed.wrong(one_thread={"steps": 20, "seconds": 0.2, "cpu_seconds": 0.2, "phases": phases})
    found = fault("share", ways)
    assert found.ratio == pytest.approx(0.96 / 0.5)
    assert (found.reads, found.truth) == ("96 %", "50 % of it in use")


def test_nested_events_count_seconds_several_times() -> None:
    found = fault("nested", claimed.wrong(profiled=profiled(0.6, inclusive=0.4, exclusive=0.1)))
    assert found.ratio == pytest.approx(4)
    assert "with each second counted once" in found.did


def test_percentiles_of_runs_do_not_narrow() -> None:
    runs = {"steps": 3, "seconds": [0.03 * math.exp(0.1 * (i - 24.5) / 24.5) for i in range(50)]}
    few, many = (fault("percentiles", [*claimed.sets(count=count), *claimed.wrong(runs=runs)]) for count in (6, 24))
    assert few.reads == many.reads == "\N{PLUS-MINUS SIGN} 10.0 %"
    assert few.ratio > 10
    assert many.ratio > 1.5 * few.ratio, "the interval of the mean narrows"


def test_what_needs_a_gpu_says_so_on_a_cpu_and_is_read_on_one() -> None:
    reads = {"steps": 20, "seconds": 20 * STEP}
    waited = {**reads, "cpu_seconds": 0.1, "phases": {"forward": 0.1, "backward": 0.15, "data": 0.05}}
    ways: dict[str, Any] = {
        "unsynchronised": {**reads, "seconds": 0.02},
        "loss_read": reads,
        "phases_waited_for": waited,
    }
    here = [*claimed.sets(), *claimed.wrong()]
    for key in ("unsynchronised", "loss_read", "phase_sums"):
        assert fault(key, here).missing == "needs a GPU"
    with_ways = [*claimed.sets(), *claimed.wrong(**ways)]
    assert fault("unsynchronised", with_ways).ratio == pytest.approx(0.1, rel=0.01)
    assert fault("loss_read", with_ways).ratio == pytest.approx(1, rel=0.01)
    assert fault("phase_sums", with_ways).ratio == pytest.approx(1.5, rel=0.01)


def test_one_repeat_has_no_interval_and_no_record_no_number() -> None:
    once = fault("profiler", [*claimed.sets(), *claimed.wrong(repeats=1, profiled=profiled(0.6))])
    assert once.shown
    assert math.isnan(once.low)
    nothing = claimed.study(claimed.sets())
    assert not any(f.shown for f in faults(nothing))
    assert set(table(nothing)["Here"]) == {
        "Not measured here.",
        "Needs a GPU: on a CPU the call that computes is the call that waits, so there is nothing to see.",
    }


def test_wrong_ways_of_another_network_are_left_out() -> None:
    other = [replace(r, baseline_id="another") for r in claimed.wrong(repeats=9, profiled=profiled(6.0))]
    records = [*other, *claimed.sets(), *claimed.wrong(profiled=profiled(0.6))]
    assert fault("profiler", records).ratio == pytest.approx(10, rel=0.01)


def test_every_fault_says_what_was_wrong_what_it_did_and_what_is_right() -> None:
    of = claimed.study([*claimed.sets(), *claimed.wrong(profiled=profiled(0.6))])
    shown = table(of)
    assert len(shown) == len(set(shown["Fault"])) == 14
    for column in ("Done wrong", "Here", "Done right"):
        assert all(text.endswith(".") or text.endswith(")") for text in shown[column]), column


def test_the_figure_is_drawn_with_and_without_numbers() -> None:
    phases = {"forward": 0.06, "backward": 0.10}
    some = claimed.wrong(
        profiled=profiled(0.6), phases={"steps": 20, "seconds": 0.2, "cpu_seconds": 0.4, "phases": phases}
    )
    for records in ([*claimed.sets(), *some], claimed.sets(), some):
        of = claimed.study(records)
        assert figures.png(figures.figure(of))


def test_a_machine_without_any_record_has_a_page_all_the_same() -> None:
    shown = tables.more(frames.study([], "claims"))
    assert shown
    assert not any(table is None for _, table in shown)
