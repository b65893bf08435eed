"""Captures one size of SGLang's CUDA graphs again, through SGLang's own runner, beside the graphs of all other sizes.

SGLang captures all sizes at once and clears nothing when it does so in mid-life. Here one size is captured on the
stream and into the pool of the first capture, with the index buffers cleared first (their last batch's slots are
live: the warm-up of a capture would write keys and values there), and whatever fails leaves the old graph in place.
The names used of SGLang are listed in ``graph_contract``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_moe_autotune import releases
from sglang_moe_autotune.captures import Size
from sglang_moe_autotune.graph_state import Snapshot, clear, metadata_tables, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_moe_autotune.heat import BatchKind

_RUNNERS: dict[str, BatchKind] = {
    "DecodeCudaGraphRunner": "decode",
    "PrefillCudaGraphRunner": "prefill",
    "CudaGraphRunner": "decode",
    "PiecewiseCudaGraphRunner": "prefill",
}
_PLACES = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner", "graph_runner", "piecewise_cuda_graph_runner")
_BACKENDS: dict[BatchKind, tuple[str, ...]] = {
    "decode": ("FullCudaGraphBackend", "BreakableCudaGraphBackend"),
    "prefill": ("BreakableCudaGraphBackend",),
}
_ROW_POOLS = ("ReqToTokenPool", "HybridReqToTokenPool")
_KV_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool")
_NOT_SHOWN = (
    *("speculative_algorithm", "enable_lora", "enable_pdmux", "enable_two_batch_overlap", "enable_torch_compile"),
    *("enable_memory_saver", "enable_profile_cuda_graph", "debug_cuda_graph", "enable_hierarchical_cache"),
    *("enable_lmcache", "enable_flexkv", "dllm_algorithm", "enable_hisparse", "enable_single_batch_overlap"),
    *("enable_unified_memory", "enable_page_major_kv_layout", "enable_linear_replayssm", "cpu_offload_gb"),
    *("expert_distribution_recorder_mode", "enable_return_routed_experts", "enable_return_indexer_topk"),
    *("forward_hooks", "msprobe_dump_config", "debug_tensor_dump_output_folder"),
)
"""server arguments under which captures carry state, threads or memory that was not looked at"""
_NOT_SHOWN_ENV = (
    *("SGLANG_ENABLE_CUDA_GRAPH_DEDUP", "SGLANG_ENABLE_GRAPH_POOL_BORROW"),
    "SGLANG_ENABLE_TORCH_INFERENCE_MODE",  # small compiled kernels would be compiled anew for it, in the capture
)


_SHOWN_ON = (9, 0)
"""the compute capability of the GPU that captures were shown on"""
_SHOWN_PARTS = ("MHATokenToKVPool", "GDNAttnBackend")
"""of hybrid models: the pool of their layers with full attention, and the backend of the others"""


class Found(NamedTuple):
    """The graphs of a server that can be captured again, and why others cannot."""

    graphs: tuple[Graphs, ...]
    refused: dict[str, str]
    """by ``decode``, ``prefill`` or ``all``"""
    pool: str = ""
    """the class of SGLang's KV pool"""
    unlike: str = ""
    """what sets the server apart from those that captures were shown on, besides release, attention and pool"""


def find(scheduler: Any) -> Found:
    """Look at a scheduler whose graphs are captured. Raises what a moved attribute raises."""
    if reason := next(_why_none(scheduler), ""):
        return Found((), {"all": reason})
    model_runner = scheduler.tp_worker.model_runner
    graphs: list[Graphs] = []
    refused: dict[str, str] = {}
    for place in _PLACES:
        runner = getattr(model_runner, place, None)
        if (kind := _RUNNERS.get(type(runner).__name__)) is None:
            continue  # none of this name in this SGLang, or its eager runner where graphs are off
        if reason := _why_not(kind, runner):
            refused[kind] = reason
        else:
            graphs.append(Graphs(kind, place, runner))
    unlike = "; ".join(_unlike(scheduler.server_args, model_runner, graphs))
    return Found(tuple(graphs), refused, type(model_runner.token_to_kv_pool).__name__, unlike)


def _unlike(arguments: Any, model_runner: Any, graphs: list[Graphs]) -> Iterator[str]:
    if torch.version.hip or not torch.cuda.is_available():
        yield "no CUDA GPU"
    elif (capability := torch.cuda.get_device_capability()) != _SHOWN_ON:
        yield f"a GPU of compute capability {capability[0]}.{capability[1]}"
    usual = releases.setting(arguments, "attention_backend")
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if (backend := releases.setting(arguments, name)) and backend != usual:
            yield f"--{name.replace('_', '-')} {backend}"
    parts = (model_runner.token_to_kv_pool, "full_kv_pool"), (model_runner.attn_backend, "linear_attn_backend")
    for whole, name in parts:
        if (part := getattr(whole, name, None)) is not None and type(part).__name__ not in _SHOWN_PARTS:
            yield f"a hybrid model with {type(part).__name__}"
    if quantised := getattr(getattr(model_runner, "model_config", None), "quantization", None):
        yield f"weights in {quantised}"
    cached, dtype = (getattr(model_runner, name, None) for name in ("kv_cache_dtype", "dtype"))
    if cached != dtype:
        yield f"a KV cache in {str(cached).removeprefix('torch.')}"
    if getattr(model_runner, "is_multimodal", False):
        yield "a multimodal model"
    if not getattr(model_runner, "is_generation", True):
        yield "a model that generates no text"
    yield from (f"decode graphs of {name}" for some in graphs if (name := some.unusual))


def _why_none(scheduler: Any) -> Iterator[str]:
    """Reasons that hold for all graphs of a server."""
    arguments, model_runner = scheduler.server_args, scheduler.tp_worker.model_runner
    if why := releases.why_never(arguments):
        yield why  # its graphs change where a row is taken back, which would capture beside what was not looked at
    for name in _NOT_SHOWN:
        if releases.setting(arguments, name):
            yield f"not shown to be safe with --{name.replace('_', '-')}"
    if (releases.setting(arguments, "offload_group_size") or -1) > 0:
        yield "not shown to be safe with --offload-group-size"
    for name in _NOT_SHOWN_ENV:
        if os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}:
            yield f"not shown to be safe with {name}"
    rows = model_runner.req_to_token_pool
    for pool, known in ((rows, _ROW_POOLS), (model_runner.token_to_kv_pool, _KV_POOLS)):
        if type(pool).__name__ not in known:
            yield f"{type(pool).__name__} is not known to keep slot 0 free for padding"
    if 0 in rows.free_slots:
        yield "row 0 of the request pool can be a request's"
    ngrams = getattr(model_runner, "ngram_embedding_manager", None)
    if getattr(model_runner, "use_ngram_embedding", False) or getattr(ngrams, "enabled", False):
        yield "n-gram embeddings write a table of live requests"
    for name in ("hisparse_coordinator", "canary_manager"):
        if getattr(model_runner, name, None) is not None:
            yield f"a capture would change the {name.replace('_', ' ')}"


def _why_not(kind: BatchKind, runner: Any) -> str:
    if not hasattr(runner, "buffer_registry"):
        return "this SGLang keeps a graph's inputs elsewhere"
    if getattr(runner, "_metadata_glue", None) is not None:
        return "the preparation of its metadata is a graph itself"
    backend = getattr(runner, "backend", None)
    if backend is not None and type(backend).__name__ not in _BACKENDS[kind]:
        return f"graphs of {type(backend).__name__} are not captured one by one"
    if type(runner).__name__ == "PiecewiseCudaGraphRunner" and not pieces():
        return "the pieces of the compiled model were not found"
    return ""


class Graphs:
    """The captured graphs of one kind."""

    def __init__(self, kind: BatchKind, place: str, runner: Any) -> None:
        self.kind, self._place, self._runner = kind, place, runner
        self._name = "capture_bs" if kind == "decode" else "capture_num_tokens"
        self._width: int = 1
        if kind == "decode":
            self._width = getattr(runner, "captured_req_width", 0) or getattr(runner, "num_tokens_per_bs", 1)
        self._backend = getattr(runner, "backend", None)
        self._stream: Any = None
        self._piecewise = type(runner).__name__ == "PiecewiseCudaGraphRunner"

    @property
    def current(self) -> bool:
        """Are these the graphs that serve? SGLang makes a new runner where it captures all of them again."""
        return getattr(self._runner.model_runner, self._place, None) is self._runner

    @property
    def unusual(self) -> str:
        """The backend of decode graphs that are captured in another way than SGLang's own choice, or ""."""
        name = "" if self._backend is None else type(self._backend).__name__
        return name if self.kind == "decode" and name != _BACKENDS["decode"][0] else ""

    def sizes(self) -> list[Size]:
        """All of them, as SGLang lists them."""
        return [Size(self.kind, size, size * self._width) for size in getattr(self._runner, self._name)]

    def capture(self, size: int) -> str:
        """Capture this size again; "" or why the old graph stands. The device is idle before and after.

        Raises only where the device itself is broken.
        """
        runner = self._runner
        if getattr(runner.capture_hidden_mode, "name", "NULL") not in ("NULL", "FULL"):
            return f"captured for hidden states of mode {runner.capture_hidden_mode.name}"
        if torch.cuda.is_current_stream_capturing():
            return "another capture is under way"
        kept = {name: getattr(runner, name) for name in (self._name, "capture_hidden_mode")}
        before = Snapshot(self._tables(), self._entries(size))
        torch.cuda.synchronize()
        reason = ""
        try:
            clear(runner)
            setattr(runner, self._name, [size])
            with contextlib.ExitStack() as stack:
                self._enter(stack)
                runner.capture()
            reason = before.why_incomplete(self._graphs(size))
        except Exception as error:  # noqa: BLE001 - whatever a capture raises, the old graph is whole
            reason = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            for name, value in kept.items():
                setattr(runner, name, value)
            if reason:
                before.restore()
        del before  # the graph that was replaced, and its memory, end here
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return reason

    def withdraw(self, size: int) -> None:
        """Use this graph no more: its batches take the next larger one, or run eagerly."""
        runner = self._runner
        left = [other for other in getattr(runner, self._name) if other != size]
        setattr(runner, self._name, left)
        setattr(runner, "max_bs" if self.kind == "decode" else "max_num_tokens", max(left, default=0))

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """What SGLang's own capture of these graphs runs in, and the stream, pool and buffers of the first one."""
        runner = self._runner
        module = sys.modules[type(runner).__module__]
        swapped: dict[str, Any] = {"freeze_gc": _no_collection, "tqdm": _quiet(module.tqdm)}
        if not hasattr(module, "get_or_create_global_graph_capture_stream"):
            # A new stream would find none of the pool's blocks: they belong to the stream that they were made on.
            self._stream = getattr(runner, "stream", None) or self._stream or torch.cuda.Stream()
            swapped["graph_capture"] = functools.partial(module.graph_capture, stream=self._stream)
        stack.enter_context(_swapped(module, swapped))
        if hasattr(self._backend, "_shared_output_buffer"):
            stack.enter_context(_same_output(self._backend))
        if self._piecewise:
            context = importlib.import_module("sglang.srt.compilation.piecewise_context_manager")
            stack.enter_context(context.enable_piecewise_cuda_graph())
        elif self.kind == "decode":
            stack.enter_context(module.model_capture_mode())

    def _graphs(self, size: int) -> dict[Any, Any]:
        """The graphs of one size by SGLang's key."""
        if self._piecewise:
            return {id(entry): entry.cudagraph for entry in self._entries(size)}
        table = self._runner.graphs if self._backend is None else self._backend._graphs
        return {key: graph for key, graph in table.items() if getattr(key, "size", key) == size}

    def _tables(self) -> list[dict[Any, Any]]:
        """The dictionaries that a capture writes: graphs, outputs, and attention metadata by size."""
        owner = self._runner if self._backend is None else self._backend
        names = ("graphs", "output_buffers", "_graphs", "_outputs", "_capture_inputs")
        tables = [getattr(owner, name, None) for name in names]
        tables.append(getattr(self._runner, "attn_metadata_buffers", None))
        tables += metadata_tables(self._runner.model_runner.attn_backend)
        return [table for table in tables if isinstance(table, dict)]

    def _entries(self, size: int) -> list[Any]:
        if not self._piecewise:
            return []
        return [p.concrete_size_entries[size] for p in pieces() if size in p.concrete_size_entries]


@contextlib.contextmanager
def _swapped(module: types.ModuleType, names: dict[str, Any]) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(kept)


@contextlib.contextmanager
def _same_output(backend: Any) -> Iterator[None]:
    """All prefill graphs write one output buffer; a session of SGLang's would make another one."""
    kept: Any = backend._shared_output_buffer
    session: Callable[[Any], Any] = backend.capture_session

    @contextlib.contextmanager
    def keeping(stream: Any) -> Iterator[None]:
        with session(stream):
            backend._shared_output_buffer = kept
            yield

    backend.capture_session = keeping
    try:
        yield
    finally:
        del backend.capture_session
        backend._shared_output_buffer = kept


@contextlib.contextmanager
def _no_collection(*_: Any) -> Iterator[None]:
    """SGLang's ``freeze_gc`` collects twice, which is most of a small graph's pause, and unfreezes all objects."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _quiet(tqdm: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(tqdm=functools.partial(tqdm.tqdm, disable=True))
