"""vLLM's preparation of weights for CUTLASS, FlashInfer and DeepGEMM, from a wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.packers import flashinfer
from scripts.packers.vllm import BACKENDS, LAYERS, UTILS, Base
from scripts.packers.wheel import Runtime, Wheel, importing

FP8 = f"{UTILS}.fp8_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
FI_FP4 = f"{UTILS}.flashinfer_fp4_moe"
FI = f"{UTILS}.flashinfer_utils"
NVFP4 = f"{UTILS}.nvfp4_utils"
MXFP8 = f"{UTILS}.mxfp8_utils"
ACTIVATION = f"{LAYERS}.fused_moe.activation"
NVFP4_BACKENDS = f"{LAYERS}.fused_moe.oracle.nvfp4"
FP8_BACKENDS = f"{LAYERS}.fused_moe.oracle.fp8"
CUTLASS = f"{LAYERS}.fused_moe.experts.cutlass_moe"
LINEAR = "vllm.model_executor.kernels.linear"
NVFP4_LINEAR = f"{LINEAR}.nvfp4.cutlass"
MXFP4_LINEAR = f"{LINEAR}.mxfp4.flashinfer"
MXFP8_LINEAR = f"{LINEAR}.mxfp8.flashinfer"
MEGA = f"{LAYERS}.fused_moe.deep_gemm_mega_moe"
THIRD_PARTY = "vllm.third_party.deep_gemm"
TRANSFORM = f"{THIRD_PARTY}.mega"
DRIVEN = (
    FP8,
    DEEP_GEMM,
    FI_FP4,
    FI,
    NVFP4,
    MXFP8,
    ACTIVATION,
    NVFP4_BACKENDS,
    BACKENDS,
    FP8_BACKENDS,
    CUTLASS,
    NVFP4_LINEAR,
    MXFP4_LINEAR,
    MXFP8_LINEAR,
    MEGA,  # not in vLLM 0.25.1
    TRANSFORM,
    f"{THIRD_PARTY}.utils.math",
    f"{UTILS}.quant_utils",
    "vllm.model_executor.utils",
    "vllm.scalar_type",
    "vllm.utils.math_utils",
)


def load(path: Path, permutations: Runtime) -> Runtime:
    """Import the functions of a wheel, and FlashInfer's `permutations` for them to call.

    What they would ask of a GPU is answered here.
    """
    wheel = Wheel.open(path)
    driven = [name for name in DRIVEN if wheel.has(name)]
    with importing(wheel, "vllm", driven):
        platforms: Any = import_module("vllm.platforms")
        platforms.current_platform = SimpleNamespace(
            fp8_dtype=lambda: torch.float8_e4m3fn,
            is_cuda_alike=lambda: True,
            is_device_capability_family=lambda family: family == 100,
            is_fp8_fnuz=lambda: False,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            simple_compile_backend="eager",
        )
        imports: Any = import_module("vllm.utils.import_utils")
        imports.has_triton_kernels = lambda: False
        imports.get_triton_kernels_version = lambda: None
        for module, base in (
            (f"{LAYERS}.fused_moe.modular_kernel", "FusedMoEExpertsModular"),
            (f"{LINEAR}.nvfp4.base", "NvFp4LinearKernel"),
            (f"{LINEAR}.mxfp4.base", "MxFp4LinearKernel"),
            (f"{LINEAR}.mxfp8.Mxfp8LinearKernel", "Mxfp8LinearKernel"),
        ):
            setattr(import_module(module), base, Base)
        modules: dict[str, Any] = {name: import_module(name) for name in driven}
    others = flashinfer.offered(permutations)
    return Runtime("vLLM", wheel, modules, beside=(permutations,), others=others)
