"""sglang_marlin: Marlin's NVFP4 and MXFP4 bytes, in SGLang's words."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from scripts.packers import nvfp4
from scripts.packers.golden_file import Case, GoldenFile, Kind
from scripts.packers.mx import ALL, Moe
from scripts.packers.sglang import DRIVEN, EXPERTS, FP4, MXFP4
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.wheel import Runtime

MXFP4_NAMES = {"w13_bias": "w13_weight_bias", "w2_bias": "w2_weight_bias"}
"""SGLang's names of parameters which the checkpoint's tensors do not have."""


def prepare_dense(
    sglang: Runtime, case: nvfp4.Dense, given: Tensors, dtype: torch.dtype
) -> Tensors:
    """Drive `prepare_nvfp4_layer_for_marlin`, SGLang's preparation of a linear layer."""
    return nvfp4.prepared(sglang.modules[FP4].prepare_nvfp4_layer_for_marlin, case, given, dtype)


def prepare_moe(sglang: Runtime, case: nvfp4.Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_moe_nvfp4_layer_for_marlin`, SGLang's preparation of ModelOpt's experts."""
    layer = module(
        given,
        intermediate_size_per_partition=case.inter,
        params_dtype=dtype,
        moe_runner_config=SimpleNamespace(is_gated=case.gated),
    )
    sglang.modules[FP4].prepare_moe_nvfp4_layer_for_marlin(layer, nvfp4.GROUP)
    return held(layer, given)


def prepare_mxfp4_moe(sglang: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Pack experts as large as they are."""
    return pack(sglang, case, module({MXFP4_NAMES.get(name, name): given[name] for name in given}))


def prepare_mxfp4_buffers(
    sglang: Runtime, case: Moe, given: Tensors, dtype: torch.dtype
) -> Tensors:
    """Let SGLang size the buffers, fill them as it does for gpt-oss, and pack them."""
    method = SimpleNamespace(use_marlin=True, use_mega_moe=False)
    layer = module(
        {},
        hidden_size=case.hidden,
        intermediate_size_per_partition=case.inter,
        num_local_experts=case.experts,
        quant_config=SimpleNamespace(get_name=lambda: "mxfp4", is_static_cfg=lambda: True),
    )
    sglang.modules[MXFP4].Mxfp4MoEMethod.create_weights(
        method, layer, case.experts, case.hidden, case.inter, dtype, with_bias=case.bias
    )
    fill = sglang.modules[EXPERTS].FusedMoE.weight_loader
    for name, tensor in given.items():
        parameter = getattr(layer, MXFP4_NAMES.get(name, name))
        fill(layer, parameter, tensor, name, shard_id=None, expert_id=None)
    return pack(sglang, case, layer)


def pack(sglang: Runtime, case: Moe, layer: Any) -> Tensors:
    """Call `prepare_moe_mxfp4_layer_for_marlin`, for interleaved rows after the other function."""
    fp4 = sglang.modules[FP4]
    names = list(dict(layer.named_parameters()))
    if case.interleaved:
        fp4.deinterleave_moe_mxfp4_w13_for_marlin(layer)
    fp4.prepare_moe_mxfp4_layer_for_marlin(layer)
    return held(layer, names)


def chosen(cases: Sequence[Case], *names: str) -> tuple[Case, ...]:
    """The cases of these names: the same inputs as in vllm_marlin_nvfp4."""
    return tuple(case for case in cases if case.name in names)


DENSE = chosen(
    nvfp4.DENSE,
    "128x128",
    "72x112",
    "bias-72x112",
    "max1_75-64x128",
    "subnormal-64x128",
    "flush-64x128",
    "joined-192x64",
)
MOE = (
    *chosen(nvfp4.MOE, "gated-h128-i64-e3", "ungated-h128-i96-e2", "flush-h128-i64-e2"),
    *nvfp4.BIASED_MOE,
)
MXFP4_MOE = (
    Moe("h128-i64-e2", 4, 128, 64),
    Moe("bias-h128-i32-e2", 4, 128, 32, bias=True),  # padded to I = 64
    Moe("bias-h192-i32-e2", 4, 192, 32, bias=True),  # to I = 128
    Moe("all-h128-i64-e1", 4, 128, 64, experts=1, exponents=ALL),
    Moe("interleaved-h128-i64-e2", 4, 128, 64, bias=True, interleaved=True),
)
MXFP4_BUFFERS = (Moe("interleaved-h96-i32-e2", 4, 96, 32, bias=True, interleaved=True),)

BOTH = ("bf16", "fp16")
PACK = f"{FP4}.prepare_moe_mxfp4_layer_for_marlin"
FILE = GoldenFile(
    "sglang_marlin",
    f"NVFP4 as {nvfp4.CONVENTION}. MXFP4: weight uint8, even column in the low nibble; "
    "weight_scale E8M0 as uint8, row order; w13: gate over up, or their rows in turn where the "
    "case is called interleaved; out: E8M0 as uint8, too",
    (
        Kind("nvfp4_dense", f"{FP4}.prepare_nvfp4_layer_for_marlin", prepare_dense, DENSE, BOTH),
        Kind("nvfp4_moe", f"{FP4}.prepare_moe_nvfp4_layer_for_marlin", prepare_moe, MOE, BOTH),
        Kind(
            "mxfp4_moe",
            f"(interleaved) {FP4}.deinterleave_moe_mxfp4_w13_for_marlin, {PACK}",
            prepare_mxfp4_moe,
            MXFP4_MOE,
        ),
        Kind(
            "mxfp4_moe_buffers",
            f"{MXFP4}.Mxfp4MoEMethod.create_weights, {EXPERTS}.FusedMoE.weight_loader; "
            "then as mxfp4_moe",
            prepare_mxfp4_buffers,
            MXFP4_BUFFERS,
        ),
    ),
    DRIVEN,
)
