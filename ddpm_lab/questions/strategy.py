"""Which ranks to train with on this machine: ask the records, and measure what they lack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, choice, missing_to_explain, whole
from ddpm_lab.config import DEVICES, NETWORKS
from ddpm_lab.explain import strategy as explained
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import current
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planned import Measured
from ddpm_lab.training.setting import check_ranks, usual_device

if TYPE_CHECKING:
    from ddpm_lab.explain.strategy import Strategy

MODES = ("single", "multi", "auto")
USUAL = {"cpu": ("tiny", 32), "cuda": ("seed", 128)}
"""Network and global batch size by kind of device, where neither was said."""


class NoRanksError(ConfigError):
    """Several ranks were asked for where there can be only one: nothing is wrong but the machine."""

    exit_code = 1


def most_ranks(device: str) -> tuple[int, str]:
    """How many ranks can have a device of their own, on all hosts of a job, and whose devices these are, in words."""
    count, unit = (len(hardware.gpus()), "GPU") if device == "cuda" else (hardware.usable_cores(), "usable core")
    if (cluster := current()) is None:
        return count, f"this machine has {count} {unit}"
    hosts = len(cluster.hosts)
    most = hosts * min(count, cluster.node_size)
    return most, f"this job has room for {most} rank{'s' * (most != 1)} on {hosts} host{'s' * (hosts != 1)}"


def several_ranks(device: str, *, oversubscribe: bool = False) -> int:
    """The number of ranks that --ranks multi asks for; raises NoRanksError where there can be only one."""
    most, have = most_ranks(device)
    if most < 2 and not (oversubscribe and device == "cpu"):
        raise NoRanksError(f"--ranks multi needs two ranks, and {have}: use --ranks single")
    return most if device == "cuda" else 2


def strategy(
    *,
    network: str | None = None,
    parameters: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    output_dir: str | Path | None = None,
) -> Strategy:
    """One rank or several for a network and a global batch size, with the reason.

    The records of this machine decide; where they hold nothing of this network, published thresholds do, and the
    answer says so. A network given by its number of ``parameters`` is one of the lab's if the numbers agree. None is
    what is usual for the device. Raises ConfigError for a value that cannot be, or where scipy is missing.
    """
    if missing := missing_to_explain():
        raise ConfigError(f"weighing records needs {missing}, which is not installed: choose --ranks single or multi")
    device = usual_device(device)
    choice("device", device, DEVICES)
    check_ranks(device, 1, len(hardware.gpus()), hardware.usable_cores())
    usual_network, usual_batch = USUAL[device]
    batch = usual_batch if batch_size is None else batch_size
    whole("batch_size", batch, 1)
    if parameters is None:
        network = network or usual_network
        choice("network", network, NETWORKS)
        parameters = explained.PARAMETERS[network]
    else:
        whole("parameters", parameters, 1)
        network = next((name for name, count in explained.PARAMETERS.items() if count == parameters), None)
    studies = experiments.cohorts_here("multi_gpu", output_dir)
    return explained.strategy(studies, network=network, parameters=parameters, batch=batch, device=device)


def measure(found: Strategy, mode: str, *, output_dir: str | Path | None = None, **settings: Any) -> Measured:
    """Measure strong scaling of a network at a batch as far as ``mode`` asks.

    Single is one rank alone, multi is one and several; auto is multi unless the answer was single, or there is room for
    one rank only. Raises NoRanksError for multi on a machine without it, and ConfigError for a network without a name.
    """
    choice("mode", mode, MODES)
    if found.network is None:
        raise ConfigError(
            f"--ranks {mode}: a network of {found.parameters:,} parameters is none of the lab's: give --network"
        )
    several = mode == "multi" or (mode == "auto" and found.answer != "single" and most_ranks(found.device)[0] > 1)
    return experiments.measure(
        "multi_gpu",
        network=found.network,
        device=found.device,
        global_batch_sizes=[found.batch],
        world_sizes=sorted({2, several_ranks(found.device)}) if several else [1],
        scaling="strong",
        lost_scaling=False,
        output_dir=output_dir,
        **settings,
    )
