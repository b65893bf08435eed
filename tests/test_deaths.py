"""Two deaths in the middle of first launches make a start read-only; every other end of a process counts nothing."""

from __future__ import annotations

import secrets
import signal
import time
from typing import TYPE_CHECKING

import first_launches
import pytest
from click.testing import CliRunner
from first_launches import end
from record_values import pair, shape

from sglang_moe_autotune import deaths, doctor, held, page, status
from sglang_moe_autotune.bench import Declined, Sample
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.marked import MarkedProvider

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from scheduler_process import SchedulerProcess

ENVIRONMENT = "nvidia-h200-triton-3.6.0-0"


def start(root: Path, steps: str, environment: str = ENVIRONMENT, server: str | None = None) -> subprocess.Popen[bytes]:
    """A process of a server of its own that has made these steps."""
    return first_launches.start(root, steps, environment, server or secrets.token_hex(4))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        pytest.param("", 0, id="nothing launched"),
        pytest.param("announce:0", 0, id="about to launch"),
        pytest.param("begin:0 end", 0, id="between launches"),
        pytest.param("begin:0 end begin:1", 1, id="in a launch"),
        pytest.param("begin:1 fault", 1, id="after a fault"),
        pytest.param("begin:1 fault begin:2 end", 0, id="after a fault that it outlived"),
    ],
)
def test_only_an_end_in_a_first_launch_is_a_death(tmp_path: Path, steps: str, counts: int, number: int) -> None:
    child = start(tmp_path, steps)
    assert deaths.read(tmp_path) == ()  # it lives
    end(child, number)
    for _ in range(2):
        found = deaths.read(tmp_path)
        assert len(found) == counts
        for death in found:
            assert death.what == "launch 1"
            assert death.owner.pid == child.pid
    assert not list((tmp_path / "quarantine").glob("*.journal"))


def test_in_a_fresh_container_every_end_near_a_first_launch_is_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page in memory is gone, and the breaker must work all the same."""
    end(start(tmp_path, "begin:set-up"))
    end(start(tmp_path, "begin:0 end"))
    monkeypatch.setattr(page, "PLACE", tmp_path)
    (death,) = deaths.read(tmp_path)
    assert death.what == "set-up"


def test_a_search_offline_is_no_server(tmp_path: Path) -> None:
    end(first_launches.start(tmp_path, "begin:0", ENVIRONMENT, None))
    assert deaths.read(tmp_path) == ()


def test_two_deaths_on_one_environment_are_a_sentence_and_can_be_forgotten(tmp_path: Path) -> None:
    for _ in range(2):
        end(start(tmp_path, "begin:0"))
        end(start(tmp_path, "begin:0", "another"))
    assert len(deaths.read(tmp_path)) == 4
    found = deaths.read(tmp_path, ENVIRONMENT)
    assert deaths.sentence(found[:1]) == ""
    assert "2 processes died" in deaths.sentence(found)
    assert "`sglang-moe-autotune on`" in deaths.sentence(found)
    assert deaths.clear(tmp_path) == 4
    assert deaths.read(tmp_path) == ()
    assert held.read(tmp_path / held.FOLDER).held, "forgotten as deaths, and never tried again all the same"


def test_the_ranks_of_one_server_die_together_and_count_once(tmp_path: Path) -> None:
    owner = status.this_process()
    ranks = [deaths.Death(tmp_path / str(n), owner, ENVIRONMENT, 1.0, "a launch", "server 1") for n in range(8)]
    assert deaths.sentence(tuple(ranks)) == ""
    ranks.append(ranks[0]._replace(path=tmp_path / "8", server="server 2"))
    assert "9 processes died" in deaths.sentence(tuple(ranks))


def test_an_old_death_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(start(tmp_path, "begin:0"))
    (death,) = deaths.read(tmp_path)
    now_s = time.time()
    monkeypatch.setattr(deaths.time, "time", lambda: now_s + deaths.KEPT_S + 60)
    assert deaths.read(tmp_path, read_only=True) == ()
    assert death.path.exists()
    assert deaths.read(tmp_path) == ()
    assert not death.path.exists()


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 5000, b"\xff", b'{"owner": 1}'], ids=lambda text: repr(text[:8]))
def test_a_death_that_is_none_is_passed_over(tmp_path: Path, text: bytes) -> None:
    (tmp_path / deaths.FOLDER).mkdir()
    (tmp_path / deaths.FOLDER / "1-0.json").write_bytes(text)
    assert deaths.read(tmp_path) == ()


def test_read_only_takes_nothing_away_and_writes_nothing(tmp_path: Path) -> None:
    for steps in ("begin:0", "begin:0 end"):
        end(start(tmp_path, steps))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(deaths.read(tmp_path, read_only=True)) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# -- the marked bench ---------------------------------------------------------------------------------------------


class Log:
    """A journal: what was begun, and how it ended."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.writes = True

    def step(self, what: str) -> bool:
        if self.writes:
            self.steps.append(what)
        return self.writes

    def pause(self) -> None:
        self.steps.append("pause")

    def end(self) -> None:
        self.steps.append("end")

    def fault(self) -> None:
        self.steps.append("fault")


class Bench:
    """A bench whose next call raises what it was told to."""

    compare_cases, launch_us, gpu_s = 2, 123.0, 0.5

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.closed, self.done = False, 0

    def _do(self) -> None:
        self.done += 1
        if self.raises is not None:
            raise self.raises

    def open(self, *_: object) -> Bench:
        return self

    def prepare(self) -> bool:
        self._do()
        return self.done > 1

    def measure(self, *_: object) -> list[Sample]:
        self._do()
        return [Sample(1.0, 2.0)]

    def compare(self, *_: object) -> None:
        self._do()

    def adopt(self, *_: object) -> str:
        self._do()
        return "ready"

    def readiness(self, *_: object) -> str:
        return "waiting"

    def reason(self, *_: object) -> str:
        return "why"

    def close(self) -> None:
        self.closed = True


def test_the_set_up_and_adopting_are_marked_and_wait_for_it() -> None:
    log, inner = Log(), Bench()
    provider = MarkedProvider(inner, log)  # type: ignore[arg-type]
    assert provider.launch_us == 0.0
    bench = provider.open(shape(), 64, pair())
    assert not isinstance(bench, str)
    assert provider.launch_us == 123.0
    log.writes = False
    assert not bench.prepare()
    assert bench.adopt(pair()) == "waiting"
    assert (inner.done, log.steps) == (0, [])
    log.writes = True
    assert [bench.prepare(), bench.prepare()] == [False, True]
    assert bench.adopt(pair()) == "ready"
    assert log.steps[1::2] == ["pause", "end", "end"]
    assert log.steps[0] == log.steps[2]
    assert log.steps[0].endswith("M=64 set-up")
    assert log.steps[4].endswith("adopted")
    log.steps.clear()
    up = pair().up
    assert bench.measure("up", up, 4) == [Sample(1.0, 2.0)]
    bench.compare(pair(), 1)
    assert log.steps == [], "the bench marks its candidates itself"
    assert (bench.readiness("up", up), bench.reason("up", up)) == ("waiting", "why")
    assert (bench.compare_cases, bench.gpu_s) == (2, 0.5)
    bench.close()
    assert inner.closed


def test_what_a_pass_asked_of_a_bench_last_can_be_told() -> None:
    provider = MarkedProvider(Bench(), Log())  # type: ignore[arg-type]
    bench = provider.open(shape(), 64, pair())
    assert not isinstance(bench, str)
    said = [provider.did]
    up = pair().up
    for call in (
        bench.prepare, lambda: bench.readiness("up", up), lambda: bench.measure("up", up, 4),
        lambda: bench.compare(pair(), 0), lambda: bench.adopt(pair()), bench.close,
    ):  # fmt: skip
        provider.did = ""
        call()
        said.append(provider.did)
    assert said == [
        "opening a bench", "setting up a bench", "loading a binary", "measuring", "comparing", "adopting a row",
        "closing a bench",
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["prepare", "measure", "compare", "adopt"])
def test_a_fault_stays_marked_and_a_refusal_does_not(call: str) -> None:
    log, inner = Log(), Bench()
    bench = MarkedProvider(inner, log).open(shape(), 64, pair())  # type: ignore[arg-type]
    arguments = {"prepare": (), "measure": ("up", pair().up, 4), "compare": (pair(), 0), "adopt": (pair(),)}[call]
    for raised, last in ((Declined("no memory"), "end"), (RuntimeError("CUDA error"), "fault")):
        inner.raises = raised
        with pytest.raises(type(raised)):
            getattr(bench, call)(*arguments)
        assert log.steps[-1] == last


# -- what people see ----------------------------------------------------------------------------------------------


def test_doctor_says_it_and_on_forgets_it(autotune_folder: Path) -> None:
    assert doctor.check_deaths(autotune_folder).health == "ok"
    end(start(autotune_folder, "begin:0"))
    assert "read-only; " in doctor.check_deaths(autotune_folder).cure
    end(start(autotune_folder, "begin:0"))
    row = doctor.check_deaths(autotune_folder)
    assert (row.health, "start read-only" in row.says) == ("warn", True)
    told = CliRunner().invoke(main, ["on"], terminal_width=80).stdout
    assert "forgotten: 2" in told
    assert doctor.check_deaths(autotune_folder).health == "ok"


def test_doctor_counts_servers_as_a_start_does(autotune_folder: Path) -> None:
    """Two ranks of one server that died together are one server: the next start tunes, and doctor must not deny it."""
    for _ in range(2):
        end(start(autotune_folder, "begin:0", server="one server"))
    found = deaths.read(autotune_folder, ENVIRONMENT)
    assert len(found) == 2
    assert deaths.sentence(found) == ""
    row = doctor.check_deaths(autotune_folder)
    assert (row.health, "start read-only" in row.says) == ("warn", False)
    end(start(autotune_folder, "begin:0", server="another"))
    assert "start read-only" in doctor.check_deaths(autotune_folder).says
    assert deaths.sentence(deaths.read(autotune_folder, ENVIRONMENT))


# -- in a server --------------------------------------------------------------------------------------------------


def start_after_deaths() -> dict[str, object]:
    import logging  # noqa: PLC0415 - this runs in the other process

    import first_launches  # noqa: PLC0415
    from record_values import H200  # noqa: PLC0415
    from replayed_serving import replayed_serving  # noqa: PLC0415

    from sglang_moe_autotune import deaths, live, plugin  # noqa: PLC0415
    from sglang_moe_autotune.device import Device  # noqa: PLC0415
    from sglang_moe_autotune.journal import Journal  # noqa: PLC0415
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415
    from sglang_moe_autotune.settings import Settings  # noqa: PLC0415
    from sglang_moe_autotune.trials import environment_key  # noqa: PLC0415

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    device = Device(H200, replayed_serving().device.provider, "replayed")
    live.start = lambda _: None
    found = []
    for number in range(3):
        serving = Serving(Settings(), plugin.hooks_in_place)
        serving.start(device)
        found.append([serving.tuner is not None, serving.state, serving.store is not None and serving.store.state])
        assert serving.root is not None
        first_launches.end(first_launches.start(serving.root, "begin:0", environment_key(H200), f"server {number}"))
    running = Serving(Settings(), plugin.hooks_in_place)
    running.device, running.mark = device, Journal()
    live.look_for_deaths(running)
    said = running.died
    deaths.clear(running.root)
    live.look_for_deaths(running)
    logging.getLogger("sglang.moe_autotune").removeHandler(handler)
    return {"found": found, "reason": serving.reason, "said": said, "then": running.died,
            "log": [m for m in messages if "read-only" in m]}  # fmt: skip


@pytest.mark.sglang
def test_the_start_after_two_deaths_is_read_only_and_says_so(scheduler: SchedulerProcess) -> None:
    told = scheduler.run(start_after_deaths)
    assert [row[0] for row in told["found"]] == [True, True, False]
    assert told["found"][2][1] == "off"
    assert told["reason"].startswith("read-only: 2 processes died in the middle of a first launch")
    assert len(told["log"]) == 1
    assert "3 processes died" in told["said"]
    assert told["then"] == ""
