"""Block scales of a stack, read once before any code: are they valid, and which lift fits them.

Prepared scales are what is packed: the source's E4M3 scales, rounded again where `unify` says so,
+0 for -0, and zero where a block's value is zero whatever its scale says (a zero matrix; NaN over
zeros).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import FormatError, LayoutError, LossError
from transcode.module import Module
from transcode.quant import E2M1, unpack_nibbles
from transcode.spec import Layout
from transcode.stacks import Options, Stack
from transcode.unify import Unified

BYTES = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of every E4M3 byte."""

NAN = 0x7F
"""The E4M3 byte of NaN; all below are numbers >= 0, all above negative ones and a second NaN."""


@dataclass(frozen=True)
class Flush:
    """Non-zero block scales of one matrix that the kernel's bytes cannot hold.

    at, bytes: for the way back, flat indices into `[N, K/16]` (little-endian uint32) and the E4M3
    bytes there; both in base64.
    lost, norm: sums of squares of the flushed blocks' values and of the whole matrix.
    """

    module: str
    count: int
    at: str
    bytes: str
    lost: float
    norm: float


@dataclass(frozen=True)
class Settled:
    """What the scales of a stack say. g and lift: float32 `[E]`.

    lifts: "one" for a lift shared by all groups, "per expert" where that flushes fewer scales.
    rounded, fallen: block scales that rounding changed, and those of them that became zero.
    worst: the largest relative change of a rounded scale that is normal afterwards, at most 1/17.
    nan: blocks of zeros whose scale was NaN.  zero: names of matrices that are zero.
    """

    g: Tensor
    lift: Tensor
    lifts: str
    flushes: tuple[Flush, ...]
    rounded: int
    fallen: int
    worst: float
    nan: int
    zero: tuple[str, ...]

    def lift_entry(self) -> float | list[float]:
        """The lift as a config states it: one number, or one for each expert."""
        return float(self.lift[0]) if self.lifts == "one" else self.lift.tolist()


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
        if (bad := over_codes(module, nan, read)).any():
            row, block = bad.nonzero()[0].tolist()
            raise FormatError(
                f"{module.name}: weight_scale is NaN in row {row}, block {block}, over codes that "
                "are not zero"
            )
        value = torch.where(nan, 0, value)
    if (value < 0).any():
        row, block = (value < 0).nonzero()[0].tolist()
        raise FormatError(f"{module.name}: weight_scale is negative in row {row}, block {block}")
    if module.name in unified.multiplier:
        value = (value.double() * unified.multiplier[module.name]).float()
    return value.abs().to(torch.float8_e4m3fn)


def over_codes(module: Module, nan: Tensor, read: Reader) -> Tensor:
    """Which of the blocks `[N, K/16]` bool hold codes that are not zero: NaN is allowed over zeros
    only."""
    magnitudes = read.tensor(module.codes) & 0x77  # of both nibbles
    return nan & magnitudes.reshape(*nan.shape, -1).any(-1)


def settle(stack: Stack, unified: Unified, options: Options, read: Reader) -> Settled:
    """Read a stack's block scales and choose its lifts; with `--exact` a flush is a LossError."""
    layout = options.layout
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
    g = torch.stack([unified.g[group[0].name].reshape(()) for group in stack.groups])
    lift, lifts = _lifts(layout, histograms, options.dtype)
    flushes = [
        _flush(layout, module, lift[e], unified, read)
        for e, group in enumerate(stack.groups)
        for i, module in enumerate(group)
        if _count(layout, histograms[e, i], float(lift[e]))
    ]
    if flushes and options.exact:
        raise LossError(
            f"{flushes[0].module}: {flushes[0].count} block scales are too small for "
            f"{layout.name}, which would store zero; {len(flushes)} matrices in {stack.name}"
        )
    try:
        layout.pack_global(g, lift, options.dtype)
    except LayoutError as error:
        raise LayoutError(f"{stack.name}: {error}") from None
    zero = [m.name for group in stack.groups for m in group if unified.scalars[m.name].zero]
    return Settled(g, lift, lifts, tuple(flushes), rounded, fallen, worst, nan, tuple(zero))


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
    one = layout.lift(_largest(histograms), dtype)
    lost = _count(layout, histograms, one)
    if lost and experts > 1:
        own = [layout.lift(_largest(h), "bfloat16") for h in histograms]
        if sum(_count(layout, h, f) for h, f in zip(histograms, own, strict=True)) < lost:
            return torch.tensor(own, dtype=torch.float32), "per expert"
    return torch.full((experts,), one, dtype=torch.float32), "one"


def _largest(histograms: Tensor) -> float:
    present = histograms.reshape(-1, 256).sum(0) > 0
    return float(torch.where(present, BYTES.nan_to_num(0), 0).max())


def _count(layout: Layout, histograms: Tensor, lift: float) -> int:
    lost = layout.flushed(BYTES.to(torch.float8_e4m3fn), lift)
    return int(histograms.reshape(-1, 256).sum(0)[lost].sum())


def _flush(layout: Layout, module: Module, lift: Tensor, unified: Unified, read: Reader) -> Flush:
    scales = prepare(module, unified, read)
    lost = layout.flushed(scales, float(lift))
    codes = unpack_nibbles(read.tensor(module.codes))
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[(codes & 7).int()].reshape(*lost.shape, 16)
    squares = (magnitude.square().sum(-1)) * scales.double().square()
    at = lost.flatten().nonzero().flatten()
    return Flush(
        module.name,
        len(at),
        _base64(at.numpy().astype("<u4").tobytes()),
        _base64(scales.view(torch.uint8).flatten()[at].numpy().tobytes()),
        float(squares[lost].sum()),
        float(squares.sum()),
    )


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def norm_share(flushes: Sequence[Flush]) -> float:
    """The share of the Frobenius norm of the matrices concerned that is lost."""
    norm = sum(f.norm for f in flushes)
    return float((sum(f.lost for f in flushes) / norm) ** 0.5) if norm else 0.0
