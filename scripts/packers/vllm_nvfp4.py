"""vllm_marlin_nvfp4: Marlin's NVFP4 bytes, in vLLM's own words."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from scripts.packers import nvfp4
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm import COMMON, FP4
from scripts.packers.wheel import Runtime

MOE_TENSORS = tuple(
    f"{matrix}_{tensor}"
    for matrix in ("w13", "w2")
    for tensor in ("weight", "weight_scale", "weight_scale_2")
)


def prepare_dense(vllm: Runtime, case: nvfp4.Dense, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_fp4_layer_for_marlin`, vLLM's preparation of a linear layer."""
    return nvfp4.prepared(vllm.modules[FP4].prepare_fp4_layer_for_marlin, case, given, dtype)


def prepare_moe(vllm: Runtime, case: nvfp4.Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_nvfp4_moe_layer_for_marlin`, vLLM's preparation of ModelOpt's experts."""
    layer = SimpleNamespace(
        num_experts=len(case.w13),
        hidden_size=case.hidden,
        intermediate_size_per_partition=case.inter,
        params_dtype=dtype,
    )
    packed = vllm.modules[FP4].prepare_nvfp4_moe_layer_for_marlin(
        layer, *(given[name].clone() for name in MOE_TENSORS), is_act_and_mul=case.gated
    )
    return dict(zip(MOE_TENSORS, packed, strict=True))


def prepare_moe_inplace(
    vllm: Runtime, case: nvfp4.Moe, given: Tensors, dtype: torch.dtype
) -> Tensors:
    """Drive `prepare_moe_fp4_layer_for_marlin`, which neither pads nor leaves out the biases."""
    sizes = SimpleNamespace(
        num_experts=len(case.w13),
        num_local_experts=len(case.w13),
        hidden_dim=case.hidden,
        intermediate_size_per_partition=case.inter,
    )
    layer = module(given, params_dtype=dtype, moe_config=sizes)
    vllm.modules[FP4].prepare_moe_fp4_layer_for_marlin(layer)
    return held(layer, given)


BOTH = ("bf16", "fp16")
FILE = GoldenFile(
    "vllm_marlin_nvfp4",
    nvfp4.CONVENTION,
    (
        Kind("dense", f"{FP4}.prepare_fp4_layer_for_marlin", prepare_dense, nvfp4.DENSE, BOTH),
        Kind("moe", f"{FP4}.prepare_nvfp4_moe_layer_for_marlin", prepare_moe, nvfp4.MOE, BOTH),
        Kind(
            "moe_inplace",
            f"{FP4}.prepare_moe_fp4_layer_for_marlin",
            prepare_moe_inplace,
            nvfp4.BIASED_MOE,
            BOTH,
        ),
    ),
    (FP4, *COMMON),
)
