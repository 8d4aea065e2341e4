"""The order of the house: a module imports only from the rows below it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ddpm_lab"

# Lowest row first. A module imports only from rows below its own; modules of one row do not know each other. A new
# module is given a place here.
ROWS = (
    ("ddpm_lab",),
    ("checks", "gradient_bounds", "processor"),
    ("declared", "files"),
    ("config",),
    ("space",),
    ("changes", "plan", "settings_file", "stopping", "turn_plan"),
    ("record", "run_folder", "workload"),
    ("ledger", "search"),
    # data
    ("data.folder", "data.draws", "data.pixels"),
    ("data.archives", "data.synthetic"),
    ("data.packed",),
    ("data.loaders",),
    # model: what is trained
    ("model.attention", "model.fused", "model.diffusion", "model.step"),
    ("model.convolution", "model.held_out_loss", "model.loss_step"),
    ("model.blocks", "model.sampling"),
    ("model.fid", "model.unet", "model.feed"),
    ("model.reference",),
    ("model.network", "model.reference_sampling"),
    ("model.checkpoint", "model.inference"),
    ("model.generation",),
    ("model.allreduce", "model.denoising", "model.limits", "model.own", "model.peers", "model.train"),
    ("model.gradient_check", "model.training", "model.wrong_ways"),
    # measure: what runs it and times it
    ("measure.measuring_lock", "measure.nvml"),
    (
        "measure.code_version",
        "measure.freed_memory",
        "measure.hardware",
        "measure.plain",
        "measure.profiling",
        "measure.progress",
        "measure.store",
        "measure.torch_gpus",
        "measure.turns",
        "measure.witness",
    ),
    (
        "measure.gpu_trouble",
        "measure.machine_watch",
        "measure.others",
        "measure.phases",
        "measure.preload",
        "measure.process",
    ),
    ("measure.group_folder", "measure.local_rank", "measure.rank"),
    ("measure.cluster", "measure.worktree"),
    ("measure.group",),
    ("measure.fid", "measure.seat"),
    ("measure.gradients", "measure.time_budget", "measure.trial", "measure.wrong_ways"),
    ("measure.sets",),
    ("measure.held", "measure.largest_batch"),
    ("measure.scatter", "measure.shortfall"),
    ("measure.trials",),
    ("measure.campaign",),
    # explain: what reads the ledger
    ("explain.bands",),
    ("explain.charts.style", "explain.figure_style"),
    ("explain.frames", "explain.grids", "explain.pages", "explain.stats"),
    ("explain.charts.bars", "explain.charts.forest", "explain.charts.lines"),
    ("explain.summary", "explain.decisions"),
    ("explain.quality",),
    ("explain.comparisons",),
    ("explain.phrases", "explain.straggler"),
    ("explain.calibration", "explain.learned", "explain.operators", "explain.sentences"),
    (
        "explain.batch_sizes",
        "explain.budget",
        "explain.compiling",
        "explain.gains",
        "explain.limits",
        "explain.machine_state",
    ),
    ("explain.lost_scaling",),
    (
        "explain.links",
        "explain.lost_scaling_table",
        "explain.peers",
    ),
    ("explain.samples",),
    ("explain.trained",),
    ("explain.recommended", "explain.questions.claims"),
    ("explain.recommended_words", "explain.scaling", "explain.subject"),
    ("explain.change_phrases",),
    ("explain.advice",),
    ("explain.bottleneck",),
    ("explain.bottleneck_report", "explain.strategy", "explain.tables"),
    ("explain.findings",),
    (
        "explain.figure_batch_sizes",
        "explain.figure_calibration",
        "explain.figure_claims",
        "explain.figure_links",
        "explain.figure_machine",
        "explain.figure_profile",
        "explain.figure_ratios",
        "explain.figure_samples",
    ),
    (
        "explain.figure_costs",
        "explain.figure_dashboard",
        "explain.figure_peers",
        "explain.figure_quality",
        "explain.figure_scaling",
        "explain.figure_waterfalls",
    ),
    ("explain.benchmark_files", "explain.figures"),
    ("explain.answers", "explain.show"),
    ("explain.gate",),
    # both together
    ("anonymous", "checkup", "inception", "planted", "setting", "summary_lines"),
    ("tracking",),
    ("training_run",),
    (
        "bottleneck",
        "claims",
        "collectives",
        "exchange",
        "lost_scaling",
        "own_workload",
        "quality",
        "trainers",
    ),
    ("sampling_run", "search_space", "training_plan"),
    ("questions",),
    ("chosen_once", "planned"),
    ("planning",),
    ("tracked",),
    ("recommend", "recommended_file"),
    ("calibrate", "experiments", "slurm"),
    ("agenda", "comparison", "notebooks", "probe", "published", "strategy"),
    ("gate", "options", "report"),
    ("bottleneck_command", "commands", "compare_command", "recommend_command"),
    ("report_commands", "run_command", "slurm_commands", "strategy_commands", "train_commands"),
    ("__main__",),
)
PLACE = {name: row for row, names in enumerate(ROWS) for name in names}
STRANGERS = {
    "data": ("model", "measure", "explain"),
    "model": ("measure", "explain"),
    "measure": ("data", "model", "explain"),
    "explain": ("data", "model", "measure"),
}
# A rank imports torch; the process that it becomes must not have done so before. So process imports rank when it runs.
UPWARDS = {("measure.process", "measure.rank")}
TORCH = {
    *(
        "model.allreduce",
        "model.attention",
        "model.blocks",
        "model.checkpoint",
        "model.convolution",
        "model.denoising",
        "model.diffusion",
        "model.feed",
        "model.fused",
    ),
    *("model.fid", "model.generation", "model.held_out_loss", "model.loss_step", "model.own"),
    *("model.inference", "model.limits", "model.network", "model.peers", "model.reference", "model.reference_sampling"),
    *("model.sampling", "model.step", "model.train", "model.training", "model.unet"),
    *("model.gradient_check", "model.wrong_ways"),
    "planted",
    *("data.draws", "data.loaders", "data.pixels"),
    *("measure.freed_memory", "measure.phases", "measure.profiling", "measure.rank", "measure.store"),
    "measure.torch_gpus",
}
EXPLAINING = {"pandas", "scipy", "matplotlib", "papermill", "nbconvert", "nbformat", "IPython"}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


def nodes(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements of a file, and whether each runs as soon as the file is imported."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, id(node) in at_once


@cache
def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Full names of everything imported by a file, also inside functions unless ``at_once``."""
    found = set()
    for node, first in nodes(path):
        if at_once and not first:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path} imports relatively: name the module in full"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """Modules of the package among imported names, as in ROWS; a name inside a module counts as the module."""
    found = set()
    for name in names:
        top, _, rest = name.partition(".")
        if top != "ddpm_lab":
            continue
        while rest and rest not in FILES:
            rest = rest.rpartition(".")[0]
        found.add(rest or "ddpm_lab")
    return found


def third_party(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_every_module_has_a_place() -> None:
    assert set(PLACE) == {"ddpm_lab", *FILES}
    assert sum(map(len, ROWS)) == len(PLACE), "a module has two places"


def test_the_walk_sees_imports() -> None:
    """The checks below would pass on nothing."""
    assert own(imported(FILES["ledger"])) == {"files", "plan", "record"}
    assert own(imported(FILES["report"])) >= {"ddpm_lab", "config", "explain.pages", "notebooks", "agenda"}
    assert "planning" in own(imported(FILES["run_command"]))
    assert "planning" not in own(imported(FILES["run_command"], at_once=True))
    assert "torch" in third_party(imported(FILES["model.unet"]))


def test_a_module_imports_only_from_the_rows_below() -> None:
    for module, path in FILES.items():
        for name in own(imported(path)):
            if (module, name) in UPWARDS:
                assert name not in own(imported(path, at_once=True))
                continue
            assert PLACE[name] < PLACE[module], f"{module} imports {name}, which is not below it"


def test_the_halves_do_not_know_each_other() -> None:
    for module, path in FILES.items():
        strangers = STRANGERS.get(module.partition(".")[0], ())
        for name in own(imported(path)):
            assert name.partition(".")[0] not in strangers, f"{module} imports {name}"


def test_torch_is_imported_only_where_something_is_trained() -> None:
    assert {m for m, path in FILES.items() if third_party(imported(path)) & {"torch", "torchvision"}} == TORCH
    for module, path in FILES.items():
        if module not in TORCH:
            by_way_of = own(imported(path, at_once=True)) & TORCH
            assert not by_way_of, f"{module} imports torch by way of {by_way_of}"


def test_measuring_needs_nothing_that_explains() -> None:
    for module, path in FILES.items():
        if module.startswith(("measure", "model", "data")):
            needed = third_party(imported(path, at_once=True)) & EXPLAINING
            assert not needed, f"{module} imports {needed}"


def test_packages_import_nothing() -> None:
    at_once = imported(PACKAGE / "__init__.py", at_once=True)
    assert third_party(at_once) <= {"__future__", "importlib", "typing", "ddpm_lab"}
    assert own(at_once) <= {"comparison"}, "for the type checker alone"
    for path in PACKAGE.glob("*/__init__.py"):
        assert not [node for node, _ in nodes(path) if not isinstance(node, ast.ImportFrom)], path
        assert third_party(imported(path)) <= {"__future__"}, path


def test_modules_stay_small_and_have_a_subject() -> None:
    for path in (*FILES.values(), *Path(__file__).parent.glob("*.py")):
        assert len(path.read_text().splitlines()) <= 500, f"{path} is too long: find the second module in it"
    for module in FILES:
        assert module.rpartition(".")[2] not in ("utils", "util", "helpers", "misc", "common")
