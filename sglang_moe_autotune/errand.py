"""The errand: what a process without a server is sent to tune or to verify, and what it tells on the way. Pure.

One line of JSON goes to the process, lines of JSON come back; ``crew`` and ``offline`` are the two ends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from sglang_moe_autotune.inspection import Outcome  # noqa: TC001 - msgspec reads annotations when it runs
from sglang_moe_autotune.records import Environment, Record  # noqa: TC001 - as above
from sglang_moe_autotune.shapes import ACTIVATION_WORDS, MAX_SIZE, QUANTISED, MoeShape, shape_of_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable

Work = Literal["tune", "verify"]


class Item(msgspec.Struct, frozen=True):
    """A shape and the values of M that are asked for, in the order in which they are wanted."""

    shape: MoeShape
    ms: tuple[int, ...]


class Errand(msgspec.Struct, frozen=True):
    """All that one process needs to know."""

    work: Work
    items: tuple[Item, ...]
    root: str | None
    """folder of the store; None keeps records in memory, for whoever reads them from what is told"""
    budget_s: float | None = None
    """time for the work, start-up not counted; None: until nothing is left"""
    min_gain_percent: float = 1.0
    slice_us: float = 500.0
    reserve_mb: int = 1024
    compile_processes: int = 1
    bit_equal: bool = False
    """take only candidates whose output is the baseline's in every bit"""
    seed: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has found its GPU."""

    environment: Environment


class Passed(msgspec.Struct, frozen=True, tag=True):
    """An M that is left out, and why; ``settled``: the store has an answer that holds."""

    slug: str
    M: int
    reason: str
    settled: bool = False


class Step(msgspec.Struct, frozen=True, tag=True):
    """Where the work is now; told a few times a second."""

    slug: str
    M: int
    phase: str
    gpu_s: float


class Learned(msgspec.Struct, frozen=True, tag=True):
    """A record that is in the store now."""

    record: Record


class Verified(msgspec.Struct, frozen=True, tag=True):
    """A stored row that was measured again; gains are fractions."""

    slug: str
    M: int
    outcome: Outcome
    reason: str
    stored_gain: float
    gain: float
    gain_low: float
    gain_high: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last word of a process that ended well."""

    why: Literal["done", "budget", "stopped"]
    gpu_s: float
    kept: bool
    """all records are on disk"""


Told = Ready | Passed | Step | Learned | Verified | Ended

_ENCODER: Final = msgspec.json.Encoder()
_TOLD: Final[msgspec.json.Decoder[Told]] = msgspec.json.Decoder(Told)
_ERRAND: Final = msgspec.json.Decoder(Errand)


def encode(value: Errand | Told) -> bytes:
    """One line, with its end."""
    return _ENCODER.encode(value) + b"\n"


def decode_errand(line: bytes) -> Errand:
    """Raises msgspec.DecodeError."""
    return _ERRAND.decode(line)


def decode_told(line: bytes) -> Told:
    """Raises msgspec.DecodeError."""
    return _TOLD.decode(line)


def split(items: Iterable[Item], count: int) -> list[tuple[Item, ...]]:
    """The same work for up to ``count`` processes: the M of each shape are dealt out in turn, as a large M takes
    longer. Processes that would have nothing are left out."""
    hands: list[list[Item]] = [[] for _ in range(count)]
    dealt = 0
    for item in items:
        for hand in range(count):
            if ms := item.ms[(hand - dealt) % count :: count]:
                hands[hand].append(Item(item.shape, ms))
        dealt += len(item.ms)
    return [tuple(hand) for hand in hands if hand]


# -- shapes in words -------------------------------------------------------------------------------------------

_FIELDS: Final = ("E", "N", "K", "top_k", "dtype", "block", "per_channel", "activation")


def shape_of_fields(text: str) -> MoeShape:
    """``E=64,N=512,K=2048,top_k=6,dtype=bf16`` as a shape. Raises ValueError naming the field and the cure."""
    fields: dict[str, str | None] = dict.fromkeys(("block", "channel", "activation"))
    fields["dtype"] = "bf16"
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in _FIELDS:
            raise ValueError(f"{part!r} is no field of a shape: write NAME=VALUE with one of {', '.join(_FIELDS)}")
        fields["channel" if name == "per_channel" else name] = value
    if fields["channel"] in {"0", "no", "false"}:
        fields["channel"] = None
    return _shape(fields)


def _shape(fields: dict[str, str | None]) -> MoeShape:
    experts, n, k, top_k = (_size(name, fields.get(name)) for name in ("E", "N", "K", "top_k"))
    if top_k > experts:
        raise ValueError(f"top_k={top_k} is more than the {experts} experts: give the local experts as E")
    dtype, activation = fields["dtype"] or "bf16", fields.get("activation") or "bf16"
    if dtype in ACTIVATION_WORDS:
        activation = dtype
    elif dtype not in QUANTISED:
        raise ValueError(f"dtype={dtype} is none of {', '.join((*ACTIVATION_WORDS, *QUANTISED))}")
    if activation not in ACTIVATION_WORDS:
        raise ValueError(f"activation={activation} is none of {', '.join(ACTIVATION_WORDS)}")
    block = fields.get("block")
    if block is not None and not re.fullmatch(r"\d+x\d+", block):
        raise ValueError(f"block={block} is no block of scales: write it like block=128x128")
    rows, columns = (int(side) for side in block.split("x")) if block else (0, 0)
    return shape_of_sizes(
        (experts, n, k, top_k),
        dtype,
        (rows, columns) if block else None,
        per_channel_quant=bool(fields.get("channel")),
        activation_dtype=ACTIVATION_WORDS[activation],
    )


def _size(name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or not 0 < int(text) <= MAX_SIZE:
        raise ValueError(f"{name} must be a whole number from 1 on, not {text!r}: a shape needs E, N, K and top_k")
    return int(text)
