"""What re-capture uses of SGLang's graph runners: the part of ``contract`` that ``graphs`` rests on. Pure.

``graphs`` and ``graph_state`` use no other private name of SGLang.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Use(NamedTuple):
    """Names of a class (methods, fields, attributes of ``self``), or of a module where ``owner`` is empty."""

    module: str
    owner: str
    names: tuple[str, ...]


_EXECUTOR = "sglang.srt.model_executor"
_DECODE = f"{_EXECUTOR}.runner.decode_cuda_graph_runner"
_PREFILL = f"{_EXECUTOR}.runner.prefill_cuda_graph_runner"
_BACKENDS = f"{_EXECUTOR}.runner_backend"
_OLD_DECODE = f"{_EXECUTOR}.cuda_graph_runner"
_OLD_PREFILL = f"{_EXECUTOR}.piecewise_cuda_graph_runner"
_POOLS = "sglang.srt.mem_cache.memory_pool"

_SWAPPED = ("graph_capture", "freeze_gc", "tqdm")
"""module names that ``graphs`` replaces for the time of one capture"""

_KIND = ("is_multimodal", "is_generation")

_POOL_USES: Final = (
    Use(_POOLS, "ReqToTokenPool", ("free_slots",)),
    Use(_POOLS, "HybridReqToTokenPool", ("req_index_to_mamba_index_mapping",)),
    Use(_POOLS, "MHATokenToKVPool", ()),
    Use(_POOLS, "MLATokenToKVPool", ()),
    Use(_POOLS, "HybridLinearKVPool", ("full_kv_pool",)),
    Use("sglang.srt.layers.attention.hybrid_linear_attn_backend", "HybridLinearAttnBackend", ("linear_attn_backend",)),
    Use(f"{_EXECUTOR}.cuda_graph_buffer_registry", "CudaGraphBufferRegistry", ("has_slot", "get_slot")),
    Use(f"{_EXECUTOR}.cuda_graph_buffer_registry", "GraphSlot", ("buffer",)),
)

BACKEND_USES: Final = (
    *_POOL_USES,
    Use(f"{_EXECUTOR}.model_runner", "ModelRunner", ("decode_cuda_graph_runner", "prefill_cuda_graph_runner", *_KIND)),
    Use(_DECODE, "", (*_SWAPPED, "model_capture_mode")),
    Use(_PREFILL, "", _SWAPPED),
    Use(
        _DECODE,
        "DecodeCudaGraphRunner",
        (
            *("capture", "capture_bs", "max_bs", "captured_req_width", "buffers", "buffer_registry", "backend"),
            *("stream", "seq_len_fill_value", "encoder_len_fill_value", "capture_hidden_mode", "attn_backend"),
        ),
    ),
    Use(
        _PREFILL,
        "PrefillCudaGraphRunner",
        (
            *("capture", "capture_num_tokens", "max_num_tokens", "buffers", "buffer_registry", "backend", "stream"),
            *("capture_hidden_mode", "attn_metadata_buffers"),
        ),
    ),
    Use(f"{_BACKENDS}.full_cuda_graph_backend", "FullCudaGraphBackend", ("_graphs", "_outputs")),
    Use(
        f"{_BACKENDS}.breakable_cuda_graph_backend",
        "BreakableCudaGraphBackend",
        ("_graphs", "_outputs", "_shared_output_buffer", "capture_session"),
    ),
    Use(f"{_EXECUTOR}.runner.shape_key", "ShapeKey", ("size",)),
)

OLD_USES: Final = (
    *_POOL_USES,
    Use(f"{_EXECUTOR}.model_runner", "ModelRunner", ("graph_runner", "piecewise_cuda_graph_runner", *_KIND)),
    Use(_OLD_DECODE, "", (*_SWAPPED, "model_capture_mode")),
    Use(_OLD_PREFILL, "", _SWAPPED),
    Use(
        _OLD_DECODE,
        "CudaGraphRunner",
        (
            *("capture", "capture_bs", "max_bs", "num_tokens_per_bs", "buffers", "buffer_registry", "graphs"),
            *("output_buffers", "stream", "seq_len_fill_value", "encoder_len_fill_value", "capture_hidden_mode"),
        ),
    ),
    Use(
        _OLD_PREFILL,
        "PiecewiseCudaGraphRunner",
        ("capture", "capture_num_tokens", "max_num_tokens", "buffer_registry", "capture_hidden_mode"),
    ),
    Use("sglang.srt.compilation.cuda_piecewise_backend", "CUDAPiecewiseBackend", ("concrete_size_entries",)),
    Use(
        "sglang.srt.compilation.cuda_piecewise_backend",
        "ConcreteSizeEntry",
        ("cudagraph", "output", "num_finished_warmup", "input_addresses"),
    ),
    Use("sglang.srt.compilation.piecewise_context_manager", "", ("enable_piecewise_cuda_graph",)),
)
