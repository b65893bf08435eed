"""What ranks tell each other of their searches: each line once, whatever happens to the files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from record_values import pair, shape

from sglang_moe_autotune import hearing
from sglang_moe_autotune.hearing import Hearing
from sglang_moe_autotune.hearsay import Heard

if TYPE_CHECKING:
    from pathlib import Path


def heard(m: int) -> Heard:
    return Heard(shape(), m, (("up", pair().up, 0.9), ("down", pair().down, 1.1)))


def ms(found: list[Heard]) -> list[int]:
    return [one.M for one in found]


def test_each_rank_hears_the_others_once_and_never_itself(tmp_path: Path) -> None:
    ranks = [Hearing(tmp_path / "server", rank, 3) for rank in range(3)]
    assert ranks[0].fresh() == []
    ranks[0].tell([heard(1), heard(2)])
    ranks[1].tell([heard(3)])
    assert ms(ranks[2].fresh()) == [1, 2, 3]
    assert ranks[2].fresh() == []
    ranks[0].tell([heard(4)])
    assert ms(ranks[2].fresh()) == [4]
    assert ranks[1].fresh() == [heard(1), heard(2), heard(4)]
    assert ms(ranks[0].fresh()) == [3]


def test_a_long_file_is_read_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = len(msgspec.json.encode(heard(100))) + 1
    monkeypatch.setattr(hearing, "_MOST_BYTES", 5 * line)
    Hearing(tmp_path, 0, 2).tell(map(heard, range(100, 200)))
    other, turns = Hearing(tmp_path, 1, 2), []
    while found := ms(other.fresh()):
        turns.append(len(found))
    assert max(turns) <= 5
    assert sum(turns) == 100


def test_a_server_that_starts_again_is_heard_from_its_beginning(tmp_path: Path) -> None:
    other = Hearing(tmp_path, 1, 2)
    Hearing(tmp_path, 0, 2).tell([heard(1), heard(2), heard(3)])
    assert ms(other.fresh()) == [1, 2, 3]
    again = Hearing(tmp_path, 0, 2)
    again.tell([heard(4), heard(5), heard(6), heard(7)])
    assert ms(other.fresh()) == [4, 5, 6, 7]
    (tmp_path / "trials-0.jsonl").unlink()
    assert other.fresh() == []
    again.tell([heard(8)])
    assert ms(other.fresh()) == [8]


@pytest.mark.parametrize("text", [b"\n", b"{}\n", b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n", b'{"M": 3}\n\n'])
def test_what_cannot_be_read_is_skipped_and_what_follows_is_not(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "trials-0.jsonl").write_bytes(text + msgspec.json.encode(heard(5)) + b"\n" + b'{"torn')
    other = Hearing(tmp_path, 1, 2)
    assert ms(other.fresh()) == [5]
    assert other.fresh() == []


def test_a_file_that_is_no_lines_at_all_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_MOST_BYTES", 4096)
    (tmp_path / "trials-0.jsonl").write_bytes(b"x" * 10_000 + b"\n" + msgspec.json.encode(heard(5)) + b"\n")
    other = Hearing(tmp_path, 1, 2)
    assert [ms(other.fresh()) for _ in range(4)] == [[], [], [5], []]


def test_links_pipes_and_folders_in_the_place_of_a_file_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(msgspec.json.encode(heard(5)) + b"\n")
    (tmp_path / "trials-0.jsonl").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "trials-2.jsonl")
    (tmp_path / "trials-3.jsonl").mkdir()
    assert Hearing(tmp_path, 1, 4).fresh() == []


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_what_came_into_the_place_of_a_file_holds_up_nobody_and_is_not_written_through(
    tmp_path: Path, what: str
) -> None:
    own = Hearing(tmp_path, 0, 2)
    own.tell([heard(1)])
    (tmp_path / "trials-0.jsonl").unlink()
    (tmp_path / "elsewhere").write_bytes(b"")
    if what == "pipe":
        os.mkfifo(tmp_path / "trials-0.jsonl")
    else:
        (tmp_path / "trials-0.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="trials-0"):
        own.tell([heard(2)])
    assert (tmp_path / "elsewhere").read_bytes() == b""


def test_a_file_that_was_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    own, other = Hearing(tmp_path, 0, 2), Hearing(tmp_path, 1, 2)
    own.tell(map(heard, range(1, 50)))
    assert len(other.fresh()) == 49
    path = tmp_path / "trials-0.jsonl"
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n")
    own.tell([heard(99)])
    assert ms(other.fresh()) == [99]
