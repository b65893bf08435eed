#!/usr/bin/env python3
"""Ten seconds that save ten minutes: is on this machine what the GPU scripts need? One line for each thing.

    gpu_preflight.py [--gpus 2]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import gpu_server

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = ("torch", "triton", "sglang", "sgl_kernel", "transformers", "msgspec", "filelock", "platformdirs", "click",
          "rich", "zmq", "fastapi", "uvicorn", "orjson")  # fmt: skip
USEFUL = {"torch_memory_saver": "gpu_soak leaves out release and resume", "matplotlib": "no pictures are drawn here",
          "flashinfer": "the servers may choose other backends"}  # fmt: skip
SEEN = "from importlib.metadata import entry_points as e; print(sorted(p.name for p in e(group='sglang.srt.plugins')))"


def packages() -> Iterator[tuple[str, bool, str]]:
    for name in NEEDED:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is told
            yield name, False, f"{type(error).__name__}: {error}"
        else:
            yield name, True, str(getattr(module, "__version__", "")) or str(getattr(module, "__file__", ""))
    for name, without in USEFUL.items():
        there = importlib.util.find_spec(name) is not None
        yield f"{name} (not needed)", True, "there" if there else f"absent: {without}"


def plugin() -> Iterator[tuple[str, bool, str]]:
    """As a server will see it: this checkout, and one entry point."""
    import sglang_moe_autotune  # noqa: PLC0415 - found on the path that gpu_server sets

    here = str(sglang_moe_autotune.__file__).startswith(str(gpu_server.ROOT))
    yield "the package is this checkout's", here, str(sglang_moe_autotune.__file__)
    environ = gpu_server.with_checkout({**os.environ})
    done = subprocess.run([sys.executable, "-c", SEEN], env=environ, capture_output=True, text=True, check=False)
    yield "SGLang finds the plugin once", done.stdout.count("moe_autotune") == 1, (done.stdout or done.stderr).strip()


def device(gpus: int) -> Iterator[tuple[str, bool, str]]:
    import torch  # noqa: PLC0415 - may be what is missing

    count = torch.cuda.device_count()
    yield f"{gpus} GPU", count >= gpus, f"{count}: {[torch.cuda.get_device_name(i) for i in range(count)]}"
    if count:
        free, total = torch.cuda.mem_get_info()
        yield "the GPU is empty", free > 0.95 * total, f"{free >> 20} of {total >> 20} MiB free"
    if gpus > 1 and count > 1:
        yield "GPUs reach each other's memory (or NCCL copies)", True, str(torch.cuda.can_device_access_peer(0, 1))
        for name, value in gpu_server.MULTICAST_OFF.items():
            yield f"{name}", os.environ.get(name, value) == value, os.environ.get(name, f"unset, {value} in servers")
    for tool in ("nvcc", "gcc", "ninja"):
        yield f"{tool} (SGLang compiles some kernels)", shutil.which(tool) is not None, str(shutil.which(tool))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()
    good = True
    for found in (packages, plugin, lambda: device(options.gpus)):
        try:
            for name, ok, told in found():
                good = good and ok
                print(f"[{'ok' if ok else 'FAIL'}] {name}: {told}", flush=True)
        except Exception as error:  # noqa: BLE001 - as above
            good = False
            print(f"[FAIL] {type(error).__name__}: {error}", flush=True)
    print(f"{len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}, {sys.executable}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
