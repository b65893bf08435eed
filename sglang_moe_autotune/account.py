"""The account of an errand: what its workers told, as lines, as one JSON object, and as an exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sglang_moe_autotune import crew, shell, summary
from sglang_moe_autotune.errand import Ended, Learned, Passed, Ready, Step, Verified
from sglang_moe_autotune.inspection import DEMOTED
from sglang_moe_autotune.selection import NothingFound, Unusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.objects import Json
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.shapes import MoeShape

_INTERRUPTED = 130


class Account:
    """What the workers told so far, for the end of a command and its exit code."""

    def __init__(self) -> None:
        self._learned: dict[tuple[MoeShape, int], Record] = {}
        self.verified: list[Verified] = []
        self.passed: list[Passed] = []
        self.lost: list[tuple[str, str]] = []
        self.gpus: dict[str, Json] = {}
        self.interrupted = False

    def take(self, gpu: str, told: Any) -> None:
        mine = self.gpus.setdefault(gpu or "default", {"device_name": None, "gpu_s": 0.0, "ended": None, "kept": None})
        match told:
            case Ready():
                mine["device_name"] = told.environment.device_name
            case Learned():
                # An M that is looked at a second time is told again; its last record is the one in the store.
                self._learned[told.record.shape, told.record.M] = told.record
            case Verified():
                self.verified.append(told)
            case Passed():
                self.passed.append(told)
            case Step():
                mine["gpu_s"] = told.gpu_s
            case Ended():
                mine |= {"ended": told.why, "gpu_s": told.gpu_s, "kept": told.kept}
            case crew.Lost():
                self.lost.append((gpu or "default", told.why))

    @property
    def learned(self) -> tuple[Record, ...]:
        """The last record of each M."""
        return tuple(self._learned.values())

    def left_out(self) -> list[tuple[str, list[int], str]]:
        """The M that were passed without being settled, by shape and reason."""
        groups: dict[tuple[str, str], list[int]] = {}
        for told in self.passed:
            if not told.settled:
                groups.setdefault((told.slug, told.reason), []).append(told.M)
        return [(slug, sorted(ms), reason) for (slug, reason), ms in groups.items()]

    @property
    def done(self) -> int:
        """How many M have an answer, or a reason for having none."""
        return len(self._learned) + len(self.verified) + len(self.passed)

    def json(self) -> Json:
        """The object that ``--json`` prints."""
        return {
            "gpus": self.gpus,
            "learned": [
                {"shape": r.shape.slug, "M": r.M, "verdict": r.verdict, **msgspec.to_builtins(r.evidence)}
                for r in self.learned
            ],
            "verified": [_plain(told) for told in self.verified],
            "passed": [_plain(told) for told in self.passed],
            "lost": [{"gpu": gpu, "why": why} for gpu, why in self.lost],
            "interrupted": self.interrupted,
        }

    def finish(self, *, as_json: bool) -> None:
        """Print what was found; exit as the shell's codes say."""
        if as_json:
            shell.emit(self.json())
        else:
            for slug, ms, reason in self.left_out():
                click.echo(f"{slug} M={', '.join(map(str, ms))}: left out, {reason}", err=True)
            for line in _lines(self):
                click.echo(line)
        if self.interrupted:
            sys.exit(_INTERRUPTED)
        if self.lost:
            raise Unusable("\n".join(f"the process on GPU {gpu} is lost: {why}" for gpu, why in self.lost))
        if unkept := [gpu for gpu, mine in self.gpus.items() if mine["kept"] is False]:
            raise Unusable(f"records of GPU {unkept[0]} are not on disk: make the store's folder writable")
        if any(told.outcome in DEMOTED for told in self.verified):
            sys.exit(NothingFound.exit_code)
        if not self.learned and not self.verified and not any(told.settled for told in self.passed):
            raise NothingFound("nothing was measured: the reasons are above")


def _plain(told: Passed | Verified) -> Json:
    found: Json = {key: value for key, value in msgspec.to_builtins(told).items() if key not in {"type", "slug"}}
    return {"shape": told.slug, **found}


def _lines(account: Account) -> Iterable[str]:
    faster = [record for record in account.learned if record.verdict == "faster"]
    if account.learned:
        mean = summary.mean_gain(record.evidence.gain for record in faster)
        gain = f", {100 * mean:.1f} % on average" if mean is not None else ""
        stay = len(account.learned) - len(faster)
        yield f"{len(account.learned)} M searched: {len(faster)} faster{gain}; SGLang's own stays at {stay}"
    if account.verified:
        demoted = sum(told.outcome in DEMOTED for told in account.verified)
        held = sum(told.outcome == "holds" for told in account.verified)
        yield f"{len(account.verified)} rows measured again: {held} hold, {demoted} taken back"
    if settled := sum(told.settled for told in account.passed):
        yield f"{settled} M settled before"
    for gpu, mine in account.gpus.items():
        if mine["device_name"]:  # one that was not reached is named by the error below
            yield f"GPU {gpu} ({mine['device_name']}): {mine['gpu_s']:.1f} s of device time"


def line(told: Any) -> str | None:
    """What is worth a line of its own on standard error."""
    match told:
        case Learned():
            record, evidence = told.record, told.record.evidence
            if record.verdict == "baseline":
                return f"{record.shape.slug} M={record.M}: SGLang's own config stays"
            times = f"{evidence.baseline_us:.1f} -> {evidence.chosen_us:.1f} us"
            return f"{record.shape.slug} M={record.M}: {100 * evidence.gain:.1f} % faster ({times}), {record.pair}"
        case Verified():
            return f"{told.slug} M={told.M}: {told.outcome}, {told.reason}"
        case _:
            return None
