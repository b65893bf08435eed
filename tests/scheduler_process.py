"""A process that SGLang's plugins take for a scheduler, and that runs a test's functions one after the other.

As in SGLang, it is a spawned child of multiprocessing, has imported ``sglang.srt.managers.scheduler`` before
the plugins are loaded, and loads them through SGLang's own ``load_plugins``. Started as a script, this file
starts that child and passes lines of JSON on: requests on stdin, replies on stdout, the rest on stderr.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve()


class SchedulerProcess:
    """Starts the process with its own cache folders below ``folder``; ``environ`` is added to its variables.

    Without ``plugins`` it is a stock SGLang: load_plugins() is not called.
    """

    def __init__(self, folder: Path, environ: dict[str, str], *, plugins: bool = True) -> None:
        self.folder = folder
        own = {
            "SGLANG_CACHE_DIR": str(folder / "sglang"),
            "SGLANG_MOE_AUTOTUNE_DIR": str(folder / "autotune"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE.parent)]),
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "TRITON_"))}
        self._log_path = folder / "log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE), "plugins" if plugins else "stock"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**inherited, **own, **environ},
            )
        self._ready = False

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(*arguments)`` there and return its JSON value. Its source is sent, so it imports
        what it needs and closes over nothing; what it leaves in modules stays for the next call.

        Raises AssertionError with the child's traceback and the end of its log.
        """
        if not self._ready:
            self._receive()
            self._ready = True
        source = textwrap.dedent(inspect.getsource(function))
        return self.run_source(source, function.__name__, *arguments)

    def run_source(self, source: str, name: str, *arguments: Any) -> Any:
        """The same for a function given as text."""
        if not self._ready:
            self._receive()
            self._ready = True
        assert self._process.stdin is not None
        request = {"source": source, "name": name, "arguments": arguments}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._receive()

    def reach(self, folder: Path) -> None:
        """Modules of this folder can be imported there from now on."""
        self.run_source("def reach(folder):\n    import sys\n    sys.path.insert(0, folder)\n", "reach", str(folder))

    def log(self) -> str:
        """What the process wrote to stdout and stderr so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": "the process ended"}
        assert "error" not in reply, f"{reply['error']}\n--- the end of its log\n{self.log()[-3000:]}"
        return reply["value"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the child reads the end of its input and returns
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve(requests: Any, replies: Any, *, plugins: bool) -> None:
    """The child: import the scheduler, load the plugins, then answer requests until None comes."""
    os.dup2(2, 1)  # what SGLang or a test prints is log, never a reply
    try:
        import sglang.srt.managers.scheduler  # noqa: F401, PLC0415 - what a spawned scheduler has imported first

        if plugins:
            from sglang.srt.plugins import load_plugins  # noqa: PLC0415

            load_plugins()
        replies.send({"value": None})
    except BaseException:
        replies.send({"error": traceback.format_exc()})
        raise
    while (request := requests.recv()) is not None:
        namespace: dict[str, Any] = {"__name__": "scheduler_snippet"}
        try:
            exec(compile(request["source"], request["name"], "exec", dont_inherit=True), namespace)  # noqa: S102
            replies.send({"value": namespace[request["name"]](*request["arguments"])})
        except BaseException:  # noqa: BLE001 - the test in the other process is told
            replies.send({"error": traceback.format_exc()})


def main(plugins: bool) -> None:
    context = multiprocessing.get_context("spawn")
    requests, to_child = context.Pipe(duplex=False)
    from_child, replies = context.Pipe(duplex=False)
    child = context.Process(target=serve, args=(requests, replies), kwargs={"plugins": plugins}, daemon=True)
    child.start()
    requests.close()
    replies.close()  # so that the death of the child ends the read below

    def answer() -> None:
        try:
            reply = from_child.recv()
        except EOFError:
            sys.exit(1)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    answer()
    for line in sys.stdin:
        to_child.send(json.loads(line))
        answer()
    to_child.send(None)
    child.join(timeout=10)


if __name__ == "__main__":
    main(plugins=sys.argv[1] == "plugins")
