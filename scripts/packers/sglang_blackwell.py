"""SGLang's preparation of weights for FlashInfer and DeepGEMM, from a wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.packers.sglang import ABSENT, QUANTIZATION
from scripts.packers.wheel import Runtime, Wheel, importing

FP8 = f"{QUANTIZATION}.fp8_utils"
DRIVEN = (FP8,)


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below the size."""
    return -(-size // multiple) * multiple


def load(path: Path) -> Runtime:
    """Import the functions of a wheel; what they would ask of a GPU is answered here."""
    wheel = Wheel.open(path)
    with importing(wheel, "sglang", DRIVEN):
        machine: Any = import_module("sglang.srt.utils")
        kernels: Any = import_module("sglang.kernels.ops.quantization.fp8_kernel")
        machine.is_cuda = lambda: True
        for question in (*ABSENT, "get_bool_env_var", "is_gfx942_supported", "is_musa"):
            setattr(machine, question, lambda *_: False)
        machine.is_gfx1250_supported = lambda: False
        machine.get_device_capability = lambda: (10, 0)
        machine.get_cuda_version = lambda: (13, 0)
        machine.ceil_div = lambda size, part: -(-size // part)
        machine.ceil_align = round_up
        kernels.is_fp8_fnuz = lambda: False
        return Runtime("SGLang", wheel, {name: import_module(name) for name in DRIVEN})
