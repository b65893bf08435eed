"""The post: what one rank says to the others of its server. Whoever can write the folder can write one."""

from __future__ import annotations

import hashlib
import os

import msgspec

from sglang_moe_autotune.accord import Finding, Proposal  # noqa: TC001 - msgspec reads the annotations
from sglang_moe_autotune.status import Owner, start_time, this_process
from sglang_moe_autotune.validity import problem
from sglang_moe_autotune.votes import Ballot  # noqa: TC001 - msgspec reads the annotations

SCHEMA = 1


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says to the others of its server."""

    schema: int = SCHEMA
    pid: int
    boot_id: str
    start_time: int
    host: str
    pid_namespace: str
    rank: int
    ranks: int
    beat: int = 0
    """counts what was posted"""
    epoch: int = 0
    """of the table that this rank serves"""
    rows: int = 0
    """learned rows that it serves, those of its start included"""
    proposals: tuple[Proposal, ...] = ()
    findings: tuple[Finding, ...] = ()
    off: str = ""
    """why it measures nothing now"""
    ballot: Ballot | None = None
    vote: int = 0
    """the number of the ballot that it is ready for; 0: none"""

    @property
    def owner(self) -> Owner:
        return Owner(self.pid, self.boot_id, self.start_time, self.host, self.pid_namespace)


def usable(post: Post) -> Post:
    """Without proposals that make no sense."""
    proposals = tuple(p for p in post.proposals if problem(p.record) is None)
    return msgspec.structs.replace(post, proposals=proposals)


def server_name(port: int) -> str:
    """The same in all ranks of a server and in no other: its schedulers are children of one process, and two servers
    in one process listen on two ports."""
    own, parent = this_process(), os.getppid()
    text = f"{own.boot_id} {own.host} {own.pid_namespace} {parent} {start_time(parent)} {port}"
    return f"{parent}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"
