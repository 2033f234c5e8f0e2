"""vllm_marlin_fp8: Marlin's bytes of FP8 weights with factors of 16 bits."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from scripts.packers.fp8 import BLOCK, Dense, Factors, Moe, scale_name
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm import COMMON, FP8
from scripts.packers.wheel import Runtime


def prepare_dense(vllm: Runtime, case: Dense, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_fp8_layer_for_marlin`; as its callers do, with (K, N) unless by block."""
    by_block = case.granularity == "block"
    parameters = {name: given[name] for name in given if name != "members"}
    if not by_block:
        parameters["weight"] = parameters["weight"].T
    layer = module(
        parameters,
        output_size_per_partition=case.n,
        input_size_per_partition=case.k,
        orig_dtype=dtype,
        logical_widths=list(case.members or (case.n,)),
        weight_block_size=[BLOCK, BLOCK] if by_block else None,
    )
    vllm.modules[FP8].prepare_fp8_layer_for_marlin(layer, size_k_first=not by_block)
    return held(layer, parameters)


def prepare_moe(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_fp8_moe_layer_for_marlin`, vLLM's preparation of experts."""
    scale = scale_name(case.granularity)
    names = ("w13_weight", "w2_weight", f"w13_{scale}", f"w2_{scale}")
    layer = SimpleNamespace(
        num_experts=case.experts,
        hidden_size=case.hidden,
        intermediate_size_per_partition=case.inter,
        orig_dtype=dtype,
        weight_block_size=[BLOCK, BLOCK] if case.granularity == "block" else None,
        w13_weight=given["w13_weight"],
    )
    tensors = (given[name].clone() for name in names)
    packed = vllm.modules[FP8].prepare_fp8_moe_layer_for_marlin(layer, *tensors)
    return dict(zip(names, packed, strict=True))


SUBNORMAL = Factors(-24, -15)
"""Subnormal numbers in float16, most of them inexact."""

DENSE = (
    Dense("tensor-192x64", "tensor", 192, 64),  # padded to 256x64
    Dense("tensor-bias-72x96", "tensor", 72, 96, bias=True),  # to 128x128
    Dense("member-64x128", "member", 64, 128, members=(32, 16, 16)),
    Dense("member-bias-96x64", "member", 96, 64, members=(64, 32), bias=True),  # to 128x64
    Dense("channel-192x192", "channel", 192, 192),  # a tie: to 192x256
    Dense("channel-bias-64x128", "channel", 64, 128, bias=True),
    Dense("channel-subnormal-64x128", "channel", 64, 128, factors=SUBNORMAL),
    Dense("block-64x256", "block", 64, 256),
    Dense("block-bias-136x200", "block", 136, 200, bias=True),  # to 192x256
    # A single group, whose factors are ordered as those of channels.
    Dense("block-192x128", "block", 192, 128),
    Dense("block-128x64", "block", 128, 64),  # to 128x128
)
MOE = (
    Moe("tensor-h128-i64-e2", "tensor", 128, 64),
    Moe("member-h128-i32-e2", "member", 128, 32),  # padded to I = 64
    Moe("channel-h128-i96-e2", "channel", 128, 96),  # to I = 128
    Moe("channel-ungated-h128-i64-e1", "channel", 128, 64, experts=1, gated=False),
    Moe("block-h256-i128-e1", "block", 256, 128, experts=1),  # w2 has a single group
)

BOTH = ("bf16", "fp16")
FILE = GoldenFile(
    "vllm_marlin_fp8",
    "weight float8_e4m3fn [N, K]; weight_scale float32, per tensor [], member [members], channel "
    "[N, 1]; weight_scale_inv float32, a factor in spite of its name, per block of 128x128; "
    "members: rows of the joined projections; experts: one more dimension in front, and member "
    "means gate and up",
    (
        Kind("dense", f"{FP8}.prepare_fp8_layer_for_marlin", prepare_dense, DENSE, BOTH),
        Kind("moe", f"{FP8}.prepare_fp8_moe_layer_for_marlin", prepare_moe, MOE, BOTH),
    ),
    (FP8, *COMMON),
)
