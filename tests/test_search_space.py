"""What a search varies on each machine, what it leaves out and says so, and how what it found is measured again."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from test_questions import MACHINES, setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.plan import PRESETS
from ddpm_lab.questions import ask
from ddpm_lab.search_space import recommendation, search
from ddpm_lab.setting import usual_settings
from ddpm_lab.space import Space


def space_of(machine: str = "2 cores", preset: str = "quick", **grid: Any) -> Space:
    found = search(setup(machine, preset), **grid).space
    assert found is not None
    return found


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_combination_runs_here_and_the_plain_step_comes_first(machine: str, preset: str) -> None:
    experiment = search(setup(machine, preset))
    (family,), space = experiment.families, space_of(machine, preset)
    cells = space.cells()
    assert (
        cells[space.start]
        == family.baseline
        == setup(machine, preset).config(global_batch_size=family.baseline.global_batch_size)
    )
    assert [config for _, config in family.candidates] == list(cells.values())[1:]
    assert len({label for label, _ in family.candidates}) == len(family.candidates)
    gpus, cores = MACHINES[machine]
    for config in cells.values():
        assert config.world_size <= (gpus or cores)
        assert config.loader_workers <= cores
        assert gpus or config.precision in ("fp32", "bf16")
    # Every value of every setting is in some combination: what is not is left out and named.
    for place, values in enumerate(space.settings.values()):
        assert {cell[place] for cell in cells} == set(range(len(values))) or place == list(space.settings).index(
            "ranks"
        )
    named = {label for label, _ in space.left_out}
    assert gpus or {"tf32", "fp16"} <= named
    assert all(reason for _, reason in space.left_out)


@pytest.mark.parametrize("machine", ["2 cores", "1 GPU"])
def test_the_guess_is_what_the_trainer_does_by_default(machine: str) -> None:
    space = space_of(machine)
    config = space.cells()[space.guess]
    assert {name: getattr(config, name) for name in usual_settings(config.device)} == usual_settings(config.device)


def test_settings_are_held_to_some_values_and_the_first_is_where_it_sets_out() -> None:
    space = space_of(only={"precision": ["bf16"], "loader": ["files-1", "packed"], "batch": [4, 12], "ranks": [1, 2]})
    assert {c.precision for c in space.cells().values()} == {"bf16"}
    assert (space.baseline.loader_workers, space.baseline.global_batch_size) == (1, 4)
    assert {c.global_batch_size for c in space.cells().values()} == {4, 12}
    assert space_of(global_batch_size=6).baseline.global_batch_size == 6


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (
            {"only": {"speed": ["all"]}},
            "only is 'speed': choose one of precision, memory, compile, freed_memory, ranks, loader, batch",
        ),
        (
            {"only": {"precision": ["fp16"]}},
            "only precision has 'fp16', which needs a CUDA device: choose from fp32, bf16",
        ),
        ({"only": {"ranks": [64]}}, "only ranks is '64': choose one of 1, 2"),
        ({"only": {"batch": ["many"]}}, "only batch is 'many'"),
        ({"only": {"memory": "nchw"}}, "give a list"),
        ({"only": ["precision"]}, "give settings with lists"),
        ({"any_batch": "yes"}, "any_batch is 'yes': choose one of True, False"),
        ({"global_batch_size": 0}, "whole number of at least 1"),
        (
            {
                "only": {n: [1] for n in ("ranks",)}
                | {"precision": ["fp32"], "memory": ["nchw"], "compile": ["off"], "freed_memory": ["default"]}
                | {"loader": ["packed"], "batch": [8]}
            },
            "nothing is left to be searched",
        ),
    ],
)
def test_what_there_is_not_is_refused(grid: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ask("search", setup(), **grid)


def test_what_was_found_is_measured_with_every_step_to_it_in_the_same_sets() -> None:
    space = space_of()
    cells = space.cells()
    names = list(space.settings)

    def cell(**places: int) -> tuple[int, ...]:
        return tuple(places.get(name, 0) for name in names)

    steps = [space.start, cell(precision=1), cell(precision=1, ranks=1), cell(precision=1, ranks=1, loader=2)]
    experiment = recommendation(setup(), space=space, steps=steps)
    (family,) = experiment.families
    assert family.together
    assert family.baseline == space.baseline
    assert [config for _, config in family.candidates] == [cells[steps[3]], cells[steps[1]], cells[steps[2]]]
    assert family.candidates[0][0] == "bf16, 2 ranks, files, 1 worker"
    trained = [dataclasses.replace(t.config, purpose="timing", options=()) for t in experiment.trials]
    assert trained == [cells[steps[2]], cells[steps[3]]], "a loader alone must learn the same, which seconds show"
    longer = recommendation(setup(), space=space, steps=steps[:2]).families[0]
    assert longer.name != family.name, "sets that compare others are others"
    alone = recommendation(setup(), space=space, steps=[space.start])
    assert (alone.families[0].candidates, alone.trials) == ((), ())


def test_trials_are_of_what_was_found_where_seeds_are_asked_for() -> None:
    space = space_of()
    steps = [space.start, tuple(int(name == "precision") for name in space.settings)]
    assert not ask("recommendation", setup(), space=space, steps=steps).trials
    found = ask("recommendation", setup(), space=space, steps=steps, seeds=5, images=80).trials
    assert [(t.label, t.config.seed) for t in found[:4]] == [
        ("baseline", 0),
        ("bf16", 0),
        ("baseline", 1),
        ("bf16", 1),
    ]
    assert len(found) == 10
