"""sglang_trtllm: NVFP4 and MXFP4 experts for FlashInfer's trtllm-gen kernels, by SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from scripts.packers import flashinfer
from scripts.packers.experts_nvfp4 import CONVENTION, Experts, experts
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import Moe
from scripts.packers.sglang_blackwell import DRIVEN, MODELOPT, MXFP4_TRTLLM, TRTLLM, UTILS
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.wheel import Runtime, running

KERNEL = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
FACTORS = ("g1_alphas", "g1_alphas_up", "g1_scale_c")


def prepare_nvfp4(sglang: Runtime, case: Experts, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `align_fp4_moe_weights_for_flashinfer_trtllm`, with up loaded over gate before.

    The factors come from what `process_weights_after_loading` calls: one input scale for all
    experts, a factor each of gate and up.
    """
    gated, first, second = case.gated, *(given[f"{n}_input_scale"].max() for n in ("w13", "w2"))
    modelopt, utils = sglang.modules[MODELOPT], sglang.modules[UTILS]
    w13 = given["w13_weight"].clone(), given["w13_weight_scale"].clone()
    if gated:
        w13 = utils.reorder_w1w3_to_w3w1(*w13)
    gate, up = modelopt._compute_gemm1_alphas(given["w13_weight_scale_2"], first, gated)
    layer = module(
        {},
        w13_weight=w13[0],
        w13_weight_scale=w13[1],
        w2_weight=given["w2_weight"],
        w2_weight_scale=given["w2_weight_scale"],
        g1_alphas=gate,
        g1_alphas_up=up,
        w2_input_scale_quant=1 / second,
        moe_runner_config=SimpleNamespace(is_gated=gated, activation="silu"),
    )
    with running(sglang):
        sglang.modules[TRTLLM].align_fp4_moe_weights_for_flashinfer_trtllm(layer)
    return {name: getattr(layer, name) for name in (*KERNEL, *FACTORS)}


def prepare_mxfp4(sglang: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `process_weights_after_loading` on scales that are numbers, as SGLang loads them."""
    names = {name: f"{name}_inv" if name.endswith("scale") else name for name in KERNEL}
    parameters = {
        names[name]: given[name].view(torch.float8_e8m0fnu).float()
        if name.endswith("scale")
        else given[name].view(torch.int8)
        for name in KERNEL
    }
    layer = module(parameters, num_local_experts=case.experts)
    kind = sglang.modules[MXFP4_TRTLLM].Mxfp4FlashinferTrtllmMoEMethod
    method = SimpleNamespace(
        _fp8=SimpleNamespace(process_weights_after_loading=lambda _layer: None),
        _register_static_scale_ones=lambda _layer: None,
        prefix="",
    )
    with running(sglang):
        kind.process_weights_after_loading(method, layer)
    made = held(layer, names.values())
    return {name: made[inverse] for name, inverse in names.items()}


NVFP4 = (experts(256, 128, "apart"),)
MXFP4 = (Moe("h256-i96-e2", 4, 256, 96),)

FILE = GoldenFile(
    "sglang_trtllm",
    f"NVFP4 as {CONVENTION}. MXFP4: weight uint8, even column in the low nibble; weight_scale E8M0 "
    "as uint8, row order; w13: gate over up. out: E8M0 under the dtype float8_e4m3fn",
    (
        Kind(
            "nvfp4",
            f"{UTILS}.reorder_w1w3_to_w3w1, {MODELOPT}._compute_gemm1_alphas, "
            f"{TRTLLM}.align_fp4_moe_weights_for_flashinfer_trtllm; {flashinfer.STAND_IN}",
            prepare_nvfp4,
            NVFP4,
        ),
        Kind(
            "mxfp4",
            f"{MXFP4_TRTLLM}.Mxfp4FlashinferTrtllmMoEMethod.process_weights_after_loading",
            prepare_mxfp4,
            MXFP4,
        ),
    ),
    DRIVEN,
)
