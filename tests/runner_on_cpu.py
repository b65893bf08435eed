"""SGLang's own decode runner on CPU tensors, with real buffers, registry, backend and request pool; imported in a
scheduler process. What needs a GPU is replaced: the CUDA graph is a list of what was asked while it was captured.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = [1, 2, 4, 8]
SHAPE = ((256, 512, 3072), (256, 3072, 256), 8, None)
LIVE_SLOT, LIVE_ROW = 7, 3


class Graph:
    """Stands for torch.cuda.CUDAGraph: keeps the tile that the captured forward asked for."""

    def __init__(self) -> None:
        self.tile: int | None = None


class Device:
    """Stands for torch.cuda where the backend calls it, and counts."""

    def __init__(self) -> None:
        self.captured: list[Any] = []
        self.streams = 0
        self.capturing: Graph | None = None

    def synchronize(self) -> None:
        pass

    def is_current_stream_capturing(self) -> bool:
        return self.capturing is not None

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    @contextlib.contextmanager
    def graph(self, cuda_graph: Graph, pool: Any, stream: Any) -> Iterator[None]:
        self.captured.append((pool, stream))
        self.capturing = cuda_graph
        try:
            yield
        finally:
            self.capturing = None


class Model:
    """One MoE layer's lookup, and the write of keys and values that every layer makes."""

    shared_experts_config = None

    def __init__(self, ask: Any, device: Device) -> None:
        self.ask, self.device = ask, device
        self.kv = torch.zeros(32)
        self.state = torch.zeros(8)
        """of a hybrid model, by slot"""
        self.slots: Any = None
        self.fail = ""

    def forward(self, input_ids: Any, positions: Any, batch: Any) -> Any:
        self.kv[batch.out_cache_loc] += 1
        if self.slots is not None:
            self.state[self.slots[batch.req_pool_indices]] += 1
        assert int(positions.max()) == 0, "a stale position is an index into the rope table"
        tile = self.ask(len(input_ids))[0]["BLOCK_SIZE_M"]
        if self.fail == ("capture" if self.device.capturing else "warm-up"):
            raise RuntimeError(f"planted in the {self.fail}")
        if self.device.capturing is not None:
            self.device.capturing.tile = tile
        return SimpleNamespace(rows=len(input_ids))


def make_attention() -> Any:
    """As an attention backend that keeps metadata by size, which the captured kernels read."""

    class Attention:
        dllm_attention = None
        use_captured_forward_metadata_for_breakable_cuda_graph = False

        def __init__(self) -> None:
            self.decode_cuda_graph_metadata: dict[int, object] = {}

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            self.decode_cuda_graph_metadata[batch.batch_size] = object()

        def init_forward_metadata_in_graph(self, batch: Any) -> None:
            pass

        def on_after_cuda_graph_warmup(self) -> None:
            pass

    Attention.__module__ = "sglang.srt.layers.attention.made_up"
    return Attention()


def make(ask: Any) -> Any:
    """A scheduler with captured decode graphs, and ``.device``, ``.model``, ``.runner``. Captures all sizes once."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: PLC0415
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry  # noqa: PLC0415
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: PLC0415
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module  # noqa: PLC0415
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend  # noqa: PLC0415
    from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    group = SimpleNamespace(barrier=lambda: None)
    parallel = get_parallel()
    if not hasattr(parallel, "_v"):
        parallel.override_permanently(tp_group=group, tp_rank=0, tp_size=1)
    else:  # before SGLang 0.5.23, with a longer list of what a runner asks for
        parallel._overrides |= {"tp_rank": 0, "tp_size": 1, "attn_tp_size": 1, "attn_tp_rank": 0, "moe_ep_size": 1}

    device = Device()
    model = Model(ask, device)
    kv_pool = type("MHATokenToKVPool", (), {})()
    rows = ReqToTokenPool.__new__(ReqToTokenPool)
    rows.free_slots = list(range(1, 9))
    model_runner = SimpleNamespace(
        model=model, device="cpu", gpu_id=0, _kernel_warmed_up=True, is_draft_worker=False,
        req_to_token_pool=rows, token_to_kv_pool=kv_pool, attn_backend=make_attention(), lora_manager=None,
        hisparse_coordinator=None, canary_manager=None, capture_head_hooks=[], capture_tail_hooks=[],
        attn_tp_sequence_sharded=lambda _: False, tp_group=group,
        server_args=SimpleNamespace(enable_cudagraph_gc=False, debug_cuda_graph=False, enable_lora=False),
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda _: None),
        spec_algorithm=SimpleNamespace(
            is_none=lambda: True, is_eagle=lambda: False, is_standalone=lambda: False, is_ngram=lambda: False,
            is_dflash_family=lambda: False, is_speculative=lambda: False, is_dspark=lambda: False,
        ),
    )  # fmt: skip
    runner = module.DecodeCudaGraphRunner.__new__(module.DecodeCudaGraphRunner)
    vars(runner).update(
        model_runner=model_runner, device="cpu", device_module=device, pp_size=1, num_dp_ranks=1,
        enable_torch_compile=False, enable_profile_cuda_graph=False, enable_pdmux=False, enable_prefill_cp=False,
        require_mlp_tp_gather=False, require_attn_tp_gather=False, require_gathered_buffer=False,
        is_dllm=False, dllm_uses_input_embeds=False, dllm_input_preparation=None, ragged_verify_mode=False,
        record_nolora_graph=False, attention_graph_variants=None, capture_num_tokens=None,
        capture_bs=list(SIZES), compile_bs=[], max_bs=max(SIZES), max_num_token=max(SIZES), captured_req_width=1,
        capture_forward_mode=ForwardMode.DECODE, capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_len_fill_value=1, encoder_len_fill_value=0, attn_backend=model_runner.attn_backend, _metadata_glue=None,
        in_graph_metadata_prep_done=None,
        tbo_plugin=SimpleNamespace(capture_one_batch_size=lambda *_, **__: None),
        deepep_adapter=SimpleNamespace(capture=lambda **_: None),
    )  # fmt: skip
    sizes: dict[str, Any] = {"max_bs": max(SIZES), "max_num_token": max(SIZES)}
    ranks = "num_dp_ranks" if "num_dp_ranks" in inspect.signature(DecodeInputBuffers.create).parameters else "dp_size"
    runner.buffers = DecodeInputBuffers.create(
        device=torch.device("cpu"), **sizes, **{ranks: 1}, hidden_size=4, dtype=torch.bfloat16, pp_size=1,
        next_token_logits_buffer=torch.zeros(max(SIZES), 16), is_encoder_decoder=False, require_mlp_tp_gather=False,
        seq_len_fill_value=1, encoder_len_fill_value=0, num_tokens_per_req=1, cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
    )  # fmt: skip
    runner.buffer_registry = build_decode_registry(
        device=torch.device("cpu"), **sizes, seq_len_fill_value=1, cache_loc_dtype=torch.int64,
        enable_mamba_track=True, source=runner.buffers,
    )  # fmt: skip
    runner.backend = FullCudaGraphBackend(runner)

    @contextlib.contextmanager
    def graph_capture(stream: Any = None) -> Iterator[Any]:
        device.streams += stream is None
        yield SimpleNamespace(stream=stream or f"new stream {device.streams}")

    module.graph_capture = graph_capture
    if hasattr(module, "get_or_create_global_graph_capture_stream"):
        module.get_or_create_global_graph_capture_stream = lambda: "the global stream"
    module.get_available_gpu_memory = lambda *_, **__: 1.0
    torch.cuda.CUDAGraph = Graph  # type: ignore[misc, assignment]
    torch.cuda.is_current_stream_capturing = device.is_current_stream_capturing
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    torch.cuda.mem_get_info = lambda *_: (64 << 30, 80 << 30)  # type: ignore[assignment]
    with module.model_capture_mode(), torch.no_grad():
        runner.capture()
    model_runner.decode_cuda_graph_runner = runner
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=model_runner), server_args=SimpleNamespace(attention_backend="triton"),
        device=device, model=model, runner=runner, module=sys.modules[module.__name__],
    )  # fmt: skip


def serve_a_batch(scheduler: Any) -> None:
    """What the last batch leaves in the buffers: its slots, rows, lengths and positions."""
    buffers = scheduler.runner.buffers
    buffers.out_cache_loc.fill_(LIVE_SLOT)
    buffers.req_pool_indices.fill_(LIVE_ROW)
    buffers.seq_lens.fill_(40)
    buffers.seq_lens_cpu.fill_(40)
    buffers.positions.fill_(39)
    buffers.mamba_track_indices.fill_(LIVE_ROW)
    buffers.mamba_track_mask.fill_(True)


def add_prefill(scheduler: Any) -> Any:
    """SGLang's own prefill runner with its breakable graphs beside the decode runner; captures all its sizes once."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry  # noqa: PLC0415
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: PLC0415
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as module  # noqa: PLC0415
    from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend as backends  # noqa: PLC0415
    from sglang.srt.model_executor.runner_utils.buffers import PrefillInputBuffers  # noqa: PLC0415

    device, model, model_runner = scheduler.device, scheduler.model, scheduler.runner.model_runner

    class Segment(Graph):
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            device.captured.append((pool, "as the session's"))
            device.capturing = self

        def capture_end(self) -> None:
            device.capturing = None

        def instantiate(self) -> None:
            pass

    class Body:
        def forward(self, input_ids: Any, positions: Any, batch: Any, input_embeds: Any = None) -> Any:
            model.forward(input_ids, positions, batch)
            return torch.zeros(len(input_ids), 4)

    model_runner.attn_backend.init_forward_metadata = lambda _: None
    model_runner.pp_group = SimpleNamespace(is_last_rank=False)
    hf_config = SimpleNamespace(architectures=[])
    model_runner.model_config = SimpleNamespace(hf_config=hf_config, hidden_size=4, context_len=64)
    model_runner.ngram_embedding_manager = SimpleNamespace(enabled=False)
    model_runner.prepare_dummy_forward_batch = lambda batch: batch
    torch.cuda.CUDAGraph = Segment  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: "the current stream"  # type: ignore[assignment, return-value]
    module.graph_capture = scheduler.module.graph_capture
    if hasattr(module, "get_or_create_global_graph_capture_stream"):
        module.get_or_create_global_graph_capture_stream = lambda: "the global stream"
    module.get_available_gpu_memory = lambda *_, **__: 1.0
    runner = module.PrefillCudaGraphRunner.__new__(module.PrefillCudaGraphRunner)
    sizes: dict[str, Any] = {"device": torch.device("cpu"), "max_bs": 8, "cache_loc_dtype": torch.int64}
    vars(runner).update(
        model_runner=model_runner, device="cpu", device_module=device, dp_size=1, num_dp_ranks=1, layer_model=Body(),
        prefill_backend_name="breakable", capture_num_tokens=[4, 8, 16], max_num_tokens=16, max_bs=8,
        capture_hidden_mode=CaptureHiddenMode.NULL, capture_forward_mode=ForwardMode.EXTEND, is_multimodal=False,
        mamba_track_enabled=True, capture_return_pooled_hidden_states=False, quant_config=None, attention_layers=[],
        mha_companion_layers=[], has_mha_companion_layers=False, moe_layers=[], moe_fusions=[], dsa_indexers=None,
        require_mlp_tp_gather=False, require_attn_tp_gather=False, require_gathered_buffer=False,
        static_draft_hidden_states=None, _capture_req_slots=1, _is_full_backend=False, _full_cg_seq_lens_cpu=None,
        use_captured_attn_metadata=False, attn_metadata_buffers=None, enable_cp_bcg_capture=False,
        prefill_cp_bcg_input=None, _capture_chunked_prefix=False, _capture_lora=False, max_context_size=None,
        _qwen_bcg_hc_sidechannel=False,
        tbo_plugin=SimpleNamespace(capture_one_batch_size=lambda *_, **__: None),
    )  # fmt: skip
    runner.buffers = PrefillInputBuffers.create(
        **sizes, max_num_tokens=16, is_multimodal=False, hidden_size=4, dtype=torch.bfloat16, enable_mamba_track=True
    )
    runner.buffer_registry = build_prefill_registry(
        **sizes, max_num_token=16, enable_mamba_track=True, source=runner.buffers
    )
    names = module._PREFILL_STATIC_FIELDS
    runner._prefill_static_buffers = {name: torch.zeros(8, dtype=torch.int64) for name in names}
    runner.backend = backends.BreakableCudaGraphBackend(runner)
    with torch.no_grad():
        runner.capture()
    model_runner.prefill_cuda_graph_runner = runner
    return runner
