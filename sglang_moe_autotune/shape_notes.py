"""What is noted of a shape beside its records: SGLang's own answers by M, and how often each M was served."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from sglang_moe_autotune.records import ShapeNote
from sglang_moe_autotune.sglang_json import GRID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sglang_moe_autotune.records import Origin
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

    Stock = Callable[[MoeShape, int], tuple[ConfigPair | None, ConfigPair | None]]
    """what is served without a learned row, and SGLang's own answer where that cannot be launched here"""

_SERVED_EVERY_S = 60.0


class ShapeNotes:
    """Collects the notes of this process, a little in each idle pass, and hands each to ``submit``."""

    def __init__(self, submit: Callable[[ShapeNote], object], stock: Stock) -> None:
        self._submit, self._stock = submit, stock
        self._origins: dict[MoeShape, Origin] = {}
        self._asking: collections.deque[Iterator[None]] = collections.deque()
        self._served: dict[int, int] = {}
        self._submitted_s = 0.0

    def __contains__(self, shape: object) -> bool:
        return shape in self._origins

    def begin(self, shape: MoeShape, origin: Origin) -> None:
        """A shape was met; SGLang's answers for it are asked from now on."""
        self._origins[shape] = origin
        self._asking.append(self._ask(shape))

    def count(self, served: Mapping[int, int]) -> None:
        """Add batches by M."""
        for M, count in served.items():  # noqa: N806
            self._served[M] = self._served.get(M, 0) + count

    def step(self, now_s: float) -> bool:
        """One question, or what was served of late; True if it asked, which costs about as much as a slice."""
        if self._asking:
            if next(self._asking[0], self) is self:
                self._asking.popleft()
            return True
        if self._served and now_s - self._submitted_s > _SERVED_EVERY_S:
            self._submitted_s = now_s
            for shape in self._origins:
                self._note(shape, {}, {})
        return False

    def _ask(self, shape: MoeShape) -> Iterator[None]:
        """What SGLang uses at each M of the usual grid, and on both sides of each change between them: an
        export pins these."""
        found: dict[int, ConfigPair] = {}
        unfit: dict[int, ConfigPair] = {}

        def ask(M: int) -> ConfigPair | None:  # noqa: N803
            if M not in found:
                pair, own = self._stock(shape, M)
                found.update({} if pair is None else {M: pair})
                unfit.update({} if own is None else {M: own})
            return found.get(M)

        for M in GRID:  # noqa: N806
            ask(M)
            yield
        for start, end in itertools.pairwise(GRID):
            low, high = start, end
            while high - low > 1 and ask(low) != ask(high):
                middle = (low + high) // 2
                low, high = (middle, high) if ask(middle) == ask(low) else (low, middle)
                yield
        self._note(shape, found, unfit)

    def _note(self, shape: MoeShape, baselines: dict[int, ConfigPair], unfit: dict[int, ConfigPair]) -> None:
        self._submit(ShapeNote(shape, baselines, dict(self._served), self._origins[shape], unfit))
