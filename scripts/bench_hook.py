#!/usr/bin/env python3
"""What the hook before each batch costs apart from a loop: with the processor's caches emptied between two calls, as
they are between two decode steps of a server.

    bench_hook.py [--calls 1500] [--mb 24]

Prints one JSON object: medians in microseconds of the hook of a batch that decodes on, with the plugin in its sight and
without, of one that is looked at, and of an empty function. Without a GPU; needs SGLang.
"""

from __future__ import annotations

import argparse
import enum
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STREAMS = 8
_OBJECTS = 300_000
_TOUCHED = 3_000


class Mode(enum.IntEnum):
    """Of a batch."""

    DECODE = 1

    def is_extend(self) -> bool:
        return False


def empty(_scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """What SGLang's hook registry would call for nothing."""


def measured(calls: int, megabytes: int) -> dict[str, float]:
    import torch  # noqa: PLC0415 - with SGLang only

    from sglang_moe_autotune import plugin  # noqa: PLC0415 - as above
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415 - as above
    from sglang_moe_autotune.settings import Settings  # noqa: PLC0415 - as above

    requests = [SimpleNamespace(rid=f"{number:032x}") for number in range(STREAMS)]
    lengths = torch.tensor([100] * STREAMS)
    batch = SimpleNamespace(reqs=requests, forward_mode=Mode.DECODE, seq_lens_cpu=lengths)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(speculative_num_draft_tokens=None))
    serving = Serving(Settings(), dict)
    serving.steps.on, serving.intake.captured = True, {"decode": [STREAMS], "prefill": []}
    memory, objects = torch.zeros(megabytes << 17, dtype=torch.float64), [object() for _ in range(_OBJECTS)]

    def median_us(hook: Callable[..., Any], before: Callable[[], object] = lambda: None) -> float:
        times = []
        for _ in range(calls):
            before()
            memory.sum()
            for one in objects[:_TOUCHED]:
                one.__class__  # noqa: B018 - it is read
            _ = batch.reqs, batch.forward_mode  # SGLang has just used them
            begin = time.perf_counter_ns()
            hook(scheduler, batch)
            times.append(time.perf_counter_ns() - begin)
        return round(statistics.median(times) / 1e3, 2)

    found = {"empty": median_us(empty), "out of sight": median_us(plugin.on_batch)}
    plugin._serving = serving
    found["decodes on"] = median_us(plugin.on_batch)
    found["looked at"] = median_us(plugin.on_batch, serving.beat.pause)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--mb", type=int, default=24, help="of memory that is read between two calls")
    options = parser.parse_args()
    print(json.dumps(measured(options.calls, options.mb)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
