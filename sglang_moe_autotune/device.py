"""The device that a server process tunes on: the seam that a demonstration replaces by a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import releases

if TYPE_CHECKING:
    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.layers import LiveLayers
    from sglang_moe_autotune.listener import CompileCount
    from sglang_moe_autotune.records import Environment, Source
    from sglang_moe_autotune.settings import Settings


class Device(NamedTuple):
    """What a process tunes on."""

    environment: Environment
    provider: BenchmarkProvider
    source: Source = "learned"
    """the ``source`` of the records made with it"""


def open_device(settings: Settings, layers: LiveLayers, compiles: CompileCount) -> Device:
    """The GPU that this process serves from, with its live layers and a side process that compiles."""
    from sglang_moe_autotune.benchmark import DeviceProvider, Lent  # noqa: PLC0415 - needs a GPU
    from sglang_moe_autotune.compiler import Compiler  # noqa: PLC0415 - needs a GPU

    invoke = releases.invoke_function()
    environment = releases.environment(invoke)
    compiler = Compiler(settings.compile_processes, environment.shared_memory_bytes)
    align = releases.fused_module().moe_align_block_size
    lent = Lent(layers.of, invoke, align, lambda: compiles.compiled)
    provider = DeviceProvider(lent, compiler, settings.reserve_mb << 20, settings.slice_us)
    return Device(environment, provider)
