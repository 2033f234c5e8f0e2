"""A matrix that changes its encoding, as kernels read it: words of two elements, and scales.

A row is cut into pieces of 32 columns; a word has two neighbours, the even column in its low half:
8 bits for FP4, 16 for FP8, 32 for BF16 and FP16. What has no whole pieces, or no such words, is not
read by kernels (`source` gives None): the definition in torch does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transcode.quant import FP8, Encoding, QuantTensor, powers

PIECE = 32
"""Columns of a piece."""

WHOLE = 1 << 30
"""More rows or columns than there are: one scale for all."""

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, eq=False)
class Source:
    """kind: "nvfp4", "mxfp4", "mxfp8", "fp8", "bf16" or "fp16".

    words: `[N, K/2]` uint8, uint16 or int32.
    scales: uint8 `[N, K/16]` (E4M3) or `[N, K/32]` (E8M0); float32 of tiles, rows or all; a dummy.
    factor: NVFP4's, `[1]` float32; a dummy.
    tile: rows and columns of one scale of FP8.
    """

    kind: str
    words: Tensor
    scales: Tensor
    factor: Tensor
    tile: tuple[int, int] = (WHOLE, WHOLE)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.words.shape[0], self.words.shape[1] * 2


def source(of: QuantTensor | Tensor) -> Source | None:
    """How kernels read a matrix; None where they do not."""
    one = torch.ones(1, device=(of.codes if isinstance(of, QuantTensor) else of).device)
    if isinstance(of, Tensor):
        if of.dtype not in KINDS or of.shape[1] % PIECE or of.data_ptr() % 4:
            return None
        return Source(KINDS[of.dtype], of.contiguous().view(torch.int32), one, one)
    if of.shape[1] % PIECE or of.codes.data_ptr() % 2:
        return None
    octets = of.codes.contiguous().view(torch.uint8)
    if of.encoding is Encoding.NVFP4:
        assert of.global_scale is not None
        factor = of.global_scale.reshape(1).to(octets.device)
        return Source("nvfp4", octets, of.scales.contiguous().view(torch.uint8), factor)
    if of.encoding is Encoding.MXFP4:
        return Source("mxfp4", octets, of.scales.contiguous().view(torch.uint8), one)
    pairs = octets.view(torch.uint16)
    if of.encoding is Encoding.MXFP8:
        return Source("mxfp8", pairs, of.scales.contiguous().view(torch.uint8), one)
    if of.encoding not in FP8:
        return None
    eight = of.scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    scales = (powers(of.scales) if eight else of.scales.float()).contiguous()
    tile = {
        Encoding.FP8_TENSOR: (WHOLE, WHOLE),
        Encoding.FP8_CHANNEL: (1, WHOLE),
    }.get(of.encoding, of.block or (WHOLE, WHOLE))
    if tile[1] % PIECE:
        return None
    return Source("fp8", pairs, scales, one, tile)
