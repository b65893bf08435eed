"""The quarantine: which candidates may not be launched in this process, and the journal of those that may.

What killed a server or held it up is never tried again, here or after a restart, until a person says otherwise
(``held``); how the next start knows it, ``journal`` and ``inquest`` say. Without a folder: in memory only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune import held, inquest
from sglang_moe_autotune.held import FOLDER, Candidate, Held
from sglang_moe_autotune.journal import Journal, Launch

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_moe_autotune.shapes import Gemm, KernelConfig, MoeShape

logger = logging.getLogger("sglang.moe_autotune")


class Quarantine:
    """What may not be tried in this process. One thread; once made, no method raises OSError or waits for a disk.

    ``read_only``: nothing is written, and no journal of the dead is cleared away. ``server``: see ``journal.Writer``.
    """

    def __init__(
        self,
        root: Path | None = None,
        environment: str = "",
        *,
        read_only: bool = False,
        server: str | None = None,
    ) -> None:
        self.journal = Journal(None if read_only else root, environment, server)
        self._folder = None if root is None else root / FOLDER
        self._environment = environment
        self._held: dict[Candidate, Held] = {}
        if root is not None:
            for one in held.read(root / FOLDER).held:
                if one.candidate.environment == environment:
                    self._held[one.candidate] = one
            if self._held:
                logger.info("MoE autotune: candidates in quarantine, never tried: %d.", len(self._held))
            for one in inquest.hold(root, read_only=read_only).held:
                if one.candidate.environment == environment:
                    self._hold(one)

    @property
    def held(self) -> tuple[Held, ...]:
        """What is never tried in this environment, in the order of finding."""
        return tuple(self._held.values())

    def reason(self, shape: MoeShape, gemm: Gemm, config: KernelConfig) -> str:
        """Why this must not be launched; "" where it may."""
        found = self._held.get(Candidate(self._environment, shape, gemm, config))
        return "" if found is None else f"in quarantine: {found.reason} (M={found.M})"

    def launch(self, shape: MoeShape, M: int, gemm: Gemm, config: KernelConfig) -> Launch:  # noqa: N803
        """The first launch of a candidate at an M, for the journal."""
        candidate = Candidate(self._environment, shape, gemm, config)
        return Launch(f"{shape.slug} M={M} {gemm} {config}", candidate, M)

    def hold(self, shape: MoeShape, M: int, gemm: Gemm, config: KernelConfig, reason: str) -> None:  # noqa: N803
        """Never try this again, here or after a restart: it was far slower than it should be."""
        one = Held(Candidate(self._environment, shape, gemm, config), reason, M, time.time(), rows_stay=True)
        self._hold(one)
        self.journal.later(lambda: self._keep(one))

    def _hold(self, one: Held) -> None:
        if one.candidate not in self._held:
            self._held[one.candidate] = one
            logger.warning("MoE autotune will not try %s again: %s (M=%d).", one.candidate, one.reason, one.M)

    def _keep(self, one: Held) -> None:
        with contextlib.suppress(OSError):  # left out in this process, and found again by the next one
            if self._folder is not None:
                held.keep(self._folder, one)
