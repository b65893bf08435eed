"""The accord of a server's ranks: what one rank found, what the others measured of it, and what is decided. Pure.

A row is served in service only where every rank measured it faster on its own layers; the slowest one's gain
counts. Rank 0 decides, alone and from what the ranks posted, so that there is one decision for all of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import msgspec

from sglang_moe_autotune.bench import COMPARE_RUNS
from sglang_moe_autotune.records import Evidence, Record, succeeding
from sglang_moe_autotune.shapes import ConfigPair, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Outcome = Literal["holds", "refused", "unsure"]
"""``holds``: faster on this rank, and its output agrees. ``refused``: not so. ``unsure``: it could not be
measured, or not yet; that decides nothing."""

Key = tuple[MoeShape, int]


class Finding(msgspec.Struct, frozen=True):
    """What one rank measured of a proposal. Gains are 1 - pair/against, as fractions."""

    id: str
    outcome: Outcome
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    samples: int = 0
    reason: str = ""
    max_error: float | None = None
    tolerance: float | None = None
    runs: int = 0
    """of each GEMM that this rank compared: its share"""
    whole: bool = False
    """are these gains over SGLang's own config, though a learned row is to be replaced? The rank that found it tested
    it against both."""


class Proposal(msgspec.Struct, frozen=True):
    """A row that one rank found, or that the store holds, put to all ranks."""

    record: Record
    against: ConfigPair
    """what it was measured against: what the ranks serve at its M now"""
    id: str
    """the same for whoever proposes the same"""

    @property
    def key(self) -> Key:
        return self.record.shape, self.record.M


def propose(record: Record, row: Record | None) -> Proposal:
    """row: what the ranks' table has at its M."""
    against = record.baseline if row is None else row.pair
    content = msgspec.json.encode((record.shape, record.M, record.pair, record.baseline, against))
    return Proposal(record, against, hashlib.sha256(content).hexdigest()[:16])


def withdraw(record: Record, served: ConfigPair, row: Record | None) -> tuple[Proposal, Finding]:
    """What a rank posts that found SGLang's own config (``record``) faster than the pair that all serve: that pair,
    refused. Where the ranks' table has it, it is put up against itself, which nobody has to measure."""
    decided = row is not None and row.verdict == "faster"
    pair = row.pair if row is not None and decided else served
    refused = propose(msgspec.structs.replace(record, verdict="faster", pair=pair), row if decided else None)
    return refused, Finding(refused.id, "refused", samples=record.evidence.samples, reason="slower when searched again")


def decide(
    proposal: Proposal, found: Mapping[int, Finding], ranks: int, row: Record | None, min_gain: float
) -> Record | Literal["open", "dismissed"]:
    """The row to publish, or whether to wait on or to drop it. ``found``: by rank what each measured of it;
    ``row``: what is published at its M. One refusal is enough to drop it; a missing rank keeps it open. Each
    rank compared outputs in its share of the runs only, so the shares must add up."""
    served = proposal.record.baseline if row is None else row.pair
    if proposal.against != served:
        return "dismissed"
    findings = [found[rank] for rank in range(ranks) if rank in found]
    if any(finding.outcome == "refused" for finding in findings):
        return "dismissed"
    if sum(finding.outcome == "holds" for finding in findings) < ranks:
        return "open"
    if sum(finding.runs for finding in findings) < COMPARE_RUNS:
        return "dismissed"
    # A row that replaces a learned one is a second step: the tuner asks half as much of it.
    if any(f.gain < (min_gain if row is None or f.whole else min_gain / 2) for f in findings):
        return "dismissed"
    evidence = _evidence(proposal.record.evidence, findings, row)
    return succeeding(msgspec.structs.replace(proposal.record, verdict="faster", evidence=evidence), row)


def _evidence(mine: Evidence, findings: Iterable[Finding], row: Record | None) -> Evidence:
    findings = list(findings)
    gains = [_over_sglangs(finding, row) for finding in findings]
    gain, _, high = min(gains)
    low = min(each[1] for each in gains)
    errors = [f for f in findings if f.max_error is not None]
    worst = max(errors, key=lambda f: f.max_error or 0.0) if errors else None
    return msgspec.structs.replace(
        mine,
        chosen_us=mine.baseline_us * (1 - gain),
        gain=gain,
        gain_low=low,
        gain_high=high,
        samples=sum(f.samples for f in findings) + (row.evidence.samples if row is not None else 0),
        max_error=worst.max_error if worst else mine.max_error,
        tolerance=worst.tolerance if worst else mine.tolerance,
        runs=sum(f.runs for f in findings),
    )


def _over_sglangs(finding: Finding, row: Record | None) -> tuple[float, float, float]:
    """Gain, lower and upper bound over SGLang's own config; what was measured against a learned row comes on top of
    that one's."""
    gains = finding.gain, finding.low, finding.high
    if row is None or finding.whole:
        return gains
    firsts = row.evidence.gain, row.evidence.gain_low, row.evidence.gain_high
    gain, low, high = (1 - (1 - first) * (1 - then) for first, then in zip(firsts, gains, strict=True))
    return gain, low, high


def own_finding(proposal: Proposal, row: Record | None) -> Finding:
    """What the rank that found it measured: the record's gain, which is over SGLang's own config."""
    evidence = proposal.record.evidence
    return Finding(
        *(proposal.id, "holds", evidence.gain, evidence.gain_low, evidence.gain_high, evidence.samples, ""),
        *(evidence.max_error, evidence.tolerance, evidence.runs),
        whole=row is not None and row.verdict == "faster" and row.pair == proposal.against,
    )


def settled(proposal: Proposal, found: Mapping[int, Finding]) -> Record:
    """The record of a proposal that was dropped: SGLang's own answer stays at its M, for all ranks."""
    record = proposal.record
    samples = max(record.evidence.samples, sum(finding.samples for finding in found.values()))
    evidence = msgspec.structs.replace(record.evidence.without_gain(), samples=samples)
    return msgspec.structs.replace(record, verdict="baseline", pair=record.baseline, evidence=evidence)
