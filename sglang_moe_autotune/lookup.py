"""The overlay on SGLang's config lookup: a dictionary hit for a learned M, a count for a missed one.

Pure, and on the hot path: no I/O, no lock, no device call; legal while a stream is being captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class CallKey(NamedTuple):
    """The arguments of ``try_get_optimal_moe_config`` that name a layer; M is asked for apart."""

    w1_shape: tuple[int, int, int]
    w2_shape: tuple[int, int, int]
    top_k: int
    dtype: str | None
    block_shape: tuple[int, int] | None
    per_channel_quant: bool

    @property
    def synthetic(self) -> bool:
        """A call that stands for no layer: LoRA's virtual experts pass one weight twice."""
        return self.w1_shape == self.w2_shape or not len(self.w1_shape) == len(self.w2_shape) == 3


Call = tuple[tuple[int, int, int], tuple[int, int, int], int, "str | None", "tuple[int, int] | None", bool]
"""The fields of a ``CallKey`` as the plain tuple that a lookup makes: equal to it, and quicker to make."""

_Answer = tuple[dict[str, int], dict[str, int], int]


class Missed(NamedTuple):
    """SGLang's own answer to a call that no learned row answered."""

    key: CallKey
    M: int
    baseline: ConfigPair | None
    """None where SGLang answered with something that is no pair (a TMA row, a moved return shape); made to fit
    where this GPU could not launch SGLang's own"""


class Lookup:
    """Learned rows by call, and what was missed.

    ``publish`` swaps one reference, so a reader sees the old table or the new one, never a mixture.
    """

    def __init__(self) -> None:
        self._table: dict[CallKey, dict[int, ConfigPair]] = {}
        self._answers: dict[Call, dict[int, _Answer]] = {}
        """the table as dicts that are copied, since SGLang changes what it is given"""
        self.epoch = 0
        self.missed: dict[tuple[Call, int], int] = {}
        self.seen: list[Missed] = []
        """first misses of a (call, M) since they were last taken; the tuner takes them at its next idle pass"""
        self.asked: dict[tuple[Call, int], ConfigPair | None] | None = {}
        """the last answer to each (call, M), None for a miss: what a graph that is being captured will hold; from the
        start until it is set to None"""
        self.fit: Callable[[CallKey, int, ConfigPair], ConfigPair | None] | None = None
        """a pair that this GPU can launch in place of SGLang's own, None where that can be launched"""
        self._fitted: dict[tuple[Call, int], ConfigPair] = {}
        self.overridden: Callable[[], bool] = lambda: False
        """Does something that goes before both answer now? Then there is no row, and no first miss."""

    def answer(self, key: Call, M: int, return_down_config: bool) -> Any | None:  # noqa: N803
        """A fresh answer in SGLang's return shape, or None for a miss."""
        rows = self._answers.get(key)
        row = rows.get(M) if rows is not None else None
        if self.asked is not None:
            self.asked[key, M] = None if row is None else self._table[CallKey(*key)][M]
        if row is None or self.overridden():
            return None
        up, down, block_m = row
        return (up.copy(), (down.copy(), block_m)) if return_down_config else up.copy()

    def miss(self, key: Call, M: int, answer: Any) -> Any | None:  # noqa: N803
        """Count a call that SGLang answered; the first one of an M keeps the answer as its baseline. A call that
        stands for no layer is not counted.

        A fresh answer in place of SGLang's where this GPU could not launch that, else None.
        """
        place = (key, M)
        if (count := self.missed.get(place)) is not None:
            self.missed[place] = count + 1
        elif not self.overridden():
            named = CallKey(*key)
            if not named.synthetic:
                self._first_miss(named, M, read_answer(answer))
        if not self._fitted or (pair := self._fitted.get(place)) is None or self.overridden():
            return None
        if not isinstance(answer, tuple):
            return pair.up.to_dict()
        return pair.up.to_dict(), (pair.down.to_dict(), pair.down.BLOCK_SIZE_M)

    def _first_miss(self, key: CallKey, M: int, pair: ConfigPair | None) -> None:  # noqa: N803
        self.missed[key, M] = 1
        fitted = None if self.fit is None or pair is None else self.fit(key, M, pair)
        if fitted is not None:
            self._fitted[key, M] = fitted
        self.seen.append(Missed(key, M, pair if fitted is None else fitted))

    @property
    def fitted(self) -> int:
        """Calls with an M whose answer was made to fit."""
        return len(self._fitted)

    def take_seen(self, most: int) -> list[Missed]:
        """The oldest first misses that were not taken yet, ``most`` of them."""
        seen, self.seen = self.seen[:most], self.seen[most:]
        return seen

    def rows(self) -> Mapping[CallKey, Mapping[int, ConfigPair]]:
        return self._table

    def publish(self, changes: Iterable[tuple[CallKey, int, ConfigPair | None]]) -> None:
        """Swap in a table with these rows set (or taken back, where None)."""
        table, answers = dict(self._table), dict(self._answers)
        copied: set[CallKey] = set()
        for key, M, pair in changes:  # noqa: N806
            if key not in copied:  # once: a start publishes all that is stored
                copied.add(key)
                table[key], answers[key] = dict(table.get(key, {})), dict(answers.get(key, {}))
            if pair is None:
                table[key].pop(M, None)
                answers[key].pop(M, None)
            else:
                table[key][M] = pair
                answers[key][M] = pair.up.to_dict(), pair.down.to_dict(), pair.down.BLOCK_SIZE_M
        self._table, self._answers = table, answers
        self.epoch += 1


def read_answer(answer: Any) -> ConfigPair | None:
    """SGLang's answer as a pair: ``config`` or ``(config, (down_config | None, max_block_m))``."""
    down: Any = None
    if isinstance(answer, tuple):
        match answer:
            case (dict() as up, (down, _)):
                pass
            case _:
                return None
    else:
        up = answer
    if not isinstance(up, dict) or (down is not None and not isinstance(down, dict)):
        return None
    if "USE_TMA" in up or (down is not None and "USE_TMA" in down):
        return None
    try:
        first = KernelConfig.from_dict(up)
        return ConfigPair(first, KernelConfig.from_dict(down) if down else first)
    except ValueError:
        return None
