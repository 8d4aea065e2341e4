"""Whatever a file or a command line holds, the lab uses it or refuses it: no traceback, and nothing that takes long."""

import contextlib
import copy
import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import records as make
import torch
from drawn_studies import STUDIES
from matplotlib import pyplot as plt
from PIL import Image
from test_archives import make_7z, make_tar, png
from test_checkpoint import made

from ddpm_lab.__main__ import GROUPS, _parser
from ddpm_lab.checks import LabError
from ddpm_lab.cli.options import OF_TRAINING, OPTIONS
from ddpm_lab.config import RunConfig
from ddpm_lab.data.archives import extract
from ddpm_lab.data.folder import decode
from ddpm_lab.data.packed import open_packed, prepare
from ddpm_lab.declared import flag
from ddpm_lab.explain.selection import study
from ddpm_lab.files import LEDGER, NOT_IN_FILES, configuration, read_settings, settings_text
from ddpm_lab.ledger import Ledger, read_all
from ddpm_lab.output import prepare_streams
from ddpm_lab.questions.ask import answer, questions
from ddpm_lab.record import OtherSchemaError
from ddpm_lab.reports import summary
from ddpm_lab.training.checkpoint import SECTIONS, _sha256, read, write
from ddpm_lab.training.run_folder import logged

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
PUBLISHED = Path(__file__).parents[1] / "trace_output" / "published"
FULL = os.environ.get("CHAOS") == "full"
LONGEST_SECONDS = 5.0
REFUSALS = (LabError, OSError, RecursionError, MemoryError)
"""What the command line tells in one sentence."""
FREE = ("witness", "profile", "quality", "space", "look", "stages", "windows", "ranks")
"""Parts of a record of which less is declared, or that are large."""
NASTY: list[Any] = [
    *json.loads(
        "[null, true, false, 0, 1, -1, 3, 0.5, -0.0, 1e-300, 1e308, -1e308, 9223372036854775808, 1000000000, Infinity,"
        '-Infinity, NaN, "", "x", "\\ud800", "\\u001b[2J\\u202e", "1", "inf", "../..", "/dev/zero", "2026-13-99", [],'
        '{}, [[]], [{}], {"x": 1}, {"": null}, [null], [1, "x"], [Infinity], [0, 1, 2], ["a", "b"],'
        '"$\\\\foo$", ", ", 1e-320, 9e14]'
    ),
    *(10**400, "x" * 2000),
]


def mutated(rng: Random, value: Any, times: int = 1) -> Any:
    """A copy of plain values with changed types, ranges, names and nesting, in random places."""
    made = copy.deepcopy(value)
    for _ in range(times):
        inside, key = _place(rng, made)
        if inside is None:
            made = copy.deepcopy(rng.choice(NASTY))
            continue
        old, (donor, other) = inside[key], _place(rng, made)
        is_number = type(old) in (int, float) and abs(old) < 1e290
        near = [type(old)(old * factor) for factor in (-1, 0, 0.5, 2, 1e9)] if is_number else NASTY
        kind = rng.random()
        if kind < 0.7:
            values = rng.choice((NASTY, NASTY, near, [donor[other]]))
            inside[key] = copy.deepcopy(rng.choice(values))
        elif kind < 0.85:
            del inside[key]
        elif isinstance(inside, dict):
            inside[rng.choice(["x", "", "steps", *inside])] = inside.pop(key)
        else:
            inside += inside[:20]
    return made


def _place(rng: Random, value: Any) -> tuple[Any, Any]:
    inside, key = None, None
    while isinstance(value, dict | list) and value and (inside is None or rng.random() < 0.85):
        inside, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = inside[key]
    return inside, key


def damaged(rng: Random, content: bytes) -> bytes:
    """Bytes cut off, flipped, repeated, replaced, or nested deeply."""
    made, where = bytearray(content), rng.randrange(len(content))
    deep = rng.choice((b"[", b'{"a":', b"(", b"\x80", b"9", b"\x00", b"\n", b"a."))
    wide = rng.choice((b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"1e999999"))
    match rng.randrange(6):
        case 0:
            del made[where:]
        case 1:
            for at in rng.choices(range(len(made)), k=rng.choice((1, 1, 3, 30))):
                made[at] ^= 1 << rng.randrange(8)
        case 2:
            made[where:where] = made[rng.randrange(len(made)) :][:1000]
        case 3:
            made[where : where + rng.choice((1, 4, 100))] = rng.randbytes(rng.choice((0, 1, 4, 100)))
        case 4:
            made[where:where] = deep * rng.choice((1, 2000, 5000))
        case 5:
            made[where : where + 8] = wide
    return bytes(made)


@pytest.fixture
def attack(record_property: Any) -> Callable[..., None]:
    """Tries many inputs, short or full by CHAOS; whatever is not ``allowed`` fails, and a row of the table tells."""

    def attack(name: str, count: int, one: Callable[[Random], int | None], allowed: Any = REFUSALS) -> None:
        faults, slow, tried, rng = Counter[str](), 0, 0, Random(7)
        count = count if FULL else count // 100
        while tried < count:
            begun = time.process_time()  # of this input alone, however busy the machine is
            try:
                tried += one(rng) or 1
            except allowed:
                tried += 1
            except Exception as error:
                tried += 1
                where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
                faults[f"{' '.join(where[-5:])} {type(error).__name__}: {str(error)[:100]}"] += 1
            slow += time.process_time() - begun > LONGEST_SECONDS
        record_property(
            "chaos", (name, f"{tried:,}", f"{faults.total()} tracebacks, {slow} over {LONGEST_SECONDS:g} s")
        )
        assert not faults, "\n".join(f"{n} {text}" for text, n in faults.most_common())
        assert not slow

    return attack


def test_lines_of_ledgers(attack: Any, tmp_path: Path) -> None:
    """A bad line is set aside and named, and no other line is."""
    texts = [json.dumps(r.as_dict()) for study in STUDIES.values() for r in (*study().records, *study().trials)[:9]]
    path = tmp_path / "ledger.jsonl"

    def one(rng: Random) -> int:
        lines = [line for text in rng.sample(texts, 50) for line in (text.encode(), broken(rng, text))]
        path.write_bytes(b"\n".join(lines))
        with contextlib.suppress(OtherSchemaError):
            records, damaged = Ledger(path).read()
            assert len(records) >= 50
            assert all(str(d) for d in damaged)
        return 50

    attack("fuzzed lines of ledgers", 40_000, one)


def broken(rng: Random, text: str) -> bytes:
    """A text of JSON with changed values, or damaged itself; without an end of a line."""
    content = json.dumps(mutated(rng, json.loads(text), rng.choice((1, 1, 2)))).encode()
    return damaged(rng, content).replace(b"\n", b" ") if rng.random() < 0.3 else content


def test_answers_from_ledgers(attack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a record holds that is read, every question is answered, drawn and summed up beside it."""
    studies = [(s.experiment, (*s.records, *s.trials)) for s in (make_study() for make_study in STUDIES.values())]
    studies += [("profile", (make.time_budget(), make.time_budget(make.PHASES, make.PHASES)))]
    for ledger in sorted(PUBLISHED.glob("*.jsonl")):
        found, _ = read_all([ledger])
        studies += [
            (name, tuple(r for r in found if r.experiment == name)) for name in {r.experiment: 0 for r in found}
        ]
    texts = [(name, [json.dumps(r.as_dict()) for r in records][-80:]) for name, records in studies if records]
    path, sound = tmp_path / "ledger.jsonl", json.dumps(make.record(RunConfig()).as_dict()).encode()

    def one(rng: Random) -> int:
        experiment, whole = rng.choice(texts)
        lines = [text.encode() for text in whole]
        hit = rng.sample(range(len(lines)), min(12, len(lines)))
        for i in hit:
            values = json.loads(lines[i])
            part = rng.choice([name for name in FREE if values[name]] + ["", ""])
            values = {**values, part: mutated(rng, values[part])} if part else mutated(rng, values, rng.choice((1, 2)))
            lines[i] = json.dumps(values).encode()
        path.write_bytes(b"\n".join([*lines, sound]))
        with contextlib.suppress(OtherSchemaError):
            records, _ = read_all([path])
            for key in {r.machine.key for r in records}:
                shown = answer(study(records, experiment, machine=key))
                shown.table()
                shown.tables()
                if rng.random() < 0.1:
                    shown.figure()
                    shown.figures()
                    plt.close("all")
                summary.show(summary.compared(summary.of_study(shown.study, "x")))
            summary.show(summary.compared(summary.of_records(records)))
            capsys.readouterr()
        return len(hit)

    attack("fuzzed records, answered", 6_000, one, allowed=())


def test_settings(attack: Any, tmp_path: Path) -> None:
    """Settings in TOML: a configuration, or one sentence."""
    usual = RunConfig().as_dict()
    text, path = settings_text({name: v for name, v in usual.items() if name not in NOT_IN_FILES}), tmp_path / "a.toml"

    def one(rng: Random) -> None:
        if rng.random() < 0.5:
            configuration(mutated(rng, usual, rng.choice((1, 3))), "A").run_id  # noqa: B018
        path.write_bytes(damaged(rng, text.encode()))
        values = read_settings(path, "A")
        values.pop("train", None)
        summary.differences((configuration(values, "A"), 1), (RunConfig(), 1))

    attack("fuzzed settings", 15_000, one)


def test_prepared_folders(attack: Any, tmp_path: Path) -> None:
    """A damaged manifest, list of files or array is named in a sentence, or no longer used."""
    folder = tmp_path / "prepared"
    prepare("synthetic", folder, image_size=4)
    sound = {name: (folder / name).read_bytes() for name in ("manifest.json", "files.json", "images.npy")}
    listed = json.loads(sound["files.json"])
    listed[0]["files"] = listed[0]["files"][:20]
    seen = []

    def one(rng: Random) -> None:
        name = rng.choice(list(sound))
        try:
            with (folder / name).open("r+b") as file:
                if name == "images.npy":
                    head = damaged(rng, sound[name][:128])
                    file.write(head[:128])
                    file.truncate(rng.choice((len(sound[name]), len(head), rng.randrange(len(sound[name])))))
                else:
                    text = json.dumps(listed) if name == "files.json" else sound[name].decode()
                    file.write(content := broken(rng, text))
                    file.truncate(len(content))
            packed = open_packed(folder)
            seen.append(packed.files)
            assert packed.images[packed.train_indices[[0, -1]]].shape == (2, 4, 4, 3)
            assert packed.held_out_indices.max() < len(packed.images)
        finally:
            (folder / name).write_bytes(sound[name])

    attack("fuzzed prepared folders", 4_000, one)


def test_images(attack: Any, tmp_path: Path) -> None:
    """A damaged image is decoded or named."""
    path, contents = tmp_path / "1.png", []
    for mode, kind in itertools.product(("RGB", "L", "RGBA", "P", "1", "I;16"), ("PNG", "JPEG")):
        with contextlib.suppress(OSError):  # JPEG knows some modes alone
            stream = io.BytesIO()
            Image.new(mode, (9, 7), 1).save(stream, kind, **({"exif": b"Exif\0\0MM"} if kind == "JPEG" else {}))
            contents.append(stream.getvalue())

    def one(rng: Random) -> None:
        path.write_bytes(damaged(rng, rng.choice(contents)))
        assert decode(path, 8).shape == (8, 8, 3)

    attack("fuzzed images", 10_000, one)


def test_archives(attack: Any, tmp_path: Path) -> None:
    """A damaged archive is unpacked inside its folder, or named; its pickles take neither memory nor time."""
    pixels = np.zeros((2, 3072), np.uint8)
    pickles = [pickle.dumps({b"data": pixels, b"labels": [0, (1, 2)]}, protocol=p) for p in (0, 1, 2, 3, 4, 5)]
    image = png(np.zeros((4, 4, 3), np.uint8))
    whole = make_7z(tmp_path / "a.7z", {"train/1.png": image}).read_bytes()
    folder, before = tmp_path / "in" / "out", {tmp_path / "a.7z", tmp_path / "a.tar.gz", tmp_path / "in"}

    def one(rng: Random) -> None:
        if rng.random() < 0.2:
            path = tmp_path / "a.7z"
            path.write_bytes(damaged(rng, whole))
        else:
            batch = rng.choice(pickles)
            name, content = "data_batch_1", damaged(rng, batch) if rng.random() < 0.6 else batch
            path = make_tar(tmp_path / "a.tar.gz", {name: content})
            if content == batch:
                plain = gzip.decompress(path.read_bytes())
                path.write_bytes(
                    gzip.compress(damaged(rng, plain)) if rng.random() < 0.7 else damaged(rng, path.read_bytes())
                )
        try:
            extract(path, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            assert {*tmp_path.iterdir()} <= before

    attack("fuzzed archives", 4_000, one)


def test_checkpoints(attack: Any, tmp_path: Path) -> None:
    """A damaged checkpoint, one with other settings or one whose tensors claim other sizes is refused."""
    path = tmp_path / "a.pt"
    write(path, made())
    whole = path.read_bytes()
    content = torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as file:
        start = next(e.header_offset for e in file.infolist() if e.filename.endswith("data.pkl"))

    def one(rng: Random) -> None:
        kind = rng.random()
        if kind < 0.3:  # where its pickle is, and where the list of its records is
            at = rng.choice((start, len(whole) - 30_000))
            path.write_bytes(whole[:at] + damaged(rng, whole[at : at + 30_000]) + whole[at + 30_000 :])
        elif kind < 0.4:
            path.write_bytes(damaged(rng, whole))
        else:
            values = {**content, "text": broken(rng, content["text"]).decode(errors="replace")}
            section = rng.choice(SECTIONS)
            values[section] = mutated(rng, dict.fromkeys(content[section], 0)) if kind < 0.5 else content[section]
            values["sha256"] = _sha256(
                values["text"].encode(errors="replace").decode(), {s: content[s] for s in SECTIONS}
            )
            torch.save(values, path)
        read(path)

    attack("fuzzed checkpoints", 2_000, one)


def test_logs(attack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a run's log that are damaged are left out; its run is summed up."""
    rows = [{"step": i, "loss": 0.5, "images_per_second": 100.0, "held_out_loss": 0.4} for i in range(1, 30)]
    del rows[3]["held_out_loss"]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert [*logged(tmp_path)] == rows

    def one(rng: Random) -> None:
        (tmp_path / "log.jsonl").write_bytes(
            b"\n".join(broken(rng, line) if rng.random() < 0.1 else line.encode() for line in lines)
        )
        summary.show(summary.compared([summary.of_training(RunConfig(), tmp_path, None)]), as_json=rng.random() < 0.5)
        capsys.readouterr()

    attack("fuzzed logs of runs", 4_000, one, allowed=())


def test_jobs(attack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log of a job, and the ledger beside it: what is damaged is passed over."""
    runs = summary.of_records(make.sets({"bf16": (RunConfig(precision="bf16"), 1.2)}, count=1))
    text = json.dumps({summary.RUNS: [run.as_json() for run in runs]})
    log, ledger = tmp_path / "slurm-1.out", tmp_path / "ledger.jsonl"
    (tmp_path / "slurm-1" / LEDGER.parent).mkdir(parents=True)
    record = json.dumps(make.record(RunConfig()).as_dict())

    def one(rng: Random) -> None:
        log.write_bytes(b"srun: x\n" + broken(rng, text) + b"\n" + damaged(rng, text.encode()))
        rows = summary.compared(summary.read_log(log))
        summary.show(rows, as_json=rng.random() < 0.5)
        if rng.random() < 0.1:
            ledger.unlink(missing_ok=True)
            (tmp_path / "slurm-1" / LEDGER).write_bytes(broken(rng, record))
            summary.append_new([log], ledger)
        capsys.readouterr()

    attack("fuzzed logs of jobs", 10_000, one)


def test_command_lines(attack: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Any words are parsed, or refused in one line with exit code 2; nothing is run."""
    words = [
        *(name for members in GROUPS.values() for name in members),
        *(f"--{name}" for name in OPTIONS),
        *(flag(n) for n in OF_TRAINING),
    ]
    words += [*questions(), *("1e400", "-1", "nan", "9" * 5000, "a,b", "", "%", "\ud800", "--", "-p", "x=1")]
    words += ["\x1b[2J", "{", "--x=1"]

    def one(rng: Random) -> None:
        typed = [rng.choice(words[:15]), *rng.choices(words, k=rng.randrange(6))]
        prepare_streams()
        try:
            _parser(typed).parse_args(typed)
        except SystemExit as end:
            assert end.code in (0, 2)  # noqa: PT017
        assert capsys.readouterr().err.rstrip("\n").isprintable()

    attack("fuzzed command lines", 6_000, one)
