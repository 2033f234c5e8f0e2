"""Marlin's NVFP4 layout, as vLLM prepares it for `marlin_gemm` and `moe_wna16_marlin_gemm`.

| stored | dtype   | shape      | from                                                           |
|--------|---------|------------|----------------------------------------------------------------|
| weight | I32     | [K/16, 2N] | codes in 16 x 64 tiles, eight a word, the first in the low bits |
| scale  | F8_E4M3 | [K/16, N]  | S0E5M3 bytes (E4M3 in name only), see `pack_scales`            |
| global | F32     | []         | `g * 2^(B-7) / lift`, B = 126 (bfloat16) or 14 (float16)       |
| bias   | act.    | [N]        | in the accumulators' order                                     |

Source: vllm-project/vllm 0.25.1 (0.33.0 makes the same bytes):
vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py and csrc/quantization/marlin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor, lcm, log2

import torch
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels._execute import apply, undo
from transcode.quant import Encoding
from transcode.spec import Layout, Padded
from transcode.tiling import Tiling

CODES = Tiling("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g")
"""Codes [N, K]; the last three factors are a word's eight nibbles, slowest first."""

SCALES = Tiling("nt a:2 b:2 d:2 i:8, g -> g, nt i a d b")
"""Block scales [N, K/16]: 64 columns transposed as 8 x 8, then 0 2 1 3 within four."""

BIAS = Tiling("nt a:4 i:4 b:2 -> nt i a b")
"""Bias [N], in blocks of 32."""

ROWS = 64
"""N of a tile. A matrix must also have N % 128 == 0 or K % 128 == 0 (thread tiles of the GEMM)."""

DEEP = {"bfloat16": 126, "float16": 14}
"""Exponent bias of the activation dtype, less one: the kernel does not subtract it from codes."""


def pack_codes(codes: Tensor) -> Tensor:
    """`[N, K/2]` uint8 to `[K/16, 2N]` int32."""
    return apply(CODES, codes, 4)


def unpack_codes(words: Tensor) -> Tensor:
    """`[K/16, 2N]` int32 back to `[N, K/2]` uint8."""
    return undo(CODES, words, (words.shape[1] // 2, words.shape[0] * 16), 4)


def lift(largest: float, dtype: str) -> float:
    """The power of two >= 1 that moves the largest block scale into (224, 448]; 1 for float16."""
    if dtype == "float16" or not 0 < largest < 448:
        return 1.0
    return 2.0 ** floor(log2(448 / largest))


def pack_scales(scales: Tensor, factor: float) -> Tensor:
    """`[N, K/16]` float8_e4m3fn to `[K/16, N]`, S0E5M3 bytes under the dtype's name.

    A byte is bits 14 to 7 of `half(scale * lift * 128)`: exact, but for `scale * lift < 2^-6`,
    which becomes zero (see `flushed`).
    """
    return apply(SCALES, scales, 8, _stored_bytes(factor).to(scales.device))


def flushed(scales: Tensor, factor: float) -> Tensor:
    """Which of `[N, K/16]` float8_e4m3fn scales are not zero, but stored as zero."""
    value = scales.float()
    return (value > 0) & (value * factor < 2.0**-6)


def unpack_scales(stored: Tensor, factor: float) -> Tensor:
    """`[K/16, N]` S0E5M3 bytes back to `[N, K/16]` float8_e4m3fn; flushed scales come as zero."""
    return undo(SCALES, stored, stored.shape[::-1], 8, _scale_bytes(factor).to(stored.device))


@lru_cache
def _stored_bytes(factor: float) -> Tensor:
    """The S0E5M3 byte of every E4M3 byte."""
    lifted = (torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float() * factor).half()
    lifted = torch.where(lifted * 128 < 2, 0, lifted * 128)
    return ((lifted.view(torch.int16) << 1) >> 8).to(torch.uint8)


@lru_cache
def _scale_bytes(factor: float) -> Tensor:
    """The E4M3 byte of every S0E5M3 byte."""
    half = (torch.arange(256).to(torch.int16) << 7).view(torch.float16)
    return (half.float() / (factor * 128)).to(torch.float8_e4m3fn).view(torch.uint8)


def pack_global(g: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """`g * 2^(B-7) / lift` in float32; LayoutError where that is no finite normal number (or 0)."""
    stored = (g.double() * 2.0 ** (DEEP[dtype] - 7) / factor.double()).float()
    tiny = torch.finfo(torch.float32).tiny
    bad = ~(torch.isfinite(stored) & ((stored >= tiny) | (g == 0)))
    if bad.any():
        worst = g[bad].flatten()[0].item()
        raise LayoutError(
            f"global scale {worst:g} has no finite normal float32 in Marlin's range for {dtype} "
            f"(times 2^{DEEP[dtype] - 7}, over {factor.flatten()[0].item():g})"
        )
    return stored


def pad(rows: Sequence[int], k: int) -> Padded:
    """Pad matrices joined along N as vLLM pads the joined one: the smaller area, then perimeter."""
    members = [-(-n // ROWS) * ROWS for n in rows]
    n = sum(members)
    choices = [(_up(n, 64), _up(k, lcm(128, 16))), (_up(n, 128), _up(k, lcm(64, 16)))]
    pn, pk = min(choices, key=lambda c: (c[0] * c[1], c[0] + c[1]))
    members[-1] += pn - n
    return Padded(tuple(members), pk, pn == n)


def pad_experts(hidden: int, intermediate: int, tp: int) -> int:
    """The intermediate size up to whole tiles for `tp` ranks; LayoutError if H cannot be tiled."""
    if hidden % 64:
        raise LayoutError(f"hidden size {hidden} of an MoE layer, wanted a multiple of 64")
    return _up(intermediate, (64 if hidden % 128 == 0 else 128) * tp)


def serves(n: int, k: int) -> bool:
    """Whether the GEMM has thread tiles for N x K."""
    return (n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


LAYOUTS = (
    Layout(
        name="marlin-nvfp4",
        version=1,
        encoding=Encoding.NVFP4,
        title="vLLM's Marlin GEMM, 16-bit activations; no runtime loads it without our plug-in yet",
        tilings={"weight": (CODES, 4), "weight_scale": (SCALES, 8), "bias": (BIAS, 16)},
        pad=pad,
        pad_experts=pad_experts,
        serves=serves,
        weight_shape=lambda n, k: (k // 16, 2 * n),
        scale_shape=lambda n, k: (k // 16, n),
        pack_codes=pack_codes,
        unpack_codes=unpack_codes,
        lift=lift,
        pack_scales=pack_scales,
        flushed=flushed,
        unpack_scales=unpack_scales,
        pack_global=pack_global,
        pack_bias=lambda bias: apply(BIAS, bias, 16),
        unpack_bias=lambda stored: undo(BIAS, stored, stored.shape, 16),
    ),
)
