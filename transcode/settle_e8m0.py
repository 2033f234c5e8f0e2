"""E8M0 block scales, MXFP4's and MXFP8's: bytes as they are, but NaN over zeros."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import LayoutError
from transcode.module import Module
from transcode.quant import powers
from transcode.settled import (
    Flush,
    Settled,
    flush,
    over_codes,
    plain,
    refuse_flushes,
    require_over_zeros,
)
from transcode.stacks import Options, Stack
from transcode.valuecast import require_meant

NAN = 0xFF


def prepare(module: Module, read: Reader) -> Tensor:
    """`[N, K/32]` uint8 as it is packed: 0 for NaN over zeros; FormatError for any other NaN."""
    return _prepared(module, read)[0]


def _prepared(module: Module, read: Reader) -> tuple[Tensor, int]:
    """The same, and how many were NaN."""
    stored = read.tensor(module.scales).view(torch.uint8)
    nan = stored == NAN
    if not nan.any():
        return stored, 0
    require_over_zeros(module, nan, read)
    return torch.where(nan, 0, stored), int(nan.sum())


def settle(stack: Stack, options: Options, read: Reader) -> Settled:
    """Read a stack's block scales; LayoutError for one that is too large to be stored."""
    scales, flushes, nan = options.layout.scales, list[Flush](), 0
    lift = scales.lift(1.0, options.dtype)
    for module in (m for group in stack.groups for m in group):
        mine, count = _prepared(module, read)
        require_meant(module, mine, read)
        nan += count
        if (large := scales.overflows(mine, lift)).any():
            raise LayoutError(
                f"{module.name}: block scale 2^{int(mine[large].max()) - 127} is too large for "
                f"{options.layout.name}"
            )
        lost = scales.flushed(mine, lift, options.dtype)
        if lost.any() and (lost := over_codes(module, lost, read)).any():
            flushes.append(flush(module, mine, powers(mine), lost, read, kept=scales.kept))
    refuse_flushes(stack, flushes, options)
    return replace(plain(stack, lift), flushes=tuple(flushes), nan=nan)
