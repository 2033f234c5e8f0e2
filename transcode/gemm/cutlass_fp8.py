"""vLLM's CUTLASS GEMM of FP8, called from its compiled library, on what is packed as cutlass-fp8.

Experts are run one by one by the kernel for single linears, not by the grouped one.
Source: vllm-project/vllm 0.25.1, csrc/libtorch_stable/quantization/w8a8/cutlass, and
vllm/_custom_ops.py, cutlass_scaled_mm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcode.errors import TranscodeError
from transcode.gemm.trial import Trial, columns_of
from transcode.quant import Encoding
from transcode.stacks import Stack

OP = "_C::cutlass_scaled_mm"
ARGUMENTS = "out a b a_scales b_scales bias"
"""Of the op's schema (vllm-project/vllm csrc/libtorch_stable/torch_bindings.cpp)."""


@dataclass(frozen=True)
class CutlassFp8:
    """Reads DST for a trial, on a GPU of compute capability 9.0 or higher."""

    trial: Trial
    op: Any

    @property
    def limit(self) -> float:
        """Of a relative error: the output is rounded to 16 bits."""
        return self.trial.accept.gemm

    def products(
        self, stack: Stack, e: int, x: Tensor, *, broken: bool = False
    ) -> Sequence[Tensor]:
        """`x @ W.T` of each member of a group, of x that E4M3 holds."""
        if stack.fused:
            stem = f"{stack.prefix}.{stack.fused}_"
            return columns_of(self._gemm(stem, stack, [e], x, broken=broken), stack)
        return [
            self._gemm(f"{m.name}.", stack, None, x, broken=broken)[:, : m.shape[0]]
            for m in stack.groups[0]
        ]

    def _gemm(
        self, stem: str, stack: Stack, expert: list[int] | None, x: Tensor, *, broken: bool
    ) -> Tensor:
        both = [self.trial.tensor(stem + leaf, expert) for leaf in ("weight", "weight_scale")]
        weight, scale = (t[0] if expert else t for t in both)
        if broken:
            weight = weight.view(torch.uint8)[torch.arange(len(weight)) ^ 1].view(weight.dtype)
        n, k = weight.shape
        if n % 16 or k % 16:
            raise TranscodeError(f"{stem}weight is [{n}, {k}]: the kernel wants multiples of 16")
        a = torch.zeros(len(x), k, dtype=torch.float64)
        a[:, : x.shape[1]] = x
        codes = a.to(torch.float8_e4m3fn).to(self.trial.ops.device)
        if stack.first.encoding is Encoding.FP8_BLOCK:
            mine = torch.ones(-(-k // 128), len(x), device=codes.device).t()  # MN-major
            its = scale.t()
        else:
            mine = torch.ones(len(x), 1, device=codes.device)
            its = scale.reshape(1, -1)
            mine = mine[:1] if its.numel() == 1 else mine
        out = torch.full((len(x), n), torch.nan, dtype=self.trial.dtype, device=codes.device)
        self.op(out, codes, weight.t(), mine, its, None)
        torch.cuda.synchronize()
        return out


def found() -> Any:
    """The op of the loaded libraries; TranscodeError where it is none that is known."""
    op = getattr(torch.ops._C, "cutlass_scaled_mm", None)
    if op is None:
        raise TranscodeError(f"the loaded libraries have no {OP}")
    names = " ".join(argument.name for argument in op.default._schema.arguments)
    if names != ARGUMENTS:
        raise TranscodeError(f"{OP} takes ({names}), known is ({ARGUMENTS})")
    return op.default
