"""A bench measures against launches that serving has made. Where nothing serves, SGLang's own call makes them first."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from triton.runtime.errors import OutOfResources

from sglang_moe_autotune import launch
from sglang_moe_autotune.layers import gemm_call, quant_info
from sglang_moe_autotune.scratch import Scratch
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sglang_moe_autotune.bench import Bench, Share
    from sglang_moe_autotune.benchmark import DeviceProvider

_ROUTING = "uniform"


class WarmProvider:
    """Opens the benches of a ``DeviceProvider`` after one launch of the baseline; see ``bench.BenchmarkProvider``."""

    def __init__(
        self, inner: DeviceProvider, outside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        """outside: entered for the launches that stand for serving's, which compile what serving would."""
        self.inner = inner
        self._outside = outside
        self.compiler = inner.compiler
        self._warm: set[tuple[MoeShape, int, ConfigPair]] = set()

    @property
    def share(self) -> Share:
        return self.inner.share

    @share.setter
    def share(self, share: Share) -> None:
        self.inner.share = share

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        opened = self.inner.open(shape, M, baseline)
        if isinstance(opened, str) or (shape, M, baseline) in self._warm:
            return opened
        try:
            with self._outside():
                self._launch(shape, M, baseline)
        except OutOfResources as error:
            reason = f"SGLang's own config cannot be launched here: {error}"
        except torch.OutOfMemoryError:
            reason = "the activations do not fit the memory that is free"
        else:
            self._warm.add((shape, M, baseline))
            return opened
        opened.close()
        return reason

    def _launch(self, shape: MoeShape, M: int, baseline: ConfigPair) -> None:  # noqa: N803
        lent = self.inner.serving
        layer = lent.layers(shape)[0]
        quant = quant_info(layer.module)
        scratch = Scratch(shape, M, lent.align, 1.0, flush=False)
        try:
            for _ in scratch.fill((_ROUTING,)):
                pass
            for gemm in GEMMS:
                config = baseline.of(gemm)
                buffers = scratch.buffers(gemm, config.BLOCK_SIZE_M, _ROUTING, scratch.output)
                args, named = gemm_call(gemm, layer, quant, buffers, shape.top_k, config.to_dict())
                named = {k: v for k, v in named.items() if k in self.inner.recorder.parameters}
                # The compile process takes seconds to start: it does so while this process compiles the baseline.
                made = self.inner.recorder.record(*args, **named)
                self.compiler.readiness(launch.binary_of(made, torch.cuda.current_device()))
                lent.invoke(*args, **named)
                del args, named, made, buffers
            torch.cuda.current_stream().synchronize()
        finally:
            scratch.close()
