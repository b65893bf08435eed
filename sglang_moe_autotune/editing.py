"""The commands that change the store by a user's word: merge, pin and forget."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_moe_autotune import edit, records, selection, shell, store, validity
from sglang_moe_autotune.fitting import limit_of, unfit
from sglang_moe_autotune.selection import NothingFound
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.records import Contents, Record
    from sglang_moe_autotune.shapes import MoeShape


@click.command(
    "merge",
    short_help="Take over what other stores hold, by evidence.",
    epilog=shell.example("merge /mnt/host-2/moe-autotune", "merge backup/*.json --dry-run"),
)
@click.argument("sources", metavar="FILE_OR_FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@edit.dry_option
@shell.options("dir", "json")
def merge_command(sources: tuple[Path, ...], folder: Path | None, *, dry: bool, as_json: bool) -> None:
    """Take over what other stores hold, each environment into its own file.

    Of two records for one shape and M the better evidence stays, never the younger file; the order of merges does
    not matter. Unlike `import`, this trusts: rows of the same environment are served as if they were learned here.
    """
    root = shell.new_root(folder)
    read = [(path, store.read(path)) for source in sources for path in _files_of(source)]
    edits = []
    for path, theirs in read:
        mine = root / store.file_name(theirs.environment)

        def take(contents: Contents, theirs: Contents = theirs) -> Contents:
            return records.merge(contents, theirs)

        edits.append(edit.apply(mine, take, new=theirs, dry=dry, notes=[f"from {path}"]))
    edit.show(edits, as_json=as_json, dry=dry)


def _files_of(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = store.environments(source)
    for entry in found:
        if entry.environment is None:
            click.echo(f"passed over: {entry.problems[0]}", err=True)
    usable = [entry.path for entry in found if entry.environment is not None]
    if not usable:
        raise NothingFound(f"{source} holds no file of a store: name the folder that holds *-triton-*.json")
    return usable


@click.command(
    "pin",
    short_help="Serve a pair that you chose yourself, until it is forgotten.",
    epilog=shell.example('pin E128 64 --up "$(cat up.json)"'),
)
@shell.shape_argument()
@click.argument("M", type=click.IntRange(1, 1 << 24))
@click.option("--up", "up_json", metavar="JSON", required=True, help="Config of the up GEMM, in SGLang's keys.")
@click.option("--down", "down_json", metavar="JSON", help="Config of the down GEMM; without it the same.")
@shell.options("dir", "environment", "json")
def pin_command(
    shape: str,
    m: int,
    up_json: str,
    down_json: str | None,
    folder: Path | None,
    environment: str | None,
    *,
    as_json: bool,
) -> None:
    """Serve this pair of configs for SHAPE at M tokens, whatever was measured, from the next start of a server on.

    Both GEMMs share one BLOCK_SIZE_M. What could not run on that GPU is refused. A measured row is replaced: `forget`
    takes the pin away and does not bring that row back, a server or `tune` measures it anew.
    """
    file, shapes = selection.find(selection.opened(shell.root(folder), environment), shape)
    owner = selection.single(shapes)
    up = _config("--up", up_json)
    pair = ConfigPair(up, up if down_json is None else _config("--down", down_json))
    if pair.up.BLOCK_SIZE_M != pair.down.BLOCK_SIZE_M:
        sizes = f"{pair.up.BLOCK_SIZE_M} and {pair.down.BLOCK_SIZE_M}"
        raise click.UsageError(f"both GEMMs share one BLOCK_SIZE_M, and these have {sizes}")
    if (reason := unfit(pair, owner, limit_of(file.contents.environment))) is not None:
        raise click.UsageError(f"this pair cannot run there: {reason}")
    now = time.time()
    pinned = records.pin(file.contents, owner, m, pair, now).records[owner, m]
    if (reason := validity.problem(pinned)) is not None:
        raise click.UsageError(f"this pair cannot be pinned: {reason}")
    done = edit.apply(file.path, lambda contents: records.pin(contents, owner, m, pair, now))
    before = next((change.before for change in done.changed if (change.shape, change.M) == (owner, m)), None)
    if before is not None and before.source == "learned":
        was = "SGLang's own answer stays" if before.verdict == "baseline" else f"{before.evidence.gain:.1%} faster"
        what = f"replaces a measured row ({was.replace('%', ' %')})"
        click.echo(f"{what}: `forget` does not bring it back, a server or `tune` measures it anew", err=True)
        done = done._replace(notes=(*done.notes, what))
    edit.show([done], as_json=as_json, dry=False)


def _config(option: str, text: str) -> KernelConfig:
    try:
        found: Any = json.loads(text)
        if isinstance(found, dict):
            return KernelConfig.from_dict(found)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{option} is no config: {error}") from error
    raise click.UsageError(f"{option} must be a JSON object in SGLang's keys, not {text[:60]!r}")


@click.command(
    "forget",
    short_help="Take rows out of the store.",
    epilog=shell.example("forget E128 64 256", "forget E128-N768-K2048-top8-bf16 --yes"),
)
@shell.shape_argument()
@click.argument("M", nargs=-1, type=click.IntRange(1, 1 << 24))
@shell.options("yes", "dir", "environment", "json")
def forget_command(
    shape: str, m: tuple[int, ...], folder: Path | None, environment: str | None, *, yes: bool, as_json: bool
) -> None:
    """Take the rows of SHAPE at these M (at all without M) out of the store; asks first and says what is lost.

    No older copy on another host brings them back. Servers measure these M again when they meet them.
    """
    file, shapes = selection.find(selection.opened(shell.root(folder), environment), shape)
    owner = selection.single(shapes)
    kept = {k: r for k, r in file.contents.records.items() if k[0] == owner and (not m or k[1] in m)}
    if missing := [asked for asked in m if (owner, asked) not in kept]:
        held = ", ".join(str(k[1]) for k in file.contents.records if k[0] == owner) or "none"
        raise NothingFound(f"{owner.slug} has no row at M={missing[0]}: it has {held}")
    if not kept:
        raise NothingFound(f"{owner.slug} has no row: there is nothing to forget")
    click.echo(_loss(owner, kept.values()), err=True)
    if as_json and not yes:
        raise click.UsageError("--json does not ask: add --yes")
    if not yes:
        click.confirm("Forget them?", abort=True, err=True)

    def without(contents: Contents) -> Contents:
        for _, asked in kept:
            contents = records.forget(contents, owner, asked)
        return contents

    edit.show([edit.apply(file.path, without)], as_json=as_json, dry=False)


def _loss(owner: MoeShape, lost: Iterable[Record]) -> str:
    lost = list(lost)
    measured = [r for r in lost if r.source == "learned"]
    gains = [r.evidence.gain for r in measured if r.verdict == "faster"]
    words = [edit.rows_of(len(lost))]
    if measured:
        words.append(f"{sum(r.evidence.gpu_s for r in measured):.1f} GPU seconds of measuring")
    if gains:
        words.append(f"gains up to {100 * max(gains):.1f} %")
    for source in ("pinned", "imported", "replayed"):
        if count := sum(r.source == source for r in lost):
            words.append(f"{count} {source}")
    return f"{owner.slug} loses:\n  {', '.join(words)}"
