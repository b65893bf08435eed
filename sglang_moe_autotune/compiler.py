"""Orders binaries from the compile process and knows which of them are there. Never blocks, never compiles."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_autotune import launch
from sglang_moe_autotune.bench import Declined

if TYPE_CHECKING:
    from sglang_moe_autotune.bench import Readiness

logger = logging.getLogger("sglang.moe_autotune")

_MAX_DEATHS = 3
_MAX_REASONS_LOGGED = 5
_READ_BYTES = 1 << 16


class Outcome(NamedTuple):
    """What became of one order."""

    ok: bool
    reason: str
    shared_bytes: int | None


class Compiler:
    """One compile process for this server, started at the first order.

    ``shared_memory_bytes`` is the GPU's opt-in limit of a block: a binary that needs more is refused by what
    the compiler states, before anything is launched.
    """

    def __init__(self, processes: int, shared_memory_bytes: int) -> None:
        self._processes = processes
        self._shared_memory_bytes = shared_memory_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._fault = ""
        self._reasons_logged: set[str] = set()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._received = b""
        self._orders: dict[str, bytes] = {}
        self._outcomes: dict[str, Outcome] = {}
        self.ordered = 0

    @property
    def counts(self) -> dict[str, int]:
        """Orders so far, by outcome."""
        ready = sum(o.ok for o in self._outcomes.values())
        return {"ordered": self.ordered, "ready": ready, "failed": len(self._outcomes) - ready}

    def readiness(self, binary: launch.Binary) -> Readiness:
        """Is this binary launchable? The first call orders it if the disk cache lacks it.

        Raises Declined while the compile process does not work: that says nothing about a candidate.
        """
        outcome = self._outcomes.get(binary.hash)
        if outcome is None and binary.hash not in self._orders:
            if binary.on_disk():
                outcome = self._finish(binary.hash, self._read_metadata(binary))
            else:
                self._order(binary)
        elif outcome is None:
            self.poll()
            if (outcome := self._outcomes.get(binary.hash)) is not None and outcome.ok and not binary.on_disk():
                reason = "the compile process is done, but Triton's cache has no entry where this server looks"
                outcome = self._finish(binary.hash, outcome._replace(ok=False, reason=reason))
        if outcome is None:
            if self._fault:
                raise Declined(self._fault)
            return "waiting"
        return "ready" if outcome.ok else "failed"

    def recover(self) -> None:
        """Give a compile process that did not work another chance; for the next try of a deferred job."""
        if self._fault:
            self.close()
            self._fault, self._deaths = "", 0

    def reason(self, binary: launch.Binary) -> str:
        outcome = self._outcomes.get(binary.hash)
        return outcome.reason if outcome is not None else "not compiled yet"

    def poll(self) -> None:
        """Send what waits, take in what is answered; microseconds when there is nothing."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                sent = os.write(child.stdin.fileno(), self._unsent[0])
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        try:
            received = os.read(child.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not received:
            self._bury()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._fault = f"the compile process does not answer in its own words: {error}"

    def close(self) -> None:
        """End the compile process that this object started."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._close_pipes()
            self._child = None
        self._received = b""
        self._unsent.clear()
        self._orders.clear()

    def _order(self, binary: launch.Binary) -> None:
        try:
            line = json.dumps(launch.encode(binary)).encode() + b"\n"
        except TypeError as error:
            self._finish(binary.hash, Outcome(False, str(error), None))
            return
        self.ordered += 1
        self._orders[binary.hash] = line
        self._unsent.append(line)
        if self._child is None and not self._fault:
            self._start()
        self.poll()

    def _start(self) -> None:
        # An empty CUDA_VISIBLE_DEVICES keeps the child from making a context, which would take device memory.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # The child imports from where this process does, and not from whatever lies in the working directory.
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)
        environment["PYTHONSAFEPATH"] = "1"
        # Triton reads all of an entry when it loads one, and keeps it: 200 KB to 1 MB of intermediate code in texts.
        environment.setdefault("TRITON_STORE_BINARY_ONLY", "1")
        command = [sys.executable, "-m", "sglang_moe_autotune.compile_child", str(os.getpid()), str(self._processes)]
        try:
            self._child = self._spawn(command, environment)
        except OSError as error:  # no process, no descriptor or no memory to be had now
            self._fault = f"the compile process cannot be started: {error}"
            return
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None  # noqa: S101 - both were asked for
            os.set_blocking(pipe.fileno(), False)

    @staticmethod
    def _spawn(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )

    def _bury(self) -> None:
        """The child is gone: whatever it had not answered is ordered again from a new one."""
        assert self._child is not None  # noqa: S101 - poll has just read from it
        code = self._child.wait()
        self._close_pipes()
        self._child = None
        self._received = b""
        self._unsent.clear()
        self._deaths += 1
        logger.warning(
            "MoE autotune's compile process ended with code %s (%d of %d times before a pause).",
            *(code, self._deaths, _MAX_DEATHS),
        )
        if self._deaths >= _MAX_DEATHS:
            self._fault = f"the compile process ended {self._deaths} times, last with code {code}"
        elif self._orders:
            self._unsent.extend(self._orders.values())
            self._start()

    def _close_pipes(self) -> None:
        assert self._child is not None  # noqa: S101 - called with a child only
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _take(self, answer: dict[str, Any]) -> None:
        reason = answer.get("error") or ""
        if reason and len(self._reasons_logged) < _MAX_REASONS_LOGGED and reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            logger.info("MoE autotune could not compile a candidate: %s", reason)
        if answer.get("fault"):
            self._fault = f"the compile process does not work: {reason}"
        elif answer["hash"] in self._orders:
            self._finish(answer["hash"], Outcome(bool(answer["ok"]), reason, answer.get("shared_bytes")))

    def _read_metadata(self, binary: launch.Binary) -> Outcome:
        try:
            shared = launch.shared_bytes(binary)
        except (OSError, ValueError, KeyError) as error:
            return Outcome(False, f"Triton's cache entry cannot be read: {error}", None)
        return Outcome(True, "", shared)

    def _finish(self, name: str, outcome: Outcome) -> Outcome:
        if outcome.ok and outcome.shared_bytes is not None and outcome.shared_bytes > self._shared_memory_bytes:
            reason = f"needs {outcome.shared_bytes} bytes of shared memory and the GPU has {self._shared_memory_bytes}"
            outcome = outcome._replace(ok=False, reason=reason)
        self._orders.pop(name, None)
        self._outcomes[name] = outcome
        return outcome
