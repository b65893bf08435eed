"""What may be served: every value that the package itself makes, and nothing that a launch would choke on."""

from __future__ import annotations

import math

import msgspec
import pytest
import record_strategies as s
import record_values as v
from hypothesis import given

from sglang_moe_autotune.records import Evidence, Record, ShapeNote
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.validity import figures_are_sound, problem


@s.QUICK
@given(s.records, s.notes)
def test_sensible_values_pass(record: Record, note: ShapeNote) -> None:
    assert problem(record) is None
    assert problem(note) is None
    assert problem(v.H200) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["baseline_us", "gain", "max_error", "gpu_s"])
def test_figures_that_json_cannot_hold_are_refused(name: str, value: float) -> None:
    evidence = msgspec.structs.replace(v.record().evidence, **{name: value})
    assert f"evidence.{name}" in (problem(v.record(evidence=evidence)) or "")


def test_an_extra_key_is_a_launch_option_or_in_sglangs_own_answer() -> None:
    def config(key: str) -> ConfigPair:
        return ConfigPair(*[KernelConfig(64, 64, 64, 1, extra=((key, 1),))] * 2)

    assert problem(v.record(pair=config("waves_per_eu"))) is None
    assert "'NEW_KEY' is no launch option" in (problem(v.record(pair=config("NEW_KEY"))) or "")
    assert problem(v.record(pair=config("NEW_KEY"), baseline=config("NEW_KEY"))) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"sm_count": -1}, "sm_count", id="negative"),
        pytest.param({"capability": (9, -1)}, "capability", id="negative within a pair"),
        pytest.param({"device_name": "a\nb"}, "printable", id="line break"),
        pytest.param({"triton": "3" * 300}, "256", id="endless"),
    ],
)
def test_an_environment_has_printable_names_and_counts(change: dict[str, object], reason: str) -> None:
    assert reason in (problem(msgspec.structs.replace(v.H200, **change)) or "")


def test_a_note_counts_tokens_from_one() -> None:
    assert "M must be" in (problem(v.note(None, served={0: 1})) or "")
    assert "served[1]" in (problem(v.note(None, served={1: -1})) or "")
    assert "baselines[4].up" in (problem(ShapeNote(v.shape(), {4: v.pair(48)})) or "")


_NUMBERS = (-1, -0.5, 0, 1, 1e300, 1 << 60, math.nan, math.inf, -math.inf)
_FIGURES = (*Evidence.__struct_fields__, "M", "generation", "revision", "unix_s")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in _FIGURES for value in _NUMBERS),
        *((name, None) for name in ("max_error", "tolerance")),
        *((name, "x" * length) for name in ("sglang", "driver") for length in (0, 256, 257)),
    ],
)
def test_the_quick_check_of_figures_says_what_the_slow_one_says(name: str, value: object) -> None:
    record = v.record()
    if name in Evidence.__struct_fields__:
        record = v.record(evidence=msgspec.structs.replace(record.evidence, **{name: value}))
    else:
        record = msgspec.structs.replace(record, **{name: value})
    assert figures_are_sound(record) == (problem(record) is None)
