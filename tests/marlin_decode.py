"""Marlin's words and scales decoded by the closed forms of the kernel, not through a Tiling.

k = 16 kt + 8 kh + 2 q + b and n = 64 nt + 16 w + 8 h + c lie, with 4 bits, in word
[kt, 128 nt + 16 c + 4 q + w], nibble 4 b + 2 h + kh; with 8 bits in word
[kt, 256 nt + 32 c + 8 q + 2 w + h], byte 2 b + kh. For 8-bit activations
k = 32 kt + 16 kh + 4 q + i and n = 32 nt + 8 w + c lie in the word 128 (kt N/32 + nt) + 16 c +
4 q + w of all, nibble 2 i + kh. Scale dst[8 i + j] = src[i + 8 s(j)] in 64 columns, s(j) = j, or
s = 0 2 1 3 4 6 5 7 for bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ORDER = (0, 2, 1, 3, 4, 6, 5, 7)
PLAIN = tuple(range(8))
DEEP = {"bfloat16": 126, "float16": 14}
LIFT8 = {"bfloat16": 2.0**120, "float16": 2.0**8}


def codes(words: Tensor) -> Tensor:
    """`[K/16, 2N]` int32 to `[N, K]` codes 0..15."""
    k, n = torch.arange(words.shape[0] * 16), torch.arange(words.shape[1] // 2)
    kt, kh, q, b = k // 16, k // 8 % 2, k // 2 % 4, k % 2
    nt, w, h, c = n // 64, n // 16 % 4, n // 8 % 2, n % 8
    column = (128 * nt + 16 * c + w)[:, None] + 4 * q
    nibble = (2 * h)[:, None] + 4 * b + kh
    return (words[kt.expand(len(n), -1), column] >> 4 * nibble) & 15


def codes8(words: Tensor) -> Tensor:
    """`[K/16, 4N]` int32 to `[N, K]` codes 0..255."""
    k, n = torch.arange(words.shape[0] * 16), torch.arange(words.shape[1] // 4)
    kt, kh, q, b = k // 16, k // 8 % 2, k // 2 % 4, k % 2
    nt, w, h, c = n // 64, n // 16 % 4, n // 8 % 2, n % 8
    column = (256 * nt + 32 * c + 2 * w + h)[:, None] + 8 * q
    return (words[kt.expand(len(n), -1), column] >> 8 * (2 * b + kh)) & 255


def codes_a8(words: Tensor) -> Tensor:
    """`[K/16, 2N]` int32 for 8-bit activations to `[N, K]` codes 0..15."""
    k, n = torch.arange(words.shape[0] * 16), torch.arange(words.shape[1] // 2)
    kt, kh, q, i = k // 32, k // 16 % 2, k // 4 % 4, k % 4
    nt, w, c = n // 32, n // 8 % 4, n % 8
    word = 128 * (kt * (len(n) // 32) + nt[:, None]) + (16 * c + w)[:, None] + 4 * q
    return (words.flatten()[word] >> 4 * (2 * i + kh)) & 15


def in_order(stored: Tensor, order: tuple[int, ...]) -> Tensor:
    """`[G, N]`, permuted in blocks of 64 columns, to `[N, G]`."""
    j = torch.arange(stored.shape[1])
    source = j // 64 * 64 + j % 64 // 8 + 8 * torch.tensor(order)[j % 8]
    plain = torch.empty_like(stored)
    plain[:, source] = stored
    return plain.T


def scales(stored: Tensor, lift: float) -> Tensor:
    """`[K/16, N]` S0E5M3 bytes to `[N, K/16]` float32: five bits of exponent, bias 15, over 128."""
    byte = in_order(stored.view(torch.uint8), ORDER).int()
    value = (1 + (byte & 7) / 8) * torch.exp2((byte >> 3).float() - 15)
    return torch.where(byte == 0, 0, value) / 128 / lift


def powers(stored: Tensor, *, a8: bool) -> Tensor:
    """`[K/32, N]` E8M0 bytes to `[N, K/32]` float32; for 8-bit activations they are 6 higher."""
    byte = stored.view(torch.uint8)
    plain = bias(byte.T).double() - 6 if a8 else in_order(byte, ORDER).double()
    return torch.exp2(plain - 127).float()


def floats(stored: Tensor) -> Tensor:
    """`[G, N]` scales of FP8 to `[N, G]` float32, without the factor of their dtype."""
    plain = bias(stored.T) if len(stored) == 1 else in_order(stored, PLAIN)
    return (plain.double() / LIFT8[str(stored.dtype)[6:]]).float()


def bias(stored: Tensor) -> Tensor:
    """`[N]`, dst[8 i + j] = src[2 i + j % 2 + 8 (j // 2)] in 32 columns, undone; `[N, G]` too."""
    d = torch.arange(len(stored))
    i, j = d % 32 // 8, d % 8
    plain = torch.empty_like(stored)
    plain[d // 32 * 32 + 2 * i + j % 2 + 8 * (j // 2)] = stored
    return plain


def weight(words: Tensor, stored: Tensor, kernel_global: float, lift: float, dtype: str) -> Tensor:
    """`[N, K]` float32, `code * fp32(scale * g)`, g won back from the kernel's global scale."""
    g = torch.tensor(kernel_global, dtype=torch.float64) * lift
    g = (g / 2.0 ** (DEEP[dtype] - 7)).float()
    return E2M1[codes(words)] * (scales(stored, lift) * g).repeat_interleave(16, -1)


def mx_weight(words: Tensor, stored: Tensor, *, bits: int, a8: bool) -> Tensor:
    """`[N, K]` float32 of MXFP4 or MXFP8."""
    scale = powers(stored, a8=a8).repeat_interleave(32, -1)
    if bits == 8:
        return e4m3(words) * scale
    return E2M1[codes_a8(words) if a8 else codes(words)] * scale


def fp8_weight(words: Tensor, stored: Tensor) -> Tensor:
    """`[N, K]` float32 of FP8 with scales for whole rows or 128 columns."""
    scale = floats(stored)
    code = e4m3(words)
    return code * scale.repeat_interleave(code.shape[1] // scale.shape[1], -1)


def e4m3(words: Tensor) -> Tensor:
    """What 8-bit codes mean."""
    return codes8(words).to(torch.uint8).view(torch.float8_e4m3fn).float()
