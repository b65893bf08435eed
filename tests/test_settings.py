"""Settings: a bad value is one sentence and the default, and docs/settings.md says what the code does."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

import pytest

from sglang_moe_autotune import settings as module
from sglang_moe_autotune.settings import NUMBERS, PREFIX, Settings, cache_root

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def _read(**values: str) -> tuple[Settings, tuple[str, ...]]:
    return Settings.from_environ({"PATH": "/bin", **{PREFIX + name: text for name, text in values.items()}})


@pytest.mark.parametrize("text", ["", "  "], ids=["empty", "blank"])
def test_nothing_set_is_the_defaults_without_a_warning(text: str) -> None:
    assert _read() == (Settings(), ())
    assert _read(**{name.upper(): text for name in Settings.__struct_fields__}) == (Settings(), ())


def test_a_mode_in_capitals_is_meant() -> None:
    assert _read(MODE="OFF") == (Settings(mode="off"), ())


def test_every_setting_is_read() -> None:
    texts = {"MODE": "read-only", "DIR": "/data/moe", "BIT_EQUAL": "On", "RECAPTURE": "Idle"}
    texts |= {n.name: f"{max(n.low, 1):.0f}" for n in NUMBERS}
    found, warnings = _read(**texts)
    assert warnings == ()
    assert len(texts) == len(Settings.__struct_fields__)
    assert found == Settings(
        "read-only", Path("/data/moe"), True, "idle", 1.0, 50.0, 1.0, 1.0, 1, 1, 1.0, 1, 1.0, 1
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("MODE", "on", id="unknown mode"),
        pytest.param("MODE", "read_only", id="nearly a mode"),
        pytest.param("BIT_EQUAL", "strict", id="neither on nor off"),
        pytest.param("DIR", "a\0b", id="folder with a zero byte"),
        pytest.param("DIR", "~nobody-of-this-name/x", id="unknown user's home"),
        pytest.param("RECAPTURE", "now", id="unknown choice"),
        pytest.param("SLICE_US", "49", id="below the bounds"),
        pytest.param("SLICE_US", "2001", id="above the bounds"),
        pytest.param("BUDGET_S", "ten", id="words"),
        pytest.param("BUDGET_S", "nan", id="nan"),
        pytest.param("GRACE_S", "inf", id="infinite"),
        pytest.param("GRACE_S", "-0.1", id="negative"),
        pytest.param("RESERVE_MB", "1.5", id="a fraction where a whole number belongs"),
        pytest.param("SEED", "9" * 5000, id="beyond all bounds"),
        pytest.param("MAX_M", "0x10", id="hexadecimal"),
        pytest.param("COMPILE_PROCESSES", "0", id="no process"),
    ],
)
def test_a_bad_value_is_one_sentence_and_the_default(name: str, text: str) -> None:
    found, warnings = _read(**{name: text, "MIN_GAIN_PERCENT": "2.5"})
    assert found == Settings(min_gain_percent=2.5)
    [sentence] = warnings
    assert sentence.startswith(f"{PREFIX}{name} must be ")
    assert repr(text) in sentence
    assert "default" in sentence or "usual" in sentence


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("BUGDET_S", "BUDGET_S"), ("mode", "MODE"), ("DIRECTORY", "DIR"), ("", "")],
    ids=["typo", "small letters", "synonym", "no name"],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    found, [sentence] = _read(**{name: "1"})
    assert found == Settings()
    assert PREFIX + name + " is not a setting" in sentence
    assert re.search(rf"{PREFIX}{nearest or '[A-Z_]+'}\.$", sentence)


def test_the_page_lists_every_setting_as_it_is() -> None:
    rows = [
        re.split(r" *\| *", line.strip("| "))
        for line in PAGE.read_text().splitlines()
        if PREFIX in line and "|" in line
    ]
    page = {name.strip("`"): (default.strip("`"), unit) for name, default, unit, *_ in rows}
    code = {PREFIX + n.name: (f"{Settings.default(n.name):g}", n.unit) for n in NUMBERS}
    code[PREFIX + "MODE"] = (Settings().mode, ", ".join(module._CHOICES))
    code[PREFIX + "BIT_EQUAL"] = ("off", "on, off")
    code[PREFIX + "DIR"] = ("unset", "folder")
    code[PREFIX + "RECAPTURE"] = ("unset", ", ".join(module._RECAPTURE))
    assert page == code
    text = PAGE.read_text()
    assert all(n.meaning in text for n in NUMBERS)
    assert all(f"\n- `{choice}`: " in text for choice in (*module._CHOICES, *module._RECAPTURE))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("XDG_CACHE_HOME", "SGLANG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_folder_is_dir_then_sglangs_cache_then_the_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root(Settings(), os.environ) == home / ".cache" / "sglang-moe-autotune"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert cache_root(Settings(), os.environ) == Path("/x/cache/sglang-moe-autotune")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "~/sglang")
    assert cache_root(Settings(), os.environ) == home / "sglang" / "moe_autotune"
    assert cache_root(_read(DIR="~/mine")[0], os.environ) == home / "mine"


@pytest.mark.parametrize("value", [None, "/", ""], ids=["unset", "the root folder", "empty"])
def test_c11_no_home_is_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """As in a container with a user id that no passwd entry names."""

    def no_entry(_: object) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(pwd, "getpwnam", no_entry)
    if value is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", value)
    assert cache_root(Settings(), os.environ) is None
    assert cache_root(Settings(), {**os.environ, "SGLANG_CACHE_DIR": "/c"}) == Path("/c/moe_autotune")
    assert cache_root(_read(DIR="/d")[0], os.environ) == Path("/d")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root(Settings(), os.environ) == Path("/x/sglang-moe-autotune")
