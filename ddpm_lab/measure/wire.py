"""The connection between the process that leads several hosts and one that serves a rank: JSON in frames, no pickle.

Both ends notice after some ten seconds that the other's host is gone, without a message of their own: the kernel asks
an idle peer, and gives up on one that acknowledges nothing.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

MOST_BYTES = 64 << 20
"""The longest message that is read: a report of a window is some kilobytes."""
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 3, 2, 3
_GIVE_UP_SECONDS = _IDLE_SECONDS + _PROBE_SECONDS * _PROBES


class Wire:
    """One end. Reading and writing raise OSError or EOFError once the other end, or the way to it, is gone."""

    def __init__(self, joined: socket.socket) -> None:
        joined.settimeout(None)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GIVE_UP_SECONDS)
        self.own_address: str = joined.getsockname()[0]
        self.connection = Connection(joined.detach())

    def send(self, **message: Any) -> None:
        """Send a message."""
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """The next message; blocks until there is one."""
        try:
            message = json.loads(self.connection.recv_bytes(MOST_BYTES))
        except ValueError as error:
            raise OSError("what came is no message of the lab") from error
        if not isinstance(message, dict):
            raise OSError("what came is no message of the lab")
        return message

    def waiting(self) -> bool:
        """Whether there is something to read, be it only the end."""
        return self.connection.poll()

    def wait_for_ever(self) -> None:
        """Let reading take as long as it does, whatever was set before."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
