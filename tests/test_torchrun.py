"""Where a process that torchrun started is reached: at an address that the others can reach, or nowhere."""

import ipaddress
import socket

import pytest
from torchruns import on_host, torchrun

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure.torchrun import Process, own_address

TOLD = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"},
}


def test_an_address_that_others_cannot_reach_is_refused() -> None:
    alone = Process.read({**TOLD, "GROUP_WORLD_SIZE": "1"})
    assert own_address(alone, None) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 here, which other hosts cannot.* alone.*--interface lo$"):
        own_address(Process.read(TOLD), None)
    assert own_address(Process.read(TOLD), "lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="choose one of"):
        own_address(alone, "nonsense0")
    with pytest.raises(ConfigError, match="none of this host's"):
        own_address(Process.read({**TOLD, "MASTER_ADDR": "192.0.2.1"}), None)


def meeting(backend: str, name: str, node: int = 0) -> list[str]:
    """How torchrun's agents find each other at a host's name; the port is one that nobody holds."""
    if backend == "standalone":
        return ["--standalone"]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    if backend == "static":
        return ["--node-rank", str(node), "--master-addr", name, "--master-port", str(port)]
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{name}:{port}", "--rdzv-id", "job"]


def loopback(name: str) -> str:
    """A name that stands for loopback here; "own" is that of this host, which may."""
    name = socket.gethostname() if name == "own" else name
    found = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    if not all(ipaddress.ip_address(a).is_loopback for a in found):
        pytest.skip(f"the name of this host, {name}, stands for {', '.join(sorted(found))}, and not for loopback")
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [("static", "localhost"), ("static", "own"), ("c10d", "localhost"), ("c10d", "own"), ("standalone", "localhost")],
)
def test_one_host_whose_name_stands_for_loopback_runs_its_ranks(backend: str, name: str) -> None:
    options = ["--nnodes", "1", "--nproc-per-node", "2", *meeting(backend, loopback(name))]
    with torchrun(*options, *on_host([("works", 2, 1, {})])) as job:
        rows = job.rows()
        assert len(next(rows)["serving"]) == 1, "the second process has joined"
        found = next(rows)
        assert (found["status"], found["images"]) == ("ok", [5 * 4, 5 * 4]), found
        assert set(found["listening"]) == {"127.0.0.1"}, "somebody listens for more than this host"
        assert job.wait(60) == 0
        assert job.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_several_hosts_at_a_name_that_stands_for_loopback_get_one_sentence(backend: str) -> None:
    """No host can say whether the name stands for the same there: here it does, and both still refuse at once."""
    options = meeting(backend, "localhost")
    other = ["--node-rank", "1", *options[2:]] if backend == "static" else options
    command = ["--nnodes", "2", "--nproc-per-node", "1", "-m", "ddpm_lab", "rank", "run", "amp"]
    with torchrun(*options, *command) as one, torchrun(*other, *command) as two:
        said = [job.communicate(timeout=60)[1] for job in (one, two)]
        assert (one.left(), two.left()) == ([], [])
    words = [[line for line in text.splitlines() if line.startswith("ddpm-lab: ")] for text in said]
    assert [len(lines) for lines in words] == [1, 1], said
    ((first,), (second,)) = sorted(words, key=lambda lines: "rank 0" in lines[0])
    assert "torchrun's address localhost is 127.0.0.1 here, which other hosts cannot reach" in first
    assert "--local-addr" in first
    assert first.removeprefix("ddpm-lab: ") in second, "the other host is told why"
