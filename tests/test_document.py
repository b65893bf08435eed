"""A file's text: what is written is read back, what is not understood is kept, and nothing makes it raise."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import record_strategies as s
import record_values as v
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.document import MAX_BYTES, Unreadable, decode, encode
from sglang_moe_autotune.records import Contents, Record, with_changes


def _read(document: Any) -> Contents:
    contents = decode(json.dumps(document).encode())
    assert isinstance(contents, Contents), contents
    return contents


def _document(**changes: Any) -> dict[str, Any]:
    whole = json.loads(encode(v.contents(v.record(), v.note(None, 1, 64, served={64: 3}))))
    return {**whole, "records": [_spelt_out(v.record())], **changes}


def _spelt_out(record: Record) -> dict[str, Any]:
    """A record with its shape and pairs in place, as a person may write it."""
    text: dict[str, Any] = json.loads(msgspec.json.encode(record))
    return text


@s.QUICK
@given(s.documents())
def test_what_is_written_is_read_back(contents: Contents) -> None:
    text = encode(contents)
    assert decode(text) == contents
    assert json.loads(text)["schema"] == 1


@s.QUICK
@given(st.binary(max_size=200) | s.documents().map(encode), st.integers(0, 4000), st.binary(max_size=3))
def test_no_text_makes_it_raise(text: bytes, cut: int, patch: bytes) -> None:
    for damaged in (text, text[:cut], text[:cut] + patch + text[cut:]):
        found = decode(damaged)
        assert isinstance(found, Contents) or found.reason


def test_one_record_a_line_and_sorted_by_m() -> None:
    lines = encode(v.contents(*(v.record(m) for m in (64, 8, 16)))).decode().splitlines()
    assert [json.loads(line.strip(" ,"))["M"] for line in lines if '"verdict"' in line] == [8, 16, 64]


def test_unknown_fields_pass_through_an_older_version() -> None:
    document = _document(added={"whole": [1, 2.50]})
    document["environment"]["added"] = 123456789012345678901234567890
    document["records"][0]["added"] = "a"
    document["records"][0]["evidence"]["added"] = 1.0
    document["shapes"][0]["added"] = ["s"]
    contents = with_changes(_read(document), v.record(128), v.note(None, 128, served={64: 9}))
    written = json.loads(encode(contents))
    assert written["added"] == {"whole": [1, 2.50]}
    assert written["environment"] == document["environment"]
    assert written["records"][0] == document["records"][0]
    assert written["records"][1]["M"] == 128
    assert _read(written) == contents
    assert written["shapes"][0]["added"] == ["s"]
    assert written["shapes"][0]["served"] == {"64": 9}


def _with(path: str, value: Any) -> dict[str, Any]:
    """A good record with one thing changed or added."""
    record = _spelt_out(v.record(32))
    *parents, last = path.split(".")
    inner = record
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return record


BAD_RECORDS = [
    pytest.param(7, "Expected `object`", id="not an object"),
    pytest.param({"M": 4}, "missing required field", id="fields missing"),
    pytest.param(_with("M", 0), "M must be", id="M of 0"),
    pytest.param(_with("M", "32"), "Expected `int`", id="M is text"),
    pytest.param(_with("M", 10**40), "M must be", id="M beyond all bounds"),
    pytest.param(_with("verdict", "slower"), "Invalid enum value", id="unknown verdict"),
    pytest.param(_with("shape.w2_shape", [128, 0, 768]), "sizes must be", id="size of 0"),
    pytest.param(_with("shape.w2_shape", [64, 2048, 768]), "as many experts", id="experts differ"),
    pytest.param(_with("shape.dtype", "../../etc"), "short words", id="a path for a dtype"),
    pytest.param(_with("shape.mask", "causal"), "shape.mask is not known", id="a newer version's shape"),
    pytest.param(_with("pair.up.split_k", 4), "pair.up.split_k is not known", id="a newer version's config"),
    pytest.param(_with("pair.up.BLOCK_SIZE_N", 96), "power of two", id="tile of 96"),
    pytest.param(_with("pair.up.BLOCK_SIZE_M", 64), "share BLOCK_SIZE_M", id="C30 two sorts"),
    pytest.param(_with("pair.up.num_warps", 64), "num_warps", id="64 warps"),
    pytest.param(_with("pair.up.num_stages", 0), "num_stages", id="no stages"),
    pytest.param(_with("pair.up.extra", [["SPLIT_K", 2]]), "no launch option", id="a TypeError at launch"),
    pytest.param(_with("pair.up.extra", [["num_warps", 2]]), "no launch option", id="a second num_warps"),
    pytest.param(_with("evidence.gain", 1e999), "evidence.gain|Expected `float`|out of range", id="infinite"),
    pytest.param(_with("evidence.gain", None), "Expected `float`", id="no gain"),
    pytest.param(_with("evidence.samples", -1), "negative", id="negative samples"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_RECORDS)
def test_a_bad_record_spoils_nothing_else_and_stays(bad: Any, reason: str) -> None:
    document = _document()
    text = json.dumps({**document, "records": [bad, *document["records"]]}).replace("Infinity", "1e999")
    found = decode(text.encode())
    assert isinstance(found, Contents)
    assert found.records == v.contents(v.record()).records
    [unread] = found.unread
    assert re.search(reason, unread.reason), unread.reason
    again = decode(encode(found))
    assert again == found
    kept = json.loads(encode(found))["unread"][0]
    assert kept["kind"] == "record"
    assert "M" not in str(bad) or kept["raw"] == json.loads(json.dumps(bad))


def test_what_an_older_version_set_aside_is_used_by_one_that_can() -> None:
    good = json.loads(msgspec.json.encode(v.record(32)))
    found = _read(_document(unread=[{"kind": "record", "reason": "once unknown", "raw": good}, 5]))
    assert (v.shape(), 32) in found.records
    assert [u.raw for u in found.unread] == [b"5"]
    assert _read(json.loads(encode(found))) == found


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        pytest.param(b"", "broken", "truncated", id="empty"),
        pytest.param(encode(v.contents(v.record()))[:-40], "broken", "", id="cut short"),
        pytest.param(b"\0" * 4096, "broken", "", id="zeros after a power loss"),
        pytest.param(b"[]", "broken", "Expected `object`", id="a list"),
        pytest.param(b'{"schema": 1}', "broken", "environment", id="no environment"),
        pytest.param(b'{"environment": {}}', "broken", "schema", id="no schema"),
        pytest.param(b'{"schema": -1}', "broken", "schema", id="schema below 1"),
        pytest.param(b'{"schema": 1, "records": 3}', "broken", "Expected `array`", id="records no list"),
        pytest.param(b'{"schema": 1, "x": "\xff"}', "broken", "utf-8", id="not UTF-8"),
        pytest.param(b'{"x": ' + b"[" * 100_000, "broken", "recursion", id="nested without end"),
        pytest.param(b" " * (MAX_BYTES + 1), "broken", "more than", id="too large"),
        pytest.param(b'{"schema": 2, "environment": "other"}', "newer", "upgrade", id="a newer schema"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_value(text: bytes, state: str, reason: str) -> None:
    found = decode(text)
    assert isinstance(found, Unreadable)
    assert found.state == state
    assert reason in found.reason
