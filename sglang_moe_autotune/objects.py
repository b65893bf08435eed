"""The objects that ``--json`` prints: plain dicts and lists, shares as fractions, units in the names.

A field keeps its name and meaning between releases; new ones may be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sglang_moe_autotune.doctor import Check
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape
    from sglang_moe_autotune.status import Servers
    from sglang_moe_autotune.store import StoredEnvironment
    from sglang_moe_autotune.summary import Row, ShapeSummary

Json = dict[str, Any]


def environment(value: Environment) -> Json:
    found: Json = msgspec.to_builtins(value)
    return found


def entry(value: StoredEnvironment) -> Json:
    """One file of the store; ``environment`` is null where it cannot be read."""
    return {
        "path": str(value.path),
        "environment": value.environment and environment(value.environment),
        "shapes": value.shapes,
        "records": value.records,
        "problems": list(value.problems),
    }


def shape(value: MoeShape) -> Json:
    """Every field of the shape, and its name."""
    return {"slug": value.slug, **msgspec.to_builtins(value)}


def pair(value: ConfigPair | None) -> Json | None:
    """Both configs in SGLang's own key names."""
    return None if value is None else {"up": value.up.to_dict(), "down": value.down.to_dict()}


def summary(value: ShapeSummary) -> Json:
    return {
        "shape": shape(value.shape),
        "origin": value.origin,
        "M": {"faster": value.faster, "baseline": value.baseline, "untuned": value.untuned},
        "best_gain": value.best_gain,
        "mean_gain": value.mean_gain,
    }


def environment_summary(path: Path, about: Environment, summaries: Iterable[ShapeSummary]) -> Json:
    """A readable file of the store and its shapes."""
    shapes = [summary(value) for value in summaries]
    return {"path": str(path), "environment": environment(about), "shapes": shapes}


def row(value: Row) -> Json:
    """One M; the fields of the evidence are there where a search has ended."""
    common: Json = {"M": value.M, "served": value.served, "baseline": pair(value.baseline)}
    if value.record is None:
        return {**common, "verdict": None, "chosen": None}
    record = value.record
    kept = msgspec.to_builtins(record)
    about = {key: kept[key] for key in ("source", "sglang", "driver", "unix_s")}
    return {**common, "verdict": record.verdict, "chosen": pair(record.pair), **kept["evidence"], **about}


def shape_rows(owner: MoeShape, rows: Iterable[Row]) -> Json:
    """One shape and each M that is known of it."""
    return {"shape": shape(owner), "rows": [row(value) for value in rows]}


def servers(found: Servers) -> Json:
    """Every live file: what it says and whether its process runs, or why it says nothing."""
    read = [(s, msgspec.to_builtins(s.live)) for s in found.servers]
    return {
        "servers": [{"presence": s.presence, "path": str(s.path), **live} for s, live in read],
        "unread": [{"path": str(path), "reason": reason} for path, reason in found.unread],
    }


def checks(rows: Iterable[Check]) -> Json:
    found = [{"check": r.name, "state": r.health, "says": r.says, "cure": r.cure} for r in rows]
    return {"healthy": all(r["state"] != "fail" for r in found), "checks": found}
