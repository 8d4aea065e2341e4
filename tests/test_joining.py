"""How the processes of a job on several hosts find each other, and who may not join."""

import dataclasses
import json
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import alive
from torchruns import on_host, torchrun

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import fleet
from ddpm_lab.measure.fleet import Fleet, Introduction
from ddpm_lab.measure.torchrun import JOIN_SECONDS, Process
from ddpm_lab.measure.wire import Wire

TOLD = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"},
}


@pytest.fixture
def store() -> Iterator[Process]:
    """A job of two processes on this host, with a store as torchrun has it."""
    from ddpm_lab.measure.meeting import store_at  # noqa: PLC0415 - imports torch

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = store_at("127.0.0.1", port, "torchrun", seconds=30, listener=listener)
    yield Process.read({**TOLD, "MASTER_PORT": str(port)})
    del server


def test_a_leader_that_refuses_says_so_to_the_others(store: Process) -> None:
    """Both end with the leader's sentence: the one who joins is not left to wait for somebody who does not come."""
    told: list[str] = []

    def lead() -> None:
        with pytest.raises(ConfigError) as caught:
            fleet._gather(store, "nonsense0")
        told.append(str(caught.value))

    thread = threading.Thread(target=lead)
    thread.start()
    with pytest.raises(ConfigError, match=r"rank 0.*has refused: --interface is 'nonsense0'"):
        fleet.join(dataclasses.replace(store, rank=1))
    thread.join(3 * fleet.GONE_SECONDS)
    assert not thread.is_alive(), "the leader waits for somebody who knows already"
    assert len(told) == 1


@pytest.mark.parametrize("there", ["the same", None, pytest.param("another", marks=pytest.mark.slow)])
def test_with_a_secret_the_store_lets_nobody_join(
    store: Process, there: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the store, which listens on every interface, learns where the leader is and not how to join."""
    seconds = 6.0 if there == "the same" else 2.0  # the leader waits so long for somebody who may join
    monkeypatch.setattr(fleet, "JOIN_SECONDS", seconds)
    monkeypatch.setenv(fleet.SECRET, "the same")
    led: list[Any] = []

    def lead() -> None:
        try:
            led.append(fleet._gather(store, "127.0.0.1"))
        except ConfigError as error:
            led.append(str(error))

    thread = threading.Thread(target=lead)
    thread.start()
    told = json.loads(store.store().get("leader"))
    assert "token" not in told
    assert "the same" not in json.dumps(told)
    other = dataclasses.replace(store, rank=1)
    if there is None:
        monkeypatch.delenv(fleet.SECRET)
        with pytest.raises(ConfigError, match=f"{fleet.SECRET} is set for rank 0 and not here"):
            fleet.join(other)
    else:
        monkeypatch.setenv(fleet.SECRET, there)
        joined = fleet.join(other)
    thread.join(3 * 6.0)
    if there == "the same":
        assert isinstance(led[0], Fleet)
        led[0].dismiss()
    else:
        assert isinstance(led[0], str), "a stranger took a place"
    if there is not None:
        joined.close()


def test_a_store_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GONE_SECONDS", 0.1)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"rank 1 on .*rank 0. did not come.*127\.0\.0\.1 port 1 does not answer"):
        fleet.join(Process.read({**TOLD, "RANK": "1"}))
    assert time.monotonic() - begun < JOIN_SECONDS / 4


def test_strangers_are_sent_away_and_the_one_who_knows_the_token_joins() -> None:
    """Another job's process, and somebody who speaks no protocol at all, must not take a place."""
    me = Introduction.of(Process.read({**TOLD, "RANK": "1"}), "right")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def knock(token: str | None) -> Wire | socket.socket:
            joined = socket.create_connection(address)
            if token is None:
                joined.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
                return joined
            wire = Wire(joined)
            wire.send(**{**dataclasses.asdict(me), "token": token})
            return wire

        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(fleet._accept(listener, 1, "right")))
        thread.start()
        knocked = [knock(token) for token in (None, "wrong", "", "right")]
        thread.join(30)
        assert [who.token for _, who in found] == ["right"]
        refused = knocked[1]
        assert isinstance(refused, Wire)
        with pytest.raises((EOFError, OSError)):
            refused.receive()
    for end in (*knocked, found[0][0]):
        end.close()


def test_a_wire_carries_json_and_nothing_that_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = Wire(socket.create_connection(listener.getsockname()))
        near = Wire(listener.accept()[0])
    sender.send(said="done", reports={"a": [1.5, None]})
    assert near.receive() == {"said": "done", "reports": {"a": [1.5, None]}}
    for evil in (pickle.dumps({"said": "done"}), b"[1]", b"\xff\xfe"):
        sender.connection.send_bytes(evil)
        with pytest.raises(OSError, match="no message of the lab"):
            near.receive()
    sender.close()
    with pytest.raises(EOFError):
        near.receive()
    near.close()


STATIC = ("--master-addr", "127.0.0.1", "--master-port", "{port}")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "job")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meeting", "told", "words"),
    [
        (STATIC, (), "EADDRINUSE"),
        (C10D, ("--rdzv-conf", "is_host=1"), "EADDRINUSE"),
        (C10D, (), "The connection to the C10d store has failed"),
    ],
    ids=["static", "c10d", "c10d, not told who the host is"],
)
def test_a_second_job_on_a_taken_port_fails_and_does_not_join_the_first(
    meeting: tuple[str, ...], told: tuple[str, ...], words: str
) -> None:
    """Under the very same name. torchrun itself refuses, or waits for the first to end: docs/clusters.md says which."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    options = [word.format(port=port) for word in meeting]
    script = on_host([("at work", 1, 1, {"micro_steps": 10**9})])
    with torchrun(*options, *script) as one:
        rows = one.rows()
        pids = [next(rows)["leads"], *next(rows)["pids"]]
        with torchrun(*options, *told, *script) as two:
            if words != "EADDRINUSE":
                two.wait_until_connected(port)
                with pytest.raises(subprocess.TimeoutExpired):
                    two.wait(4)
                assert two.running() == [two.pid]
                assert alive(pids) == pids
                one.terminate()
            out, said = two.communicate(timeout=15)
            assert (two.returncode, out) == (1, ""), "a process of the second job has led"
            assert words in said
            assert two.left() == []
        assert words != "EADDRINUSE" or alive(pids) == pids, "the first job has noticed"
