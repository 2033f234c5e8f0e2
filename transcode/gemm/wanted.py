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
from transcode.quant import QuantTensor
from transcode.settle import prepare
from transcode.stacks import Stack

CHUNK = 1 << 24
"""Elements of a matrix that are decoded at a time."""

NOTHING = 1e9
"""The error of an output that is not finite, or not zero where zero is wanted."""


def held(job: Job, stack: Stack, e: int, i: int) -> tuple[QuantTensor, Tensor]:
    """What the file is meant to hold of a matrix, and of its bias (float64, zeros without one).

    That is prepared scales, less those flushed, and the final global scale.
    """
    module = stack.groups[e][i]
    scales = prepare(module, job.unified, job.read)
    lost = job.plan.options.layout.flushed(scales, float(job.settled[stack.name].lift[e]))
    kept = torch.where(lost, 0, scales.view(torch.uint8)).view(scales.dtype)
    bias = _no_bias(module)
    if "bias" in module.leaves:
        bias = rounded_bias(module, job.plan.options.dtype, job.unified, job.read)[0].double()
    return QuantTensor(_codes(job, module), kept, job.unified.g[module.name]), bias


def meant(job: Job, stack: Stack, e: int, i: int) -> tuple[QuantTensor, Tensor]:
    """What the source itself means, but that a NaN scale over zeros is zero."""
    module = stack.groups[e][i]
    scales = prepare(module, replace(job.unified, multiplier={}), job.read)
    bias = _no_bias(module)
    if "bias" in module.leaves:
        bias = job.read.tensor(module.leaf("bias")).double()
    return QuantTensor(_codes(job, module), scales, job.unified.scalars[module.name].factor), bias


def kept(job: Job, stack: Stack, e: int) -> bool:
    """Whether no block scale of a group was rounded again or flushed."""
    changed = {f.module for f in job.settled[stack.name].flushes} | job.unified.multiplier.keys()
    return not any(module.name in changed for module in stack.groups[e])


def _codes(job: Job, module: Module) -> Tensor:
    return job.read.tensor(module.codes)


def _no_bias(module: Module) -> Tensor:
    return torch.zeros(module.shape[0], dtype=torch.float64)


def product(x: Tensor, w: QuantTensor) -> Tensor:
    """`x @ W.T` in float64, a few rows of W at a time."""
    step = max(1, CHUNK // w.shape[1])
    return torch.cat(
        [
            x @ QuantTensor(w.codes[r : r + step], w.scales[r : r + step], w.global_scale)
            .dequantize().double().T
            for r in range(0, w.shape[0], step)
        ],
        -1,
    )  # fmt: skip


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
