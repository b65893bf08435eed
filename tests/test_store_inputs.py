"""Whatever lies where the records should: one warning, nothing deleted, nothing crashes, and records live on."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_strategies as s
import record_values as v
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.document import MAX_BYTES, Unreadable, decode, encode
from sglang_moe_autotune.errors import StoreError
from sglang_moe_autotune.records import Contents
from sglang_moe_autotune.store import Store, change, environments, file_name, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GOOD = encode(v.contents(v.record(1), v.record(64), v.note(None, 1, 64, served={64: 3})))
NAME = file_name(v.H200)


def _json(**changes: Any) -> bytes:
    return json.dumps({**json.loads(GOOD), **changes}).encode()


def _row(**changes: Any) -> bytes:
    """The good document with one more record, which has this changed."""
    document = json.loads(GOOD)
    row = {**document["records"][0], "M": 32, **changes}
    return json.dumps({**document, "records": [*document["records"], row]}).encode()


def _figure(name: str, text: str) -> bytes:
    evidence = {**json.loads(GOOD)["records"][0]["evidence"], name: "@"}
    return _row(evidence=evidence).replace(b'"@"', text.encode())


def _environment(**changes: Any) -> bytes:
    return _json(environment={**json.loads(GOOD)["environment"], **changes})


BROKEN = {
    **{f"cut at {n} of 16": GOOD[: len(GOOD) * n // 16] for n in range(16)},
    "cut before its last brace": GOOD.rstrip()[:-1],
    "glued: twice the same": GOOD + GOOD,
    "glued: two documents": GOOD + b"{}",
    "glued: garbage behind": GOOD + b"\0\0",
    "glued: half behind a whole": GOOD + GOOD[:100],
    "one blank": b" ",
    "a line end": b"\n",
    "null": b"null",
    "true": b"true",
    "a number": b"17",
    "a text": b'"records"',
    "{}": b"{}",
    "[]": b"[]",
    "[{}]": b"[{}]",
    "NaN alone": b"NaN",
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a byte order mark alone": b"\xef\xbb\xbf",
    "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-32": GOOD.decode().encode("utf-32"),
    "Latin-1": _json(note="\u00fc").replace(b"\\u00fc", b"\xfc"),
    "a lone surrogate as bytes": b'{"schema": 1, "x": "\xed\xa0\x80"}',
    "zeros after a power loss": b"\0" * 4096,
    "a zero in the middle": GOOD[:200] + b"\0" + GOOD[200:],
    "gzip": b"\x1f\x8b\x08\x00" + bytes(60),
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00cposix\nsystem\n.",
    "an ELF file": b"\x7fELF" + bytes(60),
    "YAML": b"schema: 1\nrecords: []\n",
    "JSON lines": b'{"schema": 1}\n{"M": 1}\n',
    "a comment": b"// records\n" + GOOD,
    "a trailing comma": GOOD.rstrip()[:-1] + b",}",
    "single quotes": GOOD.replace(b'"', b"'"),
    "merge conflict": b"<<<<<<< ours\n" + GOOD + b"=======\n" + GOOD + b">>>>>>> theirs\n",
    "SGLang's own file": b'{"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}}',
    "an HTML page": b"<!doctype html><title>404</title>",
    "nested lists without end": b'{"x": ' + b"[" * 100_000,
    "nested objects without end": b'{"x":' * 50_000,
    "nested in a record": _row().replace(b'"M": 32', b'"M": ' + b"[" * 100_000),
    "a digit too many for memory": b'{"schema": ' + b"9" * 100_000 + b"}",
    "no schema": _json().replace(b'"schema": 1, ', b""),
    "schema null": _json(schema=None),
    "schema a text": _json(schema="1"),
    "schema 0": _json(schema=0),
    "schema negative": _json(schema=-3),
    "schema a fraction": _json(schema=1.5),
    "schema a list": _json(schema=[1]),
    "no environment": b'{"schema": 1}',
    "environment null": _json(environment=None),
    "environment a text": _json(environment="NVIDIA H200"),
    "environment a list": _json(environment=[]),
    "environment empty": _json(environment={}),
    "environment: a name missing": _json(environment={"device_name": "NVIDIA H200"}),
    "environment: a wrong type": _environment(sm_count="132"),
    "environment: negative": _environment(sm_count=-1),
    "environment: a huge number": _environment(l2_bytes=10**40),
    "environment: three in a pair": _environment(capability=[9, 0, 0]),
    "environment: an endless name": _environment(device_name="x" * 100_000),
    "environment: a line break": _environment(device_name="NVIDIA\nH200"),
    "environment: another GPU": _environment(device_name="NVIDIA B200"),
    "environment: another Triton": _environment(triton="3.8.1"),
    "records null": _json(records=None),
    "records an object": _json(records={"0": 1}),
    "records a number": _json(records=3),
    "shapes null": _json(shapes=None),
    "shapes a text": _json(shapes="E128"),
    "unread an object": _json(unread={}),
    "forgotten a number": _json(forgotten=1),
    "table null": _json(table=None),
    "table a list": _json(table=[]),
    "table: pairs an object": _json(table={"shapes": [], "pairs": {}}),
}

ODD = {
    "no such table": _json(table={}),
    "a place behind the table": _row(pair=99),
    "a place before the table": _row(shape=-1),
    "a fraction of a place": _row(shape=0.5),
    "a place as a text": _row(shape="0"),
    "a place beyond all bounds": _row(shape=10**30),
    "a record null": _row().replace(b'"M": 32', b'"M": null'),
    "a record is a list": _json(records=[[], *json.loads(GOOD)["records"]]),
    "a record is a number": _json(records=[1, *json.loads(GOOD)["records"]]),
    "a record is empty": _json(records=[{}, *json.loads(GOOD)["records"]]),
    "M of 0": _row(M=0),
    "M negative": _row(M=-4),
    "M a text": _row(M="32"),
    "M a fraction": _row(M=32.5),
    "M huge": _row(M=10**40),
    "M true": _row(M=True),
    "an unknown verdict": _row(verdict="slower"),
    "an unknown source": _row(source="guessed"),
    "a negative generation": _row(generation=-1),
    "a generation beyond all others": _row(generation=1 << 52),
    "a negative revision": _row(revision=-1),
    "a revision beyond all others": _row(revision=1 << 52),
    "time negative": _row(unix_s=-1),
    "an endless driver": _row(driver="5" * 300),
    "no evidence": _row(evidence=None),
    "evidence a list": _row(evidence=[]),
    "samples a fraction": _figure("samples", "1.5"),
    "samples huge": _figure("samples", "9" * 30),
    "gain NaN as a text": _figure("gain", '"NaN"'),
    "gain beyond a double": _figure("gain", "1e999"),
    "time of 1e300": _figure("baseline_us", "1e300"),
    "negative GPU time": _figure("gpu_s", "-1"),
    "a shape null": _row(shape=None),
    "a pair null": _row(pair=None),
    "a pair is one config": _row(pair={"BLOCK_SIZE_M": 64}),
    "a shape in the table has an unknown field": _json(
        table={**json.loads(GOOD)["table"], "shapes": [{**json.loads(GOOD)["table"]["shapes"][0], "mask": "causal"}]}
    ),
    "a tile of 96 in the table": GOOD.replace(b'"BLOCK_SIZE_N":64', b'"BLOCK_SIZE_N":96'),
    "two sorts in the table": GOOD.replace(b'"down":{"BLOCK_SIZE_M":32', b'"down":{"BLOCK_SIZE_M":64'),
    "a note is a number": _json(shapes=[7]),
    "a note without a shape": _json(shapes=[{"served": {"1": 1}}]),
    "a note of M 0": GOOD.replace(b'"served":{"64":3}', b'"served":{"0":3}'),
    "a forgotten place is a number": _json(forgotten=[5]),
    "unread of an unknown kind": _json(unread=[{"kind": "plan", "reason": "", "raw": {}}]),
    "unread is no object": _json(unread=[1, None, "x"]),
}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def _bytes_below(folder: Path) -> Iterator[bytes]:
    return (path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root" / NAME


def test_the_table_is_long_enough() -> None:
    assert len(BROKEN) + len(ODD) + len(PLACES) >= 100
    assert isinstance(decode(GOOD), Contents)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_set_aside_whole_with_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    path.write_bytes(text)
    with pytest.raises(StoreError, match=NAME):
        change(path, _refuse_another)
    assert path.read_bytes() == text
    store = Store.open(path.parent, v.H200)
    store.submit(record=v.record(8))
    assert store.flush(30)
    assert store.state == "disk"
    [warning] = _warnings(caplog)
    assert "set aside" in warning
    assert text in _bytes_below(path.parent)
    assert {m for _, m in read(path).records} == {8}


def _refuse_another(contents: Contents) -> Contents:
    """What a command does with a file of another environment is its own affair: here it stops."""
    if contents.environment != v.H200:
        raise StoreError(f"{NAME} holds another environment")
    return contents


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_an_odd_entry_is_kept_unused_and_spoils_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    path.write_bytes(text)
    before = read(path)
    assert before.unread
    store = Store.open(path.parent, v.H200)
    store.submit(record=v.record(8))
    assert store.flush(30)
    after = read(path)
    assert after.records == {**before.records, (v.shape(), 8): v.record(8)}
    assert after.unread == before.unread
    assert len(_warnings(caplog)) <= 1
    assert len(environments(path.parent)[0].problems) == len(before.unread)


@pytest.mark.parametrize("schema", [2, 99, 1 << 40])
def test_a_newer_schema_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture, schema: int) -> None:
    text = _json(schema=schema)
    path.write_bytes(text)
    store = Store.open(path.parent, v.H200)
    store.submit(record=v.record(8))
    assert not store.flush(5)
    with pytest.raises(StoreError, match="upgrade"):
        change(path, lambda contents: contents)
    assert path.read_bytes() == text
    assert [p.name for p in path.parent.iterdir() if p.name != f"{NAME}.lock"] == [NAME]
    assert len(_warnings(caplog)) == 1


def _link_to_records_outside(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(GOOD)
    path.symlink_to("../outside")


def _link_to_a_file_outside(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"precious")
    path.symlink_to("../outside")


def _dangling_link(path: Path) -> None:
    path.symlink_to("../nothing")


def _link_in_a_circle(path: Path) -> None:
    path.symlink_to(path.name)


def _two_links_in_a_circle(path: Path) -> None:
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"precious")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _full_device(path: Path) -> None:
    path.symlink_to("/dev/full")


def _lock_is_a_link(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"precious")
    path.with_name(f"{NAME}.lock").symlink_to("../outside")


def _lock_is_a_folder(path: Path) -> None:
    path.with_name(f"{NAME}.lock").mkdir()


def _lock_is_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name(f"{NAME}.lock"))


def _spares_are_a_file(path: Path) -> None:
    path.with_name(f"{NAME}.d").write_bytes(b"precious")


def _spares_are_a_link(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.mkdir()
    (outside / f"1-{'0' * 16}.json").write_bytes(GOOD)
    os.utime(outside / f"1-{'0' * 16}.json", (1, 1))
    path.with_name(f"{NAME}.d").symlink_to(outside)


def _spares_are_odd(path: Path) -> None:
    folder = path.with_name(f"{NAME}.d")
    folder.mkdir()
    (path.parent.parent / "outside").write_bytes(GOOD)
    (folder / f"1-{'1' * 16}.json").symlink_to("../../outside")
    os.mkfifo(folder / f"1-{'2' * 16}.json")
    (folder / f"1-{'3' * 16}.json").mkdir()
    (folder / f"1-{'4' * 16}.json").write_bytes(b"precious")
    (folder / "notes.txt").write_bytes(b"precious")
    for name in ("notes.txt", f"1-{'4' * 16}.json"):
        os.utime(folder / name, (1, 1))


PLACES: list[Callable[[Path], None]] = [
    *(_link_to_records_outside, _link_to_a_file_outside, _dangling_link, _link_in_a_circle, _two_links_in_a_circle),
    *(_folder, _pipe, _device, _full_device, _lock_is_a_link, _lock_is_a_folder, _lock_is_a_pipe),
    *(_spares_are_a_file, _spares_are_a_link, _spares_are_odd),
]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__.strip("_"))
def test_what_lies_in_a_files_place_is_never_followed_or_deleted(
    path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    make(path)
    tree = {p: p.lstat().st_ino for p in path.parent.parent.rglob("*")}
    texts = sorted(_bytes_below(path.parent.parent))
    store = Store.open(path.parent, v.H200)
    store.submit(record=v.record(8))
    kept = store.flush(30)
    assert kept == (store.state == "disk")
    assert len(_warnings(caplog)) == (0 if kept and not list(path.parent.glob("*.broken-*")) else 1)
    assert (v.shape(), 8) in store.contents.records
    if kept:
        assert (v.shape(), 8) in read(path).records
    now = sorted(_bytes_below(path.parent.parent))
    assert all(text in now for text in texts)
    outside = {p: inode for p, inode in tree.items() if path.parent not in p.parents and p != path.parent}
    assert {p: p.lstat().st_ino for p in outside} == outside


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ESTALE], ids=os.strerror
)
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_disk_that_refuses_costs_one_warning_and_no_record(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, step: str, error: int
) -> None:
    path.write_bytes(GOOD)
    real = whole_file.replace

    def refuse(place: Path, text: bytes) -> os.stat_result:
        with monkeypatch.context() as patch:
            patch.setattr(os, step, lambda *_, **__: (_ for _ in ()).throw(OSError(error, os.strerror(error))))
            return real(place, text)

    store = Store.open(path.parent, v.H200)
    monkeypatch.setattr(whole_file, "replace", refuse)
    for m in (8, 9):
        store.submit(record=v.record(m))
        assert not store.flush(30)
    assert store.state == "memory"
    assert path.read_bytes() == GOOD
    assert len(_warnings(caplog)) == 1
    monkeypatch.setattr(whole_file, "replace", real)
    store.submit(record=v.record(10))
    assert store.flush(30)
    assert {m for _, m in read(path).records} == {1, 8, 9, 10, 64}
    assert not list(path.parent.rglob("*.tmp"))


def test_a_disk_that_takes_half_of_a_write_and_no_more(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(GOOD)
    store = Store.open(path.parent, v.H200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, limits[1]))
    try:
        store.submit(record=v.record(8))
        assert not store.flush(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == GOOD
    assert not list(path.parent.rglob("*.tmp"))
    assert len(_warnings(caplog)) == 1
    assert store.close(30), "the last flush tries again"
    assert {m for _, m in read(path).records} == {1, 8, 64}


def test_a_file_beyond_the_limit_is_neither_read_nor_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES * 16)
    found = whole_file.read(path)
    assert found is not None
    assert len(found[0]) == MAX_BYTES + 1
    monkeypatch.setattr(whole_file, "MAX_BYTES", 100)
    with pytest.raises(OSError, match="would take 101 bytes"):
        whole_file.replace(path.with_name("new"), b"x" * 101)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _places(value[key], (*path, key))


@s.QUICK
@given(st.data())
def test_whatever_stands_at_any_place_is_read_as_a_value_and_again_the_same(data: st.DataObject) -> None:
    document = json.loads(GOOD)
    path = data.draw(st.sampled_from([p for p in _places(document) if p]), label="place")
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    action = data.draw(st.sampled_from(["replace", "remove", "copy"]), label="action")
    if action == "remove":
        del inner[path[-1]]
    elif action == "copy":
        inner[path[-1]] = json.loads(GOOD)
    else:
        inner[path[-1]] = data.draw(_values, label="value")
    found = decode(json.dumps(document).encode())
    if isinstance(found, Unreadable):
        assert found.reason
    else:
        assert decode(encode(found)) == found


@s.QUICK
@given(st.binary(max_size=300), st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
def test_bytes_put_into_a_good_file_are_read_as_a_value_and_again_the_same(patch: bytes, start: int, end: int) -> None:
    for text in (patch, GOOD[:start] + patch + GOOD[end:]):
        found = decode(text)
        if isinstance(found, Unreadable):
            assert found.reason
        else:
            assert decode(encode(found)) == found


def test_the_fields_of_a_row_are_those_of_a_record() -> None:
    from sglang_moe_autotune.record_rows import Row  # noqa: PLC0415 - the one place that looks at it
    from sglang_moe_autotune.records import Record  # noqa: PLC0415 - as above

    assert Row.__struct_fields__ == Record.__struct_fields__
    assert Row.__struct_defaults__ == Record.__struct_defaults__
    assert msgspec.json.decode(msgspec.json.encode(v.record()), type=Record) == v.record()
