"""The ledger and other files: what is written is read again, whole, and no accident costs more than the line it hit."""

import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab import files
from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.ledger import FAKE_DRIVER, Ledger, read_all
from ddpm_lab.record import SCHEMA, LedgerError, RunRecord


def some_records() -> list[RunRecord]:
    """Records with every kind of content: sets, a failure, a profile, a cold compile, two GPUs' worth of ranks."""
    bf16 = RunConfig(precision="bf16", diffusion=DiffusionConfig(loss="l2", min_snr_gamma=5.0))
    gpus, failures = make.environment(make.GPUS), {"seed": (RunConfig(network="seed"), "oom", "it needs 3 GiB")}
    return [
        *make.sets({"bf16": (bf16, 1.5)}, count=2, turns=2, failures=failures),
        *make.cold(RunConfig(compile="whole"), [12.5]),
        make.profile(RunConfig(purpose="profile", mirror=False)),
        make.record(
            RunConfig(device="cuda", world_size=2),
            environment=dataclasses.replace(gpus, gpu_uuids=("GPU-1", "GPU-2"), load_before=None),
            witness={"ranks": [{"rank": 0, "nested": {"a": [1, 2]}}, {"rank": 1}]},
        ),
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = some_records()
    ledger = Ledger(tmp_path / "new folder" / "ledger.jsonl")
    assert ledger.read() == ([], [])
    for record in written:
        ledger.append([record])
    assert ledger.read() == (written, [])
    ledger.append(written)
    assert ledger.read()[0] == [*written, *written]
    values = json.loads(ledger.path.read_text().splitlines()[0])
    assert (values["run_id"], values["schema"]) == (written[0].run_id, SCHEMA), "for other readers"
    rank = dataclasses.replace(make.rank_record(0), losses=(1.0, math.nan, math.inf, -math.inf))
    ledger.append([make.record(RunConfig(), ranks=(rank,), status="diverged")])
    assert str(ledger.read()[0][-1].ranks[0].losses) == "(1.0, nan, inf, -inf)"


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    first, torn, later = some_records()[:3]
    for kept in (1, 100, -1):
        ledger = Ledger(tmp_path / f"{kept}.jsonl")
        ledger.append([first, torn])
        whole = ledger.path.read_bytes()
        ledger.path.write_bytes(whole[: whole.index(b"\n") + 1 + kept] if kept > 0 else whole[:-1])
        ledger.append([later])
        records, damaged = ledger.read()
        assert records == [first, later] if kept > 0 else [first, torn, later], "without its end nothing is lost"
        assert ["line 2:" in line for line in damaged] == [True] * (kept > 0)


def test_a_damaged_line_is_reported_and_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = some_records()[:2]
    wrong, strange = first.as_dict(), first.as_dict()
    wrong["config"]["precision"] = "fp7"
    strange["windows"][0]["steps"] = "5"
    lines = [b"not json", b"{}", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"schema": 4, "environment": 3}']
    lines += [b'{"schema": "x"}', b'{"schema": null}', json.dumps(wrong).encode(), json.dumps(strange).encode()]
    Ledger(path).append([first])
    with path.open("ab") as file:
        file.write(b"\n\n".join(lines) + b"\n\n")
    Ledger(path).append([second])
    records, damaged = Ledger(path).read()
    assert records == [first, second]
    assert [line.split(":")[0] for line in damaged] == [f"{path}, line {2 + 2 * i}" for i in range(len(lines))]
    assert "fp7" in damaged[-2]
    assert "windows[0].steps is '5': give a whole number" in damaged[-1]


PARTS: dict[str, dict[str, Any]] = {
    "profile.operators[0].calls is missing": {"profile": {"operators": [{"name": "add"}]}},
    "profile.budget.ranks is missing": {"profile": {"budget": {"steps": 1}}},
    "profile.wrong_ways.bars.seconds is 0": {"profile": {"wrong_ways": {"bars": {"steps": 1, "seconds": 0}}}},
    "quality.gradients.steps is missing": {"quality": {"gradients": {"precision": "bf16", "loss": "l2"}}},
    "quality.fid.images is -1": {"quality": {"fid": {"images": -1, "steps": 5, "inception_sha256": "ab"}}},
    "look.log_ratios.x[0] is 1000000000.0": {"look": {"sets": [], "log_ratios": {"x": [1e9]}}},
    "look.sets is missing": {"role": "look", "look": {"log_ratios": {}}},
    "profile.wrong_ways.runs.seconds[0] is 0": {"profile": {"wrong_ways": {"runs": {"seconds": [0]}}}},
    "label is longer than 200,000": {"label": "x" * 200_001},
    "space has more than 20,000": {
        "space": {"settings": {str(i): [["a", "b", {}]] * 4 for i in range(8)}, "guess": [], "left_out": []}
    },
    "windows.rank_seconds: give one for each of 2": {"config": RunConfig(world_size=2, global_batch_size=32).as_dict()},
}


@pytest.mark.parametrize("words", PARTS)
def test_parts_that_an_answer_reads_are_there_and_within_their_limits(words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        RunRecord.from_dict(some_records()[0].as_dict() | PARTS[words])


def test_records_to_come_are_set_aside() -> None:
    """Otherwise one with a wrong clock would decide every later answer."""
    values = some_records()[0].as_dict()
    for days, refusal in ((0.9, contextlib.nullcontext()), (1.1, pytest.raises(ValueError, match="is to come"))):
        date = datetime.now(UTC) + timedelta(days=days)
        with refusal:
            RunRecord.from_dict(values | {"environment": values["environment"] | {"date": date.isoformat()}})


@pytest.mark.parametrize("schema", [SCHEMA + 1, SCHEMA - 1])
def test_another_edition_is_refused(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(some_records()[0].as_dict() | {"schema": schema, "something": "new"}) + "\n")
    with pytest.raises(LedgerError, match=f"line 1.*schema {schema}"):
        Ledger(path).read()


WRITER = """
import dataclasses, json, sys
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import RunRecord
path, name, template = sys.argv[1:]
record = RunRecord.from_dict(json.loads(open(template).read()))
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    Ledger(path).append([dataclasses.replace(record, label=name, set_id=str(i))] * 2)
"""


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path, template = tmp_path / "ledger.jsonl", tmp_path / "template.json"
    template.write_text(json.dumps(make.record(RunConfig(), data_name="x" * 10_000).as_dict()))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name, str(template)], **pipes) for name in ("one", "two")]
    assert [writer.stdout.readline() for writer in writers if writer.stdout] == ["ready\n"] * 2
    for writer in writers:
        print("go", file=writer.stdin, flush=True)
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    records, damaged = Ledger(path).read()
    assert not damaged
    for name in ("one", "two"):
        assert [int(r.set_id) for r in records if r.label == name] == [i for i in range(40) for _ in range(2)]
    pairs = list(zip(records[::2], records[1::2], strict=True))
    assert all((a.label, a.set_id) == (b.label, b.set_id) for a, b in pairs), "lines appended together lie together"


def test_ledgers_that_cannot_be_used_are_refused_and_others_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "ledger.jsonl", tmp_path):
        with pytest.raises(LedgerError, match=f"{path}"):
            Ledger(path).append(some_records()[:1])
    written = some_records()[:4]
    Ledger(tmp_path / "b.jsonl").append(written[:2])
    Ledger(tmp_path / "a.jsonl").append(written[2:])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("oops\n")
    records, damaged = read_all([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])
    assert records == written
    assert [line.split(":")[0] for line in damaged] == [f"{tmp_path / 'a.jsonl'}, line 3"]
    with pytest.raises(LedgerError, match=r"c\.jsonl"):
        read_all([tmp_path / "b.jsonl", tmp_path / "c.jsonl"])


def test_odd_names_are_kept_and_a_text_tells_which_lines_are_read(tmp_path: Path) -> None:
    odd = 'a "quoted" name },"date":"1999" back\\slash {[}] ü ⚠ \u2028'
    machine = dataclasses.replace(make.CPU, cpu=odd)
    written = [
        make.record(RunConfig(data_sha256="ff", options=(("note", odd),)), family=odd, label=odd, data_name=odd),
        make.record(RunConfig(), environment=make.environment(machine=machine)),
    ]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(written)
    found, damaged = ledger.read()
    assert (damaged, found[1], found[0].config) == ([], written[1], written[0].config)
    assert [(r.machine, r.cohort, r.date) for r in found] == [(r.machine, r.cohort, r.date) for r in written]
    assert ledger.read('"data_sha256":"ff"')[0] == found[:1]


def test_a_record_in_two_files_counts_once(tmp_path: Path) -> None:
    """A copy of a ledger, or what was published of it, beside the ledger itself must not double its sets."""
    notes = [make.record(RunConfig(), role="note", set_id="", label=label) for label in ("tf32", "fp16")]
    records = [*make.sets({"faster": (RunConfig(precision="bf16"), 1.1)}, count=2), *notes]  # notes of one second
    Ledger(tmp_path / "a.jsonl").append(records)
    hidden = [
        dataclasses.replace(r, environment=dataclasses.replace(r.environment, hostname=None, kernel=""))
        for r in records
    ]
    others = [dataclasses.replace(r, set_id=f"other-{r.set_id}") for r in records]
    others += [dataclasses.replace(note, code_version="another's", set_id="") for note in notes]
    Ledger(tmp_path / "b.jsonl").append([*hidden, *others])
    found, _ = read_all([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert len(found) == len(records) + len(others)
    assert found[: len(records)] == records
    again, _ = read_all([tmp_path / "a.jsonl", tmp_path / "a.jsonl"])
    assert again == records
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(2 * (tmp_path / "a.jsonl").read_bytes())
    assert read_all([twice])[0] == records, "a repeated baseline would seem to scatter less"


def test_what_a_fake_gpu_says_is_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = dataclasses.replace(make.GPUS, driver=FAKE_DRIVER)
    real, fake = make.record(RunConfig()), make.record(RunConfig(device="cuda"), environment=make.environment(where))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="fake CUDA"):
        ledger.append([real, fake])
    assert not ledger.path.exists()
    with monkeypatch.context() as patch:
        patch.setattr("ddpm_lab.ledger.FAKE_DRIVER", "")
        ledger.append([real, fake])
    records, (damaged,) = ledger.read()
    assert records == [real]
    assert "fake CUDA" in damaged


REPLACING = """
import sys
from pathlib import Path
from ddpm_lab.files import replace
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for _ in range(100):
    replace(path, letter * 200_000)
    content = path.read_bytes()
    assert len(content) == 200_000 and len(set(content)) == 1
"""


def test_two_processes_write_one_file_whole(tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", REPLACING, str(tmp_path / "a"), letter]) for letter in "xy"]
    assert [process.wait(180) for process in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_is_not_followed_and_what_a_killed_process_left_is_gone(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "results"
    folder.mkdir()
    victim.write_text("mine")
    stem, gone = f"a.png.{os.uname().nodename}", 2**22 + 1  # beyond the largest process id
    kept = {f"{stem}.{os.getppid()}.partial", f"a.png.elsewhere.{gone}.partial"}  # of processes that still write
    (folder / f"{stem}.{os.getpid()}.partial").symlink_to(victim)
    for name in (f"{stem}.{gone}.partial", *kept):
        (folder / name).write_text("left")
    files.replace(folder / "a.png", b"new")
    assert victim.read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == {"a.png", *kept}


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = {"a": "\x00\u202eé\n", "b": [0.5, -1, True, "x"], "c": float("inf"), "t": {"d": "\\"}}
    files.replace(tmp_path / "a.toml", files.settings_text(values))
    assert files.read_settings(tmp_path / "a.toml", "A") == values
