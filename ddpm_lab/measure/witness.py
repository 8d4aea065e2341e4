"""Does the label tell the truth? What each rank says of itself, against the configuration it was given."""

import dataclasses
from typing import Any

from ddpm_lab.config import OBSERVED_OPTIONS, RunConfig
from ddpm_lab.plan import FLASH_ATTENTION

RECORDED_AFTER = 3  # steps after which a CUDA graph that is to be used has been recorded
SAME_NAME = (
    *("world_size", "precision", "compile", "compile_mode", "loader", "loader_workers", "data_sha256"),
    *("implementation", "channels_last", "kernels", "attention_axis", "read_loss"),
)
"""Settings that a rank says under the names of ``RunConfig``."""


def mismatches(config: RunConfig, ranks: list[dict[str, Any]]) -> list[str]:
    """Sentences, each with what the label says and what ran; none where they agree, or the workload says nothing."""
    if config.command:  # which says nothing of what it runs
        return []
    expected, found = _expected(config), _gone_past(config, ranks)
    if found:
        del expected["compile"], expected["exchange_enabled"]
    for seen in ranks:
        found += _changed(config, seen) + _of_rank(config, seen, expected)
    uuids, hosts, shares = (
        [seen[name] for seen in ranks if seen.get(name)] for name in ("device_uuid", "host", "indices_sha256")
    )
    if sorted(seen["rank"] for seen in ranks) != list(range(config.world_size)):
        found.append(f"the label says {config.world_size} ranks, these ran: {[seen['rank'] for seen in ranks]}")
    if hosts and len(set(hosts)) != config.nodes:
        found.append(f"the label says {config.nodes} hosts, the ranks ran on {len(set(hosts))}")
    if len(set(uuids)) != len(uuids) and not config.oversubscribe:
        found.append(f"{len(uuids)} ranks ran on {len(set(uuids))} distinct GPUs: {', '.join(sorted(set(uuids)))}")
    if len(set(shares)) != len(shares):
        found.append(f"the label says {config.world_size} ranks share each batch, some of them used the same images")
    return found


def _expected(config: RunConfig) -> dict[str, Any]:
    """What each rank has to say of itself where it says anything, by name."""
    exchange, optimizer = dataclasses.asdict(config.exchange), config.optimizer
    found = {
        **{name: getattr(config, name) for name in SAME_NAME},
        "adam": optimizer.adam,
        "ema": optimizer.ema,
        "ema_warmup": optimizer.decay_at(1) < optimizer.ema_decay,
        "exchange": {name: exchange[name] for name in ("enabled", "bucket_view", "static_graph", "bucket_mb")},
        "exchange_enabled": config.exchange.enabled,
        "exchange_hook": config.exchange.hook,
        "nccl": config.exchange.nccl,
        "without": config.option("without", ""),
        "attention": config.option("attention", ""),
        FLASH_ATTENTION: config.option(FLASH_ATTENTION, False),
    }
    # Where nothing is asked for, whatever the machine or its C library does is meant.
    if config.freed_memory == "kept":
        found["freed_memory"] = "kept"
    if config.threads:
        found["threads"] = config.threads
    return found


def _of_rank(config: RunConfig, seen: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What one rank says otherwise than its label."""
    rank = f"rank {seen['rank']}"
    way = ": leave autocast and number formats to the lab, or give a step in place of a loss"
    found = [
        f"the label says {name} {label}, {rank} ran with {seen[name]}{way * (config.is_own and name == 'precision')}"
        for name, label in expected.items()
        if name in seen and seen[name] != label
    ]
    found += consumption(config, seen)
    if not str(seen["device"]).startswith(config.device):
        found.append(f"the label says device {config.device}, {rank} ran on {seen['device']}")
    graphs, skips = seen.get("cuda_graphs"), seen.get("cuda_graph_skips")
    recorded = not skips and (graphs or seen.get("steps", 0) < RECORDED_AFTER)  # with their second run
    if config.compile_mode != "default" and graphs is not None and not recorded:
        found.append(
            f"the label says compile_mode {config.compile_mode}, which runs as CUDA graphs: {rank} recorded {graphs} "
            f"and skipped {skips}; TORCH_LOGS=cudagraphs says why, and compile_mode default does without"
        )
    stranger = not config.workload.startswith("ddpm_lab.") and config.world_size > 1 and config.exchange.enabled
    if stranger and seen.get("steps") and seen.get("collectives") == 0:
        found.append(
            f"the label says world_size {config.world_size}, {rank} exchanged nothing with the others in "
            f"{seen['steps']} steps: let {config.workload} wrap its model in DistributedDataParallel"
        )
    if config.precision == "fp16" and not seen.get("autocast_scaler", True):
        found.append(f"the label says precision fp16, {rank} ran it without a gradient scaler")
    if modules := ", ".join(seen.get("unlisted_modules", ())):
        found.append(
            f"{rank} loaded {modules}, which one step of the workload did not, or not as it was then: import it at the "
            "top of its module, and leave it as it is while it is measured, on all hosts"
        )
    if modules := ", ".join(seen.get("astray_modules", ())):
        found.append(
            f"the label says revision {config.revision}, {rank} loaded {modules} from the working tree: take out what "
            "puts that folder on the Python path while it runs, such as sys.path.insert or an import hook"
        )
    return found


def _gone_past(config: RunConfig, ranks: list[dict[str, Any]]) -> list[str]:
    """What did not happen in rank 0, since the user's training calls another model than it is given or stays eager."""
    seen = ranks[0] if config.is_own and ranks else {}
    missing = ["was not compiled"] if config.compile != "off" and seen.get("compile") == "off" else []
    if seen.get("frames_given_up"):
        why = "something that changes at each step, such as a counter in the model; TORCH_LOGS=recompiles says what"
        return [f"{config.work_name} ({seen['maker']}) was compiled anew until torch went on eagerly: {why}"]
    if config.compile != "off" and seen.get("graphs") == 0 and (not missing or seen.get("frames_tried")):
        why = "something such as torch.compiler.disable keeps it eager, and TORCH_LOGS=graph_breaks says where"
        return [f"{config.work_name} ({seen['maker']}) compiled nothing in {seen['steps']} steps: {why}"]
    if config.exchange.enabled and seen.get("exchange_enabled") is False:
        missing.append(f"exchanged no gradients between its {config.world_size} ranks")
    if not missing:
        return []
    return [
        f"{config.work_name} ({seen['maker']}) {' and '.join(missing)} in {seen['steps']} steps: let its "
        f"{'loss' if 'loss' in seen['offers'] else 'step'} ({seen['place']}) call the model that it is given, as "
        "model(...); one that it holds itself, model.module and a model's other methods go past what the lab sets"
    ]


def _changed(config: RunConfig, seen: dict[str, Any]) -> list[str]:
    """What the user's own training made otherwise than when it was first looked at; the label holds that."""
    return [
        f"{config.work_name} ({seen['maker']}) is not the same each time it is called: {name} {before} when it was "
        f"looked at, {seen[name]} in rank {seen['rank']}; let it depend on nothing but its code"
        for name in (OBSERVED_OPTIONS if config.is_own else ())
        if name in seen and (before := config.option(name, seen[name])) != seen[name]
    ]


def drift(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Whether a rank ended with other threads than it was read to have, so that its speed is of neither number."""
    first, last = before.get("threads"), after["threads"]
    if first in (None, last):
        return []
    return [f"rank {after['rank']} changed its threads from {first} to {last} while it was measured: set them at first"]


def consumption(config: RunConfig, seen: dict[str, Any]) -> list[str]:
    """Whether a rank used as many images as its steps and the batch of its label ask for."""
    images, expected = seen.get("images"), seen.get("steps", 0) * config.rank_batch_size
    if images is None or "steps" not in seen or images == expected:
        return []
    label = f"{config.rank_batch_size} images a step on a rank, {expected} in {seen['steps']} steps"
    every = "let every batch have config.rank_batch_size, the last one too (drop_last=True); samples need a Dataset"
    way = f": {every}" if config.is_own else ""
    return [f"the label says {label}, rank {seen['rank']} used {images}{way}"]
