"""SGLang's preparation of weights for FlashInfer and DeepGEMM, from a wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.packers import deep_gemm, flashinfer
from scripts.packers.deep_gemm import round_up
from scripts.packers.sglang import ABSENT, QUANTIZATION
from scripts.packers.wheel import Runtime, Wheel, importing

FP8 = f"{QUANTIZATION}.fp8_utils"
UTILS = f"{QUANTIZATION}.utils"
MODELOPT = f"{QUANTIZATION}.modelopt_quant"
MEGA = "sglang.srt.layers.moe.mega_moe"
MEGA_SM90 = "sglang.srt.layers.moe.mega_moe_sm90"
TRTLLM = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"
MXFP4_TRTLLM = f"{QUANTIZATION}.mxfp4_flashinfer_trtllm_moe"
DRIVEN = (FP8, UTILS, MODELOPT, MEGA, MEGA_SM90, TRTLLM, MXFP4_TRTLLM)
FALSE = (*ABSENT, "get_bool_env_var", "is_gfx942_supported", "is_gfx1250_supported", "is_musa")
"""What SGLang asks of the machine, to be denied."""


def load(path: Path, packing: Runtime, permutations: Runtime) -> Runtime:
    """Import the functions of a wheel, and DeepGEMM's and FlashInfer's for them to call.

    What they would ask of a GPU is answered here.
    """
    wheel = Wheel.open(path)
    with importing(wheel, "sglang", DRIVEN, ("regex",)):
        machine: Any = import_module("sglang.srt.utils")
        kernels: Any = import_module("sglang.kernels.ops.quantization.fp8_kernel")
        bases: Any = import_module(f"{QUANTIZATION}.base_config")
        for name in ("FusedMoEMethodBase", "LinearMethodBase", "QuantizationConfig"):
            setattr(bases, name, object)
        machine.is_cuda = lambda: True
        for question in FALSE:
            setattr(machine, question, lambda *_: False)
        machine.get_device_capability = lambda: (10, 0)
        machine.get_cuda_version = lambda: (13, 0)
        machine.ceil_div = lambda size, part: -(-size // part)
        machine.ceil_align = round_up
        kernels.is_fp8_fnuz = lambda: False
        common: Any = import_module("sglang.srt.utils.common")
        common.get_bool_env_var = lambda _name, default="false": default == "true"
        runner: Any = import_module("sglang.srt.layers.moe.moe_runner.base")
        runner.MoeQuantInfo = object
        layers: Any = import_module("sglang.srt.layers.utils")
        layers.copy_or_rebind_param = setattr
        modules: dict[str, Any] = {name: import_module(name) for name in DRIVEN}
    # The kernels' limits on sizes: the cases are smaller than they allow.
    modules[MEGA].check_mega_moe_shapes = lambda **_: None
    # It believes FlashInfer to be absent.
    moe, fp4 = permutations.modules[flashinfer.MOE], permutations.modules[flashinfer.FP4]
    trtllm = modules[MXFP4_TRTLLM]
    trtllm._maybe_get_cached_w3_w1_permute_indices = moe._maybe_get_cached_w3_w1_permute_indices
    trtllm.get_w2_permute_indices_with_cache = moe.get_w2_permute_indices_with_cache
    trtllm.block_scale_interleave = fp4.block_scale_interleave
    others = {**deep_gemm.offered(packing), **flashinfer.offered(permutations)}
    beside = (packing, permutations)
    return Runtime("SGLang", wheel, modules, beside=beside, others=others)
