"""The machine that an errand runs on: this process's GPU with made-up weights, or what a test puts there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_moe_autotune import releases, stand_in
from sglang_moe_autotune.benchmark import DeviceProvider, Lent
from sglang_moe_autotune.binaries import Binaries
from sglang_moe_autotune.compiler import Compiler
from sglang_moe_autotune.fitting import limit_of
from sglang_moe_autotune.listener import CompileCount
from sglang_moe_autotune.overlay import stock
from sglang_moe_autotune.prior import Prior, find_files
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.trials import environment_key
from sglang_moe_autotune.warm import WarmProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.errand import Errand
    from sglang_moe_autotune.layers import LiveLayer
    from sglang_moe_autotune.records import Environment, Source
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape


class Machine(NamedTuple):
    """What an errand runs on: the seam that a test replaces by a recording."""

    environment: Environment
    provider: BenchmarkProvider
    baseline: Callable[[MoeShape, int], ConfigPair | None]
    """SGLang's own answer"""
    load: Callable[[MoeShape], str]
    """get weights of a shape in place of those before; why that is impossible, or "" """
    prior: Prior
    source: Source = "learned"
    sglang: str = ""
    driver: str = ""
    binaries: Binaries | None = None


def gpu_machine(order: Errand) -> Machine:
    """This process's first GPU; ends the process where there is none. Raises ImportError without SGLang."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is visible to this process: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    releases.publish_server_args()
    invoke = releases.invoke_function()
    environment = releases.environment(invoke)
    compiles = CompileCount()
    compiles.install()
    held: dict[MoeShape, list[LiveLayer]] = {}
    lent = Lent(
        lambda shape: held.get(shape, ()),
        invoke,
        releases.fused_module().moe_align_block_size,
        lambda: compiles.compiled,
    )
    compiler = Compiler(order.compile_processes, environment.shared_memory_bytes)
    root = None if order.root is None else Path(order.root)
    quarantine = Quarantine(root, environment_key(environment))
    provider = DeviceProvider(
        *(lent, compiler, order.reserve_mb << 20, order.slice_us, quarantine), bit_equal=order.bit_equal
    )

    def load(shape: MoeShape) -> str:
        held.clear()
        torch.cuda.empty_cache()
        if reason := stand_in.refusal(shape, releases.padding()):
            return reason
        free, _ = torch.cuda.mem_get_info()
        if (layers := stand_in.count(shape, free - (order.reserve_mb << 20))) < 1:
            return f"a layer takes {stand_in.layer_bytes(shape) >> 20} MiB, and {free >> 20} MiB are free"
        held[shape] = stand_in.build(shape, layers, f"cuda:{torch.cuda.current_device()}")
        return ""

    return Machine(
        environment,
        WarmProvider(provider),
        lambda shape, m: stock(shape, m, limit_of(environment))[0],
        load,
        Prior(find_files(releases.shipped_folder()), environment.device_name),
        sglang=releases.version(),
        driver=releases.driver_version(),
        binaries=Binaries(root, environment_key(environment), provider.recorder.kernels),
    )
