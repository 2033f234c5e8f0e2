"""vllm_marlin_mxfp4: Marlin's MXFP4 bytes, for activations of 16 and of 8 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from scripts.packers.draw import Exponents
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.mx import ALL, Dense, Moe
from scripts.packers.tensors import Tensors, held, module
from scripts.packers.vllm import BACKENDS, BUFFERS, COMMON, EXPERTS, FP4, MXFP4, fp8_activations
from scripts.packers.wheel import Runtime

MOE_TENSORS = (
    "w13_weight",
    "w2_weight",
    "w13_weight_scale",
    "w2_weight_scale",
    "w13_bias",
    "w2_bias",
)


def prepare_dense(
    vllm: Runtime,
    case: Dense,
    given: Tensors,
    dtype: torch.dtype,
    activations: torch.dtype | None = None,
) -> Tensors:
    """Drive `prepare_fp4_layer_for_marlin`, vLLM's preparation of a linear layer."""
    layer = module(
        given,
        output_size_per_partition=case.n,
        input_size_per_partition=case.k,
        params_dtype=dtype,
    )
    vllm.modules[FP4].prepare_fp4_layer_for_marlin(layer, activations)
    return held(layer, given)


def prepare_dense_a8(vllm: Runtime, case: Dense, given: Tensors, dtype: torch.dtype) -> Tensors:
    """As `prepare_dense`, for activations in FP8."""
    return prepare_dense(vllm, case, given, dtype, torch.float8_e4m3fn)


def prepare_moe(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_moe_mxfp4_layer_for_marlin`, which packs experts as large as they are."""
    return pack(vllm, module(given), dtype)


def prepare_moe_a8(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """As `prepare_moe`, for activations in FP8."""
    with fp8_activations(vllm):
        return prepare_moe(vllm, case, given, dtype)


def prepare_moe_inplace(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_moe_fp4_layer_for_marlin`, the way of compressed-tensors and INC."""
    sizes = SimpleNamespace(
        num_experts=case.experts,
        num_local_experts=case.experts,
        hidden_dim=case.hidden,
        intermediate_size_per_partition=case.inter,
    )
    layer = module(given, params_dtype=dtype, moe_config=sizes)
    vllm.modules[FP4].prepare_moe_fp4_layer_for_marlin(layer)
    return held(layer, given)


def prepare_buffers(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Let vLLM size the buffers, fill them from the checkpoint and pack them."""
    layer = buffers(vllm, case, dtype)
    fill = fill_interleaved if case.interleaved else fill_halves
    fill(layer, given)
    return pack(vllm, layer, dtype)


def prepare_buffers_a8(vllm: Runtime, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """As `prepare_buffers`, for activations in FP8."""
    with fp8_activations(vllm):
        return prepare_buffers(vllm, case, given, dtype)


def pack(vllm: Runtime, layer: Any, dtype: torch.dtype) -> Tensors:
    """Call the pure function as `Mxfp4MoEMethod` does; a bias that is not there stays None."""
    layer.params_dtype = dtype
    tensors = (getattr(layer, name, None) for name in MOE_TENSORS)
    packed = vllm.modules[FP4].prepare_moe_mxfp4_layer_for_marlin(layer, *tensors)
    named = zip(MOE_TENSORS, packed, strict=True)
    return {name: tensor for name, tensor in named if tensor is not None}


def buffers(vllm: Runtime, case: Moe, dtype: torch.dtype) -> Any:
    """Experts with the empty parameters that `create_weights` gives them, of the padded sizes."""
    backends, mxfp4 = vllm.modules[BACKENDS], vllm.modules[MXFP4]
    hidden, inter = backends.mxfp4_round_up_hidden_size_and_intermediate_size(
        backends.Mxfp4MoeBackend.MARLIN, case.hidden, case.inter
    )
    method = bare(mxfp4.GptOssMxfp4MoEMethod if case.interleaved else mxfp4.Mxfp4MoEMethod)
    method.moe = SimpleNamespace(has_bias=case.bias, w13_num_shards=2)
    layer = bare(vllm.modules[EXPERTS].RoutedExperts)
    parallel = SimpleNamespace(tp_size=1)
    layer.moe_config = SimpleNamespace(is_act_and_mul=True, moe_parallel_config=parallel)
    layer.quant_config = SimpleNamespace(get_name=lambda: "gpt_oss_mxfp4")
    method.create_weights(layer, case.experts, hidden, inter, dtype, weight_loader=None)
    return layer


def bare(cls: Any) -> Any:
    """An object of a class of vLLM, without what its constructor sets up."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    return made


def fill_interleaved(layer: Any, given: Tensors) -> None:
    """Load all experts at once, as gpt-oss does."""
    for name, tensor in given.items():
        layer.weight_loader(getattr(layer, name), tensor, name, shard_id=None, expert_id=None)


def fill_halves(layer: Any, given: Tensors) -> None:
    """Load gate, up and down of one expert after the other."""
    for name, tensor in given.items():
        for expert, loaded in enumerate(tensor):
            target = getattr(layer, name).data[expert]
            if name.startswith("w2"):
                layer._load_w2(target, 1, loaded, tp_rank=0)
            else:
                gate, up = loaded.chunk(2)
                layer._load_w13(target, 0, "w1", gate, tp_rank=0)
                layer._load_w13(target, 0, "w3", up, tp_rank=0)


LIFTABLE = Exponents(0, 249)
"""To which 6 can be added: what FP8 activations ask for."""

DENSE = (
    Dense("128x128", 4, 128, 128),
    Dense("192x320", 4, 192, 320),  # padded to 192x384
    Dense("72x96", 4, 72, 96),  # to 128x128
    Dense("192x64", 4, 192, 64),  # to 256x64
    Dense("bias-64x128", 4, 64, 128, bias=True),
    Dense("bias-72x96", 4, 72, 96, bias=True),
    Dense("all-64x256", 4, 64, 256, ALL),
)
DENSE_A8 = (
    Dense("128x128", 4, 128, 128),
    Dense("192x64", 4, 192, 64),
    Dense("bias-72x96", 4, 72, 96, bias=True),
    Dense("all-64x256", 4, 64, 256, LIFTABLE),
)
MOE = (
    Moe("h128-i64-e2", 4, 128, 64),
    Moe("bias-h128-i64-e2", 4, 128, 64, bias=True),
    Moe("all-h128-i64-e1", 4, 128, 64, experts=1, exponents=ALL),
    Moe("interleaved-h128-i64-e2", 4, 128, 64, bias=True, interleaved=True),
)
MOE_A8 = (
    Moe("bias-h128-i64-e2", 4, 128, 64, bias=True),
    Moe("all-h128-i64-e1", 4, 128, 64, experts=1, exponents=LIFTABLE),
)
MOE_INPLACE = (Moe("bias-h128-i64-e2", 4, 128, 64, bias=True),)
MOE_BUFFERS = (  # padded to H = 256 and I = 128
    Moe("halves-h96-i32-e2", 4, 96, 32),
    Moe("interleaved-h192-i96-e2", 4, 192, 96, bias=True, interleaved=True),
)
MOE_BUFFERS_A8 = (
    Moe("interleaved-h192-i96-e1", 4, 192, 96, experts=1, bias=True, interleaved=True),
)

PURE = f"{FP4}.prepare_moe_mxfp4_layer_for_marlin"
BUFFERED = (
    f"{BACKENDS}.mxfp4_round_up_hidden_size_and_intermediate_size (Marlin), create_weights of "
    f"{MXFP4}.Mxfp4MoEMethod or (interleaved) GptOssMxfp4MoEMethod, {EXPERTS}.RoutedExperts: "
    "_load_w13 and _load_w2 or (interleaved) weight_loader; then as moe"
)
FP8_DENSE = "with input_dtype float8_e4m3fn"
FP8_MOE = "with VLLM_MARLIN_INPUT_DTYPE=fp8"
FILE = GoldenFile(
    "vllm_marlin_mxfp4",
    "weight uint8, even column in the low nibble; weight_scale E8M0 as uint8, row order; w13: gate "
    "over up, or their rows in turn where the case is called interleaved; out: E8M0 as uint8, too",
    (
        Kind("dense", f"{FP4}.prepare_fp4_layer_for_marlin", prepare_dense, DENSE),
        Kind("dense_a8", f"as dense, {FP8_DENSE}", prepare_dense_a8, DENSE_A8),
        Kind("moe", PURE, prepare_moe, MOE),
        Kind("moe_a8", f"as moe, {FP8_MOE}", prepare_moe_a8, MOE_A8),
        Kind(
            "moe_inplace",
            f"{FP4}.prepare_moe_fp4_layer_for_marlin",
            prepare_moe_inplace,
            MOE_INPLACE,
        ),
        Kind("moe_buffers", BUFFERED, prepare_buffers, MOE_BUFFERS),
        Kind("moe_buffers_a8", f"as moe_buffers, {FP8_MOE}", prepare_buffers_a8, MOE_BUFFERS_A8),
    ),
    (FP4, *COMMON, *BUFFERS),
)
