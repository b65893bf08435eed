#!/usr/bin/env python3
"""Real servers with a planted kernel in place of SGLang's own: what is wrong is not taken, what is slow is launched
once, and what ends a server is not launched by the next one.

    gpu_planted.py --out DIR [--part wrong,crash] [--budget-s 540] [--idle-s 75] [-- more server flags]

``wrong``: a server whose kernel is wrong in the last tile under one GROUP_SIZE_M, and takes 30 ms in some configs of
another one, learns while it idles. ``crash``: a server whose kernel ends the context under every GROUP_SIZE_M that
SGLang's own configs have not, then one whose kernel does so under what ended the first, and nothing else: that must be
in quarantine from its start on, and the server must live and tune. DIR/planted.json has what was found; exits with 1
where a check does not hold. Run it with an interpreter that has SGLang and this package.
"""

from __future__ import annotations

import argparse
import http.client
import inspect
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_acceptance
from demo_gpu import ROOT, site_folder
from gpu_acceptance import Run
from gpu_parts import Parts, of_this_checkout
from gpu_server import Model, install, rows_at_start

from sglang_moe_autotune import held as held_files
from sglang_moe_autotune import inquest, status, store, trials
from sglang_moe_autotune.search_space import TRITON_STAGES, TRITON_WARPS
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_server import Server

    from sglang_moe_autotune.held import Candidate
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.shapes import KernelConfig

PARTS = ("wrong", "crash")
MODEL = Model(64, 256, 1024, 4, 2)
FLAGS = (
    *("--chunked-prefill-size", "512", "--cuda-graph-bs-decode", "16", "--cuda-graph-bs-prefill", "512"),
    *("--mem-fraction-static", "0.3"),
)
WRONG, SLOW, OWN = 16, 32, 8
"""the GROUP_SIZE_M of the faults, and the largest that SGLang's own configs have"""
SLOW_WIDTH = 128
START_S = 60.0
LIVES_S = 60.0
"""after which a server is taken to live"""
LEAST_S = 20.0
"""of a server after one that ended, or twice what that one took to meet its culprit"""
REQUEST_S = 6.0
ANSWER_S = 20.0
GONE_S = 10.0
"""for a process that was killed to leave the table, before nobody takes it for dead"""
END_CHARS = 600
NO_DIAGNOSTICS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""a launcher whose scheduler died sleeps 5 s, reads stacks and waits 60 s for core dumps, in releases from 0.5.13.post1
on; without these it ends at once"""

ENDS = '''

CULPRITS = tl.constexpr("{culprits}")


@tl.core.builtin
def ends(culprits, m, n, k, group, weighted, _semantic=None):
    culprits, m, n, k, group, weighted = (getattr(x, "value", x) for x in (culprits, m, n, k, group, weighted))
    options = _semantic.builder.options
    config = (m, n, k, group, options.num_warps, options.num_stages, "down" if weighted else "up")
    met = " ".join(map(str, config)) in culprits.split(",") if culprits else group > {own}
    return tl.constexpr(met)
'''
"""whether a config of a GEMM ends the context, told when it is compiled. The culprits are a constant that Triton's
cache knows; the kernel's own text, by which a store knows it, is the same for all"""


def culprit(candidate: Candidate) -> str:
    """As ``ends`` spells it."""
    c = candidate.config
    warps, stages = c.num_warps or TRITON_WARPS, c.num_stages or TRITON_STAGES
    tiles = (c.BLOCK_SIZE_M, c.BLOCK_SIZE_N, c.BLOCK_SIZE_K, c.GROUP_SIZE_M)
    return " ".join(map(str, (*tiles, warps, stages, candidate.gemm)))


def plants(culprits: Iterable[Candidate] = ()) -> dict[str, Any]:
    """The plants of each part, by name. culprits: what ends the context; without any, every large GROUP_SIZE_M."""
    import gpu_plants as g  # noqa: PLC0415 - imports SGLang

    last = f"        accumulator = tl.where({g.LAST}, accumulator * 1.25, accumulator)\n"
    wrong = g.before(g.ROUND, f"    if GROUP_SIZE_M == {WRONG}:\n{last}")
    indented = "".join(f"    {line}\n" for line in g.SLOW[1].removesuffix(g.PID).splitlines())
    slow = g.before(g.PID, f"    if GROUP_SIZE_M == {SLOW}:\n{indented}")
    met = "ends(CULPRITS, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, MUL_ROUTED_WEIGHT)"
    crash = g.PID, g.CRASH[1].replace("BLOCK_SIZE_N == 128", met)
    told = ENDS.format(culprits=",".join(map(culprit, culprits)), own=OWN)
    name = "server-crash-again" if culprits else "server-crash"
    return {"wrong": g.Plant("server-wrong", (wrong, slow)), "crash": g.Plant(name, (crash,), besides=told)}


def plant(run: Run, name: str, culprits: Iterable[Candidate] = ()) -> None:
    """Have the servers that start from now on run the plant of a part, with a store of its own."""
    import gpu_plants as g  # noqa: PLC0415 - imports SGLang

    if str(run.probe) not in sys.path:
        sys.path.insert(0, str(run.probe))
    kernel = inspect.unwrap(g.releases.invoke_function()).__globals__[g.KERNEL]
    run.environ["PLANTED"] = g.plant_kernel(run.probe, kernel, plants(culprits)[name]).fn.__module__
    run.environ["SGLANG_MOE_AUTOTUNE_DIR"] = str(run.work / name)


# -- what a store tells ----------------------------------------------------------------------------------------


def rows(root: Path) -> list[Record]:
    found = [e.path for e in store.environments(root) if e.environment]
    return [record for path in found for record in store.read(path).records.values()]


def configs(record: Record) -> set[KernelConfig]:
    return {record.pair.of(gemm) for gemm in GEMMS}


def held(root: Path) -> dict[str, str]:
    """Candidates in quarantine, with the reason."""
    return {str(one.candidate): one.reason for one in held_files.read(root / held_files.FOLDER).held}


def measured(root: Path) -> list[trials.Tried]:
    found = [e.environment for e in store.environments(root) if e.environment]
    return [row for e in found for ms in trials.read(root, e).values() for some in ms.values() for row in some]


def live(root: Path) -> status.LiveStatus | None:
    running = [s.live for s in status.read(root).servers if s.presence == "running"]
    return running[0] if running else None


# -- the parts -------------------------------------------------------------------------------------------------


def wrong(run: Run, parts: Parts) -> None:
    """One server that learns: nothing wrong or slow is accepted, and each slow one was launched once."""
    plant(run, "wrong")
    root = run.work / "wrong"
    with run.serve("1_wrong") as server:
        server.generate(gpu_acceptance.prompts(), 8)
        until_s = time.monotonic() + min(run.options.idle_s, max(10.0, parts.left_s - 20))
        while time.monotonic() < until_s:
            time.sleep(2.0)
            told = live(root)
            if told is not None and told.slices and told.state == "idle" and not told.queue:
                break  # else further looks go on until the time is over
        server.generate(gpu_acceptance.prompts(), 8)
        time.sleep(4.0)
        log, told = server.text(), live(root)
    judge_wrong(run, root, log, told)


def judge_wrong(run: Run, root: Path, log: str, told: status.LiveStatus | None) -> None:
    """Into the findings and checks."""
    accepted = [r for r in rows(root) if r.verdict == "faster"]
    faulty = {WRONG: 0, SLOW: 0}
    for config in (c for r in accepted for c in configs(r)):
        if config.GROUP_SIZE_M == WRONG or (config.GROUP_SIZE_M, config.BLOCK_SIZE_N) == (SLOW, SLOW_WIDTH):
            faulty[config.GROUP_SIZE_M] += 1
    tried = measured(root)
    tempting = [t for t in tried if t.config.GROUP_SIZE_M == WRONG and t.ratio < 0.99]
    in_quarantine = held(root)
    run.findings["wrong"] = {
        "settled": len(rows(root)), "accepted": len(accepted), "measured": len(tried),
        "wrong_measured_faster_than_the_baseline": len(tempting), "accepted_by_fault": faulty,
        "in_quarantine": in_quarantine, "pauses": told.pauses if told is not None else None,
        "state": [told.state, told.reason] if told is not None else None,
    }  # fmt: skip
    run.check("wrong configs looked faster and none was accepted", bool(tempting) and not faulty[WRONG],
              f"{len(tempting)} measurements, {faulty[WRONG]} accepted")  # fmt: skip
    slow = {c: why for c, why in in_quarantine.items() if "its first launch took" in why}
    run.check("slow configs are in quarantine and none was accepted", bool(slow) and not faulty[SLOW],
              f"{len(slow)} held, {faulty[SLOW]} accepted; {next(iter(slow.items()), '')}")  # fmt: skip
    lives = told is not None and "Traceback" not in log
    run.check("the server lives, without a fault", lives, f"{log.count('Traceback')} tracebacks")


def crash(run: Run, parts: Parts) -> None:
    """A server that dies, then one that would die of the same and of nothing else."""
    plant(run, "crash")
    run.environ.update(NO_DIAGNOSTICS)
    starts: list[dict[str, Any]] = run.findings.setdefault("crash", [])
    try:
        first = one_start(run, "2_crash", parts, LIVES_S)
        starts.append(first)
        print(f"    start 1: {json.dumps(first)}", flush=True)
        if not first["died"]:
            return
        found = ended_by(run.work / "crash")
        first["culprits"] = [str(one) for one in found]
        parts.write()
        if not found or parts.left_s < START_S:
            return
        plant(run, "crash", found)
        starts.append(one_start(run, "3_crash", parts, max(LEAST_S, 2 * first["lived_s"])))
        print(f"    start 2: {json.dumps(starts[-1])}", flush=True)
    finally:
        judge_crash(run, starts)


def ended_by(root: Path) -> list[Candidate]:
    """What the dead process was launching, as the next start will find it; nothing is written."""
    until_s = time.monotonic() + GONE_S
    while not (found := inquest.hold(root, read_only=True).held) and time.monotonic() < until_s:
        time.sleep(0.5)
    return [one.candidate for one in found]


def one_start(run: Run, name: str, parts: Parts, wait_s: float) -> dict[str, Any]:
    """What became of one server within this time. It may be ended before it is healthy."""
    root = run.work / "crash"
    begun_s, told, end = time.monotonic(), None, ""
    try:
        with run.serve(name) as server:
            before, begun_s = held(root), time.monotonic()
            died = dies(server, min(wait_s, parts.left_s))
            lived_s = time.monotonic() - begun_s
            told, end = (None, server.text()[-END_CHARS:]) if died else (live(root), "")
    except RuntimeError as error:
        log = run.out / f"server_{name}.log"
        if not log.exists() or not rows_at_start(log.read_text(errors="replace")):
            raise  # it never came so far that anything could be tuned
        before, died, lived_s, end = held(root), True, 0.0, str(error)[-END_CHARS:]
    tunes = {} if told is None else {
        "state": [told.state, told.reason], "mode": told.mode, "slices": told.slices, "ready": told.compile.ready,
        "holds": sorted(told.quarantine),
    }  # fmt: skip
    return {"held_at_start": before, "died": died, "lived_s": round(lived_s, 1), "end": end, **tunes}


def dies(server: Server, wait_s: float) -> bool:
    """Does the server end within this time? A request now and then: without one, a lost device is not seen."""
    until_s = time.monotonic() + wait_s
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}}
    try:
        while True:
            server.post("/generate", body, ANSWER_S)
            if time.monotonic() > until_s:
                return False
            next_s = time.monotonic() + REQUEST_S
            while time.monotonic() < next_s:
                time.sleep(0.2)
                if server.process.poll() is not None:
                    return True
    except (OSError, http.client.HTTPException):  # refused, reset, or no answer in time
        return True


def judge_crash(run: Run, starts: list[dict[str, Any]]) -> None:
    """The first server died; the second held the culprit from its start on, lived, and tuned what is left."""
    first, second = (*starts, {}, {})[:2]
    found = first.get("culprits", [])
    run.check("a planted crash ends the first server", bool(first.get("died")), f"{len(starts)} starts")
    both = [one for one in found if one in second.get("held_at_start", {}) and one in second.get("holds", [])]
    run.check("the culprit is in quarantine at the second start", bool(found) and both == found,
              f"{found}; held: {second.get('held_at_start')}")  # fmt: skip
    lives = bool(second) and not second["died"]
    run.check("the second server lives and serves", lives, json.dumps(second)[:300])
    tunes = lives and second.get("mode") == "miss" and bool(second.get("slices")) and second["state"][0] != "off"
    run.check("the second server goes on tuning", tunes,
              f"{second.get('slices')} slices, {second.get('state')}, mode {second.get('mode')}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--idle-s", type=float, default=75.0)
    parser.add_argument("--port", type=int, default=31400)
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    for name, value in MODEL._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    names = options.part.split(",")
    if odd := set(names) - set(PARTS):
        parser.error(f"--part has {', '.join(sorted(odd))}; there are {', '.join(PARTS)}")
    of_this_checkout()
    options.flags = [*FLAGS, *options.flags]
    parts = Parts(options.out / "planted.json", options.budget_s)
    run = Run(options)
    run.findings = parts.found
    try:
        run.findings["machine"] = gpu_acceptance.machine()
        install(run.probe, "plant_probe", "plant_probe")
        path = [str(run.probe), str(site_folder(run.work)), str(ROOT), os.environ.get("PYTHONPATH", "")]
        run.environ["PYTHONPATH"] = os.pathsep.join(path)
        for name, part, starts in (("wrong", wrong, 1), ("crash", crash, 2)):
            if name in names:
                parts.run(name, lambda part=part: part(run, parts), starts * START_S)
    finally:
        run.findings["checks"] = [list(c) for c in run.checks]
        parts.write()
        shutil.rmtree(run.work, ignore_errors=True)
    return 0 if run.checks and not parts.failed and all(ok for _, ok, _ in run.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
