"""What a kernel layout has to say about itself; formats: producer.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from transcode.quant import Encoding
from transcode.tiling import Tiling

Order = Literal["gate_up", "interleaved", "up_gate"]
"""How the rows of gate and up lie in w13: gate first, in turns (gate's the even ones), up first."""


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

    bits: of a code.  dtype: safetensors' name of what is stored.
    shape(n, k): the stored shape, in that dtype.
    pack: codes `[N, K/2]` (4 bits, the even column in the low nibble) or `[N, K]` (8), uint8.
    """

    bits: int
    dtype: str
    shape: Callable[[int, int], tuple[int, int]]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scales:
    """How block scales `[R, G]` are stored; E4M3 as float8_e4m3fn, E8M0 as uint8.

    dtype: safetensors' name of what is stored; "" for the activations' dtype.
    shape(r, groups): the stored shape.
    lift(largest, dtype): the power of two that all scales of a stack are multiplied with, if the
    largest of them is `largest`.
    pack(scales, lift), unpack(stored, lift, (r, groups)): exact inverses, but for flushed scales.
    flushed(scales, lift, dtype): which scales are not zero, but zero to the kernel.
    kept: whether flushed ones are stored all the same, and come back.
    overflows(scales, lift): which scales are too large to be stored.
    fill: the byte of scales that pad.
    least: smaller ones are stored as this, and may stand over codes that are zero only.
    of: what FP8's scales are made into: "rows", one for each row and group of columns; "own", as
    the source has them, float32, R and G those of its blocks; "powers", as "rows" in E8M0.
    """

    dtype: str
    shape: Callable[[int, int], tuple[int, ...]]
    lift: Callable[[float, str], float]
    pack: Callable[[Tensor, float], Tensor]
    unpack: Callable[[Tensor, float, tuple[int, int]], Tensor]
    flushed: Callable[[Tensor, float, str], Tensor]
    kept: bool
    overflows: Callable[[Tensor, float], Tensor]
    fill: int = 0
    least: float = 0.0
    of: Literal["rows", "own", "powers"] = "rows"


@dataclass(frozen=True)
class Factor:
    """How global scales are stored, as what the kernel multiplies with in the end.

    dtype: safetensors' name, "" for the activations' dtype.
    pack(g, lift, dtype): float32 `[E]` or `[E, 2]` factors; LayoutError where one cannot be stored.
    unpack(stored, lift, dtype): float32 factors that the kernel then applies in effect.
    each: whether the kernel takes gate's and up's apart, so that both are kept.
    """

    dtype: str
    pack: Callable[[Tensor, Tensor, str], Tensor]
    unpack: Callable[[Tensor, Tensor, str], Tensor]
    each: bool = False


@dataclass(frozen=True)
class Bias:
    """How a bias `[N]`, given in the activations' dtype, is stored.

    dtype: safetensors' name, "" for the activations' dtype.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    dtype: str = ""


@dataclass(frozen=True)
class Factors:
    """Global scales as factors, float32: g of weights, `[E]` or `[E, 2]`; a of activations, `[E]`;
    E is 1 for linears.  a2: of the second GEMM's activations, for w13."""

    g: Tensor
    a: Tensor
    a2: Tensor | None = None


@dataclass(frozen=True)
class Scalar:
    """What a runtime works out of factors: float32, `[]` of a linear, `[E]` of experts.

    of: "" for linears, "w13" or "w2".  each: whether it is `[E, 2]`, gate and up.
    """

    name: str
    of: Literal["", "w13", "w2"]
    make: Callable[[Factors], Tensor]
    each: bool = False


@dataclass(frozen=True)
class Parts:
    """How a matrix is stored. bias: None where the kernel takes none."""

    codes: Codes
    scales: Scales
    bias: Bias | None


@dataclass(frozen=True)
class Layout:
    """How a kernel wants its weights.

    variant: what tells it from other layouts of this name.  runtime, release: whose packer it
    equals.  activations: "16-bit", "fp8" or "fp4".
    encodings: what is packed.  groups: how many columns may share a scale, 0 for whole rows.
    dtypes: of the activations (of results, where activations are FP8): "bfloat16", "float16".
    dense: whether single linears are packed; else they are carried as the source has them where
    the runtime has other kernels for them, or refused where it has none.
    order: how gate's and up's rows lie in w13 before it is packed.  interleaves: whether they take
    turns where the family's own checkpoints do so.
    tilings: the storage orders, by what is stored so, and the bits of an element.
    pad(rows, k, unit): the padded sizes of matrices joined along N, K a multiple of the unit.
    pad_experts(hidden, intermediate, unit, tp, gated): the padded hidden and intermediate sizes of
    an MoE layer; LayoutError if they cannot be tiled.
    serves(n, k): whether the kernel can tile a matrix of this size, as one rank may hold it.
    codes, scales, bias: how a matrix is stored; bias is None where the kernel takes none.
    gated: how w13 of gated experts is, where that is another way.
    factor: None where the encodings have no global scale.
    inputs: whether the activations' scales are stored, as factors: "" no, "each" one for every
    expert, "all" the largest of a layer's experts for all of them.
    tile: rows of a member, and columns, in whose multiples ranks may share a packed matrix; 0 where
    they cannot.
    advice(hidden, intermediate): what a user should know of these sizes, or "".
    scalars: what the runtime works out of factors, written where it is asked for.
    instead: why the kernel does not read other encodings, and the next best step for each.
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
    bias: Bias | None
    variant: str = "vllm"
    runtime: str = "vllm"
    release: str = "0.33.0"
    activations: str = "16-bit"
    dense: Literal["packed", "carried", "refused"] = "packed"
    order: Order = "gate_up"
    interleaves: bool = True
    gated: Parts | None = None
    inputs: Literal["", "each", "all"] = ""
    tile: tuple[int, int] = (64, 16)
    advice: Callable[[int, int], str] = lambda hidden, intermediate: ""
    scalars: tuple[Scalar, ...] = ()
    instead: Mapping[Encoding, str] = field(default_factory=dict)

    def joined(self, members: int) -> Parts:
        """How a matrix of so many joined members is stored; a single linear has one."""
        own = Parts(self.codes, self.scales, self.bias)
        return self.gated if self.gated and members > 1 else own

    @property
    def label(self) -> str:
        """Name and version, and the variant if it is not vLLM's for 16-bit activations."""
        other = "" if self.variant == "vllm" else f" ({self.variant})"
        return f"{self.name} {self.version}{other}"
