"""What is chosen once for a question, by this machine, and kept by its ledger: cores and a precision."""

from __future__ import annotations

import dataclasses

from ddpm_lab.checks import ConfigError, missing_to_explain, whole
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import comparisons, decisions, frames
from ddpm_lab.ledger import Ledger, load
from ddpm_lab.measure import hardware
from ddpm_lab.measure.others import free_cores
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.record import TWIN
from ddpm_lab.training.setting import OWN_DATA


def cores_of(
    name: str, asked: int | None, device: str, instrument: Instrument, ledger: Ledger, *, target: Target, own: bool
) -> int:
    """Cores to measure a question with: those asked for, those of its earlier sets here, or those that are free.

    They are chosen once: a later change of load measures nothing again by itself. Of several answers that with all
    cores leads; sets that compared nothing, for want of cores, choose none for further ones.
    """
    most = instrument.usable_cores
    if asked is not None:
        whole("cores", asked, 1)
        if asked > most:
            raise ConfigError(f"cores is {asked}: {most} are usable here, give at most that")
        return asked
    if device == "cuda" or most == 1:
        return most
    key = hardware.machine().key
    mine = [h for h in ledger.heads()[0] if (h.experiment, h.machine.key) == (name, key)]
    # The code of a user's training is known when a rank has loaded it, which needs the configurations.
    mine = [h for h in mine if own == h.cohort[2].startswith(OWN_DATA) and (own or h.cohort[1] == instrument.code.key)]
    stopped = [h for h in mine if h.role in ("baseline", "profile") and h.cohort[3] == target.plan.key]
    shown = load([h for h in mine if h.role == "look"])[0] or load(stopped[-1:])[0]
    if target.seconds != 0:
        shown = [r for r in shown if not r.config.threads or r.look is None or r.look["log_ratios"].keys() - {TWIN}]
    known = [r.config.threads * r.config.node_size for r in shown if r.config.device == "cpu"]
    if known:
        return most if 0 in known else max(known)
    return most if target.seconds == 0 else free_cores()


def cores_of_pair(pair: tuple[RunConfig, RunConfig], ledger: Ledger) -> int:
    """Cores to compare two configurations with: those that an earlier answer here had, or those that are free.

    All of them where a side is not for the CPU, or says how many threads it takes.
    """
    most = hardware.usable_cores()
    if most == 1 or any(c.device == "cuda" or c.threads for c in pair):
        return most
    by_id = {on_cores(pair[0], n).run_id: n for n in range(1, most + 1)}
    key = hardware.machine().key
    mine = [h for h in ledger.heads()[0] if (h.experiment, h.role, h.machine.key) == ("compare", "look", key)]
    known = [by_id[r.run_id] for r in load(mine)[0] if r.run_id in by_id]
    return max(known, default=0) or free_cores()


def on_cores(config: RunConfig, cores: int) -> RunConfig:
    """A configuration for so many of the cores, which its ranks share; with all of them as it is."""
    if cores >= hardware.usable_cores():
        return config
    return dataclasses.replace(config, threads=max(1, cores // config.node_size))


def compiled_in(instrument: Instrument, ledger: Ledger) -> str:
    """The precision in which a CPU's compilation is asked about: bf16 where this machine's ledger calls it faster.

    It is chosen once: that of earlier sets stays. Without scipy nothing says what is faster, and it is fp32.
    """
    key, code = hardware.machine().key, instrument.code.key
    mine = [h for h in ledger.heads()[0] if (h.machine.key, h.cohort[1]) == (key, code)]
    earlier = load([h for h in mine if (h.experiment, h.role) == ("torch_compile", "baseline")][-1:])[0]
    if earlier:
        return earlier[-1].config.precision
    if missing_to_explain():
        return "fp32"
    records, _ = load([h for h in mine if h.experiment == "amp" or h.role == frames.LOOK])
    found = comparisons.comparisons(frames.study(records, "amp")) if records else ()
    return "bf16" if any(c.primary and c.verdict == decisions.FASTER for c in found) else "fp32"
