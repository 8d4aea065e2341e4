"""How fast is the lab's own trainer: beside other people's, lever by lever, and against what the machine can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, SAMPLING, SEED_FAMILY, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import figure_peers, limits, phrases
from ddpm_lab.explain import peers as trainers_
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, FAILED, Finding, about, common_notes, compared, plain
from ddpm_lab.explain.frames import Study
from ddpm_lab.measure.hardware import package_version
from ddpm_lab.plan import (
    BOTH_FP32,
    COMPILED,
    FLASH_ATTENTION,
    FORMATS,
    FUSED_PARTS,
    LEVERS,
    LIMITS,
    OURS,
    TUNED,
    Experiment,
    Family,
    Plan,
)
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import Batch, Setup, usual_settings

DDPT = "ddpm_lab.training.peers:denoising_diffusion_pytorch"
DIFFUSERS = "ddpm_lab.training.peers:diffusers"
PRODUCT = "ddpm_lab.training.limits:product"
COPY = "ddpm_lab.training.limits:copy"
CONVOLUTION = "ddpm_lab.training.limits:convolution"

PUBLISHED = "the published code"
PEERS = {PUBLISHED: DDPM, "denoising-diffusion-pytorch": DDPT, "diffusers": DIFFUSERS}
"""Other trainers by name; the published code is the seed network as it was first written, by the lab's own step."""
BEYOND_SEED = ("diffusers",)
"""Those that have a network of another family too; the others' networks are of the seed family."""
PARTS = ("peers", "fp32", "sampling", "limits", "levers")

SAMPLED = 16
"""Images sampled at once."""
PLAN = Plan(window_seconds=1.0, settle_steps=1, warmup_steps=3)
"""Steps of seconds need few of them: no window shorter than a second, and ratios of two or three no hundredth parts."""


def peers(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    trainers: Annotated[Sequence[str] | None, Opt("other trainers", choices=tuple(PEERS))] = None,
    parts: Annotated[Sequence[str] | None, Opt("parts of the question", choices=PARTS)] = None,
) -> Experiment:
    """How fast is this trainer? Beside others as they come and tuned, in fp32, each lever alone, and the limits.

    ``trainers`` are names of PEERS, ``parts`` some of PARTS; None is all that a network of this size has. On a CPU,
    where compiling a trainer takes minutes, the tuned ones are compiled too in the preset ``full``, or if ``trainers``
    names them.
    """
    batch = 32 if global_batch_size is None and setup.device == "cpu" else setup.batch_size(global_batch_size)
    able = [n for n in PEERS if n in BEYOND_SEED or setup.network in SEED_FAMILY]
    if trainers is not None and (lost := [n for n in trainers if n not in able]):
        raise ConfigError(f"trainers has {lost[0]!r}, which has no network of the size of {setup.network!r}: use seed")
    asked = [n for n in able if trainers is None or n in trainers]
    if PUBLISHED not in asked and (empty := [part for part in ("fp32", "sampling") if part in (parts or ())]):
        missing = "that trainer among trainers" if PUBLISHED in able else f"network seed, not {setup.network!r}"
        raise ConfigError(
            f"parts has {empty[0]!r}, which compares with {PUBLISHED} alone and needs {missing}: give that, or leave "
            "the part out"
        )
    ours = setup.config(global_batch_size=batch, diffusion=DiffusionConfig(loss="l2"), **usual_settings(setup.device))
    name = setup.family_name(batch)
    compiled = setup.device == "cpu" and (setup.preset == "full" or trainers is not None)
    makers: dict[str, Callable[[], Family]] = {
        "peers": lambda: _against(ours, name, asked, compiled=compiled),
        "fp32": lambda: _both_fp32(ours, name),
        "sampling": lambda: _sampling(ours, setup),
        "limits": lambda: _limits(ours, f"{LIMITS}, {setup.network}"),
        "levers": lambda: _levers(ours, f"{name}{LEVERS}", setup),
    }
    wanted = set(parts or PARTS)
    if PUBLISHED not in asked:
        wanted -= {"fp32", "sampling"}
    if setup.preset != "full" and parts is None:
        wanted.discard("levers")
    profiled = ((name, OURS, dataclasses.replace(ours, purpose="profile")),) if "limits" in wanted else ()
    families = tuple(make() for part, make in makers.items() if part in wanted)
    return Experiment(name="peers", families=families, profiles=profiled)


def _both_fp32(ours: RunConfig, name: str) -> Family:
    """The lab's trainer and the published code, both in single precision."""
    rows = ((PUBLISHED, _as_it_comes(ours, PUBLISHED)),)
    single = dataclasses.replace(ours, precision="fp32")
    return Family(name=f"{name}{BOTH_FP32}", baseline=single, baseline_label=OURS, candidates=rows)


def _against(ours: RunConfig, name: str, asked: Sequence[str], *, compiled: bool) -> Family:
    rows = [(peer, _as_it_comes(ours, peer)) for peer in asked]
    rows += [(peer + FORMATS, _formatted(ours, peer)) for peer in asked]
    rows += [(peer + TUNED, _tuned(ours, peer)) for peer in asked]
    if compiled:
        whole = [(peer, dataclasses.replace(_tuned(ours, peer), compile="whole")) for peer in asked]
        rows += [(peer + TUNED + COMPILED, config) for peer, config in whole]
    return Family(name=name, baseline=ours, baseline_label=OURS, candidates=tuple(rows), primary=asked[0] + TUNED)


def _as_it_comes(ours: RunConfig, peer: str) -> RunConfig:
    """A trainer as its code is written: single precision, NCHW, torch's default Adam, and a look at every loss."""
    adam = "foreach" if ours.device == "cuda" else "loop"  # what torch.optim.Adam chooses where nothing is said
    return dataclasses.replace(
        ours,
        workload=PEERS[peer],
        precision="fp32",
        channels_last=False,
        kernels="aten",
        freed_memory="default",
        compile="off",
        loader="packed",
        implementation="plain" if peer == PUBLISHED else "lab",
        optimizer=OptimizerConfig(adam=adam, ema="loop"),
        read_loss=True,
        options=_package(peer),
    )


def _package(peer: str) -> tuple[tuple[str, str], ...]:
    """The version of another trainer's package, where it is installed: another version is other work."""
    version = "" if peer == PUBLISHED else package_version(peer)
    return (("package", f"{peer} {version}"),) if version else ()


def _formatted(ours: RunConfig, peer: str) -> RunConfig:
    """The same in number and memory format of this trainer: what two lines change."""
    return dataclasses.replace(_as_it_comes(ours, peer), precision=ours.precision, channels_last=True)


def _tuned(ours: RunConfig, peer: str) -> RunConfig:
    """The same with all that its users could change: formats, fused Adam, averages in one call, freed memory kept.

    On a GPU it is compiled, and has flash attention if it offers that. On a CPU flash attention gives the same and is
    no faster: of eight steps in turn with eight without, on 2 cores in bf16 at batch 32, the median took 1.02 times as
    long.
    """
    flash = ours.device == "cuda" and PEERS[peer] == DDPT
    return dataclasses.replace(
        _formatted(ours, peer),
        compile=ours.compile,
        loader=ours.loader,
        freed_memory=ours.freed_memory,
        optimizer=OptimizerConfig(),
        read_loss=False,
        options=(*_package(peer), *(((FLASH_ATTENTION, True),) if flash else ())),
    )


def _sampling(ours: RunConfig, setup: Setup) -> Family:
    """A denoising step of ancestral sampling, beside the published code's sampler."""
    here = dataclasses.replace(ours, workload=SAMPLING, global_batch_size=SAMPLED, loader="packed")
    plain: dict[str, Any] = {"precision": "fp32", "channels_last": False, "kernels": "aten", "freed_memory": "default"}
    published = dataclasses.replace(here, compile="off", implementation="plain", **plain)
    name = f"{setup.family_name(SAMPLED)}{plan.SAMPLING}"
    return Family(name=name, baseline=here, baseline_label=OURS, candidates=((PUBLISHED, published),))


def _levers(ours: RunConfig, name: str, setup: Setup) -> Family:
    """Each of the trainer's settings put back alone; those that cannot apply to this device are not in the list.

    The joined kernels work in channels-last and eagerly alone: what puts these back puts the kernels back too, and its
    label says so.
    """
    optimizer, fused = ours.optimizer, ours.kernels == "fused"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("fp32", {"precision": "fp32"}),
        ("NCHW, eager kernels" if fused else "NCHW", {"channels_last": False, "kernels": "aten"}),
        ("Adam weight by weight", {"optimizer": dataclasses.replace(optimizer, adam="loop")}),
        ("EMA weight by weight", {"optimizer": dataclasses.replace(optimizer, ema="loop")}),
        ("every loss read", {"read_loss": True}),
        ("files, no workers", {"loader": "files"}),
    ]
    if fused:
        changes.insert(1, ("eager kernels", {"kernels": "aten"}))
        changes.insert(2, ("freed memory given back", {"freed_memory": "default"}))
        parts = FUSED_PARTS if ours.precision == "bf16" else FUSED_PARTS[:-2]
        changes += [(f"eager {part}", {"options": (("without", part),)}) for part in parts]
        changes.append(("compiled block by block, kernels not joined", {"kernels": "aten", "compile": "regional"}))
    if setup.device == "cuda":
        changes.insert(1, ("eager", {"compile": "off"}))
        changes += [
            ("tf32", {"precision": "tf32"}),
            ("fp16", {"precision": "fp16"}),
            ("compiled block by block", {"compile": "regional"}),
            ("CUDA graphs", {"compile_mode": "reduce-overhead"}),
            ("max-autotune", {"compile_mode": "max-autotune"}),
            ("packed, copied", {"loader": "packed"}),
        ]
    rows = tuple((label, dataclasses.replace(ours, **change)) for label, change in changes)
    return Family(name=name, baseline=ours, baseline_label="as by default", candidates=rows)


def _limits(ours: RunConfig, name: str) -> Family:
    """Peaks: products in single precision as the baseline, in the trainer's own, and a copy."""
    plain = dataclasses.replace(
        ours, global_batch_size=1, kernels="aten", compile="off", loader="packed", optimizer=OptimizerConfig()
    )
    single = dataclasses.replace(plain, workload=PRODUCT, precision="fp32")
    rows = [("convolution, fp32", dataclasses.replace(single, workload=CONVOLUTION))]
    if ours.precision != "fp32":
        own = dataclasses.replace(single, precision=ours.precision)
        rows.insert(0, (f"product, {ours.precision}", own))
        rows.append((f"convolution, {ours.precision}", dataclasses.replace(own, workload=CONVOLUTION)))
    rows.append(("copy", dataclasses.replace(single, workload=COPY)))
    return Family(name=name, baseline=single, baseline_label="product, fp32", candidates=tuple(rows))


def answer(study: Study) -> Answer:
    """Compare this trainer with others, lever by lever, and with the limits of the machine."""
    found = _finding(study)
    shown = speeds(study, found)
    limits_of = "How far from the limit: an image at this machine's peaks, and measured."
    parts = "The parts of a step: work for an image, its least time at this machine's peaks, and what sets it."
    views = (
        View(caption=limits_of, name="limits", figure=lambda: figure_peers.roofline(study)),
        View(
            caption="What each setting of the trainer is worth on this machine.",
            name="levers",
            figure=lambda: figure_peers.levers(study),
        ),
        View(caption=parts, table=lambda: limits.table(study, trainers_.own(study))),
        View(
            caption="What each setting of the trainer is worth here.",
            table=lambda: trainers_.lever_table(study),
        ),
        *trained_views(study),
    )
    return replace(
        shown,
        figure=lambda: figure_peers.figure(study, found.headline) or shown.figure(),
        table=lambda: trainers_.table(study),
        views=views,
    )


def _finding(study: Study) -> Finding:
    rows = comparisons(study)
    others = [r for r in rows if r.role not in ("baseline", "twin")]
    if not any(r.sets and _rival(r) for r in others):
        return _without_others(study, others) or compared(study, keep=_rival)
    nearest = trainers_.lead(study)
    if nearest is None:
        return compared(study, keep=_rival)
    notes = (trainers_.evidence(study), *common_notes(study, rows))
    return about(study, nearest, trainers_.headline(nearest), *notes)


def _rival(row: Comparison) -> bool:
    return not row.family.startswith(LIMITS)


def _without_others(study: Study, others: Sequence[Comparison]) -> Finding | None:
    """The answer to ``peers`` where no other trainer runs here, or where only the machine's peaks were asked for."""
    notes = common_notes(study, comparisons(study))
    rivals = [r for r in others if _rival(r)]
    peaks = f"Peaks of this machine: {known}" if (known := limits.peaks(study)) else ""
    unable = [r.label for r in rivals if r.status == "unsupported" and not r.label.endswith((TUNED, FORMATS))]
    if unable and all(r.status in ("unsupported", "left out") for r in rivals):
        headline = f"No other trainer can run here: {phrases.joined(list(dict.fromkeys(unable)))}"
        return plain(study, headline, FAILED, trainers_.evidence(study), f"{peaks}." if peaks else "", *notes)
    return replace(plain(study, peaks, ANSWERED, *notes), verdict="measured") if peaks and not rivals else None
