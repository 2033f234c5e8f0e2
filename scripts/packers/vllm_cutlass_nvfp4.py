"""vllm_cutlass_nvfp4: NVFP4 for vLLM's and FlashInfer's CUTLASS kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from scripts.packers import nvfp4
from scripts.packers.experts_nvfp4 import CONVENTION, Experts, experts, padded
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.nvfp4 import MAX_448, up_to
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm_blackwell import (
    ACTIVATION,
    DRIVEN,
    FI_FP4,
    NVFP4_BACKENDS,
    NVFP4_LINEAR,
)
from scripts.packers.wheel import Runtime, running

ANSWERS = tuple(
    f"{matrix}_{tensor}"
    for matrix in ("w13", "w2")
    for tensor in ("weight", "weight_scale", "weight_scale_2", "input_scale")
)


def prepare_dense(vllm: Runtime, case: nvfp4.Dense, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive the linear kernel's `process_weights_after_loading`."""
    layer = module({name: given[name] for name in ("weight", "weight_scale")})
    kernel = vllm.modules[NVFP4_LINEAR].CutlassNvFp4LinearKernel
    with running(vllm):
        kernel.process_weights_after_loading(kernel.__new__(kernel), layer)
    return held(layer, ("weight", "weight_scale"))


def prepare(vllm: Runtime, case: Experts, given: Tensors, backend: str) -> Tensors:
    """Drive `prepare_nvfp4_moe_layer_for_fi_or_cutlass` as its caller does.

    That hands over the factors of gate alone.
    """
    activations = vllm.modules[ACTIVATION].MoEActivation
    layer = SimpleNamespace(
        activation=activations.SILU if case.gated else activations.RELU2_NO_MUL,
        moe_config=SimpleNamespace(
            hidden_dim=case.hidden,
            hidden_dim_unpadded=None,
            moe_parallel_config=SimpleNamespace(enable_eplb=False),
        ),
    )
    tensors = {name: given[name].clone() for name in ANSWERS}
    tensors["w13_weight_scale_2"] = tensors["w13_weight_scale_2"][:, 0]
    kind = vllm.modules[NVFP4_BACKENDS].NvFp4MoeBackend[backend]
    with running(vllm):
        packed = vllm.modules[FI_FP4].prepare_nvfp4_moe_layer_for_fi_or_cutlass(
            kind, layer, *tensors.values(), is_act_and_mul=case.gated
        )
    return dict(zip(ANSWERS, packed, strict=True))


def prepare_moe(vllm: Runtime, case: Experts, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """For vLLM's own kernel, after zeros up to H = 128 and I = 64 if the case is called padded."""
    return prepare(vllm, case, wide(case, given), "VLLM_CUTLASS")


def prepare_flashinfer(
    vllm: Runtime, case: Experts, given: Tensors, _dtype: torch.dtype
) -> Tensors:
    """For FlashInfer's kernel, likewise."""
    return prepare(vllm, case, wide(case, given), "FLASHINFER_CUTLASS")


def wide(case: Experts, given: Tensors) -> Tensors:
    """The tensors with what vLLM does not pad already padded, where the case says so."""
    if not case.name.startswith("padded"):
        return given
    return padded(given, -(-case.hidden // 128) * 128, -(-case.inter // 64) * 64)


DENSE = (
    nvfp4.Dense("256x192", 256, 192, up_to(MAX_448, low=0)),
    nvfp4.Dense("200x176", 200, 176, up_to(MAX_448)),  # to 224x192, the scales to 256x12
    nvfp4.Dense("40x48", 40, 48, up_to(MAX_448)),  # to 64x64, the scales to 128x4
)
MOE = (
    experts(256, 128, "gated", equal=True),
    experts(192, 96, "padded", equal=True),
    experts(128, 96, "ungated", gated=False),  # vLLM itself pads to I = 128
)
MOE_FLASHINFER = (experts(192, 96, "padded", equal=True),)
PREPARE = f"{FI_FP4}.prepare_nvfp4_moe_layer_for_fi_or_cutlass"
PADDED = "; the cases called padded got zeros first, H to 128 and each projection's I to 64"

FILE = GoldenFile(
    "vllm_cutlass_nvfp4",
    CONVENTION,
    (
        Kind(
            "dense",
            f"{NVFP4_LINEAR}.CutlassNvFp4LinearKernel.process_weights_after_loading",
            prepare_dense,
            DENSE,
        ),
        Kind("moe", f"{PREPARE} for VLLM_CUTLASS{PADDED}", prepare_moe, MOE),
        Kind(
            "moe_flashinfer",
            f"{PREPARE} for FLASHINFER_CUTLASS{PADDED}",
            prepare_flashinfer,
            MOE_FLASHINFER,
        ),
    ),
    DRIVEN,
)
