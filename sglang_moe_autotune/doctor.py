"""Is this machine fit for tuning? A row for each thing that has to hold, with its cure where it does not.

Nothing of SGLang, torch or Triton is imported: a broken installation is what the rows are for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from filelock import FileLock, Timeout

from sglang_moe_autotune import deaths, fit, kernel_source, matrix, store, switch, targets
from sglang_moe_autotune.contract import LAUNCH, NEEDED, UNSUPPORTED
from sglang_moe_autotune.errors import StoreError
from sglang_moe_autotune.matrix import Release
from sglang_moe_autotune.settings import Settings, cache_root
from sglang_moe_autotune.sglang_json import folder_name
from sglang_moe_autotune.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Health = Literal["ok", "warn", "fail", "unknown"]
"""``warn``: works, with less than one might expect. ``fail``: the server would be hurt, or nothing would be
learned. ``unknown``: cannot be told from here."""

DISTRIBUTION = "sglang-moe-autotune"
GROUP = "sglang.srt.plugins"
PLUGIN = "moe_autotune"
FIRST_SGLANG = (0, 5, 11)
"""the first release that loads plugins"""
_HERE = "run doctor with the Python that starts the server"
_DRIVER = "look at the driver: dmesg, or reinstall it"
CONFIGS = "sglang/srt/layers/moe/moe_runner/triton_utils/configs"


class Check(NamedTuple):
    """One row. ``cure`` is empty where nothing needs one."""

    name: str
    health: Health
    says: str
    cure: str = ""


def version_of(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def sglang_root() -> Path | None:
    """The folder that holds SGLang's package, found without importing it."""
    try:
        spec = importlib.util.find_spec("sglang")
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(f).parent for f in folders if (Path(f) / "srt").is_dir()), None)


def check_installed(distribution: str) -> Check:
    """The version that is installed here."""
    version = version_of(distribution)
    if version is None:
        return Check(distribution, "unknown", "not installed in this Python", _HERE)
    return Check(distribution, "ok", version)


def check_sglang(version: str | None) -> Check:
    """SGLang is installed and loads plugins."""
    if version is None:
        return Check("sglang", "fail", "not installed in this Python", _HERE)
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return Check("sglang", "unknown", f"version {version} is not X.Y.Z", "compare with docs/limits.md")
    if tuple(map(int, match.groups())) < FIRST_SGLANG:
        first = ".".join(map(str, FIRST_SGLANG))
        return Check("sglang", "fail", f"{version} loads no plugins", f"install SGLang {first} or later")
    known = [release.version for release in matrix.load().releases]
    says = version if version in known else f"{version}; {known[0]} to {known[-1]} were checked, see --matrix"
    return Check("sglang", "ok", says)


def check_plugin(names: Iterable[str], allowed: str | None) -> Check:
    """SGLang's loader sees our entry point among ``names``; ``allowed`` is the value of SGLANG_PLUGINS."""
    if PLUGIN not in names:
        says = f"no entry point {PLUGIN} in the group {GROUP}"
        return Check("plugin", "fail", says, f"pip install {DISTRIBUTION} into the server's Python")
    chosen = {part.strip() for part in (allowed or "").split(",")} - {""}
    if chosen and PLUGIN not in chosen:
        says = f"SGLANG_PLUGINS={allowed} leaves {PLUGIN} out"
        return Check("plugin", "fail", says, f"add {PLUGIN} to SGLANG_PLUGINS, or unset it")
    return Check("plugin", "ok", f"{PLUGIN} is in the group {GROUP}")


def check_hooks(root: Path | None) -> list[Check]:
    """What the plugin hooks is in the SGLang below ``root``."""
    if root is None:
        return [Check("hooks", "unknown", "no SGLang to look at", _HERE)]
    source = Source(root)
    health: dict[str, Health] = {"there": "ok", "moved": "fail", "changed": "fail", "unread": "unknown"}
    rows = []
    for target in targets.TARGETS:
        found = source.find(target)
        cure = "" if found.state == "there" else f"install a release of {DISTRIBUTION} made for this SGLang"
        rows.append(Check(f"hook {target.name.split('.')[-1]}", health[found.state], found.reason or "found", cure))
    return rows


def check_contract(root: Path | None) -> list[Check]:
    """The rest of what the plugin reads and calls is in the SGLang below ``root``; a row for each part that is not."""
    if root is None:
        return []
    parts = fit.examine(Source(root))
    cure = f"install a release of {DISTRIBUTION} made for this SGLang"
    rows = []
    for part, found in parts.items():
        if found.lacks:
            rows.append(Check(f"contract {part}", "fail" if part in NEEDED else "warn", "; ".join(found.lacks), cure))
        elif found.unread:
            rows.append(Check(f"contract {part}", "unknown", found.unread, _HERE))
    return rows or [Check("contract", "ok", f"what is read and called of SGLang is there ({len(parts)} parts)")]


def installed() -> Release | None:
    """How the SGLang of this Python stands, by its source; None where there is none."""
    root, version = sglang_root(), version_of("sglang")
    if root is None or version is None:
        return None
    source = Source(root)
    parts = fit.examine(source)
    lacks = {part: (*found.lacks, *filter(None, [found.unread])) for part, found in parts.items()}
    return Release(
        version=version,
        torch=version_of("torch") or "",
        kernel=kernel_source.kernel_hash(source, *LAUNCH),
        lacks={part: reasons for part, reasons in lacks.items() if reasons},
        ways={part: found.ways for part, found in parts.items() if found.ways},
        unsupported=UNSUPPORTED.get(version, ""),
    )


def check_triton(version: str | None, root: Path | None) -> Check:
    """Which Triton would compile, and how many of SGLang's config files are made for it."""
    if version is None:
        return Check("triton", "unknown", "not installed in this Python", _HERE)
    if root is None:
        return Check("triton", "ok", version)
    folder = root / CONFIGS / folder_name(version)
    count = sum(1 for _ in folder.glob("*.json"))
    return Check("triton", "ok", f"{version}; SGLang ships {count or 'no'} config files for it")


def check_compiler(environ: Mapping[str, str]) -> Check:
    """Triton builds its launchers with a C compiler."""
    asked = environ.get("CC", "").strip()
    for name in (asked,) if asked else ("gcc", "clang", "cc"):
        if found := shutil.which(name.split()[0], path=environ.get("PATH")):
            return Check("c compiler", "ok", found)
    says = f"CC={asked} is not a program" if asked else "neither gcc nor clang is on the PATH"
    return Check("c compiler", "warn", says, "install gcc: Triton needs one, unless every launcher is cached")


def check_gpu(program: str | None, timeout_s: float = 10.0) -> Check:
    """What ``program`` (nvidia-smi) says of the GPUs."""
    if program is None:
        return Check("gpu", "unknown", "nvidia-smi is not on the PATH", "run doctor on the server's machine")
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Check("gpu", "warn", f"nvidia-smi gave no answer in {timeout_s:g} s", _DRIVER)
    except OSError as error:
        return Check("gpu", "unknown", f"nvidia-smi did not start: {error.strerror}", _DRIVER)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        says = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return Check("gpu", "warn", f"nvidia-smi failed: {says[0]}", _DRIVER)
    kinds = [f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines)]
    return Check("gpu", "ok", "; ".join(kinds))


def gpu_names(program: str | None, timeout_s: float = 10.0) -> set[str]:
    """The names of this machine's GPUs as ``program`` (nvidia-smi) has them; none where it gives no answer."""
    if program is None:
        return set()
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return set()
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def check_cache(root: Path | None) -> list[Check]:
    """What is learned can be kept below ``root``, and its lock excludes others. Leaves nothing behind."""
    cure = "set SGLANG_MOE_AUTOTUNE_DIR to a folder that the server may write"
    if root is None:
        return [Check("cache", "warn", "there is no folder to keep anything in: memory only", cure)]
    place = next(p for p in (root, *root.parents) if os.path.lexists(p))
    says = str(root) if place == root else f"{root} (the server will make it)"
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            rows = [Check("cache", "ok", says), _lock(Path(folder))]
    except OSError as error:
        return [Check("cache", "warn", f"{root} cannot be written ({error.strerror}): memory only", cure)]
    return rows


def _lock(folder: Path) -> Check:
    cure = "move SGLANG_MOE_AUTOTUNE_DIR to a local disk; without locks writes are merged, only slower"
    first, second = FileLock(folder / "lock"), FileLock(folder / "lock")
    try:
        with first.acquire(timeout=2):
            try:
                with second.acquire(timeout=0):
                    return Check("cache lock", "warn", "the file system's locks exclude nobody", cure)
            except Timeout:
                return Check("cache lock", "ok", "file locks work there")
    except (OSError, NotImplementedError) as error:  # a Timeout is an OSError too
        return Check("cache lock", "warn", f"file locks do not work there: {error}", cure)


def check_store(root: Path | None) -> list[Check]:
    """What is stored below ``root`` can be read; a row for each file that says something is wrong."""
    try:
        files = store.environments(root) if root else []
    except StoreError as error:
        return [Check("store", "warn", str(error), "the server keeps what it learns in memory until then")]
    bad = [file for file in files if file.problems]
    records = sum(file.records for file in files)
    says = f"records: {records}, environments: {len(files)}" if files else "empty: nothing was learned yet"
    cure = "nothing is deleted: mend or remove it, or upgrade"
    rows = [Check("store", "warn", f"{file.path.name}: {file.problems[0]}", cure) for file in bad]
    return rows or [Check("store", "ok", says)]


def check_switch(root: Path | None) -> Check:
    """Nobody switched the servers on this store off."""
    level = switch.read(root)
    if level == "on":
        return Check("switch", "ok", "on")
    says = {"off": "off: no server on this store tunes, or serves what was learned", "rows": "rows: nothing is tuned"}
    return Check("switch", "warn", says[level], f"{DISTRIBUTION} on")


def check_deaths(root: Path | None) -> Check:
    """No environment has so many deaths in first launches that its servers start read-only."""
    found = deaths.read(root)
    if not found:
        return Check("deaths", "ok", "no process died in a first launch")
    last = f"{len(found)} in a first launch, the last at {found[-1].what or 'an unknown one'}"
    stopped = any(
        deaths.sentence(tuple(d for d in found if d.environment == one)) for one in {d.environment for d in found}
    )
    if not stopped:
        cure = f"after {deaths.LIMIT} servers start read-only; {DISTRIBUTION} on forgets it"
        return Check("deaths", "warn", last, cure)
    return Check("deaths", "warn", f"{last}: servers start read-only", f"report it; {DISTRIBUTION} on forgets them")


def check_config_dir(value: str | None, triton: str | None) -> Check:
    """SGLANG_MOE_CONFIG_DIR, which replaces SGLang's own config folder, holds what SGLang can read."""
    name = "SGLANG_MOE_CONFIG_DIR"
    if value is None:
        return Check(name, "ok", "not set: SGLang reads its own configs")
    configs = Path(value) / "configs"
    try:
        entries = sorted(p.name for p in configs.iterdir() if p.name.startswith("triton_"))
    except OSError as error:
        says = f"{configs} cannot be listed ({error.strerror}): SGLang raises on the first lookup that misses"
        return Check(name, "fail", says, f"unset {name}, or make that folder")
    odd = [e for e in entries if not re.fullmatch(r"\d+(_\d+)*", e.removeprefix("triton_"))]
    if odd:
        says = f"{configs / odd[0]} is not triton_ and numbers: SGLang raises on the first lookup that misses"
        return Check(name, "fail", says, "move it out of configs/")
    hides = f"{value} is set: SGLang's own configs are hidden"
    if triton is not None and folder_name(triton) not in entries:
        hides += f", and there are none for Triton {triton}"
    return Check(name, "warn", hides, f"unset {name} where the plugin runs; it answers from the store")


def check_settings(complaints: Iterable[str]) -> list[Check]:
    """A row for each value that was not understood."""
    rows = [Check("settings", "warn", says, "the default is used until it is mended") for says in complaints]
    return rows or [Check("settings", "ok", "each SGLANG_MOE_AUTOTUNE_* value is understood")]


def check_mode(mode: str) -> Check:
    """Whether the mode lets the server tune."""
    cure = "unset SGLANG_MOE_AUTOTUNE_MODE to tune"
    if mode == "off":
        return Check("mode", "warn", "off: nothing is tuned and nothing that was learned is used", cure)
    if mode == "read-only":
        return Check("mode", "warn", "read-only: what was learned is used, nothing is tuned", cure)
    if mode == "restart":
        return Check("mode", "ok", "restart: tunes now, uses it from the next start on")
    return Check("mode", "ok", mode)


def examine(environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Every row, for a server that would be started with ``environ`` in this Python. Takes a second."""
    settings, complaints = Settings.from_environ(environ)
    root = cache_root(settings, environ)
    sglang = sglang_root()
    triton = version_of("triton")
    names = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return (
        Check("python", "ok", platform.python_version()),
        check_installed(DISTRIBUTION),
        check_sglang(version_of("sglang")),
        check_plugin(names, environ.get("SGLANG_PLUGINS")),
        *check_hooks(sglang),
        *check_contract(sglang),
        check_installed("torch"),
        check_triton(triton, sglang),
        check_compiler(environ),
        check_gpu(shutil.which("nvidia-smi", path=environ.get("PATH"))),
        *check_cache(root),
        *check_store(root),
        check_switch(root),
        check_deaths(root),
        *check_settings(complaints),
        check_mode(settings.mode),
        check_config_dir(environ.get("SGLANG_MOE_CONFIG_DIR"), triton),
    )
