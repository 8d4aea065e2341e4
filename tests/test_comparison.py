"""Five lines for anybody's own loop: what is refused, what is measured, and that an edited file is measured again."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab import compare
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import stats
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.questions import planning as pairs
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.comparison import ComparisonResult, first_losses, measure
from ddpm_lab.questions.experiments import study_of
from ddpm_lab.questions.planning import plan_pair

MINE = """
import time

def loop(pieces):
    while True:
        for _ in range(pieces):
            sum(range(20_000))
        yield

def baseline():
    yield from loop(10)

def candidate():
    yield from loop({pieces})
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's file, on the path as a script finds it."""
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(pieces=20))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hardware, "gpus", tuple)
    yield file
    sys.modules.pop("mine", None)


def in_a_cell() -> None:
    """Stands for a function of a notebook."""


FILES = {"huge": 'network = "huge"', "typo": 'netwrok = "tiny"', "folder": 'data = "nowhere"'}
FILES["busy"] = 'workload = "mine:baseline"\nglobal_batch_size = 1\nloader = "files"\nloader_workers = 500'


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("mine", "baseline is 'mine'"),
        ("nowhere:f", "'nowhere:f' cannot be measured"),
        ("none.toml", "baseline: cannot read none.toml"),
        ("huge.toml", "baseline, huge.toml: network is 'huge'"),
        ("typo.toml", "baseline, typo.toml: .*'netwrok'"),
        ("busy.toml", "loader_workers is 500"),
        ("folder.toml", "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    for name, text in FILES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        compare(side, f"{mine.stem}:candidate", output_dir=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out" / "trace_output" / "ledger.jsonl").exists()


def test_sides_that_cannot_be_compared_are_refused(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_a_cell, "__module__", "__main__")
    one, two = (RunConfig(data="x", data_sha256=sha) for sha in ("a", "b"))
    base, other = f"{mine.stem}:baseline", "mine:candidate"
    rows: list[tuple[Any, Any, dict[str, Any], str]] = [
        *((base, other, {"resolution": value}, "resolution is") for value in (0, 5, "2%")),
        (one, two, {}, "train on different images"),
        (base, "mine:baseline", {}, "both sides are mine:baseline"),
        ("python train.py", "python  train.py ", {}, "both sides are 'python  train.py'"),
        (base, in_a_cell, {}, "'in_a_cell'.*'mine:in_a_cell'"),
        (lambda: None, base, {}, "'mine:name'"),
    ]
    for first, second, settings, words in rows:
        with pytest.raises(ConfigError, match=words):
            compare(first, second, output_dir=tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_what_was_edited_is_measured_again_and_nothing_else(mine: Path, tmp_path: Path) -> None:
    """A file, a module that its loop loads, and a file of settings that it reads, unless it writes that in a set."""
    helper, settings, log = (tmp_path / name for name in ("helper_of_mine.py", "settings.json", "log.json"))
    reads = "len(open(HERE + '/settings.json').read() + open(HERE + '/log.json').read())"
    text = MINE.format(pieces=reads) + f"HERE = {str(tmp_path)!r}\n"
    text = text.replace("        yield\n", "        yield\n        open(HERE + '/log.json', 'w').write('0123')\n")
    mine.write_text(text.replace("def loop(pieces):", "def loop(pieces):\n    import helper_of_mine"))
    for file, held in ((helper, ""), (settings, "0" * 20), (log, "")):
        file.write_text(held)
    out = tmp_path / "out"

    def sets() -> int:
        return measure("mine:baseline", "mine:candidate", sets=1, output_dir=out, quiet=True).measured_sets

    assert sets() == 1, "not refused as edited meanwhile"
    assert sets() == 1, "of what it has left there"
    mine.touch()
    assert sets() == 0
    helper.write_text("x = 1\n")
    assert sets() == 1
    settings.write_text("1" * 20)
    assert sets() == 1
    mine.write_text(mine.read_text() + "\nANOTHER = 1\n")
    assert sets() == 1
    assert len({r.code_version for r in Ledger(out / "trace_output" / "ledger.jsonl").read()[0]}) == 5


@pytest.mark.slow
def test_a_file_that_is_edited_while_it_is_measured_leaves_no_record(mine: Path, tmp_path: Path) -> None:
    edits = "import pathlib\npathlib.Path(__file__).write_text(pathlib.Path(__file__).read_text() + '#')\n"
    mine.write_text(MINE.format(pieces=1) + edits)
    with pytest.raises(ConfigError, match=r"the code was edited \(mine\)"):
        measure("mine:baseline", "mine:candidate", sets=1, output_dir=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out" / "trace_output" / "ledger.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_files_of_settings_are_compared_and_everything_is_said(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("global_batch_size = 4\n")
    run = "[train]\nsteps = 5\n"  # as in the file that a training run writes
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.toml").write_text(f"global_batch_size = 8\n{run}[optimizer]\nlearning_rate = 1e-4\n")
    files = (tmp_path / "small.toml", tmp_path / "large" / "config.toml")
    found = compare(*files, sets=1, output_dir=tmp_path, quiet=True)
    assert found.verdict == stats.TOO_FEW
    assert {r.label for r in found.answer.study.records if r.role != "twin"} == {"small", "large"}
    assert {r.status for r in found.answer.study.records} == {"ok"}
    images = {w.images for r in found.answer.study.records for w in r.windows}
    assert len(images) == 1, "both sides process the same number of images in a window"
    assert found.verdict in str(found).lower()
    assert all(word in str(found) for word in ("ran as 1 rank on ", str(found.figure)))
    assert found.figure.is_file()
    assert "alt=" in found._repr_mimebundle_()["text/html"]
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert [side["label"] for side in values["sides"]] == ["small", "small again", "large"]


def test_a_pair_has_the_free_cores_and_keeps_those_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def free_cores() -> int:
        looked.append(1)
        return 1

    monkeypatch.setattr(pairs, "free_cores", free_cores)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    pair = (RunConfig(), RunConfig(precision="bf16"))
    how: dict[str, Any] = {"names": ("a", "b"), "output": tmp_path, "quiet": True, "code": code_version()}

    def threads(planned: Campaign) -> list[int]:
        return [c.threads for c in planned.experiment.configurations]

    one = plan_pair(pair, **how)
    assert threads(one) == [1, 1]
    assert one.on_cores is not None
    assert threads(one.on_cores(2)) == threads(plan_pair(pair, cores=2, **how)) == [0, 0]
    said = plan_pair((RunConfig(threads=2), pair[1]), **how)
    assert (threads(said), said.on_cores, looked) == ([2, 0], None, [1]), "what says its threads keeps them"
    for cores, second, why in ((3, pair[1], "2 are usable"), (1, RunConfig(threads=2), "a side says how many threads")):
        with pytest.raises(ConfigError, match=why):
            plan_pair((pair[0], second), cores=cores, **how)
    shown = make.sets({"b": (pair[1], 1.5)}, baseline=pair[0], experiment="compare")[0]
    shown = dataclasses.replace(shown, role="look", windows=(), look={"sets": [shown.set_id], "log_ratios": {}})
    here = dataclasses.replace(shown.environment, machine=hardware.machine())
    for code, known in (("other", [1, 1]), (how["code"].key, [0, 0])):
        Ledger(tmp_path / LEDGER).append([dataclasses.replace(shown, environment=here, code_version=code)])
        assert threads(plan_pair(pair, **how)) == known, "edited code chooses anew"
    with pytest.raises(ConfigError, match="2 CPU ranks need 2 cores, 1 are free, since other processes take the rest"):
        plan_pair((RunConfig(world_size=2), RunConfig(world_size=2, precision="bf16")), **how)


def test_the_other_way_round_is_another_comparison_and_ends_by_itself(tmp_path: Path) -> None:
    """A gate would pass what is slower by what was measured with the sides exchanged."""
    pair = (RunConfig(threads=1), RunConfig(threads=1, precision="bf16"))
    how: dict[str, Any] = {"output": tmp_path, "quiet": True, "code": code_version()}
    Ledger(tmp_path / LEDGER).append(
        make.on(hardware.machine(), make.trials({"bf16": (RunConfig(precision="bf16"), 0.0)}, seeds=3))
    )
    for (one, two), ratio, name in ((pair, 1.5, "bf16"), (pair[::-1], 1 / 1.5, "fp32")):
        planned = plan_pair((one, two), ("other", name), **how)
        made = make.on(hardware.machine(), make.sets({name: (two, ratio)}, baseline=one, experiment="compare"))
        for _ in range(2):  # what is there twice counts once
            Ledger(tmp_path / LEDGER).append([dataclasses.replace(r, code_version=planned.cohort[1]) for r in made])
        assert len([r for r in study_of(planned.renewed()).records if r.role == "twin"]) == 6
        shown = study_of(planned.renewed())
        assert len(shown.trials) == 6, "which are of neither"
        assert answer(shown).finding.ratio == pytest.approx(ratio, rel=0.02)
    assert not planned.target.exact, "it ends where its resolution is reached"


def test_sets_after_the_answer_are_shown_beside_it() -> None:
    """Whatever they say: the answer stays that of the sets it was first shown for."""
    made = make.sets({"new": (RunConfig(seed=1), 0.9)}, count=20, set_noise=0.02, experiment="compare")
    sets = list(dict.fromkeys(r.set_id for r in made))
    shown = dataclasses.replace(make.study(made), looks=(make.look(made[0], sets[:6], "2026-01-04T10:00:00Z"),))
    found = ComparisonResult(answer=answer(shown), figure=Path("none.png"))
    told = found.as_dict()
    assert (told["verdict"], told["sets"], told["all_sets"]["sets"]) == (stats.SLOWER, 6, 20)
    assert told["all_sets"]["high"] - told["all_sets"]["low"] < told["high"] - told["low"]
    assert "  all 20 sets: ratio 0.9" in str(found)


# --- first losses of both sides ---

ONE = [1.25, 1.1, 1.05]


def sides(**losses: Sequence[float]) -> Study:
    """Sets whose sides gave these first losses, by role."""
    made = make.sets({"working tree": (RunConfig(seed=1), 1.0)}, baseline_label="main", count=2)
    witnesses = {role: {"ranks": [{"first_losses": list(found)}]} for role, found in losses.items()}
    return make.study([dataclasses.replace(r, witness=witnesses[r.role]) for r in made])


def test_the_first_losses_of_two_sides_are_compared_to_the_last_bit() -> None:
    rows: list[tuple[list[float], list[float], list[float], str, str]] = [
        (ONE, [*ONE, 0.9], ONE, "identical", "the first 3 losses"),
        (ONE, [1.25, 1.1, 1.05 + 2**-50], ONE, "differs", "8e-16 of the loss"),
        (ONE, [1.25, 1.0, 1.05], ONE, "differs", "9.1 %"),
        (ONE, [1.25, 0.0, 1.05], ONE, "differs", "100 %"),
        (ONE, [1.25, 1.0, 1.05], [1.25, 1.2, 1.05], "not comparable", "8.3 %"),
        ([0.0] * 3, ONE, [0.0] * 3, "not measured", "no loss"),
        ([], [], [], "not measured", "no loss"),
    ]
    for base, other, twin, verdict, words in rows:
        said, why = first_losses(sides(baseline=base, candidate=other, twin=twin))
        assert said == verdict
        assert words in why


def test_sets_under_two_names_of_one_side_are_one_comparison(tmp_path: Path) -> None:
    """Such as HEAD and main, or a file of settings that was renamed: a gate would see a part of them."""
    pair = (RunConfig(threads=1), RunConfig(threads=1, precision="bf16"))
    for number, names in enumerate((("HEAD", "tree"), ("main", "tree"))):
        planned = plan_pair(pair, names, output=tmp_path, quiet=True, code=code_version())
        named = {"baseline_label": names[0], "family": " against ".join(names[::-1]), "experiment": "compare"}
        made = make.sets({"tree": (pair[1], 0.9)}, baseline=pair[0], count=3, seed=number, **named)  # type: ignore[arg-type]
        made = [dataclasses.replace(r, set_id=f"{names[0]}-{r.set_id}") for r in made]
        made = [dataclasses.replace(r, code_version=planned.cohort[1]) for r in make.on(hardware.machine(), made)]
        Ledger(tmp_path / LEDGER).append(made)
    rows = comparisons(study_of(planned.renewed()))
    assert [(r.family, r.label, r.sets) for r in rows] == [
        ("tree against main", label, 6) for label in ("main", "main again", "tree")
    ]
