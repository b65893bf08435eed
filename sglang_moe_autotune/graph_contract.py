"""What re-capture uses of SGLang's graph runners, and whether an SGLang has it: its source is read, not imported.

Pure. The one list of these names: ``graphs`` uses no other private name of SGLang.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Use(NamedTuple):
    """Names of a class (methods, fields, attributes of ``self``), or of a module where ``owner`` is empty."""

    module: str
    owner: str
    names: tuple[str, ...]


_EXECUTOR = "sglang.srt.model_executor"
_DECODE = f"{_EXECUTOR}.runner.decode_cuda_graph_runner"
_PREFILL = f"{_EXECUTOR}.runner.prefill_cuda_graph_runner"
_BACKENDS = f"{_EXECUTOR}.runner_backend"
_OLD_DECODE = f"{_EXECUTOR}.cuda_graph_runner"
_OLD_PREFILL = f"{_EXECUTOR}.piecewise_cuda_graph_runner"
_POOLS = "sglang.srt.mem_cache.memory_pool"

_SWAPPED = ("graph_capture", "freeze_gc", "tqdm")
"""module names that ``graphs`` replaces for the time of one capture"""

_POOL_USES: Final = (
    Use(_POOLS, "ReqToTokenPool", ("free_slots",)),
    Use(_POOLS, "HybridReqToTokenPool", ("req_index_to_mamba_index_mapping",)),
    Use(_POOLS, "MHATokenToKVPool", ()),
    Use(_POOLS, "MLATokenToKVPool", ()),
    Use(_POOLS, "HybridLinearKVPool", ()),
    Use(f"{_EXECUTOR}.cuda_graph_buffer_registry", "CudaGraphBufferRegistry", ("has_slot", "get_slot")),
    Use(f"{_EXECUTOR}.cuda_graph_buffer_registry", "GraphSlot", ("buffer",)),
)

_BACKEND_USES: Final = (
    *_POOL_USES,
    Use(f"{_EXECUTOR}.model_runner", "ModelRunner", ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")),
    Use(_DECODE, "", (*_SWAPPED, "model_capture_mode")),
    Use(_PREFILL, "", _SWAPPED),
    Use(
        _DECODE,
        "DecodeCudaGraphRunner",
        (
            *("capture", "capture_bs", "max_bs", "captured_req_width", "buffers", "buffer_registry", "backend"),
            *("stream", "seq_len_fill_value", "encoder_len_fill_value", "capture_hidden_mode", "attn_backend"),
        ),
    ),
    Use(
        _PREFILL,
        "PrefillCudaGraphRunner",
        (
            *("capture", "capture_num_tokens", "max_num_tokens", "buffers", "buffer_registry", "backend", "stream"),
            *("capture_hidden_mode", "attn_metadata_buffers"),
        ),
    ),
    Use(f"{_BACKENDS}.full_cuda_graph_backend", "FullCudaGraphBackend", ("_graphs", "_outputs")),
    Use(
        f"{_BACKENDS}.breakable_cuda_graph_backend",
        "BreakableCudaGraphBackend",
        ("_graphs", "_outputs", "_shared_output_buffer", "capture_session"),
    ),
    Use(f"{_EXECUTOR}.runner.shape_key", "ShapeKey", ("size",)),
)

_OLD_USES: Final = (
    *_POOL_USES,
    Use(f"{_EXECUTOR}.model_runner", "ModelRunner", ("graph_runner", "piecewise_cuda_graph_runner")),
    Use(_OLD_DECODE, "", (*_SWAPPED, "model_capture_mode")),
    Use(_OLD_PREFILL, "", _SWAPPED),
    Use(
        _OLD_DECODE,
        "CudaGraphRunner",
        (
            *("capture", "capture_bs", "max_bs", "num_tokens_per_bs", "buffers", "buffer_registry", "graphs"),
            *("output_buffers", "stream", "seq_len_fill_value", "encoder_len_fill_value", "capture_hidden_mode"),
        ),
    ),
    Use(
        _OLD_PREFILL,
        "PiecewiseCudaGraphRunner",
        ("capture", "capture_num_tokens", "max_num_tokens", "buffer_registry", "capture_hidden_mode"),
    ),
    Use("sglang.srt.compilation.cuda_piecewise_backend", "CUDAPiecewiseBackend", ("concrete_size_entries",)),
    Use(
        "sglang.srt.compilation.cuda_piecewise_backend",
        "ConcreteSizeEntry",
        ("cudagraph", "output", "num_finished_warmup", "input_addresses"),
    ),
    Use("sglang.srt.compilation.piecewise_context_manager", "", ("enable_piecewise_cuda_graph",)),
)


def uses(root: Path) -> tuple[Use, ...]:
    """What is used of the SGLang below ``root``, the folder that holds ``sglang/``; by the runners that it has."""
    return _BACKEND_USES if _path(root, _DECODE).exists() else _OLD_USES


def missing(root: Path) -> tuple[str, ...]:
    """What is used and not there, as ``module.owner.name``. Raises OSError or SyntaxError where it cannot be read."""
    gone: list[str] = []
    for use in uses(root):
        where = ".".join(filter(None, (use.module, use.owner)))
        path = _path(root, use.module)
        if not path.exists():
            gone.append(use.module)
            continue
        tree = ast.parse(path.read_bytes(), str(path))
        body = tree.body if not use.owner else _class_body(root, tree, use.owner)
        if body is None:
            gone.append(where)
            continue
        there = set(_bound(body)) if not use.owner else {*_bound(body), *_attributes(body)}
        gone += (f"{where}.{name}" for name in use.names if name not in there)
    return tuple(gone)


def _path(root: Path, module: str) -> Path:
    return root.joinpath(*module.split(".")).with_suffix(".py")


def _class_body(root: Path, tree: ast.Module, owner: str) -> list[ast.stmt] | None:
    """The statements of a class and of its bases, where those are in the same module or imported from SGLang."""
    found = next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner), None)
    if found is None:
        return None
    body = list(found.body)
    for base in (b.id for b in found.bases if isinstance(b, ast.Name)):
        own = _class_body(root, tree, base)
        if own is None:
            source = next(
                (n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module
                 and any((a.asname or a.name) == base for a in n.names)),
                "",
            )  # fmt: skip
            if source.startswith("sglang.") and (path := _path(root, source)).exists():
                own = _class_body(root, ast.parse(path.read_bytes(), str(path)), base)
        body += own or []
    return body


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def _attributes(body: list[ast.stmt]) -> Iterator[str]:
    """Attributes that are stored on ``self`` anywhere in the class."""
    for statement in body:
        for node in ast.walk(statement):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield name
