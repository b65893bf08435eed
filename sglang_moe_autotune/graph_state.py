"""What a capture changes in SGLang besides the graphs: cleared before, kept, and put back where it fails."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_INDEX_BUFFERS = (
    *("input_ids", "positions", "mrope_positions", "out_cache_loc", "req_pool_indices"),
    *("mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens"),
)
"""zero in each is SGLang's padding slot (or row, or token): what its own first capture ran with"""
_FILLED_BUFFERS = {
    "seq_lens": "seq_len_fill_value",
    "seq_lens_cpu": "seq_len_fill_value",
    "encoder_lens": "encoder_len_fill_value",
}
_ROW_MAPS = ("req_index_to_mamba_index_mapping", "req_index_to_mamba_ping_pong_track_buffer_mapping")
"""of hybrid models, from a request's row to the slot of its state; row 0 is no request's"""


def clear(runner: Any) -> None:
    """Let every index that the warm-up of a capture follows lead to padding."""
    for name, buffer in _buffers(runner):
        if name in _FILLED_BUFFERS:
            buffer.fill_(getattr(runner, _FILLED_BUFFERS[name], 0))
        else:
            buffer.zero_()
    rows = runner.model_runner.req_to_token_pool
    for name in _ROW_MAPS:
        if (mapping := getattr(rows, name, None)) is not None:
            mapping[0].zero_()


class Snapshot:
    """The tables as they were before a capture. Entries of pieces are reset, so that they are captured."""

    _FIELDS = ("cudagraph", "output", "num_finished_warmup", "input_addresses")

    def __init__(self, tables: list[dict[Any, Any]], entries: list[Any]) -> None:
        self._tables = [(table, dict(table)) for table in tables]
        self._entries = [(entry, {name: getattr(entry, name) for name in self._FIELDS}) for entry in entries]
        self._old = {id(value) for table in tables for value in table.values()}
        self._old |= {id(fields["cudagraph"]) for _, fields in self._entries}
        for entry in entries:
            entry.cudagraph, entry.num_finished_warmup = None, 0

    def why_incomplete(self, graphs: dict[Any, Any]) -> str:
        if not graphs:
            return "SGLang made no graph of this size"
        if any(graph is None or id(graph) in self._old for graph in graphs.values()):
            return "SGLang did not replace every graph of this size"
        return ""

    def restore(self) -> None:
        for table, content in self._tables:
            table.clear()
            table.update(content)
        for entry, fields in self._entries:
            for name, value in fields.items():
                setattr(entry, name, value)


def _buffers(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a capture reads indices from; those of the runner and of its registry are one memory."""
    registry = runner.buffer_registry
    for name in (*_INDEX_BUFFERS, *_FILLED_BUFFERS):
        buffer = getattr(getattr(runner, "buffers", None), name, None)
        if buffer is not None:
            yield name, buffer
        elif registry.has_slot(name):
            yield name, registry.get_slot(name).buffer


def metadata_tables(backend: Any) -> list[dict[Any, Any]]:
    """The dictionaries of an attention backend and of the backends that it is made of."""
    tables: list[dict[Any, Any]] = []
    seen: set[int] = set()
    queue = [backend]
    while queue:
        found = queue.pop()
        if id(found) in seen or not type(found).__module__.startswith("sglang.srt.layers.attention"):
            continue
        seen.add(id(found))
        for value in vars(found).values():
            if isinstance(value, dict):
                tables.append(value)
            elif isinstance(value, list | tuple):
                queue += value
            else:
                queue.append(value)
    return tables


@functools.cache
def pieces() -> tuple[Any, ...]:
    """The parts of a model that torch.compile cut at its attention. Nothing but the compiled code refers to them."""
    return tuple(found for found in gc.get_objects() if type(found).__name__ == "CUDAPiecewiseBackend")
