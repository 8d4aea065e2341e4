"""Records without what tells whose they are: no person, no folder, no name or number of a machine.

What stays is what a reader needs to judge and rebuild a result: hardware and software by their names and versions,
settings, times, losses, hashes of data and code, and why something failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.record import RunRecord

WITNESSED = frozenset(
    {
        *("rank", "world_size", "backend", "device", "device_uuid", "cuda", "threads", "threads_wait"),
        *("unlisted_modules", "precision", "autocast_scaler", "compile", "compiled_frames", "graphs", "graph_breaks"),
        *("recompiles", "parameters", "weights_device", "data_sha256", "loader", "loader_workers", "prefetch_batches"),
        *(
            "implementation",
            "channels_last",
            "kernels",
            "without",
            "attention_axis",
            "adam",
            "ema",
            "ema_warmup",
            "read_loss",
        ),
        "freed_memory",
        *("exchange", "exchange_enabled", "exchange_hook", "nccl", "sampler", "sampler_steps", "flop_per_image"),
        *("flash_attention", "compile_mode", "autotuned", "cuda_graphs", "cuda_graph_skips", "flop", "bytes"),
        *("work", "dtype", "astray_modules", "first_losses"),
        *("message_bytes", "buckets", "summed_over", "waited_seconds", "hosts"),
        *("data_device", "images", "steps", "indices_sha256", "device_used_bytes", "device_total_bytes"),
    }
)
"""What a rank's witness says that is published: a workload of one's own may say anything."""

PATH = "<path>"
_COMMON = {"data", "dataset", "datasets", "image", "images", "localhost", "root", "synthetic", "test", "train", "user"}
"""Names that tell nothing, and that a sentence may hold as words."""

_STOP = r"\s'\"`,;:()<>\[\]"
_PATTERNS: tuple[tuple[str, str], ...] = (
    # In quotes a path may hold spaces.
    (r"(['\"`])(?:~|\.{1,2})?/[^'\"`]*\1", rf"\1{PATH}\1"),
    (r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", "<address>"),
    (r"[\w.+-]+@[\w-][\w.-]*", "<address>"),
    (rf"(?<![\w/.<>])(?:~\w*|\.{{1,2}})?/(?:[^{_STOP}]*[^{_STOP}.])", PATH),
    # A relative path has an ending, or several parts; "images/s" is none.
    (r"(?<![\w/<>])[\w.+-]+(?:/[\w.+-]+)*/[\w+-][\w.+-]*\.[A-Za-z]\w*", PATH),
    (r"(?<![\w/<>])[\w.+-]+(?:/[\w.+-]+){2,}", PATH),
    (rf"{PATH}(?:/?[^{_STOP}]*[^{_STOP}.])?", PATH),
    (r"\b(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<address>"),
    (r"(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}:?[0-9a-f]{1,4}(?![\w:])", "<address>"),
    (r"\b(pids?)([\s=:#]+)\d+", r"\1\2<number>"),
    (r"\b(process|thread|job)([\s=:#]+(?:id[\s=:#]+)?)\d{3,}", r"\1\2<number>"),
    (r"\b(slurm\w*)([\s=:#]+(?:job[\s=:#]+)?(?:id[\s=:#]+)?)\d+", r"\1\2<number>"),
)
_RULES = tuple((re.compile(pattern, re.IGNORECASE), new) for pattern, new in _PATTERNS)


def anonymous(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records without what identifies a person or a machine; done again, nothing changes.

    Host name, kernel, job id, data folder and its name, tracebacks and unknown fields of a witness go; a GPU's UUID
    becomes "GPU 0", "GPU 1", ...; in texts, such as the reason of a failure, paths, addresses, names and process
    numbers are replaced by what they are. Run ids change only where an option of a workload held such a text.
    """
    names = _names(records)
    configs = {r.run_id: _config(r.config, names) for r in records}
    return [_record(r, configs, names) for r in records]


def _record(record: RunRecord, configs: Mapping[str, RunConfig], names: Mapping[str, str]) -> RunRecord:
    uuids = dict.fromkeys(
        [*record.environment.gpu_uuids, *(r.device_uuid for r in record.ranks), *_witnessed(record, "device_uuid")]
    )
    gpus = {uuid: f"GPU {i}" for i, uuid in enumerate(u for u in uuids if u)}
    names = {**names, **{uuid: gpu for uuid, gpu in gpus.items() if uuid != gpu}}
    exact = _exact(names)
    ranks = record.witness.get("ranks")
    seen = [{k: v for k, v in rank.items() if k in WITNESSED} for rank in ranks or [] if isinstance(rank, Mapping)]
    return dataclasses.replace(
        record,
        family=_text(record.family, exact),
        label=_text(record.label, exact),
        config=configs[record.run_id],
        baseline_id=configs[record.baseline_id].run_id if record.baseline_id in configs else record.baseline_id,
        environment=dataclasses.replace(
            record.environment,
            hostname=None,
            kernel="",
            slurm_job_id=None,
            gpu_uuids=tuple(gpus[uuid] for uuid in record.environment.gpu_uuids),
        ),
        data_name=_data_name(record.data_name),
        reason=None if record.reason is None else _text(record.reason, names),
        ranks=tuple(dataclasses.replace(r, device_uuid=gpus.get(r.device_uuid or "")) for r in record.ranks),
        witness={} if ranks is None else {"ranks": _plain(seen, exact)},
        profile=_plain(record.profile, exact),
        space=_plain(record.space, exact),
        quality=_quality(record, exact),
    )


def _quality(record: RunRecord, exact: Mapping[str, str]) -> dict[str, Any] | None:
    """What a trial found; the images that it drew are pixels and no text."""
    if record.quality is None:
        return None
    return {key: value if key == "samples" else _plain(value, exact) for key, value in record.quality.items()}


def _config(config: RunConfig, names: Mapping[str, str]) -> RunConfig:
    options = tuple((key, _plain(value, names)) for key, value in config.options)
    return dataclasses.replace(config, data="", options=options)


def _data_name(name: str) -> str:
    """How many images, and whether they are synthetic, without the folder that they came from."""
    found = re.match(r"(?:[\d,]+ )?(?:synthetic )?images\b", name)
    return found.group() if found else "images" if name else ""


def _witnessed(record: RunRecord, name: str) -> list[Any]:
    ranks = record.witness.get("ranks") or []
    return [rank.get(name) for rank in ranks if isinstance(rank, Mapping)]


def _names(records: Sequence[RunRecord]) -> dict[str, str]:
    """What these records, and whoever publishes them, are called: name to what stands in its place."""
    names = {Path.home().name: "<user>"}
    with contextlib.suppress(OSError, KeyError):  # a container may run as a user without a name
        names[getpass.getuser()] = "<user>"
    for r in records:
        host = r.environment.hostname or ""
        names |= {host: "<host>", host.partition(".")[0]: "<host>", r.environment.slurm_job_id or "": "<number>"}
        names |= dict.fromkeys((r.config.data, Path(r.config.data).name, r.data_name.partition(" from ")[2]), PATH)
        said = json.dumps([r.config.data, r.config.as_dict()["options"], r.reason, r.witness])
        names |= dict.fromkeys(re.findall(r"/(?:home|Users)/([\w.-]+)", said), "<user>")
    return {name: new for name, new in names.items() if len(name) > 2 and name.lower() not in _COMMON}


def _exact(names: Mapping[str, str]) -> dict[str, str]:
    """Those names that no other word can be: folders, and UUIDs of GPUs."""
    return {name: new for name, new in names.items() if name.startswith("/") or new.startswith("GPU ")}


def _text(text: str, names: Mapping[str, str]) -> str:
    """A sentence that says the same of nobody."""
    ordered = sorted(names, key=len, reverse=True)
    exact = _exact(names)
    # A folder's name may hold spaces, so it goes before the paths that begin with it.
    for name in (n for n in ordered if n in exact):
        text = re.sub(rf"{re.escape(name)}(?!\w)", exact[name], text)
    for rule, new in _RULES:
        text = rule.sub(new, text)
    for name in ordered:
        text = re.sub(rf"(?<![\w<]){re.escape(name)}(?![\w>])", names[name], text)
    return text


def _plain(value: Any, names: Mapping[str, str]) -> Any:
    """Every text in plain values."""
    if isinstance(value, str):
        return _text(value, names)
    if isinstance(value, Mapping):
        return {_text(str(key), names): _plain(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, names) for item in value]
    return value
