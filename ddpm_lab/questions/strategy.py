"""One rank or several for a network and a batch: by what was measured here, else by a published rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, missing_to_explain, whole
from ddpm_lab.config import DEVICES, NETWORKS, RunConfig
from ddpm_lab.explain import decisions, findings, machine_state, phrases
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import current
from ddpm_lab.questions import experiments
from ddpm_lab.questions.multi_gpu import scaling_rows
from ddpm_lab.training.setting import check_ranks, usual_device

USUAL = {"cpu": ("tiny", 32), "cuda": ("seed", 128)}
"""Network and global batch size by kind of device, where neither was said."""
SINGLE, MULTI, MEASURE, NOT_RESOLVED = "single", "multi", "measure", decisions.INCONCLUSIVE
PRIOR = "prior, not measured"
PARAMETERS = {"tiny": 44_332, "seed": 10_050_819, "ddpm": 35_746_307, "s000": 39_156_227}
"""Trained parameters of each network, which do not depend on the size of its images."""
PLAIN = RunConfig()
"""The step that the question is about: in fp32, eager, with the lab's own kernels and loader."""
_VARIES = {"network", "device", "global_batch_size", "world_size", "nodes", "data_sha256", "image_size", "seed"}


class NoRanksError(ConfigError):
    """Several ranks were asked for where there can be only one: nothing is wrong but the machine."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Whether one rank or several should train a network at a batch, and why.

    ``answer`` is single, multi, inconclusive (measured, and neither), or measure (the rule leaves it to a measurement).
    ``source`` says what it rests on: "measured", with the batch where that is another one, or that it is a prior.
    ``speeds`` are the throughputs that were measured. Ratio, interval and sets are those of the comparison behind it.
    """

    answer: str
    reason: str
    source: str
    network: str | None
    parameters: int
    batch: int
    device: str
    measured_batch: int | None = None
    speeds: tuple[str, ...] = ()
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sets: int = 0
    where: str = ""

    def sentence(self) -> str:
        """Give the answer in one sentence, with its reason and what it rests on."""
        work = f"{self.network or 'a network'} ({self.parameters:,} parameters), batch {self.batch}"
        work += f", {PLAIN.precision}" * (self.measured_batch is not None)
        return f"{self.answer} for {work}: {self.reason} [{self.source}]"

    def text(self, carried: str = "") -> str:
        """Give the answer, what was measured, and what to do next, one line each.

        ``carried`` are options with which it was asked for, which the next command needs too.
        """
        lines = [self.sentence(), *self.speeds, *([f"measured on {self.where}"] if self.where else [])]
        asked = (
            f"ddpm-lab run multi_gpu --network {self.network or 'NAME'} --batch-sizes {self.batch} {carried}".strip()
        )
        if self.answer == NOT_RESOLVED:
            lines.append(f"to resolve 2 %: {asked} --resolution 2%")
        elif self.measured_batch != self.batch:
            lines.append(f"to measure it: {asked}")
        return "\n  ".join(lines)


_PRIOR = (
    (1_000_000, math.inf, SINGLE, "the model is too small, below 1,000,000 parameters"),
    (5_000_000, 128, SINGLE, "below 5,000,000 parameters with a batch below 128"),
    (5_000_000, math.inf, MEASURE, "below 5,000,000 parameters with a batch of at least 128, only measuring tells"),
    (10_000_000, math.inf, MEASURE, "between 5,000,000 and 10,000,000 parameters only measuring tells"),
    (math.inf, 64, SINGLE, "the batch is below 64: increase it for several"),
    (math.inf, math.inf, MULTI, "at least 10,000,000 parameters with a batch of at least 64"),
)
"""S003's strategy selector: the first row that has more parameters and a larger batch answers, for its reason."""


def prior(parameters: int, batch: int) -> tuple[str, str]:
    """Answer and reason by the thresholds of S003, which know neither machine nor network."""
    return next((answer, why) for most, largest, answer, why in _PRIOR if parameters < most and batch < largest)


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
        raise ConfigError(f"weighing records needs {missing}, which is not installed here: install it first")
    device = usual_device(device)
    choice("device", device, DEVICES)
    check_ranks(device, 1, len(hardware.gpus()), hardware.usable_cores())
    usual_network, usual_batch = USUAL[device]
    batch = usual_batch if batch_size is None else batch_size
    whole("batch_size", batch, 1)
    if parameters is None:
        network = network or usual_network
        choice("network", network, NETWORKS)
        parameters = PARAMETERS[network]
    else:
        whole("parameters", parameters, 1)
        network = next((name for name, count in PARAMETERS.items() if count == parameters), None)
    studies = experiments.cohorts_here("multi_gpu", output_dir)
    return decide(studies, network=network, parameters=parameters, batch=batch, device=device)


def decide(studies: Sequence[Study], *, network: str | None, parameters: int, batch: int, device: str) -> Strategy:
    """Choose by strong scaling of the plain step (fp32, eager) of this network on this kind of device, else the prior.

    Records at this batch decide, else those at the nearest. Of ``studies``, one for each cohort with the latest last,
    the last with sets enough for a verdict counts, else the last.
    """
    common: dict[str, Any] = {"network": network, "parameters": parameters, "batch": batch, "device": device}
    each = [(study, _measured(study, network, device)) for study in studies]
    candidates = [(study, r) for study, rows in each for r in rows if r.role == "candidate"]
    if not candidates:
        answer, reason = prior(parameters, batch)
        speeds = {r.label: _speed(r) for _, rows in each for r in rows if r.batch == batch}
        return Strategy(answer=answer, reason=reason, source=PRIOR, speeds=tuple(speeds.values()), **common)
    nearest = min((r.batch for _, r in candidates), key=lambda b: (abs(math.log(b / batch)), b))
    near = [(study, r) for study, r in candidates if r.batch == nearest]
    study, last = next((found for found in reversed(near) if found[1].sets >= decisions.LEAST_SETS), near[-1])
    rows = [r for r in _measured(study, network, device) if r.baseline_id == last.baseline_id]
    several = [r for r in rows if r.role == "candidate"]
    faster = [r for r in several if r.verdict == decisions.FASTER]
    lead = max(faster or several, key=lambda r: r.ratio.value)
    answer, reason = MULTI if faster else SINGLE, f"{findings.headline_of(lead)} ({phrases.evidence(lead)})"
    if not faster and not all(r.answered for r in several):
        answer, pair = NOT_RESOLVED, f"{lead.label} against {lead.baseline_label}"
        reason = f"{pair} reads {phrases.ratio(lead)} ({phrases.evidence(lead)}), {phrases.outcome(lead)}"
    return Strategy(
        answer=answer,
        reason=reason,
        source="measured" if nearest == batch else f"measured at batch {nearest}, the nearest to {batch}",
        measured_batch=nearest,
        speeds=tuple(map(_speed, rows)),
        ratio=lead.ratio.value,
        low=lead.ratio.low,
        high=lead.ratio.high,
        sets=lead.sets,
        where=f"{study.hardware}, {study.date}" + "; the machine was busy" * bool(machine_state.disturbed_sets(study)),
        **common,
    )


def _measured(study: Study, network: str | None, device: str) -> list[Comparison]:
    """Strong scaling of the plain step, with a speed."""
    return [
        r
        for r in scaling_rows(study)
        if r.scaling == "strong" and r.sets and r.role in ("baseline", "candidate")
        if r.config.network == network and r.config.device == device
        if r.config.differences(PLAIN).keys() <= _VARIES
    ]


def _speed(row: Comparison) -> str:
    return f"{row.label}: {phrases.throughput(row)}"


def most_ranks(device: str) -> tuple[int, str]:
    """How many ranks can have a device of their own, on all hosts of a job, and whose devices these are, in words."""
    count, unit = (len(hardware.gpus()), "GPU") if device == "cuda" else (hardware.usable_cores(), "usable core")
    if (cluster := current()) is None:
        return count, f"this machine has {count} {unit}"
    hosts = len(cluster.hosts)
    most = hosts * min(count, cluster.node_size)
    return most, f"this job has room for {most} rank{'s' * (most != 1)} on {hosts} host{'s' * (hosts != 1)}"


def several_ranks(device: str) -> int:
    """How many ranks several are where nobody says: all GPUs, or two on a CPU; raises NoRanksError for one device."""
    most, have = most_ranks(device)
    if most < 2:
        raise NoRanksError(f"--ranks multi needs two ranks, and {have}: use --ranks single")
    return most if device == "cuda" else 2
