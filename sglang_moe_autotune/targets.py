"""What of SGLang the plugin hooks."""

from __future__ import annotations

from typing import NamedTuple


class HookTarget(NamedTuple):
    """A function or method by module and dotted name."""

    module: str
    name: str
    arguments: tuple[str, ...] | None = None
    """the exact argument names that the hook counts on; None: it passes on whatever comes"""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


LOOKUP = HookTarget(
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
    "try_get_optimal_moe_config",
    (
        "w1_shape",
        "w2_shape",
        "top_k",
        "dtype",
        "M",
        "is_marlin",
        "block_shape",
        "per_channel_quant",
        "return_down_config",
    ),
)
IDLE = HookTarget("sglang.srt.managers.scheduler", "Scheduler.maybe_sleep_on_idle")
BATCH = HookTarget("sglang.srt.managers.scheduler", "Scheduler.run_batch")
LOAD = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.load_model")
REQUESTS = HookTarget("sglang.srt.managers.scheduler", "Scheduler.process_input_requests")
TARGETS = (LOOKUP, IDLE, BATCH, LOAD, REQUESTS)
SERVER_INFO = HookTarget("sglang.srt.managers.scheduler", "Scheduler.get_internal_state")
CONTROL = HookTarget("sglang.srt.managers.scheduler", "Scheduler.set_internal_state")
CAPTURE = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.init_cuda_graphs")
CAPTURE_BEFORE_0516 = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.init_device_graphs")
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
RECEIVE = HookTarget(_RECEIVER, "SchedulerRequestReceiver._pull_raw_reqs")
"""These five are not in ``TARGETS``: without them the server says less, is switched by the file alone, has no window
before its graphs are captured, puts no vote on them to all ranks, and tunes all the same."""
