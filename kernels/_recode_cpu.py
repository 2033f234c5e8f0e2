"""Changes of encoding on the CPU: what _recode.py does on a GPU, in numba loops, the same bytes.

64 pieces of 32 columns are decoded at a time into `[32, 64]` float32, pieces last, so that every
loop over them is one over vectors. All arithmetic is float32 in the order of quantise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transcode.kernels._source import PIECE, Source
from transcode.kernels._tiles import uninterrupted
from transcode.quant import E2M1, powers

PIECES = 64
"""Pieces that are worked on at a time: all of it lies in the first level of cache."""

SHARE = 1 << 12
"""Pieces that are worth a thread."""

Array = np.ndarray[Any, np.dtype[Any]]


def largest(source: Source) -> Tensor:
    """The largest magnitude of each piece, float32 `[N, K/32]`; NaN where there is one."""
    n, k = source.shape
    out = torch.empty((n, k // PIECE), dtype=torch.float32)
    _shared("largest", source, out)
    return out


def nvfp4(source: Source, factor: Tensor, below: int, above: int) -> tuple[Tensor, Tensor]:
    """See _recode.py."""
    n, k = source.shape
    codes, scales = (torch.empty((n, k // size), dtype=torch.uint8) for size in (2, 16))
    whole = np.float32(float(factor))
    _shared("nvfp4", source, codes, scales, whole, np.int32(below), np.int32(above))
    return codes, scales


def mxfp4(source: Source, search: str) -> tuple[Tensor, Tensor]:
    """See _recode.py."""
    n, k = source.shape
    codes, scales = (torch.empty((n, k // size), dtype=torch.uint8) for size in (2, PIECE))
    _shared("mxfp4", source, codes, scales, search == "mse")
    return codes, scales


def mxfp8(source: Source) -> tuple[Tensor, Tensor]:
    """See _recode.py."""
    n, k = source.shape
    codes = torch.empty((n, k), dtype=torch.uint8)
    scales = torch.empty((n, k // PIECE), dtype=torch.uint8)
    _shared("mxfp8", source, codes, scales)
    return codes, scales


def fp8(source: Source, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """See _recode.py."""
    n, k = source.shape
    codes = torch.empty((n, k), dtype=torch.uint8)
    across = -(-k // tile[1])
    sizes = (np.int64(k // PIECE), *(np.int64(size) for size in (*tile, across)))
    _shared("fp8", source, codes, scales.reshape(-1).numpy(), *sizes)
    return codes


def _shared(name: str, source: Source, *given: Any) -> None:
    """Run a loop on all pieces, in as many threads as torch has."""
    n, k = source.shape
    pieces = n * (k // PIECE)
    words, table, scales = _read(source)
    run = _compiled()[name]
    arrays = [g.view(-1).numpy() if isinstance(g, Tensor) else g for g in given]
    threads = max(1, min(torch.get_num_threads(), pieces // SHARE))
    cuts = [pieces * i // threads for i in range(threads + 1)]

    def share(i: int) -> None:
        run(cuts[i], cuts[i + 1], words, table, scales, *arrays)

    if threads == 1:
        share(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


def _read(source: Source) -> tuple[Array, Array, Array]:
    """The codes' bytes, what a code means, and a scale for every 16 columns, float32."""
    n, k = source.shape
    words = source.words.reshape(-1)
    if source.kind in ("bf16", "fp16"):
        dtype = torch.bfloat16 if source.kind == "bf16" else torch.float16
        table = torch.arange(1 << 16).to(torch.uint16).view(dtype).float()
        return words.view(torch.uint8).numpy(), table.numpy(), np.ones(1, np.float32)
    if source.kind in ("nvfp4", "mxfp4"):
        table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    else:
        table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    if source.kind == "nvfp4":
        scales = source.scales.view(torch.float8_e4m3fn).float() * source.factor
    elif source.kind == "fp8":
        rows = torch.arange(n)[:, None] // source.tile[0]
        columns = torch.arange(k // 16)[None] * 16 // source.tile[1]
        scales = source.scales.reshape(-1)[rows * -(-k // source.tile[1]) + columns]
    else:
        scales = powers(source.scales).repeat_interleave(2, 1)
    return words.view(torch.uint8).numpy(), table.numpy(), scales.reshape(-1).numpy()


@cache
def _compiled() -> dict[str, Callable[..., None]]:
    """The loops, each compiled when it is first called."""
    with uninterrupted():
        from numba import njit  # slow to import

        compiled = njit(nogil=True, error_model="numpy")  # else each division is a branch

        decoded = compiled(_decoded)
        tops = compiled(_tops)
        square = compiled(_square)
        error = compiled(_error_of(square))
        e2m1 = compiled(_e2m1)
        e4m3 = compiled(_e4m3)
        made = {
            "largest": _largest(decoded, tops),
            "nvfp4": _nvfp4(decoded, tops, error, e2m1, e4m3, compiled(_tried)),
            "mxfp4": _mxfp4(decoded, tops, error, e2m1),
            "mxfp8": _mxfp8(decoded, tops, e4m3),
            "fp8": _fp8(decoded, e4m3),
        }
        return {name: compiled(loop) for name, loop in made.items()}


def _decoded(at: int, count: int, octets: Any, table: Any, scales: Any, x: Any) -> None:
    """Pieces from `at` on to `x`, `[32, P]`; octets are the codes' bytes."""
    one = len(scales) == 1
    for p in range(count):
        for half in range(2):
            scale = scales[0] if one else scales[2 * (at + p) + half]
            if len(table) == 16:
                first = 16 * (at + p) + 8 * half
                for j in range(8):
                    byte = octets[first + j]
                    x[16 * half + 2 * j, p] = table[byte & np.uint8(15)] * scale
                    x[16 * half + 2 * j + 1, p] = table[byte >> np.uint8(4)] * scale
            elif len(table) == 256:
                first = 32 * (at + p) + 16 * half
                for j in range(16):
                    x[16 * half + j, p] = table[octets[first + j]] * scale
            else:
                first = 64 * (at + p) + 32 * half
                for j in range(16):
                    low, high = octets[first + 2 * j], octets[first + 2 * j + 1]
                    x[16 * half + j, p] = table[np.uint16(low) | (np.uint16(high) << np.uint16(8))]


def _tops(x: Any, top: Any) -> None:
    """The largest magnitude of each column of `x`; NaN if there is one."""
    for p in range(x.shape[1]):
        top[p] = np.float32(0)
    for i in range(x.shape[0]):
        for p in range(x.shape[1]):
            y = abs(x[i, p])
            top[p] = top[p] if top[p] >= y or top[p] != top[p] else y


def _square(value: Any, inverse: Any, scale: Any) -> Any:
    """The squared error of a magnitude that is rounded to E2M1 times a scale."""
    y = value * inverse
    magic = np.float32(6291456) if y < np.float32(2) else np.float32(12582912)
    magic = magic if y < np.float32(4) else np.float32(25165824)
    rounded = (y + magic) - magic
    rounded = rounded if rounded < np.float32(6) else np.float32(6)
    error = value - rounded * scale
    return error * error


def _error_of(square: Any) -> Callable[..., None]:
    """The loop over columns with this `_square`."""

    def error(a: Any, inverse: Any, scale: Any, out: Any) -> None:
        """Sums of squared errors of magnitudes `[16, P]`, neighbours first."""
        for p in range(PIECES):
            i, s = inverse[p], scale[p]
            first = (square(a[0, p], i, s) + square(a[1, p], i, s)) + (
                square(a[2, p], i, s) + square(a[3, p], i, s)
            )
            second = (square(a[4, p], i, s) + square(a[5, p], i, s)) + (
                square(a[6, p], i, s) + square(a[7, p], i, s)
            )
            third = (square(a[8, p], i, s) + square(a[9, p], i, s)) + (
                square(a[10, p], i, s) + square(a[11, p], i, s)
            )
            fourth = (square(a[12, p], i, s) + square(a[13, p], i, s)) + (
                square(a[14, p], i, s) + square(a[15, p], i, s)
            )
            out[p] = (first + second) + (third + fourth)

    return error


def _e2m1(x: Any, over: Any, codes: Any) -> None:
    """Codes of `x / over`, `[16 or 32, P]` uint8."""
    for i in range(x.shape[0]):
        for p in range(x.shape[1]):
            z = x[i, p] / over[p]
            y = abs(z)
            magic = np.float32(6291456) if y < np.float32(2) else np.float32(12582912)
            magic = magic if y < np.float32(4) else np.float32(25165824)
            r = min((y + magic) - magic, np.float32(6))
            r = r * np.float32(2) if r < np.float32(2) else (
                r + np.float32(2) if r < np.float32(4) else r * np.float32(0.5) + np.float32(4)
            )  # fmt: skip
            codes[i, p] = np.uint8(np.int32(r)) | (np.uint8(8) if np.signbit(z) else np.uint8(0))


def _e4m3(x: Any, over: Any, codes: Any) -> None:
    """E4M3 codes of `x / over`, `[N, P]` uint8, 448 at most."""
    row = np.empty(x.shape[1], np.float32)
    bits = row.view(np.int32)
    for i in range(x.shape[0]):
        for p in range(x.shape[1]):
            row[p] = min(abs(x[i, p] / over[p]), np.float32(448))
        for p in range(x.shape[1]):
            odd = (bits[p] >> np.int32(20)) & np.int32(1)
            normal = ((bits[p] + np.int32(0x7FFFF) + odd) >> np.int32(20)) - np.int32(960)
            small = np.int32(
                (row[p] * np.float32(512) + np.float32(12582912)) - np.float32(12582912)
            )
            code = small if row[p] < np.float32(2.0**-6) else normal
            codes[i, p] = np.uint8(code) | (np.uint8(128) if np.signbit(x[i, p]) else np.uint8(0))


def _largest(decoded: Any, tops: Any) -> Callable[..., None]:
    def run(first: int, last: int, words: Any, table: Any, scales: Any, out: Any) -> None:
        x, top = np.zeros((32, PIECES), np.float32), np.empty(PIECES, np.float32)
        for at in range(first, last, PIECES):
            count = min(PIECES, last - at)
            decoded(at, count, words, table, scales, x)
            tops(x, top)
            for p in range(count):
                out[at + p] = top[p]

    return run


def _tried(start: Any, step: int, raw: Any, scale: Any, inverse: Any) -> None:
    """E4M3 scales so many bytes from `start`, and their reciprocals. raw: the same memory as int32
    and as float32."""
    bits, values = raw
    for p in range(PIECES):
        byte = min(max(start[p] + np.int32(step), np.int32(1)), np.int32(126))
        bits[p] = (byte << np.int32(20)) + np.int32(120 << 23)
    for p in range(PIECES):
        byte = min(max(start[p] + np.int32(step), np.int32(1)), np.int32(126))
        small = np.float32(byte) * np.float32(2.0**-9)
        scale[p] = small if byte < np.int32(8) else values[p]
        inverse[p] = np.float32(1) / scale[p]


def _nvfp4(
    decoded: Any, tops: Any, error: Any, e2m1: Any, e4m3: Any, tried: Any
) -> Callable[..., None]:
    def run(
        first: int, last: int, words: Any, table: Any, scales: Any, codes: Any, bytes_: Any,
        whole: Any, below: int, above: int,
    ) -> None:  # fmt: skip
        x = np.zeros((32, PIECES), np.float32)
        a, made = np.empty((16, PIECES), np.float32), np.empty((16, PIECES), np.uint8)
        top, best, this, high = (
            np.empty(PIECES, np.float32), np.empty(PIECES, np.float32),
            np.empty(PIECES, np.float32), np.empty(PIECES, np.float32),
        )  # fmt: skip
        scale, inverse = np.empty(PIECES, np.float32), np.empty(PIECES, np.float32)
        near, start = np.empty((1, PIECES), np.uint8), np.empty(PIECES, np.int32)
        moved, floats = np.zeros(PIECES, np.int32), np.empty(PIECES, np.float32)
        raw = (floats.view(np.int32), floats)
        six = np.empty(PIECES, np.float32)
        for p in range(PIECES):
            six[p] = np.float32(6) * whole
        for at in range(first, last, PIECES):
            count = min(PIECES, last - at)
            decoded(at, count, words, table, scales, x)
            for half in range(2):
                mine = x[16 * half : 16 * half + 16]
                tops(mine, top)
                e4m3(top.reshape((1, PIECES)), six, near)
                for p in range(PIECES):
                    start[p] = max(np.int32(near[0, p]), np.int32(1))
                    moved[p] = np.int32(0)
                if below + above > 0:
                    for i in range(16):
                        for p in range(PIECES):
                            a[i, p] = abs(mine[i, p]) / whole
                    for p in range(PIECES):
                        high[p] = top[p] / whole
                        best[p] = np.float32(np.inf)
                    for step in range(below + 1):
                        tried(start, -step, raw, scale, inverse)
                        going = np.int32(0)
                        for p in range(PIECES):
                            clipped = max(high[p] - np.float32(6) * scale[p], np.float32(0))
                            going += np.int32(clipped * clipped <= best[p])
                        if going == 0:
                            break
                        error(a, inverse, scale, this)
                        for p in range(PIECES):
                            less = this[p] <= best[p]
                            best[p] = this[p] if less else best[p]
                            moved[p] = np.int32(-step) if less else moved[p]
                    for step in range(1, above + 1):
                        tried(start, step, raw, scale, inverse)
                        error(a, inverse, scale, this)
                        for p in range(PIECES):
                            less = this[p] < best[p]
                            best[p] = this[p] if less else best[p]
                            moved[p] = np.int32(step) if less else moved[p]
                for p in range(PIECES):
                    start[p] += moved[p]
                tried(start, 0, raw, scale, inverse)
                for p in range(PIECES):
                    start[p] = min(max(start[p], np.int32(1)), np.int32(126))
                    start[p] = start[p] if top[p] > 0 else np.int32(0)
                    scale[p] = scale[p] * whole if top[p] > 0 else np.float32(1)
                e2m1(mine, scale, made)
                for p in range(count):
                    bytes_[2 * (at + p) + half] = np.uint8(start[p])
                    for j in range(8):
                        codes[16 * (at + p) + 8 * half + j] = made[2 * j, p] | (
                            made[2 * j + 1, p] << np.uint8(4)
                        )

    return run


def _mxfp4(decoded: Any, tops: Any, error: Any, e2m1: Any) -> Callable[..., None]:
    powers_of_two = powers(torch.arange(255).to(torch.uint8)).numpy()

    def run(
        first: int, last: int, words: Any, table: Any, scales: Any, codes: Any, bytes_: Any,
        search: bool,
    ) -> None:  # fmt: skip
        x, a = np.zeros((32, PIECES), np.float32), np.empty((32, PIECES), np.float32)
        that, made = np.empty(PIECES, np.float32), np.empty((32, PIECES), np.uint8)
        top, best, this = (
            np.empty(PIECES, np.float32), np.empty(PIECES, np.float32),
            np.empty(PIECES, np.float32),
        )  # fmt: skip
        scale, inverse = np.empty(PIECES, np.float32), np.empty(PIECES, np.float32)
        centre, found = np.empty(PIECES, np.int32), np.empty(PIECES, np.int32)
        bits = top.view(np.int32)
        for at in range(first, last, PIECES):
            count = min(PIECES, last - at)
            decoded(at, count, words, table, scales, x)
            tops(x, top)
            for p in range(PIECES):
                exponent = (bits[p] >> np.int32(23)) - np.int32(126)
                mantissa = np.float32(bits[p] & np.int32(0x7FFFFF)) * np.float32(2.0**-24)
                mantissa += np.float32(0.5)
                if search:
                    more = mantissa * np.float32(1.125) >= np.float32(1)
                else:
                    more = mantissa > np.float32(0.75)
                centre[p] = exponent - np.int32(3) + np.int32(more)
                found[p] = centre[p]
            if search:
                for p in range(PIECES):
                    scale[p] = powers_of_two[min(max(centre[p], -127), 127) + 127]
                    best[p] = np.float32(np.inf)
                for i in range(32):
                    for p in range(PIECES):
                        a[i, p] = abs(x[i, p]) / scale[p]
                for step in range(-1, 2):
                    for p in range(PIECES):
                        scale[p], inverse[p] = np.float32(2.0**step), np.float32(2.0**-step)
                    error(a[:16], inverse, scale, this)
                    error(a[16:], inverse, scale, that)
                    for p in range(PIECES):
                        this[p] += that[p]
                        less = this[p] < best[p]
                        best[p] = this[p] if less else best[p]
                        found[p] = centre[p] + np.int32(step) if less else found[p]
            for p in range(PIECES):
                found[p] = min(max(found[p], -127), 127) + 127 if top[p] > 0 else 0
                scale[p] = powers_of_two[found[p]] if top[p] > 0 else np.float32(1)
            e2m1(x, scale, made)
            for p in range(count):
                bytes_[at + p] = np.uint8(found[p])
                for j in range(16):
                    codes[16 * (at + p) + j] = made[2 * j, p] | (made[2 * j + 1, p] << np.uint8(4))

    return run


def _mxfp8(decoded: Any, tops: Any, e4m3: Any) -> Callable[..., None]:
    powers_of_two = powers(torch.arange(255).to(torch.uint8)).numpy()

    def run(
        first: int, last: int, words: Any, table: Any, scales: Any, codes: Any, bytes_: Any
    ) -> None:
        x, made = np.zeros((32, PIECES), np.float32), np.empty((32, PIECES), np.uint8)
        top, scale = np.empty(PIECES, np.float32), np.empty(PIECES, np.float32)
        bits = top.view(np.int32)
        for at in range(first, last, PIECES):
            count = min(PIECES, last - at)
            decoded(at, count, words, table, scales, x)
            tops(x, top)
            for p in range(PIECES):
                more = (bits[p] & np.int32(0x7FFFFF)) > np.int32(0x600000)  # above 0.875
                least = (bits[p] >> np.int32(23)) - np.int32(135) + np.int32(more)
                byte = min(max(least, -127), 127) + 127 if top[p] > 0 else 127
                scale[p] = powers_of_two[byte]
                if p < count:
                    bytes_[at + p] = np.uint8(byte)
            e4m3(x, scale, made)
            for p in range(count):
                for i in range(32):
                    codes[32 * (at + p) + i] = made[i, p]

    return run


def _fp8(decoded: Any, e4m3: Any) -> Callable[..., None]:
    def run(
        first: int, last: int, words: Any, table: Any, scales: Any, codes: Any, mine: Any,
        columns: int, high: int, broad: int, across: int,
    ) -> None:  # fmt: skip
        x, made = np.zeros((32, PIECES), np.float32), np.empty((32, PIECES), np.uint8)
        scale = np.ones(PIECES, np.float32)
        for at in range(first, last, PIECES):
            count = min(PIECES, last - at)
            decoded(at, count, words, table, scales, x)
            for p in range(count):
                row, column = (at + p) // columns, (at + p) % columns
                scale[p] = mine[row // high * across + column * 32 // broad]
            e4m3(x, scale, made)
            for p in range(count):
                for i in range(32):
                    codes[32 * (at + p) + i] = made[i, p]

    return run
