"""Logs to records: what the lab prints is read back from any log, whatever stands around it and wherever it ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.summary import NO_SUMMARY, Row, Summary
from ddpm_lab.slurm_logs import read_log, text_lines
from ddpm_lab.summary_lines import lines

S001 = """\
==========================================
SLURM Job ID: 12347
Job Name: ddpm-multi-node
Number of nodes: 2
GPUs per node: 4
==========================================
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|  0%   45C    P0   250W / 400W |  30000MiB / 81920MiB |     98%      Default |
|  0%   47C    P0   250W / 400W |  30000MiB / 81920MiB |     90%      Default |
Epochs: 50
Epoch 1/50: loss 0.4, 7 s
Best validation loss: 0.1301 (epoch 3)
Best validation loss: 0.1190 (epoch 41)
Total training time: 57.14 seconds (0.95 minutes)
Best validation loss: 0.1190
Best validation accuracy: 0.9512
"""


def read(folder: Path, text: str | bytes, name: str = "slurm-77.out") -> list[Row]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(folder / name)


def summaries(folder: Path, text: str | bytes) -> list[Summary]:
    return [row.summary for row in read(folder, text)]


# --- the lab's own logs ----------------------------------------------------------------------------------------------

NUMBERS = st.floats(0.001, 1e7).map(lambda x: float(f"{x:.4g}"))
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,9}(, [a-z]{1,9} [a-z0-9.]{1,9}){0,3}", fullmatch=True)
NOTES = st.sampled_from(["", "", "more ranks than cores, or CPU ranks on a GPU machine"])
NOISE = st.lists(
    st.sampled_from(
        [
            "train: step 26 of 1,000, loss 0.7917",
            "\x1b[1;31mwarning\x1b[0m: it is warm",
            "\rtrain: 10 %\rtrain: 20 %",
            "Epoch 3/50 takes 7 s, the best validation loss may fall",
            "GPU-Util is what nvidia-smi calls it",
            "nodes n[1-2], Nodelist: n[1-2]",
            "",
            "   | 12 | total",
        ]
    ),
    max_size=6,
)


@st.composite
def told(draw: st.DrawFn, job: str) -> Summary:
    gpus = draw(st.integers(0, 64))
    seconds = draw(NUMBERS)
    note = draw(NOTES)
    return Summary(
        job_id=job,
        configuration=draw(NAMES),
        gpus=gpus,
        ranks=gpus or draw(st.integers(1, 64)),
        nodes=draw(st.integers(1, 16)),
        epochs=draw(st.none() | NUMBERS),
        seconds=None if note else draw(st.none() | st.just(seconds)),
        epoch_seconds=draw(st.none() | NUMBERS),
        loss=draw(st.none() | NUMBERS),
        gpu_percent=draw(st.none() | st.integers(0, 100).map(float)),
        note=note,
    )


LOGS = st.lists(st.tuples(NOISE, told("123_4")), min_size=1, max_size=4)


def equal(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=6e-3)


def same(ours: Summary, theirs: Summary) -> None:
    for name in ("job_id", "configuration", "gpus", "ranks", "nodes", "note", "loss", "gpu_percent"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("seconds", "epochs"):
        assert equal(getattr(ours, name), getattr(theirs, name)), name
    # Where a run says only how long it took, and over how many epochs, the time of one follows.
    epoch = theirs.epoch_seconds
    if epoch is None and theirs.seconds is not None and theirs.epochs:
        epoch = theirs.seconds / theirs.epochs
    assert equal(ours.epoch_seconds, epoch)


def shown(runs: list[tuple[list[str], Summary]]) -> list[str]:
    return [line for noise, summary in runs for line in (*noise, *lines(summary))]


@given(LOGS, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_what_is_printed_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[list[str], Summary]],
    end: str,
    coloured: bool,
    labelled: bool,
) -> None:
    """With progress bars, colours, the ranks' numbers of ``srun --label``, Windows' ends of lines, several runs."""
    told_lines = shown(runs)
    if coloured:
        told_lines = [f"\x1b[32m{line}\x1b[0m\x1b[K" for line in told_lines]
    if labelled:
        told_lines = [f"0: {line}" for line in told_lines]
    found = summaries(tmp_path_factory.mktemp("log"), "".join(line + end for line in told_lines))
    expected = [s for _, s in runs if s.seconds is not None or s.loss is not None or s.note]
    if not expected:
        assert len(found) == 1
        return
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)


@given(LOGS, st.floats(0, 1))
def test_a_log_that_is_cut_off_says_nothing_wrong(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[list[str], Summary]], share: float
) -> None:
    """Every value is one that the whole log holds, for the run in its place; what was cut is unknown."""
    whole = "".join(f"{line}\n" for line in shown(runs))
    expected = [s for _, s in runs if s.seconds is not None or s.loss is not None or s.note]
    found = [r for r in read(tmp_path_factory.mktemp("log"), whole[: int(share * len(whole))]) if r.found]
    assert len(found) <= len(expected)
    for row, theirs in zip(found, expected, strict=False):
        assert row.summary.configuration == theirs.configuration
        assert row.summary.seconds is None or equal(row.summary.seconds, theirs.seconds)
        assert row.summary.loss in (None, theirs.loss)
        assert row.summary.gpu_percent in (None, theirs.gpu_percent)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_log(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    rows = read(tmp_path_factory.mktemp("log"), raw)
    assert len(rows) >= 1
    assert rows[0].found or rows[0].remark.startswith(NO_SUMMARY)


# --- logs of others --------------------------------------------------------------------------------------------------


def test_a_log_of_another_benchmark(tmp_path: Path) -> None:
    (summary,) = summaries(tmp_path, S001)
    assert summary == Summary(
        job_id="12347",
        gpus=8,
        nodes=2,
        epochs=50.0,
        seconds=57.14,
        epoch_seconds=57.14 / 50,
        loss=0.119,
        gpu_percent=94.0,
    )


def test_two_runs_in_a_log_share_the_job_and_nothing_else(tmp_path: Path) -> None:
    first, second = summaries(
        tmp_path, S001 + S001[S001.index("Epoch 1/50") :].replace("0.119", "0.1290").replace("57", "58")
    )
    assert (first.seconds, first.loss) == (57.14, 0.119)
    assert (second.seconds, second.loss, second.job_id, second.nodes, second.gpus) == (58.14, 0.129, "12347", 2, 8)
    assert second.gpu_percent is None


@pytest.mark.parametrize(
    ("told", "epochs"),
    [
        ("Epoch 1/10: loss 0.9\nEpoch 10/10: loss 0.4\n", 10),
        ("Epoch [1/10], Step [1/391]\nEpoch [10/10], Step [391/391], loss 0.4\n", 10),
        ("\rEpoch: 10/10:  50%|#####     | 195/391\rEpoch: 10/10: 100%|##########| 391/391\n", 10),
        ("Epoch 0/10\nEpoch 9/10\n", 10),
        ("Epochs: 12\nEpoch 10/10\n", 12),
        ("Epoch 10/10\nEpochs: 12\n", 12),
        ("Epoch 1/10\nEpoch 7/10, no better for 5 epochs\n", None),
        ("step 10/10\n", None),
    ],
)
def test_epochs_are_counted_where_no_line_tells_their_number(tmp_path: Path, told: str, epochs: int | None) -> None:
    """A run that may have stopped early did not train all of them."""
    (summary,) = summaries(tmp_path, f"{told}Total training time: 60 s\nEpoch 10/10 of another rank\n")
    assert summary.epochs == epochs
    assert summary.epoch_seconds == (None if epochs is None else pytest.approx(60 / epochs))


def test_a_first_epoch_begins_the_next_run(tmp_path: Path) -> None:
    told = "Epoch 1/{0}\nEpoch {0}/{0}\nTotal training time: {0} s\n"
    assert [s.epochs for s in summaries(tmp_path, told.format(10) + told.format(20))] == [10, 20]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("362.45 seconds", 362.45),
        ("362.45s", 362.45),
        ("362.45", 362.45),
        ("1,362.45 seconds", 1362.45),
        ("6.04 minutes", 362.4),
        ("1 h 2 min 3 s", 3723.0),
        ("1h2m3s", 3723.0),
        ("0:06:02.5", 362.5),
        ("06:02", 362.0),
        ("3.6e2 seconds (6 minutes)", 360.0),
        ("120 ms", 0.12),
        ("nan seconds", None),
        ("-5 seconds", None),
        ("5 epochs", None),
        ("1,36 seconds", None),
        ("unknown", None),
    ],
)
def test_times_in_many_words(tmp_path: Path, time: str, seconds: float | None) -> None:
    (summary,) = summaries(tmp_path, f"Best validation loss: 0.5\n[rank0] Total training time: {time}\n")
    assert summary.seconds == (None if seconds is None else pytest.approx(seconds))
    assert summary.loss == 0.5


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_diverged_is_no_number_and_never_the_best(tmp_path: Path, loss: str) -> None:
    (summary,) = summaries(tmp_path, f"Best validation loss: {loss}\nTotal training time: 5 s\n")
    assert summary.loss is not None
    assert not math.isfinite(summary.loss)
    (summary,) = summaries(
        tmp_path, f"Best validation loss: {loss}\nBest validation loss: 0.5\nTotal training time: 5 s\n"
    )
    assert summary.loss == 0.5


# --- jobs that SLURM ended -------------------------------------------------------------------------------------------

ERROR = "slurmstepd: error: "
CANCELLED = f"{ERROR}*** JOB 123 ON n1 CANCELLED AT 2026-01-02T03:04:05"


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        (f"{CANCELLED} DUE TO TIME LIMIT ***", "cancelled at its time limit"),
        (f"{CANCELLED} DUE TO TIME LIMIT ***\n{CANCELLED} ***", "cancelled at its time limit"),
        (f"{CANCELLED} ***", "cancelled"),
        (f"{CANCELLED} DUE TO PREEMPTION ***", "cancelled as others went first"),
        (f"{ERROR}Detected 1 oom-kill event(s) in StepId=123.batch.", "killed for want of memory"),
        (f"{ERROR}Detected 1 oom_kill event in StepId=123.batch.", "killed for want of memory"),
        ("srun: error: n1: task 0: Out Of Memory", "killed for want of memory"),
    ],
)
def test_a_job_that_slurm_ended_has_not_finished(tmp_path: Path, line: str, ended: str) -> None:
    (row,) = read(tmp_path, f"{S001}{line}\n")
    assert (row.ended, row.summary.seconds) == (ended, 57.14)
    assert row.remark == f"{ended}: left out of means and speed-ups"
    (row,) = read(tmp_path, f"{S001[: S001.index('Total')]}{line}\n")
    assert row.remark == ended, "it has no time that could enter a mean"


def test_a_run_that_was_put_back_into_the_queue_and_ended_has_finished(tmp_path: Path) -> None:
    begun, cancelled = S001[: S001.index("Total")], f"{CANCELLED} DUE TO TIME LIMIT ***\n"
    (row,) = read(tmp_path, begun + cancelled + S001)
    assert (row.ended, row.remark, row.summary.seconds) == ("", "", 57.14)
    first, second = read(tmp_path, S001 + cancelled + S001.replace("57.14", "58.14"))
    assert (first.ended, first.summary.seconds) == ("cancelled at its time limit", 57.14)
    assert (second.ended, second.summary.seconds) == ("", 58.14)


def test_what_ran_out_of_memory_and_went_on_has_finished(tmp_path: Path) -> None:
    (row,) = read(tmp_path, f"{S001}torch.OutOfMemoryError: CUDA out of memory\n")
    assert row.ended == ""


# --- damaged logs ----------------------------------------------------------------------------------------------------


def test_a_log_without_a_summary_is_a_row(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "Job ID: 9\nTraceback\nRuntimeError: no kernel \x1b[31mimage\x1b[0m\n", "slurm-9_1.out")
    assert not row.found
    assert row.remark == f"{NO_SUMMARY}; its last line: RuntimeError: no kernel image"
    assert row.summary.job_id == "9"
    (row,) = read(tmp_path, "", "slurm-9_1.out")
    assert (row.summary.job_id, row.remark) == ("9_1", f"{NO_SUMMARY}: slurm-9_1.out: the file is empty")


def test_the_rest_of_a_number_that_was_cut_off_is_not_guessed(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "Total training time: 362.45 seconds\nBest validation loss: 0.11")
    assert (row.summary.seconds, row.summary.loss) == (362.45, None)
    assert row.remark == "cut off in its last line"


def test_latin_1_and_what_a_terminal_would_not_show() -> None:
    raw = (
        "Größe\n".encode("latin-1")
        + "Größe\n".encode()
        + b"\x1b]0;title\x07\x1b[1;32mgreen\x1b[0m\r50 %\r100 %\n\0nul\0\n"
    )
    assert text_lines(raw) == (["Größe", "Größe", "green", "50 %", "100 %", "nul"], False)


def test_a_log_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the log .*none\.out: No such file"):
        read_log(tmp_path / "none.out")


@pytest.mark.parametrize(("raw", "word"), [(b"", "empty"), (b" \n", "empty"), (b"\x00\x01\xff\n", "binary")])
def test_a_file_that_is_no_log_is_named_in_a_sentence(tmp_path: Path, raw: bytes, word: str) -> None:
    (row,) = read(tmp_path, raw, "cpu2.out")
    assert row.remark.startswith(f"{NO_SUMMARY}: cpu2.out: ")
    assert word in row.remark
    assert row.summary.job_id is None, "only SLURM's own name holds a job id"


def test_no_run_takes_no_time(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "Total training time: 0 seconds\nBest validation loss: 0.5\n")
    assert row.summary.seconds is None
    assert "0 seconds" in row.remark
