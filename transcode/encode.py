"""Numbers to codes: rounding to nearest even, the same bits on every device.

All arithmetic is float32, one operation after another (nothing is contracted), on exact powers of
two where a table of exact conversions says so (change.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode.quant import pack_nibbles

LARGEST8 = 448.0
"""The largest E4M3 number."""


def _below(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(0.0)))


BOUNDS = (0.25, _below(0.75), 1.25, _below(1.75), 2.5, _below(3.5), 5.0)
"""A magnitude above the i-th rounds to code i + 1: ties go to the even code."""


def e2m1(value: Tensor) -> Tensor:
    """`[..., K]` float32 to `[..., K/2]` uint8, two codes a byte; above 6 saturates, -0 is kept."""
    bounds = torch.tensor(BOUNDS, device=value.device)
    code = torch.bucketize(value.abs(), bounds).to(torch.uint8)
    return pack_nibbles(torch.where(torch.signbit(value), code | 8, code))


def rounded(magnitude: Tensor) -> Tensor:
    """Float32 numbers >= 0 to E2M1's, as `e2m1` rounds them: 1.5 * 2^23 times a step is added and
    taken away again, which leaves multiples of the step, ties to even."""
    step = 12582912.0
    lower = torch.where(magnitude < 2, step / 2, step)
    magic = torch.where(magnitude < 4, lower, step * 2)
    return ((magnitude + magic) - magic).clamp(max=6.0)


def e4m3(value: Tensor) -> Tensor:
    """Float32 to float8_e4m3fn; above 448 saturates."""
    return value.clamp(-LARGEST8, LARGEST8).to(torch.float8_e4m3fn)


def tiles(value: Tensor, block: tuple[int, int]) -> Tensor:
    """`[N, K]` to `[ceil(N/n), ceil(K/k), n, k]`, padded with zeros."""
    n, k = block
    rows, columns = value.shape
    full = pad(value, (0, -columns % k, 0, -rows % n))
    return full.reshape(-(-rows // n), n, -(-columns // k), k).transpose(1, 2)


def untiled(value: Tensor, shape: tuple[int, int]) -> Tensor:
    """`tiles` backwards."""
    a, b, n, k = value.shape
    return value.transpose(1, 2).reshape(a * n, b * k)[: shape[0], : shape[1]]
