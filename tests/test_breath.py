"""Threads beside the one that serves work in parts: whatever they have before them, they let it go on in between."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import effort
import msgspec
import pytest
import record_values as v
from replayed_serving import replayed_serving

from sglang_moe_autotune import breath, document, held, inquest, live, metrics, records, server_info, status, trials
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.hearsay import Heard
from sglang_moe_autotune.journal import Announced, Closed, Writer
from sglang_moe_autotune.layers import call_key
from sglang_moe_autotune.leases import Leases
from sglang_moe_autotune.ranks import Ranks
from sglang_moe_autotune.record_file import RecordFile
from sglang_moe_autotune.settings import Settings
from sglang_moe_autotune.shapes import GEMMS, KernelConfig
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.tried import Tried

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST_LINES = 1500
"""of Python in a row, some 0.1 ms: a lock on a file takes 1,100 of them, 32 rows of a store 1,400"""

SHAPES = [v.shape(8 * n) for n in range(1, 9)]
MS = range(1, 26)
CONFIGS = [KernelConfig(16 << a, 16 << b, 64, 1 + g, 4) for a in range(5) for b in range(5) for g in range(4)]
TRIED = [Tried(gemm, config, 1 + n / 1000, 5) for gemm in GEMMS for n, config in enumerate(CONFIGS)]


def contents(samples: int = 40) -> records.Contents:
    """200 rows of 8 shapes, and a note for each with 100 M. Each call makes values of its own."""
    notes = [v.note(shape, *range(1, 101), served=dict.fromkeys(range(1, 101), samples)) for shape in SHAPES]
    rows = [v.record(m, shape, samples=samples, pair=v.pair(16 << m % 4)) for shape in SHAPES for m in MS]
    return v.contents(*notes, *rows)


def encode(_: Path) -> Callable[[], object]:
    found = contents()
    return lambda: document.encode(found, Breath())


def decode(_: Path) -> Callable[[], object]:
    text = document.encode(contents())
    return lambda: document.decode(text, Breath())


def merge(_: Path) -> Callable[[], object]:
    ours, theirs = contents(), contents(41)
    return lambda: records.merge(ours, theirs, Breath())


def update(folder: Path) -> Callable[[], object]:
    """Another writer has changed each row and each note since."""
    file = RecordFile(folder / "store.json", Breath())
    file.update(contents())
    RecordFile(folder / "store.json").update(contents(41))
    ours = contents(42)
    return lambda: file.update(ours)


def keep_trials(folder: Path) -> Callable[[], object]:
    log = trials.TrialLog(folder, v.H200)
    log._write(SHAPES[0], {m: list(TRIED) for m in range(1, 45)})
    fresh = {m: [row._replace(samples=9) for row in TRIED] for m in (7, 50)}
    return lambda: log._write(SHAPES[0], fresh)


def serving(folder: Path) -> Any:
    found = replayed_serving(tuple(range(1, 33)), deferred=None)
    found.store = Store.open(None, v.H200)
    found.store._contents = contents()
    found.overlay.shapes = tuple(SHAPES)
    found.lookup.publish([(call_key(r.shape), r.M, r.pair) for r in contents().records.values()])
    candidates = [held.Candidate("made up", SHAPES[0], "up", config) for config in CONFIGS]
    refused = tuple(held.Held(one, "it was slow", 64, 0.0) for one in candidates)
    found.device.provider.quarantine = SimpleNamespace(held=refused)
    found.device.environment = v.H200
    found.device.binaries = None
    found.root, found.settings, found.metrics = folder, Settings(), None
    found.hooks, found.since_unix_s, found.mark = dict, 0.0, None
    found.watch = SimpleNamespace(quantile_us=float, longest_us=0.0, longest_did="", broken=0, pauses=0)
    found.idle_time = SimpleNamespace(total_s=1.0, deep_s=1.0, windows=1, settled=1, expected_s=float)
    return found


def tell_status(folder: Path) -> Callable[[], object]:
    found = serving(folder)
    live._turn(found, 1)
    return lambda: live._turn(found, 1, Breath())


def describe(folder: Path) -> Callable[[], object]:
    found = serving(folder)
    return lambda: server_info.describe(found, Breath())


def observe(folder: Path) -> Callable[[], object]:
    """With SGLang's metrics in the place of prometheus_client's, which are made once in a process."""
    metric = SimpleNamespace(set=lambda _: None, inc=lambda _: None, observe=lambda _: None)

    def family(**_: Any) -> Any:
        return SimpleNamespace(labels=lambda **_: metric)

    classes = dict.fromkeys(("_gauge_cls", "_counter_cls", "_histogram_cls"), family)
    collector = SimpleNamespace(labels={"model_name": "m"}, **classes)
    found, kept = serving(folder), metrics.Metrics(collector)
    kept.slices_s.extend([0.0004] * 5000)
    return lambda: kept.update(found)


def sweep(folder: Path) -> Callable[[], object]:
    for pid in range(1, 60):
        owner = status.this_process()._replace(pid=1 << 22 | pid)
        assert status.write(folder, status.LiveStatus(**owner._asdict(), unix_s=time.time(), since_unix_s=0.0))
    status.read(folder)  # msgspec looks into a type once
    return lambda: live.sweep(folder, Breath())


def read_journals(folder: Path) -> Callable[[], object]:
    (folder / held.FOLDER).mkdir()
    for number in range(8):
        owner = status.this_process()._replace(pid=1 << 22 | number, boot_id="of another machine", host="node-2")
        lines: list[Any] = [Writer(owner, "made up", "server")]
        for at, config in enumerate(CONFIGS):
            candidate = held.Candidate("made up", SHAPES[0], "up", config)
            lines += [Announced(at, "a launch", candidate, 64, time.time()), Closed(at)]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        (folder / held.FOLDER / f"{number}.journal").write_bytes(text)
    return lambda: inquest.hold(folder, read_only=True)


def confer(folder: Path) -> Callable[[], object]:
    """A turn of a rank after all that can come together: rows of another server, a table that was decided, searches of
    the other rank, and leases that another process has on what this one wants."""
    store = Store.open(folder, v.H200)
    assert store.path is not None
    first, second = (Ranks(store, Place(rank, 2, 1), "learned", 0.01) for rank in range(2))
    first.turn()
    second.turn()
    table = second.table
    for record in contents().records.values():
        table = table.with_row(record)
    assert first._council is not None
    first._council.table = table
    first._council._board.write_table(table)
    for _ in range(4):
        first.tell(Heard(SHAPES[0], 64, tuple((row.gemm, row.config, row.ratio) for row in TRIED)))
    first.turn()
    other = Leases(store.path.with_name(f"{store.path.name}.leases"), status.this_process())
    second.wish(tuple((SHAPES[0], m) for m in MS))
    assert all(other.take(key) for key in second.wanted)
    store._contents = contents()

    def turn() -> None:
        second.turn()
        assert (second.table, len(second.heard), len(second.news)) == (table, 4, 200)
        assert len(second.elsewhere) == len(MS)

    return turn


def keep_binaries(folder: Path) -> Callable[[], object]:
    """Some of 100 loaded ones are new, and the folder is about to be full."""
    binaries = pytest.importorskip("sglang_moe_autotune.binaries", reason="needs Triton")
    kernel = SimpleNamespace(__name__="kernel", device_caches={0: ({}, {}, None, None, None)})

    def load(number: int) -> None:
        digest = f"{number:064x}"
        (folder / digest).mkdir()
        group = {name: folder / digest / name for name in ("kernel.json", "kernel.cubin")}
        group["kernel.json"].write_text(json.dumps({"hash": digest, "name": "kernel"}))
        group["kernel.cubin"].write_bytes(bytes(range(256)) * 256)
        named = {name: str(path) for name, path in group.items()}
        kernel.device_caches[0][0][number] = SimpleNamespace(
            hash=digest, kernel=group["kernel.cubin"].read_bytes(), metadata_group=named
        )

    for number in range(90):
        load(number)
    kept = binaries.Binaries(folder, "environment", (kernel,))
    assert kept.keep() == 90
    for number in range(binaries.MOST - 90):
        (folder / binaries.FOLDER / "environment" / f"{1 << 20 | number:064x}.zip").write_bytes(b"of another start")
    for number in range(90, 100):
        load(number)
    return lambda: kept.keep(Breath())


WORKS = [
    encode, decode, merge, update, keep_trials, tell_status, describe, observe, sweep, read_journals, confer,
    keep_binaries,
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_no_part_of_a_work_is_long(work: Callable[[Path], Callable[[], object]], tmp_path: Path) -> None:
    for folder in ("all", "parts"):
        (tmp_path / folder).mkdir()
    whole = effort.lines(work(tmp_path / "all"))
    assert effort.stretch(work(tmp_path / "parts")) < MOST_LINES < whole, "the whole must be worth parts"


def test_a_breath_is_drawn_where_the_last_one_was_some_time_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = 0.0, []

    def sleep(length_s: float) -> None:
        nonlocal now_s
        slept.append(now_s)
        now_s += length_s

    monkeypatch.setattr(breath, "time", SimpleNamespace(perf_counter=lambda: now_s, sleep=sleep))
    drawn = Breath()
    for _ in range(1000):
        now_s += 1e-6
        drawn()
    assert 3 <= len(slept) <= 1000 / (breath.EVERY_S * 1e6)
    assert all(later - earlier > breath.EVERY_S for earlier, later in itertools.pairwise(slept))
    slept.clear()
    drawn.needed = False
    now_s += 1.0
    drawn()
    assert not slept


def test_nobody_else_waits_while_a_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordFile(Store.open(tmp_path, v.H200).path or tmp_path).update(contents())
    slept: list[float] = []
    monkeypatch.setattr(breath, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=slept.append))
    store = Store.open(tmp_path, v.H200)
    assert len(store.contents.records) == 200
    assert not slept
    store.submit(record=v.record(99))
    assert store.close(10)
    assert slept


def test_a_store_that_could_not_be_read_is_written_in_parts_later_and_at_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: asked.append(call))
    with monkeypatch.context() as away:
        away.setattr(RecordFile, "read", lambda _: (_ for _ in ()).throw(OSError(5, "the disk is away")))
        store = Store.open(tmp_path, v.H200)
    slept: list[float] = []
    monkeypatch.setattr(breath, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=slept.append))
    store.submit(record=v.record(99))
    assert store.flush(10)
    assert slept
    assert asked, "nothing is lost where this process ends"
    assert store.close(10)
