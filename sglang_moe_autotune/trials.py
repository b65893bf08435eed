"""The trials: what was measured at each M, kept for people beside the store. Nothing that is served rests on them.

One file for each environment and shape below ``trials/``, apart from the records, so that these load as fast as
before. A write decodes the M that it changes, not the others, and there is a line for each, read one by one:

    {"schema":1,"environment_key":...,"shape":{...},"ms":{
    "8":[["up",[16,32,64,1,4,3],0.8,5],...],
    "64":[...]
    }}
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import math
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from sglang_moe_autotune import lock_file, store, whole_file
from sglang_moe_autotune.breath import Breath, no_breath
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape
from sglang_moe_autotune.tried import Tried
from sglang_moe_autotune.validity import pair_is_sound, shape_is_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from sglang_moe_autotune.records import Environment

logger = logging.getLogger("sglang.moe_autotune")

SCHEMA: Final = 1
FOLDER: Final = "trials"
MAX_TRIALS: Final = 120
"""of a GEMM at an M, the fastest"""
MAX_MS: Final = 200
MAX_BYTES: Final = 4 << 20
"""of a file; as many trials as may be take less"""
_MAX_FILES: Final = 256
_MAX_PENDING: Final = 1024
_LOCK_S: Final = 2.0
_STALE_S: Final = 3600.0
_LATER_S: Final = 0.05
"""after the end of a search: its record is written first, and whoever serves would wait for a part of each"""

_Row = tuple[Gemm, tuple[int, int, int, int, int | None, int | None], float, int]


class _Head(msgspec.Struct):
    schema: int
    environment_key: str
    shape: MoeShape


class _Document(_Head):
    ms: dict[int, msgspec.Raw]


_MS: Final = b',"ms":{'
_END: Final = b"}}"


class TrialLog:
    """``put`` never waits for the disk and never raises; a thread writes. It stays, since the thread that serves would
    wait for each new one to begin."""

    def __init__(self, root: Path | None, environment: Environment) -> None:
        self._folder = None if root is None else root / FOLDER
        self._key = environment_key(environment)
        self._changed = threading.Condition()
        self._pending: dict[MoeShape, dict[int, list[Tried]]] = {}
        self._thread: threading.Thread | None = None
        self._busy = False
        self._breathe = Breath()
        self._warned: set[str] = set()
        self._swept = False

    def put(self, shape: MoeShape, M: int, rows: Sequence[Tried]) -> None:  # noqa: N803
        """Keep these trials; of two of one config the one with more samples stays. Without a folder: nothing."""
        if self._folder is None or not rows:
            return
        with self._changed:
            if sum(map(len, self._pending.values())) >= _MAX_PENDING:
                return  # the disk hangs, and memory is the server's
            self._pending.setdefault(shape, {}).setdefault(M, []).extend(rows)
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="moe-autotune-trials", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread is to be had: the next call tries again
                    thread.start()
                    self._thread = thread

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far was written or given up; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._pending) or self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending)
            time.sleep(_LATER_S)
            with self._changed:
                pending, self._pending = self._pending, {}
                self._busy = True
            for shape, ms in pending.items():
                try:
                    self._write(shape, ms)
                except (OSError, ValueError) as error:
                    self._warn(f"Trials of {shape.slug} are not kept: {error}")

    def _write(self, shape: MoeShape, fresh: dict[int, list[Tried]]) -> None:
        """Merge into the file of the shape. Raises OSError, and ValueError where what is there is not ours."""
        assert self._folder is not None  # noqa: S101 - put checks it
        if not shape_is_sound(shape):
            raise ValueError("the shape makes no sense")
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._folder.is_symlink():
            raise OSError(errno.ELOOP, "it must be a folder, not a link: remove it", str(self._folder))
        path, breathe = self._folder / file_name(self._key, shape), self._breathe
        breathe()
        with lock_file.hold(self._folder / ".lock", _LOCK_S):
            breathe()
            self._sweep(self._folder)
            document = _read(path, self._key, breathe)
            if isinstance(document, str):
                raise ValueError(f"{path} is left alone, since {document}: move it away")  # noqa: TRY004 - it is data
            before = {} if document is None else document.ms
            news = {m: _encoded([*self._known(path, m, before), *rows], breathe) for m, rows in fresh.items()}
            breathe()
            kept = itertools.islice({**news, **{m: raw for m, raw in before.items() if m not in news}}.items(), MAX_MS)
            text = _text(_Head(SCHEMA, self._key, shape), dict(sorted(kept)))
            if len(text) > MAX_BYTES:
                raise ValueError(f"they would take {len(text)} bytes: remove {path}")
            breathe()
            whole_file.replace(path, text)
            breathe()

    def _known(self, path: Path, m: int, before: dict[int, msgspec.Raw]) -> list[Tried]:
        rows = _rows(m, before[m], self._breathe) if m in before else []
        if isinstance(rows, str):
            raise ValueError(f"{path} is left alone, since {rows}: move it away")  # noqa: TRY004 - it is data
        return rows

    def _sweep(self, folder: Path) -> None:
        """Remove temporary files that killed writers left behind an hour ago or more."""
        if self._swept:
            return
        self._swept = True
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                self._breathe()
                old = time.time() - path.stat(follow_symlinks=False).st_mtime > _STALE_S
                if old and whole_file.is_temporary(path.name):
                    path.unlink()

    def _warn(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < _MAX_FILES:
            self._warned.add(message)
            logger.warning("%s", message)


def read(root: Path, environment: Environment) -> dict[MoeShape, dict[int, list[Tried]]]:
    """By shape and M the trials of an environment, the fastest first. What cannot be used costs a warning."""
    key, folder = environment_key(environment), root / FOLDER
    found: dict[MoeShape, dict[int, list[Tried]]] = {}
    try:
        names = sorted(n for n in os.listdir(folder) if n.startswith(f"{key}-") and n.endswith(".json"))  # noqa: PTH208
    except OSError:
        return found
    for name in names[:_MAX_FILES]:
        try:
            document = _read(folder / name, key)
        except OSError as error:
            document = str(error)
        if isinstance(document, str):
            logger.warning("%s is not used: %s", folder / name, document)
            continue
        for m, raw in sorted(document.ms.items())[:MAX_MS] if document is not None else ():
            assert document is not None  # noqa: S101 - for the types alone
            rows = _rows(m, raw)
            if isinstance(rows, str):
                logger.warning("%s is used in part: %s", folder / name, rows)
            elif rows:
                ms = found.setdefault(document.shape, {})
                ms[m] = merged([*ms.get(m, ()), *rows])
    return found


def merged(rows: Iterable[Tried], breathe: Callable[[], None] = no_breath) -> list[Tried]:
    """Of each GEMM and config the trial with the most samples; of each GEMM the fastest, and they first."""
    most: dict[tuple[Gemm, KernelConfig], Tried] = {}
    for row in rows:
        breathe()
        held = most.get((row.gemm, row.config))
        if held is None or (row.samples, -row.ratio) > (held.samples, -held.ratio):
            most[row.gemm, row.config] = row
    fastest = sorted(most.values(), key=lambda row: row.ratio)
    return [row for gemm in GEMMS for row in [r for r in fastest if r.gemm == gemm][:MAX_TRIALS]]


def environment_key(environment: Environment) -> str:
    """The name of the environment's file of records, without its ending."""
    return store.file_name(environment).removesuffix(".json")


def file_name(key: str, shape: MoeShape) -> str:
    """The file of a shape: safe on any file system, its own by the hash of all fields."""
    digest = hashlib.sha256(msgspec.json.encode(shape)).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9.]+", "-", shape.slug.lower()).strip("-.")[:48] or "unnamed"
    return f"{key}-{name}-{digest}.json"


def _read(path: Path, key: str, breathe: Callable[[], None] = no_breath) -> _Document | str | None:
    """One file; the reason why it cannot be used; None where there is none. Raises OSError."""
    found = whole_file.read(path, follow=False)
    if found is None or len(found[0]) > MAX_BYTES:
        return found and f"it has more than {MAX_BYTES >> 20} MiB"
    try:
        document = _document(found[0], breathe)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"it does not hold trials: {error}"
    if document.schema != SCHEMA:
        return f"it has schema {document.schema} and this version reads {SCHEMA}"
    if document.environment_key != key:
        return "it is of another environment"
    return document if shape_is_sound(document.shape) else "its shape makes no sense"


def _text(head: _Head, ms: dict[int, msgspec.Raw]) -> bytes:
    # One join: each further copy of a megabyte would keep the interpreter as long.
    parts = [msgspec.json.encode(head).removesuffix(b"}"), _MS, b"\n"]
    for m, raw in ms.items():
        parts += [b'"%d":' % m, raw, b",\n"]
    parts[-1] = b"\n"
    return b"".join([*parts, _END])


def _document(text: bytes, breathe: Callable[[], None]) -> _Document:
    """Line by line where it is as ``_text`` writes it; no M has several then. Raises what msgspec raises."""
    first, *lines = text.split(b"\n")
    if not (first.endswith(_MS) and lines and lines.pop() == _END):
        return msgspec.json.decode(msgspec.json.format(text, indent=-1), type=_Document)
    document = msgspec.json.decode(first + _END, type=_Document)
    for line in lines:
        breathe()
        document.ms.update(msgspec.json.decode(b"{%s}" % line.removesuffix(b","), type=dict[int, msgspec.Raw]))
    return document


def _rows(m: int, raw: msgspec.Raw, breathe: Callable[[], None] = no_breath) -> list[Tried] | str:
    """The trials of one M, or why they cannot be used."""
    try:
        rows = msgspec.json.decode(raw, type=list[_Row])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"M={m}: {error}"
    breathe()
    tried: list[Tried] = []
    for gemm, config, ratio, samples in rows:
        breathe()
        tried.append(row := Tried(gemm, KernelConfig(*config), ratio, samples))
        if not _is_sound(row):
            return f"M={m}: its trials make no sense"
    return tried if 1 <= m <= 1 << 24 else f"M={m}: its trials make no sense"


def _is_sound(row: Tried) -> bool:
    sound = math.isfinite(row.ratio) and 0 < row.ratio < 1e6 and 1 <= row.samples < 1 << 53
    return sound and pair_is_sound(ConfigPair(row.config, row.config), served=True)


def _encoded(rows: Iterable[Tried], breathe: Callable[[], None]) -> msgspec.Raw:
    """The text of one M. A config with keys of its own (another GPU's) has no place in the table and is left out."""
    packed = []
    for row in merged((row for row in rows if not row.config.extra and _is_sound(row)), breathe):
        breathe()
        packed.append((row.gemm, msgspec.structs.astuple(row.config)[:6], round(row.ratio, 5), row.samples))
    breathe()
    return msgspec.Raw(msgspec.json.encode(packed))
