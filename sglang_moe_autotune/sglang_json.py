"""SGLang's config files: their names, their text, and the rows that say what was learned and nothing else.

SGLang answers an M with the row of the nearest key, so a table of learned rows alone would serve them at
every M. ``table`` fences each learned row in. ``export`` alone touches the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_moe_autotune.errors import ExportError
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sglang_moe_autotune.records import Contents, Record, ShapeNote
    from sglang_moe_autotune.shapes import MoeShape

Rows = dict[int, KernelConfig]
"""one GEMM's config by M"""

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The M that SGLang's own tuning script writes."""


def file_name(shape: MoeShape, device_name: str, *, down: bool = False) -> str:
    """The name under which SGLang looks for this shape, by its own grammar."""
    name = f"E={shape.E},N={shape.N},device_name={device_name.replace(' ', '_')}"
    if shape.dtype:
        name += f",dtype={shape.dtype}"
    if shape.block_shape is not None and all(shape.block_shape):
        name += f",block_shape=[{shape.block_shape[0]}, {shape.block_shape[1]}]"
    if shape.per_channel_quant:
        name += ",per_channel_quant=True"
    return name + ("_down.json" if down else ".json")


def folder_name(triton_version: str) -> str:
    """The folder of a Triton version below ``configs``."""
    return f"triton_{triton_version.replace('.', '_')}"


def parse(text: str) -> Rows | str:
    """One file's rows by M, or the reason why the text is no such file."""
    try:
        table = json.loads(text)
        if not isinstance(table, dict):
            return f"it holds a {type(table).__name__} where an object of rows by M belongs"
        return {int(m): KernelConfig.from_dict(_row(config, m)) for m, config in table.items()}
    except (ValueError, RecursionError) as error:
        return str(error)


def _row(config: object, m: str) -> dict[str, object]:
    if not isinstance(config, dict):
        raise ValueError(f"the row of M={m} is {config!r} where an object belongs")  # noqa: TRY004 - a bad value
    return config


def encode(rows: Mapping[int, KernelConfig]) -> str:
    """A file's text as SGLang writes it: keys in order, indented by 4."""
    return json.dumps({str(m): rows[m].to_dict() for m in sorted(rows)}, indent=4) + "\n"


def table(shape: MoeShape, records: Iterable[Record], note: ShapeNote | None) -> tuple[Rows, Rows]:
    """The rows of both GEMMs: (up, down), with equal keys and equal BLOCK_SIZE_M in each row.

    Keys are SGLang's grid, every M whose answer was seen, and every learned M. A learned M has its learned
    pair, any other what SGLang itself uses there. Where a learned key has a neighbour that is not learned,
    the M next to it is pinned to SGLang's answer, so that a learned row answers for its own M and, at most,
    for those between it and the next key if that is learned too. SGLang's heuristic changes at M > E, so its
    two sides are pinned at E and E + 1. Both tables are empty where nothing was learned.

    SGLang's answer for an M where it was never seen is taken from the nearest M where it was, on the same
    side of E if there is one (``unseen`` says where there is none).
    """
    mine = [r for r in records if r.shape == shape]
    learned = {r.M: r.pair for r in mine if r.verdict == "faster" and _one_sort(r.pair)}
    if not learned:
        return {}, {}
    seen = _seen(mine, note)
    rows = {m: _baseline(seen, shape.E, m) for m in {*GRID, *seen, *learned}}
    rows.update(learned)
    for low, high in itertools.pairwise([0, *sorted(rows), max(rows) + 2]):
        pins = {low + 1} if low in learned and high not in learned else set()
        if high in learned and low not in learned:
            pins.add(high - 1)
        if low <= shape.E < high and not {low, high} <= learned.keys():
            pins |= {shape.E, shape.E + 1}
        rows.update({m: _baseline(seen, shape.E, m) for m in pins if low < m < high})
    return {m: pair.up for m, pair in rows.items()}, {m: pair.down for m, pair in rows.items()}


def unseen(shape: MoeShape, records: Iterable[Record], note: ShapeNote | None) -> str | None:
    """Which side of E has rows that were borrowed from the other side, in a sentence; None for neither."""
    seen = _seen([r for r in records if r.shape == shape], note)
    sides = {m > shape.E for m in seen}
    if len(sides) != 1:
        return None
    side = f"M {'<=' if sides == {True} else '>'} {shape.E}"
    return f"{shape.slug}: SGLang's own answer for {side} was never seen, so its rows there are a guess"


def _one_sort(pair: ConfigPair) -> bool:
    return pair.up.BLOCK_SIZE_M == pair.down.BLOCK_SIZE_M


def _seen(records: Iterable[Record], note: ShapeNote | None) -> dict[int, ConfigPair]:
    """SGLang's own answers by M. It forces the down GEMM to the up GEMM's BLOCK_SIZE_M, and so does this."""
    seen = {r.M: r.baseline for r in records} | ({} if note is None else note.baselines)
    return {
        m: ConfigPair(p.up, msgspec.structs.replace(p.down, BLOCK_SIZE_M=p.up.BLOCK_SIZE_M))
        for m, p in seen.items()
    }


def _baseline(seen: Mapping[int, ConfigPair], experts: int, m: int) -> ConfigPair:
    return seen[min(seen, key=lambda known: ((known > experts) != (m > experts), abs(known - m), known))]


class Exported(NamedTuple):
    """What an export wrote, and what a person should know about it."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]


MANIFEST = "sglang-moe-autotune-export.json"
"""Lies in the exported folder and says which files are ours, since SGLang's format has no room for it."""


def export(contents: Contents, folder: Path) -> Exported:
    """Write every shape with a learned row as ``folder/configs/triton_X_Y_Z/<name>.json``, up and down.

    Files of an earlier export are replaced, and a crash leaves a pair whole or its up file alone. Raises
    ExportError, before anything is written, where a file that is not ours would be overwritten or SGLang
    would stumble over the folder.
    """
    environment = contents.environment
    version_folder = _checked_folder(folder, environment.triton)
    if "/" in environment.device_name or "\0" in environment.device_name:
        raise ExportError(f"a device name with a slash makes no file name: {environment.device_name!r}")
    chosen, notes = _chosen(contents)
    texts: dict[Path, str] = {}
    for shape in chosen:
        up, down = table(shape, contents.records.values(), contents.notes.get(shape))
        for rows, is_down in ((up, False), (down, True)):
            texts[version_folder / file_name(shape, environment.device_name, down=is_down)] = encode(rows)
        if (note := unseen(shape, contents.records.values(), contents.notes.get(shape))) is not None:
            notes.append(note)
    if not texts:
        return Exported((), tuple(notes))
    manifest = _read_manifest(folder)
    for path, text in texts.items():
        _refuse_foreign(path, text, manifest.get(str(path.relative_to(folder)), []))
    try:
        _write(folder, version_folder, texts, manifest)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written ({error}): choose another folder") from error
    return Exported(tuple(texts), tuple(notes))


def _chosen(contents: Contents) -> tuple[list[MoeShape], list[str]]:
    """The shapes with a learned row, one for each file name, and a sentence for each that had to go."""
    served = {shape: sum(note.served.values()) for shape, note in contents.notes.items()}
    names: dict[str, MoeShape] = {}
    notes = []
    learned = {r.shape for r in contents.records.values() if r.verdict == "faster"}
    for shape in sorted(learned, key=lambda s: (served.get(s, 0), s.slug, repr(s)), reverse=True):
        name = file_name(shape, contents.environment.device_name)
        if (winner := names.setdefault(name, shape)) is not shape:
            counts = f"{served.get(winner, 0)} times against {served.get(shape, 0)}"
            notes.append(
                f"{shape.slug} is left out: {winner.slug} has the same name, {name}, served {counts}"
            )
    return list(names.values()), notes


def _checked_folder(folder: Path, triton: str) -> Path:
    """``folder/configs/triton_X_Y_Z``. SGLang takes each name that starts with ``triton_`` for a version made
    of whole numbers, and raises in the first lookup that misses otherwise."""
    configs = folder / "configs"
    try:
        names = [path.name for path in configs.iterdir()]
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise ExportError(f"{configs} cannot be listed ({error}): choose another folder") from error
    for name in (folder_name(triton), *sorted(names)):
        if name.startswith("triton_") and not re.fullmatch(r"triton_[0-9]+(_[0-9]+)*", name):
            cure = "move it away" if name in names else "SGLang needs a Triton with a plain version"
            raise ExportError(f"SGLang cannot read a folder {configs / name} (numbers only): {cure}")
    return configs / folder_name(triton)


def _read_manifest(folder: Path) -> dict[str, list[str]]:
    """Digests of our files by path below the folder. An unreadable one is none: then nothing is ours."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, list[str]])
    except (OSError, msgspec.MsgspecError):
        return {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _refuse_foreign(path: Path, text: str, ours: list[str]) -> None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error}): choose another folder") from error
    if content != text.encode() and _digest(content) not in ours:
        raise ExportError(f"{path} was not written by this tool, or was changed since: move it away")


def _write(
    folder: Path, version_folder: Path, texts: dict[Path, str], manifest: dict[str, list[str]]
) -> None:
    folder.joinpath("configs").mkdir(parents=True, exist_ok=True)
    # Not below configs: SGLang lists that folder while a server runs.
    staging = folder / f".export-{os.getpid()}-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        for path, text in texts.items():
            _write_whole(staging / path.name, text)
            # The old digest stays until the next export: a crash before the replace leaves the old file.
            key = str(path.relative_to(folder))
            manifest[key] = [*manifest.get(key, [])[-1:], _digest(text.encode())]
        _write_whole(staging / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)).decode() + "\n")
        (staging / MANIFEST).replace(folder / MANIFEST)
        with contextlib.suppress(OSError):
            staging.rename(version_folder)  # whole, where the folder is missing
            return
        ups = [path for path in texts if not path.name.endswith("_down.json")]
        for up in ups:
            down = up.with_name(f"{up.stem}_down.json")
            # An old down row beside a new up row is a pair that nobody measured; without a down file, SGLang
            # takes the up row for both.
            down.unlink(missing_ok=True)
            (staging / up.name).replace(up)
            (staging / down.name).replace(down)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
