"""An export is opened by SGLang's own lookup, whatever the GPU is called and whatever the shape is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_moe_autotune import doctor
from sglang_moe_autotune.errors import ExportError
from sglang_moe_autotune.export import export
from sglang_moe_autotune.imports import ConfigTable, read_table
from sglang_moe_autotune.sglang_json import encode, file_name, parse, parse_name
from sglang_moe_autotune.shapes import KernelConfig, MoeShape

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import release_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = KernelConfig(32, 64, 64, 8, 4, 3)

# What a driver or a library may say. A name of more than 255 bytes is no file name on any system.
DEVICE = st.one_of(
    st.sampled_from(release_calls.DEVICES),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
    st.text("ABC 0-9[](),=_./'\"%{}", max_size=40),
)
SIZE = st.integers(1, 1 << 20)


@st.composite
def shapes(draw: st.DrawFn) -> MoeShape:
    e, n, k = draw(SIZE), draw(SIZE), draw(SIZE)
    dtype = draw(st.sampled_from([None, "float32", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16"]))
    block = draw(st.sampled_from([None, (128, 128), (64, 64), (0, 128), (0, 0), (32, 7)]))
    return MoeShape((e, 2 * n, k), (e, k, n), 8, dtype, block, draw(st.booleans()))


@pytest.fixture(scope="module")
def stock() -> Iterator[Any]:
    """The config module of the installed SGLang, as it stands."""
    root = doctor.sglang_root()
    if root is None:
        pytest.skip("SGLang is not installed in this environment: ./scripts/test makes one that has it")
    with release_calls.loaded(root) as module:
        yield module


def asked(stock: Any, shape: MoeShape, device: str, *, down: bool) -> str:
    """The name that SGLang's lookup builds: it passes [0, 0] where a shape has no blocks."""
    stock.get_device_name = lambda: device
    block = list(shape.block_shape) if shape.block_shape else [0, 0]
    name: str = stock.get_config_file_name(
        shape.E, shape.N, shape.dtype, block, shape.per_channel_quant, down_moe=down
    )
    return name


@pytest.mark.sglang
@settings(max_examples=200, deadline=None)
@given(shapes(), DEVICE, st.booleans())
@example(MoeShape((256, 1024, 1024), (256, 2048, 256), 8, "int4_w4a16", (0, 128)), "NVIDIA H200", False)
def test_c06_c07_a_name_is_what_sglangs_own_lookup_asks_for(
    stock: Any, shape: MoeShape, device: str, down: bool
) -> None:
    assert file_name(shape, device, down=down) == asked(stock, shape, device, down=down)


@pytest.mark.sglang
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes(), DEVICE)
@example(MoeShape((8, 64, 64), (8, 64, 32), 2), "AMD Radeon RX 7900 XT/7900 XTX")
@example(MoeShape((8, 64, 64), (8, 64, 32), 2), "")
@example(MoeShape((8, 64, 64), (8, 64, 32), 2), "a//b/./c/")
@example(MoeShape((8, 64, 64), (8, 64, 32), 2), "../../../escaped")
def test_an_export_is_what_sglangs_own_lookup_opens(
    stock: Any, tmp_path_factory: pytest.TempPathFactory, shape: MoeShape, device: str
) -> None:
    folder = tmp_path_factory.mktemp("export")
    try:
        done = export(release_calls.contents(device, shape), folder)
    except ExportError:
        assert ".." in device.split("/") or max(len(p.encode()) for p in f"{shape}{device}".split("/")) > 100
        assert list(folder.iterdir()) == []
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))
        stock.get_device_name = lambda: device
        for path, down in zip(done.paths, (False, True), strict=True):
            rows = parse(path.read_text(encoding="utf-8"))
            assert isinstance(rows, dict)
            stock.get_moe_configs.cache_clear()
            block = shape.block_shape or (0, 0)
            read = stock.get_moe_configs(
                shape.E, shape.N, shape.dtype, *block, per_channel_quant=shape.per_channel_quant, down_moe=down
            )
            assert read == {m: row.to_dict() for m, row in rows.items()}


def test_two_shapes_of_a_gpu_with_a_slash_do_not_meet_in_one_file(tmp_path: Path) -> None:
    small, large = MoeShape((8, 64, 64), (8, 64, 32), 2), MoeShape((8, 128, 64), (8, 64, 64), 2)
    one, two = (release_calls.contents("A/B", shape) for shape in (small, large))
    both = msgspec.structs.replace(one, records={**one.records, **two.records}, notes={**one.notes, **two.notes})
    for _ in range(2):  # an export over an earlier one is another way through the code
        done = export(both, tmp_path)
        assert len(set(done.paths)) == 4
        assert all(path.read_text(encoding="utf-8") for path in done.paths)
    assert [p.parent.name for p in done.paths].count("E=8,N=32,device_name=A") == 2


@given(st.sampled_from(release_calls.DEVICES), shapes())
def test_c12_c13_a_name_is_read_back_and_unlike_gpus_have_unlike_names(device: str, shape: MoeShape) -> None:
    name = file_name(shape, device)
    names = {d.replace(" ", "_"): file_name(shape, d) for d in release_calls.DEVICES}
    assert name == names.pop(device.replace(" ", "_"))
    assert name not in names.values()
    if "/" not in device:
        found = parse_name(name)
        assert found is not None
        assert found.device_name == device.replace(" ", "_")
        assert (found.E, found.N, found.dtype, found.per_channel_quant) == (
            shape.E, shape.N, shape.dtype, shape.per_channel_quant,
        )  # fmt: skip


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H20-3e", "", "A, Inc. GPU"])
def test_c12_an_imported_file_names_its_gpu_exactly(device: str) -> None:
    shape = MoeShape((8, 64, 64), (8, 64, 32), 2, "fp8_w8a8", (128, 128))
    found = read_table(file_name(shape, device), "triton_3_6_0", encode({64: ROW}))
    assert isinstance(found, ConfigTable)
    assert found.name.device_name == device.replace(" ", "_")
