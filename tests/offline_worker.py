"""A worker as ``crew`` starts it, on made-up recordings in place of a GPU: the offline process but for its machine.

As a script: ``offline_worker.py [MANNER]``; the manner ``dies`` ends it at its first record, ``slow`` makes it wait.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from record_values import H200
from synthetic import bf16_shape, landscape

from sglang_moe_autotune import errand
from sglang_moe_autotune.bench import ALONE, Comparison
from sglang_moe_autotune.errand import Errand, Learned
from sglang_moe_autotune.offline import Outing
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.replay import ReplayProvider

if TYPE_CHECKING:
    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

SHAPE = bf16_shape(E=8, N=256, K=512, top_k=2)
OTHER = bf16_shape(E=4, N=256, K=512, top_k=2)
REFUSED = bf16_shape(E=2, N=256, K=512, top_k=2)
MS = (8, 64, 512)


class Recordings:
    """A machine that knows two shapes. Its recordings can be changed between errands, as a new driver does."""

    def __init__(self) -> None:
        self.landscapes: dict[MoeShape, Landscape] = {shape: landscape(shape, MS) for shape in (SHAPE, OTHER)}
        self.loaded: list[MoeShape] = []
        self.share = ALONE
        self.disagrees = False
        self.error = 0.0
        """of every comparison that agrees"""
        self.opened: list[tuple[MoeShape, int]] = []

    def baseline(self, shape: MoeShape, m: int) -> ConfigPair | None:
        recorded = self.landscapes.get(shape, self.landscapes[SHAPE]).baselines
        return recorded[m].pair if m in recorded else None

    def load(self, shape: MoeShape) -> str:
        self.loaded.append(shape)
        return "" if shape in self.landscapes else "no weights of it can be made up"

    def open(self, shape: MoeShape, m: int, baseline: ConfigPair) -> Any:
        assert shape == self.loaded[-1], "opened without its weights"
        self.opened.append((shape, m))
        bench: Any = ReplayProvider(self.landscapes[shape], polls=1).open(shape, m, baseline)
        if not isinstance(bench, str):
            error = 0.5 if self.disagrees else self.error
            bench.compare = lambda *_: Comparison(ok=not self.disagrees, error=error, tolerance=0.016)
        return bench

    def machine(self) -> Any:
        """As ``machine.Machine``, which needs torch to be imported."""
        return SimpleNamespace(
            environment=H200, provider=self, baseline=self.baseline, load=self.load, prior=Prior(),
            source="replayed", sglang="0.5.23", driver="",
        )  # fmt: skip


def main(manner: str) -> int:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    order: Errand = errand.decode_errand(sys.stdin.buffer.readline())
    logging.getLogger("worker").warning("visible: %s", os.environ.get("CUDA_VISIBLE_DEVICES"))
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()

    def tell(told: Any) -> None:
        answers.write(errand.encode(told))
        if manner == "dies" and isinstance(told, Learned):
            outing.store.flush(5)
            sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
            sys.stderr.flush()
            os._exit(9)
        if manner == "slow":
            time.sleep(0.2)

    # The smallest of the real numbers: what is searched is not what these tests are about.
    order = msgspec.structs.replace(order, seed=1)
    outing = Outing(order, Recordings().machine(), tell, stop.is_set)
    outing.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["well"])))
