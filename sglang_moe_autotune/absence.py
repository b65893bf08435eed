"""The absence of a rank that measures nothing in this process's life: the other ranks of its server are told why."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune.council import Council, Place, Present

if TYPE_CHECKING:
    from sglang_moe_autotune.store import Store

logger = logging.getLogger("sglang.moe_autotune")

_EVERY_S = 5.0


def tell(store: Store, place: Place, reason: str) -> None:
    """Say so on the board, from a thread of its own, until the process ends. Where there is no folder, or none that can
    be written, nothing is said: the others then do not see this rank at all, and say that."""
    if store.path is not None:
        council = Council(store.path, place, 0.0, lambda _: None, lambda *_: None)
        arguments = council, Present(off=reason)
        threading.Thread(target=_loop, args=arguments, name="moe-autotune-ranks", daemon=True).start()


def _loop(council: Council, present: Present) -> None:
    while True:
        council.say(present, time.monotonic())
        time.sleep(_EVERY_S)
