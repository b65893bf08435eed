"""The device that a server process tunes on: the seam that a demonstration replaces by a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import pace, regimes, releases
from sglang_moe_autotune.fitting import space_of
from sglang_moe_autotune.post import server_name
from sglang_moe_autotune.prior import Prior, find_files
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.trials import environment_key
from sglang_moe_autotune.tuner import Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from sglang_moe_autotune.agenda import Agenda
    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.binaries import Binaries
    from sglang_moe_autotune.layers import LiveLayers
    from sglang_moe_autotune.listener import CompileCount
    from sglang_moe_autotune.records import Environment, Record, Source
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.shapes import MoeShape

_TOP_K = 8


class Device(NamedTuple):
    """What a process tunes on."""

    environment: Environment
    provider: BenchmarkProvider
    source: Source = "learned"
    """the ``source`` of the records made with it"""
    binaries: Binaries | None = None


def open_device(settings: Settings, root: Path | None, layers: LiveLayers, compiles: CompileCount) -> Device:
    """The GPU that this process serves from, with its live layers and a side process that compiles.

    root: of the store, where the journal of first launches is kept.
    """
    from sglang_moe_autotune.benchmark import DeviceProvider, Lent  # noqa: PLC0415 - needs a GPU
    from sglang_moe_autotune.binaries import Binaries  # noqa: PLC0415 - needs Triton
    from sglang_moe_autotune.compiler import Compiler  # noqa: PLC0415 - needs a GPU
    from sglang_moe_autotune.rehearsal import rehearse  # noqa: PLC0415 - needs a GPU

    invoke = releases.invoke_function()
    environment = releases.environment(invoke)
    compiler = Compiler(settings.compile_processes, environment.shared_memory_bytes)
    align = releases.fused_module().moe_align_block_size
    lent = Lent(layers.of, invoke, align, lambda: compiles.compiled)
    key, read_only = environment_key(environment), settings.mode == "read-only"
    quarantine = Quarantine(root, key, read_only=read_only, server=server_name(0))
    provider = DeviceProvider(
        *(lent, compiler, settings.reserve_mb << 20, settings.slice_us, quarantine), bit_equal=settings.bit_equal
    )
    if not read_only:
        rehearse(likely(layers), align)
    binaries = Binaries(root, key, provider.recorder.kernels, read_only=read_only)
    binaries.put_back()
    return Device(environment, provider, binaries=binaries)


def likely(layers: LiveLayers) -> Iterator[MoeShape]:
    """The shapes of these layers; where a model does not say its top_k, with one that models have."""
    for key in sorted(layers.keys, key=repr):
        shape = layers.shape_of(key if key.top_k else key._replace(top_k=min(_TOP_K, key.w1_shape[0])))
        if shape is not None:
            yield shape


def before_serving(device: Device, compiles: CompileCount) -> BenchmarkProvider:
    """The device's benches where nothing was launched yet: after one launch of the baseline, compiled as serving's."""
    from sglang_moe_autotune.benchmark import DeviceProvider  # noqa: PLC0415 - needs a GPU
    from sglang_moe_autotune.warm import WarmProvider  # noqa: PLC0415 - as above

    if not isinstance(device.provider, DeviceProvider):
        return device.provider
    return WarmProvider(device.provider, compiles.outside)


def make_tuner(
    device: Device,
    provider: BenchmarkProvider,
    settings: Settings,
    records: tuple[Iterable[Record], Iterable[Record]],
    found: tuple[Callable[[Record], object], Callable[..., object]],
    agenda: Agenda | None = None,
) -> Tuner:
    """A tuner for the device's environment. records: those that it knows, and those of the same GPU under another
    Triton or kernel, which seed its searches. found: told of each record, and of what was measured for it."""
    known, seeds = records
    sink, tried = found
    options = TunerOptions(
        min_gain=settings.min_gain_percent / 100,
        slice_us=pace.longest_launch_us(settings.slice_us),
        seed=settings.seed,
        source=device.source,
        sglang=releases.version(),
        driver=releases.driver_version(),
    )
    regimes.prepare()
    prior = Prior(find_files(releases.shipped_folder()), device.environment.device_name)
    for record in seeds:
        prior.learn(record, here=False)
    tuner = Tuner(provider, sink, prior, options, space=space_of(device.environment), tried=tried, agenda=agenda)
    for record in known:
        if record.source in ("pinned", "imported", device.source):  # what a recording taught is of no use here
            tuner.learn(record)
    return tuner
