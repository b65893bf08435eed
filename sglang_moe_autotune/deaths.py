"""Deaths in the middle of a first launch, and the count of servers that makes a start read-only.

SGLang ends its schedulers by SIGKILL, so nothing can be tidied up at an end, and most ends are no faults. What may
kill is a launch that was never made before: ``journal`` says how that is known, ``inquest`` writes what is read here.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sglang_moe_autotune import held, inquest, whole_file
from sglang_moe_autotune.inquest import DEATHS as FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sglang_moe_autotune.status import Owner

__all__ = ["FOLDER", "KEPT_S", "LIMIT", "Death", "clear", "read", "sentence", "servers"]

LIMIT: Final = 2
"""servers with deaths on one environment from which on a start is read-only"""
KEPT_S: Final = 7 * 86400.0
"""an older death does not count"""


class Death(NamedTuple):
    """A process that died while it launched something for the first time."""

    path: Path
    owner: Owner
    environment: str
    unix_s: float
    what: str
    server: str = ""
    """the same for the ranks of one server, which end together; empty: its own"""


def read(root: Path | None, environment: str | None = None, *, read_only: bool = False) -> tuple[Death, ...]:
    """The deaths that count, of one environment (by its key) or of all, oldest first. Never raises OSError.

    Takes the journals of the dead in, and removes what is older than ``KEPT_S``; read_only: writes nothing.
    """
    if root is None:
        return ()
    fresh = inquest.hold(root, read_only=read_only).deaths
    named = dict(_kept(root, read_only=read_only))
    for name, death in fresh:
        named.setdefault(root / FOLDER / name, death)
    found = [
        Death(path, one.owner, one.environment, one.unix_s, one.what, one.server)
        for path, one in named.items()
        if environment in {None, one.environment}
    ]
    return tuple(sorted(found, key=lambda death: death.unix_s))


def clear(root: Path) -> int:
    """Forget all deaths; how many there were. What is in quarantine stays there. Raises OSError."""
    found = read(root)
    for death in found:
        death.path.unlink(missing_ok=True)
    return len(found)


def servers(found: Iterable[Death]) -> int:
    """How many servers died: where one rank does, SGLang kills the others, perhaps in launches of their own."""
    return len({death.server or death.path for death in found})


def sentence(found: tuple[Death, ...]) -> str:
    """Why a start is read-only, for people; empty where it is not. found: of one environment."""
    if servers(found) < LIMIT:
        return ""
    return (
        f"{len(found)} processes died in the middle of a first launch, the last one at {found[-1].what or 'an unknown'}"
        " launch; `sglang-moe-autotune on` forgets them"
    )


def _kept(root: Path, *, read_only: bool) -> Iterator[tuple[Path, inquest.Death]]:
    for path in held.files(root / FOLDER, ".json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if (text := whole_file.read(path, follow=False)) is not None:
                death = msgspec.json.decode(text[0], type=inquest.Death)
                if time.time() - death.unix_s <= KEPT_S:
                    yield path, death
                elif not read_only:
                    path.unlink()
