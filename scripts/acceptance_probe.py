"""An observer beside the plugin, for ``gpu_acceptance.py``: it shares no code with what it observes.

As a SGLang plugin it writes, every second, what the scheduler process holds: the fused-MoE kernels in Triton's
device caches and the free device memory. As Triton's cache manager it logs who wrote which cache file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

_CONSTANTS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "MUL_ROUTED_WEIGHT")


class LoggingCacheManager(FileCacheManager):
    """Triton's own manager; each file written is one line: time, process, file, entry."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        with Path(os.environ["ACCEPTANCE_CACHE_LOG"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps([time.time(), os.getpid(), filename, self.key]) + "\n")
        path: str = super().put(data, filename, binary)
        return path


def register() -> None:
    """The entry point; only scheduler processes are observed."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    threading.Thread(target=_observe, daemon=True).start()


def _observe() -> None:
    path = Path(os.environ["ACCEPTANCE_PROBE"])
    while True:
        time.sleep(1.0)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            continue
        free, total = torch.cuda.mem_get_info()
        seen = {"pid": os.getpid(), "unix_s": time.time(), "free": free, "total": total, "kernels": _kernels()}
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(seen))
        temporary.replace(path)


def _kernels() -> list[dict[str, Any]]:
    module = sys.modules.get("sglang.kernels.ops.moe.fused_moe_triton_kernels")
    function = getattr(module, "fused_moe_kernel", None)
    found = []
    for caches in list(function.device_caches.values()) if function is not None else []:
        for kernel in list(caches[0].values()):
            names = kernel.src.fn.arg_names
            values = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
            entry = {name: values.get(name) for name in _CONSTANTS}
            entry |= {"num_warps": kernel.metadata.num_warps, "num_stages": kernel.metadata.num_stages}
            found.append(entry | {"hash": kernel.hash, "shared": kernel.metadata.shared})
    return found
