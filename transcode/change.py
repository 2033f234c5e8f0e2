"""MXFP4 and NVFP4 to other encodings without rounding, where that can be.

Sources: NVIDIA/Model-Optimizer, examples/hf_ptq/cast_mxfp4_to_nvfp4.py (MXFP4 to NVFP4);
deepseek-ai/DeepSeek-V4, inference/convert.py, and sgl-project/sglang, cast_e2m1fn_to_e4m3fn (MXFP4
to FP8 tiles).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transcode.encode import LARGEST8, e2m1, e4m3, tiles
from transcode.quant import Encoding, QuantTensor, unpack_nibbles, unpacked4
from transcode.quantise import tiled

DEEP8 = 14
"""Between the exponents of a tile's MXFP4 blocks: the smallest code 0.5 is E4M3's smallest number
when the largest, 6, is 384."""

DEEP4 = 17
"""Between the largest exponent and another: E4M3 scales from 2^8 down to 2^-9."""


def mxfp4_to_mxfp8(source: QuantTensor) -> QuantTensor:
    """Exact always: E4M3 has all the values of E2M1, and the scales stay."""
    return QuantTensor(Encoding.MXFP8, e4m3(unpacked4(source.codes)), source.scales)


def halved(source: QuantTensor) -> QuantTensor:
    """NVFP4 in blocks of 32 to blocks of 16, exact always: every scale stands twice."""
    twice = source.scales.view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    return QuantTensor(Encoding.NVFP4, source.codes, twice, source.global_scale)


def top(scales: Tensor) -> int:
    """The largest exponent of E8M0 `[N, K/32]`, -127 if all bytes are 0."""
    return int(scales.view(torch.uint8).max()) - 127


def deep(scales: Tensor) -> int:
    """The smallest exponent of E8M0 scales whose byte is not 0."""
    byte = scales.view(torch.uint8)
    return int(byte[byte > 0].min()) - 127 if (byte > 0).any() else 0


def are_powers(scales: Tensor) -> bool:
    """Whether all are powers of two, E8M0 or floats."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return True
    return bool((torch.frexp(scales.float())[0] == 0.5).all())


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


def mxfp4_to_fp8(source: QuantTensor, block: tuple[int, int]) -> QuantTensor:
    """Tiles with a power of two as scale: the largest block's exponent, over 64.

    Exact where the exponents of a tile's blocks, but for blocks of zeros, differ by 14 at most;
    else the smallest values are rounded.
    """
    exponent = source.scales.view(torch.uint8).int()
    magnitude = unpack_nibbles(source.codes.view(torch.uint8)) & 7
    live = (magnitude != 0).reshape(*exponent.shape, 32).any(-1)
    n, k = block[0], block[1] // 32
    largest = tiles(torch.where(live, exponent, 0), (n, k)).amax((-1, -2))
    return tiled(source.dequantize(), tile_scales(largest), block)


def tile_scales(largest: Tensor) -> Tensor:
    """The scales of tiles, float32, for the largest E8M0 byte of their blocks that are not zero."""
    return torch.pow(2.0, (largest - 127 - 6).clamp(min=-126).double()).float()
