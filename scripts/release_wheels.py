"""SGLang's wheels: downloaded once into a cache folder, held to the hashes in release_wheels.json, and unpacked."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("release_wheels.json")
_TAGS = ("--implementation", "cp", "--python-version", "312", "--abi", "cp312", "--platform", "manylinux_2_34_x86_64")


class Wheel(NamedTuple):
    """One release's wheel as it is known to be."""

    name: str
    sha256: str


class MissingError(Exception):
    """The wheel is not in the cache and cannot be downloaded; the text says why."""


class ChangedError(Exception):
    """The wheel is not the one that is known."""


def known() -> dict[str, Wheel]:
    """The wheels that were checked, by version, oldest first."""
    return {version: Wheel(**fields) for version, fields in json.loads(LIST.read_text(encoding="utf-8")).items()}


def record(wheels: dict[str, Wheel]) -> None:
    text = json.dumps({version: wheel._asdict() for version, wheel in wheels.items()}, indent=1)
    LIST.write_text(text + "\n", encoding="utf-8")


def fetch(version: str, wheel: Wheel | None, cache: Path) -> Path:
    """The wheel's file, downloaded where it is not in the cache. Without ``wheel`` whatever the index has for the
    version is taken. Raises MissingError and ChangedError."""
    found = cache / wheel.name if wheel else next(cache.glob(f"sglang-{version}-*.whl"), None)
    if found is None or not found.exists():
        found = _download(version, cache)
    if wheel is not None and (found.name, digest(found)) != wheel:
        raise ChangedError(f"{found} is not the {wheel.name} with the sha256 {wheel.sha256}: remove it and try again")
    return found


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(version: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--retries", "1", "--timeout", "10", "--only-binary", ":all:", *_TAGS, "-d", str(cache)]
    done = subprocess.run([*command, f"sglang=={version}"], capture_output=True, text=True, check=False)
    found = next(cache.glob(f"sglang-{version}-*.whl"), None)
    if done.returncode or found is None:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise MissingError(f"not in {cache}, and pip could not download it: {lines[-1]}")
    return found


def unpack(wheel: Path, folder: Path, *, everything: bool = False) -> None:
    """The Python sources and the metadata, or all of it, into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wanted = [n for n in names if everything or n.endswith((".py", "/METADATA"))]
        archive.extractall(folder, wanted)


def metadata(folder: Path) -> str:
    """The text of an unpacked wheel's METADATA."""
    (path,) = folder.glob("sglang-*.dist-info/METADATA")
    return path.read_text(encoding="utf-8")
