"""What the plugin counts on in an SGLang, as rules by part; ``fit`` holds a release's source against them.

Where releases differ a rule is a choice (``OneOf``), each way with a word for it. ``releases`` is the code that goes
these ways. A rule is here because code of this package reads or calls what it names.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from sglang_moe_autotune.graph_contract import BACKEND_USES, OLD_USES
from sglang_moe_autotune.targets import BATCH, IDLE, LOAD, LOOKUP, RECEIVE, REQUESTS, SERVER_INFO, HookTarget

Part = Literal[
    "hooks", "lookup", "layers", "launch", "pauses", "requests", "batches", "arguments",
    "graphs", "recapture", "server info", "ranks", "vote",
]


class Hooked(NamedTuple):
    """A hook's target is there, and takes what its hook counts on."""

    target: HookTarget


class Takes(NamedTuple):
    """A function begins with the arguments ``leading`` and needs no other one but, at most, ``named``."""

    module: str
    name: str
    leading: tuple[str, ...]
    named: tuple[str, ...] = ()


class Has(NamedTuple):
    """A class (or, without ``owner``, a module) has these names."""

    module: str
    owner: str
    names: tuple[str, ...]


class Lacks(NamedTuple):
    """A module has not this name."""

    module: str
    name: str


class Calls(NamedTuple):
    """One of these modules calls something of this name: a hook on what nobody calls would wait for ever."""

    modules: tuple[str, ...]
    name: str


class Says(NamedTuple):
    """A module's text has these words in it as strings or names."""

    module: str
    words: tuple[str, ...]


class Returns(NamedTuple):
    """A function returns values of these forms and no others: ``_`` is any one value, ``(_, _)`` a pair."""

    module: str
    name: str
    forms: tuple[str, ...]


class LaunchesTriton(NamedTuple):
    """A function names a Triton kernel of its own module."""

    module: str
    name: str


class OneOf(NamedTuple):
    """At least one of the ways is there in full; each has a word for the table of releases."""

    ways: tuple[tuple[str, tuple[Rule, ...]], ...]


Rule = Hooked | Takes | Has | Lacks | Calls | Says | Returns | LaunchesTriton | OneOf

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_COMPONENTS: Final = "sglang.srt.managers.scheduler_components"
_RUNNER: Final = "sglang.srt.model_executor.model_runner"
_DECODE: Final = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
_PREFILL: Final = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
_OLD_DECODE: Final = "sglang.srt.model_executor.cuda_graph_runner"
_OLD_PREFILL: Final = "sglang.srt.model_executor.piecewise_cuda_graph_runner"
_LAYERS: Final = "sglang.srt.layers"
_TRITON_UTILS: Final = LOOKUP.module.rpartition(".")[0]
_FUSED: Final = f"{_TRITON_UTILS}.fused_moe"
_REQUESTS: Final = "sglang.srt.managers.io_struct"
_BATCH: Final = "sglang.srt.managers.schedule_batch"

QUANT_FIELDS: Final = (
    "w13_weight", "w2_weight", "b13", "b2", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16",
    "per_channel_quant", "w13_scale", "w2_scale", "w13_zp", "w2_zp", "a13_scale", "a2_scale", "block_shape",
)  # fmt: skip
"""what ``layers`` reads of SGLang's TritonMoeQuantInfo"""

LAYER_FIELDS: Final = (
    "top_k", "num_experts", "num_local_experts", "is_gated", "no_combine", "apply_router_weight_on_input",
)  # fmt: skip
"""what ``layers`` reads of SGLang's MoeRunnerConfig"""

LAUNCH_LEADING: Final = (
    "A", "B", "bias", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids", "sorted_token_ids", "expert_ids",
    "num_tokens_post_padded", "mul_routed_weight", "top_k", "config",
)  # fmt: skip
LAUNCH_NAMED: Final = (
    "compute_type", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant",
    "block_shape", "filter_expert", "router_topk",
)  # fmt: skip
"""how ``layers.gemm_call`` calls SGLang's ``invoke_fused_moe_kernel``"""

SETTINGS: Final = (
    "tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "enable_lora", "disaggregation_mode",
    "enable_fused_moe_sum_all_reduce", "speculative_num_draft_tokens", "enable_dp_attention", "elastic_ep_backend",
    "attn_cp_size", "moe_dp_size",
)  # fmt: skip
"""server arguments that decide whether and where a server tunes"""

HARMLESS_REQUESTS: Final = frozenset({
    "TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "BatchTokenizedGenerateReqInput",
    "BatchTokenizedEmbeddingReqInput", "AbortReq", "OpenSessionReqInput", "CloseSessionReqInput", "GetInternalStateReq",
    "SetInternalStateReq", "GetLoadsReqInput", "WatchLoadUpdateReq", "SlowDownReqInput", "FreezeGCReq",
    "ConfigureLoggingReq", "GetHiCacheL3LayoutReq", "ListExternalCorporaReqInput",
})  # fmt: skip
"""requests beside which a bench may stay open. Any other one, and one that a later release adds, may pause the
engine or move weights, caches, experts or adapters."""

LAUNCH: Final = (_FUSED, "invoke_fused_moe_kernel")
"""module and name of the function that launches the kernels"""

UNSUPPORTED: Final[dict[str, str]] = {}
"""releases that this package states not to support, with the reason"""

WITHOUT: Final[dict[Part, tuple[str, ...]]] = {
    "recapture": ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
}
"""releases that are known to lack a part which is not needed"""

NEEDED: Final[tuple[Part, ...]] = (
    "hooks", "lookup", "layers", "launch", "pauses", "requests", "batches", "arguments",
)  # fmt: skip
"""without one of these the plugin stands aside; without another it does less"""

CONTRACT: Final[dict[Part, tuple[Rule, ...]]] = {
    "hooks": (
        Has("sglang.srt.plugins.hook_registry", "HookType", ("BEFORE", "AFTER", "AROUND")),
        Takes("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("cls", "target", "hook", "hook_type")),
        *(Hooked(target) for target in (LOOKUP, IDLE, BATCH, LOAD, REQUESTS)),
        Calls((_FUSED,), LOOKUP.name),
        Calls((_SCHEDULER, "sglang.srt.managers.scheduler_runtime_checker_mixin"), IDLE.name.split(".")[-1]),
        Calls((_SCHEDULER,), BATCH.name.split(".")[-1]),
        Calls((_SCHEDULER,), REQUESTS.name.split(".")[-1]),
        Calls((_RUNNER,), LOAD.name.split(".")[-1]),
    ),
    "lookup": (
        Returns(LOOKUP.module, LOOKUP.name, ("_", "(_, (_, _))")),
        Takes(LOOKUP.module, "get_config_file_name", ("E", "N", "dtype", "block_shape", "per_channel_quant")),
        Takes(LOOKUP.module, "get_moe_configs", ("E", "N", "dtype", "block_n", "block_k", "per_channel_quant")),
        Takes(_TRITON_UTILS, "get_config", ()),
        OneOf((
            ("get_exec", (Has(LOOKUP.module, "", ("get_exec",)),)),
            ("get_server_args", (Has(LOOKUP.module, "", ("get_server_args",)),)),
            ("get_global_server_args", (Has(LOOKUP.module, "", ("get_global_server_args",)),)),
        )),
    ),
    "layers": (
        Has("sglang.srt.layers.moe.moe_runner.triton", "TritonMoeQuantInfo", QUANT_FIELDS),
        Has("sglang.srt.layers.moe.moe_runner.base", "MoeRunnerConfig", LAYER_FIELDS),
        Has("sglang.srt.layers.moe.moe_runner.runner", "MoeRunner", ("runner_backend",)),
        Has("sglang.srt.layers.moe.utils", "MoeRunnerBackend", ("is_triton",)),
        Has("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE", ("quant_method", "moe_runner_config")),
        Takes(f"{_LAYERS}.quantization.base_config", "FusedMoEMethodBase.get_triton_quant_info", ("self", "layer")),
        Has(_FUSED, "", ("padding_size",)),
        Has(_RUNNER, "ModelRunner", ("model", "dtype", "server_args")),
    ),
    "launch": (
        Takes(*LAUNCH, LAUNCH_LEADING, LAUNCH_NAMED),
        LaunchesTriton(*LAUNCH),
        Takes(_FUSED, "moe_align_block_size", ("topk_ids", "block_size", "num_experts")),
    ),
    "pauses": (
        Has(_SCHEDULER, "Scheduler", ("_engine_paused",)),
        OneOf((
            (
                "weight_updater",
                (
                    Has(_SCHEDULER, "Scheduler", ("weight_updater", "profiler_manager")),
                    Has(f"{_COMPONENTS}.weight_updater", "SchedulerWeightUpdaterManager", ("offload_tags",)),
                    Has(f"{_COMPONENTS}.profiler_manager", "SchedulerProfilerManager", ("profile_in_progress",)),
                ),
            ),
            ("scheduler", (Has(_SCHEDULER, "Scheduler", ("offload_tags", "profile_in_progress")),)),
        )),
        OneOf((
            (
                "update session",
                (
                    Has(_REQUESTS, "", ("BeginWeightUpdateReqInput",)),
                    Has(f"{_COMPONENTS}.weight_updater", "SchedulerWeightUpdaterManager", ("_session",)),
                ),
            ),
            ("", (Lacks(_REQUESTS, "BeginWeightUpdateReqInput"),)),
        )),
    ),
    "requests": (
        Has(_REQUESTS, "", ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "AbortReq")),
        Takes(_SCHEDULER, REQUESTS.name, ("self", "recv_reqs")),
    ),
    "batches": (
        Takes(_SCHEDULER, BATCH.name, ("self", "batch")),
        Has(_BATCH, "ScheduleBatch", ("reqs", "forward_mode", "extend_num_tokens")),
        Has(_BATCH, "Req", ("rid",)),
        Takes("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_extend", ("self",)),
        Says("sglang.srt.constants", ("HEALTH_CHECK_RID_PREFIX", "HEALTH_CHECK")),
    ),
    "arguments": (
        OneOf((
            ("fields", (Has("sglang.srt.server_args", "ServerArgs", SETTINGS),)),
            ("declared fields", (Says("sglang.srt.arg_groups.field_order", SETTINGS),)),
        )),
        OneOf((
            (
                "resolved beside the input",
                (
                    Has("sglang.srt.arg_groups.overrides", "", ("declare_resolution",)),
                    Says("sglang.srt.arg_groups.overrides", ("_resolved_overrides",)),
                ),
            ),
            ("", (Lacks("sglang.srt.arg_groups.overrides", "declare_resolution"),)),
        )),
    ),
    "graphs": (
        Has(_SCHEDULER, "Scheduler", ("tp_worker",)),
        Has("sglang.srt.managers.tp_worker", "TpModelWorker", ("model_runner",)),
        OneOf((
            (
                "decode_cuda_graph_runner",
                (
                    Has(_RUNNER, "ModelRunner", ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")),
                    Has(_DECODE, "DecodeCudaGraphRunner", ("capture_bs",)),
                    Has(_PREFILL, "PrefillCudaGraphRunner", ("capture_num_tokens",)),
                ),
            ),
            (
                "graph_runner",
                (
                    Has(_RUNNER, "ModelRunner", ("graph_runner", "piecewise_cuda_graph_runner")),
                    Has(_OLD_DECODE, "CudaGraphRunner", ("capture_bs",)),
                    Has(_OLD_PREFILL, "PiecewiseCudaGraphRunner", ("capture_num_tokens",)),
                ),
            ),
        )),
    ),
    "recapture": (
        OneOf((
            ("one shape", tuple(Has(*use) for use in BACKEND_USES)),
            ("one batch size", tuple(Has(*use) for use in OLD_USES)),
        )),
    ),
    "server info": (
        Hooked(SERVER_INFO),
        Has(_REQUESTS, "GetInternalStateReqOutput", ("internal_state",)),
    ),
    "ranks": (
        OneOf((
            ("", (Has(_SCHEDULER, "Scheduler", ("ps",)),)),
            ("", (Has(_SCHEDULER, "Scheduler", ("tp_rank",)),)),
            ("", (Has("sglang.srt.runtime_context", "", ("get_parallel",)),)),
        )),
    ),
    "vote": (
        Has(_REQUESTS, "AbortReq", ("rid",)),
        OneOf((
            ("", (Hooked(RECEIVE), Calls((RECEIVE.module,), RECEIVE.name.split(".")[-1]))),
            ("", (Lacks(RECEIVE.module, "SchedulerRequestReceiver"),)),  # before 0.5.13 there is no vote
        )),
    ),
}  # fmt: skip
