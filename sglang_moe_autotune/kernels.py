"""The kernels that tuning has loaded: the ones used last, as many as a bound allows. Serving's own stay as they are."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from sglang_moe_autotune import launch

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT: Final = 128
"""kernels of candidates that are loaded at a time; each takes some hundred KiB of the device"""

_UNLOAD: Final = {"cuda": ("libcuda.so.1", "cuModuleUnload"), "hip": ("libamdhip64.so", "hipModuleUnload")}


class Kernels:
    """Loaded kernels by the hash of their binary. One thread."""

    def __init__(self, unload: Callable[[Any], None] | None = None, limit: int = LIMIT) -> None:
        self._unload = unload_module if unload is None else unload
        self._limit = limit
        self._own: OrderedDict[str, Any] = OrderedDict()
        self._borrowed: dict[str, Any] = {}
        self._read: OrderedDict[str, Any] = OrderedDict()
        """from the disk cache, and not loaded yet"""
        self.unloaded = 0
        """how many were unloaded so far"""

    def __len__(self) -> int:
        return len(self._own)

    def load(self, made: launch.Launch, binary: launch.Binary, device: int) -> Any:
        """The kernel of a binary: serving's where it has one, else our own, which is loaded where it is not.

        Raises what Triton's cache, its launcher and the driver raise for a binary that is damaged or does not fit.
        Nothing that was unloaded may still run: call it between slices, with the stream waited for.
        """
        while not self.step(made, binary, device):
            pass
        return self._borrowed.get(binary.hash) or self._own[binary.hash]

    def step(self, made: launch.Launch, binary: launch.Binary, device: int) -> bool:
        """One step of loading it, a reading of the disk cache or a call of the driver (both, where many are read and
        not loaded yet); True where it is loaded. Raises what ``load`` raises."""
        if binary.hash in self._own:
            self._own.move_to_end(binary.hash)
            return True
        if binary.hash in self._borrowed:
            return True
        if (kernel := launch.loaded(made, device, binary)) is not None:
            self._borrowed[binary.hash] = kernel
            return True
        if (kernel := self._read.pop(binary.hash, None)) is None:
            kernel = launch.load(binary)
            if len(self._read) < self._limit:
                self._read[binary.hash] = kernel
                return False
            # More are asked for in turn than there are places. Where each drove out another one, none would be loaded.
            self._read.popitem(last=False)
        while len(self._own) >= self._limit:
            _, oldest = self._own.popitem(last=False)
            self._unload(oldest)
            self.unloaded += 1
        kernel._init_handles()
        self._own[binary.hash] = kernel
        return True


def unload_module(kernel: Any) -> None:
    """Take a compiled kernel of our own off the device. Its object cannot be launched afterwards.

    Triton before 3.7 never does this; later ones do when the object goes, which a reference anywhere would put off.
    Raises RuntimeError where the driver refuses.
    """
    module, kernel.module = kernel.module, None  # without a handle, Triton's own finaliser leaves it alone
    kernel.function = kernel._run = None
    if module is None:
        return
    library, function = _UNLOAD[kernel.metadata.target.backend]
    if code := getattr(ctypes.CDLL(library), function)(ctypes.c_void_p(module)):
        raise RuntimeError(f"{function} does not unload a kernel: error {code}")
