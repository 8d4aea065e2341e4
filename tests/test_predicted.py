"""Predicted training steps from records: what was planted comes back, and what is missing is said with its command."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from scaled_records import all_reduces, scaled

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases, predicted, predicted_words
from ddpm_lab.explain.frames import Study, study
from ddpm_lab.explain.link_fit import NotEnoughData
from ddpm_lab.explain.prediction import Prediction
from ddpm_lab.explain.tables import more
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import LOST, NO_EXCHANGE
from ddpm_lab.record import RunRecord

ALPHA, BETA = 1e-4, 1e-9
BYTES = 4 * 2**20
HIDDEN = 0.6


def exchange(ranks: int, size: float = BYTES) -> float:
    return 2 * (ranks - 1) * (ALPHA + size / ranks * BETA)


def step(ranks: int, images: int, exchanged: bool) -> float:
    """A rank computes 4 ms and 1 ms for each image, and hides 60 % of its exchange."""
    return 4e-3 + 1e-3 * images + (1 - HIDDEN) * exchange(ranks) * exchanged


def answer(*records: RunRecord) -> Study:
    return study(records, "multi_gpu")


def exchanges(**values: Any) -> list[RunRecord]:
    return all_reduces(exchange, ranks=(2, 4, 8), machine=make.GPUS, **values)


CALM: dict[str, Any] = {"set_noise": 0.001, "turn_noise": 0.001, "drift": 0.0}


def test_a_step_is_predicted_from_compute_links_and_the_measured_overlap() -> None:
    found = predicted.basis(answer(*scaled(step, **CALM), *exchanges(**CALM)))
    assert found.rank_batch == 64
    for ranks in (8, 16, 32):
        assert found.at(ranks).seconds == pytest.approx(step(ranks, 64, True), rel=0.01)
        assert found.at(ranks, 48).seconds == pytest.approx(step(ranks, 48, True), rel=0.01)
    assert found.exchanged.message_bytes == BYTES
    assert "compute hides 60 % of the exchange, as measured" in found.assumptions(8)
    assert found.at(8).efficiency == pytest.approx(step(1, 64, False) / step(8, 64, True), rel=0.01)


def test_what_an_exchange_costs_beyond_its_all_reduces_is_added_and_said() -> None:
    """Ranks that wait for each other exchange for three times as long as their all-reduce alone takes."""

    def waiting(ranks: int, images: int, exchanged: bool) -> float:
        return step(ranks, images, False) + (exchange(ranks) + 2 * exchange(2)) * exchanged

    found = predicted.basis(answer(*scaled(waiting, ranks=(2,), **CALM), *exchanges(**CALM)))
    for ranks in (2, 8):
        made = found.at(ranks)
        assert made.seconds == pytest.approx(waiting(ranks, 64, True), rel=0.01)
        assert made.low < waiting(ranks, 64, True) < made.high
    told = re.search(r"takes (.*) ms more than compute and all-reduces, as measured", found.assumptions(8))
    assert told
    assert float(told[1]) == pytest.approx(1e3 * 2 * exchange(2), rel=0.01)
    assert "hides" not in found.assumptions(8)


def test_without_a_measured_overlap_a_prediction_reaches_from_none_to_full() -> None:
    found = predicted.basis(answer(*scaled(step, silent=False, **CALM), *exchanges(**CALM)))
    made = found.at(8)
    assert made.low < 68e-3 * 1.005
    assert made.high > 68e-3 + exchange(8) * 0.99
    assert "from none to full" in found.assumptions(8)


def test_measured_steps_are_held_against_what_all_others_predict() -> None:
    def slow_at_four(ranks: int, images: int, exchanged: bool) -> float:
        return step(ranks, images, exchanged) * (1.3 if ranks == 4 and exchanged else 1.0)

    found = predicted.basis(answer(*scaled(slow_at_four, **CALM), *exchanges(**CALM)))
    errors = {(p.ranks, p.rank_batch): p.seconds / seconds - 1 for seconds, p in found.checks}
    assert set(errors) == {(2, 16), (2, 32), (4, 8), (4, 16)}
    assert errors[4, 16] == pytest.approx(step(4, 16, True) / slow_at_four(4, 16, True) - 1, abs=0.02)
    assert "4 ranks of 16 images -2" in predicted_words.check(found)
    assert "(outside of its interval)" in predicted_words.check(found)


def test_ranks_that_share_cores_are_held_against_their_own_compute_alone() -> None:
    def shared(ranks: int, images: int, exchanged: bool) -> float:
        return ranks * step(ranks, images, exchanged)

    records = scaled(shared, ranks=(2,), machine=make.CPU, **CALM)
    links = all_reduces(exchange, ranks=(3, 4), **CALM)
    found = predicted.basis(answer(*records, *links))
    assert len(found.checks) == 2
    for seconds, made in found.checks:
        assert made.compute_seconds == pytest.approx(shared(2, round(made.rank_batch), False), rel=0.01)
        assert made.low <= seconds <= made.high
    plain = [r for r in records if not r.family.endswith(LOST)]
    assert predicted.basis(answer(*plain, *links)).checks == ()


def test_a_check_uses_no_all_reduce_of_its_own_number_of_ranks() -> None:
    def crooked(ranks: int, size: float) -> float:
        return exchange(ranks, size) * (3 if ranks == 4 else 1)

    links = all_reduces(crooked, ranks=(2, 4, 8), machine=make.GPUS, **CALM)
    found = predicted.basis(answer(*scaled(step, **CALM), *links))
    of_four = [made for _, made in found.checks if made.ranks == 4]
    assert [made.exchange_seconds for made in of_four] == pytest.approx([exchange(4)] * 2, rel=0.02)
    assert "each without the all-reduces and the overlap of its own number of ranks" in predicted_words.check(found)


def test_ranks_of_which_nothing_else_is_known_are_named_and_not_checked() -> None:
    links = all_reduces(exchange, ranks=(2,), machine=make.GPUS, **CALM)
    found = predicted.basis(answer(*scaled(step, **CALM), *links))
    assert {made.ranks for _, made in found.checks} == {4}
    assert "Without the all-reduces and the overlap of 2 ranks there is not enough data" in predicted_words.check(found)
    found = predicted.basis(answer(*scaled(step, ranks=(2,), **CALM), *links))
    assert found.checks == ()
    assert predicted_words.check(found).startswith("No measured step of several ranks can be held against")
    assert "2 ranks there is not enough data" in predicted_words.check(found)


def test_steps_that_show_a_mechanism_alone_say_nothing_of_overlap() -> None:
    records = scaled(step, **CALM)
    shown = [dataclasses.replace(r, mechanism_only=r.label == NO_EXCHANGE) for r in records]
    assert predicted.basis(answer(*shown, *exchanges(**CALM))).exchanged.hidden is None
    other = [dataclasses.replace(r, config=_slower(r)) if r.family.endswith(LOST) else r for r in records]
    assert predicted.basis(answer(*other, *exchanges(**CALM))).exchanged.hidden is None, "of another precision"


def _slower(record: RunRecord) -> RunConfig:
    return dataclasses.replace(record.config, precision="bf16")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "measure them with ddpm-lab run all_reduce multi_gpu"),
        (scaled(step), "measure them with ddpm-lab run all_reduce"),
        (exchanges(), "measure them with ddpm-lab run multi_gpu"),
        ([*scaled(step, count=2), *exchanges()], "measure them with ddpm-lab run multi_gpu"),
        ([*scaled(step), *exchanges(messages=(1024,))], "several sizes"),
        ([*scaled(step, count=3, drift=6.0), *exchanges()], "measure more sets, or on a quieter machine"),
        (
            [*(dataclasses.replace(r, witness={}) for r in scaled(step)), *exchanges()],
            "how many weights",
        ),
    ],
    ids=["nothing", "no links", "no training", "no intervals", "one message", "too wide", "no weights"],
)
def test_what_is_missing_is_said(records: list[RunRecord], words: str) -> None:
    with pytest.raises(NotEnoughData, match=words):
        predicted.predictions(predicted.basis(answer(*records)), [2])
    caption, frame = predicted_words.further(answer(*records))
    assert words in caption
    assert frame.empty


def test_hosts_need_a_link_between_them_and_what_one_host_holds_is_told_all_the_same() -> None:
    found = predicted.basis(answer(*scaled(step), *exchanges()), ranks_per_host=4)
    made = predicted.predictions(found, [2, 4, 8])
    assert isinstance(made[4], Prediction)
    assert str(made[8]).startswith("not enough data: the ledger holds no all-reduce between hosts: measure")
    assert predicted_words.table(made)["Label"].iloc[-1] == made[8]
    with pytest.raises(NotEnoughData, match=r"between hosts.*ddpm-lab run all_reduce"):
        predicted.predictions(found, [8])


def eight_a_host(ranks: int) -> int:
    return -(-ranks // 8)


@pytest.mark.parametrize("measured", ["steps", "all-reduces"])
def test_ranks_beyond_those_of_a_host_are_never_predicted_over_the_link_within_it(measured: str) -> None:
    training = scaled(step, ranks=(8, 16) if measured == "steps" else (8,), nodes_of=eight_a_host, **CALM)
    both = all_reduces(exchange, ranks=(4, 16), hosts_of=eight_a_host, machine=make.GPUS, **CALM)
    within = both if measured == "all-reduces" else exchanges(**CALM)
    found = predicted.basis(answer(*training, *within))
    made = predicted.predictions(found, [8, 16])
    assert isinstance(made[8], Prediction)
    assert "no all-reduce between hosts: measure it with ddpm-lab run all_reduce" in str(made[16])
    assert "8 ranks a host" in found.assumptions(8)
    assert 16 not in {p.ranks for _, p in found.checks}
    apart = all_reduces(lambda n, size: 5 * exchange(n, size), hosts_of=lambda n: n, machine=make.GPUS, **CALM)
    known = predicted.basis(answer(*training, *within, *apart))
    assert known.at(8).exchange_seconds == pytest.approx(exchange(8), rel=0.02)
    assert known.at(16).exchange_seconds == pytest.approx(exchange(8) + 5 * exchange(2), rel=0.02)


def test_ranks_that_do_not_fill_the_hosts_are_a_row_that_says_so() -> None:
    made = predicted.predictions(predicted.basis(answer(*scaled(step), *exchanges()), ranks_per_host=3), [2, 4])
    assert isinstance(made[2], Prediction)
    assert made[4] == "4 ranks do not fill hosts of 3: give a multiple"


def test_ranks_that_share_a_batch_are_held_against_one_rank_with_all_of_it() -> None:
    found = predicted.basis(answer(*scaled(step, **CALM), *exchanges(**CALM)))
    made = predicted.predictions(found, [4, 64], 32)
    assert made[64] == "32 images cannot be shared by 64 ranks"
    assert isinstance(made[4], Prediction)
    assert made[4].efficiency == pytest.approx(step(1, 32, False) / 4 / step(4, 8, True), rel=0.02)
    large = predicted.predictions(found, [4], 256)[4]
    assert isinstance(large, Prediction)
    assert large.label == "extrapolation", "one rank with 256 images was not measured"
    with pytest.raises(NotEnoughData, match="32 images cannot be shared by 64 ranks"):
        predicted.predictions(found, [64, 128], 32)


def test_steps_on_several_hosts_are_held_against_the_link_between_them() -> None:
    def far(ranks: int, images: int, exchanged: bool) -> float:
        return step(1, images, False) + 20 * exchange(ranks) * exchanged

    training = scaled(far, ranks=(2, 4), machine=make.CPU, silent=False, nodes_of=lambda n: n, **CALM)
    between = all_reduces(lambda n, size: 20 * exchange(n, size), ranks=(2, 4), hosts_of=lambda n: n, **CALM)
    near = all_reduces(exchange, ranks=(3,), **CALM)
    found = predicted.basis(answer(*training, *between, *near), ranks_per_host=1)
    steps = {(p.ranks, p.rank_batch): (seconds, p) for seconds, p in found.checks}
    assert set(steps) == {(2, 16), (2, 32), (4, 8), (4, 16)}
    for seconds, made in steps.values():
        assert made.exchange_seconds == pytest.approx(20 * exchange(made.ranks), rel=0.01)
        assert made.low <= seconds <= made.high * 1.01
    assert found.at(2).exchange_seconds == pytest.approx(20 * exchange(2), rel=0.01)


def test_notebook_tables_hold_the_predictions_only_where_links_were_measured() -> None:
    training = scaled(step)
    captions = [caption for caption, _ in more(answer(*training))]
    assert not any(c.startswith("Predicted") for c in captions)
    caption, frame = next(t for t in more(answer(*training, *exchanges())) if t[0].startswith("Predicted"))
    assert "not measured" in caption
    assert frame["Configuration"].iloc[-1] == "1,024 ranks"
    assert frame["Label"].iloc[[0, -1]].tolist() == ["predicted", "extrapolation"]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "trace_output" / "ledger.jsonl"
    path.parent.mkdir()
    Ledger(path).append([*scaled(step, **CALM), *exchanges(**CALM)])
    return path


def test_the_command_prints_step_interval_and_label(call: Call, ledger: Path) -> None:
    code, out, err = call("predict", "--world-sizes", "2, 8,64", "--ledger", ledger)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.endswith(("predicted", "extrapolation"))]
    assert [line.split()[0] for line in lines] == ["2", "8", "64"]
    assert [line.split()[-1] for line in lines] == ["predicted", "predicted", "extrapolation"]
    code, out, _ = call("predict", "--world-sizes", "8", "--ledger", ledger, "--batch-size", "256", "--json")
    assert json.loads(out)["8"]["seconds"] == pytest.approx(step(8, 32, True), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-sizes", "2,x"], "--world-sizes is '2,x': give numbers of ranks"),
        (["--world-sizes", "0"], "--world-sizes is '0'"),
        (["--ranks-per-node", "0"], "--ranks-per-node is 0"),
        (["--batch-size", "-1"], "--batch-size is -1"),
        (["--algorithm", "star"], "algorithm is 'star': choose one of ring, tree"),
        (["--world-sizes", "12", "--ranks-per-node", "8"], "12 ranks do not fill hosts of 8"),
    ],
)
def test_the_command_refuses_in_one_sentence(call: Call, ledger: Path, arguments: list[str], words: str) -> None:
    code, out, err = call("predict", "--ledger", ledger, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_an_empty_ledger_is_refused_with_the_command_that_measures(call: Call, tmp_path: Path) -> None:
    code, _, err = call("predict", "--output-dir", tmp_path)
    assert code == 2
    assert "measure them with ddpm-lab run all_reduce multi_gpu" in err


def test_ranks_of_a_cpu_are_predicted_on_cores_of_their_own_beside_what_they_measured_on_fewer(
    call: Call, tmp_path: Path
) -> None:
    def shared(ranks: int, images: int, exchanged: bool) -> float:
        return ranks * step(ranks, images, exchanged)

    path = tmp_path / "cpu.jsonl"
    training = scaled(shared, ranks=(2,), batches=(16, 32), machine=make.CPU, **CALM)
    Ledger(path).append([*training, *all_reduces(exchange, **CALM)])
    cores = make.CPU.usable_cores
    arguments = ("predict", "--world-sizes", "1,2", "--batch-size", 32, "--ledger", path)
    code, out, _ = call(*arguments)
    one, predicted_row, beside = (line for line in out.splitlines() if line.lstrip()[:1].isdecimal())
    assert code == 0
    assert one.endswith(f"measured, {cores} cores a rank"), "one rank is no prediction"
    assert predicted_row.endswith("predicted")
    assert beside.endswith(f"measured, {phrases.plural(f'{cores / 2:g}', 'core')} a rank")
    assert f"each rank on {cores} cores of its own: {2 * cores} cores for 2 ranks" in out
    assert "nothing of this was measured" not in out
    assert "Extrapolation:" not in out
    assert "notebook 02_multi_gpu" in out
    found = json.loads(call(*arguments, "--json")[1])
    assert found["1"]["label"] == "measured"
    assert found["2"]["measured"]["seconds"] == pytest.approx(shared(2, 16, True), rel=0.01)
    assert found["2"]["measured"]["efficiency"] == pytest.approx(step(1, 32, False) / 2 / shared(2, 16, True), rel=0.01)
    assert "nothing here had to be predicted" in call("predict", "--world-sizes", 1, "--ledger", path)[1]


def test_too_few_sets_are_completed_where_the_records_lie(call: Call, tmp_path: Path) -> None:
    own = tmp_path / "a folder" / "trace_output" / "ledger.jsonl"
    Ledger(own).append([*scaled(step, count=2), *exchanges()])
    for where in (("--ledger", own), ("--output-dir", own.parents[1])):
        code, _, err = call("predict", *where)
        assert code == 2
        assert f"ddpm-lab run multi_gpu --sets 3 --output-dir '{own.parents[1]}'" in err
