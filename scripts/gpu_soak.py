#!/usr/bin/env python3
"""A soak of a live server that tunes: whatever servers meet, at random, and then no error, no leak, the same answers.

    gpu_soak.py --out DIR [--seconds 300] [--recapture] [--work DIR] [--seed N] [-- more server flags]

Run it with the Python that SGLang is installed in; a start (one to two minutes) comes on top of ``--seconds``. One
server with the plugin: random load, idle gaps, flushed caches, weights and caches released and resumed, pauses, aborts,
clients that hang up, health probes, the kill switch by request and by file. What was learned stays in the work folder,
so that another call on the same machine goes on where this one ended; so do the answers of the first one, from before
any row was learned. ``--recapture``: graphs are captured again in idle time, in gaps that are long enough for it;
SGLang's memory saver is left out then. Give it a ``--work`` of its own: a server that begins with all rows has nothing
to capture again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_answers
from gpu_answers import Answer, agree, told
from gpu_parts import BUDGET_S, Parts, end_on_terminate
from gpu_server import FEWER_SIZES, Model, Server, long_passes

from sglang_moe_autotune import status, store, switch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAVER = ("--enable-memory-saver", "--enable-weights-cpu-backup")
LONGEST_PROMPT, MOST_NEW = 2500, 48
GROWTH_MIB, LATE_MIB = 256, 32
"""of device memory, in all and in the second half: the bound on loaded kernels is reached in the first one"""
RSS_GROWTH = 0.05
"""of the server's resident memory, in the second half"""
START_S = 240
SAMPLE_S, ANSWERS_S = 15.0, 60.0
DEEP_GAP_S = 24.0, 32.0
"""a row must stand for 20 s before its graph is captured again"""
FAULTS = ("MoE autotune failed", "MoE autotune could", "hit an exception", "CUDA error", "memory leak detected",
          "atchdog timeout")  # fmt: skip
"""in the server's log. Tracebacks count where the plugin is in them: SGLang logs its own for clients that hang up."""
OURS, TRACEBACK_LINES = "sglang_moe_autotune", 80


class DeedError(Exception):
    """A promise that was broken in a deed; the server lives, and the soak goes on."""


class Count:
    """Requests of the load, by what became of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = self.aborted = 0
        self.failed: list[str] = []

    def note(self, outcome: str, words: str = "") -> None:
        with self._lock:
            if outcome == "answered":
                self.answered += 1
            elif outcome == "aborted":
                self.aborted += 1
            else:
                self.failed.append(words)


class Soak:
    """Deeds on one server, and what is watched meanwhile. Each deed leaves the server as it found it, and idle."""

    def __init__(self, server: Server, root: Path, seed: int, *, saver: bool) -> None:
        """root: of the plugin's store. saver: can weights be released?"""
        self.server, self.root, self.saver = server, root, saver
        self.random = random.Random(seed)  # noqa: S311 - a choice of deeds
        self.count = Count()
        self.done: dict[str, int] = {}
        self.broken: list[str] = []
        """what promises were broken, in words"""
        self.samples: list[dict[str, Any]] = []
        self._number = 0

    # -- deeds -----------------------------------------------------------------------------------------------------

    @property
    def deeds(self) -> dict[str, Callable[[], None]]:
        found = {
            "load": self.load, "load and pause": self.pause, "load and abort": self.abort, "hang up": self.hang_up,
            "short gap": lambda: self.rest(1.0, 3.0), "long gap": lambda: self.rest(6.0, 9.0), "flush": self.flush,
            "health": self.health, "switch by request": self.switch, "switch by file": self.switch_file,
        }  # fmt: skip
        return found | ({"release": self.release} if self.saver else {"deep gap": lambda: self.rest(*DEEP_GAP_S)})

    def run(self, name: str) -> None:
        """Raises what says that the server does not answer as it must; a broken promise is noted."""
        self._note(name, self.deeds[name])
        self.done[name] = self.done.get(name, 0) + 1

    def _note(self, name: str, deed: Callable[[], None]) -> None:
        try:
            deed()
        except DeedError as error:
            self.broken.append(f"{name}: {error}")
            print(f"    {self.broken[-1]}", flush=True)

    def _no_slices(self, seconds: float, when: str) -> None:
        """Nothing may be tuned for so long."""
        before = self.slices()
        time.sleep(seconds)
        if (after := self.slices()) != before:
            raise DeedError(f"{after - before} slices were spent while {when}")

    def load(self, most_s: float = 3.0) -> None:
        """A closed loop of a few clients for a while."""
        self._join(self._begin(self.random.randint(1, 8), self.random.uniform(0.5, most_s)))

    def pause(self) -> None:
        """The engine stands still in the middle of a load: tuning must not use the gap, and all are answered after."""
        threads = self._begin(self.random.randint(1, 4), 1.5)
        time.sleep(self.random.uniform(0.1, 0.6))
        self.server.post("/pause_generation", {"mode": "in_place"})
        try:
            time.sleep(self.random.uniform(0.3, 1.5))
            self._no_slices(0.5, "the engine was paused")
        finally:
            self.server.post("/continue_generation", {})
            self._join(threads)

    def abort(self) -> None:
        threads = self._begin(self.random.randint(2, 6), 1.0, may_abort=True)
        for _ in range(4):
            time.sleep(self.random.uniform(0.05, 0.3))
            everything = self.random.random() < 0.3
            rid = "" if everything else f"soak-{self._number - self.random.randint(0, 3)}"
            self.server.post("/abort_request", {"rid": rid, "abort_all": everything})
        self._join(threads)

    def hang_up(self) -> None:
        """A client that goes away after the first piece of its answer."""
        body = json.dumps({**self._request(64), "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            connection.getresponse().readline()
        finally:
            connection.close()
        self.wait_until_idle()

    def rest(self, least_s: float, most_s: float) -> None:
        time.sleep(self.random.uniform(least_s, most_s))

    def flush(self) -> None:
        self.wait_until_idle()

    def health(self) -> None:
        for path in ("/health", "/health_generate"):
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}{path}", timeout=30) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{path} answered {answer.status}")

    def release(self) -> None:
        """Weights, caches or both leave the device for a while. The server must be idle, and no probe may come."""
        self.wait_until_idle()
        tags = self.random.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"]])
        self.server.post("/release_memory_occupation", {"tags": tags})
        try:
            self._no_slices(self.random.uniform(0.5, 2.0), f"{tags} were released")
        finally:
            self.server.post("/resume_memory_occupation", {"tags": tags})

    def switch(self) -> None:
        """Off and on again by request; with nothing tuned meanwhile."""
        level = self.random.choice([0, 1])
        self.set_level(level)
        try:
            before = self.slices()
            self.load(1.0)
            time.sleep(0.5)
            if (after := self.slices()) != before:
                raise DeedError(f"{after - before} slices were spent while it was switched to {level}")
        finally:
            self.set_level(2)

    def switch_file(self) -> None:
        """The same by the file in the store's folder, which is looked at every three seconds."""
        switch.write(self.root, self.random.choice(["off", "rows"]))
        try:
            time.sleep(4.5)
            self._no_slices(0.7, "the file said no")
        finally:
            switch.write(self.root, "on")
        time.sleep(3.5)

    def set_level(self, level: int) -> None:
        self.server.post("/set_internal_state", {"server_args": {"moe_autotune": level}})

    # -- what is watched -------------------------------------------------------------------------------------------

    def slices(self) -> int:
        return int(self.server.get("/server_info")["internal_states"][0]["moe_autotune"]["slices"])

    def live(self) -> status.LiveStatus | None:
        return next((s.live for s in status.read(self.root).servers if s.presence == "running"), None)

    def sample(self) -> None:
        """Memory at rest: no bench open, no block cached. And how far tuning is, of up to three seconds before."""
        self.set_level(1)
        time.sleep(0.3)
        self.wait_until_idle()
        live = self.live()
        self.samples.append({
            "unix_s": time.time(), "free_mib": free_mib(), "rss_mib": rss_mib(self.server.process.pid),
            **({} if live is None else {
                "rows": live.rows, "slices": live.slices, "gpu_s": round(live.gpu_s, 2), "queue": len(live.queue),
                "passes_over": live.passes_over, "pauses": live.pauses, "pass_longest_us": round(live.pass_longest_us),
                "graphs": live.graphs.outcomes, "deferred": len(live.deferred), "quarantine": len(live.quarantine),
            }),
        })  # fmt: skip
        self.set_level(2)

    def answers(self, *, together: bool = False) -> list[Answer]:
        """To a fixed set of prompts, from an empty cache: each is computed anew."""
        self.wait_until_idle()
        sizes = (24, 100, 300, 700, 1500)
        prompts = [[(13 * i + 19 * j) % 31000 + 5 for j in range(size)] for i, size in enumerate(sizes)]
        return gpu_answers.ask(self.server, prompts, 8, together=together)

    def wait_until_idle(self) -> None:
        """Raises TimeoutError where a request never ends."""
        self.server.flush()
        time.sleep(0.2)

    # -- the load --------------------------------------------------------------------------------------------------

    def _request(self, new_tokens: int) -> dict[str, Any]:
        self._number += 1
        rng = random.Random(self._number)  # noqa: S311 - prompts
        length = int(2 ** rng.uniform(1, 11.3))
        shared = [(17 * j) % 31000 + 5 for j in range(rng.randrange(50, 400))] if rng.random() < 0.4 else []
        return {
            "rid": f"soak-{self._number}",
            "input_ids": shared + [rng.randrange(5, 31000) for _ in range(min(length, LONGEST_PROMPT))],
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True},
        }

    def _begin(self, clients: int, seconds: float, *, may_abort: bool = False) -> list[threading.Thread]:
        end = time.monotonic() + seconds
        bodies = iter(lambda: self._request(self.random.randint(1, MOST_NEW)), None)
        lock = threading.Lock()

        def client() -> None:
            while time.monotonic() < end:
                with lock:
                    body = next(bodies)
                self._one(body, may_abort=may_abort)

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        return threads

    def _one(self, body: Any, *, may_abort: bool) -> None:
        wanted = body["sampling_params"]["max_new_tokens"]
        try:
            answer = self.server.post("/generate", body)
        except (OSError, http.client.HTTPException) as error:
            aborted = may_abort and isinstance(error, urllib.error.HTTPError)
            self.count.note("aborted" if aborted else "failed", f"{body['rid']}: {type(error).__name__}: {error}")
            return
        reason = answer["meta_info"]["finish_reason"]
        if may_abort and reason["type"] == "abort":
            self.count.note("aborted")
        elif len(answer["output_ids"]) == wanted:
            self.count.note("answered")
        else:
            self.count.note("failed", f"{body['rid']}: {len(answer['output_ids'])} of {wanted} tokens, {reason}")

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join(120)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError("requests without an answer for two minutes")


def free_mib() -> int:
    """Of the device, by the driver's own count; makes a context of this process there."""
    import torch  # noqa: PLC0415 - not before the server has its memory

    return int(torch.cuda.mem_get_info()[0] >> 20) if torch.cuda.is_available() else 0


def rss_mib(group: int) -> dict[str, int]:
    """Resident memory of a process group's processes, by pid; the compile processes have groups of their own."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
                pages = int((folder / "statm").read_text().split()[1])
                found[folder.name] = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return found


def growth(values: Sequence[float]) -> tuple[float, float]:
    """How much the values grew in all, and in the second half: medians of three at the ends. Raises ValueError for
    less than six."""
    if len(values) < 6:
        raise ValueError(f"{len(values)} samples say nothing of a trend: six are needed")

    def middle(of: Sequence[float]) -> float:
        return sorted(of)[len(of) // 2]

    half = len(values) // 2
    first, centre, last = middle(values[:3]), middle(values[half - 1 : half + 2]), middle(values[-3:])
    return last - first, last - centre


def faults(log: str) -> list[str]:
    """The lines of a log that tell of a fault."""
    lines = log.splitlines()
    found = [line for line in lines if any(words in line for words in FAULTS)]
    for place, line in enumerate(lines):
        if "Traceback (most recent" in line:
            body = itertools.takewhile(lambda text: "Traceback (most recent" not in text, lines[place + 1 :])
            if any(OURS in text for text in itertools.islice(body, TRACEBACK_LINES)):
                found.append(line)
    return found


def judge(soak: Soak, log: str, checks: list[tuple[str, bool, str]], *, recapture: bool = False) -> None:
    """What must hold after any soak. recapture: graphs were to be captured again."""
    count, samples = soak.count, soak.samples
    failed, words = count.failed, f"{count.answered} answered, {count.aborted} aborted, {len(count.failed)} failed"
    broken = "; ".join(soak.broken[:4]) or "none was broken"
    deeds = f"{sum(soak.done.values())} deeds of {len(soak.done)} kinds; {broken}"
    every = soak.done.keys() >= soak.deeds.keys()
    checks.append(("every promise held, in every kind of deed", every and not soak.broken, deeds))
    checks.append(("every request was answered", not failed and count.answered > 0, f"{words} {failed[:2]}"))
    lines = faults(log)
    checks.append(("no error in the server's log", not lines, "; ".join(lines[:3])[:600] or "none"))
    try:
        total, late = growth([-s["free_mib"] for s in samples])
        words = f"{total:+.0f} MiB in all (at most {GROWTH_MIB}), {late:+.0f} in the second half (at most {LATE_MIB})"
        checks.append(("device memory", total <= GROWTH_MIB and late <= LATE_MIB, f"{words}, {len(samples)} samples"))
        whole = [sum(s["rss_mib"].values()) for s in samples]
        total, late = growth(whole)
        checks.append(("resident memory", late <= RSS_GROWTH * whole[0],
                       f"{total:+.0f} MiB in all, {late:+.0f} MiB in the second half, of {whole[0]} MiB"))  # fmt: skip
    except ValueError as error:
        checks.append(("memory", False, str(error)))
    last = samples[-1] if samples else {}
    worked = last.get("slices", 0) > samples[0].get("slices", 0) if samples else False
    checks.append(("it tuned meanwhile", worked, f"{ {k: v for k, v in last.items() if k != 'rss_mib'} }"))
    if recapture:
        done = last.get("graphs", {})
        good = done.get("recaptured", 0) > 0 and not done.get("failed") and not done.get("withdrawn")
        checks.append(("graphs were captured again, none in vain", good, f"{done}"))
    checks.append(("tuning never paused itself", last.get("pauses", 1) == 0,
                   f"{last.get('passes_over')} passes over, the longest {last.get('pass_longest_us')} us"))  # fmt: skip


def drive(soak: Soak, seconds: float, reference: dict[str, Any], found: dict[str, Any]) -> None:
    """Deeds at random until the time is over, with samples and looks at the answers in between. Raises what a deed
    raises."""
    begun = time.monotonic()
    sampled = asked = begun - max(SAMPLE_S, ANSWERS_S)
    names = list(soak.deeds)
    waiting: list[str] = []
    while time.monotonic() - begun < seconds:
        now = time.monotonic()
        if now - sampled >= SAMPLE_S:
            soak.sample()
            sampled = now
        if now - asked >= ANSWERS_S:
            look(soak, reference, found)
            asked = now
        if not waiting:  # each deed comes round, in an order that is another one each time
            waiting = soak.random.sample(names, len(names))
        soak.run(waiting.pop())
        found["deeds"] = dict(soak.done)
    soak.sample()
    look(soak, reference, found)


def look(soak: Soak, reference: dict[str, Any], found: dict[str, Any]) -> None:
    apart = gpu_answers.difference(reference["answers"], soak.answers())
    found.setdefault("answers", []).append(apart)
    if not agree(apart, *reference["stock"]):
        soak.broken.append(f"answers are not those of before: {told(apart)}; stock {reference['stock']}")


def first_answers(soak: Soak) -> dict[str, Any]:
    """Before any row is learned: answers, and how far stock ones are apart, asked twice and as a batch."""
    soak.set_level(1)
    answers = soak.answers()
    stock = [gpu_answers.difference(answers, other) for other in (soak.answers(), soak.answers(together=True))]
    soak.set_level(2)
    return {"answers": answers, "stock": stock}


def rows_stored(root: Path) -> int:
    return sum(len(store.read(e.path).records) for e in store.environments(root) if e.environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="of deeds, after the start")
    parser.add_argument("--recapture", action="store_true", help="graphs are captured again in idle time")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moe-autotune-soak"))  # noqa: S108 - kept for more calls
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls learned")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=31500)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the whole script")
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    end_on_terminate()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    checks: list[tuple[str, bool, str]] = []
    found: dict[str, Any] = {"checks": checks, "options": {k: str(v) for k, v in vars(options).items()}}
    parts = Parts(options.out / "soak.json", options.budget_s, found)
    parts.run("machine", lambda: found.update(machine=machine()))
    parts.run("soak", lambda: one_server(options, parts, found, checks))
    parts.write()
    for name, ok, words in checks:
        print(f"[{'ok' if ok else 'FAIL'}] {name}: {words}", flush=True)
    return 0 if checks and all(ok for _, ok, _ in checks) and not parts.failed else 1


def machine() -> dict[str, str]:
    import gpu_acceptance  # noqa: PLC0415 - needs more than a stand-in has

    return gpu_acceptance.machine()


def saver_environ() -> tuple[dict[str, str], str]:
    """What a server's environment needs for SGLang's memory saver, and why there can be none.

    The scheduler starts with its library preloaded. Where the loader does not find CUDA's runtime, which PyTorch brings
    along in a folder of its own, that ends the process before its first line.
    """
    if importlib.util.find_spec("torch_memory_saver") is None:
        return {}, "torch_memory_saver is not installed"
    from torch_memory_saver.utils import get_binary_path_from_package  # noqa: PLC0415 - not everywhere

    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    folders = [str(found.parent) for place in places for found in sorted(Path(place).glob("*/lib/libcudart.so.*"))]
    words = ""
    for more in ([], folders):
        path = os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH", ""), *more]))
        environ = {"LD_LIBRARY_PATH": path} if more else {}
        command = [sys.executable, "-c", "pass"]
        preloaded = {**os.environ, **environ, "LD_PRELOAD": library}
        done = subprocess.run(command, env=preloaded, capture_output=True, text=True, check=False)
        words = done.stderr.strip()[-300:]
        if done.returncode == 0 and "cannot be preloaded" not in words:
            return environ, ""
    return {}, f"its library cannot be preloaded: {words}"


def start(options: argparse.Namespace, root: Path, checks: list[Any]) -> tuple[Server, bool]:
    """The server, and whether it can release its weights and caches: without that the rest is soaked all the same."""
    environ = {
        "TRITON_CACHE_DIR": str(options.work / "triton"),
        "SGLANG_MOE_AUTOTUNE_DIR": str(root),
        "SGLANG_MOE_AUTOTUNE_BUDGET_S": "3600",
        "SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S": "2",
        "SGLANG_MOE_AUTOTUNE_COMPILE_PROCESSES": str(options.compile_processes),
        "SGLANG_MOE_AUTOTUNE_RECAPTURE": "idle" if options.recapture else "restart",
        "PASS_PROBE_NOTES": str(options.out),
    }
    model, flags = Model(layers=2).write(options.work / "model"), (*FEWER_SIZES, *options.flags)
    if not options.recapture:
        library, why = saver_environ()
        if not why:
            log = options.out / "server.log"
            try:
                return Server(model, options.port, log, environ | library, (*flags, *SAVER), START_S), True
            except RuntimeError as error:
                why = str(error)[-500:]
        print(f"    release and resume are left out: {why}", flush=True)
        checks.append(("weights and caches are released and resumed", False, why))
    log = options.out / ("server.log" if options.recapture else "server_without_saver.log")
    return Server(model, options.port + 1, log, environ, flags, START_S), False


def one_server(options: argparse.Namespace, parts: Parts, found: dict[str, Any], checks: list[Any]) -> None:
    root = options.work / "store"
    found["rows_before"] = rows_stored(root)
    server, saver = start(options, root, checks)
    with server:
        found["started_s"] = round(server.started_s, 1)
        soak = Soak(server, root, options.seed, saver=saver)
        kept = options.work / "reference.json"
        if found["rows_before"] == 0 or not kept.exists():
            kept.write_text(json.dumps(first_answers(soak)))
        reference = json.loads(kept.read_text())
        found["stock"] = reference["stock"]
        parts.run("deeds", lambda: drive(soak, min(options.seconds, parts.left_s - 60), reference, found))
        found["samples"], found["deeds"], found["broken"] = soak.samples, soak.done, soak.broken
        count = soak.count
        found["requests"] = {"answered": count.answered, "aborted": count.aborted, "failed": count.failed}
        checks.append(("the server lives", server.process.poll() is None, f"code {server.process.poll()}"))
        if server.process.poll() is None:
            server.rest()
        judge(soak, server.text(), checks, recapture=options.recapture)
    found["rows_after"], found["long_passes"] = rows_stored(root), long_passes(options.out)
    words = f"{found['rows_before']} before, {found['rows_after']} after"
    checks.append(("rows learned meanwhile", found["rows_after"] > 0, words))


if __name__ == "__main__":
    sys.exit(main())
