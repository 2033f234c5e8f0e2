"""E4M3 block scales, NVFP4's: are they valid, and which lift fits them.

Prepared scales are what is packed: the source's E4M3 scales, rounded again where `unify` says so,
+0 for -0, and zero where a block's value is zero whatever its scale says (a zero matrix; NaN over
zeros).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import FormatError, LayoutError, LossError
from transcode.module import Module
from transcode.settled import Flush, Settled, flush, refuse_flushes, require_over_zeros
from transcode.spec import Layout
from transcode.stacks import Options, Stack
from transcode.unify import Unified

BYTES = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of every E4M3 byte."""

NAN = 0x7F
"""The E4M3 byte of NaN; all below are numbers >= 0, all above negative ones and a second NaN."""


def prepare(module: Module, unified: Unified, read: Reader) -> Tensor:
    """`[N, K/16]` float8_e4m3fn as it is packed; FormatError for scales that mean nothing.

    Rounding again is to nearest even of `scale * (g_i / g)`: at most 1/17 of the value where the
    result is normal, at most 2^-10 absolute where it is not.
    """
    stored = read.tensor(module.scales)
    if unified.scalars[module.name].zero:
        return torch.zeros_like(stored.view(torch.uint8)).view(stored.dtype)
    if stored.view(torch.uint8).max() < NAN and module.name not in unified.multiplier:
        return stored
    value = stored.float()
    nan = value.isnan()
    if nan.any():
        require_over_zeros(module, nan, read)
        value = torch.where(nan, 0, value)
    if (value < 0).any():
        row, block = (value < 0).nonzero()[0].tolist()
        raise FormatError(f"{module.name}: weight_scale is negative in row {row}, block {block}")
    if module.name in unified.multiplier:
        value = (value.double() * unified.multiplier[module.name]).float()
    return value.abs().to(torch.float8_e4m3fn)


def settle(stack: Stack, unified: Unified, options: Options, read: Reader) -> Settled:
    """Read a stack's block scales and choose its lifts; with `--exact` a flush is a LossError."""
    layout = options.layout
    assert layout.factor is not None
    shape = (len(stack.groups), len(stack.groups[0]), 256)
    histograms = torch.zeros(shape, dtype=torch.int64)
    nan = rounded = fallen = 0
    worst = 0.0
    for e, group in enumerate(stack.groups):
        for i, module in enumerate(group):
            source = _histogram(read.tensor(module.scales))
            empty, again = unified.scalars[module.name].zero, module.name in unified.multiplier
            if not (empty or again or source[NAN:].any()):
                histograms[e, i] = source  # packed as they are
                continue
            scales = prepare(module, unified, read)
            histograms[e, i] = _histogram(scales)
            if not empty:
                nan += int(source[[0x7F, 0xFF]].sum())
            if again:
                zeros = int(source[0x00] + source[0x80] + source[[0x7F, 0xFF]].sum())
                fallen += int(histograms[e, i, 0]) - zeros
                changed, by = change(module, scales, unified, read)
                rounded, worst = rounded + changed, max(worst, by)
    g = _factors(layout, stack, unified)
    lift, lifts = _lifts(layout, histograms, options.dtype)
    flushes = list[Flush]()
    for e, group in enumerate(stack.groups):
        for i, module in enumerate(group):
            if _count(layout, histograms[e, i], float(lift[e]), options.dtype):
                scales = prepare(module, unified, read)
                lost = layout.scales.flushed(scales, float(lift[e]), options.dtype)
                kept = layout.scales.kept
                flushes.append(flush(module, scales, scales.float(), lost, read, kept=kept))
    refuse_flushes(stack, flushes, options)
    try:
        stored = layout.factor.pack(g, lift.reshape(-1, *[1] * (g.dim() - 1)), options.dtype)
    except LayoutError as error:
        raise LayoutError(f"{stack.name}: {error}") from None
    apart = (
        layout.factor.unpack(stored, lift.reshape(-1, *[1] * (g.dim() - 1)), options.dtype).double()
        - g.double()
    ).abs()
    short = float((apart / g.double())[g > 0].max()) if (g > 0).any() else 0.0
    if options.exact and short:
        raise LossError(
            f"{stack.name}: its global scales are not exact in {options.dtype}, as "
            f"{layout.runtime} has them"
        )
    zero = [m.name for group in stack.groups for m in group if unified.scalars[m.name].zero]
    return Settled(g, lift, lifts, tuple(flushes), rounded, fallen, worst, nan, tuple(zero), short)


def _factors(layout: Layout, stack: Stack, unified: Unified) -> Tensor:
    """Global scales of the groups, `[E]`; of their members, `[E, M]`, if the kernel takes each."""
    assert layout.factor is not None
    each = [[unified.g[m.name].reshape(()) for m in group] for group in stack.groups]
    g = torch.stack([torch.stack(row) for row in each])
    return g if layout.factor.each and g.shape[1] > 1 else g[:, 0]


def _histogram(scales: Tensor) -> Tensor:
    """How often each E4M3 byte occurs, int64 `[256]`."""
    return torch.bincount(scales.view(torch.uint8).int().flatten(), minlength=256)


def change(module: Module, scales: Tensor, unified: Unified, read: Reader) -> tuple[int, float]:
    """How many scales rounding changed, and by how much at most where the result is normal."""
    source = read.tensor(module.scales).double()
    exact = torch.nan_to_num(source, 0.0) * unified.multiplier[module.name]
    error, normal = (scales.double() - exact).abs(), scales.double() >= 2.0**-6
    return int((error > 0).sum()), float((error / exact)[normal].max()) if normal.any() else 0.0


def _lifts(layout: Layout, histograms: Tensor, dtype: str) -> tuple[Tensor, str]:
    """One lift for all groups, as vLLM takes it, unless one each flushes fewer scales."""
    experts = len(histograms)
    one = layout.scales.lift(_largest(histograms), dtype)
    lost = _count(layout, histograms, one, dtype)
    if lost and experts > 1:
        own = [layout.scales.lift(_largest(h), "bfloat16") for h in histograms]
        if sum(_count(layout, h, f, dtype) for h, f in zip(histograms, own, strict=True)) < lost:
            return torch.tensor(own, dtype=torch.float32), "per expert"
    return torch.full((experts,), one, dtype=torch.float32), "one"


def _largest(histograms: Tensor) -> float:
    present = histograms.reshape(-1, 256).sum(0) > 0
    return float(torch.where(present, BYTES.nan_to_num(0), 0).max())


def _count(layout: Layout, histograms: Tensor, lift: float, dtype: str) -> int:
    lost = layout.scales.flushed(BYTES.to(torch.float8_e4m3fn), lift, dtype)
    return int(histograms.reshape(-1, 256).sum(0)[lost].sum())
