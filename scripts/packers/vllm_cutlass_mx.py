"""vllm_cutlass_mx: MXFP4 and MXFP8 for vLLM's and FlashInfer's CUTLASS kernels."""

from __future__ import annotations

from typing import Any

import torch

from scripts.packers import flashinfer
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import ALL, Dense, Moe
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm import BACKENDS
from scripts.packers.vllm_blackwell import DRIVEN, MXFP4_LINEAR, MXFP8_LINEAR
from scripts.packers.vllm_trtllm import converted
from scripts.packers.wheel import Runtime, running


def prepare_mxfp4(vllm: Runtime, _case: Dense, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive the linear kernel's `process_weights_after_loading`."""
    return linear(vllm, vllm.modules[MXFP4_LINEAR].FlashInferMxFp4LinearKernel, given)


def prepare_mxfp8(vllm: Runtime, _case: Dense, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive the linear kernel's `process_weights_after_loading`."""
    return linear(vllm, vllm.modules[MXFP8_LINEAR].FlashInferCutlassMxfp8LinearKernel, given)


def linear(vllm: Runtime, kernel: Any, given: Tensors) -> Tensors:
    """What a kernel of vLLM makes of a linear layer."""
    layer = module(given)
    with running(vllm):
        kernel.process_weights_after_loading(kernel.__new__(kernel), layer)
    return held(layer, given)


def prepare_experts(vllm: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """For vLLM's own kernel."""
    return converted(vllm, case, given, "CUTLASS_MXFP4_MXFP4")


def prepare_flashinfer(vllm: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """For FlashInfer's kernel."""
    return converted(vllm, case, given, "FLASHINFER_CUTLASS_MXFP4_MXFP8")


MXFP4_DENSE = (Dense("256x320", 4, 256, 320), Dense("all-200x160", 4, 200, 160, ALL))
MXFP8_DENSE = (Dense("256x320", 8, 256, 320), Dense("all-200x160", 8, 200, 160, ALL))
MOE = (Moe("h192-i96-e2", 4, 192, 96),)
CONVERT = (
    f"{BACKENDS}: convert_weight_to_mxfp4_moe_kernel_format for {{}}, its buffers zero and of the "
    "sizes that mxfp4_round_up_hidden_size_and_intermediate_size gives"
)
LATEST = ("0.33.0",)

FILE = GoldenFile(
    "vllm_cutlass_mx",
    "weight uint8, even column in the low nibble, or float8_e4m3fn; weight_scale E8M0 as uint8, "
    "row order; w13: gate over up",
    (
        Kind(
            "mxfp4_dense",
            f"{MXFP4_LINEAR}.FlashInferMxFp4LinearKernel.process_weights_after_loading",
            prepare_mxfp4,
            MXFP4_DENSE,
        ),
        Kind(
            "mxfp8_dense",
            f"{MXFP8_LINEAR}.FlashInferCutlassMxfp8LinearKernel.process_weights_after_loading",
            prepare_mxfp8,
            MXFP8_DENSE,
        ),
        Kind(
            "mxfp4_moe",
            CONVERT.format("CUTLASS_MXFP4_MXFP4"),
            prepare_experts,
            MOE,
            releases=LATEST,
        ),
        Kind(
            "mxfp4_moe_flashinfer",
            f"{CONVERT.format('FLASHINFER_CUTLASS_MXFP4_MXFP8')}; {flashinfer.STAND_IN}",
            prepare_flashinfer,
            MOE,
            releases=LATEST,
        ),
    ),
    DRIVEN,
)
