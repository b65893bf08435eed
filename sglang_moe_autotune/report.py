"""The report: one self-contained HTML page of what was learned. It loads nothing and runs no script."""

from __future__ import annotations

import math
import time
from html import escape
from itertools import product
from typing import TYPE_CHECKING

from sglang_moe_autotune import __version__
from sglang_moe_autotune.plot import HEIGHT, Plot, Scale, across, height_of, places, tokens, upward
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sglang_moe_autotune.figures import PageFigures, ShapeFigures
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.shapes import Gemm
    from sglang_moe_autotune.tried import Tried

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#5c6670;--grid:#dfe3e8;
--stock:#b4590c;--learned:#1769c2;--kept:#8a939c;--up:#0b7f78;--down:#8446b8}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--card:#1d2125;--ink:#e8eaed;--soft:#a2abb4;--grid:#333a41;
--stock:#f0a35c;--learned:#6cb0f5;--kept:#78828c;--up:#4cc4bb;--down:#c79bf2}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:20px 16px 40px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:18px;margin:34px 0 4px}
h3{font-size:16px;margin:26px 0 6px;overflow-wrap:anywhere}h4{font-size:14px;margin:0 0 4px;font-weight:600}
p{margin:4px 0;color:var(--soft);overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:10px;margin:10px 0}
.tiles div,.plots figure{background:var(--card);border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:20px}.tiles span{color:var(--soft);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:10px}
figure{margin:0}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:11.5px system-ui,sans-serif}
.grid{stroke:var(--grid);fill:none}.line{fill:none;stroke-width:2;stroke-linejoin:round}.thin{stroke-width:1.4}
.line.stock{stroke:var(--stock)}.line.learned{stroke:var(--learned)}.line.kept{stroke:var(--kept)}
.dot.stock{fill:var(--stock)}.dot.learned,.bar.learned{fill:var(--learned)}.bar.kept{fill:var(--kept)}
.dot.kept{fill:var(--card);stroke:var(--kept);stroke-width:1.6}
.key{font-size:13px;color:var(--soft);margin:0 0 4px}.key i{display:inline-block;width:11px;height:11px;
border-radius:50%;margin:0 4px 0 10px;vertical-align:-1px}.key i:first-child{margin-left:0}
i.stock{background:var(--stock)}i.learned{background:var(--learned)}i.kept{border:2px solid var(--kept)}
.strip{fill:none;stroke-width:3.6;stroke-linecap:round;stroke-opacity:.5}.strip.up{stroke:var(--up)}
.strip.down{stroke:var(--down)}.dot.up{fill:var(--up)}.dot.down{fill:var(--down)}
.rule{stroke:var(--kept);stroke-dasharray:3 3}.cell.faster{fill:var(--learned)}.cell.slower{fill:var(--stock)}
.cell.best{stroke:var(--learned);stroke-width:1.6}svg .figure{fill:var(--ink)}h4.part{margin:14px 0 2px}
details{margin-top:10px}ol{font-size:13px;padding-left:28px;margin:6px 0}
summary{cursor:pointer;color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin-top:6px}
th,td{padding:3px 12px 3px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:600}.text{text-align:left}
"""

_UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))
_SHOWN = 12
"""distinct configs that are drawn"""
_STRIPS = 48
"""M whose trials are drawn"""
_SLOWEST = 2.5
"""of the axis of trials, in units of the time of SGLang's own config"""


def page(pages: Sequence[PageFigures], now_unix_s: float | None = None) -> str:
    """The whole page. Names come from files that others may have written, so all text is escaped."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() if now_unix_s is None else now_unix_s))
    body = "".join(part for one in pages for part in _environment(one))
    # The policy makes the browser itself refuse whatever the page would load or run.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>MoE autotune report</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>MoE autotune report</h1><p>{when}, sglang-moe-autotune {escape(__version__)}. M is the number of tokens "
        "in a call; times are of both GEMMs of a layer; gains are paired measurements against what SGLang uses by "
        f"itself.</p>\n{body}</body></html>\n"
    )


def _environment(one: PageFigures) -> Iterator[str]:
    yield f"<h2>{escape(one.title)}</h2><p>kernel source {escape(one.kernel_hash)}</p>"
    gains = [s.summary for s in one.shapes]
    replayed = sum(len(s.replayed) for s in gains)
    if replayed:
        yield (
            f"<p>{replayed} of the rows are replayed: found on a recording of such a GPU, measured on none here, never "
            "served where a GPU is. They stand in no count below.</p>"
        )
    best = max((s.best_gain for s in gains if s.best_gain is not None), default=None)
    spent_s = sum(s.gpu_s for s in one.shapes)
    yield _tiles(
        (str(len(one.shapes)), "shape" if len(one.shapes) == 1 else "shapes"),
        (str(sum(len(s.faster) for s in gains)), "rows faster"),
        (str(sum(len(s.baseline) for s in gains)), "kept as SGLang has it"),
        ("-" if best is None else f"{100 * best:.1f} %", "best gain"),
        (f"{spent_s:.1f} s", "GPU time spent"),
        *([(str(replayed), "replayed")] if replayed else []),
    )
    for shape in one.shapes:
        yield from _shape(shape)
    if len(one.history) > 1 and one.history[-1][0] > one.history[0][0]:
        figures = (_figure("Rows with an answer", _rows_history(one)), _figure("GPU seconds", _cost_history(one)))
        yield f'<h3>History</h3><div class="plots">{"".join(figures)}</div>'


def _tiles(*tiles: tuple[str, str]) -> str:
    shown = (f"<div><b>{escape(number)}</b><span>{escape(what)}</span></div>" for number, what in tiles)
    return f'<div class="tiles">{"".join(shown)}</div>'


def _shape(one: ShapeFigures) -> Iterator[str]:
    yield f"<h3>{escape(one.shape.slug)}{', replayed' if one.summary.replayed else ''}</h3>"
    mean = one.summary.mean_gain
    words = [f"{len(one.summary.faster)} M faster" + ("" if mean is None else f", {100 * mean:.1f} % in the mean")]
    if one.summary.baseline:
        words.append(f"SGLang's own answer kept at M = {_listed(one.summary.baseline)}")
    if one.summary.untuned:
        words.append(f"served and not yet tuned: M = {_listed(one.summary.untuned)}")
    if one.given:
        words.append(f"pinned or imported: M = {_listed([r.M for r in one.given])}")
    if one.summary.replayed:
        words.append(f"replayed from a recording: M = {_listed(one.summary.replayed)}")
    replayed = sum(r.evidence.measured for r in one.measured if r.source == "replayed")
    if replayed:
        words.append(f"{replayed} trials on the recording")
    if one.candidates > replayed or not replayed:
        words.append(f"{one.candidates - replayed} trials in {one.gpu_s:.1f} GPU s")
    yield f"<p>{escape('; '.join(words))}.</p>"
    if one.measured:
        yield from _outcome(one)
    if one.tried:
        yield from _tried(one)


def _served(one: ShapeFigures) -> str:
    """What to call learned configs: rows of a recording are never served."""
    return "found" if one.summary.replayed else "served"


def _outcome(one: ShapeFigures) -> Iterator[str]:
    replayed = ", replayed" if one.summary.replayed else ""
    served, serves = _served(one), "found for" if replayed else "serves"
    figures = [
        _figure(f"Gain by M, with its interval{replayed}", _gains(one), learned="faster", kept="kept"),
        _figure(f"Time of a layer's two GEMMs, us{replayed}", _times(one), stock="SGLang's own", learned=served),
    ]
    if one.configs:
        busiest = f", the {_SHOWN} busiest" if len(one.configs) > _SHOWN else ""
        heading = f"Distinct configs: {len(one.configs)}{busiest}"
        figures.append(_figure(heading, _configs(one), learned=f"{serves} this M"))
    figures.append(_figure(f"GPU seconds by M{replayed}", _costs(one), learned="faster", kept="kept"))
    yield f'<div class="plots">{"".join(figures)}</div>{_table(one)}'


def _tried(one: ShapeFigures) -> Iterator[str]:
    count = sum(len(rows) for _, rows in one.tried)
    step = (len(one.tried) - 1) / max(1, _STRIPS - 1)
    shown = [one.tried[round(n * step)] for n in range(_STRIPS)] if step > 1 else list(one.tried)
    some = f", of which {len(shown)} are drawn" if len(shown) < len(one.tried) else ""
    yield (
        f'<h4 class="part">What was tried</h4><p>{count} measurements of one GEMM under one config, at '
        f"{len(one.tried)} M{some}. Each is a dot at its time in units of that of SGLang's own config (the dashed "
        f"line), the fastest one large; what takes {_SLOWEST:g} times as long or more is at the edge.</p>"
    )
    figures = [_figure(f"The {gemm} GEMM by M", _strips(one, shown, gemm)) for gemm in GEMMS]
    for m, rows in one.tried:
        for gemm in GEMMS if m in one.sliced else ():
            if mine := [row for row in rows if row.gemm == gemm]:
                heading = f"M={m}, {gemm}: the best of each tile"
                figures.append(_figure(heading, _slice(f"{one.shape.slug} at M={m}, {gemm}", mine)))
    yield f'<div class="plots">{"".join(figures)}</div>'


def _strips(one: ShapeFigures, shown: Sequence[tuple[int, Sequence[Tried]]], gemm: Gemm) -> Plot:
    each = max(9.0, min(24.0, 320 / len(shown)))
    height = height_of(len(shown), each)
    ratios = [row.ratio for _, rows in shown for row in rows]
    x = across(min(0.5, max(0.01, min(ratios))), _SLOWEST)
    plot = Plot(f"Trials of {one.shape.slug}, {gemm}", x, places(len(shown), height, vertical=True), height)
    ticks = range(0, len(shown), math.ceil(13 / each))
    plot.frame(x.ticks(), ticks, "time / SGLang's own", y_text=lambda place: f"{shown[int(place)][0]}")
    plot.rule(1.0)
    for place, (m, rows) in enumerate(shown):
        if mine := [row for row in rows if row.gemm == gemm]:
            best = min(mine, key=lambda row: row.ratio)
            says = f"M={m}, {gemm}: {len(mine)} configs, the fastest {best.ratio:.3f} with {best.config}"
            plot.strip((row.ratio for row in mine), place, gemm, says)
            plot.dot(best.ratio, place, gemm, says)
    return plot


def _slice(what: str, rows: Sequence[Tried]) -> Plot:
    """The landscape over two of its axes, the best of the rest in each place."""
    best: dict[tuple[int, int], Tried] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        best.setdefault((row.config.BLOCK_SIZE_M, row.config.BLOCK_SIZE_N), row)
    across_m, up_n = (sorted({tile[axis] for tile in best}) for axis in (0, 1))
    height = height_of(len(up_n), 32.0)
    plot = Plot(f"Slice of {what}", places(len(across_m), height), places(len(up_n), height, vertical=True), height)
    columns, lines = range(len(across_m)), range(len(up_n))
    names = {"x_text": lambda n: str(across_m[int(n)]), "y_text": lambda n: str(up_n[-1 - int(n)])}
    plot.frame(columns, lines, "BLOCK_SIZE_M; BLOCK_SIZE_N upward", **names, lines=False)
    fastest = next(iter(best.values()))
    for column, line in product(columns, lines):
        if (found := best.get((across_m[column], up_n[-1 - line]))) is not None:
            ratio = found.ratio
            style = ("faster" if ratio < 1 else "slower") + (" best" if found is fastest else "")
            strength = 2 * (1 - ratio) if ratio < 1 else (ratio - 1) / (_SLOWEST - 1)
            says = f"{found.config}: {ratio:.3f}, n={found.samples}"
            plot.cell(column, line, style, strength, f"{ratio:.2f}" if ratio < 100 else ">99", says)
    return plot


def _figure(heading: str, plot: Plot, **key: str) -> str:
    marks = "".join(f'<i class="{style}"></i>{escape(text)}' for style, text in key.items())
    legend = f'<p class="key">{marks}</p>' if marks else ""
    return f"<figure><h4>{escape(heading)}</h4>{legend}{plot.svg}</figure>"


def _listed(ms: Sequence[int]) -> str:
    return ", ".join(map(str, ms[:12])) + (f" and {len(ms) - 12} more" if len(ms) > 12 else "")


def _axis(one: ShapeFigures) -> tuple[Scale, list[float]]:
    return tokens([r.M for r in one.measured])


def _gains(one: ShapeFigures) -> Plot:
    x, ticks = _axis(one)
    faster = [r for r in one.measured if r.verdict == "faster"]
    lowest = min([0.0, *(100 * r.evidence.gain_low for r in faster)])
    y = upward(lowest, max([5.0, *(100 * r.evidence.gain_high for r in faster)]))
    plot = Plot(f"Gain of {one.shape.slug} by M", x, y)
    plot.frame(ticks, y.ticks(), "M", y_text="{:g} %".format)
    for r in one.measured:
        e = r.evidence
        if r.verdict == "faster":
            plot.interval(r.M, 100 * e.gain_low, 100 * e.gain_high, "learned")
            says = f"M={r.M}: {100 * e.gain:.1f} % ({100 * e.gain_low:.1f}..{100 * e.gain_high:.1f}), n={e.samples}"
            plot.dot(r.M, 100 * e.gain, "learned", says)
        else:
            plot.dot(r.M, 0.0, "kept", f"M={r.M}: SGLang's own answer stays, n={e.samples}")
    return plot


def _times(one: ShapeFigures) -> Plot:
    x, ticks = _axis(one)
    # A file can say anything: a time below a nanosecond is none, and has no place on a logarithmic axis.
    timed = [r for r in one.measured if min(r.evidence.baseline_us, r.evidence.chosen_us) > 1e-3]
    times = [us for r in timed for us in (r.evidence.baseline_us, r.evidence.chosen_us)] or [1.0]
    y = upward(min(times), max(times), log=True)
    plot = Plot(f"Times of {one.shape.slug} by M, logarithmic", x, y)
    plot.frame(ticks, y.ticks(), "M")
    plot.line(((r.M, r.evidence.baseline_us) for r in timed), "stock")
    plot.line(((r.M, r.evidence.chosen_us) for r in timed), "learned")
    for r in timed:
        e = r.evidence
        plot.dot(r.M, e.baseline_us, "stock", f"M={r.M}: {e.baseline_us:.1f} us, {r.baseline}", 2.2)
        plot.dot(r.M, e.chosen_us, "learned", f"M={r.M}: {e.chosen_us:.1f} us, {r.pair}", 2.2)
    return plot


def _configs(one: ShapeFigures) -> Plot:
    x, ticks = _axis(one)
    shown = one.configs[:_SHOWN]
    y = Scale(0.5, len(shown) + 0.5, 12, HEIGHT - 34)
    plot = Plot(f"Which config serves which M of {one.shape.slug}", x, y)
    plot.frame(ticks, range(1, len(shown) + 1), "M", y_text="{:g}".format)
    for number, (pair, ms) in enumerate(shown, 1):
        plot.line(((m, number) for m in ms), "kept")
        for m in ms:
            plot.dot(m, number, "learned", f"M={m}: {pair}")
    return plot


def _costs(one: ShapeFigures) -> Plot:
    x, ticks = _axis(one)
    y = upward(0.0, max([r.evidence.gpu_s for r in one.measured if r.evidence.gpu_s > 0], default=1.0))
    plot = Plot(f"GPU seconds of {one.shape.slug} by M", x, y)
    plot.frame(ticks, y.ticks(), "M")
    for r in one.measured:
        style = "learned" if r.verdict == "faster" else "kept"
        says = f"M={r.M}: {r.evidence.gpu_s:.2f} GPU s, {r.evidence.measured} trials"
        plot.bar(r.M, r.evidence.gpu_s, style, says)
    return plot


def _rows_history(one: PageFigures) -> Plot:
    return _history("Rows by time", [(at, float(rows)) for at, rows, _ in one.history])


def _cost_history(one: PageFigures) -> Plot:
    return _history("GPU seconds by time", [(at, gpu_s) for at, _, gpu_s in one.history])


def _history(label: str, points: Sequence[tuple[float, float]]) -> Plot:
    start = points[0][0]
    span_s = points[-1][0] - start
    unit, size = next(((u, s) for u, s in _UNITS if span_s >= 2 * s), ("s", 1.0))
    moved = [((at - start) / size, value) for at, value in points]
    x, y = across(0.0, moved[-1][0]), upward(0.0, moved[-1][1])
    plot = Plot(label, x, y)
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(start))
    plot.frame(x.ticks(), y.ticks(), f"{unit} after {since} UTC")
    plot.line([(0.0, 0.0), *moved], "learned", steps=True)
    return plot


def _table(one: ShapeFigures) -> str:
    served = _served(one)
    heads = ("M", "SGLang us", f"{served} us", "gain", "interval", "n", "trials", "GPU s")
    rows = "".join(f"<tr>{''.join(_cells(cells))}</tr>" for cells in map(_row, one.measured))
    head = "".join(f"<th>{name}</th>" for name in heads) + f'<th class="text">{served}: up / down</th>'
    pairs = "".join(f"<li>{escape(str(pair))} ({len(ms)} M)</li>" for pair, ms in one.configs[:_SHOWN])
    return (
        f"<details><summary>The figures, and the configs by number</summary><ol>{pairs}</ol>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div></details>'
    )


def _row(r: Record) -> tuple[str, ...]:
    e = r.evidence
    faster = r.verdict == "faster"
    interval = f"{100 * e.gain_low:.1f}..{100 * e.gain_high:.1f}" if faster else ""
    gain = f"{100 * e.gain:.1f} %" if faster else "kept"
    if r.source == "replayed":
        gain += ", replayed"
    times = f"{e.baseline_us:.1f}", f"{e.chosen_us:.1f}"
    return str(r.M), *times, gain, interval, str(e.samples), str(e.measured), f"{e.gpu_s:.2f}", str(r.pair)


def _cells(cells: Iterable[str]) -> Iterator[str]:
    *numbers, last = cells
    yield from (f"<td>{escape(cell)}</td>" for cell in numbers)
    yield f'<td class="text">{escape(last)}</td>'
