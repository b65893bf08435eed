#!/usr/bin/env python3
"""The life of a miss as one picture: latencies of a live server from its first request to the next start.

    plot_life.py RECAPTURE.json PICTURE.png

The JSON file is that of ``scripts/gpu_recapture.py``; needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

COLOURS = ("#8c8c8c", "#d98c00", "#1f77b4", "#2ca02c")


def panels(life: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """(seconds since the first request, milliseconds) by kind and phase, both in the order of their first request."""
    start_s = min(point["unix_s"] for point in life)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in sorted(life, key=lambda point: point["unix_s"]):
        phases = found.setdefault(point["kind"], {})
        phases.setdefault(point["phase"], []).append((point["unix_s"] - start_s, point["ms"]))
    return found


def draw(found: dict[str, dict[str, list[tuple[float, float]]]], title: str, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - the one script that needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice above

    figure, axes = plt.subplots(len(found), 1, sharex=True, figsize=(9, 2.4 * len(found)), squeeze=False)
    for axis, (kind, phases) in zip(axes[:, 0], found.items(), strict=True):
        first = None
        for (phase, points), colour in zip(phases.items(), COLOURS, strict=False):
            seconds, ms = zip(*points, strict=True)
            middle = statistics.median(ms)
            first = middle if first is None else first
            change = "" if middle == first else f" ({100 * (middle / first - 1):+.0f} %)"
            axis.plot(seconds, ms, ".", color=colour, label=f"{phase}: {middle:.2f} ms{change}")
            axis.hlines(middle, min(seconds), max(*seconds, min(seconds) + 3), color=colour, linewidth=2)
        every = [ms for points in phases.values() for _, ms in points]
        axis.set_ylim(0, 1.25 * statistics.quantiles(every, n=20)[-1])
        axis.set_ylabel("ms")
        axis.set_title(kind, fontsize=10, loc="left")
        axis.legend(fontsize=8, loc="lower right", ncols=2)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("seconds since the first request")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    if len(sys.argv) != 3:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    source, picture = map(Path, sys.argv[1:])
    findings = json.loads(source.read_text())
    if not findings.get("life"):
        sys.stderr.write(f"{source} holds no latencies: it must be written by scripts/gpu_recapture.py\n")
        return 1
    machine = findings.get("machine", {})
    title = f"A live server's latencies, {machine.get('gpu', 'GPU')}, SGLang {machine.get('sglang', '?')}"
    draw(panels(findings["life"]), title, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
