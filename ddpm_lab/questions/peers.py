"""How fast is the lab's own trainer: beside other people's, lever by lever, and against what the machine can do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, SEED_FAMILY, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import findings, machine_state, phrases, stats
from ddpm_lab.explain.answer import Answer, View, speed_table, speeds
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, Finding, about, common_notes, compared, plain
from ddpm_lab.explain.selection import Study, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.measure.hardware import package_version
from ddpm_lab.plan import BOTH_FP32, FORMATS, LEVERS, LIMITS, OURS, TUNED, Experiment, Family, Plan, Question
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import Batch, Setup, torchs_precision, usual_settings

DDPT = "ddpm_lab.training.peers:denoising_diffusion_pytorch"
DIFFUSERS = "ddpm_lab.training.peers:diffusers"
_PEAK = "ddpm_lab.training.limits:{}"

PUBLISHED = "the published code"
PEERS = {PUBLISHED: DDPM, "denoising-diffusion-pytorch": DDPT, "diffusers": DIFFUSERS}
"""Other trainers by name; the published code is the seed network as it was first written, by the lab's own step."""
BEYOND_SEED = ("diffusers",)
"""Those that have a network of another family too; the others' networks are of the seed family."""
PARTS = ("peers", "fp32", "limits", "levers")

_PLAIN: dict[str, Any] = {"channels_last": False, "kernels": "aten", "freed_memory": "default"}
_PLAIN |= {"compile": "off", "loader": "packed"}
PLAN = Plan(window_seconds=1.0, settle_steps=1, warmup_steps=3)
"""Steps of seconds need few of them: no window shorter than a second, and ratios of two or three no hundredth parts."""
TITLE = "How fast is this trainer beside others, and how far from the limit?"
QUESTION = Question(title=TITLE, file="07_peers", trains=True, long=True, plan=PLAN)


def peers(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    trainers: Annotated[Sequence[str] | None, Opt("other trainers", choices=tuple(PEERS))] = None,
    parts: Annotated[Sequence[str] | None, Opt("parts of the question", choices=PARTS)] = None,
) -> Experiment:
    """How fast is this trainer? Beside others as they come and tuned, in fp32, each lever alone, and the limits.

    ``trainers`` are names of PEERS, ``parts`` some of PARTS; None is all that a network of this size has. On a CPU,
    where compiling a trainer takes minutes, the tuned ones are compiled too in ``full``, or if ``trainers`` are given.
    """
    batch = 32 if global_batch_size is None and setup.device == "cpu" else setup.batch_size(global_batch_size)
    able = [n for n in PEERS if n in BEYOND_SEED or setup.network in SEED_FAMILY]
    if trainers is not None and (lost := [n for n in trainers if n not in able]):
        raise ConfigError(f"trainers has {lost[0]!r}, which has no network of the size of {setup.network!r}: use seed")
    asked = [n for n in able if trainers is None or n in trainers]
    if PUBLISHED not in asked and "fp32" in (parts or ()):
        missing = "that trainer among trainers" if PUBLISHED in able else f"network seed, not {setup.network!r}"
        raise ConfigError(
            f"parts has 'fp32', which compares with {PUBLISHED} alone and needs {missing}: give that, or leave the "
            "part out"
        )
    ours = setup.config(global_batch_size=batch, diffusion=DiffusionConfig(loss="l2"), **usual_settings(setup.device))
    name = setup.family_name(batch)
    compiled = setup.device == "cpu" and (setup.preset == "full" or trainers is not None)
    makers: dict[str, Callable[[], Family]] = {
        "peers": lambda: _against(ours, name, asked, setup.formats, compiled=compiled),
        "fp32": lambda: Family(
            name=f"{name}{BOTH_FP32}",
            baseline=replace(ours, precision="fp32"),
            baseline_label=OURS,
            candidates=((PUBLISHED, replace(_as_it_comes(ours, PUBLISHED), precision="fp32")),),
        ),
        "limits": lambda: _limits(ours, f"{LIMITS}, {setup.network}"),
        "levers": lambda: _levers(ours, f"{name}{LEVERS}", setup),
    }
    wanted = set(parts or PARTS)
    if PUBLISHED not in asked:
        wanted -= {"fp32"}
    if setup.preset != "full" and parts is None:
        wanted.discard("levers")
    profiled = ((name, OURS, replace(ours, purpose="profile")),) if "limits" in wanted else ()
    families = tuple(make() for part, make in makers.items() if part in wanted)
    return Experiment(name="peers", families=families, profiles=profiled)


def _against(
    ours: RunConfig, name: str, asked: Sequence[str], formats: Mapping[str, Mapping[str, Any]], *, compiled: bool
) -> Family:
    rows = [(peer, _as_it_comes(ours, peer)) for peer in asked]
    rows += [(f"{peer}, in {ours.precision}{FORMATS}", _formatted(ours, peer)) for peer in asked]
    tuned = {peer: replace(_tuned(ours, peer), **formats.get(peer, {})) for peer in asked}
    rows += [(peer + TUNED, config) for peer, config in tuned.items()]
    if compiled:
        whole = [(peer, replace(config, compile="whole")) for peer, config in tuned.items()]
        rows += [(peer + TUNED + plan.COMPILED, config) for peer, config in whole]
    return Family(name=name, baseline=ours, baseline_label=OURS, candidates=tuple(rows), primary=asked[0] + TUNED)


def _as_it_comes(ours: RunConfig, peer: str) -> RunConfig:
    """A trainer as its code is written: torch's own precision, NCHW and default Adam, and a look at every loss."""
    adam = "foreach" if ours.device == "cuda" else "loop"  # what torch.optim.Adam chooses where nothing is said
    return replace(
        ours,
        **_PLAIN,
        precision=torchs_precision(ours.device),
        workload=PEERS[peer],
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
    return replace(_as_it_comes(ours, peer), precision=ours.precision, channels_last=True)


def _tuned(ours: RunConfig, peer: str) -> RunConfig:
    """The same with all that its users could change: formats, fused Adam, averages in one call, freed memory kept.

    On a CPU the formats are those in which it was measured to be fastest here (``Setup.formats``). On a GPU it is
    compiled, and has flash attention if it offers that. On a CPU flash attention gives the same and is no faster: of
    eight steps in turn with eight without, on 2 cores in bf16 at batch 32, the median took 1.02 times as long.
    """
    flash = ours.device == "cuda" and PEERS[peer] == DDPT
    return replace(
        _formatted(ours, peer),
        compile=ours.compile,
        loader=ours.loader,
        freed_memory=ours.freed_memory,
        optimizer=OptimizerConfig(),
        read_loss=False,
        options=(*_package(peer), *(((plan.FLASH_ATTENTION, True),) if flash else ())),
    )


def _levers(ours: RunConfig, name: str, setup: Setup) -> Family:
    """Each of the trainer's settings put back alone; those that cannot apply to this device are not in the list.

    The fused kernels work in channels-last and eagerly alone: what puts these back puts the kernels back, as it says.
    """
    optimizer, fused = ours.optimizer, ours.kernels == "fused"
    cuda, bf16 = setup.device == "cuda", ours.precision == "bf16"
    parts = plan.FUSED_PARTS if bf16 else plan.FUSED_PARTS[:-2]
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (True, "fp32", {"precision": "fp32"}),
        (cuda, "eager", {"compile": "off"}),
        (fused, "eager kernels", {"kernels": "aten"}),
        (fused, "freed memory given back", {"freed_memory": "default"}),
        (True, "NCHW, eager kernels" if fused else "NCHW", {"channels_last": False, "kernels": "aten"}),
        (True, "Adam weight by weight", {"optimizer": replace(optimizer, adam="loop")}),
        (True, "EMA weight by weight", {"optimizer": replace(optimizer, ema="loop")}),
        (True, "every loss read", {"read_loss": True}),
        (True, "files, no workers", {"loader": "files"}),
        *((fused, f"eager {part}", {"options": (("without", part),)}) for part in parts),
        (fused, "compiled block by block, eager kernels", {"kernels": "aten", "compile": "regional"}),
        *((cuda, name, {"precision": name}) for name in ("tf32", "fp16")),
        (cuda, "compiled block by block", {"compile": "regional"}),
        (cuda, "CUDA graphs", {"compile_mode": "reduce-overhead"}),
        (cuda, "max-autotune", {"compile_mode": "max-autotune"}),
        (cuda, "packed, copied", {"loader": "packed"}),
        # GPUs without bf16 have neither kernel.
        *((cuda and bf16, f"{name} attention", {"options": (("attention", name),)}) for name in ("flash", "cudnn")),
    ]
    rows = ((label, replace(ours, **change)) for able, label, change in changes if able)
    different = tuple(row for row in rows if row[1] != ours)  # fp32 is the default of many processors
    return Family(name=name, baseline=ours, baseline_label="as by default", candidates=different)


def _limits(ours: RunConfig, name: str) -> Family:
    """Peaks: products in single precision as the baseline, in the trainer's own, and a copy."""
    usual: dict[str, Any] = {"kernels": "aten", "compile": "off", "loader": "packed", "optimizer": OptimizerConfig()}
    works = [(kind, p) for kind in ("product", "convolution") for p in dict.fromkeys(("fp32", ours.precision))]
    plain = replace(ours, **usual, global_batch_size=1, precision="fp32")
    (label, base), *rows = [(f"{k}, {p}", replace(plain, workload=_PEAK.format(k), precision=p)) for k, p in works]
    rows.append(("copy", replace(plain, workload=_PEAK.format("copy"))))
    return Family(name=name, baseline=base, baseline_label=label, candidates=tuple(rows))


def answer(study: Study) -> Answer:
    """Compare this trainer with others, lever by lever, and with the limits of the machine."""
    found, base, others = _finding(study), this_trainer(study), other_trainers(study)
    rivals = replace(study, records=tuple(r for r in study.records if _is_rival(r.family))) if others else study
    put_back = replace(study, records=tuple(r for r in study.records if r.family.endswith(LEVERS)))
    rows = [r for r in comparisons(study) if r.family.endswith(LEVERS) and r.role != "twin"]
    title = "What each setting of the trainer is worth here"
    levers = speeds(put_back, replace(found, headline=title), rows=rows)
    worth = f"{title.replace('here', 'on this machine')}: below 1 the trainer's default is faster."
    drawn = levers.figure if any(r.sets for r in rows) else None
    parts = "The work of an image by kind, its least time at this machine's peaks, and the time that it takes."
    views = (
        View(worth, "levers", drawn, lambda: speed_table(study, rows)),
        View(parts, table=lambda: limits_table(study, base)),
        *trained_views(study),
    )
    return replace(speeds(rivals, found, rows=others or None, views=views), study=study, table=lambda: table(study))


def _finding(study: Study) -> Finding:
    base = this_trainer(study)
    measured = [r for r in other_trainers(study) if r.sets and base and r.family == base.family]
    if not measured:
        known = peaks(study)
        if known and all(r.family.startswith(LIMITS) for r in comparisons(study)):
            headline = f"Peaks of this machine: {known}"
            return plain(study, headline, ANSWERED, *machine_state.warnings(study), verdict="measured")
        asked = any(_is_rival(r.family) for r in comparisons(study))  # else for the levers alone
        return compared(study, keep=lambda r: _is_rival(r.family) if asked else r.family.endswith(LEVERS))
    # The primary comparison; where that is missing the trainer that comes nearest, so that the claim holds for all.
    nearest = min([r for r in measured if r.primary] or measured, key=lambda r: r.ratio.value)
    mine = replace(nearest, label="this trainer", baseline_label=nearest.label, experiment="peers")
    notes = common_notes(study, comparisons(study))
    found = about(study, nearest, findings.headline_of(mine), _evidence(study), *notes)
    return replace(found, way_out=findings.way_out_of(study, nearest))


def other_trainers(study: Study) -> list[Comparison]:
    """Every other trainer, turned round: ``ratio`` is the time it takes for equal images divided by this trainer's."""
    rows = [r for r in comparisons(study) if _is_rival(r.family) and r.role in ("candidate", "note")]
    return [_turned(r) for r in rows]


def _turned(row: Comparison) -> Comparison:
    """A row as this trainer beside it."""
    verdicts = {stats.FASTER: stats.SLOWER, stats.SLOWER: stats.FASTER}
    logs, verdict = tuple((s, -v) for s, v in row.logs), verdicts.get(row.verdict, row.verdict)
    ratio, noise = row.ratio.inverse, row.noise.inverse
    return replace(row, baseline_label="the other", ratio=ratio, noise=noise, logs=logs, verdict=verdict)


def this_trainer(study: Study) -> Comparison | None:
    """The lab's own trainer, as the baseline of the others; of several networks or batches that of most others."""
    # Trained as both sides do it best: not in fp32 alone.
    rivals = [r for r in comparisons(study) if _is_rival(r.family)]
    trained = [r for r in rivals if not r.family.endswith(BOTH_FP32)]
    others = Counter(r.family for r in trained if r.role == "candidate" and r.sets)
    mine = [r for r in trained if r.role == "baseline" and r.sets]
    return max(mine, key=lambda r: others[r.family], default=None)


def _is_rival(family: str) -> bool:
    return not family.endswith(LEVERS) and not family.startswith(LIMITS)


def _evidence(study: Study) -> str:
    """Return this trainer's speed, how far it is from the limit, and which tuning was not tried."""
    told, base = [], this_trainer(study)
    tuned = [r.config for r in other_trainers(study) if r.sets and TUNED in r.label]
    if tuned and all((config.device, config.compile) == ("cpu", "off") for config in tuned):
        told.append("Compilation of the others is not tried on a CPU but in full.")
    if base is not None:
        rate = phrases.significant(base.images_per_second)
        told.append(f"This trainer takes {rate} images/s in {base.config.precision} at batch {base.batch}.")
    return " ".join((*told, limits_sentence(study, base))).strip()


def table(study: Study) -> Table:
    """How many times as fast this trainer is as each other, beside speed, size and memory of that one."""
    rows = [r for r in comparisons(study) if _is_rival(r.family)]
    shown = [_turned(r) if r.role == "candidate" else r for r in rows]

    def columns(row: Comparison) -> dict[str, str]:
        wanted = (row.run_id, row.family, row.role, "ok")
        records = [r for r in study.records if (r.run_id, r.family, r.role, r.status) == wanted]
        seen = rank_zero(records[-1]) if records else {}
        # A peer counts its own work, that of the lab's trainer is with the limits.
        flop = seen.get("flop_per_image", 0.0)
        if row.config.workload == DDPM:
            flop = flop or sum(part.get("flop", 0.0) for part in _work(study, row.config).values())
        return {
            "Format": str(row.config.precision) if row.sets else phrases.DASH,
            "Weights": f"{seen['parameters'] / 1e6:.2f} M" if "parameters" in seen else phrases.DASH,
            "GFLOP/image": f"{flop / 1e9:.2f}" if flop else phrases.DASH,
        }

    cells = speed_table(study, shown, columns)
    return [{"This trainer is" if name == "Speed" else name: cell for name, cell in row.items()} for row in cells]


# --- how far from the limit: a roofline of the network's work (Williams et al. 2009) ----------------------------------

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
OPTIMIZER = "optimizer"
NEEDED = ("convolution", "matrix product", OPTIMIZER)  # kinds of work that no fusing removes
OPTIMIZER_BYTES = 28
"""Of each weight in a step of Adam: weight and two moments read and written, the gradient read, four bytes each."""


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind for an image: its FLOP, and its seconds at the machine's peaks, the longer of FLOP and bytes."""

    kind: str
    flop: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The machine's peak (FLOP/s in ``precision``), the parts of a step, and what an image really takes."""

    precision: str
    flops: float
    parts: tuple[Part, ...]
    measured_seconds: float

    @property
    def flop_share(self) -> float:
        """Model FLOP utilisation (Chowdhery et al. 2022, appendix B): FLOP of an image over what the peak does then."""
        return sum(p.flop for p in self.parts) / self.measured_seconds / self.flops

    @property
    def headroom(self) -> float:
        """How many times as fast the step could be, if all but convolutions, products and the optimizer were free."""
        least = sum(p.seconds for p in self.parts if p.kind in NEEDED)
        return max(1.0, self.measured_seconds / least)  # caches can make the least time too long


def roofline(study: Study, own: Comparison | None) -> Roofline | None:
    """The roofline of ``own``, a row of the lab's trainer, from the work and the peaks of its network and device.

    Of several GPUs each is held against the peaks of one; ranks on a CPU share the machine's.

    None where these were not measured in its precision, where it does not train, and where it is faster than the peak:
    then one of the two is wrong.
    """
    if own is None or own.config.workload != DDPM:
        return None
    known, work, precision = _peaks_of(study, own.config), _work(study, own.config), own.config.precision
    if not {"bandwidth", "fp32", precision} <= known.keys() or not work:
        return None
    parts = []
    for kind, of in work.items():
        flop, size = of.get("flop", 0.0), BYTES[precision] * of["elements"]
        if kind == "weights":
            kind, flop, size = OPTIMIZER, 0.0, OPTIMIZER_BYTES * of["elements"] / own.config.rank_batch_size  # noqa: PLW2901
        parts.append(Part(kind, flop, max(flop / known[precision], size / known["bandwidth"])))
    parts.sort(key=lambda p: -p.seconds)
    seconds = own.step_seconds / (own.config.rank_batch_size if own.config.device == "cuda" else own.batch)
    line = Roofline(precision=precision, flops=known[precision], parts=tuple(parts), measured_seconds=seconds)
    return line if line.flop_share <= 1 else None


def _peaks_of(study: Study, config: RunConfig) -> dict[str, float]:
    """FLOP/s by precision, the better of a matrix product and a convolution, and bytes/s of a copy."""
    found: dict[str, float] = {}
    witnessed = {r.run_id: seen for r in study.records if (seen := rank_zero(r))}
    for row in comparisons(study):
        if row.family.startswith(LIMITS) and row.sets and row.role != "twin" and _alike(row.config, config):
            seen = witnessed.get(row.run_id, {})
            if seen.get("flop"):
                precision, speed = row.config.precision, seen["flop"] / row.step_seconds
                found[precision] = max(found.get(precision, 0.0), speed)
            elif seen.get("bytes"):
                found["bandwidth"] = seen["bytes"] / row.step_seconds
    return found


def _work(study: Study, config: RunConfig) -> dict[str, dict[str, float]]:
    """FLOP and elements of an image by kind of work, as rank 0 counted them last; empty where it did not."""
    counted = (rank_zero(r).get("work") for r in reversed(study.records) if _alike(r.config, config))
    return next(filter(None, counted), {})


def _alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether what was measured of one says something of the other: the same network, image size and device."""
    return all(getattr(one, name) == getattr(other, name) for name in ("network", "image_size", "device"))


def limits_table(study: Study, own: Comparison | None) -> Table:
    """Work of each kind for an image and its seconds at the machine's peaks, then what an image takes; may be empty."""
    if (line := roofline(study, own)) is None:
        return []
    rows = [(part.kind, f"{part.flop / 1e9:.2f}" if part.flop else phrases.DASH, part.seconds) for part in line.parts]
    rows += [("measured", "", line.measured_seconds)]
    return [{"Work": kind, "GFLOP/image": flop, "Seconds/image": phrases.seconds(each)} for kind, flop, each in rows]


def peaks(study: Study) -> str:
    """The peaks of the machine, as they were measured last, in words; empty where they were not."""
    last = next((r.config for r in reversed(study.records) if r.family.startswith(LIMITS)), None)
    found = _peaks_of(study, last) if last else {}
    copied = found.pop("bandwidth", None)
    told = [f"{phrases.significant(found[name] / 1e9)} GFLOP/s in {name}" for name in sorted(found)]
    told += [f"{phrases.significant(copied / 1e9)} GB/s in a copy"] if copied else []
    return phrases.joined(told)


def limits_sentence(study: Study, own: Comparison | None) -> str:
    """How far from the limit, in two sentences; empty where it was not measured."""
    line = roofline(study, own)
    if line is None:
        return ""
    whose = "each GPU's" if own and own.config.device == "cuda" and own.ranks > 1 else "this machine's"
    return (
        f"It reaches {100 * line.flop_share:.0f} % of {whose} {phrases.significant(line.flops / 1e9)} GFLOP/s "
        f"in {line.precision}. Roofline limit: {line.headroom:.1f} times as fast, with element-wise operations and "
        "normalisation free."
    )
