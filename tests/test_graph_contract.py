"""What re-capture uses of SGLang is there, in the installed release and in those that lie unpacked."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from sglang_moe_autotune.graph_contract import missing, uses

UNPACKED = os.environ.get("SGLANG_RELEASES_UNPACKED", "")
"""a folder of folders that each hold a release's ``sglang/``"""


def roots() -> list[Path]:
    found = [path.parent for path in sorted(Path(UNPACKED).glob("*/sglang"))] if UNPACKED else []
    if (spec := importlib.util.find_spec("sglang")) is not None and spec.origin:
        found.append(Path(spec.origin).parent.parent)
    return found


@pytest.mark.parametrize("root", roots(), ids=lambda root: root.name)
def test_the_runners_have_what_is_used(root: Path) -> None:
    gone = missing(root)
    if any("cuda_graph_buffer_registry" in name for name in gone):
        pytest.skip("older than the registry of graph inputs: refused there when the server runs")
    assert gone == ()


def test_a_name_that_moved_is_told(tmp_path: Path) -> None:
    for use in uses(tmp_path):
        path = tmp_path.joinpath(*use.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("a") as file:
            if not use.owner:
                file.writelines(f"def {name}(): ...\n" for name in use.names)
            elif use.owner == "CudaGraphRunner":
                file.write("class Base:\n def capture(self): self.capture_bs = []\nclass CudaGraphRunner(Base): ...\n")
            else:
                file.write(f"class {use.owner}:\n def __init__(self):\n  pass\n")
                file.writelines(f"  self.{name} = 0\n" for name in use.names)
    gone = missing(tmp_path)
    assert gone
    assert all(".CudaGraphRunner." in name for name in gone)
    assert not any(name.endswith((".capture", ".capture_bs")) for name in gone), "a base class has them"
