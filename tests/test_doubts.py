"""A row with which steps take longer is taken back at the next batch, and comes back only if the bench says so."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from record_values import H200
from synthetic import bf16_shape, landscape
from test_idle_passes import prepare

torch = pytest.importorskip("torch")  # the overlay knows live layers

from sglang_moe_autotune import doubts, records  # noqa: E402
from sglang_moe_autotune.beat import Beat  # noqa: E402
from sglang_moe_autotune.doubts import Doubts  # noqa: E402
from sglang_moe_autotune.layers import call_key  # noqa: E402
from sglang_moe_autotune.overlay import Overlay  # noqa: E402
from sglang_moe_autotune.records import Evidence, Record  # noqa: E402
from sglang_moe_autotune.replay import ReplayProvider  # noqa: E402
from sglang_moe_autotune.shapes import ConfigPair  # noqa: E402
from sglang_moe_autotune.step_times import BLOCK, MOST_PLACES  # noqa: E402
from sglang_moe_autotune.store import Store  # noqa: E402

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

    from sglang_moe_autotune.shapes import KernelConfig

SHAPE = bf16_shape(E=8, N=256, K=512, top_k=2)
KEY = call_key(SHAPE)
M = 64
RECORDED = landscape(SHAPE, (M,))
CONTEXTS = torch.tensor([1000] * 8)


def pair(*, faster: bool) -> ConfigPair:
    """The recorded pair that takes least, or most, of one BLOCK_SIZE_M."""
    pick = min if faster else max

    def up(config: KernelConfig) -> float:
        return RECORDED.up_us[M].get(config, math.inf if faster else 0.0)

    first = pick(RECORDED.up_us[M], key=up)
    alike = [c for c in RECORDED.down_us[M] if c.BLOCK_SIZE_M == first.BLOCK_SIZE_M]
    return ConfigPair(first, pick(alike, key=RECORDED.down_us[M].__getitem__))


class Bed:
    """A process that serves M = 64 eagerly (or in a graph) and has just learned a row for it."""

    def __init__(self, *, faster: bool = True, alone: bool = True, graphs: tuple[int, ...] = (),
                 source: str = "replayed") -> None:  # fmt: skip
        self.baseline = RECORDED.baselines[M].pair
        evidence = Evidence(100.0, 90.0, 0.1, 0.05, 0.15, 48, 20, 1.0)
        self.record = Record(SHAPE, M, "faster", pair(faster=faster), self.baseline, evidence, source)  # type: ignore[arg-type]
        self.overlay = Overlay("miss")
        self.overlay.source, self.overlay._origins = "replayed", {SHAPE: "miss"}
        self.overlay._limit = SimpleNamespace(holds=lambda *_: True)  # type: ignore[assignment]
        self.overlay.stock = lambda *_: (self.baseline, None)  # type: ignore[method-assign]
        self.held: dict[Any, Any] = {}
        self.out: list[int] = []
        self.adopted: list[Any] = []
        self.recapture: Any = SimpleNamespace(
            made=0, held=lambda *_: self.held, take_out=self.out.append, adopted=lambda *row: self.adopted.append(row)
        )
        self.store = Store.open(None, H200)
        self.learned: list[Record] = []
        self.let_go = 0
        self.steps_to_give_way = 0
        self.tuner: Any = SimpleNamespace(gpu_s=0.0, learn=self.learned.append, give_way=self._give_way)
        self.doubts = Doubts(self.overlay, self.recapture, lambda: {"decode": graphs}, Beat())
        self.doubts.join(self.store, ReplayProvider(RECORDED, polls=1), self.tuner, self._let_go, alone, 500.0)
        self.doubts.steps.on = True
        self.now_s = 0.0
        self.look()

    def _give_way(self) -> bool:
        self.steps_to_give_way = max(0, self.steps_to_give_way - 1)
        return self.steps_to_give_way == 0

    def _let_go(self) -> None:
        self.let_go += 1
        self.doubts.abandon()

    def look(self, *, overlays: bool = True) -> None:
        self.doubts.look(self.now_s, overlays=overlays)

    def batches(self, blocks: int, each_s: float) -> None:
        for _ in range(2 + blocks * BLOCK):
            self.now_s += each_s
            batch = SimpleNamespace(seq_lens_cpu=CONTEXTS)
            if self.doubts.steps.ran(("decode", M), self.now_s, batch):
                self.doubts.block(batch, self.now_s)

    def publish(self) -> None:
        self.store.submit(record=self.record)
        self.overlay.lookup.publish([(KEY, M, self.record.pair)])
        self.look()

    @property
    def served(self) -> ConfigPair | None:
        return self.overlay.lookup.rows().get(KEY, {}).get(M)

    def idle(self, most: int = 20_000) -> int:
        for count in range(most):
            if not self.doubts.ready(deep_idle=True):
                return count
            self.doubts.step(deep_idle=True)
            self.look()
        raise AssertionError("the bench came to no end")


def slowed(**how: Any) -> Bed:
    bed = Bed(**how)
    bed.batches(10, 0.010)
    bed.publish()
    bed.batches(10, 0.0115)
    return bed


def test_a_row_that_holds_on_the_bench_comes_back_and_is_doubted_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bed = slowed()
    assert bed.served is None
    assert bed.out == [M]
    assert sum("longer than before" in message for message in caplog.messages) == 1
    assert "taken back" in bed.doubts.told[f"{SHAPE.slug} {M}"]
    assert bed.idle() > 10
    assert bed.let_go == 1
    assert bed.tuner.gpu_s > 0
    assert bed.served == bed.record.pair
    assert bed.adopted == [(KEY, M, bed.record.pair)]
    assert "serves again" in bed.doubts.told[f"{SHAPE.slug} {M}"]
    bed.batches(40, 0.013)
    assert bed.served == bed.record.pair
    assert bed.idle() == 0
    assert bed.store.contents.records[SHAPE, M] == bed.record


def test_the_bench_of_a_search_is_given_back_a_step_at_a_time_before_a_row_is_measured_again() -> None:
    bed = slowed()
    bed.steps_to_give_way = 5
    for _ in range(4):
        assert bed.doubts.ready(deep_idle=True)
        assert bed.doubts.step(deep_idle=True) == "worked"
        assert bed.let_go == 0, "what is left is not closed at once"
    bed.idle()
    assert bed.let_go == 1
    assert bed.served == bed.record.pair


def test_a_row_that_the_bench_refuses_is_demoted_and_no_older_copy_brings_it_back() -> None:
    bed = slowed(faster=False)
    bed.idle()
    assert bed.served is None
    demoted = bed.store.contents.records[SHAPE, M]
    assert (demoted.verdict, demoted.pair, demoted.generation) == ("baseline", bed.baseline, 1)
    assert bed.learned == [demoted]
    assert "did not hold" in bed.doubts.told[f"{SHAPE.slug} {M}"]
    older = records.Contents(H200, {(SHAPE, M): bed.record})
    assert records.merge(bed.store.contents, older).records[SHAPE, M] == demoted


def test_a_fault_of_the_bench_takes_no_row_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bed = slowed()
    monkeypatch.setattr(ReplayProvider, "open", lambda *_: SimpleNamespace(prepare=faulty, gpu_s=0.0, close=bool))
    bed.doubts.ready(deep_idle=True)
    bed.doubts.step(deep_idle=True)
    with pytest.raises(torch.OutOfMemoryError):
        bed.doubts.step(deep_idle=True)
    assert not bed.doubts.ready(deep_idle=True)
    assert bed.served is None
    assert bed.store.contents.records[SHAPE, M].verdict == "faster", "the next start finds out"
    assert "a fault" in bed.doubts.told[f"{SHAPE.slug} {M}"]


def test_eager_sizes_without_end_do_not_grow_it() -> None:
    bed = Bed()
    batch = SimpleNamespace(seq_lens_cpu=CONTEXTS)
    for tokens in range(1, 3000):
        for _ in range(3):
            bed.now_s += 0.01
            bed.doubts.steps.ran(("prefill", tokens), bed.now_s, batch)
    assert len(bed.doubts._answers) <= 2 * MOST_PLACES
    assert set(bed.doubts.steps.places) <= bed.doubts._answers.keys()


@pytest.mark.parametrize("batch", [{}, {"seq_lens_cpu": None}, {"seq_lens_cpu": [1, 2]}], ids=["none", "None", "list"])
def test_a_context_that_is_not_told_is_not_known(batch: dict[str, object]) -> None:
    assert doubts._context_of(SimpleNamespace(**batch)) == 0
    assert doubts._context_of(SimpleNamespace(seq_lens_cpu=CONTEXTS)) == 8000


def test_a_bench_that_is_let_go_in_the_middle_is_closed_and_measures_from_nothing_later() -> None:
    bed = slowed()
    for steps in (1, 2, 5, 9):
        for _ in range(steps):
            assert bed.doubts.ready(deep_idle=True)
            bed.doubts.step(deep_idle=True)
        bed.doubts.abandon()
        assert bed.doubts._checks is not None
        assert not bed.doubts._checks.busy
    bed.idle()
    assert bed.served == bed.record.pair


def test_one_of_several_ranks_takes_nothing_back_and_says_what_it_saw() -> None:
    bed = slowed(alone=False)
    assert bed.served == bed.record.pair
    assert bed.idle() == 0
    assert "several ranks decide" in bed.doubts.told[f"{SHAPE.slug} {M}"]


def test_a_pin_is_the_users_word() -> None:
    bed = slowed(source="pinned")
    assert bed.served == bed.record.pair
    assert bed.doubts.told == {}


@pytest.mark.parametrize("each_s", [0.009, 0.0101], ids=["faster", "as fast"])
def test_a_row_that_does_no_harm_stays(each_s: float) -> None:
    bed = Bed()
    bed.batches(10, 0.010)
    bed.publish()
    bed.batches(70, each_s)
    assert bed.served == bed.record.pair
    assert bed.doubts.steps.counts == {"harmless": 1}


def test_with_a_graph_the_row_takes_effect_at_its_capture() -> None:
    bed = Bed(graphs=(M,))
    bed.batches(10, 0.010)
    bed.publish()
    bed.batches(3, 0.0115)  # not the row's doing: the graph holds SGLang's own
    assert bed.doubts.steps.watching == 0
    bed = Bed(graphs=(M,))
    bed.batches(10, 0.010)
    bed.publish()
    bed.held, bed.recapture.made = {KEY: bed.record.pair}, 1
    bed.look()
    assert bed.doubts.steps.watching == 1
    bed.batches(10, 0.0115)
    assert bed.served is None
    assert bed.out == [M]
    bed.held, bed.recapture.made = {KEY: None}, 2
    bed.look()
    assert bed.doubts.steps.watching == 0


def test_rows_that_are_switched_off_and_on_again_are_a_change_like_any_other() -> None:
    bed = Bed()
    bed.publish()
    bed.look(overlays=False)
    bed.batches(10, 0.010)
    bed.look(overlays=True)
    assert bed.doubts.steps.watching == 1
    bed.batches(10, 0.012)
    assert bed.served is None


def test_another_row_found_in_the_meantime_is_left_in_place() -> None:
    bed = slowed()
    other = msgspec.structs.replace(bed.record.pair, down=bed.record.pair.up)
    bed.overlay.lookup.publish([(KEY, M, other)])
    bed.look()
    bed.idle()
    assert bed.served == other


# -- through the hooks --------------------------------------------------------------------------------------------


def slow_row() -> dict[str, object]:
    """A server that runs batches of 64 tokens, learns a row for them in its idle time, and has slower steps with it."""
    import builtins
    import importlib
    from types import SimpleNamespace

    import torch
    from record_values import H200
    from replayed_serving import SMALL, replayed_serving

    from sglang_moe_autotune import releases, tuner
    from sglang_moe_autotune.harvest import Harvest
    from sglang_moe_autotune.layers import call_key
    from sglang_moe_autotune.store import Store

    world = builtins.world  # type: ignore[attr-defined]
    importlib.import_module(releases.LOOKUP.module).get_device_name = lambda *_: "NVIDIA H200"
    state = world.fresh()
    scheduler, clock = world.Scheduler(), world.clock
    made = replayed_serving(ms=(64,), deferred=None)
    base, baseline = made.tuner, made.tuner._agenda.entries[SMALL, 64].baseline
    state.store = Store.open(None, H200)
    state.harvest = Harvest(state.store, None, "miss", state.lookup, state.recapture)
    state.overlay.source = "replayed"
    state.overlay.stock = lambda *_: (baseline, None)
    state.overlay._limit = SimpleNamespace(holds=lambda *_: True)
    state.device, state.passes.marked = SimpleNamespace(provider=base._provider), base._provider
    state.tuner = tuner.Tuner(
        base._provider, state._learned, base._prior, base.options, space=base._space, clock=base._provider.clock,
        agenda=state.agenda,
    )  # fmt: skip
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid=str(n)) for n in range(64)], forward_mode=mode, seq_lens_cpu=torch.tensor([100] * 64)
    )
    key = call_key(SMALL)
    found: dict[str, object] = {}

    def passes(until: object) -> bool:
        clock.now += 20  # deep idle
        for _ in range(60_000):
            scheduler.on_idle()
            clock.now += 0.0005
            if until():  # type: ignore[operator]
                return True
        return False

    def batches(count: int, each_s: float) -> None:
        for _ in range(count):
            clock.now += each_s
            world.plugin.on_batch(scheduler, batch)

    def served() -> bool:
        return 64 in state.lookup.rows().get(key, {})

    scheduler.on_idle()
    batches(300, 0.010)
    found["before"] = served()
    state.tuner.add(SMALL, 64, baseline)
    found["learned"] = passes(served)
    batches(2 + 16 * 5, 0.012)
    found["too early to say"] = served()
    batches(16, 0.012)
    found["taken back"] = not served()
    found["told"] = list(state.doubts.told.values())
    found["came back"] = passes(served)
    batches(2000, 0.013)
    found["stays"] = served()
    found["status"] = list(state.doubts.told.values())
    found["counts"] = state.steps.counts
    found["in a row"] = []
    for between in (lambda: None, lambda: world.plugin.on_requests(scheduler, [batch]), scheduler.on_idle):
        batches(3, 0.01)
        between()
        found["in a row"].append(state.steps._place is not None)
    found["fences"] = [fence.broken for fence in world.plugin._FENCES.values()]
    return found


@pytest.mark.sglang
def test_a_server_takes_back_a_row_that_made_its_steps_slower_and_measures_it_again(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(slow_row)
    assert not told["before"]
    assert told["learned"]
    assert told["too early to say"]
    assert told["taken back"]
    assert "96 steps of decode M=64 took 20.0 % longer than before" in told["told"][0]
    assert told["came back"]
    assert told["stays"]
    assert "serves again" in told["status"][0]
    assert told["counts"]["worse"] == 1
    assert told["in a row"] == [True, False, False], "a message or an idle pass comes between two batches"
    assert not any(told["fences"])
