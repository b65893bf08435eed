"""A store with the figures of a real run, for the report's test and for its picture in docs/.

``python tests/report_store.py FOLDER`` fills a folder; ``tests/data/h200_e256_rows.json`` holds the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_moe_autotune.records import Environment, Evidence, Record, ShapeNote
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.store import Store

ROWS = Path(__file__).parent / "data" / "h200_e256_rows.json"
SHAPE = MoeShape((256, 512, 3072), (256, 3072, 256), 8)
H200 = Environment("NVIDIA H200", (9, 0), 132, 232_448, 62_914_560, "3.6.0", "2f1c0a77d3b94e58")
START_UNIX_S = 1_796_008_000.0
SEARCH_S = 94.0


def records() -> list[Record]:
    """One record a row; the times at which they were made are spread evenly, as the run did not keep them."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    made = []
    for number, row in enumerate(rows):
        up, down, base = (KernelConfig.from_dict(row[key]) for key in ("up", "down", "baseline"))
        evidence = Evidence(**{name: row[name] for name in Evidence.__struct_fields__ if name in row})
        at = START_UNIX_S + SEARCH_S * (number + 1) / len(rows)
        pairs = ConfigPair(up, down), ConfigPair(base, base)
        made.append(Record(SHAPE, row["M"], row["verdict"], *pairs, evidence, sglang="0.5.16", unix_s=at))
    return made


def fill(root: Path) -> None:
    """Put the rows into the store at ``root``."""
    store = Store.open(root, H200)
    made = records()
    store.submit(note=ShapeNote(SHAPE, {r.M: r.baseline for r in made}, {16: 4096, 1024: 512}))
    for record in made:
        store.submit(record=record)
    assert store.close(10.0)


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
