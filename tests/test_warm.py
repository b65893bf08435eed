"""Launches that stand for serving's are not tuning's: what they compile, the server would have compiled as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import record_values as v

pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_moe_autotune.listener import CompileCount
from sglang_moe_autotune.warm import WarmProvider


@pytest.fixture
def compiles() -> CompileCount:
    return CompileCount()


def test_what_is_compiled_outside_of_tuning_is_not_counted_as_done_for_it(compiles: CompileCount) -> None:
    with compiles:
        compiles(cache_hit=False)
        with compiles.outside():
            compiles(cache_hit=False)
        compiles(cache_hit=False)
    with compiles.outside():
        compiles(cache_hit=False)
    assert (compiles.compiled, compiles.for_tuning) == (4, 2)


def test_a_fault_outside_leaves_the_count_as_it_was(compiles: CompileCount) -> None:
    with compiles:
        with pytest.raises(ZeroDivisionError), compiles.outside():
            raise ZeroDivisionError
        compiles(cache_hit=False)
    assert compiles.for_tuning == 1


def test_sglangs_own_config_is_compiled_once_and_not_for_tuning(
    compiles: CompileCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: Any = SimpleNamespace(open=lambda *_: SimpleNamespace(), compiler=None)
    monkeypatch.setattr(WarmProvider, "_launch", lambda *_: compiles(cache_hit=False))
    provider = WarmProvider(inner, compiles.outside)
    with compiles:
        for _ in range(2):
            provider.open(v.shape(), 64, v.heuristic(64))
    assert (compiles.compiled, compiles.for_tuning) == (1, 0)
