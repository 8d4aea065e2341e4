"""Two command lines as the sides of a comparison: somebody's training scripts as they stand, in turns.

ddpm-lab compare "python train.py" "python train.py --bf16"
"""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.config import COMMAND, RunConfig, digest
from ddpm_lab.explain import phrases
from ddpm_lab.explain.selection import Study
from ddpm_lab.files import output_folder
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import (
    CodeVersion,
    Tree,
    in_repository,
    is_library,
    named_in,
    settings_among,
    source_of,
)
from ddpm_lab.measure.command import CommandGroup, files_named, sets_threads, texts_of
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.hook import SETTINGS
from ddpm_lab.measure.sets import Instrument, log_of
from ddpm_lab.output import Progress, say
from ddpm_lab.questions.planning import instrument_for, plan_pair, seconds_of, target_of_pair
from ddpm_lab.record import TWIN
from ddpm_lab.training.setting import usual_device

LONGEST_LABEL = 60
WORK = ("parameters", "weights", "world_size")  # where the sides differ in one of these, one step may not be equal work
SCRIPTS = (".sh", ".py")  # how the names of files end that say what a command does; others begin with #!
_REPLACES_PATH = re.compile(
    r"^[^#\n]*?\b(PYTHONPATH=(?!(?!')\S*\$\{?PYTHONPATH|\"[^\"]*\$\{?PYTHONPATH)[^\s;&|]+)", re.MULTILINE
)
RAN = ("device", "world_size", "threads", "parameters", "weights", "gradients", "autocast", "compiled", "optimizer")


def is_command(side: Any) -> bool:
    text = str(side).strip() if isinstance(side, str | Path) else ""
    if os.path.isfile(text):  # noqa: PTH113 - any text, however long; the name of a file or folder may hold a space
        return os.access(text, os.X_OK) and not text.endswith(".toml")
    return " " in text


def configuration(
    command: str, place: str, *, device: str | None, images: int = 1, optimizer: str | None = None, as_is: bool = False
) -> RunConfig:
    """The configuration of a command line; a step of it takes so many ``images``."""
    options = {"command": command.strip(), "optimizer": optimizer, "as_is": as_is}
    whole(f"per_step of {place}", images, 1)
    for replaced in (found for text in texts_of(command, Path.cwd()) if (found := _REPLACES_PATH.search(text))):
        raise ConfigError(
            f"{place} has {replaced[1]}, which replaces the path by which its steps are counted: write "
            f"{replaced[1]}:$PYTHONPATH"
        )
    how: dict[str, Any] = {"device": usual_device(device), "global_batch_size": images}
    return RunConfig(workload=COMMAND, options=tuple((k, v) for k, v in options.items() if v), **how)


def labels(one: str, two: str) -> tuple[str, str]:
    """Two command lines for people: where they are long, from the first word on in which they differ."""
    if max(len(one), len(two)) > LONGEST_LABEL:
        first, second = one.split(), two.split()
        keep = max(0, len(os.path.commonprefix([first, second])) - 1)  # noqa: RUF071 - of words
        one, two = (" ".join(["..."] * bool(keep) + words[keep:]) for words in (first, second))
        one, two = (t if len(t) <= LONGEST_LABEL else f"{t[: LONGEST_LABEL - 3]}..." for t in (one, two))
    return (one, two) if one != two else (one, f"{two} (candidate)")


def is_script(file: Path) -> bool:
    if file.name.endswith(SCRIPTS):
        return True
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(2) == b"#!"
    return False


def look(
    config: RunConfig, instrument: Instrument, place: str, tree: Tree | None = None
) -> tuple[RunConfig, CodeVersion, dict[str, Any]]:
    """Run a few steps of a command; return its configuration, its code version and its witness.

    The witness includes ``files``, the code that it loaded outside libraries. The code version also covers the scripts
    named on the command line, and the settings files that it read in this repository or next to one of these files.
    Raises ConfigError, with the last lines of output, if the command does not run that far.
    """
    command, log = config.command, log_of(instrument.cache, config)
    how: dict[str, Any] = {"threads": config.rank_threads(instrument.usable_cores), "limits": instrument.limits}
    folder, written = Path(tree.folders[0]) if tree else Path.cwd(), instrument.code.written
    named = files_named(command, folder)
    shell = any(is_script(file) and file.suffix != ".py" for file in named)  # whose reads are not observed
    counted = [file for file in named if is_script(file) or (shell and file.name.endswith(SETTINGS))]
    scripts = {str(file): source_of(str(file)) for file in counted}
    try:
        how["progress"] = lambda text: instrument.progress(f"{command}: {text}")
        group = CommandGroup(config, log=log, tree=tree, written=written, **how)
        try:
            group.window(settle=1, steps=2, limit=instrument.limits.build_seconds, stage="looking at it")
            witness = group.witness()[0]
        finally:
            group.kill()
    except GroupFailed as failed:
        first = next((word for word in command.split() if "=" not in word), "")  # after variables
        found = shutil.which(first) if "No module named" in failed.reason else None
        which = f"; {first} is {found} here" if found else ""
        if tree and "No such file" in failed.reason:  # such as data that git ignores
            which += f"; {tree.revision} has what git holds alone: give other files by absolute paths"
        message = f"{place} ({command}) cannot be measured: {failed.reason}{which}; all it printed: {log}"
        raise ConfigError(message) from failed
    mine = [file for file in group.files if not is_library(file)]
    if tree and (astray := [file for file in mine if Path(file).resolve().is_relative_to(tree.apart)]):
        raise ConfigError(
            f"{place} is to run as {tree.revision} has it, and loaded {astray[0]} of the working tree: import by the "
            "script's own folder, not by an installed package or PYTHONPATH"
        )
    # Files that the command has written itself are not settings.
    settings = settings_among(group.read - written, (folder, Path.cwd()), (*named, *map(Path, mine)))
    sources = {file: source_of(file) for file in (*group.files, *settings)}
    sources |= {file: source for file, source in scripts.items() if source_of(file) == source and file not in written}
    hashes = sorted((Path(file).name, source.sha256) for file, source in sources.items())
    variables = [f"{name}={os.environ[name]}" for name in sorted(named_in(sources, os.environ))]
    # Other variables count only by their effect on what ran. The GPU may differ between runs, and so may the command
    # line: it contains the folder of a revision, or a notebook's kernel.
    changing = tree or any(s.endswith(".ipynb") for s in settings)
    left_out = {"device", "argv"} if changing else {"device"}
    ran = [witness[name] for name in (*RAN, "python", "versions", "argv") if name not in left_out]
    key = digest([instrument.code.key, *ran, *variables, hashes])
    device = "cuda" if witness["device"].startswith("cuda") else "cpu"
    code = CodeVersion(key, sources, tree, written=written)
    return dataclasses.replace(config, device=device), code, {**witness, "files": mine}


def compare_commands(
    baseline: str,
    candidate: str,
    *,
    names: tuple[str, str] | None = None,
    revision: tuple[Tree, Path] | None = None,
    per_step: Sequence[int] = (1,),
    optimizer: str | None = None,
    as_is: bool = False,
    cores: int | None = None,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    **limits: Any,
) -> Campaign | None:
    """Compare the speed of two command lines and return the campaign; None if a revision runs the same code.

    The baseline runs in ``revision`` (its tree, and the folder of its files) if given. ``per_step`` is the number of
    images per step, for both sides or each. ``limits`` are as in ``compare``. Raises ConfigError if a side fails.
    """
    output = output_folder(output_dir)
    if len(per_step) > 2:
        raise ConfigError(f"per_step is {tuple(per_step)}: give the images of a step of both sides, or of A and of B")
    instrument = instrument_for(output, Progress("compare", quiet=quiet), seconds_of(limits.get("minutes")))
    images, (tree, worktree) = (per_step[0], per_step[-1]), revision or (None, Path())
    how: dict[str, Any] = {"device": device, "optimizer": optimizer, "as_is": as_is}
    one = configuration(baseline, "A", images=images[0], **how)
    two = configuration(candidate, "B", images=images[1], **how)
    target_of_pair(cores=cores, **limits)  # refuse what cannot be before either script runs
    # Use all cores if a side sets its number of threads itself, otherwise those that are free.
    own_threads = any(c.option("as_is", False) or sets_threads(c.command, Path.cwd()) for c in (one, two))
    if cores is not None and own_threads:
        raise ConfigError(f"cores is {cores}, and a side chooses its threads itself: leave it out")
    one, code, ran = look(dataclasses.replace(one, revision=tree.revision if tree else ""), instrument, "A", tree)
    two, beside, other = look(two, instrument, "B")
    if tree and not any(in_repository(file, tree.apart) for file in other["files"]):
        raise ConfigError(
            f"nothing that {baseline} loads belongs to the repository {tree.apart}: give a script of it, which "
            "imports by its own folder, and no installed package"
        )
    if tree and contents(code, worktree, tree.apart) == contents(beside, worktree, tree.apart):
        return None
    if not quiet:
        for line in unequal(ran, other, images):
            say(f"note: {line}", error=True)
    cores = hardware.usable_cores() if own_threads else cores
    key, sources = digest([code.key, beside.key]), {**code.sources, **beside.sources}
    code = beside.with_revision(code) if tree else dataclasses.replace(beside, key=key, sources=sources)
    how = {"code": code, "output": output, "quiet": quiet, "cores": cores, **limits}
    return plan_pair((one, two), names or labels(baseline, candidate), **how).measure()


def contents(code: CodeVersion, worktree: Path, root: str | Path) -> set[tuple[str, str]]:
    """Each module, or file below ``root``, and its hash; files of a worktree bear the names of their counterparts."""
    named = [*code.sources.items(), *((source.file, source) for source in code.settings)]
    here = [(name.replace(f"{worktree}/", f"{root}/"), s.sha256) for name, s in named if not is_library(name)]
    return {(os.path.relpath(name, root) if name.startswith("/") else name, sha256) for name, sha256 in here}


def _ran_as(seen: Mapping[str, Any]) -> str:
    """What a command ran, as it said itself."""
    autocast = f" under autocast {', '.join(seen['autocast'])}" if seen["autocast"] else ""
    said = [
        f"{phrases.plural(seen['world_size'], 'rank')} on {seen['device']}",
        phrases.plural(seen["threads"], "thread"),
        f"{seen['parameters']:,} parameters in {', '.join(seen['weights'])}{autocast}",
        seen["optimizer"] + ", one of several optimizers" * seen["several_optimizers"],
        "compiled" * bool(seen["compiled"]),
        f"torch {seen['versions'].get('torch', '?')}, Python {seen['python']}",
    ]
    return ", ".join(filter(None, said))


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """What the two sides say differently of themselves, such as "torch 2.11.0 against 2.15.0"."""
    pairs = [(name, one[name], two[name]) for name in (*RAN, "python", "cuda")]
    pairs += [(name, a, two["versions"][name]) for name, a in one["versions"].items() if name in two["versions"]]
    return [f"{name} {_plain(a)} against {_plain(b)}" for name, a, b in pairs if a != b]


def unequal(one: Mapping[str, Any], two: Mapping[str, Any], images: Sequence[int]) -> list[str]:
    """A line where one step of a side may be other work than one of the other's."""
    others = [name for name in WORK if one[name] != two[name]] + ["images of a step"] * (images[0] != images[1])
    return [f"a step of the two sides may not be equal work: {phrases.joined(others)} differ"] if others else []


def _plain(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def command_lines(study: Study) -> list[str]:
    """Return lines on what each command ran and how the sides differ, from their latest records."""
    ran = {r.role: r for r in study.records if r.status == "ok" and r.config.command and r.witness.get("ranks")}
    lines = [f"{r.label} ran as {_ran_as(r.witness['ranks'][0])}" for role, r in ran.items() if role != TWIN]
    if {"baseline", "candidate"} <= ran.keys():
        sides = ran["baseline"], ran["candidate"]
        one, two = (r.witness["ranks"][0] for r in sides)
        different = "; ".join(differences(one, two))
        lines += [f"{sides[1].label} differs from {sides[0].label}: {different}"] if different else []
        lines += unequal(one, two, [r.config.global_batch_size for r in sides])
    skipped = sum(w.state.get("skipped_steps") or 0.0 for r in ran.values() for w in r.windows)
    if skipped:
        lines.append(f"gradient scaling skipped {phrases.plural(int(skipped), 'step')}, which count as steps")
    return lines
