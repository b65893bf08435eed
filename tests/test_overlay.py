"""Under BIT_EQUAL a learned row needs its proof; a pin is the user's own word."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from made_up_store import H200, HEURISTIC, MANY, WINNER, record

from sglang_moe_autotune import releases
from sglang_moe_autotune.bench import Comparison
from sglang_moe_autotune.config_folder import StockAnswer
from sglang_moe_autotune.decision import Estimate
from sglang_moe_autotune.device import Device
from sglang_moe_autotune.explain import Files, Manner, kept_back
from sglang_moe_autotune.held import Candidate, Held
from sglang_moe_autotune.outcome import Outcome
from sglang_moe_autotune.overlay import Overlay
from sglang_moe_autotune.records import Contents, ShapeNote
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Environment, Evidence, Origin, Record
    from sglang_moe_autotune.settings import Mode

SMALL = msgspec.structs.replace(
    H200, device_name="AMD Instinct MI355X", capability=(9, 5), shared_memory_bytes=163_840
)


DEADLY = Held(Candidate("here", MANY, "down", WINNER.down), "a process ended in its first launch", 16, 0.0)

SLOW = msgspec.structs.replace(DEADLY, rows_stay=True)


def row(error: float | None, source: str = "learned", chosen_us: float = 300.0) -> Record:
    made = record(MANY, 256, 445.0, chosen_us)
    evidence = msgspec.structs.replace(made.evidence, max_error=error)
    return msgspec.structs.replace(made, evidence=evidence, source=source)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        pytest.param(row(0.0), True, id="every-bit-the-same"),
        pytest.param(row(1e-30), False, id="a-zero-of-another-sign"),
        pytest.param(row(0.004), False, id="rounded-otherwise"),
        pytest.param(row(None), False, id="without-a-comparison"),
        pytest.param(row(None, chosen_us=445.0), True, id="sglangs-own"),
        pytest.param(row(0.004, "pinned"), True, id="pinned"),
    ],
)
def test_a_learned_row_needs_its_proof(found: Record, holds: bool) -> None:
    assert Overlay("miss", bit_equal=True).stands(found) is holds
    assert Overlay("miss").stands(found)


@pytest.mark.parametrize(
    ("held", "source", "stands"),
    [((), "learned", True), ((SLOW,), "learned", True), ((DEADLY,), "learned", False), ((DEADLY,), "pinned", True)],
    ids=["free", "slow", "deadly", "deadly-pin"],
)
def test_an_m_whose_row_has_killed_is_searched_again(held: tuple[Held, ...], source: str, stands: bool) -> None:
    """Nothing may be measured against it, and another pair may be faster than SGLang's own; a pin is the user's."""
    overlay = Overlay("miss")
    provider: Any = SimpleNamespace(quarantine=SimpleNamespace(held=held))
    overlay.begin(Device(H200, provider))
    assert overlay.stands(row(0.0, source)) is stands


def test_a_pair_that_was_compared_with_a_learned_one_has_the_errors_of_both() -> None:
    before = row(0.004).evidence
    outcome = Outcome(row(None).pair, Estimate(0.1, 0.09, 0.11), 300.0, 10, 5, Comparison(True, 0.0, 0.016))
    found: Evidence = outcome.evidence(1.0, before)
    assert found.max_error == 0.004
    assert outcome.evidence(1.0, None).max_error == 0.0


@pytest.mark.parametrize("origin", ["miss", "exact"])
@pytest.mark.parametrize("mode", ["miss", "all"])
@pytest.mark.parametrize("bit_equal", [False, True])
@pytest.mark.parametrize("device", [H200, SMALL], ids=lambda about: about.device_name)
@pytest.mark.parametrize("held", [(), (DEADLY,), (SLOW,)], ids=["free", "deadly", "slow"])
def test_the_shell_says_of_every_row_what_a_server_does(
    origin: Origin,
    mode: Mode,
    bit_equal: bool,
    device: Environment,
    held: tuple[Held, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for change in (
        {},
        {"source": "imported"},
        {"source": "replayed"},
        {"source": "pinned"},
        {"baseline": WINNER},
        {"pair": ConfigPair(*[KernelConfig(256, 256, 64, 1, 8, 3)] * 2)},
        {"pair": ConfigPair(*[KernelConfig(48, 64, 64, 1, 8, 3)] * 2), "source": "pinned"},
    ):
        for error in (0.0, 0.004):
            found = msgspec.structs.replace(row(error), **change)
            overlay = Overlay(mode, bit_equal=bit_equal)
            provider: Any = SimpleNamespace(quarantine=SimpleNamespace(held=held))
            overlay.begin(Device(device, provider))
            monkeypatch.setattr(releases, "origin", lambda _: origin)
            monkeypatch.setattr(releases, "ask_stock", lambda *_: HEURISTIC.up.to_dict())
            contents = Contents(device, {(found.shape, found.M): found})
            if origin == "miss":
                contents.notes[found.shape] = ShapeNote(found.shape, {found.M: HEURISTIC})
                files = Files(readable=True)
            else:
                files = Files(readable=True, answer=StockAnswer(origin, Path("f.json"), found.M, HEURISTIC))
            told = kept_back(found.shape, found.M, contents, Manner(mode, bit_equal=bit_equal, held=held), files)
            assert overlay.may_serve(found) == (told == ""), (change, error, told)
            if held == (DEADLY,):
                assert told or found.pair.down != WINNER.down
