"""Ranks in real processes: the real hooks, SGLang's own receiver and request broadcast over gloo, faults in the middle.

``scripts/bench_ranks.py`` in small. A fork of a process that has imported SGLang is a rank.
"""

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


def bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "bench_ranks.py"), "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ranks_never_wait_for_each_other_and_end_with_one_table_whatever_breaks() -> None:
    """C22 in real processes is among them: ranks with private volumes go on, and say what differs."""
    results = bench("--ranks", "2", "4", "--passes", "800", "--epochs", "16", "--faults", "4", "--private")
    private = results.pop("private")
    assert private["hangs"] == 0
    for rank, report in private["ranks"].items():
        assert report["broken"] == []
        assert any(f"rank {1 - int(rank)} of 2 is not seen" in why for why in report["waits"])
    for ranks, found in results.items():
        reports = found["ranks"].values()
        assert found["hangs"] == 0
        assert found["equal"], ranks
        assert found["epochs"] >= 8
        assert found["together"]
        assert found["calls"] > 4 * 800
        assert found["waited"] == []
        assert len({report["epoch"] for report in reports}) == 1
        for report in reports:
            assert report["broken"] == []
            assert report["waits"] == []
            assert report["rows"]
