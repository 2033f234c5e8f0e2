"""Numbers to encodings, a matrix at a time: the scales are chosen, then values are rounded.

value: always `[N, K]` float32, finite. Arithmetic is float32, one operation after another in a
fixed order (nothing is contracted), so that every device gives the same bytes. A block of zeros
has scale 0 in 4-bit encodings, 1 in FP8.

search: "max" gives the largest value of a block the largest code; "mse" tries scales around that
and keeps the one with the least squared error, the smallest of those that are equal.

Sources of the rules: NVIDIA/Model-Optimizer, modelopt/torch/quantization, qtensor/nvfp4_tensor.py
("max" gives its bytes), qtensor/mxfp4_tensor.py and calib/mse.py (the sweep over E4M3 scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

from transcode.encode import LARGEST8, e2m1, e4m3, rounded, tiles, untiled
from transcode.quant import Encoding, QuantTensor

LEAST = 2.0**-110
"""The least global scale: times any E4M3 scale it is a normal float32."""

BELOW, ABOVE = 13, 9
"""E4M3 scales that are tried, in steps of their bytes, around a block's largest value over 6.

More than 13 below, a third of it, the largest value's own error exceeds what all have there; more
than 8 above, twice it, half the scale does as well. One more for the rounding of the centre.
"""

ROWS = 1 << 22
"""Elements that are searched at a time."""


def nvfp4_factor(largest: Tensor) -> Tensor:
    """The global scale for a largest magnitude `[]` float32: `largest / 2688`, 1 for 0."""
    factor = _over(largest, 6 * LARGEST8).clamp(min=LEAST)
    return torch.where(largest > 0, factor, torch.ones_like(factor))


def nvfp4(value: Tensor, factor: Tensor, search: str) -> QuantTensor:
    """With this global scale, `[]` float32. Relative Frobenius error on normal weights: 9.5 %
    ("max"), 8.1 % ("mse")."""
    rows = max(1, ROWS // value.shape[1])
    starts = range(0, len(value), rows)
    parts = [_nvfp4(value[i : i + rows], factor, search) for i in starts]
    codes, scales = (torch.cat([p[i] for p in parts]) for i in range(2))
    return QuantTensor(Encoding.NVFP4, codes, scales.view(torch.float8_e4m3fn), factor)


def _nvfp4(value: Tensor, factor: Tensor, search: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of some rows."""
    blocks = value.reshape(value.shape[0], -1, 16)
    largest = blocks.abs().amax(-1)
    centre = e4m3(largest / (6 * factor)).view(torch.uint8).int().clamp(min=1)
    byte = swept(blocks / factor, centre) if search == "mse" else centre
    byte = torch.where(largest > 0, byte, 0).to(torch.uint8)
    scale = byte.view(torch.float8_e4m3fn).float() * factor
    scaled = blocks / torch.where(byte > 0, scale, 1.0)[..., None]
    return e2m1(scaled.flatten(1)), byte


def swept(blocks: Tensor, centre: Tensor) -> Tensor:
    """The byte of the best E4M3 scale for each of `[N, G, 16]` blocks, over the global scale."""
    best, found = torch.full(centre.shape, torch.inf, device=blocks.device), centre
    blocks = blocks.abs()
    for step in range(-BELOW, ABOVE + 1):
        byte = (centre + step).clamp(1, 126)
        scale = byte.to(torch.uint8).view(torch.float8_e4m3fn).float()[..., None]
        error = _squares(blocks, blocks * (1 / scale), scale)
        less = error < best
        best, found = torch.where(less, error, best), torch.where(less, byte, found)
    return found


def _squares(value: Tensor, scaled: Tensor, scale: Tensor) -> Tensor:
    """Sums of squared errors of blocks of magnitudes if `scaled` is rounded to E2M1, added up
    pairwise."""
    error = value - rounded(scaled) * scale
    error = error * error
    while error.shape[-1] > 1:
        error = error[..., ::2] + error[..., 1::2]
    return error.squeeze(-1)


def mxfp4(value: Tensor, search: str) -> QuantTensor:
    """Relative Frobenius error on normal weights: 11.9 % ("max"), 11.1 % ("mse"). "mse" is exact
    where any exponent is."""
    blocks = value.reshape(value.shape[0], -1, 32)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)
    if search == "max":
        exponent = exponent - 3 + (mantissa > 0.75).int()
    else:
        exponent = _tried(blocks, exponent - 3 + (mantissa * 1.125 >= 1).int())
    exponent = exponent.clamp(-127, 127)
    byte = torch.where(largest > 0, exponent + 127, 0).to(torch.uint8)
    codes = e2m1((blocks / _power(exponent)[..., None]).flatten(1))
    return QuantTensor(Encoding.MXFP4, codes, byte)


def _tried(blocks: Tensor, even: Tensor) -> Tensor:
    """The best of three exponents: "even" rounding's, one less, one more."""
    value = blocks.abs() / _power(even.clamp(-127, 127))[..., None]
    best, found = torch.full(even.shape, torch.inf, device=blocks.device), even
    for step in (-1, 0, 1):
        error = _squares(value, value * 2.0**-step, torch.tensor(2.0**step, device=value.device))
        less = error < best
        best, found = torch.where(less, error, best), torch.where(less, even + step, found)
    return found


def mxfp8(value: Tensor) -> QuantTensor:
    """The exponent is the least that keeps a block below 448; about 2.7 % on normal weights."""
    blocks = value.reshape(value.shape[0], -1, 32)
    exponent = above(blocks.abs().amax(-1))
    codes = e4m3((blocks / _power(exponent)[..., None]).flatten(1))
    return QuantTensor(Encoding.MXFP8, codes, (exponent + 127).to(torch.uint8))


def above(largest: Tensor) -> Tensor:
    """The least exponent k with `largest <= 448 * 2^k`, int32 from -127 to 127; 0 for 0."""
    mantissa, exponent = torch.frexp(largest)
    least = (exponent - 9 + (mantissa > 0.875).int()).clamp(-127, 127)
    return torch.where(largest > 0, least, 0)


def fp8_tiles(value: Tensor, block: tuple[int, int], *, powers: bool) -> QuantTensor:
    """The scale is the least power of two that keeps a tile below 448, if that is exact or `powers`
    demands it; else the largest value becomes 448."""
    largest = tiles(value.abs(), block).amax((-1, -2))
    made = tiled(value, _power(above(largest).clamp(min=-126)), block)
    if powers or torch.equal(made.dequantize(), value):
        return made
    return tiled(value, fp8_scale(largest), block)


def fp8_rows(value: Tensor) -> QuantTensor:
    """A row's largest value becomes 448."""
    scale = fp8_scale(value.abs().amax(-1))
    return QuantTensor(Encoding.FP8_CHANNEL, e4m3(value / scale[:, None]), scale)


def fp8_tensor(value: Tensor, scale: Tensor) -> QuantTensor:
    """With this scale, `[]` float32."""
    return QuantTensor(Encoding.FP8_TENSOR, e4m3(value / scale), scale)


def fp8_scale(largest: Tensor) -> Tensor:
    """Scales that make the largest value 448, normal float32."""
    scale = _over(largest, LARGEST8).clamp(min=LEAST)
    return torch.where(largest > 0, scale, torch.ones_like(scale))


def tiled(value: Tensor, scale: Tensor, block: tuple[int, int]) -> QuantTensor:
    """Tiles with these scales, float32 `[ceil(N/n), ceil(K/k)]`."""
    codes = e4m3(tiles(value, block) / scale[..., None, None]).view(torch.uint8)
    stored = untiled(codes, (value.shape[0], value.shape[1])).contiguous()
    return QuantTensor(Encoding.FP8_BLOCK, stored.view(torch.float8_e4m3fn), scale, None, block)


def _over(value: Tensor, number: float) -> Tensor:
    """A division: on a GPU, torch makes one by a Python number a product with its reciprocal."""
    return value / torch.full((), number, device=value.device)


def _power(exponent: Tensor) -> Tensor:
    """`2^exponent`, float32, exact."""
    return torch.pow(2.0, exponent.double()).float()
