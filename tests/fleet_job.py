"""A job of several hosts, for torchrun: its leader runs groups as it is told, and prints what became of them.

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

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import fleet, host
from ddpm_lab.measure.group import Group, GroupFailed, Limits
from ddpm_lab.measure.torchrun import Process


def start(config: RunConfig) -> Group:
    modules = code_of(config.workload).modules
    return Group(config, threads=1, modules=modules, environment={}, limits=Limits(build_seconds=60))


def lost_beside(group: Group, other: Group) -> str:
    """What is said of a group that slept while a process of its ranks was lost in another's window."""
    for awake in (group, other):
        begun = time.monotonic()
        try:
            awake.window(settle=0, steps=4, limit=600, stage="testing")
        except GroupFailed as failure:
            said = f"{failure.reason} after {time.monotonic() - begun:.0f} s"
    return said


def run(name: str, ranks: int, nodes: int, options: dict[str, Any]) -> dict[str, Any]:
    """One group: started, timed for a window, and ended; what it said, or how it failed and after how long."""
    config = dataclasses.replace(busy_config(ranks, **options), nodes=nodes)
    found: dict[str, Any] = {"name": name, "status": "ok"}
    begun = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(start(config))
            found["listening"] = [
                c.laddr.ip
                for process in (psutil.Process(), *(psutil.Process(pid) for pid in group.pids))
                for c in process.net_connections("tcp")
                if c.status == psutil.CONN_LISTEN
            ]
            other = stack.enter_context(start(config)) if "beside" in options else None
            endless = options.get("micro_steps", 0) > 10**6
            if endless:
                print(json.dumps({"at work": name, "pids": group.pids}), flush=True)
            begun = time.monotonic()
            if other:
                found["other"] = lost_beside(group, other)
            windows = group.window(settle=1, steps=4, limit=600 if endless else 3, stage="testing")
            found["windows"] = [(w["start"], w["end"]) for w in windows]
            found["watched"] = group.watched_elsewhere()
            found["hosts"] = [w["host"] for w in group.witness()]
            found["images"] = [s["images"] for s in group.finish()]
    except GroupFailed as failure:
        found |= {"status": failure.status, "reason": failure.reason, "detail": failure.detail}
    return found | {"seconds": time.monotonic() - begun}


def main() -> int:
    process = Process.read(os.environ)
    if process.rank:
        return host.serve(fleet.join(process))
    with fleet.leading(process) as led:
        print(
            json.dumps({"leads": os.getpid(), "serving": [s.pid for slots in led.hosts for s in slots][1:]}), flush=True
        )
        for row in json.loads(sys.argv[1]):
            print(json.dumps(run(*row)), flush=True)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
