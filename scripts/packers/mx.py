"""Layers of MXFP4 and MXFP8 checkpoints: a power of two for every 32 columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.packers.draw import Exponents, draw_bias, draw_bytes, draw_fp8, generator
from scripts.packers.tensors import Tensors

GROUP = 32
USUAL = Exponents(110, 130)
ALL = Exponents(0, 254)
"""Every E8M0 code but NaN."""


def draw_weight(bits: int, random: torch.Generator, *shape: int) -> Tensor:
    """Random elements of 4 or 8 bits; two of 4 bits share a byte, the even column below."""
    if bits == 8:
        return draw_fp8(random, *shape)
    return draw_bytes(random, *shape[:-1], shape[-1] // 2)


@dataclass(frozen=True)
class Dense:
    """A linear layer."""

    name: str
    bits: int
    n: int
    k: int
    exponents: Exponents = USUAL
    bias: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        random = generator(self.name)
        tensors = {
            "weight": draw_weight(self.bits, random, self.n, self.k),
            "weight_scale": self.exponents.draw(random, self.n, self.k // GROUP),
        }
        if self.bias:
            tensors["bias"] = draw_bias(random, dtype, self.n)
        return tensors


@dataclass(frozen=True)
class Moe:
    """The experts of one layer; w13 is gate over up, or their rows in turn."""

    name: str
    bits: int
    hidden: int
    inter: int
    experts: int = 2
    exponents: Exponents = USUAL
    gated: bool = True
    bias: bool = False
    interleaved: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        random = generator(self.name)
        rows = self.inter * (2 if self.gated else 1)
        tensors: Tensors = {}
        for matrix, n, k in (("w13", rows, self.hidden), ("w2", self.hidden, self.inter)):
            tensors[f"{matrix}_weight"] = draw_weight(self.bits, random, self.experts, n, k)
            scales = self.exponents.draw(random, self.experts, n, k // GROUP)
            tensors[f"{matrix}_weight_scale"] = scales
            if self.bias:
                tensors[f"{matrix}_bias"] = draw_bias(random, dtype, self.experts, n)
        return tensors
