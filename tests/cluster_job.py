"""A job of several hosts, for torchrun: its leader runs groups as it is told, and prints what became of each.

A line on standard output is one JSON object; ``at work`` comes before a window that will not end by itself.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import Any

import psutil
from conftest import busy_config, code_of

from ddpm_lab.measure import cluster
from ddpm_lab.measure.group import Group, GroupFailed, Limits


def run(name: str, nodes: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """One group: started, timed for a window, and ended; what it said, or how it failed and after how long."""
    config = dataclasses.replace(busy_config(ranks, **options), nodes=nodes)
    found: dict[str, Any] = {"name": name, "status": "ok"}
    endless = options.get("micro_steps", 0) > 10**6
    begun = time.monotonic()
    try:
        limits, modules = Limits(build_seconds=60), code_of(config.workload).modules
        with Group(config, threads=1, modules=modules, limits=limits) as group:
            processes = [psutil.Process(), *map(psutil.Process, group.pids)]
            sockets = [c for process in processes for c in process.net_connections("tcp")]
            found["listening"] = sorted({c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN})
            if endless:
                print(json.dumps({"at work": name}), flush=True)
            begun = time.monotonic()
            windows = group.window(settle=1, steps=4, limit=600 if endless else 3, stage="testing")
            found["windows"] = [(w["start"], w["end"]) for w in windows]
            found["hosts"] = [w["host"] for w in group.witness()]
            found["images"] = [s["images"] for s in group.finish()]
    except GroupFailed as failure:
        found |= {"status": failure.status, "reason": failure.reason, "detail": failure.detail}
    return found | {"seconds": time.monotonic() - begun}


def main() -> int:
    process = cluster.Process.read(os.environ)
    process.use_interface()
    if process.rank:
        return cluster.serve(process)
    with cluster.leading(process):
        for row in json.loads(sys.argv[1]):
            print(json.dumps(run(*row)), flush=True)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
