#!/usr/bin/env python3
"""Planted kernels against the comparison: wrong ones must be refused, correct ones taken; one line of JSON at the end.

    gpu_plants.py --out DIR [--part trials,memory,slow,crash] [--trials 10000] [--budget-s 540] [--processes N]
    gpu_plants.py --dry-run [--plants NAMES] [--trials N]

Each plant is the installed SGLang's own fused_moe_kernel with a fault put into its text when this runs, compiled by
Triton and launched by SGLang's own launching function. What compares is what a server runs: the bench's launches,
scratch and `correctness.case_steps` on all routings. A trial is one plant on one shape, M, dtype, config and seed.
--dry-run needs no GPU: Triton's interpreter runs a few trials of each plant with few runs each.

Besides: ``memory``: 200 kernels loaded one after the other must not fill the device. ``slow``: a kernel that takes
1,000 times as long must be launched once by the real bench and never again. ``crash``: one that ends its process must
not be launched by the next process. DIR/plants.json has all of it; exits with 1 where a part failed or does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

# ruff: noqa: E402
import gpu_acceptance
import interpreter
import torch
from gpu_parts import Parts, of_this_checkout
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

from sglang_moe_autotune import correctness, launch, releases, routings, scratch
from sglang_moe_autotune.benchmark import DeviceProvider, Lent
from sglang_moe_autotune.compiler import Compiler
from sglang_moe_autotune.kernels import LIMIT, Kernels, unload_module
from sglang_moe_autotune.launches import Launches
from sglang_moe_autotune.layers import LiveLayer, call_key, gemm_call, quant_info
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.shapes import ConfigPair, Gemm, KernelConfig, MoeShape
from sglang_moe_autotune.warm import WarmProvider

KERNEL = "fused_moe_kernel"
SPARE = "add_mask_ptr"
"""an argument that plain launches leave empty: a plant is told through it in which runs it shall be wrong"""

PID = "    pid_n = (pid % num_pid_in_group) // group_size_m\n"
EXPERT = "    off_experts_i32 = tl.load(expert_ids_ptr + pid_m)\n"
ROUND = "    accumulator = accumulator.to(compute_type)\n"
STORE = "        tl.store(c_ptrs, accumulator, mask=c_mask)\n"
MASK = "        c_mask = token_mask[:, None] & (offs_cn[None, :] < N)\n" + STORE
STOP = "    if pid_m * BLOCK_SIZE_M >= num_tokens_post_padded:\n"
IDS = "    offs_token = tl.load(sorted_token_ids_ptr + offs_token_id)\n"
TOKENS = "    token_mask = offs_token < num_valid_tokens\n"
LOOP = "    for k_start in range(0, K, BLOCK_SIZE_K):\n"
NEXT_B = "b_ptrs += BLOCK_SIZE_K * stride_bk\n"
WEIGHT = "tl.load(topk_weights_ptr + offs_token, mask=token_mask, other=0)"
WEIGHTED = "        accumulator *= moe_weight[:, None]\n"
ROW = "offs_token[:, None] // top_k * stride_am"
DOT = "            accumulator += tl.dot(a, b)\n"
LAST = "((pid_n == num_pid_n - 1) & ((pid_m + 1) * BLOCK_SIZE_M >= num_tokens_post_padded))"
NAN = 'float("nan")'


class Plant(NamedTuple):
    """A fault: text of the kernel and what stands in its place, the last occurrence of each."""

    name: str
    edits: tuple[tuple[str, str], ...]
    gemms: tuple[Gemm, ...] = ("up", "down")
    when: str = ""
    """``random``: wrong in one run of twenty by lot; ``twentieth``: in every twentieth run; "" in all"""
    ragged_columns: bool = False
    """shows only where the columns are no whole number of tiles"""
    gpu_only: bool = False
    honest: bool = False
    besides: str = ""
    """what the kernel's module has before it, no part of the text by which learned rows know the kernel"""


def before(anchor: str, text: str) -> tuple[str, str]:
    return anchor, text + anchor


def scaled(condition: str, factor: float) -> tuple[str, str]:
    return before(ROUND, f"    accumulator = tl.where({condition}, accumulator * {factor}, accumulator)\n")


FLAKY = f"(tl.load({SPARE}) == 0)"
NEIGHBOUR = """
        other_pid = pid_m ^ 1
        other_ids = other_pid * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
        inside = other_ids < num_tokens_post_padded
        other_token = tl.load(sorted_token_ids_ptr + other_ids, mask=inside, other=num_valid_tokens).to(tl.int64)
        other_ptrs = c_ptr + stride_cm * other_token[:, None] + stride_cn * offs_cn[None, :]
        other_mask = (other_token < num_valid_tokens)[:, None] & (offs_cn[None, :] < N)
        tl.store(other_ptrs, accumulator * 0.0, mask=other_mask)
"""

PLANTS = (
    Plant("honest", (), honest=True),
    Plant("honest-other-sum", ((DOT, "            accumulator = tl.dot(a, b, acc=accumulator)\n"),), honest=True),
    Plant("writes-nothing", ((MASK, MASK.replace("< N)", "< 0)")),)),
    Plant("writes-nan", (before(ROUND, f"    accumulator += {NAN}\n"),)),
    Plant(
        "nan-in-one-element",
        (
            before(
                ROUND,
                "    one = (offs_token == num_valid_tokens - 1)[:, None] & (offs_bn == N - 1)[None, :]\n"
                f"    accumulator = tl.where(one, {NAN}, accumulator)\n",
            ),
        ),
    ),
    Plant("last-tile-wrong", (scaled(LAST, 1.25),)),
    Plant("last-tile-slightly-wrong", (scaled(LAST, 1.04),)),
    Plant("last-tile-left-out", ((STORE, STORE.replace("c_mask)", f"c_mask & ({LAST} == 0))")),)),
    Plant("drops-a-k-block", ((LOOP, LOOP.replace("K, BLOCK", "K - BLOCK_SIZE_K, BLOCK")),)),
    Plant(
        "stale-k-block",
        ((NEXT_B, "b_ptrs += tl.where(k_start > 0, BLOCK_SIZE_K, 0) * stride_bk\n"),),
    ),
    Plant(
        "wrong-expert-at-the-end",
        (
            (
                EXPERT,
                EXPERT + "    at_end = (pid_m + 1) * BLOCK_SIZE_M >= num_tokens_post_padded\n"
                "    off_experts_i32 -= (at_end & (off_experts_i32 > 0)).to(tl.int32)\n",
            ),
        ),
    ),
    Plant("last-column-left-out", ((MASK, MASK.replace("< N)", "< N - 1)")),)),
    Plant("one-column-too-many", ((MASK, MASK.replace("< N)", "< N + 1)")),), ragged_columns=True),
    Plant("last-token-left-out", ((TOKENS, TOKENS.replace("tokens\n", "tokens - 1\n")),)),
    Plant("no-token-mask", ((MASK, MASK.replace("token_mask[:, None]", "(token_mask | True)[:, None]")),)),
    Plant(
        "one-block-too-many",
        (
            (STOP, STOP.replace("post_padded:", "post_padded + BLOCK_SIZE_M:")),
            (IDS, IDS.replace("offs_token_id)", "offs_token_id, mask=offs_token_id < EM, other=num_valid_tokens)")),
        ),
    ),
    Plant(
        "swapped-routing-weight",
        ((WEIGHT, WEIGHT.replace("+ offs_token", "+ tl.minimum(offs_token ^ 1, num_valid_tokens - 1)")),),
        gemms=("down",),
    ),
    Plant("no-routing-weight", ((WEIGHTED, "        accumulator += 0.0 * moe_weight[:, None]\n"),), gemms=("down",)),
    Plant("wrong-row", ((ROW, "tl.minimum(offs_token[:, None] + top_k, num_valid_tokens - 1) // top_k * stride_am"),)),
    Plant("racy-neighbours", ((STORE, STORE + NEIGHBOUR),)),
    Plant(
        "keeps-old-output",
        (
            (
                STORE,
                "        old = tl.load(c_ptrs, mask=c_mask, other=0.0)\n"
                "        accumulator = tl.where(old == old, old, accumulator)\n" + STORE,
            ),
        ),
    ),
    Plant("flaky", (scaled(FLAKY, 1.25),), when="random"),
    Plant("flaky-last-tile", (scaled(f"{FLAKY} & {LAST}", 1.25),), when="random"),
    Plant("flaky-below-the-tolerance", (scaled(f"{FLAKY} & {LAST}", 1.008),), when="random"),
    Plant("every-twentieth-run", (scaled(FLAKY, 1.25),), when="twentieth"),
    Plant("by-the-clock", (scaled("((tl.extra.cuda.globaltimer() >> 15) % 20) == 0", 1.25),), gpu_only=True),
)

SLOW = before(
    PID,
    "    if BLOCK_SIZE_N == 128:\n"
    "        begun = tl.extra.cuda.globaltimer()\n"
    "        now = begun\n"
    "        while now - begun < 30000000:\n"
    "            now = tl.extra.cuda.globaltimer()\n",
)
"""30 ms, in the configs of one width only, so that the same kernel serves as the baseline"""

CRASH = before(
    PID,
    "    if BLOCK_SIZE_N == 128:\n"
    '        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)\n',
)
"""ends the context of its process, in the configs of one width only"""
CRASHED = "CRASHED_HERE"
"""names the folder in which a process of ours shall meet that kernel"""

SHAPES = (
    MoeShape((8, 224, 256), (8, 256, 112), 2),
    MoeShape((32, 128, 320), (32, 320, 64), 4),
    MoeShape((16, 160, 192), (16, 192, 80), 4, ep=True),
)
MS = (7, 16, 48, 129, 256)
BASELINE = KernelConfig(16, 32, 32, 1, 4, 2)
CONFIGS = (KernelConfig(16, 64, 32, 1, 4, 3), KernelConfig(64, 64, 32, 4, 4, 2), KernelConfig(32, 128, 32, 8, 4, 2))
DTYPES = ("bfloat16", "float16")
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WIDE = CONFIGS[2]
"""of the width at which the slow kernel and the crashing one are what they are"""
READY_S = 90.0
LOCAL_SHARE = 0.25
MEMORY_KERNELS = 200


class Trial(NamedTuple):
    """One verdict that is asked for."""

    plant: Plant
    shape: MoeShape
    M: int
    gemm: Gemm
    config: KernelConfig


# -- the plants ------------------------------------------------------------------------------------------------


def plant_kernel(folder: Path, kernel: Any, plant: Plant) -> Any:
    """SGLang's kernel with this fault, as a kernel of a module of its own. Raises ValueError where the release's text
    lacks what the fault replaces."""
    text = inspect.getsource(kernel.fn)
    for old, new in plant.edits:
        # The line may stand deeper in another release: blanks at its beginning are the text's own.
        found = list(re.finditer(re.escape(old.lstrip(" ")), text))
        if not found:
            raise ValueError(f"{plant.name}: this release's kernel has no {old.strip()!r}")
        at = found[-1].start() - (len(old) - len(old.lstrip(" ")))
        if text[at : at + len(old)] != old:
            raise ValueError(f"{plant.name}: {old.strip()!r} stands elsewhere in this release's kernel")
        text = text[:at] + new + text[at + len(old) :]
    home = sys.modules[kernel.fn.__module__]
    names = [n for n in kernel.fn.__code__.co_names if hasattr(home, n) and n not in {"tl", "triton"}]
    imports = f"from {home.__name__} import {', '.join(names)}\n" if names else ""
    name = f"plant_{plant.name.replace('-', '_')}"
    head = f"import triton\nimport triton.language as tl\n{imports}{plant.besides}"
    (folder / f"{name}.py").write_text(f"{head}\n\n{text}")
    importlib.invalidate_caches()
    return getattr(importlib.import_module(name), KERNEL)


def planted(invoke: Any, kernel: Any) -> Any:
    """SGLang's launching function, launching this kernel."""
    function = inspect.unwrap(invoke)
    scope = {**function.__globals__, KERNEL: kernel}
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def with_spare(args: tuple[Any, ...], kernel: Any, spare: torch.Tensor) -> tuple[Any, ...]:
    place = kernel.arg_names.index(SPARE)
    if args[place] is not None:
        raise ValueError(f"{SPARE} is not empty in a plain launch of this release")
    return (*args[:place], spare, *args[place + 1 :])


class SpareRecorder(launch.LaunchRecorder):
    """Records launches that tell the plant through the spare argument when to be wrong."""

    def __init__(self, invoke: Any, spare: torch.Tensor) -> None:
        super().__init__(invoke)
        self._spare = spare

    def record(self, *args: Any, **kwargs: Any) -> launch.Launch:
        made = super().record(*args, **kwargs)
        return made._replace(args=with_spare(made.args, made.kernel, self._spare))


class Direct:
    """``Launches.into`` for the interpreter, which compiles nothing that could be recorded."""

    def __init__(self, held: scratch.Scratch, layer: LiveLayer, invoke: Any, kernel: Any, spare: Any) -> None:
        self._held, self._layer = held, layer
        self._invoke = planted(invoke, self if spare is not None else kernel)
        self._kernel, self._spare = kernel, spare

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self._kernel[grid](*with_spare(args, self._kernel, self._spare), **named)

    def into(self, gemm: Gemm, config: KernelConfig, routing: str) -> correctness.Launch:
        quant, parameters = quant_info(self._layer.module), inspect.signature(self._invoke).parameters
        buffers = self._held.buffers(gemm, config.BLOCK_SIZE_M, routing, self._held.output)
        args, named = gemm_call(gemm, self._layer, quant, buffers, self._held.shape.top_k, config.to_dict())
        named = {k: v for k, v in named.items() if k in parameters}

        def write(written: correctness.Written) -> None:
            self._invoke(*args[:3], written.rows.view(args[3].shape), *args[4:], **named)

        return write


def reference_align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, ...]:
    """moe_align_block_size on the CPU: ids by expert, -1 first, each expert padded to whole blocks."""
    flat, pad = ids.flatten().tolist(), ids.numel()
    order: list[int] = []
    owners: list[int] = []
    for expert in sorted(set(flat)):
        mine = [i for i, e in enumerate(flat) if e == expert]
        mine += [pad] * (-len(mine) % block)
        order += mine
        owners += [expert] * (len(mine) // block)
    size = pad + (experts + 1) * (block - 1)
    used = len(order)
    order += [pad] * (size - used)
    owners += [0] * (-(-size // block) - len(owners))
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (order, owners, [used]))


def layer_of(shape: MoeShape, device: Any, generator: torch.Generator) -> LiveLayer:
    """A layer with random weights, as SGLang's own hold them."""
    def weight(size: tuple[int, int, int]) -> torch.Tensor:
        drawn = torch.empty(size, dtype=TORCH[shape.activation_dtype], device=device)
        return drawn.normal_(generator=generator).mul_(size[2] ** -0.5)

    quant = TritonMoeQuantInfo(weight(shape.w1_shape), weight(shape.w2_shape))
    module = torch.nn.Module()
    module.moe_runner_config = types.SimpleNamespace(  # type: ignore[assignment]
        top_k=shape.top_k, num_experts=shape.E, num_local_experts=shape.E, is_gated=True
    )
    module.quant_method = types.SimpleNamespace(  # type: ignore[assignment]
        runner=types.SimpleNamespace(runner_backend=types.SimpleNamespace(is_triton=lambda: True)),
        get_triton_quant_info=lambda _: quant,
    )
    return LiveLayer(module, call_key(shape), shape.activation_dtype, shape.ep, shape.variant)


# -- the trials ------------------------------------------------------------------------------------------------


def drawn(plants: tuple[Plant, ...], count: int, lot: random.Random) -> list[Trial]:
    """Trials in equal parts of all plants, over shapes, M, dtypes, GEMMs and configs."""
    trials = []
    for number in range(count):
        plant = plants[number % len(plants)]
        while True:
            dtype: Any = lot.choices(DTYPES, (3, 1))[0]
            base = lot.choice(SHAPES)
            shape = MoeShape(base.w1_shape, base.w2_shape, base.top_k, activation_dtype=dtype, ep=base.ep)
            gemm = lot.choice(plant.gemms)
            config = lot.choice(CONFIGS if dtype == "bfloat16" else CONFIGS[:1])
            columns = scratch.columns(shape, gemm)
            if not plant.ragged_columns or columns % config.BLOCK_SIZE_N:
                break
        # With most ids -1, few tokens may leave nothing to be wrong about.
        trials.append(Trial(plant, shape, lot.choice(MS[2:] if shape.ep else MS), gemm, config))
    return trials


class Bed:
    """Kernels, layers and launches, made once and shared by the trials."""

    def __init__(self, folder: Path, plants: tuple[Plant, ...], device: Any, seed: int) -> None:
        self.invoke = releases.invoke_function()
        scope = inspect.unwrap(self.invoke).__globals__
        self.kernels = {p.name: plant_kernel(folder, scope[KERNEL], p) for p in plants}
        self.original = scope[KERNEL]
        self.align = reference_align if DRY else releases.fused_module().moe_align_block_size
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.spare = torch.ones(1, dtype=torch.int32, device=device)
        self.device = device
        self._layers: dict[MoeShape, LiveLayer] = {}
        self.loaded = Kernels(limit=4096)  # closures over them are kept below

    def layer(self, shape: MoeShape) -> LiveLayer:
        if shape not in self._layers:
            self._layers[shape] = layer_of(shape, self.device, self.generator)
        return self._layers[shape]

    def launches(self, held: scratch.Scratch, plant: Plant | None) -> Any:
        kernel = self.original if plant is None else self.kernels[plant.name]
        spare = self.spare if plant is not None and plant.when else None
        layer = self.layer(held.shape)
        if DRY:
            return Direct(held, layer, self.invoke, kernel, spare)
        invoke = planted(self.invoke, kernel)
        recorder = launch.LaunchRecorder(invoke) if spare is None else SpareRecorder(invoke, spare)
        return Launches(held, [layer], recorder, self.loaded)

    def told(self, plant: Plant, write: correctness.Launch) -> correctness.Launch:
        """The launch, which is told before each run whether to be wrong."""
        if not plant.when:
            return write

        def run(written: correctness.Written) -> None:
            if plant.when == "random":
                self.spare.random_(0, 20, generator=self.generator)
            else:
                self.spare.add_(1).remainder_(20)
            write(written)

        return run


class Group(NamedTuple):
    """Trials of one shape and M, and what they share."""

    held: scratch.Scratch
    trials: list[Trial]
    launches: dict[str | None, Any]
    """by the name of the plant; the kernel as it is under None"""
    into: dict[tuple[str | None, Gemm, KernelConfig, str], correctness.Launch]


def grouped(bed: Bed, trials: list[Trial]) -> Iterator[Group]:
    groups: dict[tuple[MoeShape, int], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.shape, trial.M), []).append(trial)
    for (shape, m), mine in groups.items():
        share = LOCAL_SHARE if shape.ep else 1.0
        held = scratch.Scratch(shape, m, bed.align, share, flush=False)
        for _ in held.fill((*routings.MANY, *correctness.ROUTINGS)):
            pass
        launches = {p.name if p else None: bed.launches(held, p) for p in (None, *{trial.plant for trial in mine})}
        yield Group(held, mine, launches, {})


def judge(bed: Bed, group: Group, trial: Trial, runs: int) -> tuple[bool, str, int]:
    """Is the plant taken? With the reason, and how many routings it was run on. As a bench compares a pair."""

    def into(name: str | None, gemm: Gemm, config: KernelConfig, routing: str) -> correctness.Launch:
        key = (name, gemm, config, routing)
        if key not in group.into:  # a bench makes them anew each time; here they serve thousands of trials
            group.into[key] = group.launches[name].into(gemm, config, routing)
        return group.into[key]

    terms = correctness.Terms(correctness.tolerance(trial.shape.activation_dtype), runs=runs, at_once=min(16, runs))
    for number, routing in enumerate(correctness.ROUTINGS, 1):

        def sides(gemm: Gemm, routing: str = routing) -> tuple[correctness.Launch, correctness.Launch]:
            candidate = into(trial.plant.name, gemm, trial.config, routing)
            return into(None, gemm, BASELINE, routing), bed.told(trial.plant, candidate)

        *_, found = correctness.case_steps(group.held, sides, lambda _: terms, (trial.gemm,))
        if found is None:
            raise AssertionError("the comparison ended without a verdict")
        if not found.ok:
            return False, found.why or "its output differs", number
    return True, "", len(correctness.ROUTINGS)


def compiled(bed: Bed, groups: list[Group], processes: int, until_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Order every binary from the compile process, and wait until they are there; by hash, and those that are not, with
    the reason."""
    shared = releases.environment(bed.invoke).shared_memory_bytes
    compiler = Compiler(processes, shared)
    binaries: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for group in groups:
        for trial in group.trials:
            for name, config in sides(trial):
                candidate = group.launches[name].candidate(trial.gemm, config)
                if isinstance(candidate, str):
                    raise SystemExit(f"{name or 'the baseline'} cannot be launched: {candidate}")
                if candidate.binary.hash not in binaries:
                    binaries[candidate.binary.hash] = candidate.binary
                    compiler.readiness(candidate.binary)
        compiler.poll()
    waiting = dict(binaries)
    while waiting and time.monotonic() < until_s:
        states = {name: compiler.readiness(binary) for name, binary in waiting.items()}
        lost |= {name: compiler.reason(waiting[name]) for name, state in states.items() if state == "failed"}
        waiting = {name: binary for name, binary in waiting.items() if states[name] == "waiting"}
        time.sleep(0.05)
    compiler.close()
    lost |= dict.fromkeys(waiting, "not compiled in time")
    return {name: binary for name, binary in binaries.items() if name not in lost}, lost


def sides(trial: Trial) -> tuple[tuple[str | None, KernelConfig], tuple[str | None, KernelConfig]]:
    """What a trial launches: the baseline and the candidate."""
    return (None, BASELINE), (trial.plant.name, trial.config)


def why_lost(group: Group, trial: Trial, lost: dict[str, str]) -> str:
    """Why a trial cannot be made, "" where it can."""
    found = (group.launches[name].candidate(trial.gemm, config).binary.hash for name, config in sides(trial))
    return next((lost[name] for name in found if name in lost), "") if lost else ""


def run(bed: Bed, groups: list[Group], runs: int, deadline_s: float, lost: dict[str, str]) -> dict[str, Any]:
    made, admitted, spared, whys = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    reasons: dict[str, Counter[str]] = {}
    for group in groups:
        for trial in group.trials:
            why = "no time was left" if time.monotonic() > deadline_s else why_lost(group, trial, lost)
            if why:
                spared[trial.plant.name] += 1
                whys[why] += 1
                continue
            name = trial.plant.name
            taken, reason, cases = judge(bed, group, trial, runs)
            made[name] += 1
            admitted[name] += taken
            reasons.setdefault(name, Counter())[f"{reason} (routing {cases})" if reason else "taken"] += 1
        group.into.clear()
        group.launches.clear()
        group.held.close()
    honest = {p.name for p in PLANTS if p.honest}
    wrong = {n: c for n, c in made.items() if n not in honest}
    return {
        "trials": sum(made.values()),
        "wrong_trials": sum(wrong.values()),
        "wrong_admitted": sum(admitted[n] for n in wrong),
        "honest_trials": sum(made[n] for n in honest),
        "honest_refused": sum(made[n] - admitted[n] for n in honest),
        "not_run": sum(spared.values()),
        "not_run_because": dict(whys.most_common(9)),
        "plants": {n: {"trials": made[n], "admitted": admitted[n], "how": dict(reasons[n])} for n in made},
    }


# -- what is not a matter of outputs ---------------------------------------------------------------------------


def bench_of(folder: Path, bed: Bed, plant: Plant) -> tuple[Any, Compiler, Quarantine]:
    """The real bench over a kernel, with the journal of first launches in ``folder``; and its compile process."""
    folder.mkdir(parents=True, exist_ok=True)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # the compile process imports the plant from where this one does
    kernel = plant_kernel(folder, bed.original, plant)
    shape = SHAPES[0]
    layers = [bed.layer(shape)]
    compiler = Compiler(2, releases.environment(bed.invoke).shared_memory_bytes)
    lent = Lent(lambda _: layers, planted(bed.invoke, kernel), bed.align, lambda: 0)
    quarantine = Quarantine(folder, "here")
    provider = DeviceProvider(lent, compiler, 1 << 30, 500.0, quarantine)
    bench = WarmProvider(provider).open(shape, 48, ConfigPair(BASELINE, BASELINE))
    if isinstance(bench, str):
        raise RuntimeError(f"the bench did not open: {bench}")  # noqa: TRY004 - an answer, not a type
    while not bench.prepare():
        pass
    return bench, compiler, quarantine


def ready(bench: Any, config: KernelConfig) -> str:
    until_s = time.monotonic() + READY_S
    while (state := bench.readiness("up", config)) == "waiting" and time.monotonic() < until_s:
        time.sleep(0.02)
    return str(state)


def slow(folder: Path, bed: Bed) -> dict[str, Any]:
    """The real bench over a kernel that takes 30 ms in the configs of one width."""
    found: dict[str, Any] = {}
    for start in ("first", "restarted"):
        bench, compiler, quarantine = bench_of(folder, bed, Plant("slow", (SLOW,)))
        try:
            state = ready(bench, WIDE)
            before_s, samples = bench.gpu_s, []
            for _ in range(5):
                samples += bench.measure("up", WIDE, 8)
            spent_ms = 1e3 * (bench.gpu_s - before_s)
            found[start] = {"ready": state, "samples": len(samples), "spent_ms": round(spent_ms, 2)}
            found[start]["reason"] = bench.reason("up", WIDE)
        finally:
            bench.close()
            compiler.close()
        quarantine.journal.settled(10.0)  # a thread of its own writes what is held
    once = 25.0 < found["first"]["spent_ms"] < 65.0 and not found["first"]["samples"]
    return {**found, "ok": once and found["restarted"]["ready"] == "failed" and found["restarted"]["spent_ms"] == 0.0}


def crash(folder: Path, budget_s: float) -> dict[str, Any]:
    """Two processes, one after the other, whose benches meet a kernel that ends the one that launches it."""
    found: dict[str, Any] = {}
    for start in ("first", "restarted"):
        begun_s = time.monotonic()
        command = [sys.executable, str(Path(__file__).resolve()), "--part", "crash"]
        environ = {**os.environ, CRASHED: str(folder)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=budget_s / 2)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        told = {key: value for line in lines for key, value in json.loads(line).items()}
        found[start] = {**told, "code": done.returncode, "seconds": round(time.monotonic() - begun_s, 1)}
        found[start]["last_words"] = done.stderr.strip()[-300:]
    return {**found, "ok": crash_holds(found["first"], found["restarted"])}


def crash_holds(first: dict[str, Any], restarted: dict[str, Any]) -> bool:
    """The first process launched it and ended; the second one did not launch it, says why, and measures others."""
    died = first.get("ready") == "ready" and "samples" not in first and first["code"] != 0
    refused = restarted.get("ready") == "failed" and "in quarantine" in restarted.get("reason", "")
    return died and refused and restarted.get("others", 0) > 0 and restarted["code"] == 0


def meet_the_crash(folder: Path) -> int:
    """One of those processes. What is known is printed before the launch that may be its last."""
    releases.publish_server_args()
    bed = Bed(folder, (), scratch.serving_device(), 0)
    bench, compiler, _ = bench_of(folder, bed, Plant("crash", (CRASH,)))
    state = ready(bench, WIDE)
    print(json.dumps({"ready": state, "reason": bench.reason("up", WIDE)}), flush=True)
    if state == "ready":
        print(json.dumps({"samples": len(bench.measure("up", WIDE, 8))}), flush=True)
    narrow, others = CONFIGS[0], 0
    if ready(bench, narrow) == "ready":
        others = sum(len(bench.measure("up", narrow, 4)) for _ in range(5))
    print(json.dumps({"others": others}), flush=True)
    bench.close()
    compiler.close()
    return 0


def memory(binaries: dict[str, Any]) -> dict[str, Any]:
    """Device memory that 200 kernels take, loaded one after the other, with the bound and without."""
    torch.cuda.synchronize()
    free = lambda: torch.cuda.mem_get_info()[0]  # noqa: E731
    chosen = list(binaries.values())[:MEMORY_KERNELS]
    before_bytes = free()
    held, took_us, least = [], [], before_bytes
    for binary in chosen:
        if len(held) >= LIMIT:
            begun = time.perf_counter()
            unload_module(held.pop(0))
            took_us.append((time.perf_counter() - begun) * 1e6)
        kernel = launch.load(binary)
        kernel._init_handles()
        held.append(kernel)
        least = min(least, free())
    bounded_bytes = before_bytes - least
    for kernel in held:
        unload_module(kernel)
    held.clear()
    given_back = free()
    for binary in chosen:
        held.append(launch.load(binary))
        held[-1]._init_handles()
    unbounded_bytes = given_back - free()
    for kernel in held:
        unload_module(kernel)
    took_us.sort()
    return {
        "kernels": len(chosen), "limit": LIMIT, "bounded_mib": round(bounded_bytes / 2**20, 2),
        "left_after_unloading_mib": round((before_bytes - given_back) / 2**20, 2),
        "unbounded_mib": round(unbounded_bytes / 2**20, 2),
        "unload_us": [round(took_us[len(took_us) // 2]), round(took_us[-1])] if took_us else [],
        "ok": len(chosen) == MEMORY_KERNELS and bounded_bytes < 64 << 20,
    }  # fmt: skip


def on_the_cpu() -> None:
    """The scratch's buffers in place of a GPU's memory."""
    cuda: Any = torch.cuda
    cuda.mem_get_info = lambda: (8 << 30, 8 << 30)
    cuda.MemPool = object
    cuda.use_mem_pool = lambda _: nullcontext()
    scratch.serving_device = lambda: torch.device("cpu")


PARTS = ("trials", "memory", "slow", "crash")
RUN_SHARE = 0.5
"""of the trials' time is kept for making them; the rest is for compiling what they need"""
NEEDED_S = {"memory": 10.0, "slow": 30.0, "crash": 80.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS[:1] if DRY else PARTS))
    parser.add_argument("--trials", type=int, default=len(PLANTS) if DRY else 10_000)
    parser.add_argument("--budget-s", type=float, default=3600.0 if DRY else 540.0, help="for all of it; trials beyond"
                        " are not run")  # fmt: skip
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plants", help="names, with commas between them")
    options = parser.parse_args()
    names = options.part.split(",")
    if odd := set(names) - set(PARTS):
        parser.error(f"--part has {', '.join(sorted(odd))}; there are {', '.join(PARTS)}")
    if CRASHED in os.environ:
        return meet_the_crash(Path(os.environ[CRASHED]))
    if not DRY and options.out is None:
        parser.error("--out DIR is needed: name a folder for what is found")
    of_this_checkout()
    if not DRY and not torch.cuda.is_available():
        sys.exit("no GPU is visible to this process: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    folder = Path(tempfile.mkdtemp(prefix="moe-autotune-plants-"))
    parts = Parts((options.out or folder) / "plants.json", options.budget_s)
    sys.path.insert(0, str(folder))
    if DRY:
        interpreter.mend()
        on_the_cpu()
        global MS, DTYPES, CONFIGS, SHAPES  # noqa: PLW0603 - the interpreter is slow, and bf16 is not right in it
        MS, DTYPES, CONFIGS = (5,), ("float16", "float16"), CONFIGS[:1]
        SHAPES = (MoeShape((4, 80, 64), (4, 64, 40), 2),)
    releases.publish_server_args()
    plants = chosen_plants(options.plants)
    bed = Bed(folder, plants, torch.device("cpu") if DRY else scratch.serving_device(), options.seed)
    if not DRY:
        parts.found["machine"] = gpu_acceptance.machine()
    binaries: dict[str, Any] = {}
    result = parts.found
    later_s = sum(NEEDED_S[name] for name in names if name != "trials")
    if "trials" in names:
        parts.run("trials", lambda: result.update(try_all(bed, plants, options, binaries, parts, later_s)))
    for name, part in (
        ("memory", lambda: memory(binaries)),
        ("slow", lambda: slow(folder / "slow", bed)),
        ("crash", lambda: crash(folder / "crash", parts.left_s)),
    ):
        if name in names:
            parts.run(name, lambda name=name, part=part: result.update({name: part()}), NEEDED_S[name])
    ok = not parts.failed and result.get("trials_ok", True)
    ok = ok and all(result[name]["ok"] for name in names if name != "trials")
    result["ok"] = ok
    parts.write()
    print(json.dumps(result, default=str))
    return 0 if ok else 1


def chosen_plants(names: str | None) -> tuple[Plant, ...]:
    """Those that are asked for, without those that the interpreter cannot run. Raises SystemExit for an unknown one."""
    asked = set(names.split(",")) if names else {p.name for p in PLANTS}
    if odd := asked - {p.name for p in PLANTS}:
        raise SystemExit(f"there is no plant {', '.join(sorted(odd))}; there are {', '.join(p.name for p in PLANTS)}")
    return tuple(p for p in PLANTS if p.name in asked and not (DRY and p.gpu_only))


def try_all(
    bed: Bed, plants: tuple[Plant, ...], options: argparse.Namespace, binaries: dict[str, Any], parts: Parts,
    later_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Compile what the trials need, into ``binaries`` too, and make them; as many as leave ``later_s``."""
    begun_s = time.monotonic()
    until_s = begun_s + parts.left_s - later_s
    trials = drawn(plants, options.trials, random.Random(options.seed))  # noqa: S311 - no secret
    groups = list(grouped(bed, trials))
    lost: dict[str, str] = {}
    if not DRY:
        made, lost = compiled(bed, groups, options.processes, begun_s + (1 - RUN_SHARE) * (until_s - begun_s))
        binaries |= made
    compiled_s = time.monotonic() - begun_s
    print(f"    {len(binaries)} binaries in {compiled_s:.0f} s, {len(lost)} lost", flush=True)
    result = run(bed, groups, 2 if DRY else correctness.RUNS_PER_ROUTING, until_s, lost)
    by_plant, flaky = result["plants"], {p.name for p in plants if p.when}
    honest = {p.name for p in PLANTS if p.honest}
    wrong = sum(v["admitted"] for n, v in by_plant.items() if n not in flaky | honest)
    held = not (wrong if DRY else result["wrong_admitted"] or result["not_run"])  # two runs find no flaky one
    result |= {"compile_s": round(compiled_s, 1), "binaries": len(binaries), "not_compiled": len(lost)}
    return {**result, "trials_ok": held and not result["honest_refused"]}


if __name__ == "__main__":
    sys.exit(main())
