"""Marlin's block scales: E4M3 as S0E5M3 bytes (NVFP4), E8M0 (MXFP4, MXFP8), floats (FP8).

All are stored `[G, N]`, G groups along K, permuted in blocks of 64 columns (32 where a column has
one scale only, and for 8-bit activations) as the accumulators lie in the tensor cores' registers.
Source: marlin_permute_scales, nvfp4_marlin_process_scales, mxfp4_marlin_process_scales and
fp8_fused_exponent_bias_into_scales in vllm-project/vllm 0.25.1, vllm/model_executor/layers/
quantization/utils/marlin_utils{,_fp4,_fp8}.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from math import floor, log2

import torch
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels._execute import apply, undo
from transcode.spec import Factor, Scales
from transcode.tiling import Tiling

BYTES = Tiling("nt a:2 b:2 d:2 i:8, g -> g, nt i a d b")
"""Byte scales [N, G]: 64 columns transposed as 8 x 8, then 0 2 1 3 within four."""

BLOCKS = Tiling("nt j:8 i:8, g -> g, nt i j")
"""Float scales [N, G]: 64 columns transposed as 8 x 8."""

COLUMNS = Tiling("nt a:4 i:4 b:2, g -> g, nt i a b")
"""Scales of whole rows [N, 1], and all for 8-bit activations: blocks of 32, as a bias."""

DEEP = {"bfloat16": 126, "float16": 14}
"""Exponent bias of the activation dtype, less one: the kernel does not subtract it from codes."""

LIFT8 = {"bfloat16": 2.0**120, "float16": 2.0**8}
"""What FP8 weights come out too small by: the two exponent biases' difference."""


def _shape(n: int, groups: int) -> tuple[int, int]:
    return groups, n


def _never(scales: Tensor, factor: float) -> Tensor:
    return torch.zeros_like(scales, dtype=torch.bool)


def lift(largest: float, dtype: str) -> float:
    """The power of two >= 1 that moves the largest block scale into (224, 448]; 1 for float16."""
    if dtype == "float16" or not 0 < largest < 448:
        return 1.0
    return 2.0 ** floor(log2(448 / largest))


def pack_e4m3(table: str, scales: Tensor, factor: float) -> Tensor:
    """`[N, K/16]` float8_e4m3fn to `[K/16, N]`, S0E5M3 bytes under the dtype's name.

    A byte is bits 14 to 7 of `half(scale * lift * 128)`: exact, but for `scale * lift < 2^-6`,
    which has no leading one in it. vLLM stores zero there (see `flushed`).
    """
    return apply(BYTES, scales, 8, _stored_bytes(factor, table).to(scales.device))


def unpack_e4m3(stored: Tensor, factor: float, shape: tuple[int, int]) -> Tensor:
    """`[K/16, N]` S0E5M3 bytes back to `[N, K/16]` float8_e4m3fn; flushed scales come as zero."""
    return undo(BYTES, stored, shape, 8, _scale_bytes(factor).to(stored.device))


def flushed(scales: Tensor, factor: float, dtype: str) -> Tensor:
    """Which of `[N, K/16]` float8_e4m3fn scales are not zero, but without a leading one."""
    value = scales.float()
    return (value > 0) & (value * factor < 2.0**-6)


def _flushed_in_bfloat16(scales: Tensor, factor: float, dtype: str) -> Tensor:
    """SGLang stores them all the same: the float16 kernel reads any byte, the other about zero."""
    found = flushed(scales, factor, dtype)
    return found if dtype == "bfloat16" else torch.zeros_like(found)


@lru_cache
def _stored_bytes(factor: float, table: str) -> Tensor:
    """The S0E5M3 byte of every E4M3 byte."""
    lifted = (torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float() * factor).half()
    if table == "vllm":
        lifted = torch.where(lifted * 128 < 2, 0, lifted)
    return (((lifted * 128).view(torch.int16) << 1) >> 8).to(torch.uint8)


@lru_cache
def _scale_bytes(factor: float) -> Tensor:
    """The E4M3 byte of every S0E5M3 byte."""
    half = (torch.arange(256).to(torch.int16) << 7).view(torch.float16)
    return (half.float() / (factor * 128)).to(torch.float8_e4m3fn).view(torch.uint8)


VLLM_E4M3 = Scales(
    "F8_E4M3", _shape, lift, partial(pack_e4m3, "vllm"), unpack_e4m3, flushed, False, _never
)
SGLANG_E4M3 = Scales(
    "F8_E4M3", _shape, lambda largest, dtype: 1.0, partial(pack_e4m3, "sglang"), unpack_e4m3,
    _flushed_in_bfloat16, True, _never,
)  # fmt: skip


def _pack_e8m0(scales: Tensor, factor: float) -> Tensor:
    return apply(BYTES, scales, 8)


def _unpack_e8m0(stored: Tensor, factor: float, shape: tuple[int, int]) -> Tensor:
    return undo(BYTES, stored, shape, 8)


def _zero(scales: Tensor, factor: float, dtype: str) -> Tensor:
    """Byte 0, which means 2^-127 and is zero in bfloat16's place for exponents."""
    return scales == 0


E8M0 = Scales("U8", _shape, lambda largest, dtype: 1.0, _pack_e8m0, _unpack_e8m0, _zero, True,
              _never)  # fmt: skip
"""`[N, K/32]` E8M0 bytes as they are."""

E8M0_ONES = replace(E8M0, fill=127)
"""The same with scales of 1 in the padding, as SGLang's buffers have them."""

MORE = 6
"""FP8 is that much deeper than FP4 (2^3 - 2^1): added to E8M0 bytes for FP8 activations."""


def _pack_e8m0_a8(scales: Tensor, factor: float) -> Tensor:
    return apply(COLUMNS, scales, 8, ((torch.arange(256) + MORE) % 256).to(scales))


def _unpack_e8m0_a8(stored: Tensor, factor: float, shape: tuple[int, int]) -> Tensor:
    table = ((torch.arange(256) - MORE) % 256).to(stored)
    return undo(COLUMNS, stored, shape, 8, table)


E8M0_A8 = Scales(
    "U8", _shape, lambda largest, dtype: 2.0**MORE, _pack_e8m0_a8, _unpack_e8m0_a8,
    lambda scales, factor, dtype: _never(scales, factor), True,
    lambda scales, factor: scales > 255 - MORE,
)  # fmt: skip
"""`[N, K/32]` E8M0 bytes, plus 6."""


def pack_floats(scales: Tensor, factor: float) -> Tensor:
    """`[N, G]` in the activations' dtype to `[G, N]`, times the lift."""
    return apply(_order(scales.shape[1]), scales * factor, 16)


def unpack_floats(stored: Tensor, factor: float, shape: tuple[int, int]) -> Tensor:
    """`[G, N]` back to `[N, G]`."""
    return undo(_order(shape[1]), stored, shape, 16) / factor


def _order(groups: int) -> Tiling:
    return COLUMNS if groups == 1 else BLOCKS


FLOATS = Scales(
    "", _shape, lambda largest, dtype: LIFT8[dtype], pack_floats, unpack_floats,
    lambda scales, factor, dtype: _never(scales, factor), True,
    lambda scales, factor: torch.isinf(scales * factor),
)  # fmt: skip
"""Scales of FP8 in the activations' dtype, for each row and group of columns."""


def pack_global(g: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """`g * 2^(B-7) / lift` in float32; LayoutError where that is no finite normal number (or 0)."""
    return _normal(g, g, factor, dtype)


def pack_global_short(g: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """The same in the activations' dtype, as SGLang has it: g rounded to it, then times 2^(B-7).

    Off by at most 2^-8 (bfloat16) or 2^-11 (float16) of its value; in float16 by at most 2^-25
    where g is below 2^-14.
    """
    return _normal(g, g.to(getattr(torch, dtype)), factor, dtype)


def _normal(g: Tensor, rounded: Tensor, factor: Tensor, dtype: str) -> Tensor:
    own = rounded.dtype
    stored = (rounded.double() * 2.0 ** (DEEP[dtype] - 7) / factor.double()).to(own)
    tiny = torch.finfo(own).tiny
    bad = ~(torch.isfinite(stored) & ((stored >= tiny) | (g == 0)))
    if bad.any():
        worst = g[bad].flatten()[0].item()
        raise LayoutError(
            f"global scale {worst:g} has no finite normal {str(own)[6:]} in Marlin's range "
            f"for {dtype} (times 2^{DEEP[dtype] - 7}, over {factor.flatten()[0].item():g})"
        )
    return stored


def unpack_global(stored: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """The factor that a stored global scale stands for, float32."""
    return (stored.double() * factor.double() / 2.0 ** (DEEP[dtype] - 7)).float()


VLLM_GLOBAL = Factor("F32", pack_global, unpack_global)
SGLANG_GLOBAL = Factor("", pack_global_short, unpack_global)
