"""TensorRT-LLM's kernels for experts (trtllm-gen), as vLLM and SGLang prepare them by FlashInfer.

| stored | dtype, shape                           | from                                        |
| ------ | -------------------------------------- | ------------------------------------------- |
| weight | U8 [2I, H/2], [H, I/2]                 | rows up, gate, up, gate; shuffled within 32 |
| scale  | F8_E4M3 or U8 [2I, H/G], [H, I/G]      | the same rows, in tiles of 128 x 4          |
| global | F32 [2] (gate, up), [], NVFP4: factors | as they are: the kernel takes both          |
| bias   | F32 [2I], [H]                          | the same rows                               |

Source: flashinfer-ai/flashinfer 0.7.4, flashinfer/quantization/fp4_quantization.py
(shuffle_matrix_a, shuffle_matrix_sf_a) and flashinfer/fused_moe/core.py
(reorder_rows_for_gated_act_gemm); vllm-project/vllm 0.33.0, vllm/model_executor/layers/
quantization/utils/flashinfer_fp4_moe.py and vllm/model_executor/layers/fused_moe/oracle/mxfp4.py;
sgl-project/sglang 0.5.23, python/sglang/srt/layers/moe/moe_runner/flashinfer_trtllm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transcode.errors import LayoutError
from transcode.kernels._scalars import SGLANG, TRTLLM
from transcode.kernels._stored import FACTOR, rows_of_bias, rows_of_codes, tiled_scales
from transcode.kernels.cutlass import TILE, up
from transcode.quant import Encoding
from transcode.spec import Layout, Padded, Parts
from transcode.tiling import Tiling

ROWS = Tiling("b x:8 y:4, k -> b y x, k")
"""Rows within 32: 0, 4, 8, ..., 28, 1, 5, ..."""

PAIRS = Tiling("h:2 b x:8 t:2, k -> b t h x, k")
"""Rows of [up; gate] in turns, then as ROWS."""

ROW_SCALES = Tiling("rt a:4 x:8 y:4, ct c:4 -> rt ct y x a c")
"""Scales [N, G] by rows as ROWS, in CUTLASS's tiles of 128 x 4."""

PAIR_SCALES = Tiling("h:2 rt a:4 x:8 t:2, ct c:4 -> rt ct t h x a c")
"""Scales of [up; gate] by rows as PAIRS, in the same tiles."""


def no_linears(rows: Sequence[int], k: int, unit: int) -> Padded:
    """Only experts are packed."""
    raise LayoutError("only experts are packed here")


def pad_nvfp4(hidden: int, inner: int, unit: int, tp: int, gated: bool) -> tuple[int, int]:
    """H up to 256, I up to 64 for each rank, 128 where it is not gated."""
    return up(hidden, 256), up(inner, (64 if gated else 128) * tp)


def pad_mxfp4(hidden: int, inner: int, unit: int, tp: int, gated: bool) -> tuple[int, int]:
    """H up to 256, I up to 128 for each rank."""
    return up(hidden, 256), up(inner, 128 * tp)


NVFP4 = Layout(
    name="trtllm-nvfp4",
    version=1,
    title="TensorRT-LLM's experts, NVFP4 activations",
    encodings=(Encoding.NVFP4,),
    groups=(16,),
    dtypes=("bfloat16",),
    tilings={
        "weight": (ROWS, 8),
        "w13_weight": (PAIRS, 8),
        "weight_scale": (ROW_SCALES, 8),
        "w13_weight_scale": (PAIR_SCALES, 8),
    },
    pad=no_linears,
    pad_experts=pad_nvfp4,
    serves=lambda n, k: n % 128 == 0 and k % 64 == 0,
    codes=rows_of_codes(ROWS, "U8", 4),
    scales=tiled_scales(ROW_SCALES, "F8_E4M3", TILE),
    factor=replace(FACTOR, each=True),
    bias=rows_of_bias(ROWS),
    gated=Parts(
        rows_of_codes(PAIRS, "U8", 4),
        tiled_scales(PAIR_SCALES, "F8_E4M3", TILE),
        rows_of_bias(PAIRS),
    ),
    activations="fp4",
    dense="carried",
    order="up_gate",
    interleaves=False,
    inputs="all",
    tile=(64, 64),
    scalars=TRTLLM,
)
MXFP4 = replace(
    NVFP4,
    name="trtllm-mxfp4",
    title="TensorRT-LLM's experts, MXFP8 or 16-bit activations",
    encodings=(Encoding.MXFP4,),
    groups=(32,),
    pad_experts=pad_mxfp4,
    scales=tiled_scales(ROW_SCALES, "U8", TILE),
    factor=None,
    gated=Parts(
        rows_of_codes(PAIRS, "U8", 4), tiled_scales(PAIR_SCALES, "U8", TILE), rows_of_bias(PAIRS)
    ),
    activations="fp8",
    inputs="",
    tile=(128, 128),
    scalars=(),
)

LAYOUTS = (
    NVFP4,
    replace(NVFP4, variant="sglang", runtime="sglang", release="0.5.23", scalars=SGLANG),
    MXFP4,
    replace(
        MXFP4,
        variant="sglang",
        runtime="sglang",
        release="0.5.23",
        scales=tiled_scales(ROW_SCALES, "U8", TILE, fill=127),
        gated=Parts(
            rows_of_codes(PAIRS, "U8", 4),
            tiled_scales(PAIR_SCALES, "U8", TILE, fill=127),
            rows_of_bias(PAIRS),
        ),
    ),
)
