"""What Marlin's layouts store, by `Tiling.apply` and by shared/facts: no executor, no table."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from transcode.kernels import marlin
from transcode.quant import pack_nibbles, unpack_nibbles
from transcode.spec import Layout
from transcode.tiling import Tiling

LAYOUTS = marlin.LAYOUTS
RAW = {1: torch.uint8, 2: torch.int16}


def name(layout: Layout) -> str:
    return f"{layout.name} {layout.variant}"


def codes(layout: Layout, given: Tensor) -> Tensor:
    """Codes as words; eight nibbles or four bytes of a word follow each other, the first lowest."""
    tiling, bits = layout.tilings["weight"]
    stored = tiling.apply(unpack_nibbles(given) if bits == 4 else given).flatten()
    return (pack_nibbles(stored) if bits == 4 else stored).view(torch.int32)


def order(layout: Layout, groups: int) -> Tiling:
    """How block scales are ordered."""
    found = layout.tilings.get("weight_scale of whole rows" if groups == 1 else "")
    return (found or layout.tilings["weight_scale"])[0]


def scales(layout: Layout, given: Tensor, lift: float) -> Tensor:
    """Block scales as raw numbers, uint8 or int16, but in the order that they had."""
    if layout.scales.dtype == "U8":
        return (given.int() + int(torch.tensor(lift).log2())).to(torch.uint8)
    if not layout.scales.dtype:
        return (given * lift).view(torch.int16)
    mantissa, exponent = torch.frexp(given.double() * lift)
    byte = torch.where(mantissa > 0, (exponent + 21) * 8 + (mantissa * 16).int() - 8, 0)
    least = 128 if layout.runtime == "vllm" else 0  # vLLM wants a leading one in it
    return torch.where(byte < least, 0, byte).to(torch.uint8)


def values(layout: Layout, dtype: str, lift: float) -> Tensor:
    """Every block scale that may come: numbers >= 0 that can be multiplied by the lift."""
    if layout.scales.dtype == "U8":
        return torch.arange(256).to(torch.uint8)
    if layout.scales.dtype:
        every = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn)
        return every[every.float() * lift <= 448]
    own: torch.dtype = getattr(torch, dtype)
    every = torch.arange(1 << 15).to(torch.int16).view(own)
    return every[torch.isfinite(every * lift)]


def grid(found: Tensor, rows: int, groups: int) -> Tensor:
    """These numbers in turn, all of them if there is room, shuffled."""
    random = torch.Generator().manual_seed(rows)
    places = torch.randperm(rows * groups, generator=random) % len(found)
    return found.view(RAW[found.itemsize])[places].view(found.dtype).view(rows, groups)


def distinct(found: Tensor) -> Tensor:
    """The bytes or halves that occur."""
    raw = found.contiguous().view(RAW[found.itemsize]).flatten().int() & 0xFFFF
    return torch.bincount(raw, minlength=1 << 16) > 0


def lifts(layout: Layout, dtype: str) -> tuple[float, ...]:
    """Lifts that may be chosen."""
    found = {layout.scales.lift(2.0**e, dtype) for e in (-9, 0, 7, 8.8)}
    return tuple(sorted(found))


def swapped(tiling: Tiling, shape: tuple[int, ...]) -> list[Tiling]:
    """The tiling with each pair of neighbouring stored factors swapped, all along one axis."""
    source, factors = tiling.pattern.split("->")[0], [f for g in tiling.groups for f in g]
    sizes = tiling.sizes(shape)
    return [
        Tiling(f"{source}-> " + " ".join({a: b, b: a}.get(f, f) for f in factors))
        for a, b in pairwise(factors)
        if sizes[a] > 1 < sizes[b]
    ]
