"""DeepGEMM's GEMMs of FP8 with scales of 128 x 128 tiles.

| variant | weight           | scale                                                             |
|---------|------------------|-------------------------------------------------------------------|
| sm90    | F8_E4M3 [N, K]   | F32 [N/128, K/128], as it is                                      |
| sm100   | F8_E4M3 [N, K]   | I32 [K/512, N up to 4]: E8M0 of every row, four tiles a word      |

The sm100 kernel wants scales MN-major: `stored.transpose(-1, -2)[..., :N, :]`, which has its
strides without a copy. Scales have to be powers of two: bytes of them are packed as they are.

Source: deepseek-ai/DeepGEMM, csrc/utils/layout.hpp and deep_gemm/utils/layout.py
(_pack_fp32_into_ue8m0_fallback of sgl-deep-gemm 0.2.5); sgl-project/sglang 0.5.23,
python/sglang/srt/layers/quantization/fp8_utils.py, transform_scale_ue8m0.
"""

from __future__ import annotations

from dataclasses import replace

from transcode.errors import LayoutError
from transcode.kernels._stored import PLAIN_BIAS, own_scales, plain_codes, words_of_scales
from transcode.quant import Encoding
from transcode.spec import Layout, Padded
from transcode.tiling import Tiling

WORDS = Tiling("r, kp b:4 -> kp, r b")
"""E8M0 bytes [N, G], four groups a word, words of a group column one after another."""


def pad_experts(hidden: int, inner: int, unit: int, tp: int, gated: bool) -> tuple[int, int]:
    """Sizes as they are; LayoutError where a tile of scales would be cut."""
    if hidden % 128 or inner % (128 * tp):
        raise LayoutError(
            f"hidden size {hidden}, intermediate size {inner}: DeepGEMM wants multiples of 128"
            + f" for each of {tp} ranks" * (tp > 1)
        )
    return hidden, inner


SM90 = Layout(
    name="deepgemm-fp8",
    version=1,
    title="DeepGEMM on Hopper, FP8 activations",
    encodings=(Encoding.FP8_BLOCK,),
    groups=(128,),
    dtypes=("bfloat16",),
    tilings={},
    pad=lambda rows, k, unit: Padded(tuple(rows), k, True),
    pad_experts=pad_experts,
    serves=lambda n, k: n % 64 == 0 and k % 128 == 0,
    codes=plain_codes("F8_E4M3", 8),
    scales=own_scales(),
    factor=None,
    bias=PLAIN_BIAS,
    variant="sm90",
    runtime="sglang",
    release="0.5.23",
    activations="fp8",
    interleaves=False,
    tile=(128, 128),
)

LAYOUTS = (
    SM90,
    replace(
        SM90,
        title="DeepGEMM on Blackwell, FP8 activations",
        tilings={"weight_scale": (WORDS, 8)},
        scales=words_of_scales(WORDS, (4, 4), "U8", of="powers"),
        variant="sm100",
        tile=(128, 512),
    ),
)
