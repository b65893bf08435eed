"""A recording is read strictly, and its replay answers from it and counts every launch."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from sglang_moe_autotune.errors import LandscapeError
from sglang_moe_autotune.landscape import Landscape, load, parse, shipped
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable

A = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}
B = A | {"num_stages": 3}
WIDE = A | {"BLOCK_SIZE_M": 128}
DEFAULT = {key: A[key] for key in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")}


def recording() -> dict[str, Any]:
    return {
        "E": 8,
        "N": 64,
        "K": 128,
        "topk": 2,
        "dtype": None,
        "block_shape": None,
        "candidates": [A, B, WIDE],
        "up_us": {"4": {"0": 10.0, "1": 8.0, "2": 1.0}},
        "down_us": {"4": {"0": 5.0, "1": 6.0}},
        "default": {"4": {"config": DEFAULT, "up_us": 12.0, "down_us": 7.0}},
        "out_of_resources": {"2": "out of resource: shared memory"},
        "field_of_a_later_version": [1],
    }


def made() -> Landscape:
    return parse(json.dumps(recording()).encode())


def test_values_of_a_small_recording() -> None:
    landscape = made()
    assert landscape.shape == MoeShape((8, 128, 128), (8, 128, 64), 2)
    assert landscape.ms == (4,)
    a, b = KernelConfig.from_dict(A), KernelConfig.from_dict(B)
    assert landscape.best(4) == (ConfigPair(b, a), 13.0)  # WIDE has no down GEMM to go with
    assert landscape.pair_us(4, landscape.baselines[4].pair) == 19.0
    assert landscape.latency_us(4, "down", KernelConfig.from_dict(WIDE)) is None


def test_gzip_is_optional() -> None:
    assert parse(gzip.compress(json.dumps(recording()).encode())) == made()


def test_the_shipped_file_says_what_the_facts_say() -> None:
    landscape = load(shipped()[0])
    assert landscape.shape.slug == "E128-N768-K2048-top8-bf16"
    assert len(landscape.candidates) == 576
    assert {m: round(landscape.best(m)[1], 1) for m in landscape.ms} == {
        2: 108.2, 16: 204.4, 64: 291.3, 256: 308.0, 1024: 364.1, 4096: 705.0,
    }  # fmt: skip


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(file: dict[str, Any]) -> None:
        *parents, last = path
        for key in parents:
            file = file[key]
        file[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(put("E", value="8"), "E", id="text-for-a-number"),
        pytest.param(put("candidates", value=[A, A, WIDE]), "equal", id="twins"),
        pytest.param(put("candidates", 0, value={"BLOCK_SIZE_M": 16}), "BLOCK_SIZE_N", id="config-without-keys"),
        pytest.param(put("up_us", "4", "9", value=1.0), "candidate '9'", id="no-such-candidate"),
        pytest.param(put("up_us", "4", "-1", value=1.0), "candidate '-1'", id="negative-index"),
        pytest.param(put("up_us", "4", "0", value=0.0), "positive", id="no-time"),
        pytest.param(put("default", "4", "down_us", value=-1.0), "positive", id="negative-time"),
        pytest.param(put("up_us", "8", value={}), "M=8", id="m-in-one-table"),
        pytest.param(put("default", value={}), "default", id="no-m"),
        pytest.param(put("out_of_resources", "x", value=""), "candidate 'x'", id="index-that-is-none"),
    ],
)
def test_a_wrong_recording_names_the_place(change: Callable[[dict[str, Any]], None], words: str) -> None:
    file = recording()
    change(file)
    with pytest.raises(LandscapeError, match=words):
        parse(json.dumps(file).encode())


@pytest.mark.parametrize("m", ["0", "-4", "x", "4.5"])
def test_a_key_that_is_no_m_is_refused(m: str) -> None:
    file = recording()
    for table in ("up_us", "down_us", "default"):
        file[table][m] = file[table].pop("4")
    with pytest.raises(LandscapeError, match="M"):
        parse(json.dumps(file).encode())


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", b"[]", gzip.compress(b"{}", mtime=0), b"\xff\xfe"])
def test_damaged_bytes_are_an_error_with_a_cure(content: bytes) -> None:
    with pytest.raises(LandscapeError, match="again"):
        parse(content)


def test_replay_statuses_and_account() -> None:
    landscape = made()
    provider = ReplayProvider(landscape, noise_percent=0, polls=2)
    pair = landscape.baselines[4].pair
    assert isinstance(provider.open(landscape.shape, 5, pair), str)
    assert isinstance(provider.open(MoeShape((1, 2, 3), (1, 3, 1), 1), 4, pair), str)
    bench = provider.open(landscape.shape, 4, pair)
    assert not isinstance(bench, str)
    b, wide, absent = KernelConfig.from_dict(B), KernelConfig.from_dict(WIDE), KernelConfig(16, 32, 64, 1, 8, 5)
    assert [bench.readiness("up", b) for _ in range(2)] == ["waiting", "ready"]
    assert [bench.readiness("down", wide) for _ in range(2)] == ["waiting", "failed"]
    assert bench.reason("down", wide) == "out of resource: shared memory"
    assert [bench.readiness("up", absent) for _ in range(2)] == ["waiting", "failed"]
    assert bench.reason("up", absent) == "not recorded"
    assert set(provider.compiled) == {b, wide}
    assert bench.measure("up", b, 3) == []  # the slice that loads
    assert bench.measure("up", b, 3) == [(8.0, 12.0)] * 3
    assert bench.sampling == (8, 1)
    assert bench.gpu_s == pytest.approx((8 + 3 * 8 * 20) * 1e-6) == provider.gpu_s


def test_compiles_queue_up_on_the_virtual_clock() -> None:
    provider = ReplayProvider(made(), compile_s=2.0)
    bench = provider.open(made().shape, 4, made().baselines[4].pair)
    assert not isinstance(bench, str)
    a, b = KernelConfig.from_dict(A), KernelConfig.from_dict(B)
    assert {bench.readiness("up", a), bench.readiness("up", b)} == {"waiting"}
    provider.wait(2.5)
    assert (bench.readiness("up", a), bench.readiness("up", b)) == ("ready", "waiting")
    provider.wait(2.0)
    assert bench.readiness("up", b) == "ready"


def test_noise_is_seeded_and_has_the_stated_size() -> None:
    def ratios(seed: int) -> list[float]:
        bench = ReplayProvider(made(), seed, noise_percent=2.0, polls=1).open(made().shape, 4, made().baselines[4].pair)
        assert not isinstance(bench, str)
        return [s.candidate_us / 8.0 for _ in range(200) for s in bench.measure("up", KernelConfig.from_dict(B), 5)]

    assert ratios(1) == ratios(1) != ratios(2)
    assert statistics.stdev(ratios(1)) == pytest.approx(0.02 / math.sqrt(8), rel=0.15)  # a sample is eight launches
