"""The side process really compiles for sm_90 without a GPU, and its cache entry is found by name."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    """Leave in the process: ``record(config, M)`` that names the binary of a launch, on memory-less tensors."""
    import builtins

    import torch
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    from sglang_moe_autotune import compile_child, launch, releases

    triton.runtime.driver.set_active(compile_child.StubDriver(GPUTarget("cuda", 90, 32)))
    recorder = launch.LaunchRecorder(releases.invoke_function())

    def record(
        config: dict[str, int], m: int, experts: int = 8, top_k: int = 2, like: launch.Binary | None = None
    ) -> launch.Binary:
        N = K = 256  # noqa: N806 - the field's names
        M, E = m, experts  # noqa: N806 - as above
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        block, bf16 = config["BLOCK_SIZE_M"], torch.bfloat16
        ids = M * top_k * block if M * top_k < E + 1 else M * top_k + (E + 1) * (block - 1)
        made = recorder.record(
            empty(M, K, dtype=bf16), empty(E, N, K, dtype=bf16), None, empty(M * top_k, N, dtype=bf16),
            None, None, None, empty(M, top_k, dtype=torch.float32), empty(M, top_k), empty(ids),
            empty(ids // block + 1), empty(1), False, top_k, config,
            compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False,
            use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False, block_shape=None,
        )  # fmt: skip
        return launch.binary_of(made, 0, like)

    builtins.record_launch = record  # type: ignore[attr-defined]


def likenesses(folder: str) -> dict[str, object]:
    import builtins
    import importlib
    import sys
    from pathlib import Path

    import torch

    from sglang_moe_autotune import launch

    record = builtins.record_launch  # type: ignore[attr-defined]
    found: dict[str, object] = {"named": 0}
    kept = launch.cache_hash

    def counted(*args: object) -> str:
        found["named"] += 1  # type: ignore[operator]
        return kept(*args)  # type: ignore[arg-type]

    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}
    config = {**tile, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
    measured = record(config, 48)
    launch.cache_hash = counted  # type: ignore[assignment]
    try:
        same = record(config, 48, like=measured)
        found["same"] = [same.hash == measured.hash, same.bound is not measured.bound, found["named"]]
        others = {
            "warps": ({**config, "num_warps": 8}, 48),
            "tile": ({**config, "BLOCK_SIZE_N": 128}, 48),
            "odd": (config, 47),
        }
        for name, (other, m) in others.items():
            found[name] = record(other, m, like=measured).hash == record(other, m).hash != measured.hash
    finally:
        launch.cache_hash = kept
    body = "import triton\nimport triton.language as tl\n" + "".join(
        f"@triton.jit\ndef {name}(p):\n    tl.store(p, {value})\n" for name, value in (("one", 1), ("two", 2))
    )
    (Path(folder) / "two_kernels.py").write_text(body)
    sys.path.insert(0, folder)
    module, pointer = importlib.import_module("two_kernels"), torch.empty(16, dtype=torch.int32, device="meta")
    made = [launch.Launch(kernel, (1,), (pointer,), {}) for kernel in (module.one, module.two)]
    one = launch.binary_of(made[0], 0)
    found["kernel"] = launch.binary_of(made[1], 0, one).hash == launch.binary_of(made[1], 0).hash != one.hash
    return found


def test_a_binary_is_named_once_for_launches_that_need_the_same_one_and_for_no_others(
    scheduler: SchedulerProcess, tmp_path: Path
) -> None:
    """It is launched with the arguments of each: those of a launch that needs another one would be read wrongly."""
    scheduler.run(prepare)
    told = scheduler.run(likenesses, str(tmp_path))
    assert told.pop("same") == [True, True, 0]
    assert told.pop("named") > 0
    assert told == dict.fromkeys(("warps", "tile", "odd", "kernel"), True)


def compile_in_the_child(shared_memory_bytes: int) -> dict[str, object]:
    import builtins
    import os
    import time
    from pathlib import Path

    import triton

    from sglang_moe_autotune import launch
    from sglang_moe_autotune.compiler import Compiler
    from sglang_moe_autotune.listener import CompileCount

    count = CompileCount()
    count.install()
    record = builtins.record_launch  # type: ignore[attr-defined]
    small = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_stages": 2}
    large = {**small, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "num_warps": 8, "num_stages": 4}
    binaries = [record(small, 16), record(large, 16)]
    compiler = Compiler(1, shared_memory_bytes)
    seen: list[list[str]] = []
    longest_s, end = 0.0, time.monotonic() + 240
    while time.monotonic() < end:
        begun = time.perf_counter()
        now = [compiler.readiness(b) for b in binaries]
        if seen:
            longest_s = max(longest_s, time.perf_counter() - begun)
        if not seen or seen[-1] != now:
            seen.append(now)
        if "waiting" not in now:
            break
        time.sleep(0.02)
    child = compiler._child
    environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0") if child else []
    nice = os.getpriority(os.PRIO_PROCESS, child.pid) if child else None
    kernel = launch.load(binaries[0])
    compiler.close()
    return {
        "seen": seen,
        "reasons": [compiler.reason(b) for b in binaries],
        "counts": compiler.counts,
        "compiled_here": count.compiled,
        "cached": [b.on_disk() for b in binaries],
        "hash_is_tritons": kernel.hash == binaries[0].hash,
        "device_caches": sum(len(c[0]) for c in binaries[0].source.fn.device_caches.values()),
        "hidden_gpu": b"CUDA_VISIBLE_DEVICES=" in environment,
        "nice": nice,
        "longest_ms": longest_s * 1e3,
        "folder": triton.knobs.cache.dir,
        "asm": sorted(kernel.asm),
    }


def variants() -> list[str]:
    import builtins

    record = builtins.record_launch  # type: ignore[attr-defined]
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    # top-9 over 9 experts: 8 * 9 is no multiple of 16, 16 * 9 is one
    return [record(config, m, experts=9, top_k=9).hash for m in (8, 16, 32)]


def survive_the_death_of_the_child() -> dict[str, object]:
    import builtins
    import os
    import signal
    import time

    from sglang_moe_autotune.bench import Declined
    from sglang_moe_autotune.compiler import Compiler

    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    binary = builtins.record_launch(config, 16)  # type: ignore[attr-defined]
    compiler = Compiler(1, 1 << 20)

    def look() -> str:
        try:
            return compiler.readiness(binary)
        except Declined as declined:
            return str(declined)

    states = [look()]
    for _ in range(3):
        child = compiler._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        end = time.monotonic() + 10
        while compiler._child is child and time.monotonic() < end:
            compiler.poll()
            time.sleep(0.01)
        states.append(look())
    compiler.recover()
    states.append(look())
    compiler.close()
    return {"states": states, "failed": compiler.counts["failed"]}


def meet_another_ptxas() -> str:
    """As in a server whose Inductor has pointed Triton to torch's own ptxas after its first compiles."""
    import builtins
    import os
    import stat
    import tempfile
    import time
    from pathlib import Path

    from triton import knobs

    from sglang_moe_autotune.compiler import Compiler

    config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    binary = builtins.record_launch(config, 16)  # type: ignore[attr-defined]
    other = Path(tempfile.mkdtemp()) / "ptxas"
    version = "echo 'Cuda compilation tools, release 99.9, V99.9.99'"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {version} && exit\nexec {knobs.nvidia.ptxas.path} "$@"\n')
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    os.environ["TRITON_PTXAS_PATH"] = str(other)
    assert knobs.nvidia.ptxas.version == "99.9"
    compiler = Compiler(1, 1 << 20)
    end = time.monotonic() + 240
    try:
        while (state := compiler.readiness(binary)) == "waiting" and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        del os.environ["TRITON_PTXAS_PATH"]
        compiler.close()
    return state


def meet_a_faulty_child() -> dict[str, object]:
    import builtins
    import os
    import time

    from sglang_moe_autotune.bench import Declined
    from sglang_moe_autotune.compiler import Compiler

    config = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    binary = builtins.record_launch(config, 16)  # type: ignore[attr-defined]
    compiler = Compiler(1, 1 << 20)
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # the child's Triton names its binaries otherwise than this one
    try:
        compiler.readiness(binary)
    finally:
        del os.environ["TRITON_F32_DEFAULT"]
    end = time.monotonic() + 240
    try:
        while time.monotonic() < end:
            compiler.readiness(binary)
            time.sleep(0.02)
    except Declined as declined:
        return {"declined": str(declined), "failed": compiler.counts["failed"]}
    finally:
        compiler.close()
    return {}


def lose_workers(every: bool) -> dict[str, object]:
    """Kill the process that compiles one of eight orders, or each that is started, with an order in its hands."""
    import builtins
    import contextlib
    import os
    import signal
    import time
    from pathlib import Path

    from sglang_moe_autotune.bench import Declined
    from sglang_moe_autotune.compile_child import WORKER_NAME
    from sglang_moe_autotune.compiler import Compiler

    config = {"BLOCK_SIZE_M": 128 if every else 64, "BLOCK_SIZE_N": 32, "GROUP_SIZE_M": 1, "num_warps": 4}
    several = [{**config, "BLOCK_SIZE_K": k, "num_stages": s} for k in (64, 128) for s in (2, 3, 4, 5)]
    binaries = [builtins.record_launch(one, 16) for one in several]  # type: ignore[attr-defined]
    compiler = Compiler(1, 1 << 20)
    killed: set[str] = set()
    now, end = ["waiting"], time.monotonic() + 240
    try:
        while "waiting" in now and time.monotonic() < end:
            now = [compiler.readiness(binary) for binary in binaries]
            child = compiler._child
            if child is not None and (every or not killed):
                for worker in set(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()) - killed:
                    with contextlib.suppress(FileNotFoundError):  # imports start short-lived programs as well
                        if Path(f"/proc/{worker}/comm").read_text().strip() == WORKER_NAME:
                            os.kill(int(worker), signal.SIGSTOP)
                            time.sleep(0.5)  # it answers nothing any more, and is handed an order if it had none
                            os.kill(int(worker), signal.SIGKILL)
                            killed.add(worker)
            time.sleep(0.002)
    except Declined as declined:
        return {"declined": str(declined), "failed": compiler.counts["failed"]}
    finally:
        compiler.close()
    return {"states": sorted(now), "killed": len(killed)}


def test_a_candidate_is_compiled_elsewhere_and_found_here(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    told = scheduler.run(compile_in_the_child, 100_000)
    assert told["seen"][0] == ["waiting", "waiting"]
    assert told["seen"][-1] == ["ready", "failed"]
    assert told["compiled_here"] == 0
    assert told["cached"] == [True, True]
    assert told["hash_is_tritons"]
    assert set(told["asm"]) - {"source"} == {"cubin"}, "intermediate code is read and kept for nothing"
    assert told["device_caches"] == 0
    assert told["hidden_gpu"]
    assert told["nice"] == 19
    assert told["folder"].startswith(str(scheduler.folder))


def test_c01_a_binary_that_needs_more_shared_memory_than_the_gpu_has_is_refused_before_a_launch(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(compile_in_the_child, 100_000)
    assert "shared memory" in told["reasons"][1]
    # The orders of the test before are on disk: nothing is compiled twice, and no process is started for them.
    assert told["counts"] == {"ordered": 0, "ready": 1, "failed": 1}
    assert told["nice"] is None


def test_c21_divisibility_by_16_asks_for_another_binary(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    eight, sixteen, thirty_two = scheduler.run(variants)
    assert eight != sixteen
    assert sixteen == thirty_two


def test_a_compile_process_that_dies_is_replaced_then_given_up_and_later_tried_again(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(survive_the_death_of_the_child)
    assert told["states"][:3] == ["waiting"] * 3
    assert "ended 3 times" in told["states"][3]
    assert told["states"][4] == "waiting"
    assert told["failed"] == 0  # its death says nothing about the candidate


def test_a_compile_process_that_would_fill_another_cache_entry_fails_no_candidate(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(meet_a_faulty_child)
    assert "differs there" in told["declined"]
    assert told["failed"] == 0


def test_a_ptxas_that_torch_names_after_the_first_compiles_does_not_mislead_the_child(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    assert scheduler.run(meet_another_ptxas) == "ready"


def test_a_worker_that_is_killed_fails_its_own_candidate_and_none_that_waits(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    told = scheduler.run(lose_workers, False)
    assert told == {"states": ["failed", *["ready"] * 7], "killed": 1}


def test_workers_that_are_killed_again_and_again_defer_what_waits(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    told = scheduler.run(lose_workers, True)
    assert "does not work" in told["declined"]
    assert told["failed"] == 2
