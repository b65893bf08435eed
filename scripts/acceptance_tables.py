#!/usr/bin/env python3
"""Tables of docs/measured.md and the first one of README.md from a run of gpu_acceptance.py.

    acceptance_tables.py DIR/acceptance.json [--into docs/h200_acceptance.json] [--readme 4,16,96]

Prints the tables. ``--into``: where the figures behind them are kept, rounded and without the tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_moe_autotune.shapes import KernelConfig

KEPT = (
    "machine", "started_s", "learning_s", "gpu_s", "slices", "watch", "compile", "memory", "compiles", "device_cache",
    "served", "rows",
)  # fmt: skip
README_M = "1,4,16,64,128,320,704,1280,2048"


def rounded(value: Any) -> Any:
    """Figures with four decimals, all through."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def figures(row: dict[str, Any], digits: int) -> str:
    """What was learned, its gain and the interval of that."""
    if row["verdict"] != "faster":
        return "kept | |"
    span = f"{100 * row['gain_low']:.1f} to {100 * row['gain_high']:.1f} %"
    return f"{row['chosen_us']:.{digits}f} | {100 * row['gain']:.1f} % | {span}"


def whole_table(rows: list[dict[str, Any]]) -> list[str]:
    """Every M."""
    lines = ["| M | heuristic us | learned us | gain | interval | samples | up | down |", "|" + "---|" * 8]
    for row in rows:
        up, down = (KernelConfig.from_dict(row[gemm]) for gemm in ("up", "down"))
        told = figures(row, 1)
        lines.append(f"| {row['M']} | {row['baseline_us']:.1f} | {told} | {row['samples']} | {up} | {down} |")
    return lines


def readme_table(rows: list[dict[str, Any]], ms: list[int]) -> list[str]:
    """A few M, rounded."""
    lines = ["| tokens (M) | SGLang's heuristic | learned | gain | interval |", "|" + "---|" * 5]
    for row in (r for r in rows if r["M"] in ms):
        lines.append(f"| {row['M']} | {row['baseline_us']:.0f} | {figures(row, 0)} |")
    return lines


def served_table(served: list[dict[str, Any]]) -> list[str]:
    """What the graphs replayed."""
    lines = ["| M | GEMM | heuristic, served | learned, served | replayed kernel |", "|" + "---|" * 5]
    for row in served:
        kernel = f"grid {row['grid']:,}, {', '.join(f'{n:,}' for n in row['shared'])} bytes of shared memory"
        times = f"{row['heuristic_us']:.1f} us | {row['learned_us']:.1f} us"
        lines.append(f"| {row['M']} | {row['gemm']} | {times} | {kernel} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("acceptance", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--readme", default=README_M, help="the M of the first table of README.md")
    options = parser.parse_args()
    found = json.loads(options.acceptance.read_text())
    kept = rounded({key: found[key] for key in KEPT if key in found})
    if options.into is not None:
        options.into.write_text(json.dumps(kept) + "\n")
    ms = [int(m) for m in options.readme.split(",")]
    for table in (whole_table(kept["rows"]), served_table(kept.get("served", [])), readme_table(kept["rows"], ms)):
        print(*table, "", sep="\n")


if __name__ == "__main__":
    main()
