"""deepgemm_megamoe: MXFP4 and NVFP4 experts in the orders of DeepGEMM's MegaMoE kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.packers import deep_gemm, sglang_blackwell, vllm_blackwell
from scripts.packers.experts_nvfp4 import CONVENTION, Experts, experts
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import Moe
from scripts.packers.tensors import Tensors, module, same
from scripts.packers.vllm_blackwell import MEGA, TRANSFORM
from scripts.packers.wheel import Runtime, running


def kept(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Tensors:
    """Kernel tensors as they lie in memory: the scales' view [E, rows, words] is column by column.

    Stored are the words [E, words, rows], which are contiguous.
    """
    made = {"w13_weight": w13, "w2_weight": w2}
    for name, scale in (("w13", w13_scale), ("w2", w2_scale)):
        rows, words = scale.shape[-2:]
        strides = scale.stride()  # the last may be anything for a single word
        if strides[:2] != (rows * words, 1) or (words > 1 and strides[2] != rows):
            raise SystemExit(f"{name}: scales of strides {strides}")
        made[f"{name}_weight_scale"] = scale.transpose(-1, -2)
    return made


def words(scale: Tensor) -> Tensor:
    """The bytes of a scale [E, rows, groups] as words [E, rows, groups/4], column by column."""
    packed = scale.contiguous().view(torch.uint8).view(torch.int32)
    return packed.transpose(-1, -2).contiguous().transpose(-1, -2)


def transformed(transform: Any, given: Tensors, **settings: object) -> Tensors:
    """Drive a `transform_weights_for_mega_moe` on words of scales."""
    l1, l2 = transform(
        (given["w13_weight"].view(torch.int8), words(given["w13_weight_scale"])),
        (given["w2_weight"].view(torch.int8), words(given["w2_weight_scale"])),
        **settings,
    )
    return kept(*l1, *l2)


def loaded(vllm: Runtime, case: Moe | Experts, given: Tensors) -> Tensors:
    """Let vLLM's own parameters be filled by its loader, expert by expert as from a checkpoint."""
    mega = vllm.modules[MEGA]
    layer = mega.DeepGemmMegaMoEExperts.__new__(mega.DeepGemmMegaMoEExperts)
    torch.nn.Module.__init__(layer)
    count = len(given["w2_weight"])
    layer.num_local_experts = layer.num_logical_experts = layer.experts_end_idx = count
    layer.experts_start_idx = 0
    layer.hidden_size, layer.intermediate_size = case.hidden, case.inter
    layer.weight_format = mega.MEGA_MOE_WEIGHT_FORMATS[
        "nvfp4" if "w13_weight_scale_2" in given else "mxfp4"
    ]
    layer.shared_spec = None
    layer._w2_input_scales = torch.zeros(count)
    layer._pending_l1_scales = {}
    layer._create_weights()
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        for expert, tensor in enumerate(given[name]):
            shards = ("w2",) if name.startswith("w2") else ("w1", "w3")
            parts = tensor.chunk(2) if len(shards) == 2 else (tensor,)
            for shard, part in zip(shards, parts, strict=True):
                layer.weight_loader(parameter, part, name, shard, expert)
    made = kept(*(parameters.pop(name).data for name in KERNEL))
    return made | {name: parameter.data for name, parameter in parameters.items()}


KERNEL = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def by_vllm(vllm: Runtime, case: Moe | Experts, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """The transform that vLLM brings, and its loader, where it has one: they have to agree."""
    made = transformed(vllm.modules[TRANSFORM].transform_weights_for_mega_moe, given)
    if MEGA not in vllm.modules:
        return made
    with running(vllm):
        answer = loaded(vllm, case, given)
    if wrong := [name for name in made if not same(made[name], answer[name])]:
        raise SystemExit(f"{vllm}: its loader and its transform differ: {', '.join(wrong)}")
    return answer


def mxfp4_by_sglang(sglang: Runtime, _case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `build_mega_moe_experts_weights` on scales that are numbers."""
    layer = module(
        {
            **{
                f"{name}_weight": given[f"{name}_weight"].view(torch.int8) for name in ("w13", "w2")
            },
            **{
                f"{name}_weight_scale_inv": given[f"{name}_weight_scale"]
                .view(torch.float8_e8m0fnu)
                .float()
                for name in ("w13", "w2")
            },
        },
        _mega_moe_nvfp4=False,
        _mega_moe_w4a4=False,
    )
    with running(sglang):
        sglang.modules[sglang_blackwell.MEGA].build_mega_moe_experts_weights(layer)
    return kept(*layer.mega_l1_weights, *layer.mega_l2_weights)


def nvfp4_by_sglang(
    sglang: Runtime, _case: Experts, given: Tensors, _dtype: torch.dtype
) -> Tensors:
    """Drive `_build_mega_moe_weights`, which takes a factor each of gate and up."""
    count = len(given["w2_weight"])
    layer = module(
        given,
        moe_runner_config=SimpleNamespace(is_gated=True),
        num_local_experts=count,
        num_experts=count,
        moe_ep_rank=0,
    )
    method = SimpleNamespace(use_flashinfer_trtllm_weight_layout=False)
    build = sglang.modules[sglang_blackwell.MODELOPT].ModelOptNvFp4FusedMoEMethod
    with running(sglang):
        build._build_mega_moe_weights(method, layer)
    factors = ("mega_l1_alphas", "mega_l2_alphas", "mega_l2_act_scales")
    made = kept(*layer.mega_l1_weights, *layer.mega_l2_weights)
    return made | {name: getattr(layer, name).data for name in factors}


MXFP4 = (Moe("h256-i128-e2", 4, 256, 128),)
NVFP4_VLLM = (experts(256, 128, "equal", equal=True),)
NVFP4_SGLANG = (experts(256, 128, "apart"),)
BUILD = f"{sglang_blackwell.MODELOPT}.ModelOptNvFp4FusedMoEMethod._build_mega_moe_weights"

FILE = GoldenFile(
    "deepgemm_megamoe",
    f"MXFP4: weight uint8, even column in the low nibble; weight_scale E8M0 as uint8, row order; "
    f"w13: gate over up. NVFP4 as {CONVENTION}. out: scales as int32 [E, words, rows], of which "
    "the kernel's view is the transpose",
    (
        Kind(
            "mxfp4",
            f"{TRANSFORM}.transform_weights_for_mega_moe, {MEGA}.DeepGemmMegaMoEExperts: "
            "_create_weights and weight_loader (0.33.0)",
            by_vllm,
            MXFP4,
            by="vLLM",
        ),
        Kind(
            "mxfp4",
            f"{sglang_blackwell.MEGA}.build_mega_moe_experts_weights for fp8xfp4; "
            f"{deep_gemm.STAND_IN}",
            mxfp4_by_sglang,
            MXFP4,
            by="SGLang",
        ),
        Kind("nvfp4_vllm", "as mxfp4", by_vllm, NVFP4_VLLM, by="vLLM", releases=("0.33.0",)),
        Kind(
            "nvfp4_sgl",
            f"{BUILD} with {deep_gemm.MEGA}.transform_weights_for_mega_moe of sgl-deep-gemm",
            nvfp4_by_sglang,
            NVFP4_SGLANG,
            by="SGLang",
        ),
    ),
    (*vllm_blackwell.DRIVEN, *sglang_blackwell.DRIVEN),
)
