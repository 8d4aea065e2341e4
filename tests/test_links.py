"""Measured all-reduces: time, bus bandwidth, the table, the figure and the sentence."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest
import records as make
from cells import column
from scaled_records import all_reduces

from ddpm_lab.explain import links
from ddpm_lab.questions.answers import answer

ALPHA, BETA = 2e-4, 1e-9


def ring(alpha: float = ALPHA, beta: float = BETA) -> Callable[[int, int], float]:
    return lambda ranks, size: 2 * (ranks - 1) * (alpha + size / ranks * beta)


def test_bus_bandwidth_is_what_a_link_passes_whatever_the_ranks() -> None:
    study = make.study(all_reduces(ring(0.0), ranks=(2, 8), machine=make.GPUS))
    assert {e.ranks for e in links.exchanges(study)} == {2, 8}
    for exchange in links.exchanges(study):
        assert exchange.bus_bandwidth == pytest.approx(1 / BETA, rel=0.03)


def test_time_comes_with_its_sets() -> None:
    first = links.exchanges(make.study(all_reduces(ring(), count=5)))[0]
    assert (first.ranks, first.hosts, first.message, first.sets) == (2, 1, "1 KiB", 5)
    assert first.seconds == pytest.approx(2 * (ALPHA + 512 * BETA), rel=0.05)


def test_ranks_that_share_cores_and_a_rank_alone_say_nothing_of_exchanges() -> None:
    shared = [dataclasses.replace(r, mechanism_only=True) for r in all_reduces(ring(), ranks=(4,))]
    assert links.exchanges(make.study(shared)) == []
    alone = all_reduces(lambda *_: 1e-5, ranks=(1,))
    assert links.exchanges(make.study(alone)) == []
    assert links.answer(make.study(alone)) is None


def test_ranks_on_several_hosts_are_rows_of_their_own() -> None:
    near = all_reduces(ring(), ranks=(2, 4), machine=make.GPUS)
    far = all_reduces(ring(5e-3, 1e-8), ranks=(4,), hosts_of=lambda n: n, machine=make.GPUS)
    study = make.study([*near, *far])
    shown = answer(study).table()
    assert list(dict.fromkeys(column(shown, "Configuration"))) == ["2 ranks", "4 ranks", "4 ranks on 4 hosts"]
    assert len(shown) == 18
    assert re.match(r"(39|40|41)\d \N{MICRO SIGN}s$", shown[0]["Time"])
    slow = [e for e in links.exchanges(study) if e.hosts == 4]
    assert slow[0].seconds == pytest.approx(6 * 5e-3, rel=0.05)


def test_the_finding_names_bandwidth_and_the_least_time() -> None:
    one = answer(make.study(all_reduces(ring()))).finding
    assert one.status == "answered"
    assert "2 ranks exchange at up to" in one.headline


def test_every_measured_exchange_is_a_point() -> None:
    study = make.study(all_reduces(ring(), ranks=(2, 4), machine=make.GPUS))
    (ax,) = answer(study).figure().axes
    drawn = [tuple(point) for line in ax.get_lines() for point in np.asarray(line.get_xydata()).tolist()]
    assert drawn == [(e.message_bytes, 1e-9 * e.bus_bandwidth) for e in links.exchanges(study)]
