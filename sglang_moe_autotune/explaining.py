"""The commands ``show`` and ``explain``: what is stored of a shape, what is served of it, and why the rest is not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from sglang_moe_autotune import config_folder, explain, objects, selection, shell, summary, switch, watch
from sglang_moe_autotune import held as held_files
from sglang_moe_autotune.trials import environment_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sglang_moe_autotune.held import Held
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.shapes import MoeShape


@click.command(
    "show",
    short_help="Each M of a shape: SGLang's answer and what was learned.",
    epilog=shell.example("show E128-N768-K2048-top8-bf16", "show E128 --json"),
)
@shell.shape_argument()
@shell.options("dir", "environment", "json")
def show_command(shape: str, folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Each M of SHAPE: SGLang's answer above, what was learned below.

    SHAPE is a name that `list` prints, or the beginning of one. The columns up and down are the configs of
    the two GEMMs (BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, w warps, s stages), us their time together, n the
    paired samples; the gain stands above its interval, both in percent. Rows that are not served stand below, with the
    reason, and configs in quarantine.
    """
    file, shapes = selection.find(selection.opened(shell.root(folder), environment), shape, changes=False)
    about, contents = file.contents.environment, file.contents
    rows = [(s, summary.rows(s, contents.records, contents.notes.get(s))) for s in shapes]
    held = _held(folder, about, shapes)
    manner = _manner(folder, about)._replace(held=tuple(held))
    reasons = {
        owner: {
            row.M: why
            for row in found
            if row.record and (why := explain.kept_back(owner, row.M, contents, manner, _files(about, owner, row.M)))
        }
        for owner, found in rows
    }
    if as_json:
        described = [objects.shape_rows(owner, found, reasons[owner]) for owner, found in rows]
        seen = {"environment": objects.environment(about), "shapes": described, "quarantine": objects.held(held)}
        shell.emit(seen)
        return
    from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

    for owner, found in rows:
        shell.show(f"{owner.slug} on {file.title}", tables.shape_rows(found), *_not_served(reasons[owner]))
    shell.show(*_never_tried(held))


@click.command(
    "explain",
    short_help="Which answer is served for a shape at one M, and why.",
    epilog=shell.example("explain E128 256", "explain E128 64 --json"),
)
@shell.shape_argument()
@click.argument("M", type=click.IntRange(1, 1 << 24))
@shell.options("dir", "environment", "json")
def explain_command(shape: str, m: int, folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Which answer a server gives for SHAPE at M tokens, and why: every source in the order in which it is asked.

    The mode and the switch are those of the servers that run on this store; where none runs, the mode is that of
    SGLANG_MOE_AUTOTUNE_MODE here, as SGLANG_MOE_AUTOTUNE_BIT_EQUAL always is. The config files are those of the SGLang
    in this Python, or of SGLANG_MOE_CONFIG_DIR; where there are none, what a server noted of them is used. Nothing of
    SGLang is imported.
    """
    file, shapes = selection.find(selection.opened(shell.root(folder), environment), shape, changes=False)
    owner = selection.single(shapes)
    about = file.contents.environment
    held, files = _held(folder, about, [owner]), _files(about, owner, m)
    manner = _manner(folder, about)._replace(held=tuple(held))
    steps = explain.explain(owner, m, file.contents, manner, files)
    if as_json:
        configs = config_folder.where(os.environ) if files.readable else None
        described = objects.explanation(owner, m, steps, configs)
        ours = {"mode": manner.mode, "switch": manner.level, "quarantine": objects.held(held)}
        shell.emit({"environment": objects.environment(about), **ours, **described})
        return
    from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

    title = f"{owner.slug} M={m} on {file.title}, mode {manner.mode}"
    shell.show(title, *tables.explanation(steps), *_never_tried(held))


def _not_served(reasons: Mapping[int, str]) -> Iterator[str]:
    """A line a reason, with the M that it keeps back."""
    for reason in dict.fromkeys(reasons.values()):
        ms = ", ".join(str(m) for m, why in reasons.items() if why == reason)
        yield f"M={ms} not served: {reason}"


def _never_tried(held: Iterable[Held]) -> Iterator[str]:
    for one in held:
        yield f"in quarantine, tried at no M: {one.candidate.gemm} {one.candidate.config} (M={one.M}): {one.reason}"


def _manner(folder: Path | None, about: Environment) -> explain.Manner:
    """As the servers that run on this store in that environment have it; as the settings here where they differ."""
    root, settings = shell.root(folder, quiet=True), shell.settings(folder, quiet=True)
    running = [live for live in watch.running(root) if live.device_name == about.device_name]
    modes = {live.mode for live in running if live.triton == about.triton}
    asked = {live.switch for live in running if live.triton == about.triton}
    levels = [switch.read(root), *(level for level in switch.LEVELS if asked == {level})]
    return explain.Manner(
        modes.pop() if len(modes) == 1 else settings.mode,
        min(levels, key=switch.LEVELS.index),
        bit_equal=settings.bit_equal,
        deterministic=any(explain.DETERMINISTIC in live.reason for live in running),
    )


def _files(about: Environment, owner: MoeShape, m: int) -> explain.Files:
    configs = config_folder.where(os.environ)
    if configs is None or not config_folder.readable(configs):
        return explain.Files(readable=False)
    found = config_folder.answer(configs, about.triton, owner, about.device_name, m)
    return explain.Files(readable=True, answer=found)


def _held(folder: Path | None, about: Environment, shapes: Iterable[MoeShape]) -> list[Held]:
    """What is never tried for these shapes, at whatever M it was found."""
    of, key = set(shapes), environment_key(about)
    found = held_files.read(shell.root(folder, quiet=True) / held_files.FOLDER).held
    return [one for one in found if one.candidate.environment == key and one.candidate.shape in of]
