"""What SGLang answers and a GPU cannot launch is made to fit: stages first, then tiles; nothing else is touched."""

# ruff: noqa: PLC0415 - torch is not needed for the rest
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import record_values as v
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_moe_autotune.config_folder import StockAnswer
from sglang_moe_autotune.explain import Files, Manner, explain
from sglang_moe_autotune.fitting import Limit, fit, is_amd, limit_of, unfit
from sglang_moe_autotune.imports import from_pairs
from sglang_moe_autotune.lookup import CallKey, Lookup
from sglang_moe_autotune.records import ShapeNote, merge
from sglang_moe_autotune.search_space import illegal
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

ADA = Limit(101_376)
MI300 = Limit(65_536, all_stages=True)
PER_CHANNEL = MoeShape((128, 1408, 2816), (128, 2816, 704), 8, "fp8_w8a8", None, True)


def heuristic(m: int, experts: int = 128, stages: int = 4) -> ConfigPair:
    """SGLang's fp8 config without blocks: before 0.5.16 on every GPU, later on those with much shared memory."""
    small, large = KernelConfig(64, 128, 128, 1, 4, stages), KernelConfig(128, 256, 128, 32, 8, stages)
    return ConfigPair(*[small if m <= experts else large] * 2)


def test_c01_the_config_that_ends_small_gpus_loses_a_stage_and_nothing_else() -> None:
    assert ADA.need(heuristic(129).up, PER_CHANNEL) == 147_456
    fitted = fit(heuristic(129), PER_CHANNEL, ADA)
    assert fitted is not None
    assert fitted == ConfigPair(*[KernelConfig(128, 256, 128, 32, 8, 3)] * 2)
    assert ADA.need(fitted.up, PER_CHANNEL) == 98_304


def test_c02_on_hip_every_stage_counts() -> None:
    own = heuristic(129, stages=2)
    assert MI300.need(own.up, PER_CHANNEL) == 98_304
    fitted = fit(own, PER_CHANNEL, MI300)
    assert fitted is not None
    assert MI300.need(fitted.up, PER_CHANNEL) <= 65_536
    assert fitted.up == msgspec.structs.replace(own.up, num_stages=1)


@pytest.mark.parametrize("m", [1, 127, 128, 129, 4096, 65536])
@pytest.mark.parametrize("limit", [ADA, MI300], ids=["ada", "mi300"])
def test_c03_every_m_gets_a_config_that_fits(m: int, limit: Limit) -> None:
    served = fit(heuristic(m), PER_CHANNEL, limit) or heuristic(m)
    assert limit.holds(served.up, PER_CHANNEL)
    assert limit.holds(served.down, PER_CHANNEL)
    assert (served == heuristic(m)) == (m <= 128 and limit is ADA)  # 73,728 bytes fit the one, and not the other


def test_what_a_user_pins_is_held_to_the_limit_that_a_server_holds_rows_to() -> None:
    """On gfx950 every stage counts: two thirds of this config's need said that it fits."""
    gfx950 = msgspec.structs.replace(
        v.H200, device_name="AMD Instinct MI355X", capability=(9, 5), shared_memory_bytes=163_840
    )
    shape, config = MoeShape((32, 2048, 4096), (32, 4096, 1024), 4), KernelConfig(256, 256, 64, 1, 8, 3)
    pair, limit = ConfigPair(config, config), limit_of(gfx950)
    assert not limit.holds(config, shape)
    assert "a block may use 163840" in (unfit(pair, shape, limit) or "")
    assert from_pairs({64: pair}, shape, gfx950).records == ()
    assert unfit(pair, shape, Limit(0)) is None


def test_where_stages_are_not_enough_tiles_are_halved_and_the_shared_rows_last() -> None:
    fitted = fit(heuristic(129), PER_CHANNEL, Limit(40_000))
    assert fitted is not None
    assert fitted.up == KernelConfig(128, 128, 128, 32, 8, 2)
    tiny = fit(heuristic(129), PER_CHANNEL, Limit(3_000))
    assert tiny is not None
    assert tiny.up.BLOCK_SIZE_M == tiny.down.BLOCK_SIZE_M < 128
    assert fit(heuristic(129), PER_CHANNEL, Limit(100)) is None, "nothing fits: SGLang's answer stands"


def test_a_limit_that_nobody_knows_changes_nothing() -> None:
    assert fit(heuristic(129), PER_CHANNEL, Limit(0)) is None
    assert limit_of(msgspec.structs.replace(v.H200, shared_memory_bytes=101_376)) == ADA


@pytest.mark.parametrize(
    ("name", "capability", "size", "all_stages"),
    [
        pytest.param("AMD Instinct MI300X", (9, 4), 65_536, False, id="gfx942"),
        pytest.param("AMD Instinct MI350X", (9, 5), 163_840, True, id="gfx950"),
        pytest.param("NVIDIA H200", (9, 0), 232_448, False, id="hopper-has-tiles-of-either-kind"),
    ],
)
def test_stages_are_counted_as_compiled_kernels_count_them(
    name: str, capability: tuple[int, int], size: int, all_stages: bool
) -> None:
    gpu = msgspec.structs.replace(v.H200, device_name=name, capability=capability, shared_memory_bytes=size)
    assert limit_of(gpu) == Limit(size, all_stages)


@pytest.mark.parametrize(
    ("name", "amd"),
    [("NVIDIA L40S", False), ("AMD Radeon Graphics", True), ("AMD Instinct MI300X", True), ("", True)],
)
def test_amd_is_known_by_its_name(name: str, amd: bool) -> None:
    assert is_amd(name) == amd


@pytest.mark.parametrize("prepares", [0, 65_536], ids=["rocm-tells-no-more", "rocm-tells"])
def test_c13_amd_gpus_of_one_name_are_told_apart_by_arch_and_count_of_units(
    prepares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from sglang_moe_autotune import releases

    def gpu(major: int, minor: int, units: int) -> object:
        return SimpleNamespace(
            name="AMD Radeon Graphics", major=major, minor=minor, multi_processor_count=units, L2_cache_size=4 << 20,
            shared_memory_per_block=65_536, shared_memory_per_block_optin=prepares,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(releases, "kernel_hash", lambda _: "k")
    found = []
    for made in (gpu(9, 4, 304), gpu(11, 5, 40), gpu(9, 4, 228)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, made=made: made)
        found.append(releases.environment(len))
    assert len(set(found)) == 3, "gfx942, gfx1151 and a gfx942 of fewer units share no record"
    assert {e.shared_memory_bytes for e in found} == {65_536}


SIZES = st.sampled_from((16, 32, 64, 128, 256))
DEPTHS = st.sampled_from((32, 64, 128))
CONFIGS = st.builds(KernelConfig, SIZES, SIZES, DEPTHS, st.just(8), st.just(4), st.integers(1, 5))
SHAPES = st.sampled_from((
    PER_CHANNEL,
    MoeShape((64, 640, 1024), (64, 1024, 320), 6, "fp8_w8a8", (64, 64)),
    MoeShape((64, 512, 1024), (64, 1024, 256), 6, "int8_w8a8", (128, 128)),
    MoeShape((64, 512, 1024), (64, 1024, 256), 6),
    MoeShape((64, 512, 512), (64, 1024, 128), 6, "int4_w4a16", (0, 128)),
))  # fmt: skip


@given(CONFIGS, CONFIGS, SHAPES, st.sampled_from((48 << 10, 65_536, 101_376)), st.booleans())
def test_what_is_served_is_legal_fits_and_shares_its_rows(
    up: KernelConfig, down: KernelConfig, shape: MoeShape, size: int, all_stages: bool
) -> None:
    own = ConfigPair(up, msgspec.structs.replace(down, BLOCK_SIZE_M=up.BLOCK_SIZE_M))
    assume(not any(illegal(config, shape) for config in (own.up, own.down)))
    limit = Limit(size, all_stages)
    fitted = fit(own, shape, limit)
    if fitted is None:
        assert all(limit.holds(config, shape) for config in (own.up, own.down))
        return
    assert fitted.up.BLOCK_SIZE_M == fitted.down.BLOCK_SIZE_M
    for config, before in ((fitted.up, own.up), (fitted.down, own.down)):
        assert limit.holds(config, shape)
        assert illegal(config, shape) is None
        for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"):
            assert getattr(config, name) <= getattr(before, name)


KEY = CallKey(PER_CHANNEL.w1_shape, PER_CHANNEL.w2_shape, 8, "fp8_w8a8", None, True)
OWN = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 8}


def test_a_miss_hands_out_the_fitted_answer_in_sglangs_shape_and_keeps_it_as_the_baseline() -> None:
    lookup = Lookup()
    asked: list[int] = []

    def fitter(_key: CallKey, M: int, pair: ConfigPair) -> ConfigPair | None:  # noqa: N803
        asked.append(M)
        return fit(pair, PER_CHANNEL, ADA)

    lookup.fit = fitter
    own = {**OWN, "num_stages": 4}
    answers = [lookup.miss(KEY, 129, (own, (None, None))) for _ in range(3)]
    expected = {**OWN, "num_stages": 3}
    assert answers[0] == answers[2] == (expected, (expected, 128))
    assert answers[0][0] is not answers[2][0], "a caller may change what it is given"
    assert lookup.miss(KEY, 129, own) == expected
    assert asked == [129], "once for a call and an M"
    (seen,) = lookup.take_seen(9)
    assert seen.baseline == ConfigPair(*[KernelConfig(128, 256, 128, 32, 8, 3)] * 2)
    assert lookup.missed == {(KEY, 129): 4}
    assert lookup.fitted == 1
    assert lookup.miss(KEY, 1, ({**OWN, "num_stages": 2}, (None, None))) is None


def test_explain_says_that_it_was_made_to_fit_and_the_note_survives_a_merge() -> None:
    fitted = fit(heuristic(129), PER_CHANNEL, ADA)
    assert fitted is not None
    note = ShapeNote(PER_CHANNEL, {129: fitted}, unfit={129: heuristic(129)})
    contents = merge(v.contents(note), v.contents(ShapeNote(PER_CHANNEL)))
    step = explain(PER_CHANNEL, 129, contents, Manner(), Files(readable=True))[-1]
    assert step.pair == fitted
    assert "cannot launch SGLang's own 128x256x128 g32 w8 s4" in step.says


def test_explain_says_it_of_a_files_row_too() -> None:
    ada = msgspec.structs.replace(v.H200, device_name="NVIDIA L40S", shared_memory_bytes=101_376)
    found = StockAnswer("exact", Path("file.json"), 129, heuristic(129))
    steps = explain(PER_CHANNEL, 129, v.contents(environment=ada), Manner(), Files(readable=True, answer=found))
    (step,) = [step for step in steps if step.standing == "answers"]
    assert step.source == "exact file"
    assert step.pair == fit(heuristic(129), PER_CHANNEL, ADA)
    assert "made to fit" in step.says
