"""What the shell prints for people: values in, rich tables and lines out.

A line fits 80 columns or is folded; nothing is cut off, so a pipe gets all of it. A line with a path is ``Whole``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sglang_moe_autotune import matrix
from sglang_moe_autotune.idle_time import scarce
from sglang_moe_autotune.status import differences
from sglang_moe_autotune.summary import GIVEN, title

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from sglang_moe_autotune.changes import Change
    from sglang_moe_autotune.doctor import Check
    from sglang_moe_autotune.explain import Step
    from sglang_moe_autotune.held import Held
    from sglang_moe_autotune.matrix import Matrix, Release
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.remote import RemoteStatus
    from sglang_moe_autotune.shapes import ConfigPair
    from sglang_moe_autotune.status import LiveStatus, Server, Servers
    from sglang_moe_autotune.store import StoredEnvironment
    from sglang_moe_autotune.summary import Row, ShapeSummary

_STYLES = {
    **dict.fromkeys(("ok", "running", "elsewhere", "faster", "answers"), "green"),
    **dict.fromkeys(("warn", "silent"), "yellow"),
    **dict.fromkeys(("unknown", "gone", "behind", "no"), "dim"),
    "fail": "bold red",
}
_NEXT = 3
_LISTED = 40
"""rows of a change that are shown"""


class Whole(Text):
    """A line that ``shell.show`` never breaks, at any width: a path in two pieces cannot be copied."""


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Columns by heading; no frame, so that lines of a pipe are easily cut."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def percent(fraction: float | None) -> str:
    """A gain, one decimal; empty for None."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def duration(seconds: float) -> str:
    """A time in its largest unit, for people."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _words(presence: str) -> Text:
    return Text(presence, style=_STYLES.get(presence, ""))


def server(entry: Server, now_unix_s: float) -> list[RenderableType]:
    """A line that says who and what, and an indented one for each thing worth it."""
    live = entry.live
    head = Text.assemble(_words(entry.presence), f"  pid {live.pid} on {live.host}, rank {live.rank}: ")
    if entry.presence in {"silent", "gone"}:
        head.append(f"last word {duration(now_unix_s - live.unix_s)} ago, ")
    head.append(live.state)
    if live.current and live.state in {"tuning", "waiting"}:
        head.append(f" {live.current[0]} M={live.current[1]}")
    if live.reason:
        head.append(f" ({live.reason})")
    elif live.switch != "on":
        head.append(f" (switched to {live.switch!r} by {live.switched_by})")
    about = (
        live.device_name,
        live.sglang and f"SGLang {live.sglang}",
        live.triton and f"Triton {live.triton}",
        f"mode {live.mode}",
        f"for {duration(live.unix_s - live.since_unix_s)}",
    )
    lines = [", ".join(part for part in about if part)]
    if entry.presence != "gone":
        cap = "" if live.budget_s is None else f" of {live.budget_s:g}"
        counts = live.compile
        lines += [
            f"{live.rows} learned rows answer (epoch {live.epoch}); {_queue(live)}",
            f"{live.gpu_s_last_hour:.1f}{cap} GPU s in the last hour, {live.gpu_s:.1f} in all",
            f"{live.slices:,} slices; {_idle(live)}",
            *_needs(live),
            *_passes(live),
            f"binaries: {counts.ordered} ordered, {counts.ready} ready, {counts.failed} failed",
            *live.graphs.lines(),
            *(f"not now: {where}: {why}" for where, why in sorted(live.deferred.items())),
            *(f"slower steps: {where}: {what}" for where, what in sorted(live.doubts.items())),
            *(f"in quarantine: {what}: {why}" for what, why in sorted(live.quarantine.items())),
        ]
    wrong = [Text(what, style="bold red") for what in broken(live)]
    return [head, *(Padding(line, (0, 0, 0, 2), expand=False) for line in (*map(Text, lines), *wrong))]


def _idle(live: LiveStatus) -> str:
    alive_s = live.unix_s - live.since_unix_s
    return f"idle for {duration(live.idle_s)} of {duration(alive_s)}, deep idle for {duration(live.deep_idle_s)}"


def _needs(live: LiveStatus) -> Iterator[str]:
    """What the idle time sufficed for, what the queue still needs, and what to do where there is none."""
    if live.searches or live.idle_needed_s:
        needs = ", ".join(f"{duration(s)} for {slug}" for slug, s in sorted(live.idle_needed_s.items()))
        yield f"searches ended: {live.searches}" + (f"; idle time still needed: about {needs}" if needs else "")
    if live.queue and scarce(live.idle_s, live.unix_s - live.since_unix_s):
        yield "hardly ever idle: learn without a server (the command tune), before the first capture"
        yield "(SGLANG_MOE_AUTOTUNE_STARTUP_S), or on another replica that shares this store"


def _passes(live: LiveStatus) -> Iterator[str]:
    if live.pass_longest_us:
        over = f"; {live.passes_over} over their bound, {live.pauses} pauses" if live.passes_over else ""
        did = f" ({live.pass_longest_did})" if live.pass_longest_did else ""
        within, longest = live.pass_p99_us / 1e3, live.pass_longest_us / 1e3
        yield f"passes of tuning: 99 % within {within:.1f} ms, longest {longest:.1f} ms{did}{over}"


def broken(live: LiveStatus) -> list[str]:
    """What is wrong with a server, by its own word."""
    lost = (path for path, in_place in live.hooks.items() if not in_place)
    wrong = [f"the hook on {path} is not in place: run doctor" for path in lost]
    if count := live.serving_compiles_for_tuning:
        wrong.append(f"{count} kernels were compiled in the serving process for tuning: please report it")
    return wrong


def _queue(live: LiveStatus) -> str:
    if not live.queue:
        return "nothing in the queue"
    ms = ", ".join(str(m) for _, m in live.queue[:_NEXT])
    return f"{len(live.queue)} in the queue (M = {ms}{', ...' if len(live.queue) > _NEXT else ''})"


def status(
    root: Path, found: Servers, entries: Sequence[StoredEnvironment], now_unix_s: float, *, everything: bool
) -> Iterator[RenderableType]:
    """The whole answer of ``status``; processes that are gone are counted, or shown with ``everything``."""
    yield Whole(f"Store: {root}")
    gone = sum(entry.presence == "gone" for entry in found.servers)
    shown = [entry for entry in found.servers if everything or entry.presence != "gone"]
    for entry in shown:
        yield ""
        yield from server(entry, now_unix_s)
    apart = differences(found.servers)
    if apart:
        yield ""
        yield Text("These servers share the store and differ:", style="yellow")
        for difference in apart:
            values = "; ".join(f"{who}: {value}" for who, value in difference.values)
            yield Padding(Text(f"{difference.field}: {values}"), (0, 0, 0, 2), expand=False)
    yield ""
    if not shown:
        yield "No server writes here now."
    if gone and not everything:
        yield f"Gone: {gone} (--all shows them)."
    if not shown or (gone and not everything):
        yield ""
    if not entries:
        yield "Nothing is stored yet."
        return
    numbers = ("shapes", "records", "problems")
    table = _table("stored for", *numbers, right=numbers)
    for e in entries:
        name = e.path.name if e.environment is None else title(e.environment)
        table.add_row(name, str(e.shapes), str(e.records), str(len(e.problems)))
        for problem in e.problems:
            table.add_row(Padding(Text(problem, style="yellow"), (0, 0, 0, 2), expand=False))
    yield table


def quarantine(held: Iterable[Held]) -> Iterator[RenderableType]:
    """A line a candidate that is never tried, and its reason below."""
    for one in held:
        yield Text(f"{one.candidate} (M={one.M})")
        yield Padding(Text(one.reason), (0, 0, 0, 2), expand=False)


def shapes(summaries: Iterable[ShapeSummary]) -> Table:
    """A line a shape: counts of M by outcome, best and mean gain; those that were not measured here where there are."""
    summaries = list(summaries)
    others = [name for name in ("given", "replayed") if any(getattr(s, name) for s in summaries)]
    counted = ("faster", "baseline", "untuned", *others)
    table = _table("shape", *counted, "best", "mean", right=(*counted, "best", "mean"))
    for s in summaries:
        counts = (str(len(getattr(s, name))) for name in counted)
        table.add_row(s.shape.slug, *counts, percent(s.best_gain), percent(s.mean_gain))
    return table


def shape_rows(rows: Iterable[Row]) -> Table:
    """Two lines an M: SGLang's answer above what was learned."""
    table = _table("M", "verdict", "up", "down", "us", "gain", right=("M", "us", "gain"))
    for row in rows:
        if row.record is None:
            verdict = "untuned" if row.served else "not met"
            table.add_row(str(row.M), _words(verdict), *_pair(row.baseline))
            continue
        if row.record.source in GIVEN:
            table.add_row(str(row.M), row.record.source, *_pair(row.baseline))
            table.add_row("", "", *_pair(row.record.pair))
            continue
        verdict, e = row.record.verdict, row.record.evidence
        baseline_us, chosen_us = f"{e.baseline_us:.1f}", f"{e.chosen_us:.1f}"
        gain = percent(e.gain) if verdict == "faster" else ""
        shown = "replayed" if row.record.source == "replayed" else verdict
        table.add_row(str(row.M), _words(shown), *_pair(row.baseline), baseline_us, gain)
        if verdict == "faster":
            interval = f"{100 * e.gain_low:.1f}..{100 * e.gain_high:.1f}"
            table.add_row("", f"n={e.samples}", *_pair(row.record.pair), chosen_us, interval)
    return table


def _pair(pair: ConfigPair | None) -> tuple[str, str]:
    if pair is None:
        return "", ""
    return str(pair.up), "same" if pair.up == pair.down else str(pair.down)


def checks(rows: Iterable[Check]) -> Table:
    """A line a check, and a line for its cure."""
    table = _table("", "check", "says")
    for row in rows:
        table.add_row(_words(row.health), row.name, row.says)
        if row.cure:
            table.add_row("", "", Text(f"-> {row.cure}", style="italic"))
    return table


def releases(checked: Matrix, here: Release | None) -> Iterator[RenderableType]:
    """A line a release, then how the installed one stands, each thing it lacks on a line."""
    table = _table(*matrix.HEADINGS[:-1])
    for row in matrix.rows(checked):
        table.add_row(*row[:-1])
    yield table
    if here is None:
        yield Text("There is no SGLang in this Python.")
        return
    known = next((r for r in checked.releases if r.version == here.version), None)
    as_checked = known is not None and known.kernel == here.kernel
    told = "" if known is None else ", as it was checked" if as_checked else ", NOT as it was checked"
    kernel = here.kernel[:8] or "unknown"
    yield Text(f"In this Python: {here.version}, {matrix.words(here)}; kernel {kernel}{told}")
    for part, reasons in here.lacks.items():
        yield Text(f"  {part}: {'; '.join(reasons)}")


def explanation(steps: Sequence[Step]) -> Iterator[RenderableType]:
    """Every source in its order, with the pair below those that have one, and the answer in a sentence."""
    table = _table("", "source", "says")
    for step in steps:
        table.add_row(_words(step.standing), step.source, step.says)
        if step.pair is not None:
            table.add_row("", "", Text(f"-> {step.pair}", style="italic"))
    yield table
    answers = next((step for step in steps if step.standing == "answers"), None)
    if answers is None:
        yield "SGLang's own heuristic answers; no server has recorded what it says here."
    else:
        yield f"Answer: {answers.source}" + (f", {answers.pair}" if answers.pair is not None else "")


def changes(name: str, changed: Sequence[Change]) -> Iterator[RenderableType]:
    """A line for each shape and kind of change, and one for each row where few are touched."""
    if not changed:
        yield f"{name}: nothing changes."
        return
    counts = Counter(change.kind for change in changed)
    yield f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    table = _table("shape", "M", "", "was", "is", right=("M",))
    for change in changed[:_LISTED]:
        table.add_row(change.shape.slug, str(change.M), change.kind, _short(change.before), _short(change.after))
    yield table
    if len(changed) > _LISTED:
        yield f"and {len(changed) - _LISTED} more (--json shows all)"


def _short(record: Record | None) -> str:
    if record is None:
        return "-"
    if record.source in GIVEN or record.source == "replayed":
        return record.source
    return f"{percent(record.evidence.gain)} faster" if record.verdict == "faster" else "baseline"


def remote(answer: RemoteStatus) -> Iterator[RenderableType]:
    """What a server says over HTTP: a line a rank group, and one for each thing that it counts."""
    yield f"{answer.url}: SGLang {answer.sglang or '(no version)'}"
    for number, group in enumerate(answer.groups):
        if group is None:
            continue
        yield Padding(Text(f"rank group {number}", style="green"), (0, 0, 0, 2), expand=False)
        for key, value in group.items():
            nested = value.items() if isinstance(value, dict) else [("", value)]
            for name, what in ((f"{key} {name}".rstrip(), what) for name, what in nested):
                yield Padding(Text(f"{name}: {_plain(what)}"), (0, 0, 0, 4), expand=False)
    if not answer.active:
        yield "  it has no moe_autotune: the plugin is not active there, or older than this shell"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def simulation(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The object of ``simulate --json`` as a table per M and a summary."""
    numbers = ("M", "baseline us", "chosen us", "best us", "regret", "measured", "GPU s")
    table = _table(*numbers, "accepted", right=numbers)
    for m, row in sorted(result["per_m"].items(), key=lambda item: int(item[0])):
        times = (f"{row[key]:.1f}" for key in ("baseline_us", "chosen_us", "best_us"))
        costs = (f"{100 * row['regret']:.2f} %", str(row["measured"]), f"{row['gpu_s']:.2f}")
        table.add_row(m, *times, *costs, "yes" if row["accepted"] else "no")
    yield table
    mean, p95 = (100 * result[key] for key in ("regret_geomean", "regret_p95"))
    yield f"regret against the best recorded: {mean:.2f} % (geometric mean), {p95:.2f} % (p95)"
    yield f"cost: {result['gpu_s']:.1f} GPU s, {result['compiled']} configs compiled (seed {result['seed']})"
