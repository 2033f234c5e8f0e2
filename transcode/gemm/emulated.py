"""An emulation: packed bytes read where the kernel looks for them, multiplied in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode.gemm import places
from transcode.gemm.trial import Trial
from transcode.quant import FP8, Encoding, powers, unpacked4
from transcode.stacks import Stack, group_of

LIMIT = 1e-6
"""Of a relative error: float32 products of a code and its scales, summed up in float64."""


@dataclass(frozen=True)
class Emulation:
    """Reads DST for a trial; no GPU is needed."""

    trial: Trial
    limit: float = LIMIT

    def products(
        self, stack: Stack, e: int, x: Tensor, *, broken: bool = False
    ) -> Sequence[Tensor]:
        """`x @ W.T` of each member of a group, for float64 x `[M, K]`, without padding.

        broken: with neighbouring rows of codes swapped, as a control.
        """
        found = []
        for i, module in enumerate(stack.groups[e]):
            weight = self._weight(stack, e, i, broken=broken)
            entering = pad(x, (0, weight.shape[1] - x.shape[1]))
            found.append((entering @ weight.T)[:, : module.shape[0]])
        return found

    def _weight(self, stack: Stack, e: int, i: int, *, broken: bool) -> Tensor:
        """`[N, K]` float64 with padding."""
        layout = self.trial.job.plan.options.layout
        members = len(stack.groups[0]) if stack.fused else 1
        n, k = stack.padded.rows[i], stack.padded.k
        stem = f"{stack.prefix}.{stack.fused}_" if stack.fused else f"{stack.groups[0][i].name}."
        at = places.row(layout, torch.arange(n), i, members, n)
        raw = self._tensor(stem + "weight", stack, e).view(torch.uint8)
        codes = raw[at ^ 1 if broken else at]
        value = unpacked4(codes) if layout.codes.bits == 4 else codes.view(torch.float8_e4m3fn)
        total = n if members == 1 else sum(stack.padded.rows)
        scales = self._scales(stem, stack, e, at, total, k)
        if layout.factor:
            leaf = "weight_scale_2" if stack.fused else "weight_global_scale"
            factor = self._tensor(stem + leaf, stack, e)
            scales = scales * (factor[i] if factor.dim() else factor)
        return (value.float() * scales).double()

    def _scales(self, stem: str, stack: Stack, e: int, at: Tensor, total: int, k: int) -> Tensor:
        """Float32 scales of every element, or what broadcasts to that."""
        layout, group = self.trial.job.plan.options.layout, group_of(stack.first)
        stored = self._tensor(stem + "weight_scale", stack, e)
        if stack.first.encoding in FP8 and layout.scales.of == "own":
            if stack.first.encoding is Encoding.FP8_TENSOR:
                return stored
            if stack.first.encoding is Encoding.FP8_CHANNEL:
                return stored[at]
            rows = at if layout.name.startswith(("cutlass", "deepgemm")) else self._plain(stack, at)
            return stored[rows // 128][:, torch.arange(k) // group]
        c = torch.arange(-(-k // group))
        octets = stored.contiguous().view(torch.uint8).flatten()
        found = octets[places.scale(layout, at[:, None], c[None], total, len(c))]
        e4m3 = stack.first.encoding is Encoding.NVFP4
        value = found.view(torch.float8_e4m3fn).float() if e4m3 else powers(found)
        return value.repeat_interleave(group, 1)[:, :k]

    def _plain(self, stack: Stack, at: Tensor) -> Tensor:
        """The rows of [gate; up] that stored rows are, where scales keep that order."""
        if stack.fused != "w13":
            return at
        size, layout = stack.padded.rows[0], self.trial.job.plan.options.layout
        order = torch.empty(2 * size, dtype=torch.long)
        for half in (0, 1):
            order[places.row(layout, torch.arange(size), half, 2, size)] = (
                torch.arange(size) + half * size
            )
        return order[at]

    def _tensor(self, name: str, stack: Stack, e: int) -> Tensor:
        found = self.trial.tensor(name, [e] if stack.fused else None)
        return found[0] if stack.fused else found
