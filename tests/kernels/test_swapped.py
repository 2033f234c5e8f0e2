"""Every storage order against golden words, which no order with two factors swapped has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests import answers
from tests.answers import Case
from tests.kernels import reference
from tests.kernels.reference import LAYOUTS, name, swapped
from transcode.quant import unpack_nibbles
from transcode.spec import Layout

NVFP4, MXFP4, MXFP8, FP8 = (f"vllm_marlin_{x}" for x in ("nvfp4", "mxfp4", "mxfp8", "fp8"))

# fmt: off
CASES = {
    "marlin-nvfp4 vllm": {"weight_scale": (NVFP4, "dense", "128x128", ""),
                          "bias": (NVFP4, "dense", "bias-72x112", "")},
    "marlin-nvfp4 sglang": {"weight_scale": ("sglang_marlin", "nvfp4_dense", "128x128", ""),
                            "bias": ("sglang_marlin", "nvfp4_dense", "bias-72x112", "")},
    "marlin-mxfp4 vllm": {"weight_scale": (MXFP4, "dense", "128x128", ""),
                          "bias": (MXFP4, "dense", "bias-72x96", "")},
    "marlin-mxfp4 sglang": {"weight_scale": ("sglang_marlin", "mxfp4_moe", "h128-i64-e2", "w13_"),
                            "bias": ("sglang_marlin", "mxfp4_moe", "bias-h192-i32-e2", "w2_")},
    "marlin-mxfp4 vllm-a8": {"weight_scale": (MXFP4, "dense_a8", "128x128", ""),
                             "bias": (MXFP4, "dense_a8", "bias-72x96", "")},
    "marlin-fp8 vllm": {"weight_scale": (FP8, "dense", "block-bias-136x200", ""),
                        "weight_scale of whole rows": (FP8, "dense", "channel-192x192", ""),
                        "bias": (FP8, "dense", "tensor-bias-72x96", "")},
    "marlin-mxfp8 vllm": {"weight_scale": (MXFP8, "dense", "128x128", ""),
                          "bias": (MXFP8, "dense", "bias-72x96", "")},
}
"""A case of a golden file for each order; the words of codes are the compiled kernel's."""
# fmt: on


def words(layout: Layout) -> tuple[Tensor, Tensor]:
    """Codes one by one, as given to `gptq_marlin_repack` and as it stored them."""
    bits = layout.codes.bits
    key = f"repack{bits}.192x320.a8{int(layout.activations == 'fp8')}"
    given, stored = (answers.load("marlin_repack")[f"{key}.{side}"] for side in ("in", "out"))
    stored = stored.view(torch.uint8)
    return (unpack_nibbles(given), unpack_nibbles(stored)) if bits == 4 else (given, stored)


def golden(layout: Layout, what: str) -> tuple[Tensor, Tensor]:
    """Elements as they are before they are ordered, and as the runtime has them."""
    if what == "weight":
        return words(layout)
    file, kind, case_name, stack = CASES[name(layout)][what]
    case, leaf = Case(file, kind, "bf16", case_name), stack + what.split()[0]
    stored = case.wanted[leaf]
    source = case.given[f"{leaf}_inv" if "block" in case_name else leaf]
    if stack:
        source, stored = source[0], stored[0]
    if source.dtype == torch.float32:
        source = source.to(torch.bfloat16)
    if "block" in case_name:
        source = source.repeat_interleave(128, 0)[:136]
    source = pad(source, (0, 0) * (source.dim() - 1) + (0, stored.shape[-1] - len(source)))
    if what == "bias":
        return source.view(torch.int16), stored.view(torch.int16)
    lift = layout.scales.lift(float(source.float().max()), "bfloat16")
    source = reference.scales(layout, source, lift)
    return source, stored.view(source.dtype)


@pytest.mark.parametrize(
    ("layout", "what"), [(one, what) for one in LAYOUTS for what in one.tilings],
    ids=lambda v: v if isinstance(v, str) else name(v),
)  # fmt: skip
def test_golden_words_are_in_the_order_and_in_none_with_swapped_factors(
    layout: Layout, what: str
) -> None:
    tiling, _ = layout.tilings[what]
    source, stored = golden(layout, what)
    right = tiling.apply(source).flatten()
    assert torch.equal(right, stored.flatten())
    shape = tuple(source.shape)
    others = swapped(tiling, shape)
    factors = [f for group in tiling.groups for f in group]
    alone = [f for f, size in tiling.sizes(shape).items() if size == 1]
    assert alone == (["g"] if "whole rows" in what else [])
    assert len(others) == len(factors) - 1 - len(alone)
    assert not [t.pattern for t in others if torch.equal(t.apply(source).flatten(), right)]
