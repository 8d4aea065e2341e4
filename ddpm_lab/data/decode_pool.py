"""Decode many image files at once, over the usable cores, into an array file.

The helpers are plain child processes that run this module by name and answer requests on a pipe. Nothing of the
calling program is imported again or forked, so a notebook kernel with its threads, and a script without a
``__main__`` guard, can both call it; and a helper whose caller dies reads end of file and exits.
"""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from ddpm_lab.data.folder import DataError, ImageError, decode
from ddpm_lab.data.progress import Progress, paced

__all__ = ["decode_files"]

CHUNK_FILES = 250
MIN_FILES_PER_HELPER = 500  # below this, starting a helper costs more than it saves

Failures = list[tuple[int, str]]


def decode_files(
    paths: Sequence[str], array_path: Path, image_size: int, *, keep_going: bool, progress: Progress | None = None
) -> Failures:
    """Decode ``paths[i]`` into row ``i`` of the ``.npy`` file ``array_path``, uint8 (len(paths), S, S, 3).

    Returns:
        Position and one-line reason of each file that could not be decoded, in order. Without ``keep_going`` the
        work stops at the first ones found.

    Raises:
        DataError: a helper process died.
    """
    say = paced(progress)
    chunks = iter([(start, paths[start : start + CHUNK_FILES]) for start in range(0, len(paths), CHUNK_FILES)])
    helpers = min(len(os.sched_getaffinity(0)), math.ceil(len(paths) / MIN_FILES_PER_HELPER))
    if helpers < 2 or not sys.executable:
        array = np.lib.format.open_memmap(array_path, mode="r+")
        failures: Failures = []
        for start, chunk in chunks:
            failures += _decode_chunk(array, start, chunk, image_size)
            if failures and not keep_going:
                break
            say(f"decoded {start + len(chunk):,} of {len(paths):,} images")
        array.flush()
        return failures
    return _decode_with_helpers(
        chunks,
        helpers,
        count=len(paths),
        array_path=array_path,
        image_size=image_size,
        keep_going=keep_going,
        say=say,
    )


def _decode_chunk(array: npt.NDArray[np.uint8], start: int, paths: Sequence[str], image_size: int) -> Failures:
    failures: Failures = []
    for position, path in enumerate(paths, start):
        try:
            array[position] = decode(path, image_size)
        except ImageError as error:
            failures.append((position, str(error)))
    return failures


def _decode_with_helpers(
    chunks: Iterator[tuple[int, Sequence[str]]],
    helpers: int,
    *,
    count: int,
    array_path: Path,
    image_size: int,
    keep_going: bool,
    say: Progress,
) -> Failures:
    failures: Failures = []
    done = itertools.count(1)
    lock = threading.Lock()
    stop = threading.Event()
    with tempfile.TemporaryFile() as log:
        processes = [_start_helper(log) for _ in range(helpers)]

        def drive(process: subprocess.Popen[bytes]) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, [str(array_path), image_size])
                while not stop.is_set():
                    with lock:
                        chunk = next(chunks, None)
                    if chunk is None:
                        return
                    _send(process.stdin, chunk)
                    answer = process.stdout.readline()
                    if not answer.endswith(b"\n"):
                        raise BrokenPipeError
                    with lock:
                        failures.extend((position, reason) for position, reason in json.loads(answer))
                        say(f"decoded {min(next(done) * CHUNK_FILES, count):,} of {count:,} images")
                    if failures and not keep_going:
                        stop.set()
            except BrokenPipeError:
                stop.set()
                raise DataError(_death_notice(process.wait(), log)) from None

        try:
            with ThreadPoolExecutor(helpers) as pool:
                futures = [pool.submit(drive, process) for process in processes]
                try:
                    for future in futures:
                        future.result()
                except BaseException:  # an interrupt too: the threads wait for helpers that must go first
                    stop.set()
                    for process in processes:
                        process.kill()
                    raise
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
    return sorted(failures)


def _start_helper(log: IO[bytes]) -> subprocess.Popen[bytes]:
    # The helper gets this interpreter's module path, so that it imports the same packages wherever they came from.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", "from ddpm_lab.data.decode_pool import serve; serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)


def _send(pipe: IO[bytes], message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _death_notice(code: int, log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    why = f" ({lines[-1]})" if lines else ", perhaps for want of memory"
    return f"a decoding process {how}{why}; run the command again, with less else running"


def serve() -> None:
    """Answer decoding requests on standard input until it closes: the main function of a helper process."""
    requests = sys.stdin.buffer
    first = requests.readline()
    if not first:
        return
    array_path, image_size = json.loads(first)
    array = np.lib.format.open_memmap(array_path, mode="r+")
    for line in requests:
        start, paths = json.loads(line)
        _send(sys.stdout.buffer, _decode_chunk(array, start, paths, image_size))
