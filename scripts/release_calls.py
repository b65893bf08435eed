"""A release's own lookup, called: file names, the files it opens, and what it returns.

The one module is loaded from its file. What it imports is replaced, so that neither torch nor SGLang has to be
installed; what is called is the release's own code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from sglang_moe_autotune.export import export
from sglang_moe_autotune.records import Contents, Environment, Evidence, Record, ShapeNote
from sglang_moe_autotune.sglang_json import file_name, parse
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.targets import LOOKUP

if TYPE_CHECKING:
    from collections.abc import Iterator

TRITON = "3.6.0"
DEVICES = (
    "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H20-3e", "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GB10",
    "NVIDIA GeForce RTX 4090", "Tesla T4", "AMD Instinct MI300X", "AMD Radeon Graphics",
    "AMD Radeon RX 7900 XT/7900 XTX",
    "Radeon [RX 6800/6800 XT / 6900 XT]", "A, Inc. GPU", "", " ", "GPU (tm) 100%", "\u30c6\u30b9\u30c8 GPU",
)  # fmt: skip
"""names as drivers and libraries give them, and names that would break a careless grammar"""

_W = ((128, 1536, 2048), (128, 2048, 768))
SHAPES = (
    MoeShape(*_W, 8),
    MoeShape(*_W, 8, "float32", activation_dtype="float32"),
    MoeShape(*_W, 8, "fp8_w8a8"),
    MoeShape(*_W, 8, "fp8_w8a8", (128, 128)),
    MoeShape(*_W, 8, "fp8_w8a8", (64, 128)),
    MoeShape(*_W, 8, "fp8_w8a8", None, per_channel_quant=True),
    MoeShape(*_W, 8, "int8_w8a8", None, per_channel_quant=True),
    MoeShape(*_W, 8, "int8_w8a16"),
    MoeShape((256, 1024, 1024), (256, 2048, 256), 8, "int4_w4a16", (0, 128)),
)


class _Stub(types.ModuleType):
    """A module that has every name, for imports that this check does not need."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Stubs:
    """Finds a stub for each of these packages and all below them."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.partition(".")[0] in self._packages:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


@contextlib.contextmanager
def loaded(root: Path) -> Iterator[Any]:
    """The release's config module; ``device`` names its GPU from then on, Triton is ``TRITON``."""
    path = root.joinpath(*LOOKUP.module.split(".")).with_suffix(".py")
    ours = {name for name in sys.modules if name.partition(".")[0] in {"torch", "triton", "sglang"}}
    with mock.patch.dict(sys.modules):
        for name in ours:
            del sys.modules[name]
        finder: Any = _Stubs("torch", "triton", "sglang")
        sys.meta_path.insert(0, finder)
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            spec = importlib.util.spec_from_file_location("release_config", path)
            if spec is None or spec.loader is None:
                raise ImportError(path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            setattr(module, "triton", types.SimpleNamespace(__version__=TRITON))  # noqa: B010 - a module of unknown names
            _answer_no(module)
            yield module
        finally:
            logging.disable(before)
            sys.meta_path.remove(finder)


def _answer_no(module: Any) -> None:
    """No deterministic inference, no HIP, no override: what a plain server has."""
    off = types.SimpleNamespace(enable_deterministic_inference=False)
    for name in ("get_server_args", "get_global_server_args"):
        if hasattr(module, name):
            setattr(module, name, lambda: off)
    if hasattr(module, "get_exec"):
        module.get_exec = lambda: types.SimpleNamespace(deterministic=off)
    module._is_hip = False
    if hasattr(module, "_use_low_smem_fp8_default"):
        module._use_low_smem_fp8_default = lambda: False
    importlib.import_module(LOOKUP.module.rpartition(".")[0]).get_config = lambda: None  # type: ignore[attr-defined]


def wrong(root: Path) -> list[str]:
    """What is not as this package counts on it; nothing where all is."""
    with loaded(root) as config, tempfile.TemporaryDirectory() as folder:
        return [*_names(config), *_files(config, Path(folder)), *_returns(config, Path(folder))]


def _block(shape: MoeShape) -> list[int]:
    return list(shape.block_shape) if shape.block_shape else [0, 0]


def _names(config: Any) -> Iterator[str]:
    for device, shape, down in itertools.product(DEVICES, SHAPES, (False, True)):
        config.get_device_name = lambda device=device: device
        name = config.get_config_file_name(
            shape.E, shape.N, shape.dtype, _block(shape), shape.per_channel_quant, down_moe=down
        )
        if name != (ours := file_name(shape, device, down=down)):
            yield f"it looks for {name}, not for {ours}"


def record(shape: MoeShape, m: int) -> Record:
    pair = ConfigPair(KernelConfig(32, 64, 64, 8, 4, 3), KernelConfig(32, 128, 64, 1, 8, 2))
    own = KernelConfig(64, 64, 32, 8)
    evidence = Evidence(100.0, 80.0, 0.2, 0.1, 0.3, 24, 10, 0.1)
    return Record(shape, m, "faster", pair, ConfigPair(own, own), evidence, source="learned")


def contents(device: str, shape: MoeShape) -> Contents:
    environment = Environment(device, (9, 0), 132, 232448, 1 << 25, TRITON, "0" * 16)
    own = KernelConfig(64, 64, 32, 8)
    note = ShapeNote(shape, {m: ConfigPair(own, own) for m in (1, 4096)})
    return Contents(environment, {(shape, 64): record(shape, 64)}, {shape: note})


def _files(config: Any, folder: Path) -> Iterator[str]:
    """An export is what the lookup opens, for each device and shape, up and down."""
    for number, (device, shape) in enumerate(itertools.product(DEVICES, SHAPES)):
        config.get_device_name = lambda device=device: device
        root = folder / str(number)
        done = export(contents(device, shape), root)
        with mock.patch.dict(os.environ, {"SGLANG_MOE_CONFIG_DIR": str(root)}):
            for path, down in zip(done.paths, (False, True), strict=True):
                config.get_moe_configs.cache_clear()
                read = config.get_moe_configs(
                    shape.E, shape.N, shape.dtype, *_block(shape),
                    per_channel_quant=shape.per_channel_quant, down_moe=down,
                )  # fmt: skip
                rows = parse(path.read_text(encoding="utf-8"))
                if isinstance(rows, str) or read != {m: row.to_dict() for m, row in rows.items()}:
                    yield f"it does not read our {path.name} for {device!r}"


def _returns(config: Any, folder: Path) -> Iterator[str]:
    """What the lookup returns is what a learned row is returned as, and what a call that stands for no layer gets."""
    shape, device = SHAPES[0], DEVICES[0]
    config.get_device_name = lambda: device
    root = folder / "returns"
    export(contents(device, shape), root)
    call = (shape.w1_shape, shape.w2_shape, shape.top_k, shape.dtype)
    look = config.try_get_optimal_moe_config
    config.get_moe_configs.cache_clear()
    with mock.patch.dict(os.environ, {"SGLANG_MOE_CONFIG_DIR": str(root)}):
        up, below = look(*call, 64, return_down_config=True)
        if not (isinstance(up, dict) and isinstance(below[0], dict) and isinstance(below[1], int)):
            yield f"a hit is {up!r}, {below!r}"
        if look(*call, 64) != up:
            yield "a call without return_down_config returns something else than the up config"
        missed, below = look((7, 64, 64), (7, 64, 32), 2, None, 64, return_down_config=True)
        if not (isinstance(missed, dict) and tuple(below) == (None, None)):
            yield f"a miss is {missed!r}, {below!r}"
        try:
            look((8, 16), (8, 16), 1, None, 4)
            yield "a call with two sizes raises nothing"
        except ValueError:
            pass
