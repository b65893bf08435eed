#!/usr/bin/env python3
"""Measure every candidate of a shape on this GPU, for `simulate` and `scripts/bench search`.

    record_landscape.py E=256,N=256,K=3072,top_k=8 --out FILE [--m 2,16,64] [--budget-s 540] [--heuristic]
    record_landscape.py E=256,N=256,K=3072,top_k=8 --out FILE [--m 2,16,64] --compile-only

Run it with an interpreter that has SGLang and this package. The weights are made up, the launches are the bench's
own: in turn with SGLang's config on layers in rotation, so a recorded time is the ratio to SGLang's config, times
that config's median. The file is written after each M; started again, it goes on with the M that are missing.
``--compile-only`` fills Triton's cache with what all these M need and measures nothing. ``--heuristic``: SGLang's
config is its heuristic, as where it ships no file. Exits with 1 where an M is missing at the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import json
import math
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gpu_parts import of_this_checkout

from sglang_moe_autotune import machine, stand_in
from sglang_moe_autotune.errand import Errand, Item, shape_of_fields
from sglang_moe_autotune.kernels import Kernels
from sglang_moe_autotune.search_space import full_space, illegal, shared_memory_bytes
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape
from sglang_moe_autotune.warm import WarmProvider

if TYPE_CHECKING:
    from sglang_moe_autotune.bench import Bench, Readiness, Sample

DEFAULT_M = "2,8,16,32,64,128,256,512,1024,4096"
SAMPLES = 3
"""launches of each at least"""
FINALS = ((96, 12), (24, 48))
"""how many of the fastest launches of each GEMM are timed again, from nothing, and how often"""
SLICE_US = 20_000.0
MAX_DIRTY = 20
STEPS = 4
"""of a bench, at most, from a launch that it has not met to one that can be made"""
TELL_EVERY_S = 5.0
MORE_S = 1.1
"""An M is begun while so many times the last one's seconds are left: what is half measured is lost."""
HIDDEN = " SGLang's own config is its heuristic: the files that it ships were hidden."
ABOUT = (
    "Latency of SGLang {sglang}'s Triton fused-MoE GEMMs for made-up weights and activations, measured on one {gpu}"
    " (driver {driver}, Triton {triton}). Microseconds of one launch, activations quantised beforehand where they"
    " are: the median ratio to SGLang's own config of up to {samples} pairs launched in turn on layers in rotation,"
    " times the median of SGLang's own config at that M ('default'). A candidate that took three times as long at"
    " its first launch has that one sample. The fastest of each GEMM were timed anew, without the samples that chose"
    " them: {finals}. A candidate missing at some M did not launch (see out_of_resources).{files}"
)


Found = dict[tuple[Gemm, KernelConfig], "list[Sample]"]


class Recording:
    """The file so far, and how to add one M to it."""

    def __init__(self, path: Path, shape: MoeShape, bed: machine.Machine, *, hidden: bool = False) -> None:
        self.path, self.shape, self.bed = path, shape, bed
        limit = bed.environment.shared_memory_bytes
        self.candidates = [c for c in full_space() if illegal(c, shape) is None]
        self.number = {config: n for n, config in enumerate(self.candidates)}
        self.refused = {
            c: f"needs at least {need} bytes of shared memory, {limit} are there"
            for c in self.candidates
            if (need := shared_memory_bytes(c, shape)) > limit
        }
        gpu = bed.environment
        about = ABOUT.format(
            sglang=bed.sglang, gpu=gpu.device_name, driver=bed.driver, triton=gpu.triton, samples=SAMPLES,
            finals=", then ".join(f"{best} with {count} pairs" for best, count in FINALS),
            files=HIDDEN if hidden else "",
        )  # fmt: skip
        self.content: dict[str, Any] = {
            "about": about,
            "E": shape.E,
            "N": shape.N,
            "K": shape.K,
            "topk": shape.top_k,
            "dtype": shape.dtype,
            "block_shape": shape.block_shape,
            "per_channel_quant": shape.per_channel_quant,
            "device_name": gpu.device_name,
            "triton": gpu.triton,
            "sglang": bed.sglang,
            "max_shared_memory_bytes": limit,
            "candidates": [c.to_dict() for c in self.candidates],
            "default": {},
            "up_us": {},
            "down_us": {},
            "out_of_resources": {},
        }
        if path.exists():
            before = json.loads(gzip.decompress(path.read_bytes()))
            if before["candidates"] != self.content["candidates"]:
                sys.exit(f"{path} holds another shape or another search space: name another file with --out")
            for field in ("default", "up_us", "down_us", "out_of_resources"):
                self.content[field] = before[field]

    def has(self, m: int) -> bool:
        return str(m) in self.content["default"]

    def open(self, m: int) -> tuple[ConfigPair, Bench]:
        baseline = self.bed.baseline(self.shape, m)
        if baseline is None:
            raise RuntimeError(f"SGLang's own answer at M={m} is no pair of plain configs")
        bench = self.bed.provider.open(self.shape, m, baseline)
        if isinstance(bench, str):
            raise RuntimeError(f"M={m} cannot be measured: {bench}")  # noqa: TRY004 - an answer, not a type
        while not bench.prepare():
            pass
        return baseline, bench

    def compile(self, bench: Any, compiler: Any, done: set[str], until_s: float) -> bool:
        """Have every binary made that this M needs and that is not in ``done``; False where the time did not suffice.
        Nothing is loaded: whatever else runs on this GPU is left alone."""
        waiting: dict[str, Any] = {}
        for config in (c for c in self.candidates if c not in self.refused):
            for gemm in GEMMS:
                candidate = bench._candidate(gemm, config)
                if not isinstance(candidate, str) and candidate.binary.hash not in done:
                    waiting[candidate.binary.hash] = candidate.binary
                    compiler.readiness(candidate.binary)
        total, told_s = len(waiting), time.monotonic()
        while waiting and time.monotonic() < until_s:
            settled = {name for name, binary in waiting.items() if compiler.readiness(binary) != "waiting"}
            done |= settled
            waiting = {name: binary for name, binary in waiting.items() if name not in settled}
            if time.monotonic() - told_s > TELL_EVERY_S:
                told_s = time.monotonic()
                print(f"    {total - len(waiting)} of {total} binaries done", flush=True)
            time.sleep(0.05)
        return not waiting

    def visit(self, bench: Bench, until_s: float) -> Found | None:
        """Samples of everything that can be launched; None where the time did not suffice."""
        found: Found = {}
        waiting = collections.deque((g, c) for c in self.candidates if c not in self.refused for g in GEMMS)
        total, told_s, fruitless = len(waiting), time.monotonic(), 0
        while waiting:
            now_s = time.monotonic()
            if now_s > until_s:
                return None
            if now_s - told_s > TELL_EVERY_S:
                told_s = now_s
                print(f"    {total - len(waiting)} of {total} launches done", flush=True)
            gemm, config = waiting.popleft()
            state = asked(bench, gemm, config)
            if state == "waiting":
                waiting.append((gemm, config))
                fruitless += 1
                if fruitless >= len(waiting):
                    fruitless = 0
                    time.sleep(0.01)
                continue
            fruitless = 0
            samples = measure(bench, gemm, config, SAMPLES) if state == "ready" else []
            if samples:
                found[gemm, config] = samples
            elif bench.readiness(gemm, config) == "failed":
                self.content["out_of_resources"].setdefault(str(self.number[config]), bench.reason(gemm, config)[:120])
        return found

    def settle(self, bench: Bench, found: Found) -> None:
        """Time the fastest again. The least of many noisy medians is too low, fresh samples of it are not."""
        for best, count in FINALS:
            for gemm in GEMMS:
                ratios = {c: median(map(log_ratio, samples)) for (g, c), samples in found.items() if g == gemm}
                for config in sorted(ratios, key=ratios.__getitem__)[:best]:
                    found[gemm, config] = measure(bench, gemm, config, count) or found[gemm, config]

    def add(self, m: int, baseline: ConfigPair, found: Found) -> None:
        content, times = self.content, {}
        for gemm in GEMMS:
            rows = {c: samples for (g, c), samples in found.items() if g == gemm}
            times[gemm] = median(s.baseline_us for samples in rows.values() for s in samples)
            content[f"{gemm}_us"][str(m)] = {
                str(self.number[c]): _short(times[gemm] * math.exp(median(map(log_ratio, samples))))
                for c, samples in rows.items()
            }
        content["default"][str(m)] = {
            "config": baseline.up.to_dict(),
            "down_config": baseline.down.to_dict(),
            "up_us": _short(times["up"]),
            "down_us": _short(times["down"]),
        }
        content["out_of_resources"] |= {str(self.number[c]): reason for c, reason in self.refused.items()}
        text = json.dumps(content, separators=(",", ":")).encode()
        part = self.path.with_suffix(".part")
        part.write_bytes(gzip.compress(text, mtime=0))
        part.replace(self.path)


def asked(bench: Bench, gemm: Gemm, config: KernelConfig) -> Readiness:
    """A launch's readiness once all steps are made that need no compile: it is ordered then, or loaded."""
    state: Readiness = "waiting"
    for _ in range(STEPS):
        if (state := bench.readiness(gemm, config)) != "waiting":
            break
    return state


def measure(bench: Bench, gemm: Gemm, config: KernelConfig, launches: int) -> list[Sample]:
    """Samples of at least so many launches that are ready; one where they are hopelessly slow, none where they fail."""
    samples: list[Sample] = []
    count = math.ceil(launches / bench.sampling.per_sample)
    for _ in range(MAX_DIRTY + count * bench.sampling.per_sample):
        known = bool(samples)
        samples += bench.measure(gemm, config, count - len(samples))
        hopeless = not known and len(samples) == 1 and samples[0].candidate_us > 3 * samples[0].baseline_us
        if hopeless or len(samples) >= count or bench.readiness(gemm, config) == "failed":
            break
    return samples


def log_ratio(sample: Sample) -> float:
    """Candidate to baseline."""
    return math.log(sample.candidate_us / sample.baseline_us)


def _short(us: float) -> float:
    return float(f"{us:.5g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="as `sglang-moe-autotune tune --shape` takes it")
    parser.add_argument("--m", default=DEFAULT_M)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=540.0, help="from the start of this program on")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--heuristic", action="store_true")
    options = parser.parse_args()
    of_this_checkout()
    until_s = time.monotonic() + options.budget_s
    shape, ms = shape_of_fields(options.shape), [int(m) for m in options.m.split(",")]
    if options.heuristic:
        hide_files(Path(tempfile.mkdtemp(prefix="moe-autotune-no-files-")))
    order = Errand("tune", (Item(shape, tuple(ms)),), None, slice_us=SLICE_US, compile_processes=options.processes)
    bed = machine.gpu_machine(order)
    if isinstance(bed.provider, WarmProvider):
        bed.provider.inner.kernels = Kernels(limit=1 << 14)  # all of them are launched again at the next M
    if options.compile_only:
        stand_in.WANTED = 1  # type: ignore[misc]  # nothing is timed: the memory is left to whatever runs beside this
    if reason := bed.load(shape):
        sys.exit(f"no stand-in weights: {reason}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    recording = Recording(options.out, shape, bed, hidden=options.heuristic)
    if options.compile_only:
        return compile_only(recording, ms, until_s)
    record(recording, [m for m in ms if not recording.has(m)], until_s)
    missing = [m for m in ms if not recording.has(m)]
    print(f"{options.out}: {len(ms) - len(missing)} of {len(ms)} M; missing: {missing or 'none'}", flush=True)
    return 1 if missing else 0


def record(recording: Recording, ms: list[int], until_s: float) -> None:
    """Measure these M one after the other and write each down. One that fails does not take the others along."""
    last_s = 0.0
    for m in ms:
        begun_s = time.monotonic()
        if until_s - begun_s <= MORE_S * last_s:
            print(f"M={m}: not begun, {until_s - begun_s:.0f} s are left, the last one took {last_s:.0f}", flush=True)
            return
        try:
            baseline, bench = recording.open(m)
            try:
                if found := recording.visit(bench, until_s):
                    recording.settle(bench, found)
                spent_s = bench.gpu_s
            finally:
                bench.close()
            if found is None:
                print(f"M={m}: the time is over", flush=True)
                return
            recording.add(m, baseline, found)
        except Exception:  # noqa: BLE001 - told here, by what is missing and by the exit code
            print(f"M={m} FAILED: {traceback.format_exc()}", flush=True)
            continue
        last_s = time.monotonic() - begun_s
        print(f"M={m}: {len(found)} launches in {last_s:.0f} s, {spent_s:.1f} GPU s", flush=True)


def compile_only(recording: Recording, ms: list[int], until_s: float) -> int:
    """Fill Triton's cache with what these M need: Triton makes other binaries where a size is no multiple of 16."""
    begun_s, done = time.monotonic(), set[str]()
    compiler = recording.bed.provider.compiler  # type: ignore[attr-defined]  # a WarmProvider
    for m in ms:
        known = len(done)
        _, bench = recording.open(m)
        try:
            whole = recording.compile(bench, compiler, done, until_s)
        finally:
            bench.close()
        taken_s = time.monotonic() - begun_s
        print(f"M={m}: {len(done) - known} more binaries, {taken_s:.0f} s so far: {compiler.counts}", flush=True)
        if not whole:
            print("the time is over", flush=True)
            return 1
    return 0


def hide_files(folder: Path) -> None:
    """Have SGLang's lookup answer with its heuristic, in this process and those that it starts."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
