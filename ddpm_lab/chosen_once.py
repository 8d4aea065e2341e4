"""What is chosen once for a question, by this machine, and kept by its ledger: cores and a precision."""

from __future__ import annotations

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.ledger import Ledger, load
from ddpm_lab.measure import hardware
from ddpm_lab.measure.others import free_cores
from ddpm_lab.measure.seat import Instrument
from ddpm_lab.questions import STAGES
from ddpm_lab.setting import OWN_DATA


def cores_of(name: str, asked: int | None, device: str, instrument: Instrument, ledger: Ledger, *, own: bool) -> int:
    """Cores to measure a question with: those asked for, those of its earlier sets here, or those that are free.

    They are chosen once: a later change of load measures nothing again by itself. Of several answers that with all
    cores leads.
    """
    most = instrument.usable_cores
    if asked is not None:
        whole("cores", asked, 1)
        if asked > most:
            raise ConfigError(f"cores is {asked}: {most} are usable here, give at most that")
        return asked
    if device == "cuda" or most == 1 or name in STAGES:
        return most
    key = hardware.machine().key
    mine = [h for h in ledger.heads()[0] if (h.experiment, h.machine.key) == (name, key)]
    # The code of a user's training is known when a rank has loaded it, which needs the configurations.
    mine = [h for h in mine if own == h.cohort[2].startswith(OWN_DATA) and (own or h.cohort[1] == instrument.code.key)]
    shown = load([h for h in mine if h.role == "look"])[0] or load([h for h in mine if h.role == "baseline"][-1:])[0]
    known = [r.config.threads * r.config.node_size for r in shown if r.config.device == "cpu"]
    if known:
        return most if 0 in known else max(known)
    return free_cores()


def compiled_in(instrument: Instrument, ledger: Ledger) -> str:
    """The precision in which a CPU's compilation is asked about: bf16 where this machine's ledger calls it faster.

    It is chosen once: that of earlier sets stays. Without scipy nothing says what is faster, and it is fp32.
    """
    key, code = hardware.machine().key, instrument.code.key
    mine = [h for h in ledger.heads()[0] if (h.machine.key, h.cohort[1]) == (key, code)]
    earlier = load([h for h in mine if (h.experiment, h.role) == ("torch_compile", "baseline")][-1:])[0]
    if earlier:
        return earlier[-1].config.precision
    try:
        from ddpm_lab.explain import comparisons, decisions, frames  # noqa: PLC0415 - not on a bare GPU node
    except ModuleNotFoundError:
        return "fp32"
    records, _ = load([h for h in mine if h.experiment == "amp" or h.role == frames.LOOK])
    found = comparisons.comparisons(frames.study(records, "amp")) if records else ()
    return "bf16" if any(c.primary and c.verdict == decisions.FASTER for c in found) else "fp32"
