"""Random contents of checkpoints. They depend on the name of the case alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(name: str) -> torch.Generator:
    """A generator whose seed depends on the name of the case alone."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def draw_bytes(random: torch.Generator, *shape: int) -> Tensor:
    """Random pairs of FP4 codes; all sixteen occur."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=random)


def draw_fp8(random: torch.Generator, *shape: int) -> Tensor:
    """Random float8_e4m3fn, of either sign, without NaN."""
    codes = draw_bytes(random, *shape)
    return (codes - (codes % 128 == 127).to(torch.uint8)).view(torch.float8_e4m3fn)


def draw_bias(random: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """A random bias in the dtype of the activations."""
    return torch.randn(shape, generator=random).to(dtype)


@dataclass(frozen=True)
class Exponents:
    """Random E8M0 codes, as uint8, from `low` to `high`; both occur."""

    low: int
    high: int

    def draw(self, random: torch.Generator, *shape: int) -> Tensor:
        """Draw a tensor of them."""
        codes = torch.randint(self.low, self.high + 1, shape, generator=random)
        first, second = torch.randperm(codes.numel(), generator=random)[:2]
        codes.view(-1)[first] = self.low
        codes.view(-1)[second] = self.high
        return codes.to(torch.uint8)


@dataclass(frozen=True)
class Scales:
    """Random block scales: e4m3 codes from `low` to `high`, and one that is `top`."""

    low: int
    high: int
    top: int

    def draw(self, random: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Draw a tensor of them, in float8_e4m3fn."""
        codes = torch.randint(self.low, self.high + 1, tuple(shape), generator=random)
        place = torch.randint(codes.numel(), (1,), generator=random)
        codes.view(-1)[place] = self.top
        return codes.to(torch.uint8).view(torch.float8_e4m3fn)
