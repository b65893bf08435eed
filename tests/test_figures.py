"""Figures on the pages are those of the JSON files beside them."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEARCHES = {
    "search": "search",
    "search with the shape's own files too": "search, own files",
    "search without any file": "search, no files",
    "prior alone": "prior alone",
    "TPE after 20 of the prior": "TPE after 20 of the prior",
    "TPE (Optuna)": "TPE",
    "random": "random",
    "grid": "grid",
}
"""a line of the table on how_it_decides.md, and its name in search.json"""
RIVALS = ("random", "grid", "prior alone", "TPE", "TPE after 20 of the prior")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def words(page: str) -> str:
    return " ".join(text(page).split())


def recorded(name: str) -> Any:
    return json.loads(text(f"docs/{name}.json"))


def cells(page: str, first: str) -> list[str]:
    """What stands behind the first cell, in the one line of a table that begins so."""
    [line] = [line for line in text(page).splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def shapes() -> list[dict[str, Any]]:
    """What search.json has of each shape, in the order of the table's columns."""
    by_shape = recorded("search")["landscapes"]
    by_size = {tuple(slug.split("-")[:3]): of for slug, of in by_shape.items()}
    heads = [line for line in text("docs/how_it_decides.md").splitlines() if line.startswith("| | E128 ")]
    found = [by_size[tuple(head.split()[:3])] for head in heads[0].strip("| ").split("|")]
    assert len(found) == len(by_shape)
    return found


def test_the_search_on_recorded_shapes() -> None:
    page = "docs/how_it_decides.md"
    found = shapes()
    for line, name in SEARCHES.items():
        told = [f"{100 * of[name]['regret_geomean']:.2f} %, {100 * of[name]['regret_p95']:.2f} %" for of in found]
        assert cells(page, line) == told, line
    told = [
        f"{100 * of['search']['after_20_compiled']:.2f} % ({100 * of['search, no files']['after_20_compiled']:.2f} %)"
        for of in found
    ]
    assert cells(page, "search after 20 configs (without any file)") == told
    spent = [[of[name]["gpu_s"] for name in RIVALS] for of in found]
    told = [f"{of['search']['gpu_s']:.1f} ({min(s):.1f}-{max(s):.1f})" for of, s in zip(found, spent, strict=True)]
    assert cells(page, "GPU seconds: search (others)") == told
    every = [of["search, all captured sizes"] for of in found]
    told = [
        f"{len(of['per_m'])} M: {100 * of['regret_geomean']:.2f} %, {100 * of['regret_p95']:.2f} %" for of in every
    ]
    assert cells(page, "search at all captured sizes, 12 seeds") == told
    told = [f"{of['gpu_s']:.1f}, {of['winners']:.1f}" for of in every]
    assert cells(page, "its GPU seconds, distinct winners") == told
    told = [f"{of['search']['winners']:.1f} ({of['prior alone']['winners']:.1f})" for of in found]
    assert cells(page, "distinct winners: search (prior alone)") == told
    rows = [of for shape in found for name, of in shape.items() if name.startswith("search")]
    assert f"None of the {sum(of['accepted'] for of in rows):,} rows that the searches took" in words(page)
    assert not any(of["not_faster"] for of in rows)


@pytest.mark.parametrize(("part", "column"), [("tp", 0), ("ep", 1)])
def test_servers_of_two_ranks(part: str, column: int) -> None:
    page, of = "docs/ranks.md", recorded("ranks_gpu")[part]
    gains = [row["gain"] for row in of["rows"].values() if row["verdict"] == "faster"]
    mean = 1 - math.exp(sum(math.log(1 - gain) for gain in gains) / len(gains))
    told = cells(page, "M with a faster row, gain on the slower rank")[column]
    assert told.startswith(f"{len(gains)} of {len(of['rows'])}")
    assert f"{100 * min(gains):.1f} to {100 * max(gains):.0f} %, {100 * mean:.1f} %" in told
    epochs = [str(of["live"][rank]["epoch"]) for rank in "01"]
    assert cells(page, "epochs logged by each rank, then one table on both")[column] == ", ".join(epochs)
    times = of["first_token"]
    on, off, met = times["requests"]["on"], times["requests"]["off"], times["met"]
    assert cells(page, "requests beside tuning, on and off in turn")[column] == f"{on} and {off}"
    shares = [f"{100 * met[f'met {rank}'] / met[f'requests {rank}']:.0f} %" for rank in "01"]
    assert cells(page, "of those with tuning on met a pass of rank 0, of rank 1")[column] == ", ".join(shares)
    for line, name in (("added time to first token, median (target 0.5 ms)", "p50"), ("99th percentile (2 ms)", "p99")):
        added = times[name]["added_ms"]
        told = "{value:.2f} ms ({low:.2f} to {high:.2f})".format(**added)
        assert cells(page, line)[column].startswith(told)
    pauses = [ms for told in of["recaptured"] for ms in told["done"].values()]
    captured = cells(page, "graphs captured anew, the same ones on both")[column]
    graphs = sum(len(told["done"]) for told in of["recaptured"] if told["rank"] == 0)
    assert re.match(rf"{graphs} in two\b", captured)
    assert f"{min(pauses):.0f} to {max(pauses):.0f} ms" in captured


def test_requests_beside_tuning() -> None:
    of = recorded("serving")
    page, times, met = "docs/measured.md", of["ttft"]["ttft"]["added_ms"], of["ttft"]["ttft_of_those_that_met"]
    for line, name in (("added time to first token, median", "p50"), ("99th percentile", "p99"), ("largest", "max")):
        assert cells(page, line)[1].startswith("{value:.2f} ms ({low:.2f} to {high:.2f})".format(**times[name]))
    told = ", ".join(f"{met['added_ms'][name]['value']:.2f}" for name in ("p50", "p99", "max"))
    line = f"the same for the {of['ttft']['met_a_slice']} that met a pass: median, 99th percentile, largest"
    assert cells(page, line)[1] == f"{told} ms"
    steady = of["steady"]["throughput"]
    told = "{:.2f} % ({:.2f} to {:+.2f})".format(*(100 * steady[name] for name in ("value", "low", "high")))
    assert cells(page, "throughput under steady load of 8 streams, 24 layers")[1].startswith(told)


def test_steady_load() -> None:
    page, of = words("docs/measured.md"), recorded("serving")["steady"]
    assert f"with {of['options']['layers']} layers of that shape" in page
    assert f"{of['compiling']['fours']['none']} such fours" in page
    for name in ("median step", "inter-token latency"):
        line = name + " was {:.2f} % ({:.2f} to {:.2f}) shorter"
        assert line.format(*(-100 * of[name][end] for end in ("value", "high", "low"))) in page
    small = of["of 4 layers"]
    line = "a median step {:.2f} % ({:.2f} to {:.2f}) longer"
    assert line.format(*(100 * small["median step"][end] for end in ("value", "low", "high"))) in page
    beside = small["compiling"]["while_compiling"]["throughput"]
    assert "{:.2f} % ({:.2f} to {:.2f}) lower".format(*(-100 * beside[end] for end in ("value", "high", "low"))) in page
    assert f"the run before it {100 * small['run before']['median step']['value']:.2f} %" in page


def test_starts() -> None:
    page, of = "docs/measured.md", recorded("startup")
    lines = {
        "plugin-cold": "empty Triton cache, empty store",
        "plugin-warm": "cache of an earlier start, 43 learned rows",
        "plugin-store": "empty Triton cache, 43 learned rows: a fresh container",
    }
    for kind, line in lines.items():
        for column, (what, digits) in enumerate((("ready_s", 1), ("capture_s", 2)), 1):
            rounds = of[f"added_{what}"][kind]["rounds"]
            told = [f"{s:.{digits}f}".replace("-0.0", "0.0") if digits == 1 else f"{s:.{digits}f}"
                    for s in (statistics.median(rounds), min(rounds), max(rounds))]  # fmt: skip
            assert cells(page, line)[column].startswith("{} s ({} to {})".format(*told))
        assert len(of["rounds"]) == len(of["added_ready_s"][kind]["rounds"]) == 3
    assert all(one[kind]["rows"] == 43 for one in of["rounds"] for kind in ("plugin-warm", "plugin-store"))
    for kind, told in (("stock-cold", "13.0 s with an empty cache"), ("stock-warm", "4.3 s with a full one")):
        assert f"{statistics.median(one[kind]['capture_s'] for one in of['rounds']):.1f}" == told.split()[0]
        assert told in words(page)


@pytest.mark.parametrize(("pool", "column"), [("plain", 0), ("hybrid", 1)])
def test_graphs_captured_again(pool: str, column: int) -> None:
    page, of = "docs/measured.md", recorded("recapture")[pool]
    assert all(ok for _, ok, _ in of["checks"])
    every = [ms for some in of["pauses_ms"].values() for ms in some]
    told = f"{len(every)} of {len(every)}, {min(every):.0f} to {max(every):.0f} ms each"
    assert cells(page, "all seven sizes on command, three times over")[column] == told
    own = of["graphs"]["pause_ms"].values()
    first = cells(page, "captured by the server itself, in deep idle, after rows of all seven were learned")[column]
    assert first.startswith(f"{len(own)} of {len(own)}, ")
    assert f"{min(own):.0f} to {max(own):.0f} ms" in first
    lost = [str(before - after) for before, after in zip(of["free_mib"][1:], of["free_mib"][2:], strict=False)]
    line = "device memory, by the driver: lost at the first, second and third time"
    assert cells(page, line)[column] == f"{', '.join(lost)} MiB"
    us = {(one["when"], one["M"]): one["us"] for one in of["replayed"]}
    for m, line in ((16, "kernels that graphs of M=16 replay, by SGLang's profiler, before and after"),
                    (1024, "the same for M=1024")):  # fmt: skip
        numbers = [f"{us[when, m][gemm]}" for gemm in ("up", "down") for when in ("before", "after")]
        assert re.findall(r"[\d.]+(?=(?: and [\d.]+)?(?: us|,| down|$| and))", cells(page, line)[column])[:4] == numbers


def test_the_life_of_a_miss() -> None:
    page, of = "docs/measured.md", recorded("recapture")
    stages = ("heuristic", "tuned, graphs as before", "re-captured", "restarted")
    for line, name, digits in (
        ("decode step of 16 requests, graph", "decode step, batch of 16, graph", 2),
        ("prefill of 1,024 tokens, graph", "prefill 1024, graph", 1),
        ("prefill of 3,000 tokens, eager", "prefill 3000, eager", 1),
    ):
        medians = of["plain"]["life_medians_ms"][name]
        assert cells(page, line) == [f"{medians[stage]:.{digits}f} ms" for stage in stages]
    for name, digits in (("decode step, batch of 16, graph", 2), ("prefill 3000, eager", 1)):
        *first, last = (f"{of['hybrid']['life_medians_ms'][name][stage]:.{digits}f}" for stage in stages)
        assert f"{', '.join(first)} and {last} ms" in words(page)


def test_the_soak() -> None:
    page = "docs/measured.md"
    line = "requests answered, aborted as asked, failed"
    for column, of in enumerate(recorded("soak").values()):
        counts = of["requests"]
        assert cells(page, line)[column] == f"{counts['answered']:,}, {counts['aborted']}, {len(counts['failed'])}"
        last = of["samples"][-1]
        told = cells(page, "passes over their bound; pauses of the watch over itself")[column]
        assert told.startswith(f"{last['passes_over']} of {last['slices']:,}")
        assert all(answer["given_max"] == 0 for answer in of["answers"])
        assert f"{len(of['answers'])} times" in cells(page, "answers to a fixed set of prompts, once a minute")[column]


def test_two_ranks_against_one() -> None:
    of = recorded("ranks_gpu")["two and one, third run"]
    ones, twos = (of[part]["live"].values() for part in ("one", "two"))
    page = words("docs/ranks.md")
    assert f"one GPU made {sum(one['slices'] for one in ones):,} slices" in page
    assert f"two GPUs made {sum(one['slices'] for one in twos):,}" in page
    times = of["one"]["speed_up"]["first_record_s"]
    row = cells("docs/ranks.md", "4 compile processes, without the causes of the pauses")
    assert row[:2] == [f"{times[1]} s", f"{times[0]} s"]
    assert not any(one["pauses"] for one in (*ones, *twos))
    added = recorded("ranks_gpu")["tp, one compile process a rank"]["first_token"]
    for name in ("p50", "p99"):
        told = "{value:.2f} ms ({low:.2f} to {high:.2f})".format(**added[name]["added_ms"])
        assert told in page


def test_the_procedure_of_the_tuning_script() -> None:
    of = recorded("search_gpu")["script"].values()
    told = [f"{one['hours_for_1920_at_one_M']:.2f}; {one['hours_for_1920_at_18_M']:.2f}" for one in of]
    assert cells("docs/measured_search.md", "hours at one M; at 18 M") == told
    told = [f"{one['gpu_ms_per_candidate'] * 18 * 1920 / 1e3:,.0f}" for one in of]
    assert cells("docs/measured_search.md", "GPU seconds at 18 M, if all took as long as 64") == told


def test_the_first_screen_sums_up_what_the_pages_say() -> None:
    readme, of = words("README.md"), recorded("serving")["ttft"]
    sent, met, added = of["requests"]["on"], f"{100 * of['share_met']:.0f} %", of["ttft"]["added_ms"]
    assert f"Of {sent} requests to a server that tuned all the time {met} met a running pass" in readme
    told = [f"{added['p50']['value']:.2f} ms longer in the median", f"{added['p99']['value']:.1f} ms at the 99th"]
    assert all(some in readme for some in [*told, f"{added['max']['value']:.1f} ms in the longest"])
    layers = {name: of for name, of in recorded("coverage_gpu").items() if name not in {"bf16", "ep"}}
    rows = [row for of in layers.values() for row in of["rows"].values()]
    gains = [row["learned"]["gain"] for row in rows if row["verdict"] == "faster"]
    told = f"gained {100 * min(gains):.0f} to {100 * max(gains):.0f} % at {len(gains)} of {len(rows)} token counts"
    assert told in readme
    rows = [row for part in ("tp", "ep") for row in recorded("ranks_gpu")[part]["rows"].values()]
    assert f"learned {sum(row['verdict'] == 'faster' for row in rows)} of {len(rows)} token counts" in readme
