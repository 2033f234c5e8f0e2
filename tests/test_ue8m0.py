"""FP8 tiles whose scales become powers of two, against vLLM's own requantisation (tests/golden).

vLLM's is `requant_weight_ue8m0_inplace`. It treats two kinds of tiles in another way than we do, on
purpose: the largest magnitude counts as 1e-4 at least, which loses small weights, and float32's
log2 takes a scale for the power of two just below it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transcode.encode import tiles
from transcode.quant import Encoding, QuantTensor
from transcode.quantise import fp8_tiles

WORDS = load_file(Path(__file__).parent / "golden/ue8m0_requant.safetensors")
BLOCK = (128, 128)
LEAST = 1e-4
JUST_ABOVE = (2.0**-6 * (1 + 2.0**-23)) * 448


def matrices(case: str, side: str) -> list[tuple[Tensor, Tensor]]:
    weight = WORDS[f"vllm.bf16.{case}.{side}.weight"]
    scales = WORDS[f"vllm.bf16.{case}.{side}.weight_scale_inv"]
    return [(weight, scales)] if weight.dim() == 2 else list(zip(weight, scales, strict=True))


@pytest.mark.parametrize(
    "case", ["usual-136x264", "tops-8x1024", "factors-8x1024", "experts-2x136x136"]
)
def test_tiles_equal_vllms_but_the_two_kinds(case: str) -> None:
    for given, (weight, scales) in zip(matrices(case, "in"), matrices(case, "out"), strict=True):
        value = QuantTensor(Encoding.FP8_BLOCK, *given, None, BLOCK).dequantize()
        made = fp8_tiles(value, BLOCK, powers=True)
        largest = tiles(value.abs(), BLOCK).amax((-1, -2))
        ours = (largest >= LEAST) & (largest != JUST_ABOVE)
        assert ours.any()
        assert torch.equal(made.scales[ours], scales[ours])
        codes, answer = (tiles(c.view(torch.uint8).float(), BLOCK) for c in (made.codes, weight))
        assert torch.equal(codes[ours], answer[ours])
        assert (made.scales[~ours] != scales[~ours]).all()
        assert torch.equal(made.scales[largest == JUST_ABOVE], 2 * scales[largest == JUST_ABOVE])
        assert (scales[largest < LEAST] == 2.0**-22).all()
