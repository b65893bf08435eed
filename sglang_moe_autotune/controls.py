"""What may be asked of a running process through SGLang's ``/set_internal_state``: numbers by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from sglang_moe_autotune.switch import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")

SWITCH: Final = "moe_autotune"
"""0: off. 1: learned rows are served and nothing is tuned. 2: on, where the file of the store does not say less."""

RECAPTURE: Final = "moe_autotune_recapture"
"""1: captured graphs that hold another config than the served one are captured again at the next deep idle"""


def take(request: Any, serving: Serving) -> None:
    """Obey what is ours in a ``SetInternalStateReq`` and take it out, so that SGLang sees its own part only.

    A value that is not understood stays in, and SGLang refuses the whole request as it refuses any name that it
    does not know. Each rank of a group sees the request at the same place of its loop.
    """
    asked = request.server_args
    for name, obey in CONTROLS.items():
        if name in asked and obey(serving, asked[name]):
            del asked[name]


def _switch(serving: Serving, value: Any) -> bool:
    if isinstance(value, bool) or value not in range(len(LEVELS)):
        return False
    serving.switch.asked = LEVELS[int(value)]
    serving.switched()
    logger.info("MoE autotune was switched to %s by request; it is %s now.", LEVELS[int(value)], serving.switch.level)
    return True


def _recapture(serving: Serving, value: Any) -> bool:
    if isinstance(value, bool) or value != 1:
        return False
    logger.info("MoE autotune was asked for it: %s.", serving.recapture.request())
    return True


CONTROLS: Final[dict[str, Callable[[Serving, Any], bool]]] = {SWITCH: _switch, RECAPTURE: _recapture}
"""name -> obey it; False: not understood"""
