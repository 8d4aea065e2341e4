"""Figures and findings from records alone: a user's own, and the published ones that stand in the checkout.

What is published is an allow-list of fields, of the lab's own workloads alone: what a reader needs to judge and rebuild
a result. A field that is added to a record stays private until it is listed.
"""

import dataclasses
import io
import json
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from ddpm_lab.config import OWN, OWN_LOADER, RunConfig
from ddpm_lab.explain import selection
from ddpm_lab.explain.charts import png
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.selection import LOOK, RECOMMENDATION, Study, study
from ddpm_lab.files import CHECKOUT, check_room, replace
from ddpm_lab.ledger import PUBLISHED, Ledger, published_trials, read_all, with_texts
from ddpm_lab.plan import SEARCH
from ddpm_lab.questions.ask import answer, every_question
from ddpm_lab.questions.experiments import of_training
from ddpm_lab.questions.recommendation import OTHER_WORK
from ddpm_lab.record import LedgerError, RunRecord

SHOWN = {*every_question(), SEARCH}
"""Experiments whose records some figure shows: the questions, and the search behind the recommendation."""
FIGURES = Path("image_output", "published")
AGAIN = "run ddpm-lab figures --publish"


def rebuild(ledgers: Sequence[Path], machine: str | None, output: Path) -> list[tuple[Path, Finding]]:
    """Draw every figure that the records of one machine allow into ``image_output/``; return them with findings.

    Raises LedgerError where a file is missing or holds nothing to draw, or several machines are in the files and none
    is named.
    """
    all_records, damaged = read_all(ledgers)
    records = selection.with_looks(_shown(all_records, machine), all_records)
    if not records:
        raise LedgerError(
            f"{', '.join(map(str, ledgers))} holds no records of a question with figures: what `compare` and other "
            "commands measured they draw themselves, when given again"
        )
    selection.note(damaged)
    return _draw(_studies(records, output, machine, CHECKOUT), output / "image_output")


def publish(ledgers: Sequence[Path], machine: str | None, output: Path) -> list[tuple[Path, Finding]]:
    """Replace the published records of one machine by these, and draw those of its figures that a page shows."""
    records, _ = read_all(ledgers)
    shown = set(_shown(records, machine))
    # Trials of earlier code speak of the same mathematics, and go on doing so where no figure shows them.
    data = {(r.machine.key, r.cohort[2]) for r in shown}
    trials = {r for r in records if r.role == "quality" and r.experiment in SHOWN}
    chosen = anonymous([r for r in records if r in shown or (r in trials and (r.machine.key, r.cohort[2]) in data)])
    if not chosen:
        raise LedgerError(f"there is nothing to publish in {', '.join(map(str, ledgers))}: measure first")
    slug = re.sub(r"[^a-z0-9]+", "-", chosen[-1].machine.name.lower()).strip("-")
    target, folder = output / PUBLISHED / f"{slug}.jsonl", output / FIGURES / slug
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    Ledger(partial).append(chosen)
    partial.replace(target)
    for old in folder.glob("*.png"):
        old.unlink()
    return _draw(_studies(Ledger(target).read()[0], output), folder, shown_in_pages(output))


def check(output: Path) -> list[str]:
    """Compare each figure that a page shows with what the published records give; a sentence for each problem."""
    problems: list[str] = []
    wanted, expected = shown_in_pages(output), dict[Path, bytes]()
    for ledger in _ledgers(output):
        records, damaged = Ledger(ledger).read()
        problems += map(str, damaged)
        if records:
            expected |= _pictures(_studies(records, output), output / FIGURES / ledger.stem, wanted)
        else:
            problems.append(f"{ledger} holds no records: delete it, or publish that machine's records again")
    for path in sorted({*wanted, *(output / FIGURES).rglob("*.png")}):
        if path not in wanted:
            problems.append(f"{path} is shown on no page: delete it, or link to it")
        elif path not in expected:
            problems.append(f"{path} is made by no published record: take the link out, or measure it")
        elif not path.exists():
            problems.append(f"{path} is missing: {AGAIN}")
        elif not same_picture(path.read_bytes(), expected[path]):
            problems.append(f"{path} differs from what the published records give: {AGAIN}")
    return problems if _ledgers(output) or problems else [f"there are no published records in {output / PUBLISHED}"]


def _ledgers(output: Path) -> list[Path]:
    return sorted((output / PUBLISHED).glob("*.jsonl"))


def shown_in_pages(output: Path) -> set[Path]:
    """The published figures that the README and the pages in ``docs/`` show or link to."""
    pages = [path for path in (output / "README.md", *output.glob("docs/*.md")) if path.is_file()]
    found = (
        re.findall(rf"\((?:\.\./)?({FIGURES.as_posix()}/[^)]+\.png)\)", page.read_text(encoding="utf-8"))
        for page in pages
    )
    return {output / path for each in found for path in each}


def same_picture(one: bytes, other: bytes) -> bool:
    """Equal bytes, or the same picture drawn with other rounding in its anti-aliasing.

    Blurred over 1.5 pixels, another digit in small grey text differs by at least 45 of 255 levels, and an edge that
    was smoothed otherwise, or moved by half a pixel, by at most 21.
    """
    if one == other:
        return True
    with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what is no picture is another one
        opened = [Image.open(io.BytesIO(b)) for b in (one, other)]
        if opened[0].size == opened[1].size:
            smooth = [picture.convert("RGB").filter(ImageFilter.GaussianBlur(1.5)) for picture in opened]
            return int(np.asarray(ImageChops.difference(*smooth)).max()) <= 30
    return False


def _shown(records: Sequence[RunRecord], machine: str | None) -> list[RunRecord]:
    """The records that some figure shows, in their order: a question's of the lab where it has any."""
    key = selection.machine_key(records, machine) if records else ""
    labs = of_training([r for r in records if r.machine.key == key], None)
    asked = {r.experiment for r in labs if r.role not in ("note", LOOK)}
    mine = [*labs, *(r for r in records if r.machine.key == key and r.experiment not in asked)]
    wanted = {r for r in selection.chosen(mine, RECOMMENDATION) if r.experiment in SHOWN}
    return [r for r in records if r in wanted]


def _studies(
    records: Sequence[RunRecord], output: Path, machine: str | None = None, published: Path | None = None
) -> list[Study]:
    """What the records of each question show, beside the trials published in ``published`` (default: ``output``)."""
    asked, trials = {RECOMMENDATION, *(r.experiment for r in records)}, published_trials(published or output)
    labs = [r for r in records if r.role == LOOK or not r.config.is_own]
    recommends = any(r.windows and r.experiment not in OTHER_WORK for r in labs)
    # Published claims are about this trainer, and so is a recommendation, where it has one.
    alone = (*selection.BESIDE_OTHERS, *[RECOMMENDATION] * recommends)
    studies = [
        study(labs if name in alone else records, name, machine=machine, output_dir=output)
        for name in every_question()
        if name in asked
    ]
    return [dataclasses.replace(s, published_trials=trials) for s in studies]


def _pictures(studies: Sequence[Study], folder: Path, wanted: Container[Path] | None = None) -> dict[Path, bytes]:
    """The figures of the answers by their files in ``folder``: all, or those ``wanted``."""
    found: dict[Path, bytes] = {}
    for shown in map(answer, studies):
        for name, draw in [("", shown.figure), *((f"_{v.name}", v.figure) for v in shown.views if v.figure)]:
            path = folder / f"{shown.file}{name}.png"
            if (wanted is None or path in wanted) and (figure := draw()) is not None:
                found[path] = png(figure)
    return found


def _draw(studies: Sequence[Study], folder: Path, wanted: Container[Path] | None = None) -> list[tuple[Path, Finding]]:
    check_room(folder)
    pictures = _pictures(studies, folder, wanted)
    for path, picture in pictures.items():
        replace(path, picture)
    files = ((folder / f"{shown.file}.png", shown.finding) for shown in map(answer, studies))
    return [(path, finding) for path, finding in files if path in pictures]


# --- what may be published -------------------------------------------------------------------------------------------

FIELDS = {
    "record": "set_id experiment family role label config baseline_id plan environment code_version data_name status "
    "reason mechanism_only primary stages compile_cache warmup_steps ranks windows witness profile quality space look "
    "schema",
    "environment": "machine python packages cuda gpu_uuids ram_bytes git_commit load_before date",
    "witness": "ranks",
    "profile": "steps wall_seconds schedule phases operators traces budget wrong_ways",
    "quality": "steps losses held_out weights_sha256 trainer codes samples gradients fid",
    "witness of a rank": "rank world_size backend device device_uuid cuda threads threads_wait precision "
    "autocast_scaler compile compiled_frames frames_tried frames_given_up graphs graph_breaks recompiles parameters "
    "weights_device data_sha256 "
    "loader loader_workers prefetch_batches implementation channels_last kernels without attention_axis adam ema "
    "ema_warmup read_loss freed_memory exchange exchange_enabled exchange_hook nccl sampler sampler_steps "
    "flop_per_image flash_attention compile_mode autotuned cuda_graphs cuda_graph_skips flop bytes work dtype "
    "first_losses message_bytes buckets summed_over waited_seconds hosts data_device images steps indices_sha256 "
    "device_used_bytes device_total_bytes unlisted_modules astray_modules attention collectives",
}
"""What is published of each part."""
MODULES = ("unlisted_modules", "astray_modules")
"""Fields of a rank's witness that name files of the user, unless they are empty."""
WORDS = ("ways", "package", "without", "attention")
"""Options whose value is a word of the lab's, and not a path or name of the user's."""
CAUSE = re.compile(r"rank \d+(?:: \w+(?=:)| was killed by SIG\w+(?: in '\w+' of step \d+)?)")
"""What is published of a failure's reason: which rank, and the kind of error or the signal."""


def anonymous(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records of the lab's own workloads, without what identifies a person or a machine.

    A GPU's UUID becomes "GPU 0", "GPU 1", ...; of why something failed its kind stays; run ids change only where an
    option held a text of the user's. Done again, nothing changes.
    """
    own = [
        r for r in records if r.config.workload.startswith("ddpm_lab.") and r.config.workload not in (OWN, OWN_LOADER)
    ]
    ids = {r.run_id: RunConfig.from_dict(_config(r.config.as_dict())).run_id for r in own}
    return [_record(r, ids) for r in own]


def _record(record: RunRecord, ids: Mapping[str, str]) -> RunRecord:
    values = _listed("record", record.as_dict())
    for part in ("environment", "witness", "profile", "quality"):
        values[part] = None if values[part] is None else _listed(part, values[part])
    values["environment"] |= {"hostname": None, "kernel": "", "slurm_job_id": None}
    values["config"] = _config(values["config"])
    values["baseline_id"] = ids.get(record.baseline_id, record.baseline_id)
    values["data_name"] = "".join(re.findall(r"^(?:[\d,]+ )?(?:synthetic )?images\b", record.data_name))
    # What the lab left out or found the largest it says in its own words; what failed may quote anything.
    chosen = record.status == "left out" or (record.role == "largest" and record.label != "failure")
    if record.reason and not chosen:
        values["reason"] = found.group() if (found := CAUSE.match(record.reason)) else None
    if "ranks" in values["witness"]:
        values["witness"]["ranks"] = [_witness(seen) for seen in values["witness"]["ranks"]]
    if fid := (values["quality"] or {}).get("fid"):
        values["quality"]["fid"] = {name: value for name, value in fid.items() if name != "reason"}
    uuids = dict.fromkeys([*record.environment.gpu_uuids, *(rank.device_uuid for rank in record.ranks)])
    known = {uuid: f"GPU {i}" for i, uuid in enumerate(filter(None, uuids))}
    return RunRecord.from_dict(with_texts(json.loads(json.dumps(values)), lambda text: known.get(text, text)))


def _config(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the folder of the data and without options that hold texts of the user's."""
    options = {k: v for k, v in values["options"].items() if k in WORDS or isinstance(v, int | float)}
    return {**values, "data": "", "options": options}


def _witness(seen: Mapping[str, Any]) -> dict[str, Any]:
    kept = _listed("witness of a rank", {k: v for k, v in seen.items() if k not in MODULES or not v})
    if waits := kept.get("threads_wait"):
        kept["threads_wait"] = {name: value for name, value in waits.items() if str(value).isalnum()}
    return kept


def _listed(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in FIELDS[part].split()}
