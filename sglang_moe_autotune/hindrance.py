"""The hindrance: what keeps a stored row from being served. Pure; a server and the shell ask the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Record


def bits_hold(record: Record, *, bit_equal: bool) -> bool:
    """Is the row as equal to SGLang's answer as the user asks? bit_equal: in every bit."""
    proven = record.verdict == "baseline" or record.evidence.max_error == 0.0
    return proven or not bit_equal or record.source == "pinned"
