"""The device that a server process tunes on: the seam that a demonstration replaces by a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import releases
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.trials import environment_key

if TYPE_CHECKING:
    from pathlib import Path

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


def open_device(settings: Settings, root: Path | None, layers: LiveLayers, compiles: CompileCount) -> Device:
    """The GPU that this process serves from, with its live layers and a side process that compiles.

    root: of the store, where the journal of first launches is kept.
    """
    from sglang_moe_autotune.benchmark import DeviceProvider, Lent  # noqa: PLC0415 - needs a GPU
    from sglang_moe_autotune.compiler import Compiler  # noqa: PLC0415 - needs a GPU

    invoke = releases.invoke_function()
    environment = releases.environment(invoke)
    compiler = Compiler(settings.compile_processes, environment.shared_memory_bytes)
    align = releases.fused_module().moe_align_block_size
    lent = Lent(layers.of, invoke, align, lambda: compiles.compiled)
    quarantine = Quarantine(root, environment_key(environment), read_only=settings.mode == "read-only")
    provider = DeviceProvider(
        *(lent, compiler, settings.reserve_mb << 20, settings.slice_us, quarantine), bit_equal=settings.bit_equal
    )
    return Device(environment, provider)
