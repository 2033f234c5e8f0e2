"""What a quantised weight means: codes, the scales over blocks of them, and one factor over all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the eight 4-bit codes (OCP Microscaling Formats 1.0); bit 3 is the sign."""


class Encoding(StrEnum):
    """How a module's numbers are stored."""

    NVFP4 = "nvfp4"  # E2M1, one E4M3 scale for 16 along K, one F32 factor
    NVFP4_32 = "nvfp4-32"  # the same with blocks of 32: ModelOpt's W4A8_NVFP4_FP8
    MXFP4 = "mxfp4"  # E2M1, one E8M0 scale for 32 along K
    MXFP8 = "mxfp8"  # E4M3, one E8M0 scale for 32 along K
    FP8_TENSOR = "fp8-tensor"  # E4M3, one scale
    FP8_CHANNEL = "fp8-channel"  # E4M3, one scale a row
    FP8_BLOCK = "fp8-block"  # E4M3, one scale a tile
    INT4 = "int4"  # compressed-tensors pack-quantized
    UNQUANTISED = "unquantised"


FP8 = (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK)
"""E4M3 with scales of a float dtype, or E8M0, that has no fixed block."""


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A quantised matrix `[N, K]`, in any encoding but INT4: `value = code * (scale * factor)`.

    codes: `[N, K/2]` uint8 or int8, two E2M1 codes a byte, the even column in the low nibble (-0
    occurs), or `[N, K]` float8_e4m3fn.
    scales: in their logical shape (producer.Leaf), in row order, unpadded, unswizzled; E8M0 as
    uint8 or float8_e8m0fnu.
    global_scale: NVFP4's, `[]` float32, a factor (never its reciprocal); None in other encodings.
    block: rows and columns of a tile (FP8_BLOCK).
    """

    encoding: Encoding
    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None = None
    block: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape `(N, K)`."""
        n, columns = self.codes.shape
        return n, columns * (1 if self.codes.dtype is torch.float8_e4m3fn else 2)

    def rows(self, first: int, last: int) -> QuantTensor:
        """Some of its rows; of tiles, whole ones."""
        tall = self.block[0] if self.block and self.encoding is Encoding.FP8_BLOCK else 1
        scales = self.scales
        if self.encoding is not Encoding.FP8_TENSOR:
            scales = scales[first // tall : -(-last // tall)]
        return replace(self, codes=self.codes[first:last], scales=scales)

    def dequantize(self) -> Tensor:
        """`[N, K]` float32, the definition of meaning for the whole program.

        The two scales are multiplied first and rounded once, as ModelOpt's decoder does. A matrix
        whose global scale is 0 is zero, whatever its scales say (ModelOpt writes NaN there), and
        NVFP4's NaN scales over codes of zero are zero too.
        """
        factor = self.global_scale
        value = _values(self.codes)
        e8m0 = self.scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
        scale = powers(self.scales) if e8m0 else self.scales.float()
        if factor is not None:
            scale = torch.zeros_like(scale) if factor == 0 else scale * factor
        n, k = value.shape
        rows, columns = {
            Encoding.FP8_TENSOR: (n, k),
            Encoding.FP8_CHANNEL: (1, k),
            Encoding.FP8_BLOCK: self.block or (n, k),
            Encoding.NVFP4: (1, 16),
        }.get(self.encoding, (1, 32))
        spread = scale.reshape(-(-n // rows), -(-k // columns))
        spread = spread.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        product = value * spread
        if factor is None:
            return product
        return torch.where((value == 0) & spread.isnan(), 0.0, product)


def _values(codes: Tensor) -> Tensor:
    """What codes mean, float32 `[N, K]`."""
    return codes.float() if codes.dtype is torch.float8_e4m3fn else unpacked4(codes)


def unpacked4(codes: Tensor) -> Tensor:
    """E2M1 `[..., K/2]`, two codes a byte, to `[..., K]` float32."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device)
    return table[unpack_nibbles(codes.view(torch.uint8)).int()]


def powers(exponents: Tensor) -> Tensor:
    """E8M0 (uint8 or float8_e8m0fnu) to float32, `2^(byte - 127)`, exact; 255 is NaN."""
    byte = exponents.view(torch.uint8)
    value = torch.pow(2.0, byte.double() - 127).float()
    return torch.where(byte == 255, float("nan"), value)


def exponents(value: Tensor) -> Tensor:
    """Floats that are powers of two from 2^-127 to 2^127 to E8M0, uint8; ValueError for others."""
    byte = torch.log2(value.double()).round() + 127
    fits = (byte >= 0) & (byte <= 254)
    stored = torch.where(fits, byte, 0).to(torch.uint8)
    if not torch.equal(powers(stored).double(), value.double()):
        raise ValueError("not all are powers of two")
    return stored


def unpack_nibbles(codes: Tensor) -> Tensor:
    """`[..., K/2]` uint8, the even column in the low nibble, to `[..., K]`, one code a byte."""
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """`[..., K]`, one code a byte, to `[..., K/2]` uint8, the even column in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4
