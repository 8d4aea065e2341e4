"""How a user's function is called, and where a sentence says that it is written."""

from __future__ import annotations

import dataclasses
import functools
import runpy
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.config import RunConfig
from ddpm_lab.workload import RankContext, Training, arguments_taken, call_maker, named, place_of

CONTEXT = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
CONFIG = RunConfig()


def optional(config: Any = None, *, context: Any = None) -> tuple[Any, Any]:
    return config, context


def test_a_maker_takes_nothing_or_both() -> None:
    assert call_maker(lambda: 7, "mine:make", CONFIG, CONTEXT) == 7
    assert call_maker(lambda config, context: (config, context), "mine:make", CONFIG, CONTEXT) == (CONFIG, CONTEXT)
    assert call_maker(optional, "mine:make", CONFIG, CONTEXT) == (None, None)
    for function in (lambda _a: None, lambda _a, _b, _c: None):
        assert arguments_taken(function) in (1, 3)
        with pytest.raises(TypeError, match=r"workload mine:make takes [13] arguments: write it to take none"):
            call_maker(function, "mine:make", CONFIG, CONTEXT)


def test_a_place_is_a_file_and_a_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import functools\n\n\ndef make():\n    return 1\n\n\n@functools.cache\ndef kept():\n    return 2\n"
    )
    there = runpy.run_path(str(file))
    assert named("mine:make", there["make"]) == "mine:make (mine.py, line 4)"
    assert place_of(there["kept"]) in ("mine.py, line 8", "mine.py, line 9")
    for other in (len, functools.partial(len, ""), None, Training):
        assert place_of(other) == ""
    assert named("mine:len", len) == "mine:len"


def test_a_training_is_given_by_name_and_does_not_change() -> None:
    training = Training(model=None, data=[])
    with pytest.raises(dataclasses.FrozenInstanceError):
        training.data = []  # type: ignore[misc]
    with pytest.raises(TypeError):
        Training(None, [])  # type: ignore[call-arg]
