"""Spaces: every combination that can be, each once, and the same again from what a record keeps."""

import json
from itertools import product

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.space import Space, Value

BASE = RunConfig(global_batch_size=8)
SPACE = Space(
    baseline=BASE,
    settings={
        "memory": (
            Value("channels_last", "channels_last", {"channels_last": True, "kernels": "aten"}),
            Value("fused", "joined kernels", {"channels_last": True, "kernels": "fused"}),
        ),
        "compile": (Value("off", "eager", {"compile": "off"}), Value("whole", "compiled", {"compile": "whole"})),
        "ranks": tuple(Value(str(n), f"{n} ranks", {"world_size": n}) for n in (1, 2, 16)),
    },
    guess=(1, 0, 0),
    left_out=(("fp16", "needs a CUDA device"),),
)


def test_cells_are_the_combinations_that_can_run() -> None:
    found = SPACE.cells()
    wanted = {}
    for fused, compiled, ranks in product((False, True), (False, True), (1, 2, 16)):
        settings = {"kernels": "fused" if fused else "aten", "compile": "whole" if compiled else "off"}
        try:
            config = RunConfig(global_batch_size=8, world_size=ranks, **settings)  # type: ignore[arg-type]
        except ConfigError:
            continue
        wanted[(int(fused), int(compiled), (1, 2, 16).index(ranks))] = config
    assert found == wanted
    assert next(iter(found)) == SPACE.start
    assert found[SPACE.start] == BASE
    assert all(not (cell[0] and cell[1]) for cell in found), "joined kernels are for an eager step"
    assert all(cell[2] < 2 for cell in found), "16 ranks cannot share 8 images"


def test_what_makes_no_difference_is_there_once() -> None:
    twice = Space(baseline=BASE, settings={"a": (Value("1", "one", {}), Value("2", "two", {"seed": BASE.seed}))})
    assert list(twice.cells()) == [(0,)]


def test_words_name_what_changed() -> None:
    assert SPACE.changed((1, 0, 1), (0, 0, 0)) == "joined kernels, 2 ranks"
    assert SPACE.changed((0, 1, 1), (1, 0, 1)) == "channels_last, compiled"
    assert SPACE.changed((0, 0, 0), (0, 0, 0)) == ""
    assert SPACE.setting("ranks", (1, 0, 1)) == 1
    assert SPACE.setting("batch", (1, 0, 1)) == 0


def test_a_record_keeps_it() -> None:
    again = Space.from_dict(BASE, json.loads(json.dumps(SPACE.as_dict())))
    assert again == SPACE
    assert again.cells() == SPACE.cells()
