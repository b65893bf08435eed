"""What the serving bench needs of a server and of its probe, without a GPU: a loop that serves one request at a time
and, while tuning is on, is busy with slices of a known length in between."""

from __future__ import annotations

import array
import json
import os
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import bench_serving
import serving_probe as probe
import steady_probe

if TYPE_CHECKING:
    from pathlib import Path

PIECE_S = 0.002
STREAMS = 2
GRACE_NS = 60_000_000


class StandIn:
    """A server whose slices take ``slice_s``, None: it never tunes. ``rude``: it also begins one while a request runs.
    ``left``: M in the queue. ``cost``: by which a step takes longer while tuning is on, a fraction. It serves one
    request at a time, and says that ``STREAMS`` decode."""

    process = SimpleNamespace(pid=os.getpid())

    def __init__(
        self, port: int, folder: Path, *, slice_s: float | None, rude: bool = False, learns: bool = True,
        left: int = 99, cost: float = 0.0,
    ) -> None:  # fmt: skip
        self.folder, self.slice_s, self.rude, self.learns, self.left = folder, slice_s, rude, learns, left
        self.cost, self.tuned = cost, True
        self.alternation: steady_probe.Alternation | None = None
        self.level, self.asked = 2, 0
        self.events: list[tuple[int, int, int, int]] = []
        self.inbox: queue.Queue[tuple[int, int, queue.Queue[bytes | None]]] = queue.Queue()
        self.ended = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer({"internal_states": [{"moe_autotune": owner.told()}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/set_internal_state":
                    owner.level = body["server_args"]["moe_autotune"]
                    self.answer([True])
                    return
                number, pieces = probe.number_of(body["rid"]), queue.Queue[bytes | None]()
                at = time.monotonic_ns()
                owner.events.append((probe.SENT, at, at, number))
                owner.inbox.put((number, body["sampling_params"]["max_new_tokens"], pieces))
                at = time.monotonic_ns()
                owner.events.append((probe.HANDED, at, at, number))
                self.send_response(200)
                self.end_headers()
                while (piece := pieces.get()) is not None:
                    self.wfile.write(piece)
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")

            def answer(self, value: Any) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.threads = [threading.Thread(target=f) for f in (self.http.serve_forever, self.loop, self.obey)]
        for thread in self.threads:
            thread.start()

    def told(self) -> dict[str, Any]:
        return {"switch": ["off", "rows", "on"][self.level], "queue": self.left,
                "compile": {"ordered": 1, "ready": 0, "failed": 0}}  # fmt: skip

    def loop(self) -> None:
        rested_ns = 0
        while not self.ended.is_set():
            try:
                number, count, pieces = self.inbox.get(timeout=0.0002)
            except queue.Empty:
                if self.level == 2 and time.monotonic_ns() > rested_ns:
                    self.slice()
                continue
            at = time.monotonic_ns()
            self.events.append((probe.RECEIVED, at, at, number))
            for place in range(count):
                if (alternation := self.alternation) is not None:
                    at = time.monotonic_ns()
                    self.events.append((probe.STEP, at, alternation.step(), STREAMS if place else 0))
                time.sleep(PIECE_S * (1 + self.cost * self.tuned))
                pieces.put(b"data: {}\n\n")
            if self.rude and self.level == 2:
                self.slice()
                time.sleep(0.005)
            pieces.put(None)
            rested_ns = time.monotonic_ns() + GRACE_NS

    def slice(self) -> None:
        if self.slice_s is None:
            return
        begin = time.monotonic_ns()
        time.sleep(self.slice_s)
        self.events.append((probe.SLICE, begin, time.monotonic_ns(), 64))
        if self.learns and len(self.events) % 5 == 0:
            self.events.append((probe.LEARNED, begin, 64, 1))

    def obey(self) -> None:
        written = 0
        while not self.ended.wait(0.05):
            numbers = array.array("q")
            fresh = self.events[written:]
            written += len(fresh)
            for event in fresh:
                numbers.extend(event)
            with (self.folder / "scheduler.events").open("ab") as file:
                file.write(numbers.tobytes())
            for path in self.folder.glob("*.ask"):
                path.unlink()
                self.asked += 1
                value: Any = {"free": 10 << 30, "total": 100 << 30}
                if path.stem.startswith("passes"):
                    value = {"passes": sum(e[0] == probe.SLICE for e in self.events), "pauses": 0}
                elif path.stem.startswith(("forget", "renew")):
                    value = {"queued": 99, "lifted": 0}
                elif path.stem.startswith("alternate"):
                    value = {"compile_processes_watched": self.alternate()}
                elif path.stem.startswith("settle"):
                    found, self.alternation = self.alternation, None
                    value = {"blocks": 0 if found is None else found.end()}
                elif path.stem.startswith("micro"):
                    value = {
                        "idle_ns": {"nothing left": {"hooked": 700.0, "looking": 6000.0, "stock": 100.0}},
                        "lookup_ns": {"hooked hit": 900.0, "stock on the same M": 1000.0,
                                      "hooked miss": 3500.0, "stock on a miss": 1000.0},
                    }  # fmt: skip
                probe._answer(self.folder / path.stem, value)

    def alternate(self) -> bool:
        flips = steady_probe.Flips(self.folder / probe.FLIPS)
        put = lambda tuning: setattr(self, "tuned", tuning)  # noqa: E731 - one word
        self.alternation = steady_probe.Alternation(probe.SEED, put, steady_probe.Hold(), flips)
        return flips.heard

    def text(self) -> str:
        return "all is well"

    def get(self, path: str) -> Any:
        return {"internal_states": [{"moe_autotune": self.told()}]}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.level = body["server_args"]["moe_autotune"]
        return [True]

    def rest(self) -> None:
        self.level = 1

    def __enter__(self) -> StandIn:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        for thread in self.threads:
            thread.join()


class StandInBench(bench_serving.Bench):
    """The bench on a stand-in, which it leaves behind as ``stand_in``."""

    how: dict[str, Any] = {"slice_s": 0.001}  # noqa: RUF012 - replaced whole by each test

    def serve(self, name: str) -> Any:
        self.probe.mkdir(exist_ok=True)
        (self.work / "store").mkdir(exist_ok=True)
        server = StandIn(0, self.probe, **self.how)
        self.options.port = server.port
        return server
