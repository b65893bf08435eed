"""The objects that ``--json`` prints: plain dicts and lists, shares as fractions, units in the names.

A field keeps its name and meaning between releases; new ones may be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sglang_moe_autotune.status import differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sglang_moe_autotune.changes import Change
    from sglang_moe_autotune.doctor import Check
    from sglang_moe_autotune.explain import Step
    from sglang_moe_autotune.figures import PageFigures
    from sglang_moe_autotune.held import Held
    from sglang_moe_autotune.matrix import Matrix, Release
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.remote import RemoteStatus
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
        "M": {name: getattr(value, name) for name in ("faster", "baseline", "untuned", "given", "replayed")},
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


def shape_rows(owner: MoeShape, rows: Iterable[Row], kept_back: Mapping[int, str]) -> Json:
    """One shape and each M that is known of it. kept_back: by M, why a stored row is not served."""
    return {"shape": shape(owner), "rows": [{**row(value), "not_served": kept_back.get(value.M)} for value in rows]}


def held(found: Iterable[Held]) -> list[Json]:
    """Configs in quarantine."""
    return [
        {
            "environment": one.candidate.environment,
            "shape": one.candidate.shape.slug,
            "gemm": one.candidate.gemm,
            "config": one.candidate.config.to_dict(),
            "M": one.M,
            "reason": one.reason,
            "rows_stay": one.rows_stay,
            "unix_s": one.unix_s,
        }
        for one in found
    ]


def servers(found: Servers) -> Json:
    """Every live file: what it says and whether its process runs, or why it says nothing."""
    read = [(s, msgspec.to_builtins(s.live)) for s in found.servers]
    return {
        "servers": [{"presence": s.presence, "path": str(s.path), **live} for s, live in read],
        "unread": [{"path": str(path), "reason": reason} for path, reason in found.unread],
        "differences": [{"field": d.field, "values": dict(d.values)} for d in differences(found.servers)],
    }


def remote(value: RemoteStatus) -> Json:
    """A server's own words, one object (or null) for each rank group."""
    return {"url": value.url, "sglang": value.sglang, "active": value.active, "moe_autotune": list(value.groups)}


def explanation(owner: MoeShape, M: int, steps: tuple[Step, ...], configs: Path | None) -> Json:  # noqa: N803
    """Every source in its order, and the one that answers (null where none is known to)."""
    found = [{"source": s.source, "standing": s.standing, "says": s.says, "pair": pair(s.pair)} for s in steps]
    answers = next((step for step in found if step["standing"] == "answers"), None)
    read = None if configs is None else str(configs)
    return {"shape": shape(owner), "M": M, "configs_folder": read, "answer": answers, "steps": found}


def report(value: PageFigures) -> Json:
    """The figures behind the plots of a report."""
    shapes = [
        {
            **summary(one.summary),
            "rows": [
                {"M": r.M, "verdict": r.verdict, "source": r.source, **msgspec.to_builtins(r.evidence)}
                for r in one.measured
            ],
            "configs": [{"pair": pair(chosen), "M": ms} for chosen, ms in one.configs],
            "gpu_s": one.gpu_s,
        }
        for one in value.shapes
    ]
    history = [{"unix_s": at, "rows": rows, "gpu_s": gpu_s} for at, rows, gpu_s in value.history]
    return {"title": value.title, "kernel_hash": value.kernel_hash, "shapes": shapes, "history": history}


def change(value: Change) -> Json:
    """One row of a store that became another."""
    gains = (one and one.evidence.gain for one in (value.before, value.after))
    verdicts = (one and one.verdict for one in (value.before, value.after))
    sources = (one and one.source for one in (value.before, value.after))
    return {
        "shape": value.shape.slug,
        "M": value.M,
        "kind": value.kind,
        **dict(zip(("gain_before", "gain_after"), gains, strict=True)),
        **dict(zip(("verdict_before", "verdict_after"), verdicts, strict=True)),
        **dict(zip(("source_before", "source_after"), sources, strict=True)),
    }


def releases(checked: Matrix, here: Release | None) -> Json:
    """The releases that were checked, and the installed one by its source (null where there is none)."""

    def one(release: Release) -> Json:
        found: Json = msgspec.to_builtins(release)
        return {**found, "state": release.state}

    return {"releases": [one(r) for r in checked.releases], "installed": None if here is None else one(here)}


def checks(rows: Iterable[Check]) -> Json:
    found = [{"check": r.name, "state": r.health, "says": r.says, "cure": r.cure} for r in rows]
    return {"healthy": all(r["state"] != "fail" for r in found), "checks": found}
