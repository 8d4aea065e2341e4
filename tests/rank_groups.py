"""Groups of ranks on the hosts of ``namespaces``: forked from one process that has imported torch, each on its host.

    python rank_groups.py '[["ddpm-lab-1-0-0", "10.77.0.1"], ["ddpm-lab-1-0-1", "10.77.0.2"]]' < jobs > results

A line of `jobs` is {"ranks", "options", "steps"}: a group of so many ranks on the first hosts takes so many steps of
the workload `ddpm_lab.model.allreduce` with these options, a list of one or more. A line of the results is a list with
the median step in seconds for each of them. Starting `python` once for each rank would take seconds for each.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_lab.config import RunConfig
from ddpm_lab.model.allreduce import all_reduce
from ddpm_lab.workload import RankContext

SETTLE_STEPS = 3


def enter(namespace: str) -> None:
    """Move this process to a host."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)


def serve(rank: int, job: dict[str, Any], hosts: list[list[str]], port: int) -> None:
    """What a rank does; rank 0 prints."""
    ranks = job["ranks"]
    enter(hosts[rank][0])
    with contextlib.suppress(OSError):  # a rank has its host for itself, whatever else this machine does
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{hosts[0][1]}:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    config = RunConfig(world_size=ranks, global_batch_size=ranks)
    context = RankContext(rank=rank, world_size=ranks, device="cpu", threads=1, mark=lambda _: None)
    found = []
    for each in job["options"]:
        workload = all_reduce(dataclasses.replace(config, options=tuple(each.items())), context)
        for _ in range(SETTLE_STEPS):
            workload.step(None)
        dist.barrier()
        times = []
        for _ in range(job["steps"]):
            begun = time.perf_counter()
            workload.step(None)
            times.append(time.perf_counter() - begun)
        assert workload.witness()["summed_over"] == ranks
        found.append(statistics.median(times))
    dist.barrier()
    if rank == 0:
        print(json.dumps(found), flush=True)


def main() -> None:
    """Fork a group for each job, one after the other."""
    hosts = json.loads(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        children = []
        for rank in range(job["ranks"]):
            if (child := os.fork()) == 0:
                try:
                    serve(rank, job, hosts, 29500 + number)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed = [os.waitpid(child, 0)[1] != 0 for child in children]
        if any(failed):
            sys.exit(f"a rank of {Path(__file__).name} failed")


if __name__ == "__main__":
    main()
