"""Published records and figures: rebuilt alike, checked, and without anything personal."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import records as make
from conftest import Call
from PIL import Image, ImageFilter
from test_archives import png as encoded

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import selection
from ddpm_lab.explain.charts import png
from ddpm_lab.ledger import PUBLISHED, Ledger
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import LedgerError, RunRecord
from ddpm_lab.reports import published

SLUG = "example-cpu-9000-2-cores-no-gpu"


def own_records() -> list[RunRecord]:
    """What a user's own ledger holds: a question with a failure, and a comparison of training steps of their own."""
    lost = {"seed": (RunConfig(network="seed"), "crashed", "rank 0: ValueError")}
    found = make.sets({"bf16": (RunConfig(precision="bf16"), 1.5)}, count=6, turns=2, failures=lost)
    own = make.sets({"alice:fast": (RunConfig(workload="alice:fast"), 1.2)}, experiment="compare", count=1, turns=2)
    return [*found, *own]


COMPILED = RunConfig(compile="whole")


def shown(*names: str) -> str:
    """A page with links to these published figures."""
    return "\n".join(f"[figure]({(published.FIGURES / SLUG / name).as_posix()}.png)" for name in names)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with published records and figures; tests copy it before they change it."""
    output = tmp_path_factory.mktemp("published")
    Ledger(output / "own.jsonl").append(own_records())
    (output / "README.md").write_text(shown("03_amp", "06_recommendation"))
    found = published.publish([output / "own.jsonl"], None, output)
    assert [path.name for path, _ in found] == ["03_amp.png", "06_recommendation.png"]
    assert all(path.is_file() for path, _ in found)
    return output


@pytest.fixture
def output(original: Path, tmp_path: Path) -> Path:
    """A copy of the published folders."""
    subprocess.run(["cp", "-r", f"{original}/.", tmp_path], check=True)
    return tmp_path


def test_the_lab_s_own_questions_are_published_and_nothing_of_alice(original: Path, call: Call) -> None:
    assert call("figures", "--check", "--output-dir", original)[0] == 0
    assert not list(original.rglob("*.partial"))
    (ledger,) = (original / PUBLISHED).iterdir()
    assert (ledger.name, "alice" in ledger.read_text()) == (f"{SLUG}.jsonl", False)
    kept = [(r.run_id, r.windows, r.cohort) for r in Ledger(ledger).read()[0]]
    assert kept == [(r.run_id, r.windows, r.cohort) for r in own_records() if r.experiment == "amp"]


def test_looks_are_published_with_what_was_shown_and_trials_of_other_code(tmp_path: Path) -> None:
    """Without the looks a verdict would pay for one; what is learned does not depend on the code that times it.

    Looks at a user's own comparison stay at home.
    """
    found = own_records()
    sets = {name: list(dict.fromkeys(r.set_id for r in found if r.experiment == name)) for name in ("amp", "compare")}

    first = {r.experiment: r for r in reversed(found)}
    shown = [("amp", sets["amp"][:4]), ("amp", sets["amp"]), ("compare", sets["compare"])]
    looks = [make.look(first[name], seen, f"2026-03-0{day}T10:00:00Z") for day, (name, seen) in enumerate(shown, 1)]
    told = {"code-1": {"bf16": (RunConfig(precision="bf16"), 0.0)}, "code-2": {"compiled": (COMPILED, 0.0)}}
    trials = [r for code, tried in told.items() for r in make.trials(tried, seeds=3, code_version=code)]
    Ledger(tmp_path / "own.jsonl").append([*trials, *found, *looks])
    published.publish([tmp_path / "own.jsonl"], None, tmp_path)
    kept = Ledger(tmp_path / PUBLISHED / f"{SLUG}.jsonl").read()[0]
    assert [(r.experiment, r.look) for r in kept if r.role == "look"] == [("amp", r.look) for r in looks[:2]]
    was, now = (
        [(r.code_version, r.label, r.config.seed) for r in each if r.role == "quality"] for each in (trials, kept)
    )
    assert was == now
    assert published.check(tmp_path) == []


@pytest.mark.slow
def test_a_rebuild_elsewhere_gives_the_same_bytes(original: Path, tmp_path: Path) -> None:
    ledger = original / PUBLISHED / f"{SLUG}.jsonl"
    code = (
        "import sys; from pathlib import Path; from ddpm_lab.reports import published\n"
        "published.rebuild([Path(sys.argv[1])], None, Path('.').absolute())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo", "MPLBACKEND": "svg"}
    subprocess.run([sys.executable, "-c", code, ledger], cwd=tmp_path, env=environment, check=True)
    pictures = sorted(p.name for p in (original / published.FIGURES / SLUG).glob("*.png"))
    assert {p.name for p in (tmp_path / "image_output").iterdir()} > set(pictures)
    for name in pictures:
        there = original / published.FIGURES / SLUG / name
        assert (tmp_path / "image_output" / name).read_bytes() == there.read_bytes()


def test_what_was_touched_is_named(output: Path, call: Call) -> None:
    folder, path = output / published.FIGURES / SLUG, output / PUBLISHED / f"{SLUG}.jsonl"
    whole, figure = path.read_text(), (folder / "03_amp.png").read_bytes()
    touched = [json.loads(line) for line in whole.splitlines()]
    for window in (w for values in touched if values["role"] == "candidate" for w in values["windows"]):
        window["seconds"] *= 0.8
    path.write_text("\n".join(map(json.dumps, touched)) + "\n")
    code, _, err = call("figures", "--check", "--output-dir", output)
    assert (code, "03_amp.png differs" in err) == (1, True)
    path.write_text(whole)
    pixels = np.asarray(Image.open(io.BytesIO(figure)).convert("RGB")).copy()
    pixels[: pixels.shape[0] // 3] = 0
    (folder / "03_amp.png").write_bytes(encoded(pixels))
    (folder / "06_recommendation.png").rename(folder / "09_other.png")
    differs, missing, stray = published.check(output)
    assert "03_amp.png differs" in differs
    assert "06_recommendation.png is missing" in missing
    assert "09_other.png" in stray


@pytest.mark.slow
def test_the_pages_say_which_figures_are_published(output: Path, call: Call) -> None:
    folder, readme = output / published.FIGURES / SLUG, output / "README.md"
    readme.write_text(shown("03_amp"))
    (problem,) = published.check(output)
    assert "06_recommendation.png is shown on no page" in problem
    published.publish([output / PUBLISHED / f"{SLUG}.jsonl"], None, output)
    assert [path.name for path in folder.iterdir()] == ["03_amp.png"]
    (output / "docs").mkdir()
    (output / "docs" / "page.md").write_text(shown("05_torch_compile").replace("(", "(../"))
    (problem,) = published.check(output)
    assert "05_torch_compile.png is made by no published record" in problem
    (output / "docs" / "page.md").unlink()
    (output / PUBLISHED / "another-machine.jsonl").touch()
    (problem,) = published.check(output)
    assert "another-machine.jsonl holds no records" in problem
    readme.write_text("no figure")
    records = ("--ledger", output / PUBLISHED / f"{SLUG}.jsonl")
    assert "no figure" in call("figures", "--publish", *records, "--output-dir", output)[2]
    assert not list(folder.iterdir())


def test_a_figure_drawn_elsewhere_may_differ_by_rounding_only(original: Path) -> None:
    """Edges smoothed otherwise are the same picture; another digit, or all moved by a pixel, is another."""
    path = original / published.FIGURES / SLUG / "03_amp.png"
    figure, image = path.read_bytes(), Image.open(path).convert("RGB")
    pixels = np.asarray(image)
    rounded = pixels ^ (np.random.default_rng(0).random(pixels.shape) < 0.1).astype(np.uint8)
    smoothed = np.asarray(image.filter(ImageFilter.GaussianBlur(0.5)))
    for same in (pixels, rounded, smoothed):
        assert published.same_picture(figure, encoded(same))
    for other in (pixels[:-1], np.roll(pixels, 1, axis=1)):
        assert not published.same_picture(figure, encoded(other))
    records = Ledger(original / PUBLISHED / f"{SLUG}.jsonl").read()[0]
    drawn = answer(selection.study(records, "amp")).figure()
    text = next(t for ax in drawn.axes for t in ax.texts if "1.50" in t.get_text())
    text.set_text(text.get_text().replace("1.50", "1.56"))
    assert not published.same_picture(figure, png(drawn))


def test_nothing_to_publish_missing_files_and_torn_lines_are_named(output: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(LedgerError, match=r"empty\.jsonl"):
        published.publish([tmp_path / "empty.jsonl"], None, tmp_path)
    with pytest.raises(LedgerError, match=r"nowhere\.jsonl"):
        published.rebuild([tmp_path / "nowhere.jsonl"], None, tmp_path)
    with (output / PUBLISHED / f"{SLUG}.jsonl").open("a") as file:
        file.write('{"set_id": "torn')
    (problem,) = published.check(output)
    assert "not a record" in problem
    (problem,) = published.check(tmp_path / "nothing")
    assert "no published records" in problem
