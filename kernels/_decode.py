"""Codes decoded to BF16 on the CPU: every byte of codes is looked up under its scale.

The table is made by QuantTensor.dequantize, which defines the values, and rounded by torch; so the
bytes are theirs whatever the encoding. The loss is found in the table too: scales are asked in the
order of what any code could lose under them, until none can lose more than a code that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transcode.kernels._tiles import empty, uninterrupted
from transcode.quant import FP8, Encoding, QuantTensor

SHARE = 1 << 18
"""Bytes of codes that are worth a thread."""

BLOCKS = {Encoding.NVFP4: 16, Encoding.NVFP4_32: 32, Encoding.MXFP4: 32, Encoding.MXFP8: 32}
"""Columns that share a scale of one byte."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """value: `[N, K]`, of bf16's dtype or another.

    worst: the largest relative error of the rounding, of values that are normal float32.
    finite: whether all values are, before they are rounded.
    """

    value: Tensor
    worst: float
    finite: bool


def bf16(of: QuantTensor) -> Decoded | None:
    """The matrix in BF16; None for one whose table would be half as large, or larger."""
    codes = of.codes.contiguous().view(torch.uint8)
    n, octets = codes.shape
    k = of.shape[1]
    if of.encoding in BLOCKS:
        which, tall, wide = of.scales.contiguous().view(torch.uint8), 1, BLOCKS[of.encoding]
        count = 256
    elif of.encoding in FP8:
        tall, wide = {
            Encoding.FP8_TENSOR: (n, k),
            Encoding.FP8_CHANNEL: (1, k),
        }.get(of.encoding, of.block or (n, k))
        count = of.scales.numel()
        which = torch.arange(count, dtype=torch.int32).reshape(-(-n // tall), -(-k // wide))
    else:
        return None
    if 2 * count * 256 > codes.numel():
        return None
    exact = _table(of, count).reshape(count, 256, -1)
    eight = octets == k
    there = torch.bincount(which.flatten().int(), minlength=count) > 0
    if not exact[there, : 0x7F if eight else 256].isfinite().all():
        return None
    tile = tall, wide * octets // k
    words = exact.bfloat16().view(torch.uint16 if eight else torch.uint32)[..., 0]
    out = empty((n, k), torch.bfloat16, codes.device)
    nan = _run(codes, which, tile, words.contiguous(), out.view(words.dtype)) and eight
    errors = _errors(exact[:, : 0x80 if eight else 256], torch.bfloat16).amax(
        -1
    )  # E4M3: without signs
    return Decoded(out, _worst(errors, codes, which, tile), not nan)


def rounded(exact: Tensor, dtype: torch.dtype) -> Decoded:
    """Float32 `[N, K]` in another dtype: what `bf16` gives, by torch alone."""
    errors = _errors(exact, dtype)
    worst = float(errors.max()) if errors.numel() else 0.0
    return Decoded(exact.to(dtype), worst, bool(exact.isfinite().all()))


def _errors(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The relative errors of float32 values in another dtype; 0 for those that are subnormal or
    no finite numbers."""
    number = torch.where(exact.isfinite(), exact, 0.0)
    error = (number.to(dtype).float() - number).abs()
    normal = number.abs() >= torch.finfo(torch.float32).tiny
    return torch.where(normal, error / number.abs(), 0.0)


def _worst(errors: Tensor, codes: Tensor, which: Tensor, tile: tuple[int, int]) -> float:
    """The largest error of codes that are there. errors: `[count, 128 or 256]`."""
    bounds, scales = errors.amax(1).sort(descending=True)
    worst = 0.0
    for bound, scale in zip(bounds.tolist(), scales.tolist(), strict=True):
        if bound <= worst:
            break
        rows = _under(scale, codes, which, tile)
        for first in range(0, len(rows), 1 << 10):
            there = rows[first : first + (1 << 10)]
            if worst < bound and there.numel():
                code = there.flatten().int() & errors.shape[1] - 1
                worst = max(worst, float(errors[scale][code].max()))
    return worst


def _under(scale: int, codes: Tensor, which: Tensor, tile: tuple[int, int]) -> Tensor:
    """The bytes of codes under one of the scales."""
    tall, wide = tile
    if which.dtype is torch.uint8:
        return codes.reshape(-1, wide)[(which == scale).flatten()]
    i, g = divmod(scale, which.shape[1])
    return codes[i * tall : (i + 1) * tall, g * wide : (g + 1) * wide]


def _table(of: QuantTensor, count: int) -> Tensor:
    """What each byte of codes means under each scale, float32 `[count, 256 or 512]`."""
    every = torch.arange(256).to(torch.uint8).expand(count, 256).contiguous()
    if of.encoding in BLOCKS:
        columns = 256 if of.encoding is Encoding.MXFP8 else 512
        scale = torch.arange(256).to(torch.uint8)[:, None]
        scales = scale.expand(256, columns // BLOCKS[of.encoding]).contiguous()
        rows = QuantTensor(
            of.encoding, every.view(of.codes.dtype), scales.view(of.scales.dtype), of.global_scale
        )
    else:
        scales = of.scales.reshape(count)
        rows = QuantTensor(Encoding.FP8_CHANNEL, every.view(of.codes.dtype), scales)
    return rows.dequantize()


def _run(codes: Tensor, which: Tensor, tile: tuple[int, int], words: Tensor, out: Tensor) -> bool:
    """Look all bytes up; whether there is one with all of its lowest seven bits, E4M3's NaN."""
    n = codes.shape[0]
    threads = max(1, min(torch.get_num_threads(), n, codes.numel() // SHARE))
    cuts = [n * i // threads for i in range(threads + 1)]
    arrays = codes.numpy(), which.numpy(), words.numpy(), out.numpy()
    sizes, run = tuple(map(np.int64, tile)), _compiled()

    def share(i: int) -> bool:
        found: bool = run(np.int64(cuts[i]), np.int64(cuts[i + 1]), *sizes, *arrays)
        return found

    if threads == 1:
        return share(0)
    with ThreadPoolExecutor(threads) as pool:
        return any([*pool.map(share, range(threads))])


@cache
def _compiled() -> Callable[..., bool]:
    """`_looked_up`, compiled for each kind of words when it is first called."""
    with uninterrupted():
        from numba import njit  # slow to import

        made: Callable[..., bool] = njit(nogil=True)(_looked_up)
    return made


def _looked_up(
    first: int, last: int, tall: int, wide: int, codes: Any, which: Any, table: Any, out: Any
) -> bool:
    """Rows from `first` on; a scale is for `tall` rows and `wide` bytes of codes."""
    nan = np.uint8(0)
    for i in range(first, last):
        mine = which[i // tall]
        for g in range(len(mine)):
            at = g * wide
            row, made = codes[i, at : at + wide], out[i, at : at + wide]
            words = table[mine[g]]
            for j in range(len(row)):
                made[j] = words[row[j]]
        whole = codes[i]
        for j in range(len(whole)):
            nan |= np.uint8((whole[j] & np.uint8(0x7F)) + np.uint8(1))
    return bool(nan >= np.uint8(128))
