"""Published records and figures: rebuilt alike, without anything personal, and the README's numbers derived again."""

import io
import json
import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make
from conftest import Call
from PIL import Image, ImageFilter
from scipy import stats
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
TIMED = ("baseline", "twin", "candidate")


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


def test_questions_with_their_looks_and_all_trials_are_published_and_nothing_of_alice(
    tmp_path: Path, call: Call
) -> None:
    """Without the looks a verdict would pay for one; what is learned does not depend on the code that times it.

    Looks at a user's own comparison stay at home.
    """
    found = own_records()
    sets = {name: list(dict.fromkeys(r.set_id for r in found if r.experiment == name)) for name in ("amp", "compare")}
    first = {r.experiment: r for r in reversed(found)}
    seen = [("amp", sets["amp"][:4]), ("amp", sets["amp"]), ("compare", sets["compare"])]
    looks = [make.look(first[name], ids, f"2026-03-0{day}T10:00:00Z") for day, (name, ids) in enumerate(seen, 1)]
    told = {"code-1": {"bf16": (RunConfig(precision="bf16"), 0.0)}, "code-2": {"compiled": (COMPILED, 0.0)}}
    trials = [r for code, tried in told.items() for r in make.trials(tried, seeds=3, code_version=code)]
    Ledger(tmp_path / "own.jsonl").append([*trials, *found, *looks])
    published.publish([tmp_path / "own.jsonl"], None, tmp_path)
    (ledger,) = (tmp_path / PUBLISHED).iterdir()
    assert (ledger.name, "alice" in ledger.read_text()) == (f"{SLUG}.jsonl", False)
    kept = Ledger(ledger).read()[0]
    timed = [[(r.run_id, r.windows, r.cohort) for r in rs if r.role in TIMED] for rs in (kept, found)]
    assert timed[0] == timed[1][: len(timed[0])] != []
    assert [(r.experiment, r.look) for r in kept if r.role == "look"] == [("amp", r.look) for r in looks[:2]]
    was, now = (
        [(r.code_version, r.label, r.config.seed) for r in each if r.role == "quality"] for each in (trials, kept)
    )
    assert was == now
    assert call("figures", "--check", "--output-dir", tmp_path)[0] == 0


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


# --- the numbers of the README, without the lab's own statistics ---

CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "docs" / "measuring.md"]
README = "\n".join(path.read_text() for path in PAGES)
HERE = "amd-epyc-family-26-model-2-2-cores-no-gpu"
MILAN = "amd-epyc-family-25-model-1-2-cores-no-gpu"
GENOA = "amd-epyc-family-25-model-17-2-cores-no-gpu"
XEON = "intel-r-xeon-r-processor-family-6-model-207-2-cores-no-gpu"
XEON_CORE = "intel-r-xeon-r-processor-family-6-model-207-1-core-no-gpu"
H100 = "1-x-nvidia-h100-80gb-hbm3-intel-r-xeon-r-processor-family-6-model-207-16-cores"
LEVERS = "seed, batch 32, one lever at a time"
ON_A_GPU = "seed, batch 128, 1 GPU"
ROWS = {
    f"bf16 in place of fp32](../image_output/published/{HERE}/07": (HERE, "peers", LEVERS, "", "fp32"),
    "2 loader workers": (HERE, "workers", "training, tiny, batch 8, fp32", "2 workers", ""),
    "bf16 in place of fp32, AVX512_BF16": (XEON, "amp", "seed, batch 8, 1 rank", "bf16", ""),
    "bf16 in place of fp32, no bf16": (MILAN, "amp", "seed, batch 8, 1 rank", "bf16", ""),
    "| [compiled in place of eager]": (GENOA, "quality", "tiny, batch 8", "compiled", ""),
    "bf16 and fused kernels": (GENOA, "quality", "seed, batch 8", "bf16 with fused kernels", ""),
    "bf16 in place of exact fp32": (H100, "amp", ON_A_GPU, "bf16", ""),
    "tf32 in place of exact fp32": (H100, "amp", ON_A_GPU, "tf32", ""),
    "[compiled bf16 in place of eager": (H100, "torch_compile", f"{ON_A_GPU}, bf16", "compiled", ""),
}
"""Rows by their words: machine, question, family, and the two labels that are compared; none is the baseline."""


@cache
def records(machine: str) -> list[dict[str, Any]]:
    ledger = CHECKOUT / "trace_output" / "published" / f"{machine}.jsonl"
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def sets_of(machine: str, experiment: str, family: str, label: str) -> Iterator[float]:
    """Log of the speed of one label relative to the baseline and its repeat, in each quiet set.

    Of a quiet one, a fifth of the time at most is in turns in which others took a quarter of a core that was wanted.
    """
    sets: dict[str, dict[str, dict[str, dict[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    turns: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    spared = 14 if machine == H100 else 0
    for record in records(machine):
        if (record["experiment"], record["family"]) == (experiment, family):
            seconds = {w["turn"]: w["seconds"] / w["images"] for w in record["windows"]}
            for w in record["windows"]:
                turns[record["set_id"]][w["turn"]].append((w["others_cores"] - spared, w["seconds"]))
            sets[record["set_id"]][record["role"]][record["label"]] = seconds
    for name, found in sets.items():
        taken = [np.array(turn).T for turn in turns[name].values()]
        crowded = sum(seconds.sum() for others, seconds in taken if others.mean() >= 0.25)
        quiet = crowded <= 0.2 * sum(seconds.sum() for _, seconds in taken)
        if (theirs := found["candidate"].get(label)) and quiet:
            (base,), (twin,) = found["baseline"].values(), found["twin"].values()
            yield float(np.mean([math.log(base[t] * twin[t]) / 2 - math.log(theirs[t]) for t in theirs]))


def check_interval(low: float, high: float, logs: Sequence[float]) -> None:
    """It may differ from Student's t, since other comparisons of the machine moderate it, but not by much."""
    width = stats.sem(logs) * stats.t.ppf(0.975, len(logs) - 1)
    assert 0.4 < math.log(high / low) / 2 / width < 2.5, f"plain interval: {math.exp(width) - 1:.1%}"


@pytest.mark.parametrize("row", ROWS)
def test_a_number_of_the_readme_is_what_the_records_give(row: str) -> None:
    """Ratio and sets exactly, the interval nearly."""
    (line,) = [line for line in README.splitlines() if row in line]
    found = re.search(r"([\d.]+) \(([\d.]+) to ([\d.]+)\), (\d+) sets", line)
    assert found
    ratio, low, high = map(float, found.groups()[:3])
    machine, experiment, family, *labels = ROWS[row]
    one, other = (list(sets_of(machine, experiment, family, label)) if label else [0.0] for label in labels)
    sets = np.subtract(one, other).tolist()
    assert len(sets) == int(found[4])
    assert f"{math.exp(np.mean(sets)):.{len(found[1]) - 2}f}" == found[1]
    assert low <= ratio <= high
    check_interval(low, high, sets)


CHANGES = {
    "bf16": "bf16",
    "this lab's fused kernels": "fused kernels in channels last",
    "freed memory kept": "freed memory kept",
    "torch.compile": "compiled",
    "2 ranks": "2 ranks",
}
"""Rows of the table of single changes, by their first words."""
COLUMNS = ("`tiny`, 8", "`seed`, 8", "`seed`, 32", "`ddpm`, 8")


def test_the_table_of_single_changes_is_what_the_records_give() -> None:
    """Each ratio exactly, its interval beside Student's t; bold is what Student's t tells from 1 too."""
    lines, told = README.splitlines(), dict[str, str]()
    (head,) = (i for i, line in enumerate(lines) if all(name in line for name in COLUMNS))
    names = [cell.strip() for cell in lines[head].strip("|").split("|")][1:]
    for line, (words, label) in zip(lines[head + 2 :], CHANGES.items(), strict=False):
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert words in first
        for name, cell in zip(names, cells, strict=True):
            found = re.fullmatch(r"(\**)([\d.]+) \(([\d.]+)–([\d.]+)\)\1", cell)
            assert found, cell
            low, high = float(found[3]), float(found[4])
            family = name.replace("`", "").replace(", ", ", batch ")
            logs = list(sets_of(HERE, "bottleneck", f"{family}, 1 rank, one change at a time", label))
            assert len(logs) >= 4
            if not found[1]:  # what was called stays as it was first called, whatever was measured since
                assert f"{math.exp(np.mean(logs)):.2f}" == found[2], (words, name)
            t, p = stats.ttest_1samp(logs, 0.0)
            assert not found[1] or (p < 0.05 and (t > 0) == (low > 1)), (words, name)
            check_interval(low, high, logs)
            told[name] = found[2]
        if words == "bf16":
            xeon = math.exp(np.mean([*sets_of(*ROWS["bf16 in place of fp32, AVX512_BF16"][:-1])]))
            first = f"[{told[COLUMNS[1]]} times as fast](docs/measuring.md#more-results) as fp32 on two AMD Zen 5 cores"
            assert f"{first}, {xeon:.2f} times on two Intel Xeon cores without AMX." in README


def test_every_ratio_of_the_readme_is_derived_here() -> None:
    assert len(re.findall(r"\d \([\d.]+ to [\d.]+\), \d+ sets", README)) == len(ROWS)


def test_timed_once_is_off_by_what_the_readme_says() -> None:
    """The seven ways of the picture: each repeat's seconds of fp32 over those of bf16."""
    told: dict[int, dict[str, list[float]]] = defaultdict(dict)
    for record in records(MILAN):
        if record["role"] == "wrong" and record["label"] in ("fp32", "bf16"):
            ways, begun = record["profile"]["wrong_ways"], record["stages"]
            first, runs = ways["fresh"]["step_seconds"], ways["runs"]["seconds"]
            process = begun["start"] + begun["build"] + sum(first)
            seconds = [process, first[0], sum(first), ways["bars"]["seconds"], ways["profiled"]["seconds"]]
            told[record["config"]["seed"]][record["label"]] = [*seconds, min(runs), sum(runs)]
    ratios = [np.divide(each["fp32"], each["bf16"]) for each in told.values()]
    assert np.shape(ratios) == (20, 7)
    sets = list(sets_of(MILAN, "claims", "tiny, batch 8", "bf16"))
    long = np.transpose(ratios)[6]
    lowest, most = np.exp([min(sets), max(sets)])
    quiet = [r for r in records(MILAN) if (r["experiment"], r["label"], len(r["windows"])) == ("claims", "bf16", 8)]
    steps = [sum(w["steps"] for w in r["windows"]) for r in quiet]
    words = f"say {min(long):.2f} to {max(long):.2f}; eight sets, of {min(steps)} to {max(steps)} steps each, "
    assert words + f"{lowest:.2f} to {most:.2f}, together {math.exp(np.mean(sets)):.2f} (" in " ".join(README.split())


def test_time_to_one_loss_is_images_by_their_time() -> None:
    """Images to the largest final loss of all 18 runs, paired by seed; the ends of both intervals are multiplied."""
    found = re.search(r"diffusers, tuned, to one held-out loss.* ([\d.]+) \(([\d.]+) to ([\d.]+)\), 9 seeds", README)
    assert found
    curves: dict[str, dict[int, list[dict[str, float]]]] = defaultdict(dict)
    for record in (*records(GENOA), *records(XEON_CORE)):
        if (record["experiment"], record["role"]) == ("peers", "quality"):
            curves[record["label"]][record["config"]["seed"]] = record["quality"]["held_out"]
    sides = [curves["this trainer"], curves["diffusers, tuned"]]
    loss = max(looks[-1]["loss"] for side in sides for looks in side.values())
    logs = []
    for seed in range(9):
        needed = []
        for side in sides:
            before, after = next((a, b) for a, b in pairwise(side[seed]) if b["loss"] <= loss)
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            needed.append(before["images"] + share * (after["images"] - before["images"]))
        logs.append(math.log(needed[1] / needed[0]))
    times = [-log for log in sets_of(GENOA, "peers", "seed, batch 8", "diffusers, tuned")]
    assert (len(times), f"{math.exp(np.mean(logs) + np.mean(times)):.2f}") == (4, found[1])
    reach = stats.t.interval(0.95, 8, np.mean(logs), stats.sem(logs))
    check_interval(float(found[2]) / math.exp(reach[0]), float(found[3]) / math.exp(reach[1]), times)


@pytest.mark.parametrize(
    ("machine", "images", "label", "margin"),
    [
        (GENOA, 60_000, "bf16", 0.002),
        (GENOA, 150_000, "compiled", 0.001),
        (GENOA, 150_000, "batch 16", -0.005),
        (GENOA, 5_000, "bf16 with fused kernels", 0.0005),
        (XEON_CORE, 60_000, "bf16", 0.002),
        (XEON_CORE, 60_000, "fused kernels in channels last", 0.002),
        (XEON_CORE, 60_000, "compiled", 0.002),
    ],
)
def test_what_is_worse_and_what_is_not(machine: str, images: int, label: str, margin: float) -> None:
    """Held-out losses, paired by seed: Student's t at 90 %, as is usual for equivalence. Below 0, it is exceeded."""
    last: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records(machine):
        if record["role"] == "quality" and (looks := record["quality"]["held_out"]) and looks[-1]["images"] == images:
            last[record["label"]][record["config"]["seed"]] = looks[-1]["loss"]
    base = last["fp32" if machine == GENOA else "the present settings"]
    apart = [loss - base[seed] for seed, loss in last[label].items()]
    low, high = stats.t.interval(0.9, len(apart) - 1, np.mean(apart), stats.sem(apart))
    assert low > -margin if margin < 0 else high < margin
    told = "not worse" if margin > 0 else "batch 16 in place of 8 is worse"
    words = f"{told} after {images:,} images (5 seeds"
    assert (len(apart), words in README) == (5, True)
