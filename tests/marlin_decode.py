"""Marlin's words and bytes decoded by the closed forms of the kernel, not through a Tiling.

k = 16 kt + 8 kh + 2 q + b and n = 64 nt + 16 w + 8 h + c lie in word [kt, 128 nt + 16 c + 4 q + w],
nibble 4 b + 2 h + kh. Scale dst[8 i + j] = src[i + 8 s(j)] in 64 columns, s = 0 2 1 3 4 6 5 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ORDER = (0, 2, 1, 3, 4, 6, 5, 7)


def codes(words: Tensor) -> Tensor:
    """`[K/16, 2N]` int32 to `[N, K]` codes 0..15."""
    k, n = torch.arange(words.shape[0] * 16), torch.arange(words.shape[1] // 2)
    kt, kh, q, b = k // 16, k // 8 % 2, k // 2 % 4, k % 2
    nt, w, h, c = n // 64, n // 16 % 4, n // 8 % 2, n % 8
    column = (128 * nt + 16 * c + w)[:, None] + 4 * q
    nibble = (2 * h)[:, None] + 4 * b + kh
    return (words[kt.expand(len(n), -1), column] >> 4 * nibble) & 15


def scales(stored: Tensor, lift: float) -> Tensor:
    """`[K/16, N]` S0E5M3 bytes to `[N, K/16]` float32: five bits of exponent, bias 15, over 128."""
    byte = stored.view(torch.uint8).int()
    value = (1 + (byte & 7) / 8) * torch.exp2((byte >> 3).float() - 15)
    value = torch.where(byte == 0, 0, value) / 128 / lift
    j = torch.arange(stored.shape[1])
    source = j // 64 * 64 + j % 64 // 8 + 8 * torch.tensor(ORDER)[j % 8]
    plain = torch.empty_like(value)
    plain[:, source] = value
    return plain.T


def bias(stored: Tensor) -> Tensor:
    """`[N]`, dst[8 i + j] = src[2 i + j % 2 + 8 (j // 2)] in 32 columns, undone."""
    d = torch.arange(len(stored))
    i, j = d % 32 // 8, d % 8
    plain = torch.empty_like(stored)
    plain[d // 32 * 32 + 2 * i + j % 2 + 8 * (j // 2)] = stored
    return plain


def weight(words: Tensor, stored: Tensor, kernel_global: float, lift: float, dtype: str) -> Tensor:
    """`[N, K]` float32, `code * fp32(scale * g)`, g won back from the kernel's global scale."""
    g = torch.tensor(kernel_global, dtype=torch.float64) * lift
    g = (g / 2.0 ** ({"bfloat16": 126, "float16": 14}[dtype] - 7)).float()
    return E2M1[codes(words)] * (scales(stored, lift) * g).repeat_interleave(16, -1)
