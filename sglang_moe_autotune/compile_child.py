"""The process that compiles: no CUDA, niced, dead with the server that started it.

Reads one JSON object a line on stdin (a binary as ``launch.encode`` writes it) and answers one a line on
stdout: {"hash", "ok", "shared_bytes", "error", "fault"}, where "fault" says that the failure is this
process's and not the candidate's. The binary ends up in Triton's disk cache, where the server finds it by its
hash. Run as ``python -m sglang_moe_autotune.compile_child PARENT_PID PROCESSES``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
WORKER_NAME = "moe-compile"
"""what ``ps`` and ``top`` call a process that compiles; 15 bytes at most"""
_MAX_DEATHS = 3
"""of workers, with nothing compiled in between: from then on it is taken for a fault of this machine"""
_POOLS: list[ProcessPoolExecutor] = []
"""kept to the end: Python 3.12's thread that clears a broken pool away waits for itself where nobody holds the pool"""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends; leave now if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class StubDriver:
    """A Triton driver that names the server's GPU and touches none."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.utils = SimpleNamespace(get_device_properties=lambda _device: {})

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def build(order: dict[str, Any]) -> dict[str, Any]:
    """Compile one order; every failure is an answer, because a candidate may be impossible."""
    answer: dict[str, Any] = {"hash": order.get("hash"), "ok": False, "shared_bytes": None, "error": None}
    answer["fault"] = True
    try:
        import triton  # noqa: PLC0415 - the child pays for it once, after it is niced

        from sglang_moe_autotune import launch  # noqa: PLC0415 - as above

        binary = launch.decode(order)
        triton.runtime.driver.set_active(StubDriver(binary.target))
        if binary.hash == order["hash"]:
            answer["fault"] = False
            compiled = launch.load(binary)
            if binary.target.backend == "cuda":
                _build_launcher(binary.source, compiled.metadata)
            answer |= {"ok": True, "shared_bytes": compiled.metadata.shared}
        else:
            answer["error"] = f"{binary.hash} is its name in the compile process: Triton or the kernel differs there"
    except Exception as error:  # noqa: BLE001 - Triton, LLVM and ptxas raise anything; the server gets the text
        answer["error"] = f"{type(error).__name__}: {error}"[:500]
    return answer


def _build_launcher(source: Any, metadata: Any) -> None:
    """Build the C launcher here too: Triton before 3.7 would run a C compiler in the server at the first launch."""
    from triton.backends.nvidia import driver  # noqa: PLC0415 - CUDA only

    if not hasattr(driver, "make_launcher"):
        return
    try:
        driver.library_dirs()
    except (AssertionError, OSError):
        return  # no CUDA driver library here: nothing could be launched on this machine either
    driver.CudaLauncher(source, metadata)


def _start_worker(parent: int) -> None:
    die_with_parent(parent)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, WORKER_NAME.encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    parent, processes = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang and compilers print to stdout, which carries the answers
    warnings.simplefilter("ignore")
    workers = Workers(processes, answers)
    for line in sys.stdin:
        workers.hand(json.loads(line))


class Workers:
    """Processes that compile, each of its own pool and with one order at a time: whatever kills one fails that order
    and no other. All are started by the thread that hands out orders."""

    def __init__(self, count: int, answers: IO[str]) -> None:
        self._answers = answers
        self._ready = False
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()  # the last one first: few are started for few orders
        self._lock = threading.Lock()
        self._deaths = 0
        for _ in range(count):
            self._free.put(_Worker())

    def hand(self, order: dict[str, Any]) -> None:
        """Wait for a worker that is free, and give it this order; the answer is written when it comes."""
        if not self._ready:
            self._ready = True
            _get_ready(order)
        worker = self._free.get()
        worker.submit(order).add_done_callback(lambda future: self._answer(worker, order, future))

    def _answer(self, worker: _Worker, order: dict[str, Any], future: Future[dict[str, Any]]) -> None:
        failure = future.exception()
        with self._lock:
            self._deaths = self._deaths + 1 if failure is not None else 0
            if failure is None:
                result = future.result()
            else:
                result = {"hash": order["hash"], "ok": False, "error": f"the compiler died on it: {failure}"}
                result["fault"] = self._deaths >= _MAX_DEATHS
            self._answers.write(json.dumps(result) + "\n")
        self._free.put(worker)


class _Worker:
    """A pool of one process, made anew when that one has died."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, order: dict[str, Any]) -> Future[dict[str, Any]]:
        if self._pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self._pool.submit(build, order)
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(1, context, _start_worker, (os.getpid(),))
        _POOLS.append(self._pool)
        return self._pool.submit(build, order)


def _get_ready(order: dict[str, Any]) -> None:
    """Import once, before the workers are forked; a failure comes back with each order instead."""
    try:
        from sglang_moe_autotune import launch  # noqa: PLC0415 - the child pays for it once, after it is niced

        if launch.decode(order).hash != order["hash"]:
            # Inductor points Triton to torch's own ptxas at its first compile. The server's Triton keeps naming
            # its binaries after the ptxas it began with, so the child must use that one.
            os.environ.pop("TRITON_PTXAS_PATH", None)
            launch.forget_ptxas()
    except Exception:  # noqa: BLE001 - whatever it is, ``build`` meets it again and answers with it
        return


if __name__ == "__main__":
    main()
