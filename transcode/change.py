"""One encoding to another, a matrix at a time. What is exact, and when, stands with each function.

Sources: NVIDIA/Model-Optimizer, examples/hf_ptq/cast_mxfp4_to_nvfp4.py (MXFP4 to NVFP4);
deepseek-ai/DeepSeek-V4, inference/convert.py, and sgl-project/sglang, cast_e2m1fn_to_e4m3fn (MXFP4
to FP8 tiles).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transcode.encode import LARGEST8, e2m1, e4m3, tiles, untiled
from transcode.quant import Encoding, QuantTensor, unpack_nibbles

DEEP8 = 14
"""Between the exponents of a tile's MXFP4 blocks: the smallest code 0.5 is E4M3's smallest number
when the largest, 6, is 384."""

DEEP4 = 17
"""Between the largest exponent and another: E4M3 scales from 2^8 down to 2^-9."""


def mxfp4_to_mxfp8(source: QuantTensor) -> QuantTensor:
    """Exact always: E4M3 has all the values of E2M1, and the scales stay."""
    codes = e4m3(QuantTensor(Encoding.MXFP4, source.codes, _ones(source.scales)).dequantize())
    return QuantTensor(Encoding.MXFP8, codes, source.scales)


def _ones(scales: Tensor) -> Tensor:
    return torch.full_like(scales.view(torch.uint8), 127)


def top(scales: Tensor) -> int:
    """The largest exponent of E8M0 `[N, K/32]`, -127 if all bytes are 0."""
    return int(scales.view(torch.uint8).max()) - 127


def deep(scales: Tensor) -> int:
    """The smallest exponent of E8M0 scales whose byte is not 0."""
    byte = scales.view(torch.uint8)
    return int(byte[byte > 0].min()) - 127 if (byte > 0).any() else 0


def mxfp4_to_nvfp4(source: QuantTensor, largest: int) -> QuantTensor:
    """With global scale `2^(largest - 8)`; codes are copied, -0 too.

    largest: the largest exponent of all matrices that share the global scale. Exact for blocks at
    most 17 below it. Others get a scale by their largest value, not below 2^-9, and are rounded.
    """
    factor = nvfp4_factor(largest)
    exponent = source.scales.view(torch.uint8).int() - 127 - (largest - 8)
    inside = (exponent >= -9) & (exponent <= 8)
    scales = torch.pow(2.0, exponent.clamp(-9, 8).float())
    codes = source.codes.view(torch.uint8)
    if not inside.all():
        value = source.dequantize().double() / factor.double()
        blocks = value.reshape(*scales.shape, 32)
        fitted = (blocks.abs().amax(-1) / 6).clamp(2.0**-9, LARGEST8).float()
        scales = torch.where(inside, scales, e4m3(fitted).float())
        again = e2m1((blocks / scales.double()[..., None]).float().flatten(-2))
        kept = inside.repeat_interleave(16, -1)
        codes = torch.where(kept, codes, again)
    twice = e4m3(scales).view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    return QuantTensor(Encoding.NVFP4, codes, twice, factor)


def nvfp4_factor(largest: int) -> Tensor:
    """`2^(largest - 8)`, `[]` float32."""
    return torch.tensor(2.0 ** (largest - 8), dtype=torch.float64).float()


def nvfp4_to_mxfp4(source: QuantTensor) -> QuantTensor:
    """Exact where it undoes a cast; else each block's exponent is the one of four with the least
    squared error, around that of "even" rounding. Blocks of zeros have scale byte 0."""
    value = source.dequantize().reshape(source.shape[0], -1, 32)
    largest = value.abs().amax(-1)
    even = torch.frexp(largest * (1 + 0.125))[1] - 3  # 1.78 * 2^n counts as 2^(n + 1)
    best, found, codes = torch.full_like(largest, torch.inf).double(), even, None
    for step in (-1, 0, 1, -2):
        exponent = (even + step).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(largest), exponent)[..., None]
        mine = e2m1(value / scale)
        error = _squares(QuantTensor(Encoding.MXFP4, mine.flatten(1), _byte(exponent)), value)
        less = error < best
        best, found = torch.where(less, error, best), torch.where(less, exponent, found)
        codes = mine if codes is None else torch.where(less[..., None], mine, codes)
    assert codes is not None
    zero = largest == 0
    return QuantTensor(Encoding.MXFP4, codes.flatten(1), torch.where(zero, 0, _byte(found)))


def _byte(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8)


def _squares(made: QuantTensor, wanted: Tensor) -> Tensor:
    """Sums of squared errors of blocks `[N, K/32]` in float64, added up in a fixed order."""
    error = (made.dequantize().double().reshape(wanted.shape) - wanted.double()).square()
    while error.shape[-1] > 1:
        error = error[..., ::2] + error[..., 1::2]
    return error.squeeze(-1)


def mxfp4_to_fp8(source: QuantTensor, block: tuple[int, int]) -> QuantTensor:
    """Tiles with a power of two as scale: the largest block's exponent, over 64.

    Exact where the exponents of a tile's blocks, but for blocks of zeros, differ by 14 at most;
    else the smallest values are rounded.
    """
    exponent = source.scales.view(torch.uint8).int() - 127
    magnitude = unpack_nibbles(source.codes.view(torch.uint8)) & 7
    live = (magnitude != 0).reshape(*exponent.shape, 32).any(-1)
    told = torch.where(live, exponent, -127)
    n, k = block[0], block[1] // 32
    largest = tiles(told + 127, (n, k)).amax((-1, -2)) - 127
    scale = torch.pow(2.0, (largest - 6).clamp(min=-126).double()).float()
    return _tiled(source, scale, block)


def to_fp8_tiles(source: QuantTensor, block: tuple[int, int], *, powers: bool) -> QuantTensor:
    """Any encoding to tiles. The scale is the least power of two that keeps all below 448, if that
    is exact (as for what was cast from MXFP4) or `powers` demands it; else the largest is 448."""
    largest = tiles(source.dequantize().abs(), block).amax((-1, -2))
    mantissa, exponent = torch.frexp(largest / LARGEST8)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    made = _tiled(source, torch.where(largest > 0, scale, 1.0), block)
    if powers or torch.equal(made.dequantize(), source.dequantize()):
        return made
    return _tiled(source, torch.where(largest > 0, largest / LARGEST8, 1.0), block)


def to_fp8_rows(source: QuantTensor) -> QuantTensor:
    """Any encoding to rows whose largest value is 448; every value is rounded."""
    value = source.dequantize()
    largest = value.abs().amax(-1)
    scale = torch.where(largest > 0, largest / LARGEST8, 1.0)
    return QuantTensor(Encoding.FP8_CHANNEL, e4m3(value / scale[:, None]), scale)


def _tiled(source: QuantTensor, scale: Tensor, block: tuple[int, int]) -> QuantTensor:
    value = tiles(source.dequantize(), block)
    codes = untiled(e4m3(value / scale[..., None, None]).view(torch.uint8), source.shape)
    stored = codes.contiguous().view(torch.float8_e4m3fn)
    return QuantTensor(Encoding.FP8_BLOCK, stored, scale, None, block)
