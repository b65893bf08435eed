"""Binaries kept in the store: compiled for sm_90 here, put into an empty cache of Triton's, and found there."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
from test_compiler import prepare
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager

from sglang_moe_autotune import binaries, compile_child, launch
from sglang_moe_autotune.binaries import Binaries

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

KEY = "nvidia-h200-triton-0-abc"
TWO = """
import triton
import triton.language as tl

@triton.jit
def add(p, VALUE: tl.constexpr):
    tl.store(p, VALUE)
"""


class Bed(NamedTuple):
    """A kernel with two compiled objects in memory, as a server that ran holds them."""

    kernel: Any
    wanted: list[launch.Binary]
    root: Path

    def store(self, **how: Any) -> Binaries:
        return Binaries(self.root, KEY, (self.kernel,), **how)

    @property
    def folder(self) -> Path:
        return self.root / binaries.FOLDER / KEY

    def files(self) -> list[Path]:
        return [self.folder / f"{one.hash}.zip" for one in self.wanted]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(binaries, "PUT_BACK_S", 60.0)  # on a busy machine two files have taken longer than at a start
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(compile_child.StubDriver(GPUTarget("cuda", 90, 32)))
    (tmp_path / "kept_kernels.py").write_text(TWO)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("kept_kernels", None)
    kernel = importlib.import_module("kept_kernels").add
    pointer = torch.empty(16, dtype=torch.int32, device="meta")
    wanted = [launch.binary_of(launch.Launch(kernel, (1,), (pointer,), {"VALUE": v}), 0) for v in (1, 2)]
    for one in wanted:
        kernel.device_caches[0][0][one.key] = launch.load(one)
    yield Bed(kernel, wanted, tmp_path / "store")
    triton.runtime.driver._active = before


@pytest.fixture
def empty_cache(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "fresh"))
    assert not any(one.on_disk() for one in bed.wanted)
    return tmp_path / "fresh"


def hits(bed: Bed) -> list[bool]:
    """Of loading each: was it in the cache?"""
    told: list[bool] = []

    def listen(**of: Any) -> None:
        told.append(of["cache_hit"])

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    try:
        for one, held in zip(bed.wanted, list(bed.kernel.device_caches[0][0].values()), strict=True):
            assert launch.load(one).kernel == held.kernel
    finally:
        triton.knobs.compilation.listener = before
    return told


def test_what_is_kept_need_not_be_compiled_in_a_fresh_container(
    bed: Bed, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache.parent / "cache"))
    assert bed.store().keep() == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache))
    caplog.set_level("INFO", "sglang.moe_autotune")
    assert bed.store().put_back() == 2
    assert "put 2 kept binaries into Triton's cache" in caplog.text
    assert hits(bed) == [True, True]
    assert bed.store().put_back() == 0  # they are there


def test_without_them_they_are_compiled(bed: Bed, empty_cache: Path) -> None:
    assert bed.store().put_back() == 0
    assert hits(bed) == [False, False]


def test_each_is_kept_once_and_its_use_is_noted(bed: Bed) -> None:
    store = bed.store()
    assert (store.keep(), store.keep()) == (2, 0)
    for path in bed.files():
        assert path.stat().st_mode & 0o777 == 0o644
        os.utime(path, (1, 1))
    assert bed.store().keep() == 0, "another process of the same server"
    assert all(path.stat().st_mtime > 1 for path in bed.files())


def test_intermediate_code_is_not_kept(bed: Bed) -> None:
    bed.store().keep()
    with zipfile.ZipFile(bed.files()[0]) as packed:
        assert sorted(packed.namelist()) == ["add.cubin", "add.json"]


def damaged(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 3] ^= 0xFF
    path.write_bytes(text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def others_may_write(path: Path) -> None:
    path.chmod(0o646)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def repacked(path: Path, change: Any) -> None:
    with zipfile.ZipFile(path) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in change(files).items():
            packed.writestr(name, data)
    path.write_bytes(text.getvalue())


def out_of_the_folder(path: Path) -> None:
    repacked(path, lambda files: {f"../{name}": data for name, data in files.items()})


def without_its_binary(path: Path) -> None:
    repacked(path, lambda files: {name: data for name, data in files.items() if name.endswith(".json")})


def with_more(path: Path) -> None:
    repacked(path, lambda files: {**files, "add.so": b"x"})


def too_large(path: Path) -> None:
    repacked(path, lambda files: {**files, "add.cubin": bytes(binaries.MOST_BYTES)})


def of_another(path: Path) -> None:
    other = next(p for p in path.parent.glob("*.zip") if p != path)
    path.write_bytes(other.read_bytes())


def without_words(path: Path) -> None:
    repacked(path, lambda files: {**files, "add.json": b"[1, 2"})


def with_a_list(path: Path) -> None:
    repacked(path, lambda files: {**files, "add.json": b"[]"})


def too_deep(path: Path) -> None:
    repacked(path, lambda files: {**files, "add.json": b"[" * 100_000})


def twice_its_metadata(path: Path) -> None:
    with zipfile.ZipFile(path) as packed:
        metadata = packed.read("add.json")
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as packed:
        packed.writestr("add.json", metadata)
        with pytest.warns(UserWarning, match="Duplicate name"):
            packed.writestr("add.json", metadata)
    path.write_bytes(text.getvalue())


def in_another_method(path: Path) -> None:
    with zipfile.ZipFile(path) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w", zipfile.ZIP_LZMA) as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    path.write_bytes(text.getvalue()[:60] + bytes(8) + text.getvalue()[68:])


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS = [
    of_another, without_words, with_a_list, a_pipe, damaged, cut, emptied, others_may_write, linked, out_of_the_folder,
    without_its_binary, with_more, too_large, too_deep, twice_its_metadata, in_another_method,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_is_not_whole_or_not_to_be_trusted_is_compiled_and_kept_again(
    bed: Bed, empty_cache: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache.parent / "cache"))
    bed.store().keep()
    fault(bed.files()[0])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache))
    assert bed.store().put_back() == 1
    assert hits(bed) == [False, True]
    assert not (empty_cache / "add.json").exists()
    assert bed.store().keep() == 1
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache / "third"))
    assert bed.store().put_back() == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_part_that_is_larger_than_it_says_takes_no_memory(tmp_path: Path, method: int) -> None:
    path, says, has_bytes = tmp_path / ("a" * 64 + ".zip"), 3000, 256 << 20
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("add.cubin", bytes(has_bytes))
    text = bytearray(path.read_bytes())
    struct.pack_into("<I", text, text.rfind(b"PK\x01\x02") + 24, says)
    path.write_bytes(text)
    path.chmod(0o644)
    tracemalloc.start()
    try:
        assert not binaries._unpacked(path)
        assert tracemalloc.get_traced_memory()[1] < has_bytes / 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", ["environment", "binaries"])
def test_a_folder_that_others_may_write_is_not_used(
    bed: Bed, empty_cache: Path, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    bed.store().keep()
    (bed.folder if level == "environment" else bed.folder.parent).chmod(0o757)
    assert bed.store().put_back() == 0
    assert "anybody may write there" in caplog.text
    assert "`chmod 755`" in caplog.text


def test_files_of_another_user_are_not_used(
    bed: Bed, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed.store().keep()
    monkeypatch.setattr(binaries.os, "geteuid", lambda: os.getuid() + 1)
    mine = binaries._distrusted
    monkeypatch.setattr(binaries, "_distrusted", lambda of: mine(_of_user(of, 4321)))
    assert bed.store().put_back() == 0
    assert "it belongs to user 4321" in caplog.text


def _of_user(of: os.stat_result, uid: int) -> Any:
    return SimpleNamespace(st_mode=of.st_mode, st_uid=uid)


def test_a_group_of_this_process_may_write_and_no_other(
    bed: Bed, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a volume is mounted for a group."""
    bed.store().keep()
    for path in (bed.folder.parent, bed.folder, *bed.files()):
        path.chmod(path.stat().st_mode | 0o020)
    monkeypatch.setattr(binaries.os, "getgroups", list)
    with monkeypatch.context() as context:
        context.setattr(binaries.os, "getegid", lambda: 4321)
        assert bed.store().put_back() == 0
    assert f"group {bed.folder.stat().st_gid} may write there" in caplog.text
    monkeypatch.setattr(binaries.os, "getegid", lambda: bed.folder.stat().st_gid)
    assert bed.store().put_back() == 2


def test_nothing_is_written_through_a_link(bed: Bed, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "outside").mkdir()
    bed.root.mkdir()
    (bed.root / binaries.FOLDER).symlink_to(tmp_path / "outside")
    assert bed.store().keep() == 0
    assert "it is a link" in caplog.text
    assert not list((tmp_path / "outside").rglob("*.zip"))


def test_a_read_only_store_is_used_and_not_written(bed: Bed, empty_cache: Path) -> None:
    assert bed.store(read_only=True).keep() == 0
    assert not bed.root.exists()
    bed.store().keep()
    assert bed.store(read_only=True).put_back() == 2


def test_a_folder_that_cannot_be_written_is_told_once(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    bed.root.write_text("no folder")
    store = bed.store()
    assert (store.keep(), store.keep()) == (0, 0)
    assert caplog.text.count("keeps no binaries") == 1


def test_a_triton_that_holds_them_another_way_is_told_once(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    for one in bed.kernel.device_caches[0][0].values():
        del one.metadata_group
    store = bed.store()
    assert (store.keep(), store.keep()) == (0, 0)
    assert caplog.text.count("keeps no binaries") == 1
    assert "metadata_group" in caplog.text


def refusal(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_one_that_root_put_there_does_not_keep_others_away(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its owner may note its use."""
    bed.store().keep()
    bed.files()[1].unlink()
    monkeypatch.setattr(binaries.os, "utime", refusal)
    assert bed.store().keep() == 1
    assert bed.files()[1].exists()


def test_a_file_system_without_modes_keeps_all(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries.Path, "chmod", refusal)
    assert bed.store().keep() == 2


def test_a_folder_in_the_place_of_one_does_not_keep_others_away(bed: Bed) -> None:
    (bed.files()[0] / "with something").mkdir(parents=True)
    bed.folder.chmod(0o755)
    store = bed.store()
    assert store.keep() == 1
    assert bed.files()[1].is_file()


def test_a_folder_that_is_removed_meanwhile_does_not_keep_others_away(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, removed = binaries.whole_file.replace, []

    def remove(path: Path, text: bytes) -> Any:
        if not removed:
            removed.append(path)
            shutil.rmtree(bed.root)
        return replace(path, text)

    monkeypatch.setattr(binaries.whole_file, "replace", remove)
    assert bed.store().keep() == 1
    assert bed.files()[1].is_file()


def test_what_a_user_put_in_the_place_of_a_kernel_is_not_kept(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's hash of it is that of the kernel, which servers without the override would find."""
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    assert bed.store().keep() == 0
    assert not bed.root.exists()


def test_one_without_its_binary_is_not_kept(bed: Bed) -> None:
    """A start would find it, refuse it, and keep it again."""
    for held in bed.kernel.device_caches[0][0].values():
        del held.metadata_group["add.cubin"]
    assert bed.store().keep() == 0
    assert not list(bed.root.rglob("*.zip"))


def test_what_was_not_loaded_is_not_kept(bed: Bed, tmp_path: Path) -> None:
    """As after a crash of the machine, which leaves files of Triton's cache empty."""
    for path in (tmp_path / "cache").rglob("add.cubin"):
        path.write_bytes(path.read_bytes()[:-8])
    assert bed.store().keep() == 0
    assert not list(bed.root.rglob("*.zip"))


def test_those_that_were_used_least_lately_go(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.folder.mkdir(parents=True)
    old = [bed.folder / f"{i:064x}.zip" for i in range(3)]
    for age, path in enumerate(old):
        path.write_bytes(b"old")
        os.utime(path, (100 - age, 100 - age))
    monkeypatch.setattr(binaries, "MOST", 3)
    bed.store().keep()
    assert sorted(bed.folder.iterdir()) == sorted([*bed.files(), old[0]])


def test_what_a_kill_left_behind_goes_after_a_while(bed: Bed) -> None:
    bed.folder.mkdir(parents=True)
    old, new = bed.folder / ".a.zip.1-2.tmp", bed.folder / ".b.zip.1-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    bed.store().keep()
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"
    os.utime(new, (1, 1))
    assert bed.store().keep() == 0
    assert not new.exists(), "a start after which all were kept already"


def test_nothing_is_removed_from_a_folder_of_others(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.store().keep()
    (bed.root / binaries.FOLDER).rename(bed.root / "mine")
    (bed.root / binaries.FOLDER).symlink_to(bed.root / "mine")
    monkeypatch.setattr(binaries, "MOST", 0)
    assert bed.store().keep() == 0
    assert all(path.exists() for path in bed.files())


def test_a_start_does_not_wait_for_long(bed: Bed, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.store().keep()
    monkeypatch.setattr(binaries, "PUT_BACK_S", -1.0)
    assert bed.store().put_back() == 0


def group_of_triton_3_6(self: Any, filename: str) -> dict[str, str] | None:
    """Raises for a damaged one, and has those files that are left."""
    path = Path(self.cache_dir) / f"__grp__{filename}"
    if not path.exists():
        return None
    paths = json.loads(path.read_text())["child_paths"]
    return {name: at for name, at in paths.items() if Path(at).exists()}


def without_a_word(group: Path) -> None:
    group.write_bytes(b"")


def with_its_binary_removed(group: Path) -> None:
    (group.parent / "add.cubin").unlink()


@pytest.mark.parametrize("damage", [without_a_word, with_its_binary_removed])
def test_an_entry_of_triton_s_that_is_damaged_is_put_back(
    bed: Bed, empty_cache: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash of the machine, or where old files of a temporary folder are removed one by one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache.parent / "cache"))
    bed.store().keep()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache))
    monkeypatch.setattr(FileCacheManager, "get_group", group_of_triton_3_6)
    assert bed.store().put_back() == 2
    for group in empty_cache.rglob("__grp__*"):
        damage(group)
    assert bed.store().put_back() == 2
    assert hits(bed) == [True, True]


def test_a_cache_that_fails_does_not_end_a_start(
    bed: Bed, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed.store().keep()

    def fails(_: str) -> Any:
        raise RuntimeError("Could not create or locate cache dir")

    monkeypatch.setattr(binaries, "get_cache_manager", fails)
    assert bed.store().put_back() == 0
    assert "could not use the binaries" in caplog.text


@pytest.mark.parametrize("place", ["store", "fresh"])
def test_a_file_in_a_folder_s_place_takes_one_line(
    bed: Bed, empty_cache: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the store's folder and of Triton's."""
    bed.store().keep()
    shutil.rmtree(bed.root.with_name(place))
    bed.root.with_name(place).write_text("no folder")
    assert bed.store().put_back() == 0
    (told,) = caplog.records
    assert "could not use the binaries" in told.message
    assert not told.exc_info


def test_without_a_folder_nothing_is_kept(bed: Bed) -> None:
    nowhere = Binaries(None, KEY, (bed.kernel,))
    assert (nowhere.keep(), nowhere.put_back()) == (0, 0)


def test_what_triton_s_cache_has_lost_meanwhile_is_not_kept(bed: Bed, tmp_path: Path) -> None:
    for path in (tmp_path / "cache").rglob("add.cubin"):
        path.unlink()
    assert bed.store().keep() == 0
    assert not list(bed.root.rglob("*.zip"))


def kept_of_sglang(folder: str) -> list[object]:
    import builtins  # noqa: PLC0415 - this runs in the other process
    from pathlib import Path  # noqa: PLC0415

    from sglang_moe_autotune import launch, releases  # noqa: PLC0415
    from sglang_moe_autotune.binaries import Binaries  # noqa: PLC0415

    record = builtins.record_launch  # type: ignore[attr-defined]
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_stages": 2}
    kernels = launch.LaunchRecorder(releases.invoke_function()).kernels
    wanted = record(config, 16)
    kernel = next(kernel for kernel in kernels if kernel is wanted.source.fn)
    kernel.device_caches[0][0]["served"] = launch.load(wanted)
    kept = Binaries(Path(folder), "environment", kernels).keep()
    entry = Path(launch.get_cache_manager(wanted.hash).cache_dir)
    for path in entry.iterdir():
        path.unlink()
    gone = wanted.on_disk()
    put = Binaries(Path(folder), "environment", kernels).put_back()
    return [kept, gone, put, wanted.on_disk(), sorted(path.suffix for path in entry.iterdir()),
            Binaries(Path(folder), "environment", kernels).put_back()]  # fmt: skip


@pytest.mark.sglang
def test_those_of_sglang_s_own_kernels_are_kept(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    scheduler.run(prepare)
    assert scheduler.run(kept_of_sglang, str(tmp_path)) == [1, False, 1, True, [".cubin", ".json", ".json"], 0]
