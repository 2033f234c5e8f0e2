"""SGLang's packers of weights for Marlin, from a wheel."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from scripts.packers.wheel import Runtime, Wheel, importing

QUANTIZATION = "sglang.srt.layers.quantization"
FP4 = f"{QUANTIZATION}.marlin_utils_fp4"
UTILS = f"{QUANTIZATION}.marlin_utils"
MXFP4 = f"{QUANTIZATION}.mxfp4"
EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.layer"
DRIVEN = (FP4, UTILS, MXFP4, EXPERTS)

ABSENT = (
    "cpu_has_amx_support",
    "is_cpu",
    "is_flashinfer_available",
    "is_gfx95_supported",
    "is_hip",
    "is_npu",
    "is_triton_kernels_available",
    "is_xpu",
)
"""What SGLang asks of the machine, to be denied."""


def load(path: Path, repack: Callable[..., Tensor]) -> Runtime:
    """Import the packers of a wheel, with `repack` in place of SGLang's own CUDA operator."""
    wheel = Wheel.open(path)
    with importing(wheel, "sglang", DRIVEN):
        # What the driven code really uses of the modules that are not executed.
        machine: Any = import_module("sglang.srt.utils")
        types: Any = import_module(f"{QUANTIZATION}.utils")
        bases: Any = import_module(f"{QUANTIZATION}.base_config")
        op: Any = import_module("sglang.kernels.ops.quantization.gptq_marlin_repack")
        machine.is_cuda = lambda: True
        for question in ABSENT:
            setattr(machine, question, lambda: False)
        machine.round_up = lambda size, multiple: -(-size // multiple) * multiple
        types.get_scalar_types = lambda: (MagicMock(), MagicMock())
        bases.FusedMoEMethodBase = bases.QuantizationConfig = object
        op.gptq_marlin_repack = repack
        utils: Any = import_module(UTILS)
        # Locks for the kernel, whose number is asked of a GPU; no part of the weights.
        utils.marlin_make_workspace = lambda *_: torch.zeros(1)
        return Runtime("SGLang", wheel, {name: import_module(name) for name in DRIVEN}, repack)
