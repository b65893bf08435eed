"""Counts how often a config that is not faster is called faster: with noise a launch, and in that of an idle GPU.

    scripts/bench decisions                    # 20,000 decisions and 600 searches: a few minutes
    scripts/bench decisions --decisions 1000 --searches 0

A decision is what a server does with one proposed pair: a paired test, and a second one with fresh samples. The pair
is the baseline under another name, or truly 1 % slower, at launches of three lengths. A search is all that a
server does for one M: every candidate is the baseline under another name, and the luckiest is proposed.
Prints one JSON line a part, with the upper end of a one-sided 95 % interval of each rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune.decision import PairedTest
from sglang_moe_autotune.landscape import Baseline, Landscape, load, shipped
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.replay import ReplayBench, ReplayProvider
from sglang_moe_autotune.routings import Sampling
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.simulate import simulate

if TYPE_CHECKING:
    from sglang_moe_autotune.noise import NoiseModel

SHAPE = MoeShape((128, 1536, 2048), (128, 2048, 768), 8)
BASELINE, CANDIDATE = KernelConfig(64, 64, 32, 8), KernelConfig(64, 64, 64, 8, 4, 3)
LENGTHS_US = {1: (60.0, 40.0), 64: (200.0, 100.0), 4096: (900.0, 500.0)}
"""of up and down by M: several pairs a slice, one pair a slice, a pair longer than a slice"""


def upper_bound(found: int, of: int, confidence: float = 0.95) -> float:
    """The rate at which so few or fewer would be found with probability 1 - confidence (Clopper and Pearson)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        term = total = (1 - rate) ** of
        for k in range(found):
            term *= (of - k) / (k + 1) * rate / (1 - rate)
            total += term
        low, high = (rate, high) if total > 1 - confidence else (low, rate)
    return high


def two_names(slower: float) -> Landscape:
    """One candidate, which takes ``1 + slower`` times as long as the baseline."""
    up, down = ({m: {CANDIDATE: us[n] * (1 + slower)} for m, us in LENGTHS_US.items()} for n in (0, 1))
    baselines = {m: Baseline(ConfigPair(BASELINE, BASELINE), *us) for m, us in LENGTHS_US.items()}
    return Landscape(SHAPE, (CANDIDATE,), up, down, baselines)


def decide(landscape: Landscape, M: int, seed: int, noise_percent: float, model: NoiseModel) -> list[bool]:  # noqa: N803
    """What the first and the second test say: True for faster. Samples are put together as a job does it."""
    provider = ReplayProvider(landscape, seed, noise_percent, noise_model=model)
    bench = ReplayBench(provider, M, ConfigPair(BASELINE, BASELINE))
    outcomes = []
    for sampling in (Sampling(bench.sampling.per_sample), bench.sampling):
        test = PairedTest(0.01, sampling=sampling)
        while test.outcome == "undecided":
            for gemm, count in zip(GEMMS, test.wanted, strict=True):
                if count:
                    test.add(**{gemm: bench.measure(gemm, CANDIDATE, count)})
        outcomes.append(test.outcome == "faster")
    return outcomes


def decisions(count: int, slower: float, noise_percent: float, model: NoiseModel) -> dict[str, Any]:
    landscape, first, both = two_names(slower), 0, 0
    ms = tuple(LENGTHS_US)
    for seed in range(count):
        outcomes = decide(landscape, ms[seed % len(ms)], seed, noise_percent, model)
        first += outcomes[0]
        both += all(outcomes)
    return {
        "part": "decisions", "truly_slower": slower, "noise_model": model, "noise_percent": noise_percent,
        "decisions": count, "faster_in_the_first_test": first, "accepted": both,
        "rate_at_most": round(upper_bound(both, count), 6), "first_test_at_most": round(upper_bound(first, count), 6),
    }  # fmt: skip


def searches(count: int, noise_percent: float, model: NoiseModel) -> dict[str, Any]:
    """Whole searches of the shipped landscape, all of whose candidates take what the baseline takes."""
    recorded = load(shipped()[0])
    same = Landscape(
        recorded.shape,
        recorded.candidates,
        {m: dict.fromkeys(row, recorded.baselines[m].up_us) for m, row in recorded.up_us.items()},
        {m: dict.fromkeys(row, recorded.baselines[m].down_us) for m, row in recorded.down_us.items()},
        recorded.baselines,
    )
    rows = accepted = seed = 0
    while rows < count:
        result = simulate(same, seed, noise_percent, noise_model=model, prior=Prior())
        accepted += sum(row["accepted"] for row in result["per_m"].values())
        rows, seed = rows + len(result["per_m"]), seed + 1
    return {
        "part": "searches", "noise_model": model, "noise_percent": noise_percent, "rows": rows,
        "accepted": accepted, "rate_at_most": round(upper_bound(accepted, rows), 6),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--searches", type=int, default=600, metavar="M", help="rows, 0 for none")
    parser.add_argument("--noise", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument("--noise-model", choices=("launch", "idle"), help="both by default")
    options = parser.parse_args()
    false = 0
    for model in [options.noise_model] if options.noise_model else ("launch", "idle"):
        parts = [decisions(options.decisions, slower, options.noise, model) for slower in (0.0, 0.01)]
        if options.searches:
            parts.append(searches(options.searches, options.noise, model))
        for part in parts:
            print(json.dumps(part), flush=True)
            false += part["rate_at_most"] > 0.01
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
