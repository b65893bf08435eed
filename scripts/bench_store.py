"""Measures the store: kills at random, kills at each system call, and how long 10,000 records take to load.

    python scripts/bench_store.py                          # all of it: some minutes
    python scripts/bench_store.py load                     # one part
    python scripts/bench_store.py kills --locks blind --writers 64 --kills 1000

Each part prints one JSON line; the exit code is 1 where a finished record was lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import record_values as v  # noqa: E402 - lies in tests

from sglang_moe_autotune.document import encode  # noqa: E402 - as above
from sglang_moe_autotune.store import Store, file_name, read  # noqa: E402 - as above

LOCKS = ("work", "two hosts", "blind")
SHAPES, M_PER_SHAPE = 50, 200


def load(root: Path, rounds: int = 20) -> dict[str, Any]:
    """A file of 50 shapes with 200 M each and a note with 30 baselines: median and worst of the rounds."""
    shapes = [v.shape(8 * n) for n in range(1, SHAPES + 1)]
    records = [v.record(m, of=shape) for shape in shapes for m in range(1, M_PER_SHAPE + 1)]
    contents = v.contents(*records, *(v.note(shape, *range(1, 31)) for shape in shapes))
    path = root / file_name(v.H200)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(contents))
    times_ms = []
    for _ in range(rounds):
        started = time.perf_counter()
        store = Store.open(root, v.H200)
        times_ms.append((time.perf_counter() - started) * 1e3)
        if store.contents != contents:
            raise SystemExit("what was loaded is not what was written")
    store.submit(record=v.record(9999))
    started = time.perf_counter()
    kept = store.flush(60)
    return {
        "part": "load",
        "records": len(records),
        "bytes": path.stat().st_size,
        "median_ms": round(statistics.median(times_ms), 1),
        "worst_ms": round(max(times_ms), 1),
        "add_one_ms": round((time.perf_counter() - started) * 1e3, 1),
        "lost": 0 if kept and len(read(path).records) == len(records) + 1 else 1,
    }


def _script(name: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(TESTS / name), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("load", "kills", "calls"), help="all of them by default")
    parser.add_argument("--locks", choices=LOCKS, help="how the locks of the file system work; all ways by default")
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--kills", type=int, default=1000)
    options = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in [options.part] if options.part else ["load", "calls", "kills"]:
            if part == "load":
                found = [load(root / "load")]
            elif part == "calls":
                states = ("first", "later")
                found = [{"part": "calls", "state": s, **_script("ptrace_kill.py", root / s, s)} for s in states]
            else:
                found = []
                for locks in [options.locks] if options.locks else LOCKS:
                    crowd = ("--writers", options.writers, "--kills", options.kills, "--locks", locks)
                    found.append({"part": "kills", **_script("record_crowd.py", root / locks, *crowd)})
            for line in found:
                print(json.dumps(line), flush=True)
                lost += line["lost"]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
