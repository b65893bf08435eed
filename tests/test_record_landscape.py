"""The landscape recorder: what it writes of a recorded device is that device's landscape again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import record_landscape

from sglang_moe_autotune import landscape
from sglang_moe_autotune.machine import Machine
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.records import Environment
from sglang_moe_autotune.replay import ReplayProvider

if TYPE_CHECKING:
    from sglang_moe_autotune.shapes import KernelConfig

ORIGINAL = landscape.load(landscape.shipped()[0])
SHAPE = "E=128,N=768,K=2048,top_k=8"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    environment = Environment("NVIDIA H200", (9, 0), 132, 232448, 1, "3.6.0", "k")
    bed = Machine(
        environment,
        ReplayProvider(ORIGINAL, noise_percent=0.0),
        lambda _, m: ORIGINAL.baselines[m].pair,
        lambda _: "",
        Prior(),
        sglang="0.5.16",
    )
    monkeypatch.setattr(record_landscape.machine, "gpu_machine", lambda _: bed)
    return bed


def record(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["record_landscape.py", SHAPE, *arguments])
    return record_landscape.main()


@pytest.mark.usefixtures("machine")
def test_a_recorded_device_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "made.json.gz"
    assert record(monkeypatch, "--m", "16,1024", "--out", str(out)) == 0
    made = landscape.load(out)
    assert made.shape == ORIGINAL.shape
    assert made.ms == (16, 1024)
    assert len(made.candidates) == 1920
    for m in made.ms:
        assert made.baselines[m].pair == ORIGINAL.baselines[m].pair
        assert made.baselines[m].up_us == pytest.approx(ORIGINAL.baselines[m].up_us, rel=1e-4)
        for gemm in ("up", "down"):
            known = {c: us for c in ORIGINAL.candidates if (us := ORIGINAL.latency_us(m, gemm, c)) is not None}
            found = {c: us for c in made.candidates if (us := made.latency_us(m, gemm, c)) is not None}
            assert found == {c: pytest.approx(us, rel=1e-4) for c, us in known.items()}
    unlaunched = set(made.candidates) - set(made.up_us[16])
    assert unlaunched == set(made.out_of_resources)


def test_the_fastest_are_timed_again_without_the_samples_that_chose_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine
) -> None:
    """In 5 % noise the best of a thousand medians of three is a tenth too low; what is written is not."""
    noisy = machine._replace(provider=ReplayProvider(ORIGINAL, noise_percent=5.0))
    monkeypatch.setattr(record_landscape.machine, "gpu_machine", lambda _: noisy)
    out = tmp_path / "made.json.gz"
    assert record(monkeypatch, "--m", "1024", "--out", str(out)) == 0
    made = landscape.load(out)
    for gemm, times in (("up", made.up_us[1024]), ("down", made.down_us[1024])):
        fastest = min(times, key=times.__getitem__)
        assert times[fastest] == pytest.approx(ORIGINAL.latency_us(1024, gemm, fastest), rel=0.03)


def test_it_goes_on_with_the_m_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine
) -> None:
    out = tmp_path / "made.json.gz"
    assert record(monkeypatch, "--m", "16", "--out", str(out)) == 0
    before = out.read_bytes()
    assert record(monkeypatch, "--m", "16,64", "--out", str(out), "--budget-s", "0") == 1
    assert out.read_bytes() == before, "an M that was not finished changed the file"
    refuse = machine._replace(baseline=lambda shape, m: None if m == 64 else machine.baseline(shape, m))
    with monkeypatch.context() as patch:
        patch.setattr(record_landscape.machine, "gpu_machine", lambda _: refuse)
        assert record(patch, "--m", "16,64,256", "--out", str(out)) == 1
    assert landscape.load(out).ms == (16, 256), "one M that fails takes another along"
    assert record(monkeypatch, "--m", "16,64", "--out", str(out)) == 0
    assert landscape.load(out).ms == (16, 64, 256)
    monkeypatch.setattr(record_landscape, "full_space", lambda: ORIGINAL.candidates[:7])
    with pytest.raises(SystemExit, match="another shape"):
        record(monkeypatch, "--m", "1024", "--out", str(out))


def test_compiling_alone_makes_each_binary_once_and_tells_what_the_time_did_not_suffice_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine
) -> None:
    """Sizes that are no multiple of 16 need other binaries: here all M below 64 share theirs, and so do the others."""
    orders: list[str] = []

    class Compiler:
        counts = "all"

        def readiness(self, binary: SimpleNamespace) -> str:
            first = binary.hash not in orders
            if first:
                orders.append(binary.hash)
            return "waiting" if first or (binary.hash.endswith("-64") and slow) else "ready"

    class Bench:
        def __init__(self, m: int) -> None:
            self.m = m

        def prepare(self) -> bool:
            return True

        def _candidate(self, gemm: str, config: KernelConfig) -> object:
            kind = 16 if self.m < 64 else 64
            binary = SimpleNamespace(hash=f"{gemm} {config} -{kind}")
            return "refused" if config.num_stages == 5 else SimpleNamespace(binary=binary)

        def close(self) -> None: ...

    provider = SimpleNamespace(open=lambda _, m, __: Bench(m), compiler=Compiler())
    pair = ORIGINAL.baselines[16].pair
    bed = machine._replace(provider=provider, baseline=lambda *_: pair)  # type: ignore[arg-type]
    monkeypatch.setattr(record_landscape.machine, "gpu_machine", lambda _: bed)
    monkeypatch.setattr(record_landscape.stand_in, "WANTED", 5)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "")  # set by --heuristic, and set back by this
    slow = False
    options = ("--m", "16,32,64,256", "--out", str(tmp_path / "x"), "--compile-only", "--heuristic")
    assert record(monkeypatch, *options) == 0
    assert len(orders) == len(set(orders))
    assert {order.rpartition("-")[2] for order in orders} == {"16", "64"}
    assert (Path(os.environ["SGLANG_MOE_CONFIG_DIR"]) / "configs").is_dir()
    assert not (tmp_path / "x").exists()
    orders.clear()
    slow = True
    assert record(monkeypatch, *options, "--budget-s", "1") == 1
