"""Draws what bench_search.py measured: regret against compiled configs, and against GPU seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {
    "search": "#1b6ca8", "search, own files": "#6baed6", "search, no files": "#e08214", "prior alone": "#8c6d31",
    "random": "#999999", "grid": "#cccccc", "TPE": "#d6616b", "TPE after 20 of the prior": "#843c39",
}  # fmt: skip


def draw(found: dict[str, Any], path: Path) -> None:
    """One row a landscape. Logarithmic: what matters is whether the last per cent is reached."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend

    landscapes, about = found["landscapes"], found["about"]
    size = (11, 3 * len(landscapes) + 0.4)
    figure, rows = plt.subplots(len(landscapes), 2, figsize=size, squeeze=False, sharey="row")
    grids = (("compiled", about["compiled_grid"], "configs compiled"), ("gpu_s", about["gpu_s_grid"], "GPU seconds"))
    for axes, (slug, ways) in zip(rows, landscapes.items(), strict=True):
        for ax, (kind, grid, label) in zip(axes, grids, strict=True):
            for name, colour in COLOURS.items():
                if name in ways:
                    width = 2.2 if name == "search" else 1.2
                    style = "--" if name == "TPE after 20 of the prior" else "-"  # it begins on the line of the prior
                    ends = ways[name]["curves"][kind]
                    ax.plot(grid, [100 * r for r in ends], style, label=name, color=colour, linewidth=width)
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set_xlabel(label)
            ax.grid(alpha=0.3, which="both", linewidth=0.4)
            ax.axhline(0.5, color="#2ca02c", linewidth=0.8, linestyle=":")
            if kind == "gpu_s":
                ax.set_xscale("log")
                ax.xaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("regret in %")
        axes[0].set_title(slug, loc="left", fontsize=10)
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"Mean over all M and {about['seeds']} seeds; dotted: 0.5 %", x=0.99, ha="right", fontsize=9)
    figure.tight_layout(rect=(0, 0.06 if len(landscapes) > 1 else 0.14, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
