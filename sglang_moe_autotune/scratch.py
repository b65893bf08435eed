"""Device memory of one bench: activations, outputs and routings, in a private pool that is given back whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_moe_autotune import correctness, routings
from sglang_moe_autotune.layers import Buffers
from sglang_moe_autotune.search_space import AXES, EIGHT_BIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.shapes import Gemm, MoeShape

Align = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, ...]]
"""SGLang's moe_align_block_size(topk_ids, block_size, experts)"""

FLUSH_BYTES = 256 << 20
"""more than the L2 cache of any GPU: writing as much leaves nothing of the weights there"""

_MARGIN_BYTES = 192 << 20
_ALLOCATOR, _WHOLE = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "max_split_size"
"""PyTorch's settings of its allocator, and the one with which large pieces are not cut up"""
_SEED = 20
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _identity(value: object) -> object:
    return (value.data_ptr(), value._version) if isinstance(value, torch.Tensor) else value


def serving_device() -> torch.device:
    """The GPU that this process serves from."""
    return torch.device("cuda", torch.cuda.current_device())


def columns(shape: MoeShape, gemm: Gemm) -> int:
    """Columns of a GEMM's output."""
    return shape.w1_shape[1] if gemm == "up" else shape.K


def scratch_bytes(shape: MoeShape, M: int, *, flush: bool) -> int:  # noqa: N803
    """What a ``Scratch`` takes: activations of both GEMMs, in 8 bit also quantised, two outputs, aligned ids, and a
    margin for routings and the temporaries of a comparison."""
    return _operand_bytes(shape, M, flush=flush) + _MARGIN_BYTES


def _operand_bytes(shape: MoeShape, M: int, *, flush: bool) -> int:  # noqa: N803
    width = _DTYPES[shape.activation_dtype].itemsize
    inputs = M * shape.K + M * shape.top_k * shape.w1_shape[1]
    # A quantised element takes one byte and its part of a scale: a float32 for 64 elements at the most. Three times, as
    # launches that were recorded before a ``refresh`` keep theirs, and the next ones are made while the last are there.
    quantised = 3 * inputs * 17 // 16 if shape.dtype in EIGHT_BIT else 0
    outputs = 2 * _output_elements(shape, M, flush=flush)
    kinds = {*routings.timed(shape, M), *correctness.ROUTINGS}
    return width * (inputs + outputs) + quantised + len(kinds) * _aligned_bytes(shape, M)


def _aligned_bytes(shape: MoeShape, M: int) -> int:  # noqa: N803
    """Of one routing, for all sizes of a tile's rows: ids, padded for each expert, and the expert of each tile."""
    ids = [M * shape.top_k + shape.E * block for block in AXES["BLOCK_SIZE_M"]]
    return 4 * sum(count + count // block for count, block in zip(ids, AXES["BLOCK_SIZE_M"], strict=True))


def _output_elements(shape: MoeShape, M: int, *, flush: bool) -> int:  # noqa: N803
    """Of one output, with what lies behind it: no launch may write there, and a comparison sees it if one does."""
    widest = max(columns(shape, "up"), columns(shape, "down"))
    needed = (M * shape.top_k + 1) * widest + correctness.GUARD_ELEMENTS
    return max(needed, FLUSH_BYTES // _DTYPES[shape.activation_dtype].itemsize) if flush else needed


class Scratch:
    """The operands of both GEMMs at one (shape, M), besides the weights.

    ``flush``: the outputs are large enough to push weights out of the L2 cache. ``local_share``: the part of the
    experts that this rank holds. ``rank``: each has random inputs of its own. Raises torch.OutOfMemoryError if the
    memory is not there after all.
    """

    def __init__(
        self, shape: MoeShape, M: int, align: Align, local_share: float, *, flush: bool, rank: int = 0  # noqa: N803
    ) -> None:
        self.shape, self.M = shape, M
        self._align, self._local_share = align, local_share
        device = serving_device()
        dtype = _DTYPES[shape.activation_dtype]
        rows, up_n = M * shape.top_k, shape.w1_shape[1]
        down_k = up_n if "ungated" in shape.variant else up_n // 2
        free, _ = torch.cuda.mem_get_info()
        self._pool: Any = torch.cuda.MemPool()
        widest = max(columns(shape, "up"), columns(shape, "down"))
        temporary = correctness.TEMPORARIES * correctness.temporary_bytes(rows, widest)
        piece = _operand_bytes(shape, M, flush=flush) + temporary
        with self.allocating():
            # All of it in one piece from the driver, which the pool cuts up: each piece takes a part of a millisecond,
            # to get and to give back, and would be got in the middle of a comparison.
            if not any(_WHOLE in os.environ.get(name, "") for name in _ALLOCATOR):
                torch.empty(piece, dtype=torch.uint8, device=device)
            self._a = {
                "up": torch.empty(M, shape.K, dtype=dtype, device=device),
                "down": torch.empty(rows, down_k, dtype=dtype, device=device),
            }
            self.output = torch.empty(_output_elements(shape, M, flush=flush), dtype=dtype, device=device)
            self.reference = torch.empty_like(self.output)
            self._weights = torch.empty(M, shape.top_k, dtype=torch.float32, device=device)
        self.taken_bytes = free - torch.cuda.mem_get_info()[0]
        self.generator = torch.Generator(device=device).manual_seed(_SEED + M + (rank << 24))
        self._ids: dict[str, torch.Tensor] = {}
        self._aligned: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        self._quantised: dict[int, tuple[tuple[object, ...], Any]] = {}

    def allocating(self) -> Any:
        """A context in which this thread allocates in the pool, so that nothing of it stays with the process."""
        return torch.cuda.use_mem_pool(self._pool)

    def close(self) -> None:
        """Give the memory back. Nobody else may hold a tensor of it any more.

        The tensors go before the pool: a pool that ends first leaves its memory cached for nobody.
        """
        self._a.clear()
        self._ids.clear()
        self._aligned.clear()
        self._quantised.clear()
        del self.output, self.reference, self._weights
        self._pool = None

    def fill(self, names: tuple[str, ...]) -> Iterator[None]:
        """Random activations and the named routings, for each size of a tile's rows; ``uniform-2`` is another draw of
        ``uniform``. A step makes one of them."""
        yield from self.refresh()
        shape = self.shape
        for name in dict.fromkeys(names):
            kind = name if name in correctness.ROUTINGS else name.rpartition("-")[0]
            with self.allocating():
                self._ids[name] = correctness.topk_ids(
                    kind, self.M, shape.E, shape.top_k, self._local_share, self.generator
                )
            yield
            for block_m in AXES["BLOCK_SIZE_M"]:  # before a candidate asks: then it would be many in one step
                self._align_to(name, block_m)
                yield

    def refresh(self) -> Iterator[None]:
        """Other random activations and routing weights in place of those before, a tensor at a step."""
        self._weights.uniform_(generator=self.generator)
        for activation in self._a.values():
            activation.normal_(generator=self.generator)
            yield

    def buffers(self, gemm: Gemm, block_m: int, routing: str, output: torch.Tensor) -> Buffers:
        """The operands of one launch; ``output`` is this object's ``output`` or ``reference``. Raises KeyError for a
        routing that was not filled, or a ``block_m`` that is none of the search space."""
        c = self.view(gemm, output)
        return Buffers(
            self._a[gemm], c if gemm == "down" else c.view(-1, c.shape[-1]), self._weights,
            *self.routed(block_m, routing),
        )  # fmt: skip

    def routed(self, block_m: int, routing: str) -> tuple[torch.Tensor, ...]:
        """The tensors of one launch that are a routing's own: ids, and what they are aligned to."""
        return self._ids[routing], *self._aligned[routing, block_m][:3]

    def _align_to(self, routing: str, block_m: int) -> None:
        with self.allocating():
            aligned = self._align(self._ids[routing], block_m, self.shape.E)
            correctness.poison_ids(aligned[0], aligned[1], aligned[2], block_m, self.shape.E)
            self._aligned[routing, block_m] = aligned

    def quantise(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, a quantisation of one of the activations, made once for all candidates:
        what it depends on is the operand and the shape, never the config. For ``LaunchRecorder.record``."""
        operand, *rest = args
        # Beside the operand a layer's own static scale: a tensor that stays where it is.
        made_of = (function, *map(_identity, (operand, *rest, *kwargs.values())))
        if self._quantised.get(id(operand), (None,))[0] != made_of:
            with self.allocating():
                self._quantised[id(operand)] = made_of, function(*args, **kwargs)
        return self._quantised[id(operand)][1]

    def view(self, gemm: Gemm, output: torch.Tensor) -> torch.Tensor:
        """The part of an output that a GEMM writes: (M, top_k, columns)."""
        width = columns(self.shape, gemm)
        return output[: self.M * self.shape.top_k * width].view(self.M, self.shape.top_k, width)

    def written(self, gemm: Gemm, output: torch.Tensor) -> correctness.Written:
        """The same part, with as much behind it as a launch without its masks would write to."""
        rows = self.view(gemm, output)
        reach = rows.numel() + columns(self.shape, gemm) + correctness.GUARD_ELEMENTS
        return correctness.Written(output[:reach], rows)
