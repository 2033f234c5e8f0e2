"""deepgemm_fp8: FP8 with a power of two per block of 128x128, for DeepGEMM on SM100 and SM90."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.packers import deep_gemm, fp8
from scripts.packers.fp8 import BLOCK
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.sglang_blackwell import DRIVEN, FP8, MEGA_SM90
from scripts.packers.tensors import Tensors, module
from scripts.packers.ue8m0 import Blocks
from scripts.packers.wheel import Runtime, running


def in_memory(words: Tensor) -> Tensor:
    """The words of scales as they lie in memory, [..., words, rows], the rows up to 16 bytes.

    The kernel's view [..., rows, words] of them is column by column.
    """
    *experts, rows, columns = words.shape
    aligned = deep_gemm.round_up(rows, 4)
    if words.stride()[-2:] != (1, aligned):
        raise SystemExit(f"words of strides {words.stride()}")
    strides = (*words.stride()[:-2], aligned, 1)
    return words.as_strided((*experts, columns, aligned), strides)


def requantised(sglang: Runtime, _case: Blocks, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `requant_weight_ue8m0` as a whole."""
    with running(sglang):
        weight, words = sglang.modules[FP8].requant_weight_ue8m0(
            given["weight"], given["weight_scale_inv"], [BLOCK, BLOCK]
        )
    return {"weight": weight, "weight_scale_inv": in_memory(words)}


def packed(sglang: Runtime, _case: Blocks, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `transform_scale_ue8m0` on powers of two, in SGLang's own definition in Python."""
    with running(sglang):
        words = sglang.modules[FP8].transform_scale_ue8m0(
            given["weight_scale_inv"], given["weight"].shape[-2], use_torch_impl=True
        )
    return {"weight_scale_inv": in_memory(words)}


def sm90(sglang: Runtime, _case: fp8.Moe, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `build_sm90_mega_moe_experts_weights`."""
    layer = module(given)
    sglang.modules[MEGA_SM90].build_sm90_mega_moe_experts_weights(layer)
    tensors = (*layer.mega_l1_weights, *layer.mega_l2_weights)
    return dict(zip(given, map(torch.Tensor.detach, tensors), strict=True))


class PowersOfTwo(Blocks):
    """Blocks whose factors are powers of two."""

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        tensors = super().draw(dtype)
        scales = tensors["weight_scale_inv"]
        return tensors | {"weight_scale_inv": scales.log2().round().exp2()}


ANY = (0x7E, 0x78)
REQUANTISED = (Blocks("72x640", (72, 640), tops=ANY), Blocks("experts-2x136x128", (2, 136, 128)))
POWERS = (PowersOfTwo("6x1280", (6, 1280)), PowersOfTwo("experts-2x132x256", (2, 132, 256)))
SM90 = (fp8.Moe("block-h256-i128-e2", "block", 256, 128),)

FILE = GoldenFile(
    "deepgemm_fp8",
    "weight float8_e4m3fn [N, K] or [E, N, K]; weight_scale_inv float32, a factor in spite of its "
    "name, per block of 128x128; w13: gate over up. out: in sm100 int32 [words, rows up to 16 "
    "bytes] or [E, words, rows], of which the kernel's view is the transpose",
    (
        Kind(
            "sm100",
            f"{FP8}.requant_weight_ue8m0; {deep_gemm.STAND_IN}",
            requantised,
            REQUANTISED,
        ),
        Kind(
            "sm100_powers",
            f"{FP8}.transform_scale_ue8m0 with use_torch_impl",
            packed,
            POWERS,
        ),
        Kind(
            "megamoe_sm90",
            f"{MEGA_SM90}.build_sm90_mega_moe_experts_weights",
            sm90,
            SM90,
        ),
    ),
    DRIVEN,
)
