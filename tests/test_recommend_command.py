"""The command: from its options to an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import planted_search as planted
import pytest
import records as make
from conftest import Call

from ddpm_lab.ledger import Ledger


def test_it_answers_from_records_and_refuses_mixed_machines(call: Call, tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    Ledger(here).append(planted.searched())
    Ledger(there).append(make.on(make.GPUS, planted.searched(seed=9)))
    code, out, _ = call("recommend", "--ledger", here, "--output-dir", tmp_path, "--train-images", 1000, "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["sets"]) == (0, "faster", 6)
    assert found["low"] < found["ratio"] < found["high"]
    assert not (tmp_path / "recommended.toml").exists(), "records of another machine recommend nothing for this one"
    code, out, err = call("recommend", "--ledger", here, there, "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: the records come from 2 machines: choose one")
    code, out, _ = call("recommend", "--ledger", here, there, "--machine", "all", "--output-dir", tmp_path)
    assert code == 0
    assert "12 sets" in out
    assert "2 machines: " in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--minutes", "0"), "minutes is 0.0: give a number above 0"),
        (("--minutes", "0.1"), "minutes is 0.1: a search and the sets that measure again"),
        (("--only", "precision"), "--only is 'precision': give a setting and its values"),
        (("--only", "speed=all"), "only is 'speed': choose one of precision"),
        (("--train-images", "0"), "train_images is 0: give a whole number of at least 1"),
        (("--resolution", "much"), "a share is 'much'"),
        (("--preset", "huge"), "preset is 'huge'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    call: Call, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    code, out, err = call("recommend", "--device", "cpu", "--output-dir", tmp_path, *options)
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: ")
    assert words in err
    assert not (tmp_path / "trace_output" / "ledger.jsonl").exists()
