"""A page is there after any kill; where it could make its process wait or die, there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_moe_autotune import page

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent.parent
FILL = """
import sys
from sglang_moe_autotune import page
own = page.make()
print(own is not None and own.name, flush=True)
if own is not None:
    own.set(7)
"""


@pytest.fixture
def own() -> Iterator[page.Page]:
    made = page.make()
    if made is None:
        pytest.skip(f"{page.PLACE} is no memory file system here")
    yield made
    page.remove(made.name)


def test_what_was_set_is_read_until_it_is_removed(own: page.Page) -> None:
    assert page.read(own.name) == 0
    for number in (1, 2**40, 0, 3):
        own.set(number)
        assert page.read(own.name) == number
    page.remove(own.name)
    assert page.read(own.name) is None
    own.set(4)  # its process goes on


def test_the_page_of_a_process_that_lived_for_days_outlives_it(own: page.Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may start, and sweep, before the next start asks what ran."""
    path = Path(page.PLACE) / f"sglang-moe-autotune-{os.geteuid()}" / own.name
    monkeypatch.setattr(page.status, "start_time", lambda _: None)  # all are gone
    for touched in (True, False):
        os.utime(path, (time.time() - 3 * page._KEPT_S,) * 2)
        if touched:
            own.touch()
        page._sweep(path.parent)
        assert (page.read(own.name) is not None) == touched
    own.touch()


@pytest.mark.usefixtures("own")
def test_a_killed_process_leaves_its_page() -> None:
    code = FILL + "import os\nos.kill(os.getpid(), 9)\n"
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    name = done.stdout.strip()
    assert page.read(name) == 7
    page.remove(name)


@pytest.mark.parametrize("name", ["", "../x.page", "/etc/passwd", "1-1-1-abc.page", "1-1-1-0123456789ab.page\n"])
def test_a_name_that_somebody_else_wrote_opens_nothing(name: str) -> None:
    assert page.read(name) is None
    page.remove(name)


def test_a_place_on_a_disk_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into a mapped file waits for a network that is down, and is a SIGBUS on a full disk."""
    monkeypatch.setattr(page, "PLACE", tmp_path)
    assert page.make() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["link", "writable", "file"])
def test_a_folder_that_somebody_else_made_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(page, "PLACE", tmp_path)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"25 24 0:23 / {tmp_path} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(page, "_MOUNTS", mounts)
    folder = tmp_path / f"sglang-moe-autotune-{os.geteuid()}"
    if place == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif place == "file":
        folder.write_bytes(b"")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert page.make() is None
    folder.unlink() if place != "writable" else folder.rmdir()
    assert page.make() is not None


FULL = f"""
mount -t tmpfs -o size=16k tmpfs /dev/shm || exit 9
dd if=/dev/zero of=/dev/shm/fill bs=4k count=100 2>/dev/null
{sys.executable} -c "$0"
"""


def test_a_full_memory_file_system_gives_no_page_and_no_signal() -> None:
    """ftruncate would leave a hole there, and the first store into it end the process."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = ["unshare", "-rm", "bash", "-c", FULL, FILL]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode in {1, 9}:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert (done.returncode, done.stdout.strip()) == (0, "False")
