"""What a launch of a Triton kernel would be, found without compiling or launching it.

SGLang's own ``invoke_fused_moe_kernel`` is run with its kernels replaced by a recorder, so that arguments,
grid and flags are the release's own; Triton's own binder then says which binary the launch needs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json = dict[str, Any]


class Launch(NamedTuple):
    """One recorded call of a kernel: ``kernel[grid](*args, **kwargs)``."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Binary(NamedTuple):
    """The compiled object that a launch needs. ``hash`` names its entry in Triton's disk cache."""

    source: ASTSource
    target: Any
    options: Any
    hash: str
    bound: tuple[Any, ...]
    """every argument of the kernel in order, as a compiled kernel takes them"""
    key: tuple[Any, ...] = ()
    """the kernel, and what its cache in memory goes by: launches with equal ones need the same object"""

    @property
    def metadata_name(self) -> str:
        return f"{self.source.name[:150]}.json"

    def on_disk(self) -> bool:
        """Is the exact entry in the disk cache? The folder lookup is Triton's own."""
        group = get_cache_manager(self.hash).get_group(self.metadata_name)
        return bool(group) and self.metadata_name in group


Quantise = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""what a recording does in place of ``function(*args, **kwargs)``, a quantisation of the activations"""


class _Recorder:
    """Stands where the kernel stood: ``recorder[grid](...)`` keeps the call."""

    def __init__(self, kernel: JITFunction[Any], calls: list[Launch]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            size = grid(dict(kwargs)) if callable(grid) else grid
            self._calls.append(Launch(self._kernel, tuple(size), args, kwargs))

        return keep


class LaunchRecorder:
    """Calls a launching function for the record only.

    A copy of the function sees recorders in place of the kernels that it names; the module that serves is
    never touched. In 8 bit the function quantises its activations before the launch: who records may answer
    that from memory. Raises TypeError where the function names no Triton kernel (a release that this cannot read).
    """

    def __init__(self, invoke: Callable[..., Any]) -> None:
        function = inspect.unwrap(invoke)
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"{invoke!r} is not a Python function, so its launches cannot be recorded")
        self._function = function
        self._calls: list[Launch] = []
        scope = dict(function.__globals__)
        kernels = {n: v for n in function.__code__.co_names if isinstance(v := scope.get(n), JITFunction)}
        if not kernels:
            raise TypeError(f"{function.__module__}.{function.__qualname__} names no Triton kernel to record")
        self.kernels = tuple(kernels.values())
        """that the function may launch"""
        scope.update({name: _Recorder(kernel, self._calls) for name, kernel in kernels.items()})
        names = [n for n in function.__code__.co_names if "quant" in n and n not in kernels]
        scope.update({n: functools.partial(self._quantised, v) for n in names if callable(v := scope.get(n))})
        self._quantise: Quantise | None = None
        self._copy = types.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
        )
        self._copy.__kwdefaults__ = function.__kwdefaults__
        self.parameters = frozenset(inspect.signature(function).parameters)

    def record(self, *args: Any, quantise: Quantise | None = None, **kwargs: Any) -> Launch:
        """The one launch that this call would make. Raises what the function raises, or ValueError for none.

        quantise: asked for the quantised activations; without it they are made, as a call that serves makes them.
        """
        self._calls.clear()
        self._quantise = quantise
        try:
            self._copy(*args, **kwargs)
        finally:
            self._quantise = None
        if len(self._calls) != 1:
            raise ValueError(f"{self._function.__qualname__} made {len(self._calls)} launches where one was expected")
        return self._calls.pop()

    def _quantised(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if self._quantise is None else self._quantise(function, args, kwargs)


def binary_of(launch: Launch, device: int, like: Binary | None = None) -> Binary:
    """The binary that Triton would look for. Pure Python: no compile, no launch, no new cache entry.

    like: of another launch; where this one needs the same, nothing but its arguments is new, which takes a small part
    of the time.
    """
    kernel = launch.kernel
    _, _, target, backend, binder = kernel.device_caches[device]
    kwargs = dict(launch.kwargs)
    kwargs["debug"] = kwargs.get("debug", kernel.debug) or knobs.runtime.debug
    kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    bound, specialization, options = binder(*launch.args, **kwargs)
    key = (kernel, tuple(specialization), tuple(options.items()))
    if like is not None and like.key == key:
        return like._replace(bound=tuple(bound.values()))
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    options = make_backend(target).parse_options(dict(options.__dict__))
    return Binary(source, target, options, cache_hash(source, target, options), tuple(bound.values()), key)


def rebind(bound: tuple[Any, ...], swaps: Sequence[Mapping[int, Any]]) -> list[tuple[Any, ...]]:
    """The arguments of a launch with some tensors, named by their address, replaced; once for each of ``swaps``, which
    name the same ones.

    By address, because SGLang may hand out a new view of the same weights each time it is asked for them.
    """
    tensors = {i: value.data_ptr() for i, value in enumerate(bound) if hasattr(value, "data_ptr")}
    named = {i: at for i, at in tensors.items() if at in swaps[0]}
    found = []
    for swap in swaps:
        these = list(bound)
        for i, at in named.items():
            these[i] = swap[at]
        found.append(tuple(these))
    return found


def address(value: Any) -> Any:
    """Of a tensor where it lies, of anything else the value: what tells two launches' arguments apart."""
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def cache_hash(source: ASTSource, target: Any, options: Any) -> str:
    """The name of the folder that ``triton.compile`` would use for this source."""
    key = get_cache_key(source, make_backend(target), options, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def forget_ptxas() -> None:
    """Make Triton look at its assembler again after its path has changed; it remembers the version it saw."""
    from triton.backends.nvidia import compiler  # noqa: PLC0415 - CUDA only

    for name in ("get_ptxas_version", "get_ptxas"):
        if (clear := getattr(getattr(compiler, name, None), "cache_clear", None)) is not None:
            clear()


def shared_bytes(binary: Binary) -> int:
    """Shared memory a block of a binary on disk needs, as its metadata states. Raises OSError, ValueError or
    KeyError where the entry is damaged."""
    group = get_cache_manager(binary.hash).get_group(binary.metadata_name) or {}
    return int(json.loads(Path(group[binary.metadata_name]).read_text())["shared"])


def loaded(launch: Launch, device: int, binary: Binary) -> CompiledKernel | None:
    """The compiled kernel of exactly this binary that the serving path holds already, else None."""
    cache: dict[Any, CompiledKernel] = launch.kernel.device_caches[device][0]
    return next((k for k in list(cache.values()) if getattr(k, "hash", None) == binary.hash), None)


def load(binary: Binary) -> CompiledKernel:
    """The compiled kernel from Triton's disk cache, as our own object: no device cache learns of it.

    The caller has seen ``on_disk``; Triton would compile otherwise.
    """
    import triton  # noqa: PLC0415 - the name is needed for this one call

    return triton.compile(binary.source, target=binary.target, options=binary.options.__dict__)


# -- a binary as text, for the process that compiles ----------------------------------------------------------


def encode(binary: Binary) -> Json:
    """JSON values from which ``decode`` rebuilds the source in another process."""
    source = binary.source
    return {
        "module": source.fn.__module__,
        "kernel": source.fn.__qualname__,
        "signature": list(source.signature.items()),
        "constants": [[list(path), _encode_value(value)] for path, value in source.constants.items()],
        "attributes": [[list(path), value] for path, value in source.attrs.items()],
        "target": [binary.target.backend, binary.target.arch, binary.target.warp_size],
        "options": [[name, _encode_value(value)] for name, value in binary.options.__dict__.items()],
        "hash": binary.hash,
    }


def decode(text: Json) -> Binary:
    """Rebuild the source. Imports the kernel's module; raises ImportError or AttributeError if it is gone."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - as above

    kernel = getattr(importlib.import_module(text["module"]), text["kernel"])
    source = ASTSource(
        kernel,
        {name: _tuples(kind) for name, kind in text["signature"]},
        {tuple(path): _decode_value(value) for path, value in text["constants"]},
        {tuple(path): value for path, value in text["attributes"]},
    )
    target = GPUTarget(*text["target"])
    options = make_backend(target).parse_options({name: _decode_value(v) for name, v in text["options"]})
    return Binary(source, target, options, cache_hash(source, target, options), ())


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _encode_value(value: Any) -> Any:
    from triton.language import dtype  # noqa: PLC0415 - as above

    if isinstance(value, dtype):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encode_value(v) for v in value]}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, dict):
        return {"dict": {k: _encode_value(v) for k, v in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a launch with {value!r} ({type(value).__name__}) cannot be sent to the compile process")


def _decode_value(value: Any) -> Any:
    from triton.language import dtype  # noqa: PLC0415 - as above

    if isinstance(value, dict):
        if "dtype" in value:
            return dtype(value["dtype"])
        if "tuple" in value:
            return tuple(_decode_value(v) for v in value["tuple"])
        if "set" in value:
            return frozenset(value["set"])
        return {k: _decode_value(v) for k, v in value["dict"].items()}
    return value
