"""Layers of FP8 checkpoints: a float32 factor per tensor, projection, row or block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from scripts.packers.draw import draw_bias, draw_fp8, generator
from scripts.packers.tensors import Tensors

BLOCK = 128
Granularity = Literal["tensor", "member", "channel", "block"]


@dataclass(frozen=True)
class Factors:
    """Random factors, spread evenly over the exponents of two from `low` to `high`."""

    low: float
    high: float

    def draw(self, random: torch.Generator, *shape: int) -> Tensor:
        """Draw a tensor of them, in float32."""
        return torch.exp2(torch.rand(shape, generator=random) * (self.high - self.low) + self.low)


USUAL = Factors(-12, -4)


def scale_name(granularity: Granularity) -> str:
    """What checkpoints and runtimes call the factors."""
    return "weight_scale_inv" if granularity == "block" else "weight_scale"


@dataclass(frozen=True)
class Dense:
    """A linear layer, perhaps of several projections joined along N."""

    name: str
    granularity: Granularity
    n: int
    k: int
    members: tuple[int, ...] = ()
    factors: Factors = USUAL
    bias: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        random = generator(self.name)
        shapes = {
            "tensor": (),
            "member": (len(self.members),),
            "channel": (self.n, 1),
            "block": (math.ceil(self.n / BLOCK), math.ceil(self.k / BLOCK)),
        }
        tensors = {
            "weight": draw_fp8(random, self.n, self.k),
            scale_name(self.granularity): self.factors.draw(random, *shapes[self.granularity]),
        }
        if self.bias:
            tensors["bias"] = draw_bias(random, dtype, self.n)
        if self.members:
            tensors["members"] = torch.tensor(self.members)
        return tensors


@dataclass(frozen=True)
class Moe:
    """The experts of one layer; a factor per member is one for gate and one for up."""

    name: str
    granularity: Granularity
    hidden: int
    inter: int
    experts: int = 2
    gated: bool = True

    def draw(self, _dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        random = generator(self.name)
        rows = self.inter * (2 if self.gated else 1)
        tensors: Tensors = {}
        for matrix, n, k in (("w13", rows, self.hidden), ("w2", self.hidden, self.inter)):
            shapes = {
                "tensor": (),
                "member": (2,) if matrix == "w13" else (),
                "channel": (n, 1),
                "block": (math.ceil(n / BLOCK), math.ceil(k / BLOCK)),
            }
            tensors[f"{matrix}_weight"] = draw_fp8(random, self.experts, n, k)
            tensors[f"{matrix}_{scale_name(self.granularity)}"] = USUAL.draw(
                random, self.experts, *shapes[self.granularity]
            )
        return tensors
