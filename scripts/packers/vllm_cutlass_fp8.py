"""vllm_cutlass_fp8: FP8 experts for vLLM's and FlashInfer's CUTLASS kernels."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from scripts.packers.fp8 import BLOCK, Moe, scale_name
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.tensors import Tensors
from scripts.packers.vllm_blackwell import ACTIVATION, DRIVEN, FP8_BACKENDS
from scripts.packers.wheel import Runtime, running


@dataclass(frozen=True)
class Dead(Moe):
    """Experts with some factors that are next to nothing."""

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        tensors = super().draw(dtype)
        for name in ("w13", "w2"):
            tensors[f"{name}_{scale_name(self.granularity)}"].view(-1)[0] = 2.0**-76
        return tensors


def prepare(vllm: Runtime, case: Moe, given: Tensors, backend: str) -> Tensors:
    """Drive `convert_to_fp8_moe_kernel_format`."""
    scale = scale_name(case.granularity)
    names = ("w13_weight", "w2_weight", f"w13_{scale}", f"w2_{scale}")
    backends = vllm.modules[FP8_BACKENDS]
    layer = SimpleNamespace(
        activation=vllm.modules[ACTIVATION].MoEActivation.SILU,
        moe_config=SimpleNamespace(is_act_and_mul=True),
        **({"weight_block_size": [BLOCK, BLOCK]} if case.granularity == "block" else {}),
    )
    with running(vllm):
        packed = backends.convert_to_fp8_moe_kernel_format(
            backends.Fp8MoeBackend[backend],
            layer,
            *(given[name].clone() for name in names),
            w13_input_scale=None,
            w2_input_scale=None,
        )
    return dict(zip(names, packed, strict=True))


def prepare_moe(vllm: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """For vLLM's own kernel."""
    return prepare(vllm, case, given, "VLLM_CUTLASS")


def prepare_flashinfer(vllm: Runtime, case: Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """For FlashInfer's kernel."""
    return prepare(vllm, case, given, "FLASHINFER_CUTLASS")


MOE = (
    Moe("tensor-h64-i48-e2", "tensor", 64, 48),
    Moe("channel-h64-i48-e2", "channel", 64, 48),
    Moe("block-h128-i128-e1", "block", 128, 128, experts=1),
)
MOE_FLASHINFER = (
    Moe("tensor-h64-i48-e2", "tensor", 64, 48),
    Dead("block-h128-i128-e2", "block", 128, 128),
)
MOE_PADDED = (Moe("tensor-h64-i40-e2", "tensor", 64, 40),)
CONVERT = f"{FP8_BACKENDS}.convert_to_fp8_moe_kernel_format for"

FILE = GoldenFile(
    "vllm_cutlass_fp8",
    "weight float8_e4m3fn [E, N, K]; weight_scale float32, per tensor [E] or channel [E, N, 1]; "
    "weight_scale_inv float32, a factor in spite of its name, per block of 128x128; w13: gate over "
    "up",
    (
        Kind("moe", f"{CONVERT} VLLM_CUTLASS", prepare_moe, MOE),
        Kind("moe_flashinfer", f"{CONVERT} FLASHINFER_CUTLASS", prepare_flashinfer, MOE_FLASHINFER),
        Kind(
            "moe_flashinfer_padded",
            "as moe_flashinfer, padded by it to I = 48",
            prepare_flashinfer,
            MOE_PADDED,
            releases=("0.33.0",),  # vLLM 0.25.1 pads behind both projections
        ),
    ),
    DRIVEN,
)
