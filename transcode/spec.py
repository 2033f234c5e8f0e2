"""What a kernel layout has to say about itself; formats: producer.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from transcode.quant import Encoding
from transcode.tiling import Tiling


@dataclass(frozen=True)
class Padded:
    """A joined matrix as the kernel tiles it: rows of each member, and columns.

    whole: whether every member's rows are only padded to a tile, so that the members can be split
    again; otherwise the last member carries a pad that the joined shape needed.
    """

    rows: tuple[int, ...]
    k: int
    whole: bool


@dataclass(frozen=True)
class Codes:
    """How codes are stored. N and K are padded sizes; `unpack` is the exact inverse of `pack`.

    bits: of a code.
    shape(n, k): the stored shape, int32 words.
    pack: codes `[N, K/2]` (4 bits, the even column in the low nibble) or `[N, K]` (8), uint8.
    """

    bits: int
    shape: Callable[[int, int], tuple[int, int]]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scales:
    """How block scales `[N, G]` are stored; E4M3 as float8_e4m3fn, E8M0 as uint8.

    dtype: safetensors' name of what is stored; "" for the activations' dtype, to which the source's
    scales are rounded, so that those have to be kept for the way back.
    shape(n, groups): the stored shape.
    lift(largest, dtype): the power of two that all scales of a stack are multiplied with, if the
    largest of them is `largest`.
    pack(scales, lift), unpack(stored, lift): exact inverses, but for flushed scales.
    flushed(scales, lift, dtype): which scales are not zero, but zero to the kernel.
    kept: whether flushed ones are stored all the same, and come back.
    overflows(scales, lift): which scales are too large to be stored.
    fill: the byte of scales that pad.
    """

    dtype: str
    shape: Callable[[int, int], tuple[int, int]]
    lift: Callable[[float, str], float]
    pack: Callable[[Tensor, float], Tensor]
    unpack: Callable[[Tensor, float], Tensor]
    flushed: Callable[[Tensor, float, str], Tensor]
    kept: bool
    overflows: Callable[[Tensor, float], Tensor]
    fill: int = 0


@dataclass(frozen=True)
class Factor:
    """How global scales are stored, as what the kernel multiplies with in the end.

    dtype: safetensors' name, "" for the activations' dtype.
    pack(g, lift, dtype): float32 `[E]` factors; LayoutError where one cannot be stored.
    unpack(stored, lift, dtype): float32 factors that the kernel then applies in effect.
    """

    dtype: str
    pack: Callable[[Tensor, Tensor, str], Tensor]
    unpack: Callable[[Tensor, Tensor, str], Tensor]


@dataclass(frozen=True)
class Bias:
    """How a bias `[N]` in the activations' dtype is stored."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a kernel wants its weights.

    variant: what tells it from other layouts of this name.  runtime, release: whose packer it
    equals.  activations: "16-bit" or "fp8".
    encodings: what is packed.  groups: how many columns may share a scale, 0 for whole rows.
    dtypes: of the activations (of results, where activations are FP8): "bfloat16", "float16".
    dense: whether single linears can be packed, not experts only.
    interleaves: whether gate's and up's rows take turns where the family's own checkpoints do so.
    tilings: the storage orders, by what is stored so, and the bits of an element.
    pad(rows, k, unit): the padded sizes of matrices joined along N, K a multiple of the unit.
    pad_experts(hidden, intermediate, unit, tp, gated): the padded hidden and intermediate sizes of
    an MoE layer; LayoutError if they cannot be tiled.
    serves(n, k): whether the kernel can tile a matrix of this size, as one rank may hold it.
    factor: None where the encodings have no global scale.
    """

    name: str
    version: int
    title: str
    encodings: tuple[Encoding, ...]
    groups: tuple[int, ...]
    dtypes: tuple[str, ...]
    tilings: Mapping[str, tuple[Tiling, int]]
    pad: Callable[[Sequence[int], int, int], Padded]
    pad_experts: Callable[[int, int, int, int, bool], tuple[int, int]]
    serves: Callable[[int, int], bool]
    codes: Codes
    scales: Scales
    factor: Factor | None
    bias: Bias
    variant: str = "vllm"
    runtime: str = "vllm"
    release: str = "0.33.0"
    activations: str = "16-bit"
    dense: bool = True
    interleaves: bool = True

    @property
    def label(self) -> str:
        """Name and version, and the variant if it is not vLLM's for 16-bit activations."""
        other = "" if self.variant == "vllm" else f" ({self.variant})"
        return f"{self.name} {self.version}{other}"
