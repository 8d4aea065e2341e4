"""Records as they may be published: an allow-list of fields, of the lab's own workloads alone.

What is listed is what a reader needs to judge and rebuild a result: hardware and software by name and version,
settings, times, losses, hashes of data and code. A field that is added to a record stays private until it is listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab.config import OWN, OWN_LOADER, RunConfig
from ddpm_lab.record import RunRecord

FIELDS = {
    "record": "set_id experiment family role label config baseline_id plan environment code_version data_name status "
    "reason mechanism_only primary stages compile_cache warmup_steps ranks windows witness profile quality space look "
    "schema",
    "environment": "machine python packages cuda gpu_uuids ram_bytes git_commit load_before date",
    "witness": "ranks",
    "profile": "steps wall_seconds schedule phases operators traces budget wrong_ways",
    "quality": "steps losses held_out weights_sha256 trainer codes samples gradients fid",
    "witness of a rank": "rank world_size backend device device_uuid cuda threads threads_wait precision "
    "autocast_scaler compile compiled_frames graphs graph_breaks recompiles parameters weights_device data_sha256 "
    "loader loader_workers prefetch_batches implementation channels_last kernels without attention_axis adam ema "
    "ema_warmup read_loss freed_memory exchange exchange_enabled exchange_hook nccl sampler sampler_steps "
    "flop_per_image flash_attention compile_mode autotuned cuda_graphs cuda_graph_skips flop bytes work dtype "
    "first_losses message_bytes buckets summed_over waited_seconds hosts data_device images steps indices_sha256 "
    "device_used_bytes device_total_bytes unlisted_modules astray_modules",
}
"""What is published of each part."""
MODULES = ("unlisted_modules", "astray_modules")
"""Fields of a rank's witness that name files of the user, unless they are empty."""
WORDS = ("ways", "package", "without")
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
    # What the lab left out or chose it says in words of its own; what failed may quote anything.
    chosen = record.status == "left out" or (record.role in ("choice", "largest") and record.label != "failure")
    if record.reason and not chosen:
        values["reason"] = found.group() if (found := CAUSE.match(record.reason)) else None
    if "ranks" in values["witness"]:
        values["witness"]["ranks"] = [_witness(seen) for seen in values["witness"]["ranks"]]
    if fid := (values["quality"] or {}).get("fid"):
        values["quality"]["fid"] = {name: value for name, value in fid.items() if name != "reason"}
    text = json.dumps(values)
    uuids = dict.fromkeys([*record.environment.gpu_uuids, *(rank.device_uuid for rank in record.ranks)])
    for i, uuid in enumerate(filter(None, uuids)):
        text = text.replace(f'"{uuid}"', f'"GPU {i}"')
    return RunRecord.from_dict(json.loads(text))


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
    names = FIELDS[part].split()
    return {name: value for name, value in values.items() if name in names}
