"""vLLM's preparation of weights for CUTLASS, FlashInfer and DeepGEMM, from a wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.packers.vllm import UTILS
from scripts.packers.wheel import Runtime, Wheel, importing

FP8 = f"{UTILS}.fp8_utils"
QUANT = f"{UTILS}.quant_utils"
DEEP_GEMM = "vllm.utils.deep_gemm"
MATH = "vllm.utils.math_utils"
DRIVEN = (FP8, QUANT, DEEP_GEMM, MATH, "vllm.scalar_type")


def load(path: Path) -> Runtime:
    """Import the functions of a wheel; what they would ask of a GPU is answered here."""
    wheel = Wheel.open(path)
    with importing(wheel, "vllm", DRIVEN):
        platforms: Any = import_module("vllm.platforms")
        platforms.current_platform = SimpleNamespace(
            fp8_dtype=lambda: torch.float8_e4m3fn,
            is_fp8_fnuz=lambda: False,
            is_rocm=lambda: False,
            is_cuda_alike=lambda: True,
            simple_compile_backend="eager",
        )
        return Runtime("vLLM", wheel, {name: import_module(name) for name in DRIVEN})
