"""Which code was measured: a hash of the files that hold it, so that the same hash means the same code.

The lab's own are all of its files but those of what explains. Of a workload that lies elsewhere they are the modules
that a rank loaded in one step from its own package, installed or not, and from outside of libraries (``loaded``); of
packages that these import the version counts.
So do variables of the environment that make the same code slower or faster, and those that a workload's code names.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import digest
from ddpm_lab.measure.hardware import package_version

PACKAGE = Path(__file__).resolve().parents[1]
EXPLAINING = ("explain", "questions", "reports", "cli", "__main__")
"""What of the lab measures nothing. A rank that loads any of it is refused."""
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "psutil")  # distributions that the lab's own workloads run
VARIABLES = (
    *("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "GOMP_", "OMP_", "KMP_", "PYTHONMALLOC", "PYTHONDEVMODE"),
    *("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "PYTORCH_", "CUDA_LAUNCH_", "CUBLAS_", "CUDNN_", "NCCL_", "PYTHONOPTIMIZE"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "NVIDIA_TF32_", "THP_MEM_", "LRU_CACHE_"),
    "CXX",  # what compiles for a CPU
)
"""How the names of variables begin that count, but for some that change no step, and what the lab sets by host."""
BUT = (
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME"),
    *("NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_TOPO_DUMP", "NCCL_GRAPH_DUMP", "OMP_NUM_THREADS", "OMP_DISPLAY_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_HOME", "TORCH_HUB", "TORCH_EXTENSIONS_DIR"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TRITON_CACHE_DIR", "TRITON_HOME"),
)
PASSING = re.compile(
    r"_|PATH|PWD|OLDPWD|SHLVL|HOSTNAME|TMPDIR|CUDA_VISIBLE_DEVICES|(?:DDPM_LAB|SLURM|TORCHELASTIC|MASTER)_\w*"
)
"""Variables that do not count where a workload's code names them: they may be others at each start."""
_NAMED = re.compile(r"""["'](\w+)["']|\$\{?(\w+)|\benv[:,](\w+)""")
"""A name that stands by itself in quotes, is a shell's variable, or one of OmegaConf: ``${oc.env:NAME}``."""
COMPILED = (".cpp", ".cc", ".cxx", ".c", ".cu")
HEADERS = (".h", ".hh", ".hpp", ".cuh", ".inl")
"""How names of C++ and CUDA files end. Headers count in the folder of a source, or in an ``include`` beside it."""
LIBRARIES = ("site-packages", "dist-packages", "lib-dynload")
NO_SETTINGS = (".", "__pycache__", "torchinductor_")  # how the names of folders begin that hold none
SITE_MODULES = ("sitecustomize", "usercustomize")  # of the machine and of no workload: run at every start


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A revision's sources: the commit, the folders that hold them, and the working tree that holds others."""

    revision: str
    folders: tuple[str, ...]
    apart: str

    @property
    def path(self) -> list[str]:
        """The Python path of its ranks: its own folders, then what does not belong to the working tree."""
        return [*self.folders, *(p for p in sys.path if not in_repository(p, self.apart))]

    @property
    def package(self) -> Path:
        """The folder of the lab that its ranks run: the revision's own where it holds one."""
        return next((p.resolve() for f in self.folders if (p := Path(f, PACKAGE.name)).is_dir()), PACKAGE)


class Source(NamedTuple):
    """A module's file, and the hash of what counts in it."""

    file: str
    sha256: str


class Loaded(NamedTuple):
    """What a rank loaded of its workload, as module to file (``loaded``), and the libraries that these import.

    ``settings`` are files that it read before its first step ended, modules among them.
    """

    modules: Mapping[str, str]
    libraries: Sequence[str] = ()
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CodeVersion:
    """``key`` identifies the code: the lab's sources, those of a workload that lies elsewhere, and package versions.

    So it does files of ``settings`` that such a workload reads, of its repository or beside its own.
    They lie in ``tree``; None is wherever this process finds them. ``beside`` is the version of a revision that is
    measured in the same sets: the key then covers both. What commands have ``written`` themselves is no edit.
    """

    key: str
    sources: Mapping[str, Source] = field(default_factory=dict)
    tree: Tree | None = None
    beside: "CodeVersion | None" = None
    written: set[str] = field(default_factory=set, compare=False)
    settings: Sequence[Source] = ()

    @property
    def modules(self) -> dict[str, str]:
        """The hash of each module of a workload that lies elsewhere: what its ranks may load beside the lab."""
        return {name: source.sha256 for name, source in self.sources.items() if not in_lab(name)}

    def with_revision(self, other: "CodeVersion") -> "CodeVersion":
        """The same with the version of a revision, whose sources lie in a tree of their own, beside it."""
        return replace(self, key=digest([self.key, other.key]), beside=other)

    def of(self, revision: str) -> "CodeVersion":
        """The version that a configuration of ``revision`` runs. Raises ConfigError where its sources are not here."""
        if not revision:
            return self
        if self.beside is None or self.beside.tree is None or self.beside.tree.revision != revision:
            raise ConfigError(f"revision is {revision!r}: its sources are here only in ddpm-lab compare --against")
        return self.beside

    def check_unchanged(self) -> None:
        """Raise ConfigError if a source is another by now: ranks load them when they start, each for itself."""
        named = (*self.sources.items(), *((Path(source.file).name, source) for source in self.settings))
        # What a process writes itself is no edit; of Python that it has loaded it is one, by whomever.
        sources = [(n, source) for n, source in named if source.file not in self.written or source.file.endswith(".py")]
        if edited := sorted(name for name, source in sources if _hash(source.file) != source.sha256):
            raise ConfigError(
                f"the code was edited ({', '.join(edited)}) since this process loaded it, and what ran last is not "
                "kept: start it again"
            )
        if self.beside is not None:
            self.beside.check_unchanged()


def code_version(
    loaded: Loaded | None = None, tree: Tree | None = None, environment: Mapping[str, str] = os.environ
) -> CodeVersion:
    """The version of the code that ranks run. Raises ConfigError where the lab's own files were edited meanwhile."""
    modules, libraries, read = loaded or Loaded({})
    own = {name: source_of(file) for name, file in modules.items()}
    sources = _lab_sources(tree.package if tree else PACKAGE) | own
    modules_read = {os.path.realpath(source.file) for source in sources.values()}
    settings = [source_of(file) for file in read if os.path.realpath(file) not in modules_read]
    packages = {*PACKAGES, *(name for top in libraries for name in _distributions().get(top, ()))}
    parts = [part for name, source in sorted(sources.items()) for part in (name, source.sha256)]
    parts += [part for each in sorted((Path(s.file).name, s.sha256) for s in settings) for part in each]
    parts += [f"{name}=={version}" for name in sorted(packages) if (version := package_version(name))]
    own_files = [source.file for source in (*own.values(), *settings)]
    variables = {name for name in environment if name.startswith(VARIABLES) and not name.startswith(BUT)}
    parts += [f"{name}={environment[name]}" for name in sorted(variables | named_in(own_files, environment))]
    found = CodeVersion(digest(parts), sources, tree, settings=settings)
    found.check_unchanged()  # what is remembered of the lab's files is of this process's first look at them
    return found


def named_in(files: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """The variables of the environment that a workload's files name, and may read."""
    texts = (path.read_text(errors="replace") for path in map(Path, files) if path.is_file())
    names = {name for text in texts for found in _NAMED.findall(text) for name in found}
    return {name for name in names & environment.keys() if not PASSING.fullmatch(name)}


def source_of(file: str) -> Source:
    return Source(file, _hash(file))


@cache
def _lab_sources(package: Path) -> dict[str, Source]:
    files = [(file, file.relative_to(package).with_suffix("").parts) for file in package.rglob("*.py")]
    names = {".".join((PACKAGE.name, *parts)): str(file) for file, parts in files if parts[0] not in EXPLAINING}
    return {name: source_of(file) for name, file in names.items()}


def in_lab(module: str) -> bool:
    """Whether a module, or a module:function, is of the lab, and one that a rank may load of it."""
    top, *rest = module.partition(":")[0].split(".")
    return top == PACKAGE.name and not {*rest[:1]} & {*EXPLAINING}


def _hash(file: str) -> str:
    """Of a module's file and of C++ or CUDA sources of its name, which it compiles, with headers; empty where gone."""
    path = Path(file)
    parts = [path, *(p for end in COMPILED if (p := path.with_suffix(end)).is_file())]
    if any(part.suffix in COMPILED for part in parts):
        folders = (path.parent, path.parent / "include", path.parent.parent / "include")
        parts += sorted(p for f in folders for p in f.glob("*") if p.suffix in HEADERS and p.is_file())
    with contextlib.suppress(OSError):
        return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()
    return ""


_distributions = cache(importlib.metadata.packages_distributions)  # reading it takes longer than all the rest


@cache
def _standard_folders() -> tuple[str, ...]:
    paths = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    return tuple({f"{form}/" for path in paths for form in (path, path.resolve())})


@cache
def is_library(place: str) -> bool:
    """Whether a file or folder is of the standard library or of an installed package."""
    path = Path(place)
    return f"{path}/".startswith(_standard_folders()) or not {*path.parts}.isdisjoint(LIBRARIES)


def in_repository(file: str | Path, root: str) -> bool:
    """Whether a place belongs to the repository at ``root``: no library in it, and no repository of its own."""
    path = Path(file).resolve()  # the empty name, as on the Python path, is the working folder
    if not path.is_relative_to(root) or is_library(str(path)):
        return False
    below = takewhile(lambda folder: folder != Path(root), (path, *path.parents))
    return not any((folder / ".git").exists() for folder in below)


def is_setting(file: str, places: Iterable[Path]) -> bool:
    """Whether a file that a workload has read lies below one of some places, in no hidden folder and no library.

    Nor is it what torch has compiled: it would do so anew for each side, and the sources count.
    """
    # Of what does not lie below, the first part is "..".
    folders = [Path(os.path.relpath(file, place)).parts[:-1] for place in places]
    below = any(not any(part.startswith(NO_SETTINGS) for part in parts) for parts in folders)
    compiled = file.endswith(".so") and Path(file).with_name("build.ninja").is_file()
    return below and Path(file).is_file() and not compiled and not is_library(file)


def settings_among(read: Iterable[str], here: Iterable[Path], files: Iterable[Path]) -> list[str]:
    """Those among the files that a workload read that count: of the repositories around ``here``, or beside its own.

    Data may lie elsewhere, and be read in another order at each start.
    """
    roots = (next((p for p in (f, *f.parents) if (p / ".git").exists()), f) for f in here)
    places = {place.resolve() for place in (*roots, *(file.parent for file in files))}
    return sorted(file for file in read if is_setting(file, places))


def loaded(own: Iterable[str] = ()) -> Loaded:
    """What this process has loaded from outside of libraries, but for what of the lab every rank may load.

    The packages of its ``own`` workloads, each module:function, count wherever they lie.
    """
    files, imported, tops = {}, set(), {name.partition(":")[0].partition(".")[0] for name in own}
    for name, module in list(sys.modules.items()):
        # A package's own machinery may load generated code from elsewhere (compiled kernels from a cache): it is not
        # a source of the workload. torch.ops and its like are no modules of source: their file is a bare name.
        file, top = _file(module), name.partition(".")[0]
        counts = top in tops or not (is_library(file) or is_library(_file(sys.modules.get(top))))
        source = file.endswith(".py") and file.startswith("/") and counts
        if source and not in_lab(name) and name not in SITE_MODULES and not name.startswith("__"):
            files[name] = file
            imported |= {v.__name__ for v in vars(module).values() if isinstance(v, ModuleType)}
            imported |= {str(v.__module__) for v in vars(module).values() if isinstance(v, type | FunctionType)}
    return Loaded(files, sorted({name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)))


def unlisted(modules: Mapping[str, str], own: Iterable[str] = ()) -> list[str]:
    """Modules that this process has loaded and that are not among ``modules``, a hash each, or not as they were."""
    return sorted(name for name, file in loaded(own).modules.items() if modules.get(name) != _hash(file))


def astray(apart: str) -> list[str]:
    """Modules loaded in this process from the repository at ``apart``, of which it runs another revision."""
    files = {name: _file(module) for name, module in list(sys.modules.items())}
    return sorted(name for name, file in files.items() if file.startswith("/") and in_repository(file, apart))


def _file(module: ModuleType | None) -> str:
    return getattr(module, "__file__", None) or ""
