"""Which of two is faster? Any two training steps, measured in sets that alternate, with interval, noise and verdict.

from ddpm_lab import compare
print(compare("mine:baseline", "mine:candidate", resolution=0.02))
"""

import base64
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, cast

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.charts import png, save
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.quality import IDENTICAL, NOT_MEASURED
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import values
from ddpm_lab.files import PREPARED, configuration, expanded, output_folder, read_settings
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.output import say
from ddpm_lab.plan import RESOLUTION
from ddpm_lab.questions import scripts
from ddpm_lab.questions.ask import answer as answered
from ddpm_lab.questions.experiments import study_of
from ddpm_lab.questions.planning import MOST_SETS, plan_pair
from ddpm_lab.training.run_folder import SETTINGS
from ddpm_lab.training.setting import find_here, usual_device

NAME_BYTES = 120
_ITSELF = (
    "every comparison measures its baseline against itself anyway, and ddpm-lab check --instrument tells how finely "
    "this machine measures"
)

Side = str | Path | RunConfig | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """The result of ``compare``. ``str`` returns it in words, and notebooks also show its figure."""

    answer: Answer
    figure: Path

    @property
    def ratio(self) -> float:
        """The baseline's time for equal work divided by the candidate's; above 1, the candidate is faster."""
        return self.answer.finding.ratio

    @property
    def verdict(self) -> str:
        """The verdict on the candidate: faster, slower, same speed, inconclusive or too few sets."""
        return self.answer.finding.verdict

    @property
    def complete(self) -> bool:
        """Whether both sides ran without failing."""
        return {"baseline", "candidate"} <= {r.role for r in self.answer.study.records if r.status == "ok"}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; unknown ones are null."""
        study, finding = self.answer.study, self.answer.finding
        losses, found = first_losses(study), _all_sets(study)
        every = found and values({"ratio": found.value, "low": found.low, "high": found.high, "sets": found.sets})
        return {
            **values({name: getattr(finding, name) for name in _ANSWER}),
            "ran": _witnesses(study),
            "resolution": study.resolution,
            "all_sets": every,
            "sides": [values({name: getattr(row, name) for name in _SIDE}) for row in comparisons(study)],
            "losses": {"verdict": losses[0], "sentence": ": ".join(losses)},
            "figure": str(self.figure),
        }

    def __str__(self) -> str:
        """Return verdict and finding, then a line each for the sides, their first losses, what ran, and the figure."""
        study, finding = self.answer.study, self.answer.finding
        repeats = finding.claim.lower().startswith(self.verdict.lower())
        lines = [finding.claim if repeats else f"{self.verdict}: {finding.claim}"]
        lines += [
            f"  {row.label}: {phrases.seconds(row.step_seconds)} a step, peak memory {phrases.peak_memory(row)}, "
            f"{phrases.plural(row.sets, 'set')} of {phrases.plural(row.turns, 'turn')}"
            for row in comparisons(study)
            if row.sets and row.role != "twin"
        ]
        if found := _all_sets(study):
            rests = f"the answer rests on the first {finding.sets}"
            lines.append(f"  all {found.sets} sets: ratio {phrases.times(found)}; {rests}")
        lines += [f"  losses: {': '.join(first_losses(study))}", *map("  {}".format, _witnesses(study))]
        return "\n".join([*lines, f"figure: {self.figure}"])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        text, alt = str(self), escape(self.answer.finding.headline)
        image = base64.b64encode(png(self.answer.figure())).decode("ascii")
        shown = f'<img style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{image}">'
        return {"text/plain": text, "text/html": f'<p style="white-space: pre-line">{escape(text)}</p>{shown}'}


def compare(
    baseline: Side,
    candidate: Side,
    *,
    resolution: float = RESOLUTION,
    minutes: float | None = None,
    sets: int = MOST_SETS,
    cores: int | None = None,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
) -> ComparisonResult:
    """Compare the speeds of two training steps, precisely enough to detect a difference of ``resolution``.

    Each side is an importable workload ``module:function``, the function itself, a TOML file of ``RunConfig`` settings,
    or a ``RunConfig``. The function takes no arguments and yields after every step (or returns a function that runs one
    step); or it takes ``(config, context)`` and returns a ``Workload``. A step must be the same amount of work on both
    sides, unless ``global_batch_size`` in a file says otherwise.

    Measuring stops when the 95 % interval is narrow enough (half-width at most half of ``resolution``), or after
    ``minutes`` or ``sets`` sets, but never because a difference has appeared. Records of the same code are reused.

    Args:
        baseline: the side whose speed is defined as 1.
        candidate: the side to compare with it.
        resolution: smallest relative difference to detect, such as 0.02 for 2 %.
        minutes: time budget. Default: no limit.
        sets: maximum number of sets.
        cores: CPU cores to use. Default: as for an earlier answer with the same code, or all free ones.
        device: cpu or cuda, for sides that do not set it. Default: the GPU if there is one.
        output_dir: folder for ``trace_output/`` and ``image_output/``. Default: the checkout.
        quiet: do not show progress.

    Raises:
        ConfigError: a side cannot run on this machine, or cannot be sent to another process.
    """
    where: dict[str, Any] = {"cores": cores, "device": device, "output_dir": output_dir, "quiet": quiet}
    return answer(measure(baseline, candidate, resolution=resolution, minutes=minutes, sets=sets, **where))


def measure(
    baseline: Side,
    candidate: Side,
    *,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    **limits: Any,
) -> Campaign:
    """Run the measurements of ``compare`` and return the campaign; needs no scipy. ``limits`` as in ``plan_pair``."""
    if scripts.is_command(baseline) and scripts.is_command(candidate):
        if str(baseline).split() == str(candidate).split():
            raise ConfigError(f"both sides are {str(candidate).strip()!r}: {_ITSELF}")
        how: dict[str, Any] = {"device": device, "output_dir": output_dir, "quiet": quiet}
        return cast(Campaign, scripts.compare_commands(str(baseline), str(candidate), **how, **limits))
    for given in (baseline, candidate):
        if scripts.is_command(given):
            raise ConfigError(f"{given} is a command line, and the other side is none: give two of a kind")
    output = output_folder(output_dir)
    one, two = (
        with_images(side(given, place, device), output, quiet)
        for given, place in ((baseline, "baseline"), (candidate, "candidate"))
    )
    if one.run_id == two.run_id:
        raise ConfigError(f"both sides are {_name(candidate, two)} with the same settings: {_ITSELF}")
    labels = _labels(_name(baseline, one), _name(candidate, two))
    return plan_pair((one, two), labels, output=output, quiet=quiet, **limits).measure()


def answer(measured: Campaign) -> ComparisonResult:
    """Return the result of a measured campaign and save its figure in ``image_output/``."""
    found = answered(study_of(measured))
    family = measured.experiment.families[0]
    plain = "".join(c if c.isalnum() else "-" for c in family.name).encode()[:NAME_BYTES].decode(errors="ignore")
    figure = measured.output / "image_output" / f"compare_{'_'.join(plain.split('-against-'))}.png"
    save(found.figure(), figure)
    return ComparisonResult(answer=found, figure=figure)


def side(given: Side, place: str, device: str | None) -> RunConfig:
    """Return the configuration of a side, without preparing images. ConfigErrors mention the ``place``."""
    if isinstance(given, RunConfig):
        return given
    find_here()
    device = usual_device(device)
    if callable(given):
        return RunConfig(workload=_workload_of(given, place), device=device, global_batch_size=1)
    text = str(given)
    if text.endswith(".toml"):
        values = {"device": device, **read_settings(path := expanded(text), place)}
        for name in ("train", "data_sha256"):  # of a run's file: how long it is, and what its images were
            values.pop(name, None)
        found = configuration(values, f"{place}, {path}")
        if found.command:
            raise ConfigError(f"{place}: {path} holds a command line, which is given as {place} itself")
        return found
    if ":" not in text:
        kinds = "a file of settings that ends in .toml, or two command lines, such as 'python train.py'"
        raise ConfigError(f"{place} is {text!r}: name a workload as module:function, {kinds}")
    return RunConfig(workload=text, device=device, global_batch_size=1)


def _workload_of(function: Callable[..., Any], place: str) -> str:
    """Return the name under which another process can import a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    if module in (None, "__main__") or not name.isidentifier() or getattr(found, name, None) is not function:
        bare = last if (last := name.rpartition(".")[2]).isidentifier() else "name"
        raise ConfigError(
            f"{place} is the function {name or function!r}, which only this process knows, and each side runs in a "
            f"process of its own: put it into a file, such as mine.py, and give 'mine:{bare}'"
        )
    return f"{module}:{name}"


def with_images(config: RunConfig, output: Path, quiet: bool) -> RunConfig:
    """Return a configuration with prepared images if it names any, or if it uses the lab's own trainer."""
    if config.data_sha256 or (config.workload != DDPM and not config.data):
        return config
    progress = (lambda _: None) if quiet else partial(say, error=True)
    how: dict[str, Any] = {"held_out": None, "skip_bad": False, "progress": progress}
    folder = resolve(config.data or "synthetic", output / PREPARED, image_size=config.image_size, **how)
    return dataclasses.replace(config, data=str(folder), data_sha256=read_manifest(folder).content_hash)


def _name(given: Side, config: RunConfig) -> str:
    if isinstance(given, RunConfig):
        return f"configuration {config.run_id}"
    if callable(given) or not str(given).endswith(".toml"):
        return config.workload
    file = Path(given).absolute()
    return file.parent.name if file.name == SETTINGS else file.stem  # of a run


def _labels(one: str, two: str) -> tuple[str, str]:
    """Return labels for two names, without their module if it is the same."""
    if one == two:
        return one, f"{two} (candidate)"
    module, _, function = one.rpartition(":")
    other, _, candidate = two.rpartition(":")
    return (function, candidate) if module and module == other else (one, two)


# --- what it shows ----------------------------------------------------------------------------------------------------

DIFFERENT = "differs"
NOT_COMPARABLE = "not comparable"
_ANSWER = ("verdict", "claim", "ratio", "low", "high", "noise_low", "noise_high", "sets", "hardware", "date", "quality")
_SIDE = (
    *("label", "role", "run_id", "status", "reason", "step_seconds", "peak_memory_bytes", "peak_rss_bytes"),
    *("sets", "sets_needed", "disturbed_sets"),
)


def _all_sets(study: Study) -> stats.Estimate | None:
    """Return the candidate's ratio over all sets, if some were measured after its answer; else None."""
    rows = [r for r in comparisons(study) if r.role == "candidate"]
    return next((r.all_sets for r in rows if r.all_sets.sets > r.sets), None)


def _witnesses(study: Study) -> list[str]:
    """Return what ran, as reported by the ranks in the last set."""
    if any(r.config.command for r in study.records):
        return scripts.command_lines(study)
    found = []
    for label, record in {r.label: r for r in study.records if r.role in ("baseline", "candidate")}.items():
        ranks = record.witness.get("ranks") or []
        if record.status != "ok" or not ranks:
            found.append(f"{label}: {phrases.failure(record)}")
            continue
        seen = ranks[0]
        said = [f"{phrases.plural(len(ranks), 'rank')} on {seen['device']}", phrases.plural(seen["threads"], "thread")]
        said += [f"{name} {seen[name]}" for name in ("precision", "compile", "loader_workers") if name in seen]
        found.append(f"{label} ran as {', '.join(said)} (read back from the run)")
    return found


def first_losses(study: Study) -> tuple[str, str]:
    """Whether the first losses of two sides from equal seeds are the same to the last bit, and why that is the verdict.

    It is identical, differs, not comparable or not measured. Where the baseline differs from its own twin (steps
    without a fixed seed, sums in another order at each run), the sides are not comparable. A difference is relative to
    the larger of two losses, the largest over steps, ranks, sets.
    """
    sets: dict[str, dict[str, list[list[float]]]] = defaultdict(dict)
    for r in study.records:
        if r.role in ("baseline", "candidate", "twin") and r.status == "ok":
            # The first losses of each rank; 0 is what a step without a loss gives.
            sets[r.set_id][r.role] = [rank.get("first_losses") or [] for rank in r.witness.get("ranks") or []]
    whole = [held for held in sets.values() if len(held) == 3]
    if not whole:
        return NOT_MEASURED, "no set has both sides"
    if not all(any(map(any, ranks)) for ranks in whole[0].values()):
        return NOT_MEASURED, "a side gives no loss"
    steps = min(len(rank) for held in whole for ranks in held.values() for rank in ranks)
    if not steps or len(set(map(len, whole[0].values()))) > 1:
        return NOT_COMPARABLE, "the sides have other ranks"

    def apart(role: str) -> float:
        """The largest relative difference from the baseline."""
        ranks = [pair for held in whole for pair in zip(held["baseline"], held[role], strict=True)]
        pairs = [(a, b) for one, two in ranks for a, b in zip(one[:steps], two[:steps], strict=True)]
        return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)

    other, own, of = apart("candidate"), apart("twin"), f"the first {steps} losses"
    if not other:
        return IDENTICAL, f"{of} agree to the last bit"
    if own:
        repeated = f"those of the baseline from one run to the next by {_share(own)}"
        return NOT_COMPARABLE, f"{of} differ by up to {_share(other)}, and {repeated}"
    return DIFFERENT, f"{of} by up to {_share(other)}, where the baseline repeats its own to the last bit"


def _share(difference: float) -> str:
    return phrases.share(difference) if difference >= 1e-4 else f"{difference:.0e} of the loss"
