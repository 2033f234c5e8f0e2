"""vllm_marlin_mxfp8: Marlin's MXFP8 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import ALL, Dense, Moe
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm import COMMON, FP8
from scripts.packers.wheel import Runtime

MOE_TENSORS = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype torch's default, as vLLM does while it loads: the scales pass through it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def prepare_dense(vllm: Runtime, case: Dense, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_mxfp8_layer_for_marlin`, vLLM's preparation of a linear layer."""
    layer = module(given, output_size_per_partition=case.n, input_size_per_partition=case.k)
    with default_dtype(dtype):
        vllm.modules[FP8].prepare_mxfp8_layer_for_marlin(layer)
    return held(layer, given)


def prepare_moe(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_mxfp8_moe_layer_for_marlin`, vLLM's preparation of experts."""
    tensors = (given[name].clone() for name in MOE_TENSORS)
    with default_dtype(dtype):
        packed = vllm.modules[FP8].prepare_mxfp8_moe_layer_for_marlin(module({}), *tensors)
    return dict(zip(MOE_TENSORS, packed, strict=True))


DENSE = (
    Dense("128x128", 8, 128, 128),
    Dense("192x320", 8, 192, 320),  # padded to 192x384
    Dense("192x64", 8, 192, 64),  # to 256x64
    Dense("72x96", 8, 72, 96),  # to 128x128
    Dense("bias-64x128", 8, 64, 128, bias=True),
    Dense("bias-72x96", 8, 72, 96, bias=True),
    Dense("all-64x256", 8, 64, 256, ALL),
)
MOE = (
    Moe("gated-h128-i64-e2", 8, 128, 64),
    Moe("gated-h128-i96-e2", 8, 128, 96),  # padded to I = 128
    Moe("ungated-h128-i64-e2", 8, 128, 64, gated=False),
)

FILE = GoldenFile(
    "vllm_marlin_mxfp8",
    "weight float8_e4m3fn [N, K]; weight_scale E8M0 as uint8, row order; w13: gate over up, or up "
    "alone where the case is called ungated; out: E8M0 as uint8, too",
    (
        Kind("dense", f"{FP8}.prepare_mxfp8_layer_for_marlin", prepare_dense, DENSE),
        Kind("moe", f"{FP8}.prepare_mxfp8_moe_layer_for_marlin", prepare_moe, MOE),
    ),
    (FP8, *COMMON),
)
