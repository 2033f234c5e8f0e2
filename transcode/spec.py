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
class Layout:
    """How a kernel wants its weights. Every `unpack_*` is the exact inverse of its `pack_*`.

    `dtype` is the activation dtype, "bfloat16" or "float16". N and K are padded sizes.

    tilings: the storage orders, by what is stored so, and the bits of an element.
    pad(rows, k): the padded sizes of matrices joined along N.
    pad_experts(hidden, intermediate, tp): the padded intermediate size of an MoE layer.
    serves(n, k): whether the kernel can tile a matrix of this size, as one rank may hold it.
    weight_shape(n, k), scale_shape(n, k): the stored shapes, without data.
    pack_codes: `[N, K/2]` uint8 to the stored words.
    lift(largest, dtype): the power of two that moves the largest block scale into range.
    pack_scales(scales, lift): `[N, K/16]` float8_e4m3fn to the stored bytes.
    flushed(scales, lift): `[N, K/16]` bool, the non-zero scales that the stored bytes turn to zero.
    unpack_scales(stored, lift): `[N, K/16]` float8_e4m3fn, flushed ones as zero.
    pack_global(factor, lift, dtype): the float32 that the kernel multiplies with in the end.
    pack_bias: `[N]` in the activation dtype to the stored order.
    """

    name: str
    version: int
    encoding: Encoding
    title: str
    tilings: Mapping[str, tuple[Tiling, int]]
    pad: Callable[[Sequence[int], int], Padded]
    pad_experts: Callable[[int, int, int], int]
    serves: Callable[[int, int], bool]
    weight_shape: Callable[[int, int], tuple[int, int]]
    scale_shape: Callable[[int, int], tuple[int, int]]
    pack_codes: Callable[[Tensor], Tensor]
    unpack_codes: Callable[[Tensor], Tensor]
    lift: Callable[[float, str], float]
    pack_scales: Callable[[Tensor, float], Tensor]
    flushed: Callable[[Tensor, float], Tensor]
    unpack_scales: Callable[[Tensor, float], Tensor]
    pack_global: Callable[[Tensor, Tensor, str], Tensor]
    pack_bias: Callable[[Tensor], Tensor]
    unpack_bias: Callable[[Tensor], Tensor]
