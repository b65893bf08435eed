"""Workers end with whoever started them, lose nothing that is finished, and a worker that dies is no mystery."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from offline_worker import MS, OTHER, SHAPE
from record_values import H200

from sglang_moe_autotune import crew, errand, store
from sglang_moe_autotune.crew import Crew, Lost, RayCrew
from sglang_moe_autotune.errand import Ended, Errand, Item, Learned, Ready
from sglang_moe_autotune.selection import Unusable

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = str(Path(__file__).with_name("offline_worker.py"))


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Workers on recordings; call it to choose another manner."""
    monkeypatch.setattr(crew, "COMMAND", (WORKER,))
    return lambda manner: monkeypatch.setattr(crew, "COMMAND", (WORKER, manner))


def order(root: Path, *items: Item) -> Errand:
    return Errand("tune", items, str(root))


def keys(root: Path) -> set[Any]:
    return set(store.read(root / store.file_name(H200)).records)


def test_two_workers_share_a_store(autotune_folder: Path) -> None:
    hands = errand.split([Item(SHAPE, MS), Item(OTHER, MS[:1])], 2)
    crew_of_two = Crew([(gpu, order(autotune_folder, *hand)) for gpu, hand in zip("01", hands, strict=True)])
    news = list(crew_of_two.listen())
    crew_of_two.close()
    assert {gpu for gpu, told in news if isinstance(told, Ended)} == {"0", "1"}
    assert keys(autotune_folder) == {*((SHAPE, m) for m in MS), (OTHER, MS[0])}


def test_a_stop_ends_a_worker_soon_and_keeps_its_records(
    autotune_folder: Path, worker: Callable[[str], None]
) -> None:
    worker("slow")
    found = Crew([("", order(autotune_folder, Item(SHAPE, MS)))])
    told: list[Any] = []
    for _, one in found.listen():
        told.append(one)
        if isinstance(one, Learned):
            found.stop()
    found.close()
    assert isinstance(told[-1], Ended)
    assert told[-1].why == "stopped"
    assert keys(autotune_folder) == {(one.record.shape, one.record.M) for one in told if isinstance(one, Learned)}


def test_a_worker_that_dies_is_told_with_the_end_of_its_log(
    autotune_folder: Path, worker: Callable[[str], None]
) -> None:
    worker("dies")
    found = Crew([("3", order(autotune_folder, Item(SHAPE, MS)))])
    news = list(found.listen())
    found.close()
    who, last = news[-1]
    assert who == "3"
    assert isinstance(last, Lost)
    assert "code 9" in last.why
    assert "illegal memory access" in last.why
    assert "visible: 3" in last.why
    assert len(keys(autotune_folder)) == 1


def test_a_worker_that_cannot_start_is_told(autotune_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "COMMAND", ("-c", "import no_such_module"))
    found = Crew([("", order(autotune_folder, Item(SHAPE, MS)))])
    ((_, told),) = found.listen()
    found.close()
    assert isinstance(told, Lost)
    assert "No module named 'no_such_module'" in told.why


PARENT = """
import sys
from offline_worker import MS, SHAPE
from sglang_moe_autotune import crew
from sglang_moe_autotune.errand import Errand, Item

crew.COMMAND = (sys.argv[1], "slow")
found = crew.Crew([("", Errand("tune", (Item(SHAPE, MS),), sys.argv[2]))])
print(found._workers[0].pid, flush=True)
for _, told in found.listen():
    print(type(told).__name__, flush=True)
"""


def test_workers_end_with_a_parent_that_is_killed(autotune_folder: Path) -> None:
    command = [sys.executable, "-c", PARENT, WORKER, str(autotune_folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline().strip() == "Ready"
        parent.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < until_s, "the worker outlives its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


# GPUs


@pytest.mark.parametrize(
    ("choice", "visible", "expected"),
    [
        pytest.param(None, None, ("",), id="this-one"),
        pytest.param("0, 2", None, ("0", "2"), id="list"),
        pytest.param("all", "1,3", ("1", "3"), id="all-that-are-visible"),
    ],
)
def test_gpus_by_name(
    monkeypatch: pytest.MonkeyPatch, choice: str | None, visible: str | None, expected: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert crew.gpus(choice) == expected


def test_all_gpus_as_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert crew.gpus("all") == ("GPU-a", "GPU-b")


@pytest.mark.parametrize("visible", [pytest.param("", id="none-visible"), pytest.param(None, id="no-driver")])
def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unusable, match="GPU"):
        crew.gpus("all")


# Ray


class FakeRay(SimpleNamespace):
    """As much of Ray as is used; tasks run when they are waited for. ``failing``: the second one does not come back."""

    def __init__(self, gpus: int, *, failing: bool = False) -> None:
        super().__init__(exceptions=SimpleNamespace(RayError=ConnectionError))
        self.gpus, self.failing = gpus, failing
        self.asked: list[dict[str, Any]] = []
        self.up = False

    def init(self, **_: Any) -> None:
        self.up = True

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, float]:
        assert self.up
        return {"CPU": 8.0, "GPU": float(self.gpus)} if self.gpus else {"CPU": 8.0}

    def remote(self, **asked: Any) -> Any:
        self.asked.append(asked)

        def wrap(function: Any) -> Any:
            return SimpleNamespace(remote=lambda *arguments: (function, arguments))

        return wrap

    def wait(self, tasks: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, task: Any) -> Any:
        function, arguments = task
        self.done = getattr(self, "done", 0) + 1
        if self.failing and self.done == 2:
            raise ConnectionError("the node is gone")
        return function(*arguments)


def ray_news(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, root: Path) -> list[crew.News]:
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    found = RayCrew()
    found.send(errand.split([Item(SHAPE, MS[:2])], found.size), order(root))
    news = list(found.listen())
    found.close()
    return news


def test_a_ray_cluster_does_the_same_work_one_task_a_gpu(
    monkeypatch: pytest.MonkeyPatch, autotune_folder: Path
) -> None:
    ray = FakeRay(gpus=2)
    news = ray_news(monkeypatch, ray, autotune_folder)
    assert ray.asked == [{"num_gpus": 1, "max_retries": 0}]
    assert {who for who, told in news if isinstance(told, Ended)} == {"ray-0", "ray-1"}
    assert {who for who, told in news if isinstance(told, Ready)} == {"ray-0", "ray-1"}
    learned = {(told.record.shape, told.record.M) for _, told in news if isinstance(told, Learned)}
    assert learned == {(SHAPE, m) for m in MS[:2]} == keys(autotune_folder)
    assert not ray.up


def test_a_node_that_is_lost_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, autotune_folder: Path) -> None:
    news = ray_news(monkeypatch, FakeRay(gpus=2, failing=True), autotune_folder)
    (lost,) = [told for _, told in news if isinstance(told, Lost)]
    assert "the node is gone" in lost.why
    assert [told for _, told in news if isinstance(told, Learned)]


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(Unusable, match="pip install ray"):
        RayCrew()


def test_a_cluster_without_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(gpus=0))  # type: ignore[arg-type]
    with pytest.raises(Unusable, match="has no GPU"):
        RayCrew()
