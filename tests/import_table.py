"""Which layer each module of the package belongs to; as a script, the files of the layers named.

``scripts/check`` type-checks the layers that must do without torch with ``import_table.py pure disk people``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args

Layer = Literal["pure", "disk", "edge", "people"]

PACKAGE = Path(__file__).resolve().parent.parent / "sglang_moe_autotune"

LAYERS: dict[str, Layer] = {
    **dict.fromkeys(
        (
            "__init__", "shapes", "search_space", "prior", "search", "decision", "records", "sglang_json",
            "lookup", "tried", "tuner", "landscape", "replay", "errors", "targets",
            "experience", "summary", "document", "record_rows", "validity", "heat", "beat", "bench", "budget",
            "job", "outcome", "patience", "regimes", "agenda", "looks", "consolidation", "measurement", "noise", "lags",
            "routings", "snapshot",
            "accord", "checks", "votes", "hearsay", "epochs", "breath",
            "tally", "errand", "inspection", "source", "kernel_source", "contract", "fit", "matrix",
            "captures", "graph_contract",
            "pace", "marked", "idle_time", "fitting", "hindrance", "step_times",
        ),
        "pure",
    ),
    **dict.fromkeys(("store", "record_file", "spares", "lock_file", "whole_file", "settings", "status"), "disk"),
    **dict.fromkeys(("leases", "post", "board", "hearing", "council", "ranks", "absence"), "disk"),
    **dict.fromkeys(("switch", "deaths", "held", "inquest", "journal", "page", "vetting"), "disk"),
    **dict.fromkeys(
        (
            "benchmark", "compiler", "compile_child", "launch", "layers", "releases", "correctness", "plugin",
            "timing", "scratch", "shape_notes", "listener", "live", "serving", "attachment", "overlay", "device",
            "metrics", "server_info", "controls", "doorbell", "startup", "offline", "machine", "stand_in", "warm",
            "kernels", "launches", "binaries", "graphs", "graph_state", "recapture", "peers",
            "passes", "harvest", "intake", "doubts", "rehearsal",
        ),
        "edge",
    ),
    **dict.fromkeys(("__main__", "simulate", "cli", "doctor", "tables", "objects", "selection"), "people"),
    **dict.fromkeys(("crew", "account", "offline_cli", "quarantine_cli"), "people"),
    **dict.fromkeys(
        ("changes", "figures", "imports"),
        "pure",
    ),
    **dict.fromkeys(("export", "remote", "trials", "quarantine"), "disk"),
    **dict.fromkeys(
        (
            "shell", "config_folder", "explain", "edit", "editing", "explaining", "importing", "exporting", "plot",
            "report",
            "watch", "switching",
        ),
        "people",
    ),
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package, ``a.b`` for one in a folder."""
    paths = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(name.parts): path for name, path in paths.items()}


def main(arguments: list[str]) -> int:
    if not arguments or not set(arguments) <= set(get_args(Layer)):
        sys.stderr.write(f"usage: import_table.py LAYER...; the layers are {', '.join(get_args(Layer))}\n")
        return 2
    for name, path in modules().items():
        if LAYERS.get(name) in arguments:
            sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
