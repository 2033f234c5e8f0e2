"""vLLM's packers of weights for Marlin, from a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.packers.repack import repack
from scripts.packers.wheel import Runtime, Wheel, importing

LAYERS = "vllm.model_executor.layers"
UTILS = f"{LAYERS}.quantization.utils"
FP4 = f"{UTILS}.marlin_utils_fp4"
FP8 = f"{UTILS}.marlin_utils_fp8"
ORDER = f"{UTILS}.marlin_utils_test"
COMMON = (
    ORDER,
    f"{UTILS}.marlin_utils",
    f"{UTILS}.quant_utils",
    "vllm.model_executor.utils",
    "vllm.scalar_type",
    "vllm.utils.math_utils",
)
"""What the preparation of every format calls."""

BACKENDS = f"{LAYERS}.fused_moe.oracle.mxfp4"
EXPERTS = f"{LAYERS}.fused_moe.routed_experts"
MXFP4 = f"{LAYERS}.quantization.mxfp4"
BUFFERS = (BACKENDS, EXPERTS, MXFP4)
"""What sizes the buffers of MXFP4 experts and fills them."""

DRIVEN = (FP4, FP8, *COMMON, *BUFFERS)
ENVS = "vllm.envs"


class Base(torch.nn.Module):
    """In place of a base class of vLLM; of such a class only the name matters."""

    @staticmethod
    def register(_name: str) -> Any:
        """Decorate a class with nothing."""
        return lambda cls: cls


def load(path: Path) -> Runtime:
    """Import the packers of a wheel and put the stand-in for the operator in place."""
    wheel = Wheel.open(path)
    with importing(wheel, "vllm", DRIVEN):
        # What the driven code really uses of the modules that are not executed.
        ops: Any = import_module("vllm._custom_ops")
        envs: Any = import_module(ENVS)
        platforms: Any = import_module("vllm.platforms")
        units: Any = import_module("vllm.utils.platform_utils")
        imports: Any = import_module("vllm.utils.import_utils")
        envs.VLLM_MARLIN_INPUT_DTYPE = None
        platforms.current_platform = SimpleNamespace(
            fp8_dtype=lambda: torch.float8_e4m3fn,
            is_device_capability=lambda capability: capability == 89,
            is_xpu=lambda: False,
        )
        units.num_compute_units = lambda _device: 1
        imports.has_triton_kernels = lambda: False
        imports.get_triton_kernels_version = lambda: None
        for module, base in (
            ("vllm.model_executor.custom_op", "PluggableLayer"),
            (f"{LAYERS}.fused_moe", "FusedMoEMethodBase"),
            (f"{LAYERS}.quantization.base_config", "QuantizationConfig"),
        ):
            setattr(import_module(module), base, Base)
        operator = partial(repack, import_module(ORDER))
        ops.gptq_marlin_repack = operator
        modules: dict[str, Any] = {name: import_module(name) for name in (*DRIVEN, ENVS)}
        # It would hang the loader on the parameters, which nobody asks for here.
        modules[MXFP4].set_weight_attrs = lambda _weight, _attributes: None
        return Runtime("vLLM", wheel, modules, operator)


@contextmanager
def fp8_activations(vllm: Runtime) -> Iterator[None]:
    """Let vLLM pack for activations in FP8, as its users ask it to."""
    envs = vllm.modules[ENVS]
    envs.VLLM_MARLIN_INPUT_DTYPE = "fp8"
    try:
        yield
    finally:
        envs.VLLM_MARLIN_INPUT_DTYPE = None
