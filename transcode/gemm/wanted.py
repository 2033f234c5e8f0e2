"""What a GEMM should give: float64 products with the float32 weights that a checkpoint means."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from math import frexp, sqrt

import torch
from torch import Tensor

from transcode.job import Job
from transcode.module import Module
from transcode.pack import bias as rounded_bias
from transcode.quant import FP8, Encoding, QuantTensor
from transcode.settle import prepare
from transcode.stacks import Stack, group_of

CHUNK = 1 << 24
"""Elements of a matrix that are decoded at a time."""

NOTHING = 1e9
"""The error of an output that is not finite, or not zero where zero is wanted."""


def held(job: Job, stack: Stack, e: int, i: int) -> tuple[QuantTensor, Tensor]:
    """What the file is meant to hold of a matrix, and of its bias (float64, zeros without one).

    That is prepared scales, less those flushed, and the final global scale.
    """
    module, options = stack.groups[e][i], job.plan.options
    scales = prepare(module, job.unified, options, job.read)
    codes = job.read.tensor(module.codes)
    bias = _no_bias(module)
    if "bias" in module.leaves:
        bias = rounded_bias(module, options.dtype, job.unified, job.read)[0].double()
    if module.encoding in FP8:
        if options.layout.scales.of == "own":
            one = module.encoding is Encoding.FP8_TENSOR
            own = scales.reshape(()) if one else scales
            return QuantTensor(module.encoding, codes, own, None, module.block), bias
        block = 1, group_of(module) or module.shape[1]
        return QuantTensor(Encoding.FP8_BLOCK, codes, scales, None, block), bias
    lift = float(job.settled[stack.name].lift[e])
    lost = options.layout.scales.flushed(scales, lift, options.dtype)
    kept = torch.where(lost, 0, scales.view(torch.uint8)).view(scales.dtype)
    factor = _factor(job, stack, e)
    if factor is not None and factor.dim():
        factor = factor[i]  # the kernel takes each member's
    return QuantTensor(module.encoding, codes, kept, factor), bias


def meant(job: Job, stack: Stack, e: int, i: int) -> tuple[QuantTensor, Tensor]:
    """What the source itself means, but that a NaN scale over zeros is zero."""
    module, read = stack.groups[e][i], job.read
    codes, scales = read.tensor(module.codes), read.tensor(module.scales)
    if scales.element_size() == 1:
        unscaled = replace(job.unified, multiplier={})
        scales = prepare(module, unscaled, job.plan.options, read)
    scalars = job.unified.scalars.get(module.name)
    factor = scalars.factor if scalars else None
    bias = read.tensor(module.leaf("bias")).double() if "bias" in module.leaves else None
    weight = QuantTensor(module.encoding, codes, scales, factor, module.block)
    return weight, _no_bias(module) if bias is None else bias


def kept(job: Job, stack: Stack, e: int) -> bool:
    """Whether no scale of a group was rounded or flushed."""
    settled = job.settled[stack.name]
    changed = {f.module for f in settled.flushes} | job.unified.multiplier.keys()
    rounded = settled.rounded and stack.first.encoding is not Encoding.NVFP4
    stored = _factor(job, stack, e)
    same = stored is None or bool(stored == settled.g[e])
    return same and not rounded and not any(m.name in changed for m in stack.groups[e])


def _factor(job: Job, stack: Stack, e: int) -> Tensor | None:
    """The global scale that a group's stored one stands for."""
    how, settled = job.plan.options.layout.factor, job.settled[stack.name]
    if how is None:
        return None
    g, lift, dtype = settled.g[e], settled.lift[e], job.plan.options.dtype
    return how.unpack(how.pack(g, lift, dtype), lift, dtype)


def _no_bias(module: Module) -> Tensor:
    return torch.zeros(module.shape[0], dtype=torch.float64)


def product(x: Tensor, w: QuantTensor) -> Tensor:
    """`x @ W.T` in float64, some rows of W at a time."""
    n, k = w.shape
    tall = w.block[0] if w.block else 1
    step = tall * max(1, CHUNK // k // tall)
    parts = (w.rows(r, min(r + step, n)).dequantize() for r in range(0, n, step))
    return torch.cat([x @ part.double().T for part in parts], -1)


def activations(name: str, rows: int, columns: int) -> Tensor:
    """Float64 `[rows, columns]`, normal, seeded by a name.

    They are multiples of 1/64 below 4: eight bits, so exact in both dtypes, times any power of two.
    """
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    return (values * 64).round().clamp(-255, 255) / 64


@dataclass(frozen=True)
class Wanted:
    """What a group gives for activations `x * level`: float64 products and biases, by member.

    The level is a power of two that brings the members' products near or below their biases, or
    the largest near 1: so no bias is hidden, and float16 neither overflows nor underflows.
    """

    level: float
    products: list[Tensor]
    biases: list[Tensor]

    @property
    def outputs(self) -> list[Tensor]:
        """Products with their biases."""
        return [p + b for p, b in zip(self.products, self.biases, strict=True)]


def group(job: Job, stack: Stack, e: int, x: Tensor) -> Wanted:
    """What one group of a stack gives for activations `[M, K]` of some level."""
    pairs = [held(job, stack, e, i) for i in range(len(stack.groups[e]))]
    products, biases = [product(x, w) for w, _ in pairs], [b for _, b in pairs]
    sizes = [(size(p), size(b) or 1.0) for p, b in zip(products, biases, strict=True)]
    room = min((b / p for p, b in sizes if p), default=1.0)
    level = power(room, job.plan.options.dtype)
    return Wanted(level, [p * level for p in products], biases)


def power(factor: float, dtype: str) -> float:
    """The power of two above a factor, as far as the dtype holds activations times it."""
    low, high = (-18, 13) if dtype == "float16" else (-100, 100)
    return 2.0 ** min(max(frexp(factor)[1], low), high)


def size(x: Tensor) -> float:
    """The root of the mean square."""
    return sqrt(float(x.square().mean()))


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative Frobenius error, NOTHING at most."""
    difference, whole = float((found.double().cpu() - wanted).norm()), float(wanted.norm())
    if difference == 0:
        return 0.0
    return min(difference / whole, NOTHING) if whole and difference == difference else NOTHING
