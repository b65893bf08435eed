"""What re-capture uses of SGLang is there, in the installed release and in those that lie unpacked."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from sglang_moe_autotune import fit
from sglang_moe_autotune.source import Source

UNPACKED = os.environ.get("SGLANG_RELEASES_UNPACKED", "")
"""a folder of folders that each hold a release's ``sglang/``"""


def roots() -> list[Path]:
    found = [path.parent for path in sorted(Path(UNPACKED).glob("*/sglang"))] if UNPACKED else []
    if (spec := importlib.util.find_spec("sglang")) is not None and spec.origin:
        found.append(Path(spec.origin).parent.parent)
    return found


@pytest.mark.parametrize("root", roots(), ids=lambda root: root.name)
def test_the_runners_have_what_is_used(root: Path) -> None:
    found = fit.examine(Source(root), ["recapture"])["recapture"]
    if any("cuda_graph_buffer_registry" in reason for reason in found.lacks):
        pytest.skip("older than the registry of graph inputs: refused there when the server runs")
    assert found.lacks == ()
    assert found.unread == ""
    assert len(found.ways) == 1
