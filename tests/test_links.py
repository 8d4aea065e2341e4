"""Links from records: planted latency and bandwidth come back, and hosts are told apart."""

import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import records as make
from scaled_records import all_reduces

from ddpm_lab.explain import links
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.tables import table
from ddpm_lab.record import RunRecord

ALPHA, BETA = 2e-4, 1e-9


def ring(alpha: float = ALPHA, beta: float = BETA) -> Callable[[int, int], float]:
    return lambda ranks, size: 2 * (ranks - 1) * (alpha + size / ranks * beta)


def test_a_planted_link_comes_back_from_records() -> None:
    kind = links.fitted(make.study(all_reduces(ring(), ranks=(2, 4, 8), machine=make.GPUS)))["on one host"]
    assert kind.link is not None
    (a_low, a_high), (b_low, b_high) = kind.link.interval()
    assert a_low < ALPHA < a_high < 1.3 * a_low
    assert b_low < BETA < b_high < 1.3 * b_low
    assert {h.timing.ranks for h in kind.held} == {2, 4, 8}


def test_ranks_on_hosts_of_their_own_make_another_link() -> None:
    near = all_reduces(ring(), ranks=(2, 4), machine=make.GPUS)
    far = all_reduces(ring(5e-3, 1e-8), ranks=(2, 8), hosts_of=lambda n: n, machine=make.GPUS)
    mixed = all_reduces(ring(1.0, 1.0), ranks=(6,), hosts_of=lambda _: 2, machine=make.GPUS)
    kinds = links.fitted(make.study([*near, *far, *mixed]))
    assert {where: round(1e3 * kind.link.alpha, 1) for where, kind in kinds.items() if kind.link} == {
        "on one host": 0.2,
        "between hosts": 5.0,
    }


def test_bus_bandwidth_is_what_a_link_passes_whatever_the_ranks() -> None:
    study = make.study(all_reduces(ring(0.0), ranks=(2, 8), machine=make.GPUS))
    for exchange in links.exchanges(study):
        assert exchange.bus_bandwidth == pytest.approx(1 / BETA, rel=0.03)


def test_time_comes_with_its_interval_and_its_sets() -> None:
    first = links.exchanges(make.study(all_reduces(ring(), count=5)))[0]
    assert (first.ranks, first.hosts, first.message, first.sets) == (2, 1, "1 KiB", 5)
    assert first.low < first.seconds < first.high
    assert first.seconds == pytest.approx(2 * (ALPHA + 512 * BETA), rel=0.05)


def test_ranks_that_share_cores_and_a_rank_alone_say_nothing_of_links() -> None:
    shared = [dataclasses.replace(r, mechanism_only=True) for r in all_reduces(ring(), ranks=(4,))]
    assert links.fitted(make.study(shared)) == {}
    alone = all_reduces(lambda *_: 1e-5, ranks=(1,))
    assert links.fitted(make.study(alone)) == {}
    assert links.answer(make.study(alone)) is None


def slowed(records: list[RunRecord], spread: float) -> list[RunRecord]:
    """The same sets, each slower as a whole by a share of its own."""
    rng = np.random.default_rng(5)
    by_set = {r.set_id: math.exp(spread * rng.normal()) for r in records}
    return [
        dataclasses.replace(
            r, windows=tuple(dataclasses.replace(w, seconds=w.seconds * by_set[r.set_id]) for w in r.windows)
        )
        for r in records
    ]


def test_what_slows_a_whole_set_is_told_from_what_scatters_within_it() -> None:
    calm = all_reduces(ring(), count=40, set_noise=0.05, drift=0.0, turn_noise=0.0)
    shaken = slowed(calm, 0.2)
    found = [math.sqrt(40 * links.shared_variance(links.exchanges(make.study(r)))) for r in (calm, shaken)]
    assert found[0] < 0.05
    assert found[1] == pytest.approx(0.2, rel=0.35)
    widths = []
    for each in (calm, shaken):
        link = links.fitted(make.study(each))["on one host"].link
        assert link is not None
        (low, high), _ = link.interval()
        widths.append(math.log(high / low))
    assert widths[1] > 1.2 * widths[0]


def test_the_finding_names_bandwidth_latency_and_what_tests_the_formula() -> None:
    one = finding(make.study(all_reduces(ring())))
    assert one.status == "answered"
    assert "2 ranks exchange at up to" in one.headline
    assert re.search(r"latency of (19\d|20\d) \N{MICRO SIGN}s", one.claim)
    assert "Only 2 ranks were measured, so nothing here tests the formula" in one.claim
    several = finding(make.study(all_reduces(ring(), ranks=(2, 4, 8), machine=make.GPUS)))
    assert "Predicted from the others, the times of 2, 4 and 8 ranks are off by" in several.claim


def test_too_few_messages_are_told_and_shown_all_the_same() -> None:
    study = make.study(all_reduces(ring(), messages=(2**10, 2**20)))
    assert "not enough data (2 all-reduces were measured" in finding(study).claim
    shown = table(study)
    assert list(shown["Message"]) == ["1 KiB", "1 MiB"]
    assert set(shown["Predicted from the other numbers of ranks"]) == {"not enough data"}


def test_the_table_sets_what_was_measured_beside_what_the_others_predict() -> None:
    shown = table(make.study(all_reduces(ring(), ranks=(2, 4, 8), machine=make.GPUS)))
    assert len(shown) == 18
    assert shown["Predicted from the other numbers of ranks"].str.contains("off by").all()
    assert re.match(r"(39|40|41)\d \N{MICRO SIGN}s \(", shown["Time"].iloc[0])
