"""What is read out of the SGLang that runs here; the one place that knows how releases differ."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune.contract import HARMLESS_REQUESTS
from sglang_moe_autotune.records import Environment, Origin
from sglang_moe_autotune.sglang_json import folder_name
from sglang_moe_autotune.targets import LOOKUP
from sglang_moe_autotune.votes import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from sglang_moe_autotune.heat import BatchKind
    from sglang_moe_autotune.shapes import MoeShape

_TRITON_UTILS = LOOKUP.module.rpartition(".")[0]
_HEALTH_PREFIX = "HEALTH_CHECK"


@functools.cache
def version() -> str:
    """Of the SGLang that runs. Kept: looking it up takes a millisecond, for which requests may have to wait."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def config_module() -> ModuleType:
    return importlib.import_module(LOOKUP.module)


def fused_module() -> ModuleType:
    return importlib.import_module(f"{_TRITON_UTILS}.fused_moe")


def invoke_function() -> Callable[..., Any]:
    """SGLang's ``invoke_fused_moe_kernel``, wherever this release keeps it."""
    function: Callable[..., Any] = fused_module().invoke_fused_moe_kernel
    return function


def padding() -> int:
    """Columns that SGLang pads 8-bit weights without blocks by; the lookup takes them off."""
    fused = fused_module()
    return 0 if getattr(fused, "_use_aiter", False) else int(fused.padding_size)


def overridden() -> bool:
    """Is SGLang's own ``override_config`` active? Called on the hot path: one call that reads a global."""
    return _triton_utils().get_config() is not None


@functools.cache
def _triton_utils() -> ModuleType:
    return importlib.import_module(_TRITON_UTILS)


def deterministic() -> bool:
    """Is deterministic inference on? Then SGLang's fixed tile must stand."""
    config = config_module()
    if hasattr(config, "get_exec"):
        return bool(config.get_exec().deterministic.enable_deterministic_inference)
    name = "get_server_args" if hasattr(config, "get_server_args") else "get_global_server_args"
    return bool(getattr(config, name)().enable_deterministic_inference)


def publish_server_args(**arguments: Any) -> Any:
    """Give SGLang the configuration that its lookup and kernels ask for, as an empty server with these arguments would
    have it."""
    try:
        override = importlib.import_module("sglang.srt.runtime_context").get_context().override_server_args
    except (ImportError, AttributeError):  # before 0.5.16
        module = importlib.import_module("sglang.srt.server_args")
        server_args = module.ServerArgs(model_path="dummy", **arguments)
        module.set_global_server_args_for_scheduler(server_args)
        return server_args
    return override(**arguments).install()


def stock_lookup() -> Callable[..., Any]:
    """SGLang's own ``try_get_optimal_moe_config``, beneath the hooks."""
    function: Callable[..., Any] = inspect.unwrap(config_module().try_get_optimal_moe_config)
    return function


def ask_stock(shape: MoeShape, M: int) -> Any:  # noqa: N803
    """SGLang's own answer for a shape. Reads files the first time: never on the hot path."""
    return stock_lookup()(
        shape.w1_shape,
        shape.w2_shape,
        shape.top_k,
        shape.dtype,
        M,
        block_shape=list(shape.block_shape) if shape.block_shape else None,
        per_channel_quant=shape.per_channel_quant,
        return_down_config=True,
    )


def configs_folder() -> Path:
    """The folder ``configs`` that SGLang's lookup reads now."""
    config = config_module()
    root = os.environ.get("SGLANG_MOE_CONFIG_DIR", str(Path(os.path.realpath(str(config.__file__))).parent))
    return Path(root) / "configs"


def shipped_folder() -> Path:
    """The folder of config files that the installed SGLang ships; a prior, whatever the lookup reads."""
    return Path(os.path.realpath(str(config_module().__file__))).parent / "configs"


def origin(shape: MoeShape) -> Origin:
    """Where SGLang's answer for a shape comes from: a file of this Triton, one of another, or its heuristic.

    SGLang's own lookup does not tell the first two apart, and which other Triton versions it looks for differs:
    0.5.11 knows four, later releases take any. Reads files: never on the hot path.
    """
    import triton  # noqa: PLC0415 - its version only

    block = shape.block_shape or (0, 0)
    name = config_module().get_config_file_name(shape.E, shape.N, shape.dtype, list(block), shape.per_channel_quant)
    if (configs_folder() / folder_name(triton.__version__) / name).exists():
        return "exact"
    try:
        # As SGLang's own lookup calls it, so that its cache answers and its warning is not repeated.
        found = config_module().get_moe_configs(
            shape.E, shape.N, shape.dtype, *block, per_channel_quant=shape.per_channel_quant, down_moe=False
        )
    except (OSError, ValueError):  # the folder cannot be listed, or holds a version that is no number
        return "miss"
    return "fallback" if found else "miss"


def kernel_hash(invoke: Callable[..., Any]) -> str:
    """A hash of the kernels' sources and of the function that launches them."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - the type only

    function: Any = inspect.unwrap(invoke)
    digest = hashlib.sha256(inspect.getsource(function).encode())
    for name in sorted(set(function.__code__.co_names)):
        if isinstance(kernel := function.__globals__.get(name), JITFunction):
            digest.update(kernel.src.encode())
    return digest.hexdigest()[:16]


def environment(invoke: Callable[..., Any]) -> Environment:
    """The environment of this process's current GPU."""
    import torch  # noqa: PLC0415 - imported by SGLang long before
    import triton  # noqa: PLC0415 - as above

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Environment(
        device_name=gpu.name,
        capability=(gpu.major, gpu.minor),
        sm_count=gpu.multi_processor_count,
        shared_memory_bytes=_shared_memory_bytes(gpu),
        l2_bytes=int(gpu.L2_cache_size),
        triton=triton.__version__,
        kernel_hash=kernel_hash(invoke),
    )


def _shared_memory_bytes(gpu: Any) -> int:
    """What a block may have at the most. PyTorch on ROCm does not tell more than it has without asking."""
    return int(getattr(gpu, "shared_memory_per_block_optin", 0) or getattr(gpu, "shared_memory_per_block", 0))


def driver_version() -> str:
    """The NVIDIA driver's version from the kernel's own file, "" where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((w for w in words if w[:1].isdigit() and w.count(".") >= 1), "")


def setting(server_args: Any, name: str, default: Any = None) -> Any:
    """A server argument as SGLang resolved it.

    From 0.5.19 on the attribute keeps what the user wrote, and what SGLang decided stands in a list beside it, the
    last one last; 0.5.15 to 0.5.18 do so for some arguments.
    """
    for _, decided in reversed(getattr(server_args, "_resolved_overrides", None) or ()):
        if name in decided:
            return decided[name]
    return getattr(server_args, name, default)


def place(scheduler: Any) -> tuple[int, int]:
    """This process's rank among those that share each layer (tensor and expert parallelism), and their number."""
    size = setting(scheduler.server_args, "tp_size") or 1
    if size == 1:
        return 0, 1
    state = getattr(scheduler, "ps", None)
    if state is None and not hasattr(scheduler, "tp_rank"):
        state = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return int((state if state is not None else scheduler).tp_rank), size


def ranks(server_args: Any) -> int:
    """How many ranks share the model."""
    return max(1, *(setting(server_args, name) or 1 for name in ("tp_size", "pp_size", "dp_size", "ep_size")))


_SPREAD = (
    ("nnodes", "several nodes: that their ranks agree was not shown"),
    ("pp_size", "pipeline parallelism: each stage waits for the one before it, so slices would add up"),
    ("dp_size", "data parallelism: that its ranks agree was not shown"),
    ("attn_cp_size", "context parallelism: that its ranks agree was not shown"),
    ("moe_dp_size", "data parallelism of the experts: that its ranks agree was not shown"),
)


def why_apart(server_args: Any) -> str:
    """Why the ranks of this server cannot agree, or ""."""
    if setting(server_args, "enable_dp_attention"):
        return "DP attention: a rank without requests runs along with the others, so no rank can tell that it is idle"
    if setting(server_args, "elastic_ep_backend"):
        return "elastic expert parallelism: ranks come and go, and that they agree was not shown"
    return next((why for name, why in _SPREAD if (setting(server_args, name) or 1) > 1), "")


def why_never(server_args: Any) -> str:
    """Why this server must not tune at all, or "". Asked once."""
    if why := why_apart(server_args):
        return why
    if setting(server_args, "enable_fused_moe_sum_all_reduce"):
        return "--enable-fused-moe-sum-all-reduce changes the down GEMM, which is not tuned yet"
    if setting(server_args, "enable_lora"):
        return "LoRA adapters can be loaded between two batches, and tuning beside that is not shown to be safe yet"
    if (setting(server_args, "disaggregation_mode") or "null") != "null":
        return "disaggregated prefill and decode are not shown to be safe yet"
    if os.environ.get("SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY", "").lower() in {"1", "true", "yes"}:
        return "SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY would end the server at the first candidate"
    return ""


def why_not_now(scheduler: Any) -> str:
    """Why this idle pass must launch nothing, or "". Asked in every idle pass: attribute reads only.

    Raises AttributeError where a release does not tell: not knowing must end tuning, never pass for a yes. 0.5.11 and
    0.5.12 keep on the scheduler what later releases keep in parts of it; sessions came with 0.5.21.
    """
    if scheduler._engine_paused:
        return "the engine is paused"
    owner = getattr(scheduler, "weight_updater", scheduler)
    if owner.offload_tags:
        return "weights or caches are released"
    if getattr(owner, "_session", None) is not None:
        return "weights are being updated"
    if getattr(scheduler, "profiler_manager", scheduler).profile_in_progress:
        return "the profiler is on"
    return ""


def capturing() -> bool:
    """Is the current stream being captured? Then whatever is launched would become part of a graph."""
    import torch  # noqa: PLC0415 - imported by SGLang long before

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def request_sockets(scheduler: Any) -> tuple[Any, ...]:
    """The ZeroMQ sockets that this rank receives requests by. They are the scheduler's own attributes in 0.5.11; ranks
    that receive by broadcast have None, SGLang's test runtime a proxy, and the Rust server (0.5.20 on) uses none."""
    if getattr(scheduler, "rust_server", None) is not None:
        return ()
    channels = getattr(scheduler, "ipc_channels", scheduler)
    found = (getattr(channels, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc"))
    return tuple(s for s in found if type(s).__module__.startswith("zmq."))


def disturbs(requests: Any) -> bool:
    """May one of the received requests pause the engine, or move weights, caches, experts or adapters?"""
    return any(type(request).__name__ not in HARMLESS_REQUESTS for request in requests)


def announcement(message: str) -> Any:
    """A request that carries a message to all ranks. It aborts a request that does not exist, so a rank that does
    not know the message does nothing."""
    return importlib.import_module("sglang.srt.managers.io_struct").AbortReq(rid=message)


def announced(requests: Any) -> list[str]:
    """The messages among what was received."""
    rids = (request.rid for request in requests if type(request).__name__ == "AbortReq")
    return [rid for rid in rids if isinstance(rid, str) and rid.startswith(PREFIX)]


def is_filler(batch: Any) -> bool:
    """A batch without requests, run along because another rank has some."""
    return not batch.reqs


def batch_tokens(scheduler: Any, batch: Any) -> tuple[BatchKind, int] | None:
    """Kind and tokens of a batch that is about to run; None for health probes and empty batches."""
    requests = batch.reqs
    if not requests or all(str(r.rid).startswith(_HEALTH_PREFIX) for r in requests):
        return None
    if batch.forward_mode.is_extend():
        return "prefill", int(batch.extend_num_tokens or 0)
    return "decode", len(requests) * _drafts(scheduler)


def _drafts(scheduler: Any) -> int:
    """Tokens that a decode step runs for each request: more than one where drafts are verified."""
    return setting(scheduler.server_args, "speculative_num_draft_tokens") or 1


def sizes_to_capture(model_runner: Any) -> dict[BatchKind, list[int]]:
    """Tokens of the graphs that will be captured, by kind. SGLang leaves sizes out that its pools do not hold, and adds
    the pool's own: these cost a search, or miss one."""
    args = model_runner.server_args
    config = config_module()
    graphs = config.get_exec().graph.cuda_graph_config if hasattr(config, "get_exec") else args
    graphs = getattr(graphs, "cuda_graph_config", graphs)
    drafts = setting(args, "speculative_num_draft_tokens") or 1
    if hasattr(graphs, "decode"):  # 0.5.16 on
        found = graphs.decode.bs, graphs.prefill.bs
    else:
        found = setting(graphs, "cuda_graph_bs"), setting(graphs, "piecewise_cuda_graph_tokens")
    return {"decode": sorted(bs * drafts for bs in found[0] or ()), "prefill": sorted(found[1] or ())}


def captured_sizes(scheduler: Any) -> Mapping[BatchKind, Sequence[int]]:
    """Tokens of the captured graphs by kind, ascending; what a release does not show is left out."""
    model_runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    drafts = _drafts(scheduler)
    sizes: dict[BatchKind, Sequence[int]] = {}
    for name in ("decode_cuda_graph_runner", "graph_runner"):
        if found := getattr(getattr(model_runner, name, None), "capture_bs", None):
            sizes["decode"] = sorted(size * drafts for size in found)
            break
    for name in ("prefill_cuda_graph_runner", "piecewise_cuda_graph_runner"):
        if found := getattr(getattr(model_runner, name, None), "capture_num_tokens", None):
            sizes["prefill"] = sorted(found)
            break
    return sizes
