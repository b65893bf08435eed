"""However many candidates are loaded, few stay; what serving has loaded is used and left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_moe_autotune import kernels
from sglang_moe_autotune.kernels import Kernels


class Driver:
    """Counts what is loaded. Serving holds the binaries whose names begin with ``s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        self.most = self.loads = 0
        self.serving = {name: SimpleNamespace(name=name, ours=False) for name in ("s1", "s2")}
        monkeypatch.setattr(kernels.launch, "load", self._load)
        monkeypatch.setattr(kernels.launch, "loaded", lambda made, device, binary: self.serving.get(binary.hash))

    def _load(self, binary: Any) -> Any:
        return SimpleNamespace(name=binary.hash, ours=True, _init_handles=lambda: self._take(binary.hash))

    def _take(self, name: str) -> None:
        self.loaded.append(name)
        self.loads += 1
        self.most = max(self.most, len(self.loaded))

    def unload(self, kernel: Any) -> None:
        assert kernel.ours, "serving's kernel was taken away"
        self.loaded.remove(kernel.name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def use(held: Kernels, name: str) -> Any:
    return held.load(SimpleNamespace(), SimpleNamespace(hash=name), 0)  # type: ignore[arg-type]


def test_c36_of_200_candidates_a_bounded_number_stays_and_serving_keeps_its_own(driver: Driver) -> None:
    held = Kernels(driver.unload, limit=64)
    for number in range(200):
        assert use(held, f"c{number}").name == f"c{number}"
        assert use(held, "s1") is driver.serving["s1"]
    assert driver.most == 64
    assert driver.loaded == [f"c{n}" for n in range(136, 200)]
    assert (len(held), held.unloaded) == (64, 136)


def test_what_is_used_stays_and_what_was_unloaded_is_loaded_again(driver: Driver) -> None:
    held = Kernels(driver.unload, limit=3)
    for name in ("a", "b", "c", "a", "d", "a", "e"):
        use(held, name)
    assert driver.loaded == ["a", "d", "e"]
    assert use(held, "b").name == "b"
    assert driver.loads == 6


def test_loading_is_two_steps_of_which_many_can_be_under_way(driver: Driver) -> None:
    """Reading the disk cache and the driver's call take about as long: a pass that serves makes one of them."""
    held = Kernels(driver.unload, limit=8)

    def step(name: str) -> bool:
        return held.step(SimpleNamespace(), SimpleNamespace(hash=name), 0)  # type: ignore[arg-type]

    names = [f"c{n}" for n in range(8)]
    assert [step(name) for name in names] == [False] * 8
    assert driver.loads == 0
    assert [step(name) for name in names] == [True] * 8
    assert [step(name) for name in names] == [True] * 8
    assert driver.loads == 8
    assert step("s1") is True


def test_more_than_are_held_at_a_time_get_loaded_all_the_same(driver: Driver) -> None:
    """A search asks for its candidates in turn: where each that is read drove out the next, none would be loaded."""
    held, waiting, asked = Kernels(driver.unload, limit=8), [f"c{n}" for n in range(20)], 0
    while waiting:
        name = waiting.pop(0)
        if not held.step(SimpleNamespace(), SimpleNamespace(hash=name), 0):  # type: ignore[arg-type]
            waiting.append(name)
        asked += 1
        assert asked < 100, f"{len(waiting)} are never loaded"
    assert (driver.loads, driver.most) == (20, 8)


def test_a_kernel_that_cannot_be_loaded_takes_no_place(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Kernels(driver.unload, limit=3)
    use(held, "a")

    def refuse(_: Any) -> Any:
        raise RuntimeError("device kernel image is invalid")

    monkeypatch.setattr(kernels.launch, "load", refuse)
    with pytest.raises(RuntimeError, match="image"):
        use(held, "b")
    assert (len(held), driver.loaded) == (1, ["a"])


def test_an_unloaded_kernel_has_no_handle_left_for_triton_to_unload_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    library = SimpleNamespace(cuModuleUnload=lambda handle: calls.append(handle.value) or 0)
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda name: library)
    target = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    kernel = SimpleNamespace(module=0x7F00_0000_1234, function=5, _run=len, metadata=target)
    kernels.unload_module(kernel)
    kernels.unload_module(kernel)
    assert calls == [0x7F00_0000_1234]
    assert (kernel.module, kernel.function, kernel._run) == (None, None, None)
    library.cuModuleUnload = lambda handle: 400
    kernel.module = 1
    with pytest.raises(RuntimeError, match="error 400"):
        kernels.unload_module(kernel)
