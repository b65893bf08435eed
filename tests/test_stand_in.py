"""A stand-in is to SGLang's lookup what a model's layer of that shape is, or it is refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from record_values import shape

from sglang_moe_autotune import stand_in

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

BLOCK = {"dtype": "fp8_w8a8", "block_shape": (128, 128)}


@pytest.mark.parametrize(
    ("changes", "padding", "says"),
    [
        pytest.param({}, 0, "", id="bf16"),
        pytest.param({"activation_dtype": "float16"}, 0, "", id="fp16"),
        pytest.param({"variant": ("no-combine", "router-weight-on-input")}, 0, "", id="flags-of-the-launch"),
        pytest.param(BLOCK, 128, "", id="fp8-block-is-never-padded"),
        pytest.param({"dtype": "fp8_w8a8", "per_channel_quant": True}, 0, "", id="fp8-channel"),
        pytest.param({"dtype": "fp8_w8a8", "per_channel_quant": True}, 128, "SGLANG_MOE_PADDING", id="fp8-padded"),
        pytest.param({"dtype": "fp8_w8a8"}, 0, "one scale for an expert", id="fp8-tensor"),
        pytest.param({**BLOCK, "w2_shape": (128, 2048, 704)}, 0, "no fp8_w8a8 weights of N=704", id="ragged-blocks"),
        pytest.param({"block_shape": (128, 128)}, 0, "no unquantised weights", id="bf16-in-blocks"),
        pytest.param({"dtype": "int4_w4a16"}, 0, "packs int4_w4a16", id="int4"),
        pytest.param({"dtype": "int8_w8a8", "per_channel_quant": True}, 0, "packs int8_w8a8", id="int8"),
        pytest.param({"dtype": "float32", "activation_dtype": "float32"}, 0, "float32", id="fp32"),
        pytest.param({"ep": True}, 0, "other ranks", id="expert-parallel"),
        pytest.param({"variant": ("bias", "ungated")}, 0, "bias cannot be made up", id="bias"),
    ],
)
def test_what_can_be_made_up(changes: dict[str, Any], padding: int, says: str) -> None:
    reason = stand_in.refusal(shape(**changes), padding)
    assert says in reason
    assert bool(reason) == bool(says)


@pytest.mark.parametrize(
    ("free_layers", "expected"),
    [(0.5, 0), (1.9, 0), (2, 1), (4.5, 2), (100, stand_in.WANTED)],
    ids=["none", "almost", "one", "two", "plenty"],
)
def test_half_of_what_is_free_is_left_for_activations(free_layers: float, expected: int) -> None:
    made = shape()
    assert stand_in.count(made, int(free_layers * stand_in.layer_bytes(made))) == expected


def build(fields):  # type: ignore[no-untyped-def] # its source runs in the scheduler process
    """Build two layers on the CPU; what the lookup and the launch see of them."""
    import torch  # noqa: PLC0415 - as above

    from sglang_moe_autotune import errand, releases, stand_in  # noqa: PLC0415 - as above
    from sglang_moe_autotune.launch import LaunchRecorder  # noqa: PLC0415 - as above
    from sglang_moe_autotune.layers import Buffers, gemm_call, quant_info  # noqa: PLC0415 - as above
    from sglang_moe_autotune.lookup import read_answer  # noqa: PLC0415 - as above

    releases.publish_server_args()
    releases.config_module().get_device_name = lambda *_: "NVIDIA H200"
    made = errand.shape_of_fields(fields)
    layers = stand_in.build(made, 2, "cpu", seed=3)
    quant = quant_info(layers[0].module)
    found = {
        "same_shape": all(layer.shape(layer.key) == made for layer in layers),
        "weights_differ": not torch.equal(
            quant.w13_weight.view(torch.uint8), quant_info(layers[1].module).w13_weight.view(torch.uint8)
        ),
        "finite": bool(quant.w2_weight.float().isfinite().all()),
        "spread": float(quant.w13_weight.float().std()),
        "scales": None if quant.w13_scale is None else [list(quant.w13_scale.shape), list(quant.w2_scale.shape)],
    }
    if made.dtype is None:  # fp8 activations are quantised on a GPU only
        M, K, N, top_k = 16, made.K, made.N, made.top_k  # noqa: N806
        dtype = quant.w13_weight.dtype
        ids = torch.zeros(M, top_k, dtype=torch.int32)
        rest = (torch.ones(M, top_k), ids, *(torch.zeros(64, dtype=torch.int32) for _ in range(3)))
        recorder = LaunchRecorder(releases.invoke_function())
        pair = read_answer(releases.ask_stock(made, M))
        for gemm, a, c in (
            ("up", torch.zeros(M, K, dtype=dtype), torch.zeros(M * top_k, 2 * N, dtype=dtype)),
            ("down", torch.zeros(M * top_k, N, dtype=dtype), torch.zeros(M, top_k, K, dtype=dtype)),
        ):
            args, named = gemm_call(gemm, layers[0], quant, Buffers(a, c, *rest), top_k, pair.of(gemm).to_dict())
            launch = recorder.record(*args, **{k: v for k, v in named.items() if k in recorder.parameters})
            found[gemm] = [launch.kernel.__name__, launch.kwargs["BLOCK_SIZE_M"]]
    return found


@pytest.mark.sglang
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sglang_launches_a_stand_in_as_a_layer(scheduler: SchedulerProcess, dtype: str) -> None:
    found = scheduler.run(build, f"E=8,N=256,K=512,top_k=2,dtype={dtype}")
    assert found["spread"] == pytest.approx(0.02, rel=0.05)
    assert found["up"] == found["down"] == ["fused_moe_kernel", 64]
    assert (found["same_shape"], found["weights_differ"], found["finite"], found["scales"]) == (True, True, True, None)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("how", "scales"),
    [
        pytest.param("block=128x128", [[8, 4, 4], [8, 4, 2]], id="block"),
        pytest.param("per_channel=1", [[8, 512, 1], [8, 512, 1]], id="channel"),
    ],
)
def test_fp8_weights_come_with_the_scales_that_sglang_keeps(
    scheduler: SchedulerProcess, how: str, scales: list[list[int]]
) -> None:
    found = scheduler.run(build, f"E=8,N=256,K=512,top_k=2,dtype=fp8_w8a8,{how}")
    assert (found["same_shape"], found["weights_differ"], found["finite"]) == (True, True, True)
    assert found["scales"] == scales
