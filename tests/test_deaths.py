"""Two deaths in the middle of first launches make a start read-only; every other end of a process counts nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import effort
import pytest
from click.testing import CliRunner
from record_values import pair, shape

from sglang_moe_autotune import deaths, doctor, status
from sglang_moe_autotune.bench import Declined, Sample
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.deaths import Mark
from sglang_moe_autotune.marked import MarkedProvider

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

HERE = Path(__file__).resolve().parent
ENVIRONMENT = "nvidia-h200-triton-3.6.0-0.json"

CHILD = """
import sys, time
from pathlib import Path
from sglang_moe_autotune.deaths import Mark
mark = Mark.open(Path(sys.argv[1]), sys.argv[2])
for step in sys.argv[3].split():
    {"begin": lambda: mark.begin("E8 M=64 up 64x64x64 g1"), "end": mark.end, "fault": mark.fault}[step]()
print("there", flush=True)
time.sleep(60)
"""


def start(root: Path, steps: str, environment: str = ENVIRONMENT) -> subprocess.Popen[bytes]:
    """A process with a mark, after these steps."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), environment, steps],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    return child


def end(child: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    child.send_signal(number)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        pytest.param("", 0, id="nothing launched"),
        pytest.param("begin end", 0, id="between launches"),
        pytest.param("begin end begin", 1, id="in a launch"),
        pytest.param("begin fault", 1, id="after a fault"),
        pytest.param("begin fault begin end", 0, id="after a fault that it outlived"),
    ],
)
def test_only_an_end_in_a_first_launch_is_a_death(tmp_path: Path, steps: str, counts: int, number: int) -> None:
    child = start(tmp_path, steps)
    assert deaths.read(tmp_path) == ()  # it lives
    end(child, number)
    found = deaths.read(tmp_path)
    assert len(found) == counts
    assert len(list((tmp_path / deaths.FOLDER).iterdir())) == counts  # what says nothing is taken away
    for death in found:
        assert death.what == "E8 M=64 up 64x64x64 g1"
        assert death.owner.pid == child.pid


def test_two_deaths_on_one_environment_are_a_sentence_and_can_be_forgotten(tmp_path: Path) -> None:
    for _ in range(2):
        end(start(tmp_path, "begin"))
        end(start(tmp_path, "begin", "another.json"))
    assert len(deaths.read(tmp_path)) == 4
    found = deaths.read(tmp_path, ENVIRONMENT)
    assert deaths.sentence(found[:1]) == ""
    assert "2 processes died" in deaths.sentence(found)
    assert "`sglang-moe-autotune on`" in deaths.sentence(found)
    assert deaths.clear(tmp_path) == 4
    assert deaths.read(tmp_path) == ()


def test_the_ranks_of_one_server_die_together_and_count_once(tmp_path: Path) -> None:
    owner = status.this_process()
    ranks = [deaths.Death(tmp_path / str(n), owner, ENVIRONMENT, 1.0, "a launch", "server 1") for n in range(8)]
    assert deaths.sentence(tuple(ranks)) == ""
    ranks.append(ranks[0]._replace(path=tmp_path / "8", server="server 2"))
    assert "9 processes died" in deaths.sentence(tuple(ranks))


def test_an_old_death_does_not_count(tmp_path: Path) -> None:
    end(start(tmp_path, "begin"))
    (mark,) = (tmp_path / deaths.FOLDER).iterdir()
    old = time.time() - deaths.KEPT_S - 60
    os.utime(mark, (old, old))
    assert deaths.read(tmp_path) == ()
    assert not mark.exists()


@pytest.mark.parametrize("text", [b"", b"L", b"L" * 5000, b"L" + b"-" * 15 + b"{}\n", b"L" + b"-" * 15 + b'{"pid": 1'])
def test_a_mark_that_is_none_is_passed_over(tmp_path: Path, text: bytes) -> None:
    (tmp_path / deaths.FOLDER).mkdir()
    (tmp_path / deaths.FOLDER / "1-0.mark").write_bytes(text)
    assert deaths.read(tmp_path) == ()


def test_the_lock_tells_a_process_of_another_container_from_a_dead_one(tmp_path: Path) -> None:
    child = start(tmp_path, "begin")
    (mark,) = (tmp_path / deaths.FOLDER).iterdir()
    first, _, rest = mark.read_bytes()[16:].partition(b"\n")
    about = {**json.loads(first), "pid_namespace": "pid:[elsewhere]"}
    with mark.open("r+b") as file:
        file.seek(16)
        file.write(json.dumps(about).encode() + b"\n" + rest.rstrip(b"\0"))
    assert deaths.read(tmp_path) == ()
    end(child)
    assert len(deaths.read(tmp_path)) == 1


def test_where_nothing_can_be_written_a_mark_costs_nothing_and_says_nothing(tmp_path: Path) -> None:
    (tmp_path / deaths.FOLDER).write_text("in the way")
    for root in (None, tmp_path):
        mark = Mark.open(root, ENVIRONMENT)
        mark.begin("x" * 9000)
        mark.fault()
        mark.keep()
        mark.end()
        assert deaths.read(root) == ()


def test_a_mark_is_a_few_lines_without_a_system_call(tmp_path: Path) -> None:
    mark = Mark.open(tmp_path, ENVIRONMENT)

    def launch() -> None:
        mark.begin("E256-N256-K3072-top8-bf16 M=64 up 64x64x128 g1 w4 s3")
        mark.end()

    assert effort.lines(launch) < 12
    assert set(effort.native(launch)) <= {"encode", "len"}


# -- the marked bench ---------------------------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def begin(self, what: str) -> None:
        self.steps.append(what)

    def end(self) -> None:
        self.steps.append("end")

    def fault(self) -> None:
        self.steps.append("fault")


class Bench:
    """A bench whose next call raises what it was told to."""

    compare_cases, launch_us, gpu_s = 2, 123.0, 0.5

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.closed = False

    def _do(self) -> None:
        if self.raises is not None:
            raise self.raises

    def open(self, *_: object) -> Bench:
        return self

    def prepare(self) -> bool:
        self._do()
        return True

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


def test_what_never_ran_is_marked_and_what_did_is_not() -> None:
    log, inner = Log(), Bench()
    provider = MarkedProvider(inner, log)  # type: ignore[arg-type]
    assert provider.launch_us == 0.0
    bench = provider.open(shape(), 64, pair())
    assert not isinstance(bench, str)
    assert provider.launch_us == 123.0
    up = pair().up
    bench.prepare()
    assert bench.measure("up", up, 4) == bench.measure("up", up, 4) == [Sample(1.0, 2.0)]
    bench.measure("down", up, 4)
    bench.compare(pair(), 1)
    assert bench.adopt(pair()) == "ready"
    assert (bench.readiness("up", up), bench.reason("up", up)) == ("waiting", "why")
    assert (bench.compare_cases, bench.gpu_s) == (2, 0.5)
    begun = [step for step in log.steps if step != "end"]
    assert len(begun) == 5
    assert log.steps[1::2] == ["end"] * 5
    assert begun[0].endswith("M=64 set-up")
    assert begun[1].endswith(f"up {up}")
    log.steps.clear()
    for _ in range(30):
        bench.compare(pair(), 0)
    assert len(log.steps) == 2 * 8  # the rest of its runs repeats what has run
    bench.close()
    assert inner.closed


def test_a_fault_stays_marked_and_a_refusal_does_not() -> None:
    log, inner = Log(), Bench()
    bench = MarkedProvider(inner, log).open(shape(), 64, pair())  # type: ignore[arg-type]
    assert not isinstance(bench, str)
    for raised, last in ((Declined("no memory"), "end"), (RuntimeError("CUDA error"), "fault")):
        inner.raises = raised
        with pytest.raises(type(raised)):
            bench.measure("up", pair().up, 4)
        assert log.steps[-1] == last
    inner.raises = None
    bench.measure("up", pair().up, 4)
    assert log.steps[-1] == "end"


# -- what people see ----------------------------------------------------------------------------------------------


def test_doctor_says_it_and_on_forgets_it(autotune_folder: Path) -> None:
    assert doctor.check_deaths(autotune_folder).health == "ok"
    end(start(autotune_folder, "begin"))
    assert "read-only; " in doctor.check_deaths(autotune_folder).cure
    end(start(autotune_folder, "begin"))
    row = doctor.check_deaths(autotune_folder)
    assert (row.health, "start read-only" in row.says) == ("warn", True)
    told = CliRunner().invoke(main, ["on"], terminal_width=80).stdout
    assert "forgotten: 2" in told
    assert doctor.check_deaths(autotune_folder).health == "ok"


# -- in a server --------------------------------------------------------------------------------------------------


def start_after_deaths() -> dict[str, object]:
    import logging  # noqa: PLC0415 - this runs in the other process

    from record_values import H200  # noqa: PLC0415
    from replayed_serving import replayed_serving  # noqa: PLC0415

    from sglang_moe_autotune import deaths, live, plugin, store  # noqa: PLC0415
    from sglang_moe_autotune.device import Device  # noqa: PLC0415
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415
    from sglang_moe_autotune.settings import Settings  # noqa: PLC0415

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    device = Device(H200, replayed_serving().device.provider, "replayed")
    live.start = lambda _: None
    found = []
    for _ in range(3):
        serving = Serving(Settings(), plugin.hooks_in_place)
        serving.start(device)
        found.append([serving.tuner is not None, serving.state, serving.store is not None and serving.store.state])
        if serving.mark is not None:
            serving.mark.begin("a launch")
            path = serving.mark._path
            # What a dead process leaves: its mark, with nobody who holds its lock.
            assert path is not None
            text = path.read_bytes().replace(f'"pid":{__import__("os").getpid()}'.encode(), b'"pid":4194303')
            text = text.replace(b'"server":"', f'"server":"{len(found)} '.encode())  # each start is a server of its own
            path.with_name(f"{len(found)}.mark").write_bytes(text)
            serving.mark.end()
    running = Serving(Settings(), plugin.hooks_in_place)
    running.died = ""
    running.device, running.mark = device, serving.mark or deaths.Mark.open(None, "x")
    live.look_for_deaths(running)
    said = running.died
    assert running.root is not None
    deaths.clear(running.root)
    live.look_for_deaths(running)
    logging.getLogger("sglang.moe_autotune").removeHandler(handler)
    return {"found": found, "reason": serving.reason, "said": said, "then": running.died,
            "log": [m for m in messages if "read-only" in m], "name": store.file_name(H200)}  # fmt: skip


@pytest.mark.sglang
def test_the_start_after_two_deaths_is_read_only_and_says_so(scheduler: SchedulerProcess) -> None:
    told = scheduler.run(start_after_deaths)
    assert [row[0] for row in told["found"]] == [True, True, False]
    assert told["found"][2][1] == "off"
    assert told["reason"].startswith("read-only: 2 processes died in the middle of a first launch")
    assert len(told["log"]) == 1
    assert "2 processes died" in told["said"]
    assert told["then"] == ""
