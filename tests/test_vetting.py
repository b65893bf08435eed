"""What was found to fit is not parsed again, and nothing else is taken to fit."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from sglang_moe_autotune import fit, vetting
from sglang_moe_autotune.contract import NEEDED
from sglang_moe_autotune.fit import PartFit
from sglang_moe_autotune.source import Source, UnreadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARTS = NEEDED[:2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two modules, one of them a package, and room for a third one that is looked for."""
    root = tmp_path / "source"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("A = 1\n")
    (root / "one.py").write_text("B = 2\n")
    return root


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for ``fit.examine``: reads three modules, and says what it is told to. ``calls`` counts."""

    def fake(source: Source, parts: tuple[Any, ...]) -> dict[Any, PartFit]:
        fake.calls += 1  # type: ignore[attr-defined]
        for module in ("pkg", "one", "two"):
            with contextlib.suppress(UnreadError):  # as ``fit`` does, and says so
                source.tree(module)
        return dict.fromkeys(parts, fake.found)  # type: ignore[attr-defined]

    fake.calls, fake.found = 0, PartFit()  # type: ignore[attr-defined]
    monkeypatch.setattr(fit, "examine", fake)
    return fake


def lacks(store: Path | None, sources: Path, **how: Any) -> list[str]:
    return vetting.lacks(store, Source(sources), PARTS, **how)


def test_what_fits_is_examined_once(tmp_path: Path, sources: Path, examine: Any) -> None:
    assert [lacks(tmp_path / "store", sources) for _ in range(3)] == [[], [], []]
    assert examine.calls == 1


def changed(root: Path) -> None:
    (root / "one.py").write_text("B = 3\n")


def gone(root: Path) -> None:
    (root / "one.py").unlink()


def appeared(root: Path) -> None:
    (root / "two.py").write_text("")


def a_package_now(root: Path) -> None:
    (root / "one").mkdir()
    (root / "one" / "__init__.py").write_text("")


def unreadable(root: Path) -> None:
    (root / "one.py").unlink()
    (root / "one.py").mkdir()


@pytest.mark.parametrize("change", [changed, gone, appeared, a_package_now, unreadable])
def test_another_source_is_examined_again(
    tmp_path: Path, sources: Path, examine: Any, change: Callable[[Path], None]
) -> None:
    lacks(tmp_path / "store", sources)
    change(sources)
    examine.found = PartFit(("it is gone",))
    assert lacks(tmp_path / "store", sources) == ["it is gone"] * len(PARTS)
    assert examine.calls == 2


@pytest.mark.parametrize("found", [PartFit(("it is gone",)), PartFit((), (), "a file cannot be read")])
def test_only_what_fits_is_kept(tmp_path: Path, sources: Path, examine: Any, found: PartFit) -> None:
    examine.found = found
    for _ in range(2):
        assert lacks(tmp_path / "store", sources) == list(found.lacks) * len(PARTS)
    assert examine.calls == 2
    assert not list(tmp_path.glob("store/**/*.json"))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"modules": {}}', b'{"modules": {"one": 5}}', b"\xff\xfe", b'{"modules": {"pkg": "0"}}'],
)
def test_a_file_that_says_something_else_is_written_anew(
    tmp_path: Path, sources: Path, examine: Any, text: bytes
) -> None:
    lacks(tmp_path / "store", sources)
    (kept,) = tmp_path.glob("store/**/*.json")
    whole = kept.read_bytes()
    kept.write_bytes(text)
    assert lacks(tmp_path / "store", sources) == []
    assert examine.calls == 2
    assert kept.read_bytes() == whole


def test_a_link_or_a_pipe_in_its_place_is_not_followed(tmp_path: Path, sources: Path, examine: Any) -> None:
    lacks(tmp_path / "store", sources)
    (kept,) = tmp_path.glob("store/**/*.json")
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    lacks(tmp_path / "store", sources)
    kept.unlink()
    os.mkfifo(kept)
    lacks(tmp_path / "store", sources)
    assert examine.calls == 3


@pytest.mark.parametrize("where", ["nowhere", "read only", "a file"])
def test_without_a_folder_to_write_it_is_examined_each_time(
    tmp_path: Path, sources: Path, examine: Any, where: str
) -> None:
    store = None if where == "nowhere" else tmp_path / "store"
    if where == "a file" and store is not None:
        store.write_text("")
    for _ in range(2):
        assert lacks(store, sources, keep=where != "read only") == []
    assert examine.calls == 2
    assert where == "a file" or not (tmp_path / "store").exists()


def test_other_rules_and_another_release_ask_again(
    tmp_path: Path, sources: Path, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    lacks(store, sources)
    vetting.lacks(store, Source(sources), NEEDED[:1])
    assert examine.calls == 2
    monkeypatch.setattr(vetting.importlib.metadata, "version", lambda _: "0.0.1")
    lacks(store, sources)
    assert examine.calls == 3
    monkeypatch.setattr(vetting, "_RULES", vetting._RULES[:-1])
    lacks(store, sources)
    assert examine.calls == 4
    monkeypatch.setattr(vetting.sys, "version_info", (3, 99, 0))
    lacks(store, sources)
    assert examine.calls == 5


def test_all_modules_that_the_rules_are_in_count() -> None:
    """What ``fit`` and the contract import of this package, and they themselves."""
    import ast  # noqa: PLC0415 - for this one test
    from pathlib import Path  # noqa: PLC0415

    folder, seen, left = Path(vetting.__file__).parent, set[str](), ["fit"]
    while left:
        name = left.pop()
        if name in seen or not (folder / f"{name}.py").exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_moe_autotune."):
                left.append((node.module or "").rpartition(".")[2])
    assert {f"{name}.py" for name in seen} == set(vetting._RULES)


@pytest.mark.sglang
def test_the_sglang_here_is_vetted_by_what_was_read_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = pytest.importorskip("sglang")
    from pathlib import Path  # noqa: PLC0415 - for the type checker only, above

    root = Path(next(iter(sglang.__path__))).parent
    assert vetting.lacks(tmp_path, Source(root), NEEDED) == []
    monkeypatch.setattr(fit, "examine", lambda *_: pytest.fail("examined again"))
    source = Source(root)
    assert vetting.lacks(tmp_path, source, NEEDED) == []
    assert "sglang.srt.managers.scheduler" in source.read
    assert len(source.read) > 20
