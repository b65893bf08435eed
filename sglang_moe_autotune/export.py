"""An export: what was learned as a folder of config files that stock SGLang reads, and the evidence beside them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglang_moe_autotune.errors import ExportError
from sglang_moe_autotune.held import deadly
from sglang_moe_autotune.sglang_json import encode, file_name, folder_name, is_learned, table, unseen

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from sglang_moe_autotune.held import Held
    from sglang_moe_autotune.records import Contents
    from sglang_moe_autotune.shapes import MoeShape


class Exported(NamedTuple):
    """What an export wrote, and what a person should know about it."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]


MANIFEST = "sglang-moe-autotune-export.json"
"""Lies in the exported folder and says which files are ours, since SGLang's format has no room for it."""
EVIDENCE = "sglang-moe-autotune-evidence.json"
"""Lies beside it: why each row says what it says."""


def export(
    contents: Contents,
    folder: Path,
    *,
    keep_foreign: bool = False,
    replayed: bool = False,
    held: Collection[Held] = (),
) -> Exported:
    """Write every shape with a learned row as ``folder/configs/triton_X_Y_Z/<name>.json``, up and down. A slash in
    the GPU's name makes folders, since SGLang opens just such a path.

    Files of an earlier export are replaced, all others stay, and a crash leaves a pair whole or its up file alone.
    Where a file that is not ours has the name of one of ours, it stays and our pair is left out, with a note
    (``keep_foreign``), or ExportError is raised before anything is written; also where SGLang would stumble over
    the folder. Rows of a recording are left out, with a note, unless ``replayed``: no GPU has shown them. So are rows
    with a config that ended a process: SGLang would serve them. held: the quarantine of the environment.
    """
    environment = contents.environment
    version_folder = _checked_folder(folder, environment.triton)
    if (device := environment.device_name) and (".." in device.split("/") or "\0" in device):
        raise ExportError(f"a device of this name has no file of its own below {version_folder}: {device!r}")
    shown = {key: r for key, r in contents.records.items() if replayed or r.source != "replayed"}
    left_out = len(contents.records) - len(shown)
    safe = {key: r for key, r in shown.items() if not deadly(r, held)}
    contents = msgspec.structs.replace(contents, records=safe)
    chosen, notes = _chosen(contents)
    if left_out:
        notes.append(f"{left_out} rows are left out: they are of a recording, not of a GPU (--replayed takes them)")
    if dangerous := len(shown) - len(safe):
        notes.append(f"{dangerous} rows are left out: a config of theirs ended or hung a process (see `quarantine`)")
    manifest, evidence = _read_ours(folder, MANIFEST, list[str]), _read_ours(folder, EVIDENCE, Any)
    texts: dict[Path, str] = {}
    for shape in chosen:
        note = contents.notes.get(shape)
        up, down = table(shape, contents.records.values(), note)
        if (doubt := unseen(shape, contents.records.values(), note)) is not None:
            notes.append(doubt)
        if not up:
            continue
        names = (file_name(shape, environment.device_name, down=is_down) for is_down in (False, True))
        pair = {version_folder / name: encode(rows) for name, rows in zip(names, (up, down), strict=True)}
        foreign = [p for p, text in pair.items() if _is_foreign(p, text, manifest.get(_key(p, folder), []))]
        if foreign and not keep_foreign:
            cure = "move it away, or use --merge-into"
            raise ExportError(f"{foreign[0]} was not written by this tool, or was changed since: {cure}")
        if foreign:
            notes.append(f"{shape.slug} is left out: {foreign[0]} is not ours, or was changed since, and is kept")
            continue
        texts |= pair
        evidence[_key(next(iter(pair)), folder)] = _evidence(shape, contents)
    if not texts:
        return Exported((), tuple(notes))
    try:
        _write(folder, version_folder, texts, manifest, evidence)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written ({error}): choose another folder") from error
    return Exported(tuple(texts), tuple(notes))


def _chosen(contents: Contents) -> tuple[list[MoeShape], list[str]]:
    """The shapes with a learned row, one for each file name, and a sentence for each that had to go."""
    served = {shape: sum(note.served.values()) for shape, note in contents.notes.items()}
    names: dict[str, MoeShape] = {}
    notes = []
    learned = {r.shape for r in contents.records.values() if is_learned(r)}
    for shape in sorted(learned, key=lambda s: (served.get(s, 0), s.slug, repr(s)), reverse=True):
        name = file_name(shape, contents.environment.device_name)
        if (winner := names.setdefault(name, shape)) is not shape:
            counts = f"{served.get(winner, 0)} times against {served.get(shape, 0)}"
            notes.append(
                f"{shape.slug} is left out: {winner.slug} has the same name, {name}, served {counts}"
            )
    return list(names.values()), notes


def _evidence(shape: MoeShape, contents: Contents) -> dict[str, Any]:
    rows = [r for r in contents.records.values() if r.shape == shape and is_learned(r)]
    return {
        "shape": msgspec.to_builtins(shape),
        "environment": msgspec.to_builtins(contents.environment),
        "rows": [msgspec.to_builtins(r) for r in sorted(rows, key=lambda r: r.M)],
    }


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


def _key(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


def _read_ours(folder: Path, name: str, value: Any) -> dict[str, Any]:
    """A file of an earlier export, by path below the folder. An unreadable one is none: then nothing is ours."""
    try:
        found: dict[str, Any] = msgspec.json.decode((folder / name).read_bytes(), type=dict[str, value])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_foreign(path: Path, text: str, ours: list[str]) -> bool:
    """Is a file there that we neither wrote nor would write?"""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error}): choose another folder") from error
    return content != text.encode() and _digest(content) not in ours


def _write(
    folder: Path,
    version_folder: Path,
    texts: dict[Path, str],
    manifest: dict[str, list[str]],
    evidence: dict[str, Any],
) -> None:
    folder.joinpath("configs").mkdir(parents=True, exist_ok=True)
    # Not below configs: SGLang lists that folder while a server runs.
    staging = folder / f".export-{os.getpid()}-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        for path, text in texts.items():
            _write_whole(staging / path.relative_to(version_folder), text)
            # The old digest stays until the next export: a crash before the replace leaves the old file.
            key = _key(path, folder)
            manifest[key] = [*manifest.get(key, [])[-1:], _digest(text.encode())]
        for name, value in ((EVIDENCE, evidence), (MANIFEST, manifest)):
            _write_whole(staging / name, msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
            (staging / name).replace(folder / name)
        with contextlib.suppress(OSError):
            staging.rename(version_folder)  # whole, where the folder is missing
            return
        ups = [path for path in texts if not path.name.endswith("_down.json")]
        for up in ups:
            down = up.with_name(f"{up.stem}_down.json")
            # An old down row beside a new up row is a pair that nobody measured; without a down file, SGLang
            # takes the up row for both.
            down.unlink(missing_ok=True)
            up.parent.mkdir(parents=True, exist_ok=True)
            for path in (up, down):
                (staging / path.relative_to(version_folder)).replace(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
