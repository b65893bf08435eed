"""What a server says of the plugin over HTTP: the key ``moe_autotune`` in each internal state of ``/server_info``."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from sglang_moe_autotune.errors import ServerError

_PATHS = ("/server_info", "/get_server_info")
"""the second one is what older releases call it"""
_MAX_BYTES = 32 << 20
KEY = "moe_autotune"
# A proxy for the web would be asked for 127.0.0.1 otherwise, and look at its own machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteStatus(NamedTuple):
    """A server's answer. ``groups`` has the plugin's own words by rank group, None where it is silent."""

    url: str
    sglang: str
    groups: tuple[dict[str, Any] | None, ...]

    @property
    def active(self) -> bool:
        """Does the plugin speak in at least one rank group?"""
        return any(group is not None for group in self.groups)


class _ServerInfo(msgspec.Struct):
    """The fields of the answer that are read; all others pass."""

    version: Any = ""
    internal_states: Any = ()


def address(url: str) -> str:
    """The address that ``url`` means, whether a server is there or not. Raises ServerError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ServerError(f"a server's address is http://HOST:PORT, not {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def ask(url: str, timeout_s: float = 10.0) -> RemoteStatus:
    """Ask the server at ``url``, such as http://127.0.0.1:30000. Raises ServerError with the cure."""
    base = address(url)
    for path in _PATHS:
        if (text := _get(base + path, timeout_s)) is not None:
            return _decode(base, text)
    raise ServerError(f"{base} has no {_PATHS[0]}: name an SGLang server's own address, not a router's")


def _get(url: str, timeout_s: float) -> bytes | None:
    """The body; None for 404."""
    try:
        with _DIRECT.open(url, timeout=timeout_s) as response:
            body: bytes = response.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            cure = "it wants a key, and this command has none" if error.code in {401, 403} else "look at its log"
            raise ServerError(f"{url} answered {error.code}: {cure}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{url} gives no answer ({reason}): check address and port") from error
    if len(body) > _MAX_BYTES:
        raise ServerError(f"{url} answered more than {_MAX_BYTES >> 20} MiB: it is no SGLang server")
    return body


def _decode(base: str, text: bytes) -> RemoteStatus:
    try:
        found = msgspec.json.decode(text, type=_ServerInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ServerError(f"{base} answered something that is no /server_info ({error}): check the port") from error
    states = found.internal_states if isinstance(found.internal_states, list) else []
    groups = (state.get(KEY) if isinstance(state, dict) else None for state in states)
    return RemoteStatus(base, str(found.version), tuple(g if isinstance(g, dict) else None for g in groups))
