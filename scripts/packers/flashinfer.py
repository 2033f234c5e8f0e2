"""FlashInfer's permutations of weights for its trtllm-gen kernels, from a wheel."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from scripts.packers.wheel import Runtime, StandIn, Wheel, importing

UTILS = "flashinfer.utils"
MOE = "flashinfer.fused_moe.core"
FP4 = "flashinfer.quantization.fp4_quantization"
SWIZZLE = "flashinfer.experimental.b12x.moe._shared.kernels.reference_flashinfer"
DRIVEN = (UTILS, MOE, FP4, SWIZZLE)
ABSENT = ("pynvml", "cutlass", "cuda", "tvm_ffi")
"""What it imports and is not needed here."""

STAND_IN = (
    f"FlashInfer's CUDA operator block_scale_interleave was replaced by {SWIZZLE}."
    "_block_scale_interleave_128x4_torch, its own definition in Python"
)


def plain(*functions: Callable[..., Any], **_: object) -> Any:
    """In place of a decorator, with or without arguments."""
    return functions[0] if functions else plain


def load(path: Path) -> Runtime:
    """Import the functions of a wheel, with its own Python in place of the one CUDA operator."""
    wheel = Wheel.open(path)
    with importing(wheel, "flashinfer", DRIVEN, ABSENT):
        logging: Any = import_module("flashinfer.api_logging")
        logging.flashinfer_api = plain
        with patch.object(torch.library, "custom_op"):  # nothing is to be known to torch
            modules: dict[str, Any] = {name: import_module(name) for name in DRIVEN}
    swizzle = modules[SWIZZLE]._block_scale_interleave_128x4_torch
    fp4 = modules[FP4]
    fp4.block_scale_interleave = fp4.nvfp4_block_scale_interleave = swizzle
    return Runtime("FlashInfer", wheel, modules)


def offered(flashinfer: Runtime) -> dict[str, Any]:
    """The modules as other runtimes import them."""
    package: Any = StandIn("flashinfer")
    fp4, moe = flashinfer.modules[FP4], flashinfer.modules[MOE]
    for name in ("block_scale_interleave", "nvfp4_block_scale_interleave"):
        setattr(package, name, getattr(fp4, name))
    package.shuffle_matrix_a = fp4.shuffle_matrix_a
    package.shuffle_matrix_sf_a = fp4.shuffle_matrix_sf_a
    package.reorder_rows_for_gated_act_gemm = moe.reorder_rows_for_gated_act_gemm
    return {**flashinfer.modules, "flashinfer": package, "flashinfer.fp4_quantization": fp4}
