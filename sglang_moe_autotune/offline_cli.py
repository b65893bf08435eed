"""The commands ``tune`` and ``verify``: work on GPUs without a server, in processes of their own."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sglang_moe_autotune import account, crew, errand, selection, shell, store, summary
from sglang_moe_autotune.account import Account
from sglang_moe_autotune.errand import Errand, Item, Learned, Ready, Step
from sglang_moe_autotune.errors import ShapeNotFoundError
from sglang_moe_autotune.selection import NothingFound, Opened
from sglang_moe_autotune.sglang_json import GRID
from sglang_moe_autotune.shapes import shape_of_slug

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from sglang_moe_autotune.crew import Crew, News, RayCrew
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.shapes import MoeShape

_MAX_COMPILE_PROCESSES = 16


def _ms(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Values of M, as in 1,16,64; none without the option."""
    ms = text.replace(" ", "").split(",") if text is not None else []
    if not all(m.isascii() and m.isdecimal() and 0 < int(m) <= 1 << 24 for m in ms):
        raise click.BadParameter(f"{text!r} is no list of token counts: write 1,16,64.", ctx, param)
    return tuple(dict.fromkeys(int(m) for m in ms))


# -- what to do ------------------------------------------------------------------------------------------------


def tune_items(
    files: Sequence[Opened], names: Sequence[str], fields: Sequence[str], ms: tuple[int, ...], max_m: int
) -> tuple[Item, ...]:
    """The shapes named, or all that a server has met; each with the M given, else those served, hottest first, else
    SGLang's usual grid. Raises ShapeNotFoundError, click.UsageError."""
    served: dict[MoeShape, dict[int, int]] = {}
    for file in files:
        for shape, note in file.contents.notes.items():
            counts = served.setdefault(shape, {})
            for m, count in note.served.items():
                counts[m] = counts.get(m, 0) + count
        for shape, _ in file.contents.records:
            served.setdefault(shape, {})
    wanted = [shape for name in names for shape in _named(name, served)] + [_of_fields(text) for text in fields]
    items = []
    for shape in dict.fromkeys(wanted or sorted(served, key=lambda s: s.slug)):
        counts = {m: count for m, count in served.get(shape, {}).items() if m <= max_m}
        hottest = tuple(sorted(counts, key=lambda m: (-counts[m], m)))
        items.append(Item(shape, ms or hottest or tuple(m for m in GRID if m <= max_m)))
    return tuple(items)


def verify_items(files: Sequence[Opened], names: Sequence[str]) -> tuple[Item, ...]:
    """The rows that are served, of the shapes named or of all. Raises ShapeNotFoundError."""
    ms: dict[MoeShape, set[int]] = {}
    for file in files:
        for (shape, m), record in file.contents.records.items():
            if record.verdict == "faster":
                ms.setdefault(shape, set()).add(m)
    named = [shape for name in names for shape in summary.find(name, ms)]
    chosen = dict.fromkeys(named if names else sorted(ms, key=lambda s: s.slug))
    return tuple(Item(shape, tuple(sorted(ms[shape]))) for shape in chosen)


def _named(name: str, known: Iterable[MoeShape]) -> Sequence[MoeShape]:
    try:
        return summary.find(name, known)
    except ShapeNotFoundError:
        if (shape := shape_of_slug(name)) is None:
            raise
        return (shape,)


_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")
"""as CUDA_VISIBLE_DEVICES takes it"""


def _gpus(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """all, or names of GPUs; wrong usage otherwise, also where nothing is run."""
    names = [] if text is None or text == "all" else text.replace(" ", "").split(",")
    for name in names:
        if not _GPU.fullmatch(name):
            raise click.BadParameter(f"{name!r} is no GPU: write all, or numbers or UUIDs as in 0,1.", ctx, param)
    return text


def _of_fields(text: str) -> MoeShape:
    try:
        return errand.shape_of_fields(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error


def _opened(root: Path, environment: str | None) -> list[Opened]:
    """The files of the store; none where nothing is stored yet, which a named shape can do without."""
    if environment is None and not store.environments(root):
        return []
    return selection.opened(root, environment)


# -- doing it --------------------------------------------------------------------------------------------------


def _order(
    work: errand.Work, items: tuple[Item, ...], root: Path, settings: Settings, budget_s: float | None
) -> Errand:
    return Errand(
        work,
        items,
        str(root),
        budget_s,
        min_gain_percent=settings.min_gain_percent,
        slice_us=settings.slice_us,
        reserve_mb=settings.reserve_mb,
        seed=settings.seed,
        bit_equal=settings.bit_equal and work == "tune",  # what was learned otherwise is not wrong
    )


def _crew_of(order: Errand, gpus: tuple[str, ...]) -> Crew:
    hands = errand.split(order.items, len(gpus))
    processes = min(_MAX_COMPILE_PROCESSES, max(1, (os.cpu_count() or 1) // max(1, len(hands))))
    return crew.Crew(
        [
            (gpu, msgspec.structs.replace(order, items=items, compile_processes=processes))
            for gpu, items in zip(gpus, hands, strict=False)
        ]
    )


def _ray_crew_of(order: Errand) -> RayCrew:
    workers = crew.RayCrew()
    workers.send(errand.split(order.items, workers.size), msgspec.structs.replace(order, compile_processes=4))
    return workers


def follow(workers: Crew | RayCrew, total: int, *, as_json: bool, keep: Path | None = None) -> Account:
    """Listen to the end, with a bar on a terminal; Ctrl-C lets the workers finish their files first. ``keep``: put
    records into this store as well, for workers on machines that do not share it."""
    from rich.console import Console  # noqa: PLC0415 - takes time that --help and --dry-run need not
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    found, kept = Account(), _Kept(keep)
    screen = Console(stderr=True, highlight=False, markup=False)
    columns = (SpinnerColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=screen, transient=True, disable=as_json or not screen.is_terminal) as progress:
        bar = progress.add_task("starting", total=total)

        def take(news: News) -> None:
            gpu, told = news
            found.take(gpu, told)
            kept.take(gpu, told)
            if isinstance(told, Step):
                progress.update(bar, description=f"{told.slug} M={told.M} {told.phase} {gpu and f'on {gpu}'}".rstrip())
            progress.update(bar, completed=found.done)
            if (line := account.line(told)) is not None and not as_json:
                progress.console.print(line)

        try:
            for news in workers.listen():
                take(news)
        except KeyboardInterrupt:
            found.interrupted = True
            progress.update(bar, description="stopping: what was learned is kept")
            workers.stop()
            for news in workers.listen():
                take(news)
        finally:
            workers.close()
            kept.close(found)
    return found


class _Kept:
    """Records of other machines, put into the store here, a file for each environment."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._stores: dict[str, store.Store] = {}

    def take(self, who: str, told: Any) -> None:
        if self._root is None:
            return
        if isinstance(told, Ready):
            self._stores[who] = store.Store.open(self._root, told.environment)
        elif isinstance(told, Learned) and who in self._stores:
            self._stores[who].submit(record=told.record)

    def close(self, found: Account) -> None:
        """What counts is that the records are on the disk here, wherever else they are."""
        for who, one in self._stores.items():
            found.gpus[who]["kept"] = one.close(10.0)


def _dry(items: tuple[Item, ...], *, as_json: bool) -> None:
    if as_json:
        shell.emit({"items": [{"shape": item.shape.slug, "M": item.ms} for item in items]})
    for item in () if as_json else items:
        click.echo(f"{item.shape.slug}  M {', '.join(map(str, item.ms))}")


_DRY = click.option("--dry-run", is_flag=True, help="Only say which shapes and M it would be.")


@click.command(
    "tune",
    short_help="Search on GPUs without a server.",
    epilog=shell.example(
        "tune", "tune E64-N512-K2048-top6-bf16 --m 1,16,64 --gpus all", "tune --shape E=64,N=512,K=2048,top_k=6"
    ),
)
@shell.shape_argument(many=True)
@click.option(
    "--shape", "fields", metavar="FIELDS", multiple=True,
    help="A shape that is not stored: E, N, K, top_k, and dtype, block, per_channel, activation where needed.",
)  # fmt: skip
@click.option("--m", "ms", metavar="M,M,...", callback=_ms, help="Token counts, in place of those that were served.")
@click.option(
    "--gpus", metavar="all|LIST", callback=_gpus, help="GPUs of this machine, one process each. [default: one GPU]"
)
@click.option("--ray", is_flag=True, help="All GPUs of the Ray cluster instead.")
@click.option("--budget-s", type=shell.Number(min=0, min_open=True), help="Seconds on each GPU, start-up not counted.")
@_DRY
@shell.options("dir", "environment", "json")
def tune(
    shapes: tuple[str, ...],
    fields: tuple[str, ...],
    ms: tuple[int, ...],
    gpus: str | None,
    budget_s: float | None,
    folder: Path | None,
    environment: str | None,
    *,
    ray: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Search configs for SHAPE on this machine's GPUs, on random weights, with no server running.

    Without SHAPE: every shape that a server has met, at the M it has served. What the store has settled for this GPU,
    Triton and kernel is skipped, and each record is stored as it is made: after Ctrl-C the same command goes on.
    SGLang must be in this Python; no file of it is changed.
    """
    if ray and gpus:
        raise click.UsageError("--ray uses the GPUs of the cluster: leave --gpus out")
    root, settings = shell.new_root(folder), shell.settings(folder, quiet=True)
    items = tune_items(_opened(root, environment), shapes, fields, ms, settings.max_m)
    if not items:
        raise NothingFound("no shape is stored yet: name one, or let a server run with the plugin")
    if dry_run:
        _dry(items, as_json=as_json)
        return
    order = _order("tune", items, root, settings, budget_s)
    workers = _ray_crew_of(order) if ray else _crew_of(order, crew.gpus(gpus))
    total = sum(len(item.ms) for item in items)
    follow(workers, total, as_json=as_json, keep=root if ray else None).finish(as_json=as_json)


@click.command(
    "verify",
    short_help="Measure stored rows again, take back what no longer holds.",
    epilog=shell.example("verify", "verify E64 --json"),
)
@shell.shape_argument(many=True)
@_DRY
@shell.options("dir", "environment", "json")
def verify(
    shapes: tuple[str, ...],
    folder: Path | None,
    environment: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure the stored rows of SHAPE (of all shapes without it) again on this GPU, against what SGLang uses.

    A row that is not faster any more, or whose output differs, is taken back. Exits with 1 if there was one.
    """
    root, settings = shell.root(folder), shell.settings(folder, quiet=True)
    items = verify_items(selection.opened(root, environment), shapes)
    if not items:
        raise NothingFound("no row is served from this store: there is nothing to verify")
    if dry_run:
        _dry(items, as_json=as_json)
        return
    workers = _crew_of(_order("verify", items, root, settings, None), ("",))
    follow(workers, sum(len(item.ms) for item in items), as_json=as_json).finish(as_json=as_json)
