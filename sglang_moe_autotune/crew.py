"""The crew: one process a GPU that does an errand, on this machine or over a Ray cluster, and what they tell.

A worker ends when its stdin does, so none outlives this process. Neither torch nor SGLang is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import msgspec

from sglang_moe_autotune import errand
from sglang_moe_autotune.errand import Ended, Errand, Item, Told
from sglang_moe_autotune.selection import Unusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMAND: tuple[str, ...] = ("-m", "sglang_moe_autotune.offline")
"""what Python is given to be a worker"""
_STOP_S = 20.0
_LAST_LINES = 12


class Lost(NamedTuple):
    """A worker ended without its last word; ``why``: its exit code and the end of its log."""

    why: str


News = tuple[str, Told | Lost]
"""Who (a GPU's name), and what"""


def gpus(choice: str | None) -> tuple[str, ...]:
    """Names of GPUs as CUDA_VISIBLE_DEVICES takes them; ("",) is what this process would use. Raises Unusable."""
    if choice is None:
        return ("",)
    if choice != "all":
        return tuple(filter(None, choice.replace(" ", "").split(",")))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        found = tuple(filter(None, visible.split(",")))
    else:
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
        except (OSError, subprocess.SubprocessError) as error:
            raise Unusable(f"the GPUs cannot be listed ({error}): name them, as in --gpus 0,1") from error
        found = tuple(line.strip() for line in listed.stdout.splitlines() if line.strip())
    if not found:
        raise Unusable("no GPU is visible to this process: see CUDA_VISIBLE_DEVICES")
    return found


class Crew:
    """Workers on this machine. ``listen`` ends when all of them have; ``stop`` asks them to end early."""

    def __init__(self, orders: Sequence[tuple[str, Errand]]) -> None:
        self._news: queue.SimpleQueue[tuple[str, Told | Lost | None]] = queue.SimpleQueue()
        self._workers: list[subprocess.Popen[bytes]] = []
        for gpu, order in orders:
            self._start(gpu, order)
        self._running = len(self._workers)

    def listen(self) -> Iterator[News]:
        """What the workers tell, as it comes. May be called again after it was interrupted."""
        while self._running:
            gpu, told = self._news.get()
            if told is None:
                self._running -= 1
            else:
                yield gpu, told

    def stop(self) -> None:
        """Ask the workers to end; each finishes its slice and its file first. Returns at once."""
        for worker in self._workers:
            assert worker.stdin is not None  # noqa: S101 - it was asked for
            with contextlib.suppress(OSError):
                worker.stdin.close()

    def close(self) -> None:
        """Stop them and wait; those that do not end are killed."""
        self.stop()
        for worker in self._workers:
            try:
                worker.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _start(self, gpu: str, order: Errand) -> None:
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - its reader closes it
        # In a session of its own: Ctrl-C goes to this process, which lets the workers finish their files.
        worker = subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            [sys.executable, *COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})},
            start_new_session=True,
        )
        self._workers.append(worker)
        threading.Thread(target=self._read, args=(gpu, worker, log), daemon=True).start()
        assert worker.stdin is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and its reader says so
            worker.stdin.write(errand.encode(order))
            worker.stdin.flush()

    def _read(self, gpu: str, worker: subprocess.Popen[bytes], log: TextIO) -> None:
        ended = False
        assert worker.stdout is not None  # noqa: S101 - it was asked for
        with worker.stdout:
            for line in worker.stdout:
                told = _read_line(line)
                ended = ended or isinstance(told, Ended)
                self._news.put((gpu, told))
        code = worker.wait()
        with log:
            if not ended:
                log.seek(0)
                self._news.put((gpu, _lost(code, log.read())))
        self._news.put((gpu, None))


def _read_line(line: bytes) -> Told | Lost:
    try:
        return errand.decode_told(line)
    except msgspec.DecodeError as error:
        return Lost(f"it said something that is no message ({error})")


def _lost(code: int, log: str) -> Lost:
    lines = [text for text in log.splitlines() if text.strip()]
    return Lost("\n".join([f"it ended with code {code}:", *lines[-_LAST_LINES:]]))


# -- over a Ray cluster ----------------------------------------------------------------------------------------


class RayCrew:
    """One task a GPU of the cluster; what a task tells arrives when it ends, its records are then in our store too.

    Raises Unusable without Ray or without a GPU in the cluster.
    """

    def __init__(self) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise Unusable("--ray needs Ray in this Python: pip install ray, or use --gpus") from error
        self._ray.init(ignore_reinit_error=True)
        self._tasks: dict[Any, str] = {}
        self.size = int(self._ray.cluster_resources().get("GPU", 0))
        if self.size < 1:
            raise Unusable("the Ray cluster has no GPU: start its workers with GPUs, or use --gpus")

    def send(self, hands: Sequence[tuple[Item, ...]], order: Errand) -> None:
        """Start a task for each hand of the work."""
        task = self._ray.remote(num_gpus=1, max_retries=0)(converse)
        for number, items in enumerate(hands):
            line = errand.encode(msgspec.structs.replace(order, items=items))
            self._tasks[task.remote(line, COMMAND)] = f"ray-{number}"

    def listen(self) -> Iterator[News]:
        """What each task told, when it has ended."""
        while self._tasks:
            (done, *_), _ = self._ray.wait(list(self._tasks), num_returns=1)
            who = self._tasks.pop(done)
            try:
                code, told, log = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                yield who, Lost(f"its task failed: {error}")
                continue
            lines = [_read_line(line) for line in told.splitlines()]
            yield from ((who, value) for value in lines)
            if not any(isinstance(value, Ended) for value in lines):
                yield who, _lost(code, log)

    def stop(self) -> None:
        """Cancel what has not ended; records are in the stores of the nodes that made them."""
        for task in self._tasks:
            self._ray.cancel(task)
        self._tasks.clear()

    def close(self) -> None:
        """Leave the cluster as it was found."""
        self._ray.shutdown()


def converse(line: bytes, command: Sequence[str]) -> tuple[int, bytes, str]:
    """Run one worker here to its end: its exit code, what it told, and its log. Runs on a node of the cluster."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        worker = subprocess.Popen(  # noqa: S603 - as above
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert worker.stdin is not None  # noqa: S101 - both were asked for
        assert worker.stdout is not None  # noqa: S101 - as above
        with worker.stdin, worker.stdout:
            worker.stdin.write(line)
            worker.stdin.flush()
            told = worker.stdout.read()
        code = worker.wait()
        log.seek(0)
        return code, told, log.read()
