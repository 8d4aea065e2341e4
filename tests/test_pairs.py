"""One device beside several: S003's words where a speed-up is resolved, and nowhere else; means; the banner."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from paired_records import alone, family, nothing_ran, paired
from records import study

from ddpm_lab.explain import figure_dashboard, results_file
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.pairs import Mean, banner, beyond, known, layout, means, pairs, recommendation
from ddpm_lab.explain.stats import Estimate

SHARED = {256: 1.6, 128: 1.05, 64: 0.8}


def test_each_batch_is_a_pair_weak_scaling_first() -> None:
    found = pairs(paired(SHARED, {32: 6.45}))
    assert [(p.kind, p.batch) for p in found] == [("weak", 32), ("strong", 64), ("strong", 128), ("strong", 256)]
    assert [(p.single.ranks, p.multi.ranks) for p in found if p.single and p.multi] == [(1, 8)] * 4
    assert [p.compared.batch for p in found if p.compared] == [256, 64, 128, 256]
    assert layout(found) == ("1 GPU", "8 GPUs")


@pytest.mark.parametrize(
    ("ratio", "name"),
    [
        (1.60, "multi-GPU beneficial"),
        (1.13, "multi-GPU beneficial"),
        (1.05, "marginal difference"),
        (0.97, "marginal difference"),
        (0.90, "single GPU preferred"),
    ],
)
def test_s003_s_words_for_what_is_resolved(ratio: float, name: str) -> None:
    (pair,) = pairs(paired({64: ratio}, {}, set_noise=0.001, turn_noise=0.001))
    assert pair.compared
    assert pair.compared.verdict == ("faster" if ratio > 1 else "slower")
    assert recommendation(pair) == name
    (ranks,) = pairs(paired({64: ratio}, {}, set_noise=0.001, turn_noise=0.001, device="cpu", ranks=2))
    assert recommendation(ranks) == name.replace("GPU", "rank")


def test_an_interval_that_reaches_further_is_told() -> None:
    (pair,) = pairs(paired({64: 1.1}, {}, set_noise=0.03))
    assert pair.compared
    assert pair.compared.ratio.low < 1.095 < pair.compared.ratio.high
    assert recommendation(pair).endswith("(interval: marginal difference to multi-GPU beneficial)")


def test_what_is_not_called_stays_so_whatever_the_ratio() -> None:
    (few,) = pairs(paired({64: 1.6}, {}, count=3))
    assert recommendation(few) == "too few sets (3)"
    (wide,) = pairs(paired({64: 1.2}, {}, set_noise=0.4))
    assert recommendation(wide).startswith("inconclusive (resolves ")
    (none,) = pairs(paired({64: 1.0}, {}, set_noise=0.003))
    assert recommendation(none) == "same within 3 %"
    bad = pairs(paired({64: 1.2, 128: 1.7}, {}, twin_ratio=1.2))
    assert [p.compared.verdict for p in bad if p.compared] == ["inconclusive", "faster"]


def test_a_side_that_failed_or_was_not_asked_for() -> None:
    (failed,) = pairs(study(family(64, 1.0, failed=("oom", "needs 90 GiB"))))
    assert failed.compared is None
    assert recommendation(failed) == "out of memory: needs 90 GiB"
    (one,), (many,) = (pairs(alone(single=single)) for single in (True, False))
    assert (one.multi, many.single) == (None, None)
    assert recommendation(one) == recommendation(many) == "not measured"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_the_mean_of_a_speed_up_and_its_inverse_is_none(ratios: list[float]) -> None:
    (row, *_) = pairs(ONE)[0].sides
    every = [Estimate(value=r, low=r / 1.1, high=r * 1.1, p=0.0, sets=6) for r in (*ratios, *(1 / r for r in ratios))]
    rows = [replace(row, verdict="faster", ratio=ratio) for ratio in every]
    found = _mean(rows)
    assert found.value == pytest.approx(1.0)
    assert math.log(found.high) == pytest.approx(math.log(1.1) / math.sqrt(len(rows)))
    assert found.low * found.high == pytest.approx(found.value**2)


def test_the_mean_is_over_the_batches_that_are_shared() -> None:
    (mean,) = means(pairs(paired({64: 2.0, 128: 0.5}, {32: 7.0}, set_noise=0.001)))
    assert (mean.devices, mean.batches) == ("8 GPUs", 2)
    assert mean.value == pytest.approx(1.0, rel=0.01)
    assert mean.low < 1.0 < mean.high
    assert mean.sentence().startswith("Geometric mean speed-up of 8 GPUs over 2 batch sizes: 1.0")
    assert means(pairs(paired({}, {32: 7.0}))) == []


def test_a_mean_without_any_answer_is_no_headline() -> None:
    (one,) = means(pairs(paired({16: 4.5}, {}, count=1)))
    assert re.fullmatch(r"8 GPUs inconclusive where they share a batch \(reads 4\.\d\dx\)", one.headline())
    assert one.sentence().endswith("x (no interval from fewer than 3 sets), inconclusive.")
    (two,) = means(pairs(paired({16: 1.3, 32: 1.4}, {}, count=2, set_noise=0.5)))
    assert known(two.low), "kept in the results, where a program may read it"
    assert two.between() == ""
    (six,) = means(pairs(paired({16: 1.3, 32: 1.0}, {}, set_noise=0.001)))
    assert re.fullmatch(r"8 GPUs 1\.1\dx \(1\.1\d to 1\.1\d\) on average where they share a batch", six.headline())


def test_ranks_that_share_cores_are_no_more_than_one_that_has_them() -> None:
    ranks = {"device": "cpu", "ranks": 2, "set_noise": 0.001}
    assert re.fullmatch(
        r"An efficiency of 4[45]\d % at batch 8 each cannot come from ranks that share cores: the baseline was .*",
        beyond(paired({16: 1.2}, {8: 9.0}, **ranks)),
    )
    assert beyond(paired({16: 1.2}, {8: 2.1}, **ranks)) == "", "noise"
    assert beyond(paired({16: 30.0}, {})) == "", "GPUs share nothing"


# --- the banner ------------------------------------------------------------------------------------------------------


def test_the_banner_has_the_published_words_and_what_they_rest_on() -> None:
    told = banner(paired({}, {32: 6.45}, set_noise=0.001))
    assert told[0] == "BENCHMARK COMPLETE!"
    assert re.fullmatch(r"Time Speedup: 6\.4\dx \(95 % interval 6\.4\d to 6\.4\d, 6 sets, faster\)", told[1])
    assert re.fullmatch(r"Multi-GPU Efficiency: 80\.\d% \(good by S000, 80 to 81 %\)", told[2])
    text = "\n".join(told)
    assert "1 GPU: batch 32 each, 32 in all" in text
    assert "8 GPUs: batch 32 each, 256 in all" in text
    assert "a projection" in text
    assert "quality not measured" in text
    assert all(part in told[-1] for part in ("Example GPU X", "2026-01-03", "6 sets"))


def test_the_banner_of_cpu_ranks_names_no_gpu() -> None:
    told = "\n".join(banner(paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2)))
    assert "Multi-Rank Efficiency (CPU ranks, no GPU):" in told
    assert "2 CPU ranks: batch 8 each, 16 in all" in told
    assert "GPU" not in told.replace("CPU ranks, no GPU", "").replace("2 cores, no GPU", "")


def test_the_banner_claims_nothing_that_is_not_called() -> None:
    wide = banner(paired({}, {32: 1.0}, set_noise=0.2))
    assert "inconclusive)" in wide[1]
    assert "(inconclusive, " in wide[2]
    assert "S000" not in wide[2], "what has no answer has no band"
    assert "same within 3 %)" in banner(paired({}, {32: 1.0}, set_noise=0.002))[1]
    (few,) = {line for line in banner(paired({}, {32: 6.45}, count=1)) if line.startswith("Time")}
    assert few.endswith("(1 set, no interval, too few sets)")
    single = banner(alone(single=True))
    assert single[1] == "Time Speedup: not measured"
    assert banner(nothing_ran("signal 9")) == ["BENCHMARK INCOMPLETE: nothing was measured", "crashed: signal 9"]


def test_what_is_better_than_perfect_has_no_band() -> None:
    beyond = paired({}, {32: 9.0}, set_noise=0.001)
    assert re.fullmatch(r"Multi-GPU Efficiency: 11\d\.\d% \(above 100 %, 11\d to 11\d %\)", banner(beyond)[2])
    (shown,) = (row for row in results_file.rows(beyond) if row["side"] == "multi")
    assert shown["efficiency"] > 1
    assert shown["band"] is None
    said = figure_dashboard.summary_table(beyond).findobj(Text)
    assert any("above 100 %" in text.get_text() for text in said if isinstance(text, Text))
    assert not any("perfect" in text.get_text() for text in said if isinstance(text, Text))


ONE = alone(single=True)


def _mean(rows: list[Comparison]) -> Mean:
    from ddpm_lab.explain.pairs import _mean as mean  # noqa: PLC0415

    return mean("8 GPUs", rows)
