#!/usr/bin/env python3
"""Tuning and verifying without a server on a real GPU: `tune`, then `verify`, then one line of JSON.

    gpu_offline.py [--shape E=64,N=512,K=2048,top_k=6] [--m 1,16,64,256,1024] [--budget-s 40] [--gpus LIST] [--out DIR]

Run it with an interpreter that has SGLang and this package. Exits with 1 if a record is missing or a row that was
just learned does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_moe_autotune import store

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "import sys; from sglang_moe_autotune import offline_cli as o; getattr(o, sys.argv.pop(1))()"


def shell(out: Path, name: str, *arguments: str) -> tuple[int, dict[str, Any], float]:
    """Run a command of the shell; its exit code, its object, and how long it took."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_DISABLE_CUDNN_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "SGLANG_MOE_AUTOTUNE_DIR": str(out / "store"),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "triton")),
    }
    begun_s = time.monotonic()
    command = [sys.executable, "-c", COMMAND, name, "--json", *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    taken_s = time.monotonic() - begun_s
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, round(taken_s, 1)


def row(record: Any) -> dict[str, Any]:
    evidence = record.evidence
    times = {"baseline_us": round(evidence.baseline_us, 1), "chosen_us": round(evidence.chosen_us, 1)}
    found = {"verdict": record.verdict, "gain": round(evidence.gain, 4), "samples": evidence.samples}
    return {**found, **times, "pair": str(record.pair), "source": record.source}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="E=64,N=512,K=2048,top_k=6")
    parser.add_argument("--m", default="1,16,64,256,1024")
    parser.add_argument("--budget-s", default="40")
    parser.add_argument("--gpus")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out: Path = options.out or Path(tempfile.mkdtemp(prefix="moe-autotune-offline-"))
    out.mkdir(parents=True, exist_ok=True)

    gpus = ("--gpus", options.gpus) if options.gpus else ()
    tuned = shell(out, "tune", "--shape", options.shape, "--m", options.m, "--budget-s", options.budget_s, *gpus)
    verified = shell(out, "verify")

    found = store.environments(out / "store")
    records = [r for entry in found if entry.environment for r in store.read(entry.path).records.values()]
    rows = {str(r.M): row(r) for r in sorted(records, key=lambda r: r.M)}
    held = {str(v["M"]): [v["outcome"], round(v["gain"], 4)] for v in verified[1].get("verified", ())}
    missing = sorted(set(options.m.split(",")) - set(rows), key=int)
    ok = (tuned[0], verified[0]) == (0, 0) and not missing and all(outcome == "holds" for outcome, _ in held.values())
    summary = {
        "ok": ok,
        "codes": [tuned[0], verified[0]],
        "seconds": {"tune": tuned[2], "verify": verified[2]},
        "gpus": tuned[1].get("gpus"),
        "rows": rows,
        "missing": missing,
        "verified": held,
        "left_out": tuned[1].get("passed", []) + verified[1].get("passed", []),
        "lost": tuned[1].get("lost", []) + verified[1].get("lost", []),
        "triton_entries": sum(1 for _ in (out / "triton").glob("*")),
    }
    print(json.dumps(summary))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
