"""The plants that no interpreter can run: they compile for the GPU, at fault in the configs of one width only; and what
two processes that meet a crashing one must tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).resolve().parent.parent

SNIPPET = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv.pop())
folder.mkdir()
sys.path[:0] = [SCRIPTS, str(folder)]
import gpu_planted, gpu_plants as g, torch, triton
from triton.backends.compiler import GPUTarget
from sglang_moe_autotune import compile_child, launch
from sglang_moe_autotune.held import Candidate
g.releases.publish_server_args()
g.releases.invoke_function()
triton.runtime.driver.set_active(compile_child.StubDriver(GPUTarget("cuda", 90, 32)))
g.on_the_cpu()
torch.cuda.current_device = lambda: 0
g.DRY = True
bed = g.Bed(folder, (), torch.device("cpu"), 0)
held = g.scratch.Scratch(g.SHAPES[0], 48, g.reference_align, 1.0, flush=False)
for _ in held.fill(g.routings.MANY):
    pass
def binary_source(kernel):
    return kernel.asm["ttir"].replace("1.250000e+00", "1.25")
told = {}
for name, edit in (("slow", g.SLOW), ("crash", g.CRASH)):
    kernel = g.plant_kernel(folder, bed.original, g.Plant(name, (edit,)))
    recorder = launch.LaunchRecorder(g.planted(bed.invoke, kernel))
    launches = g.Launches(held, [bed.layer(g.SHAPES[0])], recorder, bed.loaded)
    for width, config in (("wide", g.WIDE), ("baseline", g.BASELINE), ("other", g.CONFIGS[0])):
        binary = launches.candidate("up", config).binary
        assert launch.decode(launch.encode(binary)).hash == binary.hash
        assembly = launch.load(binary).asm["ptx"]
        told[f"{name} {width}"] = ["globaltimer" in assembly, "trap;" in assembly]
shown = []
for plant in gpu_planted.plants().values():
    kernel = g.plant_kernel(folder, bed.original, plant)
    recorder = launch.LaunchRecorder(g.planted(bed.invoke, kernel))
    launches = g.Launches(held, [bed.layer(g.SHAPES[0])], recorder, bed.loaded)
    for group in (1, 8, 16, 32):
        binary = launches.candidate("up", g.KernelConfig(16, 128, 32, group, 4, 2)).binary
        assembly = launch.load(binary).asm["ptx"]
        shown.append([plant.name, group, "1.25" in binary_source(launch.load(binary)), "globaltimer" in assembly,
                      "trap;" in assembly])
ended = Candidate("env", g.SHAPES[0], "up", g.KernelConfig(16, 128, 32, 16, 4, 2))
again = g.plant_kernel(folder, bed.original, gpu_planted.plants([ended])["crash"])
hashes = {g.releases.kernel_hash(g.planted(bed.invoke, k)) for k in (again, kernel)}
recorder = launch.LaunchRecorder(g.planted(bed.invoke, again))
launches = g.Launches(held, [bed.layer(g.SHAPES[0])], recorder, bed.loaded)
narrow = []
for gemm, sizes in [("up", (16, 128, 32, 16, 4, 2)), ("down", (16, 128, 32, 16, 4, 2)), *(
    ("up", sizes) for sizes in ((32, 128, 32, 16, 4, 2), (16, 64, 32, 16, 4, 2), (16, 128, 64, 16, 4, 2),
                                (16, 128, 32, 32, 4, 2), (16, 128, 32, 16, 8, 2), (16, 128, 32, 16, 4, 3)))]:
    binary = launches.candidate(gemm, g.KernelConfig(*sizes)).binary
    assert launch.decode(launch.encode(binary)).hash == binary.hash
    narrow.append("trap;" in launch.load(binary).asm["ptx"])
cases = json.loads(os.environ["CASES"])
print(json.dumps([told, shown, len(hashes), narrow, [g.crash_holds(*case) for case in cases]]))
"""

DIED = {"ready": "ready", "reason": "", "code": 1}
REFUSED = {"ready": "failed", "reason": "in quarantine: a process ended", "others": 4, "code": 0}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("as it must be", DIED, REFUSED, True),
    ("the first one lived", {**DIED, "samples": 0, "others": 4, "code": 0}, REFUSED, False),
    ("it died before it launched", {"code": 1}, REFUSED, False),
    ("tried again", DIED, {**DIED, "code": 1}, False),
    ("refused for another reason", DIED, {**REFUSED, "reason": "needs 300000 bytes"}, False),
    ("nothing else can be measured", DIED, {**REFUSED, "others": 0}, False),
]


def test_slow_and_crashing_plants_are_at_fault_in_one_width_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SNIPPET.replace("SCRIPTS", repr(str(ROOT / "scripts"))), str(tmp_path / "plants")],
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore",
            "CASES": json.dumps([case[1:3] for case in CASES]),
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told, servers, hashes, narrow, held = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "slow wide": [True, False], "slow baseline": [False, False], "slow other": [False, False],
        "crash wide": [False, True], "crash baseline": [False, False], "crash other": [False, False],
    }  # fmt: skip
    assert servers == [
        ["server-wrong", 1, False, False, False],
        ["server-wrong", 8, False, False, False],
        ["server-wrong", 16, True, False, False],
        ["server-wrong", 32, False, True, False],
        ["server-crash", 1, False, False, False],
        ["server-crash", 8, False, False, False],
        ["server-crash", 16, False, False, True],
        ["server-crash", 32, False, False, True],
    ], "columns: plant, GROUP_SIZE_M, wrong, slow, crashes"
    assert hashes == 1, "a store must know both kernels as one"
    assert narrow == [True, *[False] * 7], "only the culprit ends the second server"
    assert [(case[0], ok) for case, ok in zip(CASES, held, strict=True)] == [(case[0], case[3]) for case in CASES]
