"""Which answers the captured graphs hold, and which graphs hold another one than is served now. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.lookup import CallKey
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang_moe_autotune.heat import BatchKind
    from sglang_moe_autotune.lookup import Call

Answers = dict[CallKey, "ConfigPair | None"]
"""learned pair by call; None: SGLang's own answer"""

_NOTHING = KernelConfig(0, 0, 0, 0)
UNKNOWN: Final = ConfigPair(_NOTHING, _NOTHING)
"""stands for what a graph holds where that is not known: no row is equal to it"""


class Size(NamedTuple):
    """One captured graph, or the few that SGLang captures together under one size."""

    kind: BatchKind
    size: int
    """as SGLang counts it: requests for decode, tokens for prefill"""
    M: int
    """tokens that the MoE layers see in it"""

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


class Stale(NamedTuple):
    """A graph whose answers are not the served ones any more."""

    size: Size
    served: Answers
    taken_back: bool
    """it holds a learned pair that must not be served any more"""


class Captures:
    """What each graph was captured with, as the lookups at its capture were answered."""

    def __init__(self, sizes: Iterable[Size], asked: Mapping[tuple[Call, int], ConfigPair | None]) -> None:
        """asked: the last answer to each (call, M) before this is made; None for SGLang's own."""
        by_m: dict[int, Answers] = {}
        for (key, M), pair in asked.items():  # noqa: N806 - the field's name for it
            by_m.setdefault(M, {})[CallKey(*key)] = pair
        self._held: dict[Size, Answers] = {size: dict(by_m.get(size.M, {})) for size in sizes}
        self._learned: set[tuple[Size, CallKey]] = set()
        """that a learned pair was ever served for"""

    def __len__(self) -> int:
        return len(self._held)

    def held(self, kind: BatchKind, M: int) -> Answers:  # noqa: N803 - the field's name for it
        """What the graphs of a kind with so many tokens hold; nothing where there is none."""
        found: Answers = {}
        for size, held in self._held.items():
            if size.kind == kind and size.M == M:
                found.update(held)
        return found

    def stale(self, rows: Mapping[CallKey, Mapping[int, ConfigPair]]) -> dict[Size, Stale]:
        """The graphs to be captured again under these learned rows."""
        found = {}
        for size, held in self._held.items():
            served: Answers = {key: rows.get(key, {}).get(size.M) for key in held}
            self._learned.update((size, key) for key, pair in served.items() if pair is not None)
            if served != held:
                gone = any(pair is not None and served[key] is None for key, pair in held.items())
                found[size] = Stale(size, served, gone)
        return found

    def captured(self, size: Size, asked: Mapping[tuple[Call, int], ConfigPair | None]) -> bool:
        """Note a new capture by the lookups made in it. False, and nothing is noted, where it did not ask for every
        call that the old one asked for: then it is not known what it holds."""
        answers = {key: asked[key, size.M] for key in self._held[size] if (key, size.M) in asked}
        if answers.keys() != self._held[size].keys():
            return False
        self._held[size] = answers
        return True

    def drop(self, size: Size) -> None:
        """The graph is gone."""
        self._held.pop(size, None)

    def forget(self, sizes: Iterable[Size]) -> None:
        """SGLang captured all its graphs anew, these sizes, at a time that is not known."""
        held = {}
        for size in sizes:
            old = self._held.get(size, {})
            changed = {key for key, pair in old.items() if pair is not None or (size, key) in self._learned}
            held[size] = {key: UNKNOWN if key in changed else pair for key, pair in old.items()}
        self._held = held
