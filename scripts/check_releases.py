"""Hold SGLang's releases against what this package counts on, and say how each stands.

Each wheel is downloaded once (no dependencies), held to its hash, and read: hook targets, signatures, fields, runners
and requests in its source, and its config lookup by call. With --load the whole SGLang is imported with the plugin in
it, where that works on this machine. Exit code 0 only if every release fits, but for
what it is known to lack, or is stated as unsupported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import release_calls  # noqa: E402 - beside this file
import release_wheels  # noqa: E402 - as above
import scheduler_process  # noqa: E402 - in tests
from release_wheels import ChangedError, MissingError, Wheel  # noqa: E402 - as above

from sglang_moe_autotune import fit, kernel_source, matrix  # noqa: E402 - what is checked
from sglang_moe_autotune.contract import LAUNCH, UNSUPPORTED, WITHOUT  # noqa: E402 - as above
from sglang_moe_autotune.doctor import FIRST_SGLANG  # noqa: E402 - as above
from sglang_moe_autotune.matrix import Matrix, Release  # noqa: E402 - as above
from sglang_moe_autotune.source import Source, UnreadError  # noqa: E402 - as above

PAGE = ROOT / "docs" / "coverage.md"
BEGIN, END = "<!-- releases: made by scripts/check_releases -->\n", "<!-- end of releases -->\n"


def order(version: str) -> tuple[int, ...]:
    """0.5.12 < 0.5.12.post1 < 0.5.13"""
    return tuple(map(int, version.replace(".post", ".").split(".")))


def listed() -> list[str]:
    """Every release on the package index that loads plugins, oldest first. Raises MissingError."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--retries", "1", "--timeout", "10", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise MissingError((done.stderr.strip().splitlines() or ["pip says nothing"])[-1])
    plain = [v for v in found[1].split(", ") if re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", v)]
    return sorted((v for v in plain if order(v) >= FIRST_SGLANG), key=order)


def check(version: str, path: Path, *, load: bool) -> Release:
    """One release, from its wheel."""
    with tempfile.TemporaryDirectory(prefix="check-releases-") as folder:
        root = Path(folder) / "sglang"
        release_wheels.unpack(path, root, everything=load)
        source = Source(root)
        parts = fit.examine(source)
        torch = re.search(r"^Requires-Dist: torch==([\w.+]+)", release_wheels.metadata(root), re.MULTILINE)
        try:
            calls = tuple(release_calls.wrong(root))
        except Exception as error:  # noqa: BLE001 - whatever a release raises is what is wrong with it
            calls = (f"{type(error).__name__}: {error}",)
        try:
            kernel = kernel_source.kernel_hash(source, *LAUNCH)
        except UnreadError:
            kernel = ""
        return Release(
            version=version,
            torch=torch[1] if torch else "",
            kernel=kernel,
            lacks={part: (*p.lacks, *filter(None, [p.unread])) for part, p in parts.items() if p.lacks or p.unread},
            ways={part: p.ways for part, p in parts.items() if p.ways},
            calls=calls,
            loaded=loads(root, Path(folder) / "process", kernel) if load else None,
            unsupported=UNSUPPORTED.get(version, ""),
        )


def loads(root: Path, folder: Path, kernel: str) -> str:
    """Import the whole release with the plugin, as its scheduler process does; "" or what went wrong."""
    folder.mkdir()
    path = os.pathsep.join(map(str, (ROOT / "scripts" / "release_site", root, ROOT, ROOT / "tests")))
    process = scheduler_process.SchedulerProcess(folder, {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"})
    try:
        told = process.run(hooked)
    except AssertionError as error:
        lines = str(error).partition("\n--- the end of its log")[0].strip().splitlines()
        return lines[-1] if lines else "the process ended"
    finally:
        process.close()
    missing = [name for name, there in told.pop("hooks").items() if not there]
    if missing:
        return f"not hooked: {', '.join(missing)}"
    expected = {"kernel": kernel, "broken": [], "deterministic": False, "shape": True, "learned": True, "stock": True}
    expected |= {"launches": [["fused_moe_kernel", 32]] * 2}
    return "; ".join(f"{name} is {told[name]!r}, not {v!r}" for name, v in expected.items() if told[name] != v)


def hooked() -> dict[str, object]:
    """Runs in the scheduler process of the release: the plugin's own ways through it, as far as a CPU goes."""
    import torch  # noqa: PLC0415 - in the other process, as all below

    from sglang_moe_autotune import layers, plugin, releases, stand_in  # noqa: PLC0415
    from sglang_moe_autotune.launch import LaunchRecorder  # noqa: PLC0415
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape  # noqa: PLC0415

    serving = plugin.serving()
    releases.publish_server_args()
    config, fused = releases.config_module(), releases.fused_module()
    config.get_device_name = lambda *_: "NVIDIA H200"
    shape, m, top_k = MoeShape((8, 512, 512), (8, 512, 256), 2), 16, 2
    (layer,) = stand_in.build(shape, 1, "cpu")
    quant = layers.quant_info(layer.module)
    row = KernelConfig(32, 64, 64, 8, 4, 3)
    call = (shape.w1_shape, shape.w2_shape, top_k, shape.dtype)
    serving.lookup.publish([(layer.key, m, ConfigPair(row, row))])
    answers = [fused.try_get_optimal_moe_config(*call, n, return_down_config=True) for n in (m, m + 1)]
    stock = [releases.stock_lookup()(*call, n, return_down_config=True) for n in (m, m + 1)]
    recorder = LaunchRecorder(releases.invoke_function())
    rest = (torch.ones(m, top_k), torch.zeros(m, top_k, dtype=torch.int32))
    order = [torch.zeros(64, dtype=torch.int32)] * 3
    launches = []
    for gemm, a, c in (("up", (m, 512), (m * top_k, 512)), ("down", (m * top_k, 256), (m, top_k, 512))):
        data = [torch.zeros(size, dtype=torch.bfloat16) for size in (a, c)]
        args, named = layers.gemm_call(gemm, layer, quant, layers.Buffers(*data, *rest, *order), top_k, row.to_dict())  # type: ignore[arg-type]
        launch = recorder.record(*args, **{k: v for k, v in named.items() if k in recorder.parameters})
        launches.append([launch.kernel.__name__, launch.kwargs["BLOCK_SIZE_M"]])
    return {
        "hooks": plugin.hooks_in_place(),
        "kernel": releases.kernel_hash(releases.invoke_function()),
        "deterministic": releases.deterministic(),
        "shape": layer.shape(layer.key) == shape and releases.padding() == 0 and releases.origin(shape) == "miss",
        "learned": answers[0] == (row.to_dict(), (row.to_dict(), 32)) and answers[0] != stock[0],
        "stock": answers[1] == stock[1],
        "launches": launches,
        "broken": [fence.name for fence in plugin._FENCES.values() if fence.broken],
    }


def write(found: list[Release], wheels: dict[str, Wheel]) -> None:
    """Keep what was found: the hashes, the table that the package ships, and the page."""
    release_wheels.record({release.version: wheels[release.version] for release in found})
    table = Matrix(tuple(found))
    matrix.PATH.write_bytes(matrix.encode(table))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + matrix.markdown(table) + END + rest.partition(END)[2], encoding="utf-8")


def show(found: list[Release], skipped: dict[str, str]) -> None:
    table = [matrix.HEADINGS, *matrix.rows(Matrix(tuple(found)))]
    widths = [max(len(row[column]) for row in table) for column in range(len(matrix.HEADINGS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for release in found:
        for part, reasons in release.lacks.items():
            print(f"{release.version}: {part}: {'; '.join(reasons)}")
        for reason in release.calls or ():
            print(f"{release.version}: called: {reason}")
        if release.loaded:
            print(f"{release.version}: loaded: {release.loaded}")
        if release.unsupported:
            print(f"{release.version}: not supported: {release.unsupported}")
    for version, why in skipped.items():
        print(f"{version}: skipped: {why}", file=sys.stderr)


def _is_known(release: Release) -> bool:
    return not release.calls and all(release.version in WITHOUT.get(part, ()) for part in release.lacks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="check_releases", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="these releases; otherwise all that are known")
    parser.add_argument("--load", action="store_true", help="also import each with the plugin (15 s, 1 GB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--record", action="store_true", help="check all of the index; write hashes and tables")
    parser.add_argument("--skip-missing", action="store_true", help="a missing wheel is no failure, unless all are")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("SGLANG_MOE_AUTOTUNE_RELEASES") or ROOT / ".venv-cache" / "releases")
    known = release_wheels.known() if release_wheels.LIST.exists() else {}
    versions = arguments.only or (listed() if arguments.record else sorted(known, key=order))
    found, skipped, wheels = [], {}, {}
    for version in versions:
        try:
            path = release_wheels.fetch(version, known.get(version), cache)
        except MissingError as error:
            skipped[version] = str(error)
            continue
        except ChangedError as error:
            print(error, file=sys.stderr)
            return 1
        wheels[version] = Wheel(path.name, release_wheels.digest(path))
        found.append(check(version, path, load=arguments.load))
    if not found:
        print(
            f"nothing was checked: no wheel of {', '.join(versions) or 'any release'} is in {cache}, and none could be"
            " downloaded; put one there, or run this where a package index is reachable",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps({"releases": msgspec.to_builtins(found), "skipped": skipped}, indent=1))
    else:
        show(found, skipped)
    if arguments.record and not arguments.only and not skipped:
        write(found, wheels)
    unfit = [release for release in found if release.state in {"less", "aside"} and not _is_known(release)]
    return 1 if not found or unfit or (skipped and not arguments.skip_missing) else 0


if __name__ == "__main__":
    sys.exit(main())
