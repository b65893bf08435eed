"""Graphs follow the served rows: late enough, one at a time, never for nothing, and not where it is not wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic import bf16_shape

from sglang_moe_autotune import graphs, recapture
from sglang_moe_autotune.captures import Size
from sglang_moe_autotune.graphs import Found
from sglang_moe_autotune.layers import call_key
from sglang_moe_autotune.lookup import Lookup
from sglang_moe_autotune.recapture import Recapture
from sglang_moe_autotune.settings import Settings
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

SHAPE = bf16_shape(E=8, N=256, K=512, top_k=2)
KEY = call_key(SHAPE)
ONE, TWO = (ConfigPair(c, c) for c in (KernelConfig(16, 64, 64, 1, 4, 3), KernelConfig(32, 64, 64, 1, 4, 3)))
GIB = 1 << 30


class MadeUpGraphs:
    """Asks the lookup as a capture does, and fails where it is told to."""

    def __init__(self, kind: Any, sizes: list[int], lookup: Lookup) -> None:
        self.kind, self._sizes, self._lookup = kind, sizes, lookup
        self.current = True
        self.captured: list[int] = []
        self.reasons: list[str] = []
        self.withdrawn: list[int] = []

    def sizes(self) -> list[Size]:
        return [Size(self.kind, size, size) for size in self._sizes]

    def ask(self, size: int) -> None:
        for _ in range(3):  # two warm-ups and the capture
            self._lookup.answer(KEY, size, return_down_config=True)

    def capture(self, size: int) -> str:
        self.captured.append(size)
        if self.reasons:
            return self.reasons.pop(0)
        self.ask(size)
        return ""

    def withdraw(self, size: int) -> None:
        self.withdrawn.append(size)


class Server:
    """A recapture with its lookup, its clock and made-up graphs of SGLang 0.5.16."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, backend: str = "triton", pool: str = "MHATokenToKVPool",
        ranks: int = 1, rows: dict[int, ConfigPair] | None = None, version: str = "0.5.16", unlike: str = "",
        **settings: Any,
    ) -> None:  # fmt: skip
        self.now_s = 1000.0
        self.free = 64 * GIB
        self.lookup = Lookup()
        self.decode = MadeUpGraphs("decode", [1, 8, 16, 64], self.lookup)
        self.prefill = MadeUpGraphs("prefill", [16, 4096], self.lookup)
        self.found = Found((self.decode, self.prefill), {}, pool, unlike)  # type: ignore[arg-type]
        monkeypatch.setattr(graphs, "find", lambda _: self.found)
        monkeypatch.setattr(recapture.releases, "version", lambda: version)
        monkeypatch.setattr(recapture, "SHOWN", {("0.5.16", "triton", "MHATokenToKVPool")})
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 80 * GIB))
        self.recapture = Recapture(Settings(**settings), self.lookup, lambda: [SHAPE], clock=lambda: self.now_s)
        self.lookup.publish([(KEY, M, pair) for M, pair in (rows or {}).items()])
        for some in (self.decode, self.prefill):
            for size in some.sizes():
                some.ask(size.size)
        self.recapture.attach(SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend, tp_size=ranks)))
        self.prepared = 0

    def learn(self, pair: ConfigPair | None, *ms: int) -> None:
        for M in ms:  # noqa: N806 - the field's name for it
            if pair is not None:
                self.recapture.adopted(KEY, M, pair)
        self.lookup.publish([(KEY, M, pair) for M in ms])

    def passes(self, count: int = 1, quiet_s: float = 60.0, *, overlays: bool = True, every_s: float = 1.0) -> int:
        """Idle passes; how many of them captured."""
        done = 0
        for _ in range(count):
            if self.recapture.ready(quiet_s, overlays=overlays):
                done += self.recapture.step(self._prepare)
            self.now_s += every_s
        return done

    def _prepare(self) -> None:
        self.prepared += 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_a_server_that_learned_nothing_captures_nothing(server: Server) -> None:
    assert server.recapture.mode == "idle"
    assert server.passes(100) == 0
    server.learn(ONE, 5)
    assert server.passes(100) == 0, "no graph has this M"


def test_learned_rows_reach_the_graphs_one_a_pass_when_they_stand(server: Server) -> None:
    server.learn(ONE, 16, 4096)
    server.recapture.served({16: 3, 4096: 40})
    assert server.passes(19) == 0, "another row of these sizes may come"
    assert server.passes(1, every_s=0.0) == 0
    server.now_s += 2.0
    assert server.passes(1, every_s=0.0) == 1
    assert server.prefill.captured == [4096], "the hottest first"
    assert server.passes(10) == 2
    assert server.decode.captured == [16]
    assert server.prefill.captured == [4096, 16]
    assert server.passes(100) == 0
    assert server.prepared == 3
    assert server.recapture.counts == {"recaptured": 3}
    assert {str(size) for size in server.recapture.pauses_s} == {"decode 16", "prefill 16", "prefill 4096"}


@pytest.mark.parametrize(("deep_idle_s", "bound_s"), [(0.0, 10.0), (10.0, 10.0), (30.0, 30.0)])
def test_never_within_ten_seconds_of_a_request(
    monkeypatch: pytest.MonkeyPatch, deep_idle_s: float, bound_s: float
) -> None:
    server = Server(monkeypatch, deep_idle_s=deep_idle_s)
    server.learn(ONE, 8)
    server.passes(40, quiet_s=0.0)
    assert server.passes(10, quiet_s=bound_s - 0.01) == 0
    assert server.passes(1, quiet_s=bound_s) == 1


def test_a_row_that_is_taken_back_leaves_the_graphs_first_and_at_once(server: Server) -> None:
    server.learn(ONE, 8, 16)
    server.passes(40)
    server.learn(TWO, 64)
    server.learn(None, 8)
    assert server.passes(1) == 1
    assert server.decode.captured[-1] == 8
    assert server.passes(40) == 1, "then what was learned"


def test_rows_that_are_not_served_any_more_leave_the_graphs(server: Server) -> None:
    """As where somebody switches the plugin off while it runs: lookups do not even ask then."""
    server.learn(ONE, 8)
    server.passes(40)
    server.decode.ask = lambda _: None  # type: ignore[method-assign]
    assert server.passes(40, overlays=False) == 1
    assert server.recapture.counts == {"recaptured": 2}
    assert not server.recapture.stale
    server.decode.ask = MadeUpGraphs.ask.__get__(server.decode)  # type: ignore[method-assign]
    assert server.passes(40, overlays=True) == 1, "and come back with it"


def test_stored_rows_that_the_first_capture_held_come_back_to_the_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, rows={8: ONE})
    assert server.passes(40) == 0
    server.decode.ask = lambda _: None  # type: ignore[method-assign]
    assert server.passes(40, overlays=False) == 1
    server.decode.ask = MadeUpGraphs.ask.__get__(server.decode)  # type: ignore[method-assign]
    assert server.passes(40, overlays=True) == 1
    assert server.recapture.put_off == {}


def test_a_failed_capture_is_tried_again_later_and_not_for_ever(server: Server) -> None:
    server.decode.reasons = ["OutOfMemoryError: planted"] * 99
    server.learn(ONE, 8)
    assert server.passes(1000) == 3
    assert server.recapture.counts == {"failed": 3}
    assert server.decode.withdrawn == []


def test_a_taken_back_row_that_cannot_leave_its_graph_takes_the_graph_out_of_use(server: Server) -> None:
    server.learn(ONE, 8)
    server.passes(40)
    server.decode.reasons = ["RuntimeError: planted"]
    server.learn(None, 8)
    assert server.passes(1) == 1
    assert server.decode.withdrawn == [8]
    assert server.passes(1000) == 0
    assert server.recapture.counts == {"recaptured": 1, "withdrawn": 1}


def test_a_capture_that_asked_for_nothing_is_a_failure(server: Server) -> None:
    server.decode.ask = lambda _: None  # type: ignore[method-assign]
    server.learn(ONE, 8)
    assert server.passes(1000) == 3
    assert server.recapture.counts == {"failed": 3}


def test_memory_is_looked_at_first(server: Server) -> None:
    server.free = 1 * GIB
    server.learn(ONE, 4096)
    server.passes(40)
    assert server.prefill.captured == []
    assert "reserve" in server.recapture.put_off[Size("prefill", 4096, 4096)]
    server.free = 64 * GIB
    assert server.passes(270) == 0, "not at every pass"
    assert server.passes(30) == 1
    assert server.prefill.captured == [4096]
    assert server.recapture.put_off == {}


def test_a_row_whose_binaries_may_be_missing_is_put_off(server: Server) -> None:
    server.lookup.publish([(KEY, 8, ONE)])
    server.passes(40)
    assert server.decode.captured == []
    assert "binaries" in server.recapture.put_off[Size("decode", 8, 8)]


def test_a_size_is_captured_a_few_times_only_but_taking_back_is_not_counted(server: Server) -> None:
    for turn in range(8):
        server.learn((ONE, TWO)[turn % 2], 8)
        server.passes(40)
    assert server.decode.captured == [8] * 4
    server.learn(None, 8)
    assert server.passes(1) == 1


@pytest.mark.parametrize(
    ("made", "mode", "word"),
    [
        pytest.param({}, "idle", "", id="shown"),
        pytest.param({"backend": "fa3"}, "restart", "fa3", id="attention backend not shown"),
        pytest.param({"pool": "HybridLinearKVPool"}, "restart", "HybridLinear", id="hybrid model not shown"),
        pytest.param({"ranks": 2}, "restart", "several ranks", id="several ranks"),
        pytest.param({"backend": "fa3", "recapture": "idle"}, "idle", "", id="the user's word"),
        pytest.param({"recapture": "restart"}, "restart", "set to restart", id="set to restart"),
        pytest.param({"recapture": "off"}, "off", "set to off", id="set to off"),
        pytest.param({"version": "0.5.16.post1"}, "restart", "SGLang 0.5.16.post1", id="another release"),
        pytest.param({"version": "0.5.16+local"}, "restart", "SGLang 0.5.16+local", id="somebody's own build"),
        pytest.param({"unlike": "no CUDA GPU"}, "restart", "not shown with no CUDA GPU", id="unlike what was shown"),
        pytest.param({"unlike": "a GPU", "recapture": "idle"}, "idle", "", id="unlike what was shown, and asked for"),
        pytest.param({"recapture": "idle", "mode": "restart"}, "off", "mode restart", id="answers must not change"),
    ],
)
def test_the_mode(monkeypatch: pytest.MonkeyPatch, made: dict[str, Any], mode: str, word: str) -> None:
    server = Server(monkeypatch, **made)
    assert server.recapture.mode == mode
    assert word in server.recapture.reason
    server.learn(ONE, 8)
    assert server.passes(100) == (mode == "idle")


def test_by_hand_what_is_stale_now_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, recapture="restart")
    server.learn(ONE, 8, 16)
    assert server.passes(100) == 0
    assert len(server.recapture.stale) == 3
    assert server.recapture.request().startswith("3 graphs")
    assert server.passes(10, quiet_s=9.0) == 0, "asked for, and still not beside a request"
    assert server.passes(10) == 3
    server.learn(ONE, 64)
    assert server.passes(100) == 0


def test_a_row_that_made_steps_slower_leaves_its_graphs_also_where_only_a_hand_brought_it_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, recapture="restart")
    server.learn(ONE, 8, 64)
    server.passes(30)
    server.recapture.request()
    assert server.passes(10) == 2
    made = server.recapture.made
    assert server.recapture.held("decode", 8) == {KEY: ONE}
    server.learn(None, 8, 64)
    server.recapture.take_out(8)
    assert server.passes(10, quiet_s=9.0) == 0, "not beside a request"
    assert server.passes(100) == 1
    assert server.recapture.held("decode", 8) == {KEY: None}
    assert server.recapture.held("decode", 64) == {KEY: ONE}
    assert server.recapture.made == made + 1


def test_what_is_not_known_of_a_graph_is_nothing(server: Server) -> None:
    assert server.recapture.held("decode", 7) == {}
    assert server.recapture.held("prefill", 4096) == {KEY: None}
    before, server.decode.current = server.recapture.made, False
    server.found = Found((server.prefill,), {})
    server.passes(1)
    assert server.recapture.made > before, "SGLang captured its graphs anew"
    assert server.recapture.held("decode", 8) == {}


def test_off_is_off_by_hand_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, recapture="off")
    server.learn(ONE, 8)
    assert "not captured again: set to off" in server.recapture.request()
    assert server.passes(100) == 0


def test_several_ranks_vote_and_are_driven_together(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, ranks=2, recapture="idle")
    server.learn(ONE, 8)
    assert server.passes(100) == 0, "never by itself"
    assert server.recapture.ready(60.0)
    (done,) = server.recapture.capture(server.recapture.due())
    assert (done.size, done.outcome) == (Size("decode", 8, 8), "recaptured")
    assert not server.recapture.ready(60.0)


def test_graphs_that_sglang_captured_anew_are_captured_again_where_a_row_was_served(server: Server) -> None:
    server.learn(ONE, 8)
    server.passes(40)
    renewed = MadeUpGraphs("decode", [1, 8, 16, 64], server.lookup)
    server.decode.current = False
    server.found = Found((renewed, server.prefill), {})  # type: ignore[arg-type]
    assert server.passes(100) == 1
    assert renewed.captured == [8]


def test_a_server_without_graphs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.found = Found((), {"all": "not shown to be safe with --enable-lora"})
    server.recapture.attach(SimpleNamespace(server_args=SimpleNamespace(attention_backend="triton")))
    assert server.recapture.mode == "off"
    assert "enable-lora" in server.recapture.reason


def test_an_sglang_that_moved_its_graphs_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(monkeypatch)

    def moved(_: object) -> None:
        raise AttributeError("no tp_worker")

    monkeypatch.setattr(graphs, "find", moved)
    server.recapture.attach(SimpleNamespace(server_args=SimpleNamespace(attention_backend="triton")))
    assert server.recapture.mode == "off"
    assert "no tp_worker" in server.recapture.reason
    assert len(caplog.records) == 1


class FullCudaGraphBackend:
    """By SGLang's name."""


class BreakableCudaGraphBackend:
    """By SGLang's name."""


def scheduler(**changes: Any) -> Any:
    """A scheduler whose decode graphs can be captured again, as a server has it where that was shown."""
    arguments = {"attention_backend": "triton", "disaggregation_mode": "null", "offload_group_size": -1}
    model = {"is_multimodal": False, "is_generation": True, "backend": FullCudaGraphBackend(),
             "kv_cache_dtype": torch.bfloat16, "dtype": torch.bfloat16,
             "model_config": SimpleNamespace(quantization=None)}  # fmt: skip
    model |= {name: changes.pop(name) for name in set(changes) & {*model, "pool", "attention"}}
    runner = type("DecodeCudaGraphRunner", (), {})()
    vars(runner).update(buffer_registry=None, backend=model.pop("backend"), capture_bs=[1])
    model_runner = SimpleNamespace(
        req_to_token_pool=type("ReqToTokenPool", (), {"free_slots": [1, 2]})(), decode_cuda_graph_runner=runner,
        token_to_kv_pool=model.pop("pool", named("MHATokenToKVPool")),
        attn_backend=model.pop("attention", named("TritonAttnBackend")), **model,
    )  # fmt: skip
    server_args = SimpleNamespace(**{**arguments, **changes})
    return SimpleNamespace(server_args=server_args, tp_worker=SimpleNamespace(model_runner=model_runner))


def named(name: str, **parts: str) -> Any:
    return type(name, (), {part: named(of) for part, of in parts.items()})()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


HYBRID = {
    "pool": named("HybridLinearKVPool", full_kv_pool="MHATokenToKVPool"),
    "attention": named("HybridLinearAttnBackend", linear_attn_backend="GDNAttnBackend"),
}


@pytest.mark.parametrize("changes", [{}, HYBRID, {"decode_attention_backend": "triton"}])
@pytest.mark.usefixtures("h200")
def test_a_server_like_the_shown_ones(changes: dict[str, Any]) -> None:
    found = graphs.find(scheduler(**changes))
    assert len(found.graphs) == 1
    assert found.refused == {}
    assert found.unlike == ""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prefill_attention_backend": "fa3"}, "--prefill-attention-backend fa3"),
        ({"decode_attention_backend": "fa3"}, "--decode-attention-backend fa3"),
        ({"pool": named("HybridLinearKVPool", full_kv_pool="MLATokenToKVPool")}, "hybrid model with MLATokenToKVPool"),
        ({"attention": named("Hybrid", linear_attn_backend="Mamba2AttnBackend")}, "hybrid model with Mamba2Attn"),
        ({"backend": BreakableCudaGraphBackend()}, "decode graphs of BreakableCudaGraphBackend"),
        ({"model_config": SimpleNamespace(quantization="fp8")}, "weights in fp8"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "a KV cache in float8_e4m3fn"),
        ({"is_multimodal": True}, "multimodal"),
        ({"is_generation": False}, "generates no text"),
    ],
)
@pytest.mark.usefixtures("h200")
def test_a_server_unlike_the_shown_ones_is_told_so_and_can_still_be_asked(changes: dict[str, Any], word: str) -> None:
    found = graphs.find(scheduler(**changes))
    assert len(found.graphs) == 1
    assert word in found.unlike


@pytest.mark.parametrize(
    ("hip", "capability", "word"),
    [("7.0", (9, 4), "no CUDA"), (None, (10, 0), "capability 10.0"), (None, (8, 9), "8.9"), (None, None, "no CUDA")],
)
def test_another_gpu_is_unlike_the_shown_one(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: tuple[int, int] | None, word: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert word in graphs.find(scheduler()).unlike


@pytest.mark.parametrize(
    "changes",
    [
        {"disaggregation_mode": "decode"}, {"enable_fused_moe_sum_all_reduce": True}, {"enable_lora": True},
        {"speculative_algorithm": "EAGLE"}, {"enable_memory_saver": True}, {"enable_torch_compile": True},
        {"enable_two_batch_overlap": True}, {"cpu_offload_gb": 4}, {"offload_group_size": 2}, {"forward_hooks": [{}]},
        {"expert_distribution_recorder_mode": "stat"}, {"enable_return_routed_experts": True},
        {"enable_unified_memory": True}, {"enable_flexkv": True}, {"enable_linear_replayssm": True},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
@pytest.mark.usefixtures("h200")
def test_a_server_whose_captures_were_not_looked_at_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    found = graphs.find(scheduler(**changes))
    assert found.graphs == ()
    assert found.refused["all"]


@pytest.mark.usefixtures("h200")
def test_a_server_that_would_end_at_a_new_kernel_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is taken back lets SGLang's own config into its graph, which may never have been loaded here."""
    monkeypatch.setenv("SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY", "1")
    assert "SGLANG_CRASH" in graphs.find(scheduler()).refused["all"]
