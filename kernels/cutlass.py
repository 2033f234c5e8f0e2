"""CUTLASS's layouts, as vLLM and FlashInfer prepare them for their GEMMs of block-scaled numbers.

| stored | dtype, shape                               | from                                 |
| ------ | ------------------------------------------ | ------------------------------------ |
| weight | U8 [N, K/2], F8_E4M3 [N, K]                | codes as they are, padded with zeros |
| scale  | F8_E4M3 or U8 [N up to 128, G up to 4]     | block scales, in tiles of 128 x 4    |
| scale  | F32 [], [N, 1] or [N/128, K/128], FP8      | as they are                          |
| global | F32 [], NVFP4: a factor                    | as it is                             |
| input  | F32 [], NVFP4 and FP8 of tensors: a factor | the largest of the joined matrices   |

The grouped kernel of vLLM finds an expert's scales at `e * N * (K/16)`, without the padding of
tiles: experts are padded so that there is none (vllm-project/vllm#35497).

Source: vllm-project/vllm 0.33.0 (0.25.1 makes the same bytes where it has the functions):
vllm/model_executor/layers/quantization/utils/{nvfp4_utils,flashinfer_fp4_moe}.py, vllm/
model_executor/layers/fused_moe/oracle/{mxfp4,fp8}.py; the tile: NVIDIA/cutlass 4.7,
include/cutlass/detail/sm100_blockscaled_layout.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from transcode.errors import LayoutError
from transcode.kernels._scalars import CUTLASS
from transcode.kernels._stored import (
    FACTOR,
    PLAIN_BIAS,
    own_scales,
    plain_codes,
    tiled_scales,
)
from transcode.quant import Encoding
from transcode.spec import Layout, Padded
from transcode.tiling import Tiling

SCALES = Tiling("rt a:4 r:32, ct c:4 -> rt ct r a c")
"""Byte scales [N, G] in tiles of 128 x 4: 32 rows of 16 bytes, a byte for rows r, r + 32, ..."""

TILE = (128, 4)


def up(size: int, unit: int) -> int:
    """The least multiple of a unit that is no smaller."""
    return -(-size // unit) * unit


def pad(least: tuple[int, int], rows: Sequence[int], k: int, unit: int) -> Padded:
    """N and K up to the least; members of a joined matrix each to whole tiles of scales, so that
    their rows can be joined and parted again."""
    each = least[0] if len(rows) == 1 else TILE[0]
    return Padded(tuple(up(n, each) for n in rows), up(k, least[1]), True)


def pad_experts(
    hidden: int, inner: int, unit: int, tp: int, gated: bool, *, half: int = 64
) -> tuple[int, int]:
    """H up to 128, I up to `half` where gate and up are joined, else 128; whole tiles of scales for
    each of `tp` ranks where there are several."""
    return up(hidden, 128), up(inner, 128 * tp if tp > 1 or not gated else half)


def pad_eight(
    hidden: int, inner: int, unit: int, tp: int, gated: bool, *, half: int = 1
) -> tuple[int, int]:
    """Sizes as they are, or I up to `half` (FlashInfer: 16; not gated 128).

    LayoutError where I is cut within a tile of scales.
    """
    if inner % unit:
        raise LayoutError(f"intermediate size {inner}, wanted a multiple of {unit} (tiles of FP8)")
    return hidden, up(inner, half if gated else max(half, 128 if half > 1 else 1))


LEAST = 1e-10
"""FlashInfer's kernel makes NaN of smaller scales of tiles, which stand over zeros: vLLM lifts them
(vllm-project/vllm#34914)."""


def any_size(n: int, k: int) -> bool:
    """The runtime pads what its kernel cannot tile."""
    return True


NVFP4 = Layout(
    name="cutlass-nvfp4",
    version=1,
    title="CUTLASS GEMM, NVFP4 activations",
    encodings=(Encoding.NVFP4,),
    groups=(16,),
    dtypes=("bfloat16", "float16"),
    tilings={"weight_scale": (SCALES, 8)},
    pad=partial(pad, (32, 32)),
    pad_experts=pad_experts,
    serves=lambda n, k: n % 32 == 0 and k % 32 == 0,
    codes=plain_codes("U8", 4),
    scales=tiled_scales(SCALES, "F8_E4M3", TILE),
    factor=FACTOR,
    bias=PLAIN_BIAS,
    activations="fp4",
    interleaves=False,
    inputs="each",
    tile=(128, 64),
    scalars=CUTLASS,
)
MXFP4 = replace(
    NVFP4,
    name="cutlass-mxfp4",
    title="CUTLASS GEMM, MXFP4 or MXFP8 activations",
    encodings=(Encoding.MXFP4,),
    groups=(32,),
    pad=partial(pad, (128, 128)),
    pad_experts=partial(pad_experts, half=128),
    scales=tiled_scales(SCALES, "U8", TILE),
    factor=None,
    inputs="",
    tile=(128, 128),
    scalars=(),
)
MXFP8 = replace(
    MXFP4,
    name="cutlass-mxfp8",
    title="CUTLASS GEMM, MXFP8 activations",
    encodings=(Encoding.MXFP8,),
    codes=plain_codes("F8_E4M3", 8),
    activations="fp8",
)
FP8 = replace(
    MXFP8,
    name="cutlass-fp8",
    title="CUTLASS GEMM, FP8 activations",
    encodings=(Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK),
    groups=(0, 128),
    tilings={},
    pad=lambda rows, k, unit: Padded(tuple(rows), k, True),
    pad_experts=pad_eight,
    serves=any_size,
    scales=own_scales(),
    inputs="all",
    tile=(16, 16),
)

LAYOUTS = (
    NVFP4,
    replace(NVFP4, variant="flashinfer", runtime="flashinfer", order="up_gate", inputs="all"),
    MXFP4,
    replace(MXFP4, variant="flashinfer", runtime="flashinfer", order="up_gate"),
    MXFP8,
    FP8,
    replace(
        FP8,
        variant="flashinfer",
        runtime="flashinfer",
        order="up_gate",
        pad_experts=partial(pad_eight, half=16),
        scales=own_scales(LEAST),
    ),
)
