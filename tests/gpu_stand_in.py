"""What ``gpu_recapture`` and ``gpu_ranks`` need of a server and of their drivers inside it, without a GPU.

Ranks are processes that sleep, rows are there after a moment, and graphs hold what they were captured with.
"""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_acceptance
import msgspec
from gpu_recapture import DECODE_SIZES, PREFILL_SIZES
from gpu_server import Server
from record_values import H200

from sglang_moe_autotune import status
from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

STOCK = ConfigPair(KernelConfig(16, 32, 64, 1), KernelConfig(16, 32, 64, 1))
WINNER = ConfigPair(KernelConfig(64, 128, 64, 32, 8, 3), KernelConfig(64, 64, 64, 1, 8, 2))
LEARNS_S = 0.6
SIZES = (*(f"decode {n}" for n in DECODE_SIZES), *(f"prefill {n}" for n in PREFILL_SIZES))


def shape_of(environ: dict[str, str], *, ep: bool) -> MoeShape:
    config = json.loads((Path(environ["MODEL"]) / "config.json").read_text())
    experts, width, hidden = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]
    return MoeShape((256 if ep else experts, 2 * width, hidden), (256 if ep else experts, hidden, width), 8, ep=ep)


class StandIn(Server):
    """Takes the arguments of a ``Server``. ``hurts``: captures without clearing hurt what the cache holds."""

    hurts = True
    slow = False
    """does one GPU take twice the time of two?"""
    died = 0
    """starts that fail"""

    def __init__(
        self, model: Path, port: int, log: Path, environ: dict[str, str], flags: tuple[str, ...] = (), wait_s: int = 400
    ) -> None:
        if StandIn.died:
            StandIn.died -= 1
            raise RuntimeError("the server is not healthy after 3 s")
        self.port, self.log, self.environ, self.flags = port, log, {**environ, "MODEL": str(model)}, flags
        log.write_text("All Reduce config: multicast = False\nall is well\n" + self.told_at_start())
        self.root = Path(environ["SGLANG_MOE_AUTOTUNE_DIR"])
        self.mode = environ.get("SGLANG_MOE_AUTOTUNE_MODE", "miss")
        self.ranks = 2 if "--tp-size" in flags else 1
        self.shape = shape_of(self.environ, ep="--ep-size" in flags)
        self.processes = [subprocess.Popen(["sleep", "600"]) for _ in range(self.ranks)]
        self.process = self.processes[0]
        self.started_s, self.ready_s, self.level, self.hurt = 1.0, 0.9, 2, False
        self.begun = self.last = time.monotonic()
        self.asked = self.met = 0
        self.slices = itertools.count()
        self.captured = self.mode == "read-only"
        self.folder: Path | None = None
        self.batches: list[tuple[int, int]] = []
        self.ended = threading.Event()
        self.store = Store.open(self.root, H200) if self.mode == "miss" else None
        threads: list[Callable[[], None]] = [self.live] if self.mode != "off" else []
        threads += [self.obey] if "RECAPTURE_PROBE" in environ else []
        threads += [self.vote] if "RANKS_PROBE_GRAPHS" in environ else []
        self.threads = [threading.Thread(target=thread) for thread in threads]
        for thread in self.threads:
            thread.start()

    def told_at_start(self) -> str:
        """The lines of the log, one a rank."""
        ranks = 2 if "--tp-size" in self.flags else 1
        lines = []
        for rank in range(ranks):
            rows = 0 if self.environ.get("RANKS_PROBE_DIFFER") and rank else self.rows
            rows = rows if self.environ.get("SGLANG_MOE_AUTOTUNE_MODE") == "read-only" else 0
            lead = f"[2026-11-30 16:16:55{f' TP{rank}' if ranks > 1 else ''}] MoE autotune"
            lines += [f"{lead} 0.1.0: hooks in place; shapes on the Triton path: 1; learned rows: {rows}; mode x."]
            lines += [f"{lead}, epoch of {ranks} ranks: E256 M=16 serves 16x64x64 g1 w4 s3"]
        return "\n".join(lines) + "\n"

    # -- what the plugin writes ------------------------------------------------------------------------------------

    def live(self) -> None:
        learned = self.store is None
        while not self.ended.wait(0.05):
            if self.mode == "read-only":
                continue  # whose folder may be an image's
            span = LEARNS_S * (2 if StandIn.slow and self.ranks == 1 else 1)
            if not learned and time.monotonic() > self.begun + span:
                learned = True
                self.learn()
            stale = () if self.captured or not learned else SIZES
            quiet = time.monotonic() > self.last + 0.4
            if learned and quiet and self.environ.get("SGLANG_MOE_AUTOTUNE_RECAPTURE") == "idle" and self.level == 1:
                self.captured = True
            # What waits for its rows asks for the end of tuning; what has requests beside slices, for tuning.
            state: status.State = "idle" if learned and "RECAPTURE_PROBE" in self.environ else "tuning"
            for rank, process in enumerate(self.processes):
                own = status.this_process()
                served = self.rows if learned and not (self.environ.get("RANKS_PROBE_DIFFER") and rank) else 0
                status.write(self.root, status.LiveStatus(
                    pid=process.pid, boot_id=own.boot_id, start_time=status.start_time(process.pid) or 0, host=own.host,
                    pid_namespace=own.pid_namespace, unix_s=time.time(), since_unix_s=time.time(), rank=rank,
                    ranks=self.ranks, state=state, slices=next(self.slices), epoch=3, rows=served,
                    switch=["off", "rows", "on"][self.level], queue=() if learned else ((self.shape.slug, 16),),
                    graphs=status.GraphCounts("idle", "", len(SIZES), stale, {}, {"recaptured": 7} if self.captured
                                              else {}, dict.fromkeys(SIZES, 50.0)),
                ))  # fmt: skip

    rows = len(SIZES)

    def learn(self) -> None:
        assert self.store is not None
        evidence = Evidence(200.0, 150.0, 0.25, 0.2, 0.3, 40, 30, 1.5, 1e-3, 1e-2)
        for size in SIZES:
            m = int(size.split()[1])
            self.store.submit(record=Record(self.shape, m, "faster", WINNER, STOCK, evidence, unix_s=time.time()))
        assert self.store.flush(10.0)

    # -- what SGLang answers ---------------------------------------------------------------------------------------

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        told = {"slices": next(self.slices) if self.level == 2 else 0, "switch": ["off", "rows", "on"][self.level]}
        return {"internal_states": [{"moe_autotune": told}]}

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
        if path == "/set_internal_state":
            self.level = body["server_args"]["moe_autotune"]
        elif path == "/start_profile":
            self.folder, self.batches = Path(body["output_dir"]), []
        elif path == "/stop_profile":
            self.trace()
        elif path == "/flush_cache":
            self.hurt = False
        elif path == "/generate":
            return self.answer(body)
        return ""

    def answer(self, body: dict[str, Any]) -> Any:
        prompts, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        many, self.last = isinstance(prompts[0], list), time.monotonic()
        listed = prompts if many else [prompts]
        self.batches.append((len(listed[0]) if new == 1 else len(listed), new))
        if "RANKS_PROBE_GRAPHS" in self.environ:
            self.asked += 1
            self.met += self.level == 2
            for rank in (0, 1):
                path = Path(self.environ["RANKS_PROBE_GRAPHS"]) / f"met-{rank}.json"
                path.write_text(json.dumps({f"met {rank}": self.met, f"requests {rank}": self.asked}))
        apart = 1e-3 * (self.captured + many) + (0.5 if self.hurt else 0.0)
        found = []
        for prompt in listed:
            start = max(body.get("logprob_start_len", 0), 0)
            given = [[None, 1], *[[-1.0 - apart, 1]] * (len(prompt) - start - 1)]
            meta = {"input_token_logprobs": given, "output_token_logprobs": [[-1.0, 7]] * new, "cached_tokens": start}
            found.append({"output_ids": [7] * new, "meta_info": meta})
        return found if many else found[0]

    def trace(self) -> None:
        assert self.folder is not None
        M = self.batches[-1][0]  # noqa: N806
        pair = WINNER if self.captured else STOCK
        grids = [gpu_acceptance.grid_of(self.shape, M, gemm, pair.of(gemm)) for gemm in GEMMS]
        events = [{"name": "cudaGraphLaunch", "args": {"correlation": 1}}]
        events += [{"name": "fused_moe_kernel", "cat": "kernel", "dur": 9.0, "args": {"grid": [grid], "correlation": 1}}
                   for grid in grids]  # fmt: skip
        text = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (self.folder / f"{time.monotonic_ns()}.json.gz").write_bytes(text)

    # -- the drivers inside ----------------------------------------------------------------------------------------

    def obey(self) -> None:
        folder = Path(self.environ["RECAPTURE_PROBE"])
        while not self.ended.wait(0.01):
            if not (folder / "command.json").exists():
                continue
            asked = json.loads((folder / "command.json").read_text())
            (folder / "command.json").unlink()
            self.hurt = self.hurts and asked.get("clear") is False
            reason = f"RuntimeError: planted in the {asked['fault']}" if "fault" in asked else ""
            sizes = [size for size in SIZES if size in asked.get("sizes", SIZES)] * asked.get("count", 1)
            captures = [{"size": size, "turn": 0, "ms": 9.0, "unix_s": 1.0, "reason": reason} for size in sizes]
            (folder / "result.part").write_text(json.dumps({"reason": "", "mode": "idle", "captures": captures}))
            (folder / "result.part").replace(folder / "result.json")

    def vote(self) -> None:
        notes, board = Path(self.environ["RANKS_PROBE_GRAPHS"]), self.root / "x.json.ranks" / "1-a"
        board.mkdir(parents=True, exist_ok=True)
        while not self.ended.wait(0.02):
            ready = [(notes / f"ready-{rank}").exists() for rank in (0, 1)]
            for rank in (0, 1):
                (board / "part").write_bytes(msgspec.json.encode({"rank": rank, "vote": int(ready[rank])}))
                (board / "part").replace(board / f"rank-{rank}.json")
            if all(ready):
                for rank in (0, 1):
                    for name, what in (("captured", {"sizes": [16], "unix_s": time.time()}),
                                       ("recaptured", {"done": {"decode 16": {"reason": "", "ms": 9.0}}})):  # fmt: skip
                        with (notes / f"{name}.jsonl").open("a") as file:
                            file.write(json.dumps({"rank": rank, **what}) + "\n")
                self.captured = True
                return

    def stop(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()
        if self.store is not None:
            self.store.close(10.0)
        for process in self.processes:
            process.kill()
            process.wait()
