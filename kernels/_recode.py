"""Changes of encoding on a GPU, in Triton: a source's bytes to another encoding's, in one pass.

The same float32 operations in the same order as quantise.py, so the same bytes: nothing is
contracted (`enable_fp_fusion` is off), divisions are IEEE's, sums are added up pairwise. FP8 is bit
arithmetic, since older GPUs have no such type. A program has PIECES pieces of 32 columns (see
_source.py); the two halves of words are kept apart, as even and odd columns.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transcode.kernels._source import PIECE, Source

PIECES = 128
"""Pieces of a program: two threads for each."""

WARPS = 8

MAGIC: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added to it and taken away again is rounded to an integer, ties to even."""


@triton.jit
def _from_e2m1(code):
    """int32 0..15 to float32, -0 too."""
    m = (code & 7).to(tl.float32)
    value = tl.where(m < 4, m * 0.5, tl.where(m < 6, m - 2, m * 2 - 8))
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _from_e4m3(code):
    """int32 0..255 to float32; NaN for 0x7F and 0xFF."""
    m = code & 0x7F
    normal = ((m << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(m < 8, m.to(tl.float32) * 0.001953125, normal)
    value = tl.where(m == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _from_e8m0(code):
    """int32 0..254 to `2^(code - 127)`."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(y):
    """Magnitudes to E2M1's, ties to even, 6 at most."""
    magic = tl.where(y < 2, MAGIC / 2, tl.where(y < 4, MAGIC, MAGIC * 2))  # rounds to .5, 1, 2
    return tl.minimum((y + magic) - magic, 6.0)


@triton.jit
def _to_e2m1(x):
    """float32 to int32 0..15."""
    r = _rounded(tl.abs(x))
    code = tl.where(r < 2, r * 2, tl.where(r < 4, r + 2, r * 0.5 + 4)).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _to_e4m3(x):
    """float32 to int32 0..255, ties to even, 448 at most."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = ((a * 512 + MAGIC) - MAGIC).to(tl.int32)
    code = tl.where(a < 0.015625, small, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _pairs_of_e4m3(even, odd, NATIVE: tl.constexpr):
    """float32 to int16: the even one's byte below; by the GPU's own conversion where it has one."""
    if NATIVE:
        made = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [even, odd],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
    else:
        made = (_to_e4m3(even) | (_to_e4m3(odd) << 8)).to(tl.int16)
    return made


@triton.jit
def _block_scales(scales, factor, piece, inside):
    """NVFP4's scales of pieces times the global one, `[P, 2]` float32."""
    at = piece[:, None] * 2 + tl.arange(0, 2)[None, :]
    byte = tl.load(scales + at, mask=inside[:, None], other=0).to(tl.int32)
    return _from_e4m3(byte) * tl.load(factor)


@triton.jit
def _decoded(words, scales, factor, piece, inside, columns, tall, wide, stride, KIND: tl.constexpr):
    """The even and odd columns of pieces, `[P, 16]` float32 each."""
    j = tl.arange(0, 16)[None, :]
    at = piece[:, None] * 16 + j
    word = tl.load(words + at, mask=inside[:, None], other=0).to(tl.int32)
    if KIND == "bf16":
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & -65536).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        even = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if KIND == "nvfp4":
            scale = _block_scales(scales, factor, piece, inside)[:, :, None]
            scale = tl.broadcast_to(scale, [scale.shape[0], 2, 8]).reshape([scale.shape[0], 16])
        elif KIND == "fp8":
            row, column = piece // columns, piece % columns * 32
            place = row // tall * stride + column // wide
            scale = tl.load(scales + place, mask=inside, other=0.0)[:, None]
        else:
            byte = tl.load(scales + piece, mask=inside, other=0).to(tl.int32)
            scale = _from_e8m0(byte)[:, None]
        if KIND == "nvfp4" or KIND == "mxfp4":
            even, odd = _from_e2m1(word & 15) * scale, _from_e2m1((word >> 4) & 15) * scale
        else:
            even, odd = _from_e4m3(word & 255) * scale, _from_e4m3((word >> 8) & 255) * scale
    return even, odd


@triton.jit
def _pairwise(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """`[ROWS, COUNT]` to `[ROWS]`: neighbours are added up, then their sums, and so on."""
    if COUNT == 16:
        first, second = x.reshape([ROWS, 8, 2]).split()
        x = first + second
    first, second = x.reshape([ROWS, 4, 2]).split()
    first, second = (first + second).reshape([ROWS, 2, 2]).split()
    first, second = (first + second).reshape([ROWS, 1, 2]).split()
    return (first + second).reshape([ROWS])


@triton.jit
def _error(even, odd, inverse, scale, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The sum of squared errors of magnitudes `[ROWS, COUNT]`, rounded to E2M1 times a scale."""
    a = even - _rounded(even * inverse) * scale
    b = odd - _rounded(odd * inverse) * scale
    return _pairwise(a * a + b * b, ROWS, COUNT)


@triton.jit
def largest_of(
    words, scales, factor, out, pieces, columns, tall, wide, stride,
    KIND: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each piece, float32, NaN if there is one: the largest code's, since
    codes without their signs are ordered as what they mean."""
    piece = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    inside = piece < pieces
    at = piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(words + at, mask=inside[:, None], other=0).to(tl.int32)
    if KIND == "nvfp4":
        code = tl.maximum(word & 7, (word >> 4) & 7).reshape([P, 2, 8])
        value = _from_e2m1(tl.max(code, axis=2)) * _block_scales(scales, factor, piece, inside)
        nan = tl.max((value != value).to(tl.int32), axis=1) > 0
        found = tl.where(nan, float("nan"), tl.max(value, axis=1))
    elif KIND == "mxfp4":
        byte = tl.load(scales + piece, mask=inside, other=0).to(tl.int32)
        code = tl.max(tl.maximum(word & 7, (word >> 4) & 7), axis=1)
        found = tl.where(byte == 255, float("nan"), _from_e2m1(code) * _from_e8m0(byte))
    elif KIND == "mxfp8":
        byte = tl.load(scales + piece, mask=inside, other=0).to(tl.int32)
        code = tl.max(tl.maximum(word & 0x7F, (word >> 8) & 0x7F), axis=1)
        found = tl.where(byte == 255, float("nan"), _from_e4m3(code) * _from_e8m0(byte))
    elif KIND == "fp8":
        place = piece // columns // tall * stride + piece % columns * 32 // wide
        scale = tl.load(scales + place, mask=inside, other=0.0)
        code = tl.max(tl.maximum(word & 0x7F, (word >> 8) & 0x7F), axis=1)
        found = _from_e4m3(code) * scale
    elif KIND == "bf16":
        code = tl.max(tl.maximum(word & 0x7FFF, (word >> 16) & 0x7FFF), axis=1)
        found = (code << 16).to(tl.float32, bitcast=True)
    else:
        code = tl.max(tl.maximum(word & 0x7FFF, (word >> 16) & 0x7FFF), axis=1)
        found = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    tl.store(out + piece, found, mask=inside)


@triton.jit
def to_nvfp4(
    words, scales, factor, codes, bytes_, mine, pieces, columns, tall, wide, stride,
    KIND: tl.constexpr, SEARCH: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Codes `[pieces, 16]` uint8 and E4M3 bytes `[pieces, 2]`, for the global scale at `mine`."""
    piece = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    inside = piece < pieces
    even, odd = _decoded(words, scales, factor, piece, inside, columns, tall, wide, stride, KIND)
    even, odd = even.reshape([2 * P, 8]), odd.reshape([2 * P, 8])
    whole = tl.load(mine)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    centre = tl.maximum(_to_e4m3(tl.div_rn(largest, 6 * whole)), 1)
    byte = centre
    if SEARCH:
        a = tl.div_rn(tl.abs(even), whole)
        b = tl.div_rn(tl.abs(odd), whole)
        top = tl.max(tl.maximum(a, b), axis=1)
        one = tl.full([2 * P], 1.0, tl.float32)
        best = tl.full([2 * P], float("inf"), tl.float32)
        step, going = 0, 1
        while step <= BELOW and going > 0:
            tried = tl.maximum(centre - step, 1)
            scale = _from_e4m3(tried)
            error = _error(a, b, tl.div_rn(one, scale)[:, None], scale[:, None], 2 * P, 8)
            less = error <= best  # the smallest scale of those that are equal
            best, byte = tl.where(less, error, best), tl.where(less, tried, byte)
            # Lower scales clip the largest value further: nothing of its error is lost in a sum.
            clipped = tl.maximum(top - 6 * _from_e4m3(tl.maximum(centre - step - 1, 1)), 0.0)
            going = tl.max((clipped * clipped <= best).to(tl.int32), axis=0)
            step += 1
        for more in range(1, ABOVE + 1):
            tried = tl.minimum(centre + more, 126)
            scale = _from_e4m3(tried)
            error = _error(a, b, tl.div_rn(one, scale)[:, None], scale[:, None], 2 * P, 8)
            less = error < best
            best, byte = tl.where(less, error, best), tl.where(less, tried, byte)
    byte = tl.where(largest > 0, byte, 0)
    scale = tl.where(byte > 0, _from_e4m3(byte) * whole, 1.0)[:, None]
    low, high = _to_e2m1(tl.div_rn(even, scale)), _to_e2m1(tl.div_rn(odd, scale))
    made = (low | (high << 4)).to(tl.uint8).reshape([P, 16])
    at = piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes + at, made, mask=inside[:, None])
    places = piece[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(bytes_ + places, byte.to(tl.uint8).reshape([P, 2]), mask=inside[:, None])


@triton.jit
def _parted(largest):
    """Mantissa in [0.5, 1) and exponent of positive numbers; below 2^-126 some exponent <= -126."""
    bits = largest.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    return mantissa, (bits >> 23) - 126


@triton.jit
def to_mx(
    words, scales, factor, codes, bytes_, pieces, columns, tall, wide, stride,
    KIND: tl.constexpr, EIGHT: tl.constexpr, SEARCH: tl.constexpr, NATIVE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """MXFP4 `[pieces, 16]` uint8 or (EIGHT) MXFP8 int16 codes, and E8M0 bytes `[pieces]`."""
    piece = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    inside = piece < pieces
    even, odd = _decoded(words, scales, factor, piece, inside, columns, tall, wide, stride, KIND)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    mantissa, exponent = _parted(largest)
    if EIGHT:
        found = exponent - 9 + (mantissa > 0.875).to(tl.int32)
    elif SEARCH:
        centre = exponent - 3 + (mantissa * 1.125 >= 1).to(tl.int32)
        near = _from_e8m0(127 - tl.minimum(tl.maximum(centre, -127), 127))[:, None]
        a, b = tl.abs(even) * near, tl.abs(odd) * near  # as a division: of powers of two
        found = centre - 1
        best = _error(a, b, 2.0, 0.5, P, 16)
        error = _error(a, b, 1.0, 1.0, P, 16)
        found, best = tl.where(error < best, centre, found), tl.minimum(error, best)
        error = _error(a, b, 0.5, 2.0, P, 16)
        found = tl.where(error < best, centre + 1, found)
    else:
        found = exponent - 3 + (mantissa > 0.75).to(tl.int32)
    found = tl.minimum(tl.maximum(found, -127), 127)
    empty = 127 if EIGHT else 0
    byte = tl.where(largest > 0, found + 127, empty)
    inverse = _from_e8m0(254 - tl.where(largest > 0, byte, 127))[:, None]
    even, odd = even * inverse, odd * inverse
    at = piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    if EIGHT:
        made = _pairs_of_e4m3(even, odd, NATIVE)
    else:
        made = (_to_e2m1(even) | (_to_e2m1(odd) << 4)).to(tl.uint8)
    tl.store(codes + at, made, mask=inside[:, None])
    tl.store(bytes_ + piece, byte.to(tl.uint8), mask=inside)


@triton.jit
def to_eight(
    words, scales, factor, codes, mine, pieces, columns, tall, wide, stride, high, broad, across,
    KIND: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """FP8 codes `[pieces, 16]` int16 for scales at `mine`, one for `high` rows, `broad` columns."""
    piece = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    inside = piece < pieces
    even, odd = _decoded(words, scales, factor, piece, inside, columns, tall, wide, stride, KIND)
    place = piece // columns // high * across + piece % columns * 32 // broad
    scale = tl.load(mine + place, mask=inside, other=1.0)[:, None]
    made = _pairs_of_e4m3(tl.div_rn(even, scale), tl.div_rn(odd, scale), NATIVE)
    at = piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes + at, made, mask=inside[:, None])


def run(kernel: Any, source: Source, *outs: Any, **constants: Any) -> None:
    """Run one of the kernels above on all pieces of a source; outs: what it writes, then sizes."""
    n, k = source.shape
    pieces, columns = n * (k // PIECE), k // PIECE
    tensors, sizes = [t for t in outs if isinstance(t, Tensor)], [t for t in outs if type(t) is int]
    tall, wide = source.tile
    stride = -(-k // wide)
    words = source.words.view(torch.int16) if source.words.dtype is torch.uint16 else source.words
    on = torch.cuda.device(words.device) if words.is_cuda else nullcontext()
    with on:
        kernel[(triton.cdiv(pieces, PIECES),)](
            words, source.scales, source.factor, *tensors, pieces, columns, tall, wide, stride,
            *sizes, KIND=source.kind, P=PIECES, **constants, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


def largest(source: Source) -> Tensor:
    """The largest magnitude of each piece, float32 `[N, K/32]`; NaN where there is one."""
    n, k = source.shape
    out = torch.empty((n, k // PIECE), dtype=torch.float32, device=source.words.device)
    run(largest_of, source, out)
    return out


def nvfp4(source: Source, factor: Tensor, below: int, above: int) -> tuple[Tensor, Tensor]:
    """Codes `[N, K/2]` and E4M3 bytes `[N, K/16]`, uint8, with the global scale `[1]`; E4M3 scales
    so many steps below and above the largest value's are tried, none if both are 0."""
    n, k = source.shape
    codes, scales = (_empty(source, n, k // size) for size in (2, 16))
    search = below + above > 0
    run(to_nvfp4, source, codes, scales, factor, SEARCH=search, BELOW=below, ABOVE=above)
    return codes, scales


def mxfp4(source: Source, search: str) -> tuple[Tensor, Tensor]:
    """Codes `[N, K/2]` and E8M0 bytes `[N, K/32]`, uint8."""
    n, k = source.shape
    codes, scales = (_empty(source, n, k // size) for size in (2, PIECE))
    run(to_mx, source, codes, scales, EIGHT=False, SEARCH=search == "mse", NATIVE=False)
    return codes, scales


def mxfp8(source: Source) -> tuple[Tensor, Tensor]:
    """Codes `[N, K]` and E8M0 bytes `[N, K/32]`, uint8."""
    n, k = source.shape
    codes, scales = _empty(source, n, k), _empty(source, n, k // PIECE)
    words = codes.view(torch.int16)
    run(to_mx, source, words, scales, EIGHT=True, SEARCH=False, NATIVE=_native(codes))
    return codes, scales


def fp8(source: Source, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """Codes `[N, K]` uint8 for float32 scales, one for so many rows and columns."""
    n, k = source.shape
    codes = _empty(source, n, k)
    across = -(-k // tile[1])
    run(to_eight, source, codes.view(torch.int16), scales, *tile, across, NATIVE=_native(codes))
    return codes


def _native(on: Tensor) -> bool:
    """Whether the GPU converts to E4M3 itself."""
    return on.is_cuda and torch.cuda.get_device_capability(on.device) >= (8, 9)


def _empty(source: Source, rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.uint8, device=source.words.device)
