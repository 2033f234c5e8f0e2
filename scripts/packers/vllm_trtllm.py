"""vllm_trtllm: NVFP4 and MXFP4 experts for FlashInfer's trtllm-gen kernels, by vLLM."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from scripts.packers import flashinfer
from scripts.packers.experts_nvfp4 import CONVENTION, Experts, experts, padded
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import Moe
from scripts.packers.tensors import Tensors, module
from scripts.packers.vllm import BACKENDS
from scripts.packers.vllm_blackwell import DRIVEN
from scripts.packers.vllm_cutlass_nvfp4 import PREPARE, prepare
from scripts.packers.wheel import Runtime, running

MXFP4_TENSORS = (
    "w13_weight",
    "w2_weight",
    "w13_weight_scale",
    "w2_weight_scale",
    "w13_bias",
    "w2_bias",
)
"""In the order of vLLM's functions."""


def prepare_nvfp4(vllm: Runtime, case: Experts, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `prepare_nvfp4_moe_layer_for_fi_or_cutlass`, which pads as well."""
    return prepare(vllm, case, given, "FLASHINFER_TRTLLM")


def converted(vllm: Runtime, case: Moe, given: Tensors, backend: str) -> Tensors:
    """Let vLLM size the buffers of MXFP4 experts, fill them and have it convert them."""
    backends = vllm.modules[BACKENDS]
    kind = backends.Mxfp4MoeBackend[backend]
    sizes = backends.mxfp4_round_up_hidden_size_and_intermediate_size(kind, case.hidden, case.inter)
    tensors = wide(given, *sizes, interleaved=case.interleaved)
    convert = (
        backends.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format
        if case.interleaved
        else backends.convert_weight_to_mxfp4_moe_kernel_format
    )
    layer = module({}, activation=None)
    with running(vllm):
        packed = convert(
            kind, layer, *(tensors.get(name) for name in MXFP4_TENSORS), _cache_permute_indices={}
        )
    named = zip(MXFP4_TENSORS, packed, strict=True)
    return {name: tensor for name, tensor in named if tensor is not None}


def wide(given: Tensors, hidden: int, inter: int, *, interleaved: bool) -> Tensors:
    """MXFP4 experts in buffers of these sizes, which are zero before they are filled."""
    tensors = padded(given, hidden, inter, interleaved=interleaved)
    if "w13_bias" in given:
        parts = given["w13_bias"].chunk(1 if interleaved else 2, dim=1)
        more = 2 * inter // len(parts) - parts[0].shape[1]
        tensors["w13_bias"] = torch.cat([pad(part, (0, more)) for part in parts], 1)
        tensors["w2_bias"] = pad(given["w2_bias"], (0, hidden - given["w2_bias"].shape[1]))
    return tensors


def prepare_mxfp4(vllm: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `convert_weight_to_mxfp4_moe_kernel_format`, or what gpt-oss has in its place."""
    return converted(vllm, case, given, "FLASHINFER_TRTLLM_MXFP4_MXFP8")


NVFP4 = (
    experts(256, 128, "gated", equal=True),
    experts(256, 128, "ungated", gated=False),
)
NVFP4_PADDED = (experts(192, 96, "gated", equal=True),)
MXFP4 = (
    Moe("bias-h256-i128-e2", 4, 256, 128, bias=True),
    Moe("h192-i96-e2", 4, 192, 96),
    Moe("interleaved-h192-i96-e2", 4, 192, 96, bias=True, interleaved=True),
)

FILE = GoldenFile(
    "vllm_trtllm",
    f"NVFP4 as {CONVENTION}. MXFP4: weight uint8, even column in the low nibble; weight_scale E8M0 "
    "as uint8, row order; w13: gate over up, or their rows in turn where the case is called "
    "interleaved. out: E8M0 under the dtype float8_e4m3fn, as vLLM "
    "hands it over",
    (
        Kind(
            "nvfp4", f"{PREPARE} for FLASHINFER_TRTLLM; {flashinfer.STAND_IN}", prepare_nvfp4, NVFP4
        ),
        Kind(
            "nvfp4_padded",
            "as nvfp4, padded by it to H = 256 and I = 128",
            prepare_nvfp4,
            NVFP4_PADDED,
            releases=("0.33.0",),
        ),
        Kind(
            "mxfp4",
            f"{BACKENDS}: convert_weight_to_mxfp4_moe_kernel_format or (interleaved) "
            "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format for "
            "FLASHINFER_TRTLLM_MXFP4_MXFP8, its buffers zero and of the sizes that "
            "mxfp4_round_up_hidden_size_and_intermediate_size gives",
            prepare_mxfp4,
            MXFP4,
            releases=("0.33.0",),  # vLLM 0.25.1 pads I to 256
        ),
    ),
    DRIVEN,
)
