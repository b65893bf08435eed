"""The launches of one bench: each config of each GEMM, with every routing and on every layer, ready to be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from triton.errors import TritonError

from sglang_moe_autotune import correctness, launch, routings
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.layers import LiveLayer, gemm_call, quant_info, weight_operands
from sglang_moe_autotune.scratch import FLUSH_BYTES, Scratch
from sglang_moe_autotune.timing import Rotation, Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.kernels import Kernels
    from sglang_moe_autotune.shapes import Gemm, KernelConfig

REFUSALS: Final = (TritonError, RuntimeError, OSError, ValueError, KeyError, AssertionError, TypeError)
"""what Triton's cache, its launcher and the driver raise for a candidate that is impossible or damaged"""
NO_MEMORY: Final = "the scratch memory was not there after all"

_MAX_LAYERS: Final = 8
_C: Final = 3
"""place of the output among the positional arguments of invoke_fused_moe_kernel"""


class Candidate(NamedTuple):
    """One config of one GEMM, ready to be ordered and launched over the rotation."""

    binary: launch.Binary
    recorded: launch.Launch
    """the recorded launch of the first layer and routing: its grid and binary are every place's"""
    table: list[list[tuple[Any, ...]]]
    """the kernel's arguments by routing and layer"""


class Launches:
    """What is launched over one ``Scratch`` with the weights of these layers."""

    def __init__(
        self, scratch: Scratch, layers: Sequence[LiveLayer], recorder: launch.LaunchRecorder, kernels: Kernels
    ) -> None:
        self._scratch, self._layers, self._recorder, self._kernels = scratch, layers, recorder, kernels
        self._device = torch.cuda.current_device()
        self._candidates: dict[tuple[Gemm, KernelConfig], Candidate | str] = {}
        self.routings = routings.timed(scratch.shape, scratch.M)
        """what launches are timed with"""

    def candidate(self, gemm: Gemm, config: KernelConfig) -> Candidate | str:
        """The candidate, or why it is refused. Raises Declined where that says nothing about it."""
        place = (gemm, config)
        if place not in self._candidates:
            try:
                recorded = self._record(gemm, config, 0, self.routings[0])[0]
                binary = launch.binary_of(recorded, self._device)
                table = self._table(gemm, config, binary)
            except torch.OutOfMemoryError as error:  # a RuntimeError that says nothing about the candidate
                raise Declined(NO_MEMORY) from error
            except REFUSALS as error:
                self._candidates[place] = f"SGLang refuses this launch: {type(error).__name__}: {error}"
            else:
                self._candidates[place] = Candidate(binary, recorded, table)
        return self._candidates[place]

    def check_table(self, gemm: Gemm, config: KernelConfig) -> None:
        """Record the launch with the last routing too. Raises Declined where its arguments are not those of the table,
        or its grid is another: SGLang then derives something from a routing that swapping its tensors does not bring
        along."""
        candidate = self.candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - for the type checker
        made = self._record(gemm, config, 0, self.routings[-1])[0]
        recorded = launch.binary_of(made, self._device, candidate.binary)
        mine, theirs = (list(map(launch.address, args)) for args in (candidate.table[-1][0], recorded.bound))
        same_kernel = recorded.hash == candidate.binary.hash and made.grid == candidate.recorded.grid
        if not same_kernel or mine != theirs:
            raise Declined(f"the {gemm} launch depends on the routing in a way that is not known")

    def forget(self, count: int) -> bool:
        """Drop some of what was recorded, which takes its time; True where nothing is left."""
        for _ in range(min(count, len(self._candidates))):
            self._candidates.popitem()
        return not self._candidates

    def refuse(self, gemm: Gemm, config: KernelConfig, reason: str) -> None:
        """From now on it is refused for this reason."""
        self._candidates[gemm, config] = reason

    def load(self, gemm: Gemm, config: KernelConfig) -> Any:
        """The launchable binary. Raises one of ``REFUSALS`` where the disk or the driver refuses it."""
        candidate = self.candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - for the type checker
        return self._kernels.load(candidate.recorded, candidate.binary, self._device)

    def ready(self, gemm: Gemm, config: KernelConfig) -> bool:
        """One step of loading it; True where it is loaded. Raises what ``load`` raises."""
        candidate = self.candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - for the type checker
        return self._kernels.step(candidate.recorded, candidate.binary, self._device)

    def knows(self, gemm: Gemm, config: KernelConfig) -> bool:
        """Was it recorded, or refused?"""
        return (gemm, config) in self._candidates

    @property
    def rotation(self) -> Rotation:
        """What timed launches vary over."""
        return Rotation(len(self.routings), min(len(self._layers), _MAX_LAYERS))

    def side(self, gemm: Gemm, config: KernelConfig) -> Side:
        """Launches of a config, by routing and layer. Raises what ``load`` raises."""
        candidate = self.candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - for the type checker
        grid = (*candidate.recorded.grid, 1, 1)[:3]
        run = self.load(gemm, config)[grid]
        stream = torch.cuda.current_stream().cuda_stream
        table = candidate.table
        if len(self._layers) > 1:
            return lambda routing, layer: run(*table[routing][layer], stream=stream)
        # A model with one layer of a shape has no other weights: they are pushed out of the L2 cache by hand. The
        # time of that counts on both sides, so gains look smaller than they are.
        flush = self._scratch.reference.view(torch.uint8)[:FLUSH_BYTES]

        def flushed(routing: int, layer: int) -> None:
            flush.zero_()
            run(*table[routing][layer], stream=stream)

        return flushed

    def into(self, gemm: Gemm, config: KernelConfig, routing: str) -> correctness.Launch:
        """Launches of a config with a routing of a comparison, a layer for each routing, into a place that is given."""
        made, c = self._record(gemm, config, correctness.ROUTINGS.index(routing), routing)
        candidate = self.candidate(gemm, config)
        if isinstance(candidate, str):
            raise Declined(f"the {gemm} launch was refused: {candidate}")
        binary = launch.binary_of(made, self._device, candidate.binary)
        if binary.hash != candidate.binary.hash:
            raise Declined(f"the {gemm} launch of routing {routing} needs another binary than the one measured")
        run = self.load(gemm, config)[(*made.grid, 1, 1)[:3]]
        place = next(i for i, value in enumerate(binary.bound) if value is c)

        def write(written: correctness.Written) -> None:
            run(*binary.bound[:place], written.rows.view(c.shape), *binary.bound[place + 1 :])

        return write

    def call(
        self, gemm: Gemm, config: KernelConfig, place: int, routing: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of SGLang's launching function; ``place`` says which layer, round and round."""
        layer = self._layers[place % len(self._layers)]
        quant, output = quant_info(layer.module), self._scratch.output
        if quant is None or quant.w13_weight.device != output.device:
            raise Declined("a layer's weights are not on the GPU now")
        buffers = self._scratch.buffers(gemm, config.BLOCK_SIZE_M, routing, output)
        args, named = gemm_call(gemm, layer, quant, buffers, self._scratch.shape.top_k, config.to_dict())
        return args, {k: v for k, v in named.items() if k in self._recorder.parameters}

    def _record(self, gemm: Gemm, config: KernelConfig, place: int, routing: str) -> tuple[launch.Launch, torch.Tensor]:
        """A launch and the tensor that it writes to."""
        args, named = self.call(gemm, config, place, routing)
        return self._recorder.record(*args, quantise=self._scratch.quantise, **named), args[_C]

    def _table(self, gemm: Gemm, config: KernelConfig, binary: launch.Binary) -> list[list[tuple[Any, ...]]]:
        """The arguments by routing and layer, from those of the first of both: what differs are tensors of one size.
        Raises ValueError where it is more than that."""
        layers = self._swaps(gemm)
        first, *others = (self._scratch.routed(config.BLOCK_SIZE_M, routing) for routing in self.routings)
        table = []
        for these in (first, *others):
            for mine, theirs in zip(first, these, strict=True):
                if mine.shape != theirs.shape or mine.data_ptr() % 16 != theirs.data_ptr() % 16:
                    raise ValueError("its launches with different routings need different binaries")
            routed = {a.data_ptr(): b for a, b in zip(first, these, strict=True)}
            table.append(launch.rebind(binary.bound, [{**routed, **layer} for layer in layers]))
        return table

    def _swaps(self, gemm: Gemm) -> list[dict[int, torch.Tensor]]:
        """For each layer of the rotation: its weights by the address of the first layer's, which were recorded."""
        operands = []
        for layer in self._layers[:_MAX_LAYERS]:
            if (quant := quant_info(layer.module)) is None:
                raise Declined("a layer's weights are not on the GPU now")
            operands.append(weight_operands(gemm, quant))
        first = operands[0]
        for these in operands:
            for mine, theirs in zip(first, these, strict=True):
                if mine is not None and (theirs is None or mine.data_ptr() % 16 != theirs.data_ptr() % 16):
                    raise Declined("the layers of this shape do not share one binary: their weights are aligned unlike")
        pairs = [zip(first, these, strict=True) for these in operands]
        return [{a.data_ptr(): b for a, b in pair if a is not None and b is not None} for pair in pairs]
