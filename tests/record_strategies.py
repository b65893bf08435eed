"""Hypothesis strategies over few shapes and M, so that two documents meet in the same keys."""

from __future__ import annotations

import msgspec
import record_values as v
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sglang_moe_autotune.records import Contents, Evidence, Record, ShapeNote, Unread, merge
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

QUICK = settings(
    max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no finding

_shapes = st.sampled_from(
    [v.shape(8), v.shape(16), v.shape(8, dtype="fp8_w8a8", block_shape=(128, 128)), v.shape(8, ep=True)]
)
_m = st.sampled_from([1, 2, 64])
_configs = st.builds(
    KernelConfig,
    st.just(64),
    st.sampled_from([32, 64]),
    st.sampled_from([32, 64]),
    st.sampled_from([1, 8]),
    st.sampled_from([None, 4, 8]),
    st.sampled_from([None, 3]),
    st.sampled_from([(), (("waves_per_eu", 2),)]),
)
_pairs = st.builds(ConfigPair, _configs, _configs)
_floats = st.floats(0, 1000)
_evidence = st.builds(
    Evidence,
    _floats,
    _floats,
    st.floats(-1, 1),
    st.sampled_from([0.0, 0.1]),
    st.floats(-1, 1),
    st.sampled_from([10, 20]),
    st.integers(0, 99),
    _floats,
    st.none() | _floats,
    st.none() | _floats,
)
pairs = _pairs
evidence = _evidence
records = st.builds(
    Record,
    _shapes,
    _m,
    st.sampled_from(["faster", "baseline"]),
    _pairs,
    _pairs,
    _evidence,
    st.sampled_from(["learned", "pinned", "imported", "replayed"]),
    unix_s=_floats,
    generation=st.integers(0, 2),
    revision=st.integers(0, 2),
)
notes = st.builds(
    ShapeNote,
    _shapes,
    st.dictionaries(_m, _pairs, max_size=2),
    st.dictionaries(_m, st.integers(0, 99), max_size=2),
    st.sampled_from(["miss", "fallback", "exact"]),
)
_texts = st.sampled_from([b"1", b'"two"', b'{"three":[3]}'])
_unknown = st.dictionaries(st.sampled_from(["later", "newer"]), _texts, max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> Contents:
    """Contents that a file can hold, unknown fields and unread entries included."""
    forgotten = draw(st.dictionaries(st.tuples(_shapes, _m), st.integers(1, 2), max_size=2))
    whole = Contents(v.H200, forgotten=forgotten, document_text=draw(_unknown))
    for value in draw(st.lists(records, max_size=4)):
        text = None
        if extra := draw(_unknown):
            raw = {k: msgspec.Raw(v) for k, v in extra.items()}
            text = msgspec.json.encode({**msgspec.structs.asdict(value), **raw})
        key = (value.shape, value.M)
        whole = merge(whole, Contents(v.H200, {key: value}, record_text={} if text is None else {key: text}))
    for value in draw(st.lists(notes, max_size=3)):
        extra = draw(_unknown)
        whole = merge(
            whole, Contents(v.H200, notes={value.shape: value}, note_text={value.shape: extra} if extra else {})
        )
    raws = draw(st.lists(st.sampled_from(sorted(_REASONS)), max_size=2))
    return merge(whole, Contents(v.H200, unread=tuple(Unread("record", raw, _REASONS[raw]) for raw in raws)))


_REASONS = {
    b"1": "Expected `object`, got `int`",
    b'"two"': "Expected `object`, got `str`",
    b'{"three":[3]}': "Object missing required field `shape`",
}
