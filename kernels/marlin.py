"""Marlin's layouts, as vLLM and SGLang prepare them for `marlin_gemm` and `moe_wna16_marlin_gemm`.

| stored | dtype, shape                              | from                                       |
|--------|-------------------------------------------|--------------------------------------------|
| weight | I32 [K/16, 2N] (4 bits) or [K/16, 4N] (8) | codes in tiles, the first in the low bits  |
| scale  | [G, N], see _marlin_scales.py             | block scales, in the accumulators' order   |
| global | F32 [], NVFP4 only                        | `g * 2^(B-7) / lift`, B = 126 or 14 (fp16) |
| bias   | activations' dtype, [N]                   | in the accumulators' order                 |

Source: vllm-project/vllm 0.25.1 (0.33.0 makes the same bytes): vllm/model_executor/layers/
quantization/utils/marlin_utils{,_fp4,_fp8}.py and csrc/quantization/marlin; sgl-project/sglang
0.5.23: python/sglang/srt/layers/quantization/marlin_utils_fp4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm

import torch
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels import _marlin_scales as scales
from transcode.kernels._execute import apply, undo
from transcode.quant import Encoding
from transcode.spec import Bias, Codes, Layout, Padded
from transcode.tiling import Tiling

CODES4 = Tiling("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g")
CODES8 = Tiling("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w h e g")
"""Codes [N, K] of 4 and 8 bits in tiles of 64 x 16, for 16-bit activations; the last factors are
those of a word, slowest first."""

CODES4_A8 = Tiling("nt w:4 c:8, kt g:2 q:4 e:4 -> kt, nt c q w e g")
"""4-bit codes in tiles of 32 x 32, for 8-bit activations."""

BIAS = Tiling("nt a:4 i:4 b:2 -> nt i a b")
"""Bias [N], in blocks of 32."""

ROWS = 64
"""N of a tile. A matrix must also have N % 128 == 0 or K % 128 == 0 (thread tiles of the GEMM)."""


def pack_codes(tiling: Tiling, bits: int, codes: Tensor) -> Tensor:
    """`[N, K * bits / 8]` uint8 to `[K/16, N * bits / 2]` int32."""
    return apply(tiling, codes, bits).view(torch.int32).reshape(-1, codes.shape[0] * bits // 2)


def unpack_codes(tiling: Tiling, bits: int, words: Tensor) -> Tensor:
    """`[K/16, N * bits / 2]` int32 back to `[N, K * bits / 8]` uint8."""
    n, k = words.shape[1] * 2 // bits, words.shape[0] * 16
    return undo(tiling, words if bits == 4 else words.view(torch.uint8), (n, k), bits)


def codes_of(tiling: Tiling, bits: int) -> Codes:
    """Codes of so many bits in this order."""
    return Codes(
        bits,
        "I32",
        lambda n, k: (k // 16, n * bits // 2),
        partial(pack_codes, tiling, bits),
        partial(unpack_codes, tiling, bits),
    )


def pad(rows: Sequence[int], k: int, unit: int) -> Padded:
    """Pad matrices joined along N as vLLM pads the joined one: the smaller area, then perimeter."""
    members = [_up(n, ROWS) for n in rows]
    n = sum(members)
    choices = [(_up(n, 64), _up(k, lcm(128, unit))), (_up(n, 128), _up(k, lcm(64, unit)))]
    pn, pk = min(choices, key=lambda c: (c[0] * c[1], c[0] + c[1]))
    members[-1] += pn - n
    return Padded(tuple(members), pk, pn == n)


def pad_experts(
    hidden: int, inner: int, unit: int, tp: int, gated: bool, *, ungated: int = 64
) -> tuple[int, int]:
    """H as it is, and I up to whole tiles and units for `tp` ranks.

    ungated: the least tile of experts that are not gated. LayoutError if H cannot be tiled.
    """
    if hidden % (least := lcm(64, unit)):
        raise LayoutError(f"hidden size {hidden} of an MoE layer, wanted a multiple of {least}")
    tile = 64 if hidden % 128 == 0 else 128
    return hidden, _up(inner, lcm(tile if gated else max(tile, ungated), unit) * tp)


def pad_wide(hidden: int, inner: int, unit: int, tp: int, gated: bool) -> tuple[int, int]:
    """H up to 256, and I up to 128 for each of `tp` ranks: vLLM's Mxfp4MoEMethod's buffers."""
    return _up(hidden, 256), _up(inner, 128 * tp)


def serves(n: int, k: int) -> bool:
    """Whether the GEMM has thread tiles for N x K."""
    return (n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _pack_bias(bias: Tensor) -> Tensor:
    return apply(BIAS, bias, 16)


def _unpack_bias(stored: Tensor) -> Tensor:
    return undo(BIAS, stored, stored.shape, 16)


NVFP4 = Layout(
    name="marlin-nvfp4",
    version=1,
    title="Marlin GEMM, 16-bit activations",
    encodings=(Encoding.NVFP4,),
    groups=(16,),
    dtypes=("bfloat16", "float16"),
    tilings={"weight": (CODES4, 4), "weight_scale": (scales.BYTES, 8), "bias": (BIAS, 16)},
    pad=pad,
    pad_experts=pad_experts,
    serves=serves,
    codes=codes_of(CODES4, 4),
    scales=scales.VLLM_E4M3,
    factor=scales.VLLM_GLOBAL,
    bias=Bias(_pack_bias, _unpack_bias),
)
MXFP4 = replace(
    NVFP4,
    name="marlin-mxfp4",
    encodings=(Encoding.MXFP4,),
    groups=(32,),
    dtypes=("bfloat16",),
    pad_experts=pad_wide,
    scales=scales.E8M0,
    factor=None,
)
MXFP8 = replace(
    MXFP4,
    name="marlin-mxfp8",
    encodings=(Encoding.MXFP8,),
    tilings={**NVFP4.tilings, "weight": (CODES8, 8)},
    pad_experts=pad_experts,
    codes=codes_of(CODES8, 8),
)

LAYOUTS = (
    NVFP4,
    replace(
        NVFP4,
        variant="sglang",
        runtime="sglang",
        release="0.5.23",
        interleaves=False,
        pad_experts=partial(pad_experts, ungated=128),
        scales=scales.SGLANG_E4M3,
        factor=scales.SGLANG_GLOBAL,
    ),
    MXFP4,
    replace(
        MXFP4,
        variant="sglang",
        runtime="sglang",
        release="0.5.23",
        interleaves=False,
        dense="refused",
        scales=scales.E8M0_ONES,
    ),
    replace(
        MXFP4,
        variant="vllm-a8",
        title="Marlin GEMM, FP8 activations",
        activations="fp8",
        dense="refused",
        tilings={
            "weight": (CODES4_A8, 4),
            "weight_scale": (scales.COLUMNS, 8),
            "bias": (BIAS, 16),
        },
        codes=codes_of(CODES4_A8, 4),
        scales=scales.E8M0_A8,
    ),
    replace(
        MXFP8,
        name="marlin-fp8",
        encodings=(Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK),
        groups=(0, 128),
        dtypes=NVFP4.dtypes,
        tilings={
            "weight": (CODES8, 8),
            "weight_scale": (scales.BLOCKS, 16),
            "weight_scale of whole rows": (scales.COLUMNS, 16),
            "bias": (BIAS, 16),
        },
        scales=scales.FLOATS,
    ),
    MXFP8,
)
