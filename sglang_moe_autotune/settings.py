"""What a user can set: environment variables ``SGLANG_MOE_AUTOTUNE_*``, read once into one frozen value."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import platformdirs

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "SGLANG_MOE_AUTOTUNE_"

Mode = Literal["miss", "all", "read-only", "restart", "off"]
RecaptureMode = Literal["idle", "restart", "off"]


class Setting(NamedTuple):
    """One environment variable: ``PREFIX + name``, and the field ``name.lower()`` of ``Settings``."""

    name: str
    unit: str
    low: float
    high: float
    meaning: str


NUMBERS = (
    Setting("BUDGET_S", "GPU seconds per hour", 0, 3600, "cap on the GPU time spent on tuning"),
    Setting("SLICE_US", "microseconds", 50, 1000, "target length of one slice, which a request may wait for"),
    Setting("GRACE_S", "seconds", 0, 3600, "time after the last user's request before tuning starts"),
    Setting("DEEP_IDLE_S", "seconds", 0, 86400, "time without user requests before longer launches may run"),
    Setting("RESERVE_MB", "MiB", 0, 1 << 20, "free device memory that tuning never touches"),
    Setting("COMPILE_PROCESSES", "processes", 1, 64, "niced side processes that compile candidates"),
    Setting("MIN_GAIN_PERCENT", "percent", 0, 90, "gain that a config must show before it is served"),
    Setting("MAX_M", "tokens", 1, 1 << 20, "largest M that is tuned"),
    Setting("STARTUP_S", "seconds", 0, 86400, "time that a start may spend on tuning before its graphs are captured"),
    Setting("SEED", "", 0, (1 << 32) - 1, "seed of the search"),
)
"""The settings that are numbers, whole where the default is whole."""

_CHOICES = get_args(Mode)
_SWITCH = {False: "off", True: "on"}
_RECAPTURE = get_args(RecaptureMode)
_NAMES = ("MODE", "DIR", "BIT_EQUAL", "RECAPTURE", *(n.name for n in NUMBERS))
_UNSET = {"DIR": "the usual cache folder", "RECAPTURE": "the default, idle where it was shown and else restart,"}
"""what is used where a setting has no one default"""


class Settings(msgspec.Struct, frozen=True):
    """All settings with their defaults; units in the names, ``dir`` absolute or None.

    recapture: None for ``idle`` where that was shown on a GPU, and ``restart`` elsewhere.
    """

    mode: Mode = "miss"
    dir: Path | None = None
    bit_equal: bool = False
    recapture: RecaptureMode | None = None
    budget_s: float = 600.0
    slice_us: float = 500.0
    grace_s: float = 0.05
    deep_idle_s: float = 10.0
    reserve_mb: int = 1024
    compile_processes: int = 1
    min_gain_percent: float = 1.0
    max_m: int = 16384
    startup_s: float = 0.0
    seed: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> tuple[Settings, tuple[str, ...]]:
        """The settings, and one sentence for each bad value (whose default is used) or unknown name."""
        values: dict[str, Any] = {}
        warnings = [_unknown(name) for name in sorted(environ) if _is_unknown(name)]
        choices = (("MODE", _mode), ("DIR", _dir), ("BIT_EQUAL", _switch), ("RECAPTURE", _recapture))
        for name, parse in choices:
            if text := environ.get(PREFIX + name, "").strip():
                _take(values, warnings, name, parse(text))
        for number in NUMBERS:
            if text := environ.get(PREFIX + number.name, "").strip():
                whole = isinstance(cls.default(number.name), int)
                _take(values, warnings, number.name, _number(number, text, whole=whole))
        return cls(**values), tuple(warnings)

    @classmethod
    def default(cls, name: str) -> str | float | int | None:
        """The default of the setting ``PREFIX + name``."""
        value: str | float | int | None = getattr(cls(), name.lower())
        return value


class _Bad(NamedTuple):
    rule: str
    text: str


def _take(values: dict[str, Any], warnings: list[str], name: str, value: object) -> None:
    if isinstance(value, _Bad):
        default = Settings.default(name)
        shown = f"{default:g}" if isinstance(default, (int, float)) else default
        shown = _SWITCH[default] if isinstance(default, bool) else shown
        used = _UNSET[name] if shown is None else f"the default {shown}"
        warnings.append(f"{PREFIX}{name} must be {value.rule}, not {value.text!r}; {used} is used.")
    else:
        values[name.lower()] = value


def _mode(text: str) -> str | _Bad:
    return _choice(text, _CHOICES)


def _recapture(text: str) -> str | _Bad:
    return _choice(text, _RECAPTURE)


def _choice(text: str, choices: tuple[str, ...]) -> str | _Bad:
    chosen = text.lower()  # somebody who writes OFF must not get the default
    return chosen if chosen in choices else _Bad(f"one of {', '.join(choices)}", text)


def _switch(text: str) -> bool | _Bad:
    known = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}
    value = known.get(text.lower())
    return _Bad("on or off", text) if value is None else value


def _dir(text: str) -> Path | _Bad:
    if "\0" in text:
        return _Bad("a folder's path", text)
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError):
        # `~` where neither HOME nor the user database names a home, or a working directory that is gone
        return _Bad("a folder that can be resolved (write it in full, from /)", text)


def _number(setting: Setting, text: str, *, whole: bool) -> float | _Bad:
    kind = "a whole number" if whole else "a number"
    bad = _Bad(f"{kind} from {setting.low:.0f} to {setting.high:.0f}", text)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return bad
    return value if math.isfinite(value) and setting.low <= value <= setting.high else bad


def _is_unknown(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) not in _NAMES


def _unknown(name: str) -> str:
    typed = name.removeprefix(PREFIX).upper()
    longer = [known for known in _NAMES if typed.startswith(known)]
    nearest = longer or difflib.get_close_matches(typed, _NAMES, n=1, cutoff=0.0)
    hint = PREFIX + nearest[0] if nearest else PREFIX + _NAMES[0]
    return f"{name} is not a setting and is ignored; the nearest name is {hint}."


def cache_root(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    """The folder of the store, or None where no place can be named (then records live in memory only).

    ``DIR``, else ``$SGLANG_CACHE_DIR/moe_autotune``, else the user's cache folder, for which platformdirs
    asks the process's own environment. Never raises and touches no disk.
    """
    if settings.dir is not None:
        return settings.dir
    try:
        if sglang_cache := environ.get("SGLANG_CACHE_DIR", "").strip():
            return Path(sglang_cache).expanduser().absolute() / "moe_autotune"
        path = platformdirs.user_cache_path("sglang-moe-autotune", appauthor=False)
    except (RuntimeError, KeyError, OSError):
        return None  # no home: HOME unset and no passwd entry for this user id
    # HOME=/ (an arbitrary user id in a container) gives /.cache, and some platformdirs give a bare "~":
    # neither is this user's.
    homeless = not path.is_absolute() or path.parts[1:2] == (".cache",)
    return None if homeless else path
