"""The one CUDA operator, `gptq_marlin_repack`, by vLLM's own Python definition of the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from scripts.packers.tensors import same
from scripts.packers.wheel import Runtime


def repack(
    order: Any,
    b_q_weight: Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    perm: Tensor | None = None,
) -> Tensor:
    """Do what `gptq_marlin_repack` does, by vLLM's `marlin_weights` and `get_weight_perm`.

    The input is int32 [K * bits / 32, N], the smallest k in the lowest bits. `perm`, which older
    versions pass, has to be empty: it is act-order's.
    """
    if perm is not None and perm.numel():
        raise ValueError("act-order is out of scope")
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes = (b_q_weight[:, None, :] >> shifts[None, :, None]) & (2**num_bits - 1)
    places = order.get_weight_perm(num_bits, is_a_8bit)
    packed: Tensor = order.marlin_weights(
        codes.reshape(size_k, size_n), size_k, size_n, num_bits, places, is_a_8bit
    )
    return packed


def check_repack(vllm: Runtime, words: Path) -> str:
    """Compare the stand-in with words of the compiled operator; say what was compared.

    Keys of the file of words: `repack{bits}.{N}x{K}.a8{0|1}.{in|out}`.
    """
    with safe_open(words, "pt") as file:
        keys = sorted(file.keys())
        cases = [key.removesuffix(".in") for key in keys if key.endswith(".in")]
        for case in cases:
            kind, shape, activations = case.split(".")
            n, k = map(int, shape.split("x"))
            weight = file.get_tensor(f"{case}.in").view(torch.int32).T.contiguous()
            bits = int(kind.removeprefix("repack"))
            packed = vllm.repack(weight, k, n, bits, is_a_8bit=activations == "a81")
            if not same(packed, file.get_tensor(f"{case}.out")):
                raise SystemExit(f"{vllm}: the stand-in differs at {case}")
        made_by = file.metadata()["made_by"]
    return f"bit-equal in {len(cases)} of {len(cases)} cases to the words of: {made_by}"
