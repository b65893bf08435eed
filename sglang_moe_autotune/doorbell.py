"""A look at the sockets that requests come in by, without receiving: whoever waits there is served before a slice."""

from __future__ import annotations

from typing import Any

from sglang_moe_autotune import releases

_EVENTS, _READABLE = 15, 1
"""ZMQ_EVENTS and ZMQ_POLLIN of ZeroMQ's stable interface"""


class Doorbell:
    """The sockets of one scheduler: none on ranks that receive by broadcast, and none where the Rust server does."""

    def __init__(self, scheduler: Any) -> None:
        self._sockets: tuple[Any, ...] = releases.request_sockets(scheduler)

    def rung(self) -> bool:
        """Does a request wait? Under a microsecond a socket."""
        return any(socket.getsockopt(_EVENTS) & _READABLE for socket in self._sockets)
