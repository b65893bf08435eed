"""Log-probabilities of a server's answers, and how far two sets of them are apart. Standard library only."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_server import Server

Answer = dict[str, Any]
"""``given``: log-probabilities of the prompt's tokens, None where one is no number, as the first one never is;
``made``: of the generated ones; ``tokens``; ``cached``"""


def ask(
    server: Server, prompts: Sequence[list[int]], new_tokens: int, start: int = 0, *, together: bool = False
) -> list[Answer]:
    """Greedy answers to the prompts, one after the other or as one batch. start: the first of a prompt's tokens whose
    log-probability is asked for; those before it may come from the cache."""
    parameters = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"sampling_params": parameters, "return_logprob": True, "logprob_start_len": start}
    if together:
        found = server.post("/generate", {"input_ids": list(prompts), **body})
    else:
        found = [server.post("/generate", {"input_ids": prompt, **body}) for prompt in prompts]
    return [
        {
            "given": [x[0] for x in a["meta_info"]["input_token_logprobs"]],
            "made": [x[0] for x in a["meta_info"]["output_token_logprobs"]],
            "tokens": a["output_ids"],
            "cached": a["meta_info"].get("cached_tokens", 0),
        }
        for a in found
    ]


def difference(one: Sequence[Answer], two: Sequence[Answer]) -> dict[str, float]:
    """How far two answers to the same prompts are apart: over given tokens, and over made ones while they are the
    same; infinitely far where only one of them is a number. Raises ValueError where they are not answers to the same
    prompts."""
    given = [
        apart
        for x, y in zip(one, two, strict=True)
        for a, b in zip(x["given"], y["given"], strict=True)
        if (apart := _apart(a, b)) is not None
    ]
    made: list[float] = []
    same = 0
    for x, y in zip(one, two, strict=True):
        tokens = list(zip(x["tokens"], y["tokens"], strict=True))
        length = next((n for n, (a, b) in enumerate(tokens) if a != b), len(tokens))
        pairs = zip(x["made"][:length], y["made"][:length], strict=True)
        made += [apart for a, b in pairs if (apart := _apart(a, b)) is not None]
        same += length
    return {"given_max": max(given), "given_mean": statistics.fmean(given), "made_max": max(made, default=0.0),
            "tokens_same": same / sum(len(x["tokens"]) for x in one)}  # fmt: skip


def _apart(a: float | None, b: float | None) -> float | None:
    """None where neither is a number: JSON has none for what is not one."""
    if a is None or b is None:
        return None if a is b else math.inf
    return abs(a - b)


def unchanged(found: dict[str, float], noise: dict[str, float]) -> bool:
    """Are answers as equal as those of one server asked twice?"""
    return found["given_max"] <= noise["given_max"] + 1e-6 and found["tokens_same"] >= noise["tokens_same"]


def agree(found: dict[str, float], *stock: dict[str, float]) -> bool:
    """Are answers no further apart than stock ones are that were computed in another order of sums?

    The mean says it: with random weights a token near a tie goes to another expert, so that the largest of some hundred
    differences is a matter of chance. A cache that was written to moves the mean by far more than twice.
    """
    mean, most = (max(one[name] for one in stock) for name in ("given_mean", "given_max"))
    return found["given_mean"] <= 2 * mean + 1e-6 and found["given_max"] <= 4 * most + 1e-6


def told(found: dict[str, float]) -> str:
    return (f"given tokens max {found['given_max']:.2e}, mean {found['given_mean']:.2e}; generated max"
            f" {found['made_max']:.2e}, {100 * found['tokens_same']:.0f} % of them the same")  # fmt: skip
