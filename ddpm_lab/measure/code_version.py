"""A hash of the code that runs inside a rank: the same hash means the same code, whatever the commit says.

The sources are found without running them: the modules that a workload imports, followed through every import that
lies outside the standard library and site-packages. Comments, docstrings and layout do not count. Packages that are
imported directly count by name and version. A rank checks after its warm-up that it loaded no other source
(``unlisted``), so an import hidden from this walk is refused and not overlooked. A C++ or CUDA source that bears a
module's name and lies beside it counts with the module, comments included.

The sources are those that this process would import, or those of a ``Tree``: a revision in a folder of its own.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ddpm_lab.checks import ConfigError

RANK_MODULE = "ddpm_lab.measure.rank"
SITE_MODULES = ("sitecustomize", "usercustomize")
"""Python runs them at every start, where an administrator put them: they belong to the machine, not to a workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A revision's sources: the commit, the folders that hold its modules, and the repository they are not taken from.

    ``apart`` is the root of the working tree: nothing that a rank of the revision runs may lie there.
    """

    revision: str
    folders: tuple[str, ...]
    apart: str

    @property
    def path(self) -> list[str]:
        """The Python path of its ranks: its own folders, then what does not belong to the working tree."""
        return [*self.folders, *(p for p in sys.path if not in_repository(p, self.apart))]


class Source(NamedTuple):
    """A module's file, and the hash of what counts in it."""

    file: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class CodeVersion:
    """``key`` identifies the code of ``workloads``; ``modules`` are the sources that count, ``packages`` versions.

    They lie in ``tree``; None is wherever this process finds them. ``beside`` is the version of a revision that is
    measured in the same sets: the key then covers both.
    """

    key: str
    modules: tuple[str, ...]
    packages: dict[str, str]
    workloads: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    tree: Tree | None = None
    beside: CodeVersion | None = None

    def with_revision(self, other: CodeVersion) -> CodeVersion:
        """The same with the version of a revision, whose sources lie in a tree of their own, beside it."""
        both = hashlib.sha256(f"{self.key}\0{other.key}".encode()).hexdigest()[:12]
        return replace(self, key=both, beside=other)

    def of(self, revision: str) -> CodeVersion:
        """The version that a configuration of ``revision`` runs. Raises ConfigError where its sources are not here."""
        if not revision:
            return self
        if self.beside is None or self.beside.tree is None or self.beside.tree.revision != revision:
            raise ConfigError(f"revision is {revision!r}: its sources are here only in ddpm-lab compare --against")
        return self.beside

    def check_unchanged(self) -> None:
        """Raise ConfigError if the sources are others by now: ranks read them when they start, each for itself."""
        if not self.workloads:
            return
        now = code_version(*self.workloads, tree=self.tree)
        if self.beside is not None:
            self.beside.check_unchanged()
            now = now.with_revision(self.beside)
        if now.key != self.key:
            raise ConfigError(
                "the code was edited while it was measured, so what ran last is not kept: give the same command again"
            )


@cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(str(Path(p).resolve()) + "/" for p in paths)


def is_library(file: str) -> bool:
    """Whether a source file belongs to the standard library or to an installed package."""
    return str(Path(file).resolve()).startswith(_library_folders())


def in_repository(file: str | Path, root: str) -> bool:
    """Whether a file or folder belongs to the repository at ``root``: no library in it, and no repository of its own.

    The empty name is the working folder, as on the Python path.
    """
    path = Path(file).resolve()
    if not path.is_relative_to(root) or is_library(str(path / "_")):  # a folder of libraries is one too
        return False
    below = takewhile(lambda folder: folder != Path(root), (path, *path.parents))
    return not any((folder / ".git").exists() for folder in below)


def _source(module: str, tree: Tree | None) -> Path | None:
    """The file of a module that counts, or None for a built-in, a library, or a name that is no module.

    Found by its path, not by ``find_spec`` of the whole name, which would run the packages above it.
    """
    top, *rest = module.split(".")
    try:
        own = PathFinder.find_spec(top, list(tree.folders)) if tree else None
        spec = None if top in sys.stdlib_module_names else own or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or (spec.origin and is_library(spec.origin)):
        return None
    files = [Path(spec.origin)] if not rest and spec.origin and spec.origin.endswith(".py") else []
    for location in (spec.submodule_search_locations or ()) if rest else ():
        folder = Path(location).joinpath(*rest[:-1])
        files += [folder / f"{rest[-1]}.py", folder / rest[-1] / "__init__.py"]
    found = (file for file in files if file.is_file() and not is_library(str(file)))
    return next((file for file in found if not (tree and in_repository(file, tree.apart))), None)


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterable[str]:
    """Names that may be modules: ``from a import b`` gives both a and a.b. What only type checkers read is left out."""
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            if base:
                yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node except those below ``if TYPE_CHECKING:``."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _executed(other)
        else:
            yield from _executed(child)


def _without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return ast.dump(tree)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def code_version(*workloads: str, tree: Tree | None = None) -> CodeVersion:
    """The version of the code that ranks run for these workloads (``module:function`` each); in a ``tree``, that one's.

    Two workloads that are compared share one version: an edit of either asks for new sets of both, since they are
    measured in the same sets. Raises ConfigError if a module does not exist or has a syntax error.
    """
    waiting = _parents(RANK_MODULE)
    for workload in workloads:
        module = workload.partition(":")[0]
        if _source(module, tree) is None:
            raise ConfigError(
                f"workload {workload!r}: there is no module {module!r}; is its folder on the Python path?"
            )
        waiting += _parents(module)
    named = " and ".join(repr(w) for w in dict.fromkeys(workloads))
    sources: dict[str, str] = {}
    files: dict[str, Path] = {}
    top_level: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        file = _source(name, tree)
        if file is None:
            top_level.add(name.partition(".")[0])
            continue
        try:
            parsed = ast.parse(file.read_bytes())
        except SyntaxError as error:
            raise ConfigError(f"workload {named}: {file}, line {error.lineno}: {error.msg}") from error
        for imported in _imports(parsed, name, file.name == "__init__.py"):
            waiting += _parents(imported)
        for workload in workloads:
            module, _, function = workload.partition(":")
            if module == name and not _binds(parsed, function):
                raise ConfigError(f"workload {workload!r}: {file} defines no {function!r}")
        sources[name], files[name] = _without_docstrings(parsed) + _beside(file), file
    packages = _versions(top_level - {name.partition(".")[0] for name in sources} - set(sys.stdlib_module_names))
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    for name in sorted(packages):
        digest.update(f"{name}=={packages[name]}\0".encode())
    hashes = {name: Source(files[name], hashlib.sha256(text.encode()).hexdigest()) for name, text in sources.items()}
    return CodeVersion(digest.hexdigest()[:12], tuple(sorted(sources)), packages, workloads, hashes, tree)


def _beside(file: Path) -> str:
    """Sources in other languages that bear a module's name and lie beside it: the module compiles them."""
    others = [file.with_suffix(suffix) for suffix in (".cpp", ".cu", ".c")]
    return "".join(f"\0{other.name}\0{other.read_text()}" for other in others if other.is_file())


def _binds(tree: ast.Module, name: str) -> bool:
    """Whether a module may bind a name: by a definition, an assignment or an import anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Which installed distributions provide a module; reading it takes longer than all the rest."""
    return importlib.metadata.packages_distributions()


def _versions(top_level: set[str]) -> dict[str, str]:
    distributions = _distributions()
    names = {d for t in top_level for d in distributions.get(t, ())}
    return {name: importlib.metadata.version(name) for name in names}


def unlisted(version_modules: Iterable[str]) -> list[str]:
    """Modules loaded in this process from outside the libraries that the walk did not list."""
    listed = set(version_modules)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # A package's own machinery may load generated code from elsewhere (compiled kernels from a cache): it is not
        # a source of the workload. torch.ops and its like are no modules of source: their file is a bare name.
        package = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
        source = file.endswith(".py") and Path(file).is_absolute() and not is_library(file) and not is_library(package)
        if source and name not in listed and name not in SITE_MODULES and not name.startswith("__"):
            found.append(name)
    return sorted(found)


def astray(apart: str) -> list[str]:
    """Modules loaded in this process from the repository at ``apart``, of which it runs another revision."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return sorted(name for name, file in files.items() if Path(file).is_absolute() and in_repository(file, apart))
