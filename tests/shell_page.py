"""docs/shell.md and how its examples are run: each against a made-up store of its own.

``python tests/shell_page.py`` writes what is printed today into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from click.testing import CliRunner
from made_up_store import H100, MANY, WINNER, fill, hold, live

from sglang_moe_autotune import landscape, status
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.sglang_json import encode, file_name

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent.parent / "docs" / "shell.md"
_BLOCK = re.compile(r"```console\n\$ sglang-moe-autotune (.*)\n((?s:.*?))```")
BLOCKS = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
HEADINGS = re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def furnish(folder: Path) -> None:
    """The files that the examples name, in the folder in which they are run."""
    recorded, *_ = landscape.shipped()
    shutil.copy(recorded, folder / "landscape.json.gz")
    rows = {64: WINNER.up, 512: WINNER.up}
    (folder / file_name(MANY, "NVIDIA H200")).write_text(encode(rows), encoding="utf-8")
    fill(folder / "host-2", H100)
    shipped = folder / "shipped" / "configs" / "triton_3_4_0"
    shipped.mkdir(parents=True)
    (shipped / file_name(MANY, "NVIDIA H200")).write_text(encode(rows), encoding="utf-8")


def printed(line: str, store: Path, folder: Path) -> list[str]:
    """The lines of both streams, with what differs between machines replaced by what the page says."""
    furnish(folder)
    # What SGLang ships must not decide what the page shows.
    configs = {"SGLANG_MOE_CONFIG_DIR": str(folder / "no-files")} if line.startswith(("explain", "show")) else {}
    (folder / "no-files" / "configs").mkdir(parents=True)
    with mock.patch.dict(os.environ, configs):
        output = CliRunner().invoke(main, shlex.split(line), terminal_width=80).output
    me = status.this_process()
    output = output.replace(f"pid {me.pid} on {me.host}", "pid 4711 on gpu-1")
    output = output.replace(str(folder), "/srv").replace(str(store), "~/.cache/sglang-moe-autotune")
    return [text.rstrip() for text in output.splitlines()]


def _fresh(line: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        root, folder = Path(place) / "autotune", Path(place) / "work"
        folder.mkdir()
        fill(root)
        hold(root)
        now = time.time()
        deferred = {f"{MANY.slug} 16384": "too large for free memory"}
        assert status.write(root, live(unix_s=now, since_unix_s=now - 5400, deferred=deferred))
        here = Path.cwd()
        os.chdir(folder)
        with mock.patch.dict(os.environ, {"SGLANG_MOE_AUTOTUNE_DIR": str(root), "COLUMNS": "80"}):
            yield from printed(line, root, folder)
        os.chdir(here)


def _rewritten(match: re.Match[str]) -> str:
    line = match[1]
    if line.split()[0] in {"doctor", "simulate"}:  # these differ from machine to machine
        return match[0]
    return f"```console\n$ sglang-moe-autotune {line}\n" + "".join(f"{text}\n" for text in _fresh(line)) + "```"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(_rewritten, text), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(BLOCKS)} examples\n")
