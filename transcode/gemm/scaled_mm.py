"""torch's own block-scaled GEMM (cuBLASLt), which reads exactly the bytes of cutlass-nvfp4 and
cutlass-mxfp8, on GPUs of compute capability 10.0 or higher.

Activations have scales of 1. Experts are run one by one. Written from torch's documentation and
source (pytorch/pytorch aten/src/ATen/native/cuda/ScaledBlas.cpp); no such GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transcode.gemm.trial import Trial, columns_of
from transcode.quant import E2M1, Encoding, pack_nibbles
from transcode.stacks import Stack, group_of

LAYOUTS = ("cutlass-nvfp4", "cutlass-mxfp8")


@dataclass(frozen=True)
class ScaledMM:
    """Reads DST for a trial."""

    trial: Trial

    @property
    def limit(self) -> float:
        """Of a relative error: the output is rounded to 16 bits."""
        return self.trial.accept.gemm

    def products(
        self, stack: Stack, e: int, x: Tensor, *, broken: bool = False
    ) -> Sequence[Tensor]:
        """`x @ W.T` of each member of a group, of x that E2M1 or E4M3 holds."""
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
        def part(leaf: str) -> Tensor:
            whole = self.trial.tensor(stem + leaf, expert)
            return whole[0] if expert else whole

        weight, scales = part("weight"), part("weight_scale")
        if broken:
            weight = weight[torch.arange(len(weight)) ^ 1]
        four = stack.first.encoding is Encoding.NVFP4
        k = weight.shape[1] * (2 if four else 1)
        rows, groups = -(-len(x) // 128) * 128, -(-k // group_of(stack.first) // 4) * 4
        entering = torch.zeros(len(x), k, dtype=torch.float64)
        entering[:, : x.shape[1]] = x
        if four:
            a = packed4(entering).to(weight.device).view(torch.float4_e2m1fn_x2)
            b = weight.view(torch.float4_e2m1fn_x2)
            ones = torch.ones(rows * groups, device=weight.device).to(torch.float8_e4m3fn)
        else:
            a, b = entering.to(torch.float8_e4m3fn).to(weight.device), weight
            ones = torch.full((rows * groups,), 127, dtype=torch.uint8, device=weight.device)
            ones, scales = ones.view(torch.float8_e8m0fnu), scales.view(torch.float8_e8m0fnu)
        out = torch._scaled_mm(a, b.t(), ones, scales.flatten(), out_dtype=self.trial.dtype)
        return out.float() * self._factor(stem, stack, expert)

    def _factor(self, stem: str, stack: Stack, expert: list[int] | None) -> Tensor:
        if self.trial.job.plan.options.layout.factor is None:
            return torch.ones((), device=self.trial.ops.device)
        found = self.trial.tensor(
            stem + ("weight_scale_2" if stack.fused else "weight_global_scale"), expert
        )
        return found.reshape(())


def packed4(x: Tensor) -> Tensor:
    """Numbers that E2M1 has, `[M, K]`, to `[M, K/2]` uint8, the even column in the low nibble."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    code = torch.searchsorted(table, x.abs())
    return pack_nibbles((code + 8 * (x < 0)).to(torch.uint8))
