"""All of the lab that is in the process of somebody else's script while the script is measured.

``command.py`` copies this file, as sitecustomize.py, into a folder that comes first on the script's Python path: every
Python process of the command runs it before anything else. It needs the standard library, Python 3.9 and torch 2.1,
or 2.3 where the script compiles: before, torch.compile had torch call no hooks.
After each step of one optimizer, the first that steps and lives, torch calls ``Turns.after``. There the process sleeps
until it is told to make some steps, makes them as it would anyway, and says how long they took.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("DDPM_LAB_TURNS", "")
OPTIMIZER = os.environ.get("DDPM_LAB_OPTIMIZER", "")
ALIVE_SECONDS = 1.0  # while steps are made, the other side hears of one at least so often
SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")  # how names of files of settings end
EXTENSIONS = (".cpp", ".cc", ".cxx", ".c", ".cu", ".so")  # and of what torch compiles and loads, or only loads
SHORT_BYTES = 100_000  # a longer file of another name is data, also where the command line names it
AUDITED = {"open": 0, "os.rename": 1, "import": 1, "ctypes.dlopen": 0}  # events, and which argument is a file


class Turns:
    """The steps of this process, and whoever tells it when to make them."""

    stepping = False  # whether this process has made one

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.taken: Any = lambda: None  # a weak reference to the optimizer whose steps are counted
        self.calls = self.steps = self.skipped = 0
        self.settle = self.left = 0
        self.marks: list[Any] = []
        self.start = self.reported = 0.0
        self.first: Any = None
        self.autocast: set[str] = set()
        self.devices: list[int] = []  # GPUs
        self.link: Any = None
        self.pid = 0  # of the process whose link it is

    def after(self, optimizer: Any, *_: Any) -> None:
        """Called by torch after each step of any optimizer."""
        self.calls += 1
        if self.taken() is None and OPTIMIZER in ("", type(optimizer).__name__):
            self.taken = weakref.ref(optimizer)  # one that is gone is replaced, as at each stage of a training
        if optimizer is not self.taken() or _within_its_own_step(optimizer):
            return
        self.steps += 1
        if self.pid != os.getpid():  # a copy of this process, too, is one that makes steps
            self._greet()
            self._obey()
        elif self.settle:
            self.settle -= 1
            if not self.settle:
                self._begin()
        else:
            self.marks.append(self._mark())
            self.left -= 1
            if not self.left:
                self._report()
                self._obey()
        if time.perf_counter() - self.reported > ALIVE_SECONDS:
            self._say({})

    def _mark(self) -> Any:
        if not self.devices:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.torch.cuda.current_stream(self.devices[0]))
        return event

    def _synchronize(self) -> None:
        for device in self.devices:
            self.torch.cuda.synchronize(device)

    def _find_devices(self) -> None:
        """Those of the weights, which need not be the current one; weights on the CPU may be computed with there."""
        cuda = self.torch.cuda
        if cuda.is_available() and cuda.is_initialized():
            found = {p.device.index for p in self._weights() if p.device.type == "cuda"}
            self.devices = sorted(found) or [cuda.current_device()]

    def _weights(self) -> list[Any]:
        return [p for group in self.taken().param_groups for p in group["params"]]

    def _greet(self) -> None:
        Turns.stepping = True
        from multiprocessing.connection import Client  # noqa: PLC0415 - it takes long, and torch has done so by now

        self._find_devices()
        self._synchronize()
        self.pid = os.getpid()
        try:
            self.link = Client(str(Path(FOLDER, "turns")))
        except OSError:  # nobody is there any more
            os._exit(1)
        self._say({"pid": os.getpid(), **self._place()})

    def _place(self) -> dict[str, int]:
        distributed = self.torch.distributed
        several = distributed.is_available() and distributed.is_initialized()
        rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
        return {"rank": rank, "world_size": world_size}

    def _obey(self) -> None:
        """Sleep until there are steps to make."""
        with contextlib.suppress(Exception):  # whatever the script has put there
            sys.stdout.flush()  # for this process may be killed in its sleep
        while True:
            try:
                request = json.loads(self.link.recv_bytes())
            except (EOFError, OSError):  # whoever measured is gone
                os._exit(1)
            if request["command"] == "window":
                break
            self._say(getattr(self, request["command"])())
        self.settle, self.left, self.reported = request["settle"], request["steps"], time.perf_counter()
        if not self.settle:
            self._begin()

    def _begin(self) -> None:
        self._synchronize()
        self.marks, self.skipped = [], 0
        self.start, self.first = time.perf_counter(), self._mark()

    def _report(self) -> None:
        self._synchronize()
        end, first = time.perf_counter(), self.first
        ends = [first.elapsed_time(mark) / 1e3 if self.devices else mark - first for mark in self.marks]
        memory = bytes_held(self.torch.cuda, self.devices)
        self._say({"start": self.start, "end": end, "step_ends": ends, "skipped": self.skipped, "memory": memory})

    def witness(self) -> dict[str, Any]:
        """What runs, as far as it can be seen from inside."""
        torch, weights = self.torch, self._weights()
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        device = weights[0].device
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        uuid = getattr(properties, "uuid", None)
        free, total = torch.cuda.mem_get_info(device) if properties else (0, 0)
        modules = [(name, m) for name, m in list(sys.modules.items()) if "." not in name]
        installed = [(name, m) for name, m in modules if "-packages/" in (getattr(m, "__file__", None) or "")]
        versions = {name: _version(name, module) for name, module in installed}
        return {
            "device": str(device),
            "device_uuid": f"GPU-{uuid}" if uuid else None,
            **({"device_used_bytes": total - free, "device_total_bytes": total} if total else {}),
            "parameters": sum(p.numel() for p in weights),
            "weights": sorted({str(p.dtype)[6:] for p in weights}),
            "gradients": sorted({str(p.grad.dtype)[6:] for p in weights if p.grad is not None}),
            "autocast": sorted(self.autocast),
            "compiled": bool(counters and (counters["frames"]["ok"] or counters["stats"]["unique_graphs"])),
            "optimizer": type(self.taken()).__name__,
            "several_optimizers": self.calls > self.steps,
            "world_size": self._place()["world_size"],
            "threads": torch.get_num_threads(),
            "argv": sys.argv,
            "python": ".".join(map(str, sys.version_info[:3])),
            "cuda": torch.version.cuda if self.devices else None,
            "versions": {name: v for name, v in sorted(versions.items()) if isinstance(v, str)},
            "prefetch_batches": sum(loader._num_workers * loader._prefetch_factor for loader in loader_iterators()),
            "files": self._files(versions),
        }

    def _files(self, installed: Any) -> list[str]:
        """The program, the modules of its own package, installed or not, and those that are no library's."""
        main = sys.modules["__main__"]
        program = Path(getattr(main, "__file__", None) or "").absolute()
        own = {main.__package__, *_entry_modules(program.name)}  # of python -m, or of what pip put into a bin/
        own = {(name or "").partition(".")[0] for name in own}
        files = {str(program)} if program.is_file() else set()  # whatever its name ends in
        for name, module in list(sys.modules.items()):
            top, file = name.partition(".")[0], getattr(module, "__file__", None) or ""
            # What torch.compile has written belongs to the libraries, as what is named after them.
            counts = top in own or not (top in installed or _of_library(file))
            files |= {file} if counts and file[:1] == "/" and file[-3:] == ".py" else set()
        return sorted(files)

    def finish(self) -> dict[str, Any]:
        """The most memory this process has held; it is ended after this."""
        return most_bytes_held(self.torch.cuda, self.devices)

    def _say(self, said: dict[str, Any]) -> None:
        self.reported = time.perf_counter()
        try:
            self.link.send_bytes(json.dumps(said).encode())
        except OSError:
            os._exit(1)


listed: set[tuple[str, Path]] = set()


def note_file(event: str, given: Any) -> None:
    """Called by Python at each event that can be audited, within the script: quick, and it never raises.

    A file of settings, of an extension, a notebook, Python outside of libraries, or a short one of any name that the
    command line names, is listed that the process reads before its first step, or that it ever writes.
    """
    if event not in AUDITED:
        return
    try:
        name = os.fsdecode(given[AUDITED[event]] or "")  # of an import there is a file where it is an extension
        writes = event == "os.rename" or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        if name.endswith(".pyc") and not writes:  # what is compiled is read in place of its source
            name = importlib.util.source_from_cache(name)
        counts = name.endswith((*SETTINGS, *EXTENSIONS, ".ipynb", ".py"))
        if counts or (_is_argument(name) and (writes or Path(name).stat().st_size < SHORT_BYTES)):
            file = Path(name).absolute()
            if not (name.endswith(".py") and _of_library(str(file))):
                _list("w" if writes else "r", file)
    except Exception:  # whatever was given; and of contextlib nothing may be left when Python ends
        pass


def _is_argument(name: str) -> bool:
    """Whether the command line of this process names a file, be it as ``--config=FILE``, ``@FILE`` or ``./FILE``."""
    words = (word.rpartition("=")[2].lstrip("@") for word in sys.argv[1:])
    return any(f"/{name}".endswith(f"/{word[2:] if word[:2] == './' else word}") for word in words)


def _list(way: str, file: Path) -> None:
    # What a worker of a loader reads is data.
    worker = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
    if (way, file) not in listed and not (way == "r" and (Turns.stepping or worker)):
        listed.add((way, file))
        line = os.fsencode(f"{way}{file.parent.resolve() / file.name}\0")
        with Path(FOLDER, "opened").open("ab") as opened:
            opened.write(line)


def opened(folder: Path, way: str) -> set[str]:
    """The files that processes have listed in a folder, as read or as written: "r" or "w"."""
    with contextlib.suppress(OSError):
        lines = os.fsdecode(Path(folder, "opened").read_bytes()).split("\0")
        return {line[1:] for line in lines if line[:1] == way}
    return set()


def bytes_held(cuda: Any, devices: list[int]) -> dict[str, int]:
    """Memory of this process now: its resident set, and on GPUs what torch has allocated and reserved."""
    found = {"rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if devices:
        found["allocated_bytes"] = sum(map(cuda.memory_allocated, devices))
        found["reserved_bytes"] = sum(map(cuda.memory_reserved, devices))
    return found


def most_bytes_held(cuda: Any, devices: list[int]) -> dict[str, Any]:
    """The most memory of this process so far; None where it has no GPU, or a sandbox does not list it."""
    # Not ru_maxrss, which also counts the parent before exec.
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "peak_rss_bytes": 1024 * int(sizes["VmHWM"].split()[0]) if "VmHWM" in sizes else None,
        "peak_memory_bytes": sum(map(cuda.max_memory_allocated, devices)) if devices else None,
        "peak_reserved_bytes": sum(map(cuda.max_memory_reserved, devices)) if devices else None,
    }


def loader_iterators() -> list[Any]:
    """What iterates over loader workers in this process."""
    kind = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    return [found for found in gc.get_objects() if type(found) is kind and not found._shutdown]


def _of_library(file: str) -> bool:
    return "-packages/" in file or file.startswith((f"{Path(os.__file__).parent}/", f"{FOLDER}/"))


def _version(name: str, module: Any) -> Any:
    """What a module says, or the distribution of its name; None where neither does."""
    from importlib import metadata  # noqa: PLC0415 - it takes long, and torch has done so by now

    with warnings.catch_warnings(), contextlib.suppress(Exception):  # what a module does when it is asked
        warnings.simplefilter("ignore")
        return getattr(module, "__version__", None) or metadata.version(name)
    return None


def _within_its_own_step(optimizer: Any) -> bool:
    """Whether this is the step of a parent class, which an optimizer's own step has called: torch tells of both."""
    frame: Any = sys._getframe(2)
    wrapper, frame = frame.f_code, frame.f_back
    while frame is not None:
        if frame.f_code is wrapper and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _entry_modules(command: str) -> set[str]:
    """The modules that installed packages list as what a command runs."""
    from importlib import metadata  # noqa: PLC0415 - as above

    found = set()
    for package in metadata.distributions():
        with contextlib.suppress(Exception):
            entries = [e for e in package.entry_points if (e.group, e.name) == ("console_scripts", command)]
            found |= {entry.value.partition(":")[0] for entry in entries}
    return found


def attach(torch: Any) -> None:
    """Be called after every optimizer step from here on."""
    turns = Turns(torch)
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(turns.after)
    _count_skipped(getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), turns)  # the first from torch 2.3 on
    _see_autocast(torch.amp.autocast_mode.autocast, turns)


def _count_skipped(scaler: Any, turns: Turns) -> None:
    """Count a step that a gradient scaler skips as the step that it is: all but the optimizer's part was done."""
    step = vars(scaler).get("_maybe_opt_step")
    if step is None:
        return

    def maybe_opt_step(self: Any, optimizer: Any, *given: Any, **how: Any) -> Any:
        calls = turns.calls
        result = step(self, optimizer, *given, **how)
        if turns.calls == calls:
            turns.skipped += 1
            turns.after(optimizer)
        return result

    scaler._maybe_opt_step = maybe_opt_step


def _see_autocast(autocast: Any, turns: Turns) -> None:
    """Note the number formats of autocast until the first step has ended."""
    enter = autocast.__enter__

    def noting(self: Any) -> Any:
        if turns.link is None and getattr(self, "_enabled", False):
            turns.autocast.add(str(getattr(self, "fast_dtype", "unknown")).replace("torch.", ""))
        return enter(self)

    autocast.__enter__ = noting


class Torch:
    """Finds torch as Python would, and attaches to it as soon as it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Called by Python for each module that is imported, and by whoever asks whether there is one."""
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec else None
        if loader is None:
            return spec
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            sys.meta_path.remove(self)
            attach(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def chain() -> None:
    """Run the sitecustomize that this one stands in front of."""
    here = os.path.realpath(FOLDER)
    path = [p for p in sys.path if os.path.realpath(p) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec and spec.origin:
        code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
        exec(code, {"__name__": "sitecustomize", "__file__": spec.origin})


if FOLDER:
    sys.addaudithook(note_file)
    sys.meta_path.insert(0, Torch())
    chain()
