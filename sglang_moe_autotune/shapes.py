"""What is tuned: the shape of a fused-MoE layer, a kernel config, and a pair of configs.

Names follow SGLang: ``w1`` is the gate-up weight (E, 2N, K), ``w2`` the down weight (E, K, N).
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final, Literal

import msgspec

Gemm = Literal["up", "down"]
GEMMS: tuple[Gemm, Gemm] = ("up", "down")

ActivationDtype = Literal["bfloat16", "float16", "float32"]

_TILE_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
_OPTION_KEYS = ("num_warps", "num_stages")


class KernelConfig(msgspec.Struct, frozen=True, order=True):
    """One launch configuration, in SGLang's own key names.

    ``num_warps`` and ``num_stages`` are None where SGLang's heuristic leaves them to Triton
    (which then takes 4 and 3). ``extra`` holds every other key, such as ``waves_per_eu``.
    """

    BLOCK_SIZE_M: int
    BLOCK_SIZE_N: int
    BLOCK_SIZE_K: int
    GROUP_SIZE_M: int
    num_warps: int | None = None
    num_stages: int | None = None
    extra: tuple[tuple[str, int | bool], ...] = ()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> KernelConfig:
        """Read SGLang's dict. Raises ValueError naming the key that is missing or not a number."""
        for key in _TILE_KEYS:
            if key not in config:
                raise ValueError(f"a kernel config needs {key}, and this one has only {sorted(config)}")
        for key, value in config.items():
            if not isinstance(value, int):
                raise ValueError(f"{key} must be a whole number, not {value!r}")  # noqa: TRY004 - it is data
        known = (*_TILE_KEYS, *_OPTION_KEYS)
        extra = tuple(sorted((k, v) for k, v in config.items() if k not in known))
        values: dict[str, Any] = {k: config.get(k) for k in known}
        return cls(**values, extra=extra)

    def to_dict(self) -> dict[str, int | bool]:
        """A fresh dict in the key order of SGLang's files."""
        config: dict[str, int | bool] = {k: getattr(self, k) for k in _TILE_KEYS}
        for key in _OPTION_KEYS:
            if (value := getattr(self, key)) is not None:
                config[key] = value
        config.update(self.extra)
        return config

    def __str__(self) -> str:
        text = f"{self.BLOCK_SIZE_M}x{self.BLOCK_SIZE_N}x{self.BLOCK_SIZE_K} g{self.GROUP_SIZE_M}"
        if self.num_warps is not None:
            text += f" w{self.num_warps}"
        if self.num_stages is not None:
            text += f" s{self.num_stages}"
        return text + "".join(f" {k}={v}" for k, v in self.extra)


class ConfigPair(msgspec.Struct, frozen=True):
    """The configs of both GEMMs of a layer; they share one BLOCK_SIZE_M (one sort of the tokens)."""

    up: KernelConfig
    down: KernelConfig

    def of(self, gemm: Gemm) -> KernelConfig:
        return self.up if gemm == "up" else self.down

    def unlike(self, other: ConfigPair) -> tuple[Gemm, ...]:
        """The GEMMs that the two pairs do not launch alike."""
        return tuple(gemm for gemm in GEMMS if self.of(gemm) != other.of(gemm))

    def __str__(self) -> str:
        return str(self.up) if self.up == self.down else f"{self.up} / {self.down}"


class MoeShape(msgspec.Struct, frozen=True):
    """What SGLang's config lookup is told about a layer, plus what is constant in the process.

    w1_shape: (E, 2N, K) and w2_shape: (E, K, N) as the lookup receives them, so E is the count of
    local experts, N is packed for int4, and padding is taken off. dtype is SGLang's selector
    (None for fp16 and bf16, ``fp8_w8a8``, ``int8_w8a8``, ``int8_w8a16``, ``int4_w4a16``, ``float32``).
    ``ep`` says that ids can be -1 (experts of other ranks), ``variant`` names whatever else changes
    the kernel in this process (biases, fused epilogues, ...), sorted.
    """

    w1_shape: tuple[int, int, int]
    w2_shape: tuple[int, int, int]
    top_k: int
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    activation_dtype: ActivationDtype = "bfloat16"
    ep: bool = False
    variant: tuple[str, ...] = ()

    @property
    def E(self) -> int:  # noqa: N802 - the field's name for it
        return self.w2_shape[0]

    @property
    def N(self) -> int:  # noqa: N802 - the field's name for it
        """The N of SGLang's file name: columns of w2, packed for int4."""
        return self.w2_shape[2]

    @property
    def K(self) -> int:  # noqa: N802 - the field's name for it
        """The hidden size: rows of w2."""
        return self.w2_shape[1]

    @property
    def slug(self) -> str:
        """A name for people, logs and the shell; unique for all but exotic variants."""
        return _slug(self)


@functools.lru_cache(maxsize=1024)
def _slug(shape: MoeShape) -> str:
    """Kept: whoever says how far a server is names a few shapes hundreds of times, and its requests wait meanwhile."""
    parts = [f"E{shape.E}", f"N{shape.N}", f"K{shape.K}", f"top{shape.top_k}"]
    parts.append(shape.dtype or {"bfloat16": "bf16", "float16": "fp16"}.get(shape.activation_dtype, "fp32"))
    if shape.block_shape is not None:
        parts.append(f"block{shape.block_shape[0]}x{shape.block_shape[1]}")
    if shape.per_channel_quant:
        parts.append("perchannel")
    if shape.ep:
        parts.append("ep")
    parts.extend(shape.variant)
    return "-".join(parts)


ACTIVATION_WORDS: Final[dict[str, ActivationDtype]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""what people and slugs call unquantised layers; SGLang's selector names those of float32"""
QUANTISED: Final = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
MAX_SIZE: Final = 1 << 24
_PER_BYTE: Final = {"int4_w4a16": 2}
"""weights that SGLang keeps in one element, along the columns of both matrices"""
VARIANTS: Final = (
    "bias",
    "fused-swiglu",
    "keeps-weight",
    "no-combine",
    "router-weight-on-input",
    "ungated",
    "zero-points",
)
_NUMBER: Final = r"[1-9]\d{0,7}"
_WORD: Final = "|".join(VARIANTS)
_SLUG: Final = re.compile(
    rf"E(?P<E>{_NUMBER})-N(?P<N>{_NUMBER})-K(?P<K>{_NUMBER})-top(?P<top_k>{_NUMBER})-(?P<dtype>[a-z0-9_]+)"
    rf"(?:-block(?P<rows>0|{_NUMBER})x(?P<columns>0|{_NUMBER}))?(?P<channel>-perchannel)?(?P<ep>-ep)?"
    rf"(?P<variant>(?:-(?:{_WORD}))*)",
    re.ASCII,
)


def shape_of_slug(slug: str) -> MoeShape | None:
    """The shape that has this name; None where the text is no whole name. A name does not say the activations of
    quantised layers: they are taken for bfloat16."""
    match = _SLUG.fullmatch(slug)
    if match is None:
        return None
    sizes = int(match["E"]), int(match["N"]), int(match["K"]), int(match["top_k"])
    dtype, ep = match["dtype"], match["ep"] is not None
    if max(sizes) > MAX_SIZE or (sizes[3] > sizes[0] and not ep):
        return None
    if dtype not in QUANTISED and dtype not in ACTIVATION_WORDS:
        return None
    return shape_of_sizes(
        sizes,
        dtype,
        None if match["rows"] is None else (int(match["rows"]), int(match["columns"])),
        per_channel_quant=match["channel"] is not None,
        activation_dtype=ACTIVATION_WORDS.get(dtype, "bfloat16"),
        ep=ep,
        variant=tuple(sorted(set(re.findall(_WORD, match["variant"])))),
    )


def shape_of_sizes(
    sizes: tuple[int, int, int, int],
    dtype: str,
    block_shape: tuple[int, int] | None,
    *,
    per_channel_quant: bool,
    activation_dtype: ActivationDtype,
    ep: bool = False,
    variant: tuple[str, ...] = (),
) -> MoeShape:
    """The shape of a layer whose weights lie as SGLang keeps them. sizes: E, N as its file names count it (packed for
    int4), K, top_k. dtype: a word of ``QUANTISED`` or ``ACTIVATION_WORDS``."""
    experts, n, k, top_k = sizes
    packed = _PER_BYTE.get(dtype, 1)
    rows = n * packed * (1 if "ungated" in variant else 2)
    return MoeShape(
        (experts, rows, k // packed),
        (experts, k, n),
        top_k,
        dtype if dtype in QUANTISED else "float32" if ACTIVATION_WORDS[dtype] == "float32" else None,
        block_shape,
        per_channel_quant,
        activation_dtype,
        ep,
        variant,
    )
