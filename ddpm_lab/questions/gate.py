"""A gate for other people's changes: the working tree against a revision of its repository, in the same sets.

Each side is whole: its own sources, found first on the Python path of its own ranks, and its own file of settings. What
times them is one and the same, or nothing is measured.
"""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.table import literal
from ddpm_lab.files import expanded, output_folder
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import CodeVersion, Tree, in_repository, is_library, source_of
from ddpm_lab.measure.process import private_folder
from ddpm_lab.output import Progress, say
from ddpm_lab.questions import scripts
from ddpm_lab.questions.comparison import first_losses, side, with_images
from ddpm_lab.questions.planning import instrument_for, plan_pair, seconds_of
from ddpm_lab.training.setting import code_of, usual_device

WORKING_TREE = "working tree"
INSTRUMENT = ("ddpm_lab.measure.", "ddpm_lab.config")
"""How the names of modules begin that both sides must have in common: what measures, and what settings mean."""


def compare_revisions(
    step: str | None,
    against: str,
    *,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    **limits: Any,
) -> "Campaign | Outcome":
    """Compare the speed of a training step in the working tree with that in a revision of the same repository.

    ``step`` is ``module:function`` or a TOML file of settings; None is the lab's own trainer with its defaults.
    ``against`` is the baseline's revision, in any form that git accepts. Other arguments are those of ``compare``;
    ``limits`` are resolution, minutes, sets and cores. Returns an outcome, unmeasured, if the code is equal. Raises
    ConfigError without such a repository or revision, if a side cannot run, or if the measuring code differs.
    """
    root, output = root_of(Path.cwd()), output_folder(output_dir)
    commit = commit_of(root, against)
    if scripts.is_command(step):
        how: dict[str, Any] = {"device": device, "output_dir": output_dir, "quiet": quiet, **limits}
        return _compare_command(str(step), against, root, commit, **how)
    instrument = instrument_for(output, Progress("compare", quiet=quiet), seconds_of(limits.get("minutes")))

    def configure(step: str | None, place: str) -> RunConfig:
        config = side(step or RunConfig(device=usual_device(device)), place, device)
        # ``code_of`` runs one step of a workload that is not the lab's own, which needs its images.
        return config if config.workload == DDPM else with_images(config, output, quiet)

    candidate = configure(step, "the step")
    candidate_code = code_of([candidate], instrument)
    _refuse_code_from_elsewhere(root, candidate_code, candidate.workload)
    with worktree(root, commit) as folder:
        baseline = configure(_counterpart(step, root, folder), f"the step in {against}")
        tree = tree_of(root, commit, folder, candidate_code.sources)
        try:
            baseline_code = code_of([baseline], instrument, tree)
        except ConfigError as error:
            raise ConfigError(f"{against} ({tree.revision}): {error}; name a step that both have") from error
        _refuse_settings_of_the_working_tree(root, baseline_code, folder, against)
        first, second = (scripts.contents(code, folder, root) for code in (candidate_code, baseline_code))
        changed = sorted({name for name, _ in first ^ second})  # different, or only on one side
        if not changed and candidate == baseline:
            return _same(f"{candidate.workload} and all that it imports are", f"{against} ({tree.revision})")
        if timing := [module for module in changed if module.startswith(INSTRUMENT)]:
            raise ConfigError(
                f"the measuring code itself is another in {against} ({', '.join(timing)}), and two instruments give no "
                "ratio: compare with a revision since that change"
            )
        baseline = dataclasses.replace(baseline, revision=tree.revision)
        if not quiet:
            named = ", ".join(changed[:5]) + f" and {len(changed) - 5} more" * (len(changed) > 5) or "no module"
            say(f"{WORKING_TREE} against {against} ({tree.revision}): {named} changed", error=True)
        pair = (with_images(baseline, output, quiet), with_images(candidate, output, quiet))
        how = {"code": candidate_code.with_revision(baseline_code), "output": output, "quiet": quiet, **limits}
        return plan_pair(pair, (against, WORKING_TREE), **how).measure()


def _compare_command(command: str, against: str, root: Path, commit: str, **how: Any) -> "Campaign | Outcome":
    """The same of a command line, which a revision runs in its counterpart of the working folder."""
    with worktree(root, commit) as folder:
        here = folder / Path.cwd().resolve().relative_to(root)
        if not here.is_dir():
            raise ConfigError(f"{against} has no folder {here.relative_to(folder)}: change to one that it has")
        tree = Tree(revision=commit[:12], folders=(str(here),), apart=str(root))
        how |= {"names": (against, WORKING_TREE), "revision": (tree, folder)}
        return scripts.compare_commands(command, command, **how) or _same(f"all that {command} loads is", against)


def _counterpart(given: str | None, root: Path, folder: Path) -> str | None:
    """A file of settings as the revision has it; one that it has not, or that lies elsewhere, counts for both sides."""
    if given is None or not given.endswith(".toml"):
        return given
    path = expanded(given).resolve()
    if not in_repository(path, str(root)):
        return given
    there = folder / path.relative_to(root)
    return str(there) if there.is_file() else given


def _refuse_settings_of_the_working_tree(root: Path, its: CodeVersion, folder: Path, against: str) -> None:
    """Raise ConfigError where the baseline reads settings of the working tree that its revision has otherwise."""
    read = [s for s in its.settings if in_repository(s.file, str(root))]
    for name, setting in ((Path(s.file).resolve().relative_to(root), s) for s in read):
        if (folder / name).is_file() and source_of(str(folder / name)).sha256 != setting.sha256:
            raise ConfigError(
                f"both sides read {name} of the working tree, and {against} has another: open it from the folder of "
                "its module, as by Path(__file__), or undo its change"
            )


def _refuse_code_from_elsewhere(root: Path, mine: CodeVersion, workload: str) -> None:
    """Raise ConfigError where no revision of the repository could change what is run, or a part would not be seen."""
    files = {name: Path(source.file) for name, source in mine.sources.items()}
    if not any(in_repository(file, str(root)) for file in files.values()):
        place = files[workload.partition(":")[0]]
        raise ConfigError(
            f"nothing that {workload} imports belongs to the repository {root} (it lies in {place}): name a step of "
            "this repository as module:function (its package installed with pip install -e), or change to the "
            "repository that it belongs to"
        )
    for name, file in files.items():
        below = file.resolve().is_relative_to(root) and not is_library(str(file))
        if below and not in_repository(file, str(root)) and (submodule := submodule_of(root, file)):
            raise ConfigError(
                f"module {name} lies in the submodule {submodule} of {root}, which a revision names and does not hold: "
                "change to the submodule, and compare revisions of it there"
            )


# --- a revision as a folder of its own, of which git remembers nothing: its index lies in the same folder ------------

OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""What git tells its hooks of the repository that they run for; this one is found by its folder."""


def _git(folder: Path, *words: str, refusal: str = "git failed", **variables: str) -> str:
    """What git prints. Raises ConfigError, with the ``refusal`` and git's own words, where it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **variables}
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ConfigError(f"--against needs git, and it cannot be started ({error.strerror}): install it") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise ConfigError(f"{refusal} (git says: {said})" if said else refusal)
    return done.stdout.strip()


def root_of(folder: Path) -> Path:
    """The root of the repository that a folder lies in. Raises ConfigError where there is none."""
    refusal = (
        f"--against compares the working tree of a git repository with a revision of it, and {folder} is in none: "
        "change to its folder"
    )
    return Path(_git(folder, "rev-parse", "--show-toplevel", refusal=refusal)).resolve()


def commit_of(root: Path, revision: str) -> str:
    """The full hash of a revision. Raises ConfigError where the repository has none of that name."""
    remedy = "give a branch, a tag or a commit, and fetch what another clone has"
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        remedy = "this clone is shallow: run git fetch --unshallow, or set fetch-depth: 0 in a workflow"
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return _git(root, *words, refusal=f"--against is {revision!r}, which {root} does not have: {remedy}")


def submodule_of(root: Path, file: Path) -> str:
    """The submodule that a file of the working tree lies in, or the empty string."""
    for folder in file.resolve().parents:
        if root in folder.parents and (folder / ".git").exists():
            name = str(folder.relative_to(root))
            if _git(root, "ls-files", "--stage", "--", name).startswith("160000 "):
                return name
    return ""


@contextlib.contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """A folder that holds ``commit``, gone at the end. Raises ConfigError where git cannot make it."""
    with private_folder() as holder:
        folder, index = Path(holder).resolve() / "tree", f"{holder}/index"
        refusal = f"git cannot check out {commit[:12]} in {folder}"
        for words in (("read-tree", commit), ("checkout-index", "--all", "--quiet", f"--prefix={folder}/")):
            _git(root, *words, refusal=refusal, GIT_INDEX_FILE=index)
        (folder.parent / ".git").mkdir()  # where the repository of a file begins, as is looked for
        yield folder


def tree_of(root: Path, commit: str, holder: Path, modules: Iterable[str]) -> Tree:
    """Where a revision's modules are: counterparts of the folders on the path, and of those of ``modules``."""
    folders = [Path(p).resolve() for p in sys.path]
    for top in dict.fromkeys(m.partition(".")[0] for m in modules):
        spec = importlib.util.find_spec(top)
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        folders += [Path(place).resolve().parent for place in places if place]
    own = [folder for folder in dict.fromkeys(folders) if in_repository(folder, str(root))]
    there = [holder / folder.relative_to(root) for folder in own]
    return Tree(revision=commit[:12], folders=tuple(str(f) for f in there if f.is_dir()), apart=str(root))


# --- the decision ----------------------------------------------------------------------------------------------------

PASSED = "passed"
IDENTICAL = "identical code"
SLOWER = "failed"
NO_RESULT = "no result"
STRICT = 4  # the exit code of what is inconclusive, where that is not enough to pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a change passes, as one of the words above or inconclusive, and a sentence that begins with it."""

    status: str
    sentence: str

    def exit_code(self, *, strict: bool = False) -> int:
        """0 passed, 1 failed or no result; inconclusive is 0, or 4 where ``strict``."""
        return STRICT if strict and self.status == stats.INCONCLUSIVE else int(self.status in (SLOWER, NO_RESULT))


def outcome(answer: Answer, threshold: float) -> Outcome:
    """Judge the answer about one candidate: ``threshold`` is the share of the baseline's speed that it may lose.

    *Failed*: the candidate is called slower, and the whole 95 % interval of its ratio lies below 1 - threshold. One
    that loses just the threshold fails in some 3 % of cases; one that loses as much again as the resolution, in 97 %.
    *Passed*: the whole interval lies above. Anything else is *inconclusive*. With threshold 0 what is slower fails.
    """
    rows = [r for r in comparisons(answer.study) if r.role == "candidate"]
    row = next((r for r in rows if r.sets or (r.disturbed_sets and not r.failed_sets)), None)
    if row is None:
        return _said(NO_RESULT, answer.finding.headline)
    if row.sets < stats.LEAST_SETS:
        text = f"{phrases.plural(row.sets, 'set')}, and a verdict needs {stats.LEAST_SETS}"
        every = (r for r in comparisons(answer.study) if r.role != "note")
        if lost := next((r for r in every if r.failed_sets), None):
            return _said(NO_RESULT, f"{lost.label} failed in {phrases.plural(lost.failed_sets, 'set')}; {text}")
        disturbed = f"; other processes disturbed {row.disturbed_sets} more" * bool(row.disturbed_sets)
        return _said(stats.INCONCLUSIVE, text + disturbed)
    least, pair = 1 - threshold, f"{row.label} {{}} slower than {row.baseline_label}"
    allowed = f"where {phrases.share(threshold) if threshold else 'none'} is allowed"
    # A verdict stays as it was first shown; by how much is what all sets say, if there are more.
    ratio = row.all_sets if row.all_sets.sets > row.sets else row.ratio
    most = phrases.share(1 - ratio.low)
    if row.verdict == stats.SLOWER and ratio.high < least:
        how = f"by {phrases.share(1 - ratio.value)}, and at least by {phrases.share(1 - ratio.high)}, {allowed}"
        return _said(SLOWER, f"{pair.format('is')} {how}")
    if ratio.low / row.noise.apart > least:  # a baseline that does not repeat itself hides as much
        by = "" if ratio.low >= 1 else f" by at most {most}, {allowed}"
        return _said(PASSED, pair.format("is" if by else "is not") + by)
    text = f"{pair.format('may be')} by up to {most}, {allowed}"
    if ratio.low > least:
        text = f"the repeated baseline differs from itself by up to {phrases.share(row.noise.apart - 1)}"
    return _said(stats.INCONCLUSIVE, f"{text}: give a smaller --resolution, more --minutes or a quieter machine")


def _said(status: str, text: str) -> Outcome:
    return Outcome(status=status, sentence=f"{status}: {text}")


def _same(what: str, against: str) -> Outcome:
    where = f"the same in the {WORKING_TREE} and in {against}, so nothing was measured"
    return _said(IDENTICAL, f"{what} {where}; data that it reads does not count")


def summary(answer: Answer, judged: Outcome) -> str:
    """A few lines of Markdown for the page of a job: what was decided, and what it rests on."""
    texts = [judged.sentence, *answer.finding.claim.split("\n"), f"Losses: {': '.join(first_losses(answer.study))}."]
    return "### " + "\n\n".join(map(literal, texts)) + "\n"
