"""DeepGEMM's MegaMoE: the experts of a layer, dispatch to combine, in one kernel.

| stored | dtype, shape                             | from                                       |
| ------ | ---------------------------------------- | ------------------------------------------ |
| w13    | I8 [2I, H/2], F8_E4M3 [2I, H]            | rows of gate and up in turns (of 8, of 16) |
| w2     | I8 [H, I/2], F8_E4M3 [H, I]              | as it is                                   |
| scale  | I32 [K/4G, rows], four groups a word     | the same rows, then 4 x 32 to 32 x 4       |
| scale  | F32 [2I/128, H/128], [H/128, I/128], FP8 | as they are: gate over up                  |
| global | F32 [] (`vllm`), [2] (`sgl`), NVFP4      | factors                                    |

The kernels want scales MN-major: `stored.transpose(-1, -2)`, which has their strides without a
copy. Experts are shared out whole (expert parallelism), never cut.

Source: deepseek-ai/DeepGEMM (vendored by vllm-project/vllm 0.33.0 as vllm/third_party/deep_gemm,
and by sgl-project/sglang 0.5.23 as sgl-deep-gemm 0.2.5): deep_gemm/mega/__init__.py,
transform_weights_for_mega_moe; sgl-project/sglang python/sglang/srt/layers/moe/mega_moe{,_sm90}.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transcode.errors import LayoutError
from transcode.kernels._scalars import MEGAMOE
from transcode.kernels._stored import (
    FACTOR,
    own_scales,
    plain_codes,
    rows_of_codes,
    words_of_scales,
)
from transcode.kernels.trtllm import no_linears
from transcode.quant import Encoding
from transcode.spec import Layout, Parts
from transcode.tiling import Tiling

EIGHTS = Tiling("h:2 b m:8, k -> b h m, k")
"""Rows of [gate; up]: eight of gate, eight of up, ..."""

EIGHT_SCALES = Tiling("h:2 B j:4 t:2 m:8, kp b:4 -> kp, B t h m j b")
"""Scales [2I, G] by rows as EIGHTS, then transposed within 128 rows; four groups a word."""

SIXTEENS = Tiling("h:2 b u:8 p:2, k -> b p h u, k")
"""Rows of [gate; up] in turns of 8, first the even ones of 16, then the odd."""

SIXTEEN_SCALES = Tiling("h:2 B j:4 u:8 p:2, kp b:4 -> kp, B p h u j b")
"""Scales [2I, G] by rows as SIXTEENS, then transposed within 128 rows; four groups a word."""

ROW_SCALES = Tiling("B a:4 r:32, kp b:4 -> kp, B r a b")
"""Scales [H, G] of w2, transposed within 128 rows; four groups a word."""

TILE = (128, 4)


def pad_experts(
    least: tuple[int, int], hidden: int, inner: int, unit: int, tp: int, gated: bool
) -> tuple[int, int]:
    """H and I as they are; LayoutError where the kernel has no tiles for them."""
    if not gated:
        raise LayoutError("experts that are not gated: MegaMoE multiplies gate and up")
    if tp > 1:
        raise LayoutError(f"--tp {tp}: MegaMoE's experts are shared out whole, never cut")
    if hidden % least[0] or inner % least[1]:
        raise LayoutError(
            f"hidden size {hidden}, intermediate size {inner}: MegaMoE wants multiples of "
            f"{least[0]} and {least[1]}; cutlass and trtllm layouts are padded"
        )
    return hidden, inner


def advice(hidden: int, inner: int) -> str:
    """What some builds of the kernel do not take."""
    odd = [f"H = {hidden} (512)"] * bool(hidden % 512) + [f"I = {inner} (256)"] * bool(inner % 256)
    return f"{' and '.join(odd)}: some builds of MegaMoE want these multiples" if odd else ""


NOT_NVFP4 = (
    "the kernel reads an E8M0 scale for 32 columns, NVFP4 has an E4M3 scale for 16: --to "
    "megamoe-nvfp4, or the plain file in SGLang, which packs it for its NVFP4 kernel"
)

MXFP4 = Layout(
    name="megamoe-mxfp4",
    version=1,
    title="DeepGEMM's MegaMoE, FP8 activations",
    encodings=(Encoding.MXFP4,),
    groups=(32,),
    dtypes=("bfloat16",),
    tilings={
        "w13_weight": (EIGHTS, 8),
        "w13_weight_scale": (EIGHT_SCALES, 8),
        "w2_weight_scale": (ROW_SCALES, 8),
    },
    pad=no_linears,
    pad_experts=partial(pad_experts, (256, 128)),
    serves=lambda n, k: n % 256 == 0 and k % 128 == 0,
    codes=plain_codes("I8", 4),
    scales=words_of_scales(ROW_SCALES, TILE, "U8"),
    factor=None,
    bias=None,
    gated=Parts(rows_of_codes(EIGHTS, "I8", 4), words_of_scales(EIGHT_SCALES, TILE, "U8"), None),
    variant="mxfp4",
    activations="fp8",
    dense="carried",
    interleaves=False,
    tile=(0, 0),
    advice=advice,
    instead={Encoding.NVFP4: NOT_NVFP4},
)
NVFP4 = replace(
    MXFP4,
    name="megamoe-nvfp4",
    title="DeepGEMM's MegaMoE, NVFP4 activations",
    encodings=(Encoding.NVFP4,),
    groups=(16,),
    scales=words_of_scales(ROW_SCALES, TILE, "F8_E4M3"),
    factor=FACTOR,
    gated=Parts(
        rows_of_codes(EIGHTS, "I8", 4), words_of_scales(EIGHT_SCALES, TILE, "F8_E4M3"), None
    ),
    variant="vllm",
    activations="fp4",
    inputs="each",
    instead={},
)

LAYOUTS = (
    MXFP4,
    NVFP4,
    replace(
        NVFP4,
        tilings={
            "w13_weight": (SIXTEENS, 8),
            "w13_weight_scale": (SIXTEEN_SCALES, 8),
            "w2_weight_scale": (ROW_SCALES, 8),
        },
        factor=replace(FACTOR, each=True),
        gated=Parts(
            rows_of_codes(SIXTEENS, "I8", 4),
            words_of_scales(SIXTEEN_SCALES, TILE, "F8_E4M3"),
            None,
        ),
        variant="sgl",
        runtime="sglang",
        release="0.5.23",
        scalars=MEGAMOE,
    ),
    replace(
        MXFP4,
        name="megamoe-fp8-sm90",
        title="DeepGEMM's MegaMoE on Hopper, FP8 activations",
        encodings=(Encoding.FP8_BLOCK,),
        groups=(128,),
        tilings={"w13_weight": (EIGHTS, 8)},
        codes=plain_codes("F8_E4M3", 8),
        scales=own_scales(),
        gated=Parts(rows_of_codes(EIGHTS, "F8_E4M3", 8), own_scales(), None),
        variant="sm90",
        runtime="sglang",
        release="0.5.23",
    ),
)
