#!/usr/bin/env python3
"""Several ranks on a CPU: the real hooks and SGLang's own request broadcast over gloo; only the device is replayed.

    bench_ranks.py [--ranks 2 4 8] [--passes 100000] [--epochs 1000] [--faults 100] [--private] [--json]

For each number of ranks a server of so many processes goes through random passes: idle ones, batches of random length,
requests that arrive anywhere. Rows are proposed on random ranks, and faults happen in the middle: a rank is stopped
for a while, the folders of leases and of the board are removed, the whole server is killed and started again.
Counted are hangs, hooks that waited for something, and ranks whose tables differ once it is quiet. Every call of a hook
that takes longer than 2 ms is accounted for by the kernel's own figures (``call_watch.py``). A stock run of the same
passes, without the plugin, stands beside it with --stock.
"""

# ruff: noqa: PLC0415, S311 - each process imports what it is about; the random numbers are no secrets
from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from call_watch import WHYS, CallWatch, Long

HANG_S = 60.0
QUIET_S = 30.0
MOST_BAD_STARTS = 5
NO_GRAPHS = SimpleNamespace(req_to_token_pool=SimpleNamespace(free_slots=[]), token_to_kv_pool=None)
TELL_EVERY = 50


class Plan(NamedTuple):
    """What one server is to go through."""

    ranks: int
    passes: int
    epochs: int
    folder: str
    private: bool
    """each rank has a folder of its own"""
    seed: int
    port: int
    plugin: bool = True


class Work:
    """A request that keeps the server busy for some passes."""

    def __init__(self, passes: int, tokens: int) -> None:
        self.passes, self.tokens, self.rid = passes, tokens, "bench"


class TokenizedGenerateReqInput(Work):
    """Named as SGLang names it: the most frequent request, which moves no weights and ends no ballot."""


class Stop:
    """The last request: all ranks leave their loops at the same pass."""


# --- in a rank


class Socket:
    """As far as SGLang's receiver goes: what a list holds comes out at its front."""

    def __init__(self, queue: list[Any]) -> None:
        self.queue = queue

    def recv_pyobj(self, *_: Any) -> Any:
        import zmq

        if not self.queue:
            raise zmq.ZMQError
        return self.queue.pop(0)


class Rank:
    """A scheduler's loop around SGLang's receiver, its request broadcast and its hooked methods."""

    def __init__(self, plan: Plan, rank: int, pipe: Any) -> None:
        self.plan, self.rank, self.pipe = plan, rank, pipe
        self.random = random.Random(plan.seed)
        self.queue: list[Any] = []
        self.watch = CallWatch(Path(plan.folder) / f"stacks-{rank}-{os.getpid()}")
        self.told = 0, 0, 0
        self.proposed = 0
        self.captures: list[tuple[int, tuple[int, ...]]] = []
        self.passes = 0
        self.busy = 0
        self.seen: list[str] = []

    def run(self) -> None:
        import torch.distributed as dist

        self._load()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.plan.port))
        dist.init_process_group("gloo", rank=self.rank, world_size=self.plan.ranks)
        self.group = dist.new_group(list(range(self.plan.ranks)), backend="gloo")
        receiver = self._receiver()
        self.pipe.send(("ready", self.rank, self._news()))
        quiet_since = None
        passes = 0
        while True:
            if self.rank == 0:
                quiet_since = self._lead(passes, quiet_since)
            requests = receiver.recv_requests()
            if any(isinstance(request, Stop) for request in requests):
                break
            self.passes = passes
            self._pass(requests, passes)
            passes += 1
            if passes % TELL_EVERY == 0:
                self.pipe.send(("pass", self.rank, self._news(), passes, self._epoch()))
        # Quiet: whatever a thread still has to read, it reads now; then one more idle pass on each rank.
        time.sleep(1.0)
        self._timed(self.scheduler.maybe_sleep_on_idle)
        self.pipe.send(("end", self.rank, self._news(), self._report(passes)))
        dist.barrier()

    def _load(self) -> None:
        import triton
        from sglang.srt.managers.scheduler import Scheduler

        from sglang_moe_autotune import releases

        self.args = releases.publish_server_args(tp_size=self.plan.ranks)
        self.scheduler = SimpleNamespace(
            server_args=SimpleNamespace(
                tp_size=self.plan.ranks, port=self.plan.port, speculative_num_draft_tokens=None
            ),
            ps=SimpleNamespace(tp_rank=self.rank),
            _engine_paused=False,
            profiler_manager=SimpleNamespace(profile_in_progress=False),
            weight_updater=SimpleNamespace(offload_tags=set(), _session=None),
            idle_sleeper=None,
            session_controller=SimpleNamespace(maybe_reap=lambda _: None),
            is_fully_idle=lambda **_: True,
            _tokenized_requests=lambda _: (),
            _request_dispatcher=self._dispatch,
            flush_wrapper=SimpleNamespace(check_pending=lambda: None),
            external_corpus_manager=None,
            scheduler_stage_metrics=None,
            tp_worker=SimpleNamespace(model_runner=NO_GRAPHS),
        )
        self.serving = None
        if self.plan.plugin:
            from sglang.srt.plugins import load_plugins

            load_plugins()
            from sglang_moe_autotune import landscape as recording
            from sglang_moe_autotune import plugin
            from sglang_moe_autotune.device import Device
            from sglang_moe_autotune.records import Environment

            landscape = recording.load(recording.shipped()[0])
            releases.config_module().get_device_name = lambda *_: landscape.device_name
            source = releases.kernel_hash(releases.invoke_function())
            environment = Environment(
                landscape.device_name, (9, 0), 132, 232_448, 50 << 20, triton.__version__, source
            )
            self.serving = plugin.serving()
            provider = any_m(landscape, self.plan.seed * 100 + self.rank)
            self.landscape, self.provider = landscape, provider
            self.serving.start(Device(environment, provider, "replayed"))
            shape = landscape.shape
            for M in landscape.ms:  # noqa: N806 - what a server does while it captures its graphs
                releases.config_module().try_get_optimal_moe_config(
                    shape.w1_shape, shape.w2_shape, shape.top_k, shape.dtype, M, return_down_config=True
                )
        for name in ("maybe_sleep_on_idle", "process_input_requests"):
            setattr(self.scheduler, name, getattr(Scheduler, name).__get__(self.scheduler))

    def _receiver(self) -> Any:
        """SGLang's own receiver; its sockets are lists."""
        from sglang.srt.managers.scheduler_components import request_receiver as module

        module.sock_recv = Socket.recv_pyobj  # before 0.5.16 the socket's own method is called
        group = SimpleNamespace(rank=self.rank, cpu_group=self.group, ranks=list(range(self.plan.ranks)))
        place = {"tp_rank": self.rank, "attn_tp_rank": self.rank, "attn_cp_rank": 0, "pp_rank": 0, "attn_dp_rank": 0}
        fields = dict.fromkeys(module.SchedulerRequestReceiver.__dataclass_fields__)
        fields |= {"recv_from_tokenizer": Socket(self.queue), "recv_from_rpc": Socket([]), "max_recv_per_poll": -1}
        fields |= {"model_config": SimpleNamespace(is_multimodal=False), "server_args": self.args}
        if "ps" in fields:  # before the ranks and groups of a process became global
            sizes = {"tp_size": self.plan.ranks, "attn_tp_size": self.plan.ranks, "attn_cp_size": 1}
            fields |= {"ps": SimpleNamespace(**place, **sizes), "tp_group": group, "tp_cpu_group": self.group}
        else:
            from sglang.srt.runtime_context import get_parallel

            get_parallel().override_permanently(**place, tp_group=group)
            fields |= {"get_last_batch": lambda: None}
        return module.SchedulerRequestReceiver(**fields)

    def _dispatch(self, request: Any) -> None:
        self.seen.append(type(request).__name__)

    def _lead(self, passes: int, quiet_since: float | None) -> float | None:
        """Rank 0 alone has a socket: requests arrive there anywhere, and it ends the run."""
        plan = self.plan
        over = passes >= plan.passes and (self._epoch() >= plan.epochs or not plan.plugin or plan.private)
        over = over and (self.serving is None or self.serving.state == "idle" or plan.private)
        over = over or (self.serving is not None and self.serving.state == "off")  # a fault: the report says which
        if not over and self.random.random() < 0.01:
            kind = Work if self.random.random() < 0.1 else TokenizedGenerateReqInput
            self.queue.append(kind(self.random.randrange(1, 30), self.random.randrange(1, 2000)))
        if not over:
            return None
        now = time.monotonic()
        quiet_since = quiet_since or now
        if not plan.plugin or self._settled() or now - quiet_since > (2.0 if plan.private else QUIET_S):
            self.queue.append(Stop())
            return quiet_since
        time.sleep(0.002)  # nothing but idle passes are left, and the machine has few cores
        return quiet_since

    def _settled(self) -> bool:
        ranks = self.serving.peers.ranks if self.serving.peers is not None else None
        council = ranks._council if ranks is not None else None
        if self.plan.ranks == 1:
            return self.serving.state == "idle"
        return council is not None and not council.waits and not any(p.proposals for p in council.posts.values())

    def _pass(self, requests: list[Any], passes: int) -> None:
        self._timed(lambda: self.scheduler.process_input_requests(requests))
        for request in requests:
            if isinstance(request, Work):
                self.busy = max(self.busy, request.passes)
                self._batch(request)
        if self.busy:
            self.busy -= 1
            time.sleep(0.0005)
            return
        if self.serving is not None:
            self._propose(passes)
        self._timed(self.scheduler.maybe_sleep_on_idle)

    def _batch(self, request: Work) -> None:
        if self.serving is not None:
            from sglang_moe_autotune import plugin

            mode = SimpleNamespace(is_extend=lambda: True)
            batch = SimpleNamespace(reqs=[request], forward_mode=mode, extend_num_tokens=request.tokens)
            self._timed(lambda: plugin.on_batch(self.scheduler, batch))

    def _propose(self, passes: int) -> None:
        """Now and then this rank has found a row: a good one, or one that is as fast as the baseline."""
        peers = self.serving.peers
        if peers is not None and peers.graphs is None:
            peers.graphs = self  # notes the pass at which it is told to capture
        if peers is None or not self.plan.epochs or self.plan.private:
            return
        if passes >= self.plan.passes and self._epoch() >= self.plan.epochs:
            return
        if len(peers.ranks._open) >= 4 or self.proposed >= 4 * self.plan.epochs:
            return
        from sglang_moe_autotune.bench import COMPARE_CASES
        from sglang_moe_autotune.records import Evidence, Record

        self.proposed += 1
        M = 1 + self.rank + self.plan.ranks * self.proposed % 3900  # noqa: N806
        recorded = nearest(self.landscape, M)
        baseline, (best, best_us) = self.landscape.baselines[recorded].pair, self.landscape.best(recorded)
        pair, us = best, self.landscape.pair_us(recorded, baseline)
        if self.proposed % 4 == 0:  # what two ranks may see differently
            pair, best_us = self.close_call(recorded, us)
        gain = 1 - best_us / us
        if pair == baseline or gain < 0.002:
            return
        runs = COMPARE_CASES * self.provider.share.runs
        evidence = Evidence(us, best_us, gain, gain / 2, gain * 1.5, 24, 5, 0.001, runs=runs)
        record = Record(self.landscape.shape, M, "faster", pair, baseline, evidence, "replayed")
        self._timed(lambda: self.serving._learned(record))

    def ready(self) -> bool:
        return self.random.random() < 0.2

    def capture(self, sizes: tuple[int, ...]) -> None:
        self.captures.append((self.passes, sizes))

    def release(self) -> None:
        """Nothing is held."""

    def close_call(self, M: int, us: float) -> tuple[Any, float]:  # noqa: N803
        from sglang_moe_autotune.shapes import ConfigPair

        ups, downs = self.landscape.up_us[M], self.landscape.down_us[M]
        fitting = [c for c in self.landscape.candidates if c in ups and c in downs]
        pairs = [ConfigPair(c, c) for c in self.random.sample(fitting, 40)]
        return min(((p, self.landscape.pair_us(M, p)) for p in pairs), key=lambda found: abs(0.98 * us - found[1]))

    def _timed(self, function: Any) -> None:
        self.watch(function)

    def _news(self) -> tuple[int, list[Long], list[Any]]:
        """What was not told yet: how many calls of hooks, the long ones, and captures."""
        told, self.told = self.told, (len(self.watch.times_ms), len(self.watch.long), len(self.captures))
        return self.told[0] - told[0], self.watch.long[told[1] :], self.captures[told[2] :]

    def _epoch(self) -> int:
        return self.serving.peers.epoch if self.serving is not None and self.serving.peers is not None else 0

    def _report(self, passes: int) -> dict[str, Any]:
        times = sorted(self.watch.times_ms)
        report = {
            "passes": passes,
            "hook_ms": {"median": times[len(times) // 2], "p999": times[int(len(times) * 0.999)], "max": times[-1]},
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        if self.serving is not None:
            from sglang_moe_autotune import plugin

            peers = self.serving.peers
            rows = {str(M): str(pair) for table in self.serving.lookup.rows().values() for M, pair in table.items()}
            report |= {
                "epoch": self._epoch(),
                "rows": dict(sorted(rows.items())),
                "taken_back": sum(row.verdict == "baseline" for row in peers.ranks.table.rows),
                "slices": self.serving.slices,
                "learned": sorted(row.M for row in peers.ranks.table.rows if row.M in self.landscape.ms),
                "measured": self.provider.gpu_s,
                "checks_s": peers.checks.gpu_s,
                "per_m": self.serving.tuner.gpu_s_per_m(self.landscape.shape),
                "waits": list(peers.ranks.waits),
                "broken": [fence.name for fence in plugin._FENCES.values() if fence.broken],
                "state": [self.serving.state, self.serving.reason],
            }
        return report


def nearest(landscape: Any, M: int) -> int:  # noqa: N803
    """The recorded M whose latencies stand for this one: on the same side of where SGLang's heuristic changes."""
    same = [m for m in landscape.ms if (m <= landscape.shape.E) == (landscape.shape.E >= M)]
    return int(min(same, key=lambda m: abs(m - M)))


def any_m(landscape: Any, seed: int) -> Any:
    """The recorded device, for every M."""
    from sglang_moe_autotune.replay import ReplayProvider

    class AnyM(ReplayProvider):
        def open(self, shape: Any, M: int, baseline: Any) -> Any:  # noqa: N803
            return super().open(shape, nearest(landscape, M), baseline)

    return AnyM(landscape, seed=seed, polls=1)


def rank_process(plan: Plan, rank: int, pipe: Any, log: str) -> None:
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    folder = Path(plan.folder) / (f"store-{rank}" if plan.private else "store")
    os.environ["SGLANG_MOE_AUTOTUNE_DIR"] = str(folder)
    Rank(plan, rank, pipe).run()


# --- in the process that the user started


class Server:
    """The ranks of one server, watched."""

    def __init__(self, plan: Plan, log: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.plan, self.pipes, self.processes = plan, [], []
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=rank_process, args=(plan, rank, theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.heard_s = time.monotonic()
        self.passes = self.epoch = self.calls = 0
        self.long: list[tuple[int, Long]] = []
        self.captures: list[list[Any]] = [[] for _ in range(plan.ranks)]
        self.stopped: dict[int, list[tuple[float, float]]] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.ready = 0

    def listen(self, seconds: float) -> bool:
        """Take in what the ranks say; False once nobody said anything for too long."""
        for pipe in multiprocessing.connection.wait(self.pipes, seconds):
            try:
                what, rank, (calls, fresh, captures), *rest = pipe.recv()
            except EOFError:
                self.pipes.remove(pipe)
                continue
            self.heard_s = time.monotonic()
            self.calls += calls
            self.long += [(rank, call) for call in fresh]
            self.captures[rank] += captures
            if what == "ready":
                self.ready += 1
            elif what == "pass" and rank == 0:
                self.passes, self.epoch = rest
            elif what == "end":
                self.reports[rank] = rest[0]
        return time.monotonic() - self.heard_s < HANG_S

    @property
    def bad_start(self) -> bool:
        """Has a rank ended before all had met? On a busy machine gloo's connections fail at times."""
        return self.ready < self.plan.ranks and any(process.exitcode is not None for process in self.processes)

    @property
    def over(self) -> bool:
        return len(self.reports) == self.plan.ranks or not self.pipes

    def stop(self, rank: int, seconds: float) -> None:
        """As if its machine had forgotten it for a while."""
        began_s = time.monotonic()
        os.kill(self.processes[rank].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.processes[rank].pid, signal.SIGCONT)
        self.stopped.setdefault(rank, []).append((began_s, time.monotonic()))

    def account(self, found: dict[str, Any]) -> None:
        """Add what its hooks did. Of a server that was killed the last passes of a rank may not be known."""
        found["calls"] += self.calls
        known = self.captures if self.over else [c[: min(map(len, self.captures))] for c in self.captures]
        found["captures"] += len(known[0])
        found["together"] = found["together"] and all(captures == known[0] for captures in known)
        for rank, call in self.long:
            why = call.why(self.stopped.get(rank, ()))
            row = found["long"].setdefault(why, {"calls": 0, "longest_ms": 0.0, "slept_ms": 0.0, "where": {}})
            row["calls"] += 1
            row["longest_ms"] = max(row["longest_ms"], round(call.wall_ms, 2))
            row["slept_ms"] = max(row["slept_ms"], round(call.slept_ms, 2))
            if why in {"disk", "own threads", "waited"}:
                row["where"][call.where] = row["where"].get(call.where, 0) + 1
            if why == "waited":
                found["waited"].append({"rank": rank, **call._asdict()})

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run_server(plan: Plan, faults: int, log: Path) -> dict[str, Any]:
    """One server to its end, with faults at random moments; a kill costs it a restart with the same folder."""
    rng = random.Random(plan.seed)
    found: dict[str, Any] = {"stops": 0, "lost_folders": 0, "kills": 0, "hangs": 0, "epochs": 0, "passes": 0}
    found |= {"bad_starts": 0, "calls": 0, "long": {}, "waited": [], "captures": 0, "together": True}
    server, begun = Server(plan, log), time.monotonic()
    kills = max(1, faults // 10) if faults else 0
    passes, epochs = plan.passes, plan.epochs
    every = max(1, passes // (faults + kills + 1))  # each start takes a part of the way to the next fault
    goal, left = every, faults
    while not server.over:
        if server.bad_start and found["bad_starts"] < MOST_BAD_STARTS:
            found["bad_starts"] += 1
            server.kill()
            plan = plan._replace(port=free_port())
            server = Server(plan, log)
        if not server.listen(0.02):
            found["hangs"] += 1
            server.kill()
            break
        if left and server.ready == plan.ranks and server.passes >= goal:
            left, goal = left - 1, goal + every
            if left % max(1, faults // max(1, kills)) == 0 and found["kills"] < kills:
                found["kills"] += 1
                found["epochs"] += server.epoch
                found["passes"] += server.passes
                server.kill()
                server.account(found)
                rest = max(200, passes - found["passes"]), max(4, epochs - found["epochs"])
                plan = plan._replace(port=free_port(), passes=rest[0], epochs=rest[1], seed=plan.seed + 100)
                goal = every
                server = Server(plan, log)
            elif rng.random() < 0.5:
                found["stops"] += 1
                server.stop(rng.randrange(plan.ranks), rng.uniform(0.02, 0.3))
            else:
                found["lost_folders"] += 1
                for folder in Path(plan.folder).glob(rng.choice(("store*/*.ranks", "store*/*.leases", "store*"))):
                    shutil.rmtree(folder, ignore_errors=True)
    for process in server.processes:
        process.join(10)
    server.kill()
    server.account(found)
    reports = server.reports
    found["seconds"] = round(time.monotonic() - begun, 1)
    found["passes"] += max((r["passes"] for r in reports.values()), default=0)
    found["epochs"] += max((r.get("epoch", 0) for r in reports.values()), default=0)
    found["ranks"] = {rank: reports[rank] for rank in sorted(reports)}
    tables = [json.dumps(r.get("rows"), sort_keys=True) for r in reports.values()]
    found["equal"] = len(reports) == plan.ranks and len(set(tables)) == 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--passes", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--private", action="store_true", help="also a server whose ranks have a folder each")
    parser.add_argument("--stock", action="store_true", help="the same passes without the plugin too, to compare with")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="moe-autotune-ranks-"))
    os.environ.update(
        OMP_NUM_THREADS="1",
        SGLANG_MOE_CONFIG_DIR=str(work / "empty"),
        SGLANG_CACHE_DIR=str(work / "cache"),
        SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S="0",
        SGLANG_MOE_AUTOTUNE_GRACE_S="0",
        SGLANG_MOE_AUTOTUNE_BUDGET_S="3600",
        SGLANG_MOE_AUTOTUNE_RECAPTURE="idle",
    )
    (work / "empty" / "configs").mkdir(parents=True)
    import sglang.srt.managers.scheduler  # noqa: F401 - once: the ranks are forks of this process

    results, good = {}, True
    runs = len(options.ranks)
    share = (options.passes // runs, options.epochs // runs)
    servers = [(str(ranks), ranks, False) for ranks in options.ranks]
    servers += [("private", 2, True)] if options.private else []
    for name, ranks, private in servers:
        folder = work / f"ranks-{name}"
        folder.mkdir()
        plan = Plan(ranks, *((600, 0) if private else share), str(folder), private, options.seed + ranks, free_port())
        log = work / f"ranks-{name}.log"
        found = run_server(plan, 0 if private else options.faults // runs, log)
        if options.stock:
            stock = run_server(plan._replace(plugin=False, port=free_port()), 0, work / f"stock-{name}.log")
            found["stock_hook_ms"] = {rank: r["hook_ms"] for rank, r in stock["ranks"].items()}
        text = log.read_text(errors="replace")
        told = ("MoE autotune failed", "MoE autotune could", "MoE autotune put")
        found["errors"] = [line for line in text.splitlines() if any(words in line for words in told)]
        ended = len(found["ranks"]) == ranks
        fine = not found["hangs"] and not found["errors"] and ended and (found["equal"] or private)
        fine = fine and found["together"] and not found["waited"]
        good = good and fine
        results[name] = found
        if not options.json:
            print_result(name, found, fine)
        if not fine:
            sys.stderr.write(text[-4000:])
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
    shutil.rmtree(work, ignore_errors=True)
    return 0 if good else 1


def print_result(ranks: str, found: dict[str, Any], fine: bool) -> None:
    print(
        f"[{'ok' if fine else 'FAIL'}] {ranks} ranks: {found['passes']:,} passes, {found['epochs']} epochs in"
        f" {found['seconds']} s; {found['stops']} stops, {found['lost_folders']} lost folders, {found['kills']} kills;"
        f" hangs {found['hangs']}, tables {'equal' if found['equal'] else 'DIFFER'},"
        f" {found['captures']} captures {'together' if found['together'] else 'APART'}; of {found['calls']:,} calls of"
        f" hooks {len(found['waited'])} waited"
    )
    for why in WHYS:
        if why in found["long"]:
            row = found["long"][why]
            print(f"    long, {why}: {row['calls']}, longest {row['longest_ms']} ms, asleep for {row['slept_ms']} ms")
            for where, times in sorted(row["where"].items(), key=lambda item: -item[1])[:5]:
                print(f"        {times} in {where or 'no sample'}")
    for rank, report in found["ranks"].items():
        rows = len(report.get("rows", ()))
        device_s = report.get("measured", 0.0)
        print(
            f"    rank {rank}: rows {rows}, epoch {report.get('epoch')}, device {device_s:.3f} s, slices"
            f" {report.get('slices')}, {report['hook_ms']}, {report.get('waits')}"
        )
    if "stock_hook_ms" in found:
        print(f"    without the plugin: {found['stock_hook_ms']}")


if __name__ == "__main__":
    sys.exit(main())
