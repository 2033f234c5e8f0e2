"""One check of the kernels: what every run needs, what is accepted, and the control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode.errors import Mismatch
from transcode.gemm.ops import Ops, Packed
from transcode.gemm.wanted import (
    error,
)
from transcode.header import TensorInfo
from transcode.job import Job
from transcode.output import Output
from transcode.stacks import Stack

ROWS = 16
"""Rows of a GEMM, and the fewest tokens of an MoE layer."""

SWAPPED = {4: [0, 4, 2, 6, 1, 5, 3, 7], 8: [0, 2, 1, 3]}
"""A word's codes, by their bits, with two factors of Marlin's `e h g`, or `e g`, swapped: k's
parity e and k's half of 16 g."""


@dataclass(frozen=True)
class Acceptance:
    """Relative Frobenius errors of the 16-bit output: below `gemm` for every matrix in one GEMM,
    below `moe` for an MoE layer, and above `control` for every matrix in the control.

    vLLM 0.25.1 on an H200, with weights packed by an independent program: 1.6e-3 to 2.4e-3 in one
    bfloat16 GEMM, 4.2e-3 in a layer; 2.1e-4 to 3.0e-4 and 6.0e-4 in float16.
    """

    gemm: float
    moe: float
    control: float = 0.2


ACCEPTANCE = {"bfloat16": Acceptance(4e-3, 6e-3), "float16": Acceptance(5e-4, 1e-3)}


@dataclass(frozen=True)
class Trial:
    """What every run needs. wanted, stored: DST's tensors by plan and by headers.

    act: the MoE layers' function of gate and up, or of up alone.
    failures, notes: what was found so far; a note is no fault of DST's.
    """

    job: Job
    wanted: Mapping[str, Output]
    stored: Mapping[str, TensorInfo]
    ops: Ops
    activation: str
    act: Callable[[Sequence[Tensor]], Tensor]
    failures: list[str]
    notes: list[str]

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        found: torch.dtype = getattr(torch, self.job.plan.options.dtype)
        return found

    @property
    def accept(self) -> Acceptance:
        """What is accepted for that dtype."""
        return ACCEPTANCE[self.job.plan.options.dtype]

    def entry(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One entry of the evidence; what makes a run impossible is a failure."""
        try:
            return {"name": name} | run()
        except Mismatch as problem:
            self.failures.append(f"{name}: {problem}")
            return {"name": name, "problem": str(problem)}

    def judge(self, what: str, found: float, limit: float) -> float:
        """Note an error that is not below its limit, and return it."""
        if not found < limit:
            self.failures.append(f"{what}: relative error {found:.2e}, wanted below {limit:g}")
        return found

    def control(self, what: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
        """The smallest error of the control; None where all is zero, in whatever order."""
        errors = [error(found, wanted) for found, wanted in pairs if wanted.any()]
        if errors and not min(errors) > self.accept.control:
            self.failures.append(
                f"{what}: the check is broken: with two factors of the layout swapped the relative "
                f"error is {min(errors):.2e}, wanted above {self.accept.control:g}"
            )
        return min(errors, default=None)

    def entering(self, x: Tensor, k: int) -> Tensor:
        """Float64 activations as they go into the kernel, zero-padded to K."""
        return pad(x, (0, k - x.shape[1])).to(self.dtype).to(self.ops.device)

    def tensor(self, name: str, experts: Sequence[int] | None) -> Tensor:
        """A tensor of DST on the device, or some experts of it, the others unread."""
        output, info = self.wanted[name], self.stored.get(name)
        if info is None:
            raise Mismatch(f"{name} is missing")
        if (info.dtype, info.shape) != (output.dtype, output.shape):
            raise Mismatch(f"{info}: wanted {output.dtype} {list(output.shape)}")
        if experts is None:
            return self.job.read.tensor(info).to(self.ops.device)
        parts = [self.job.read.tensor(info.entry(e)) for e in experts]
        return torch.stack(parts).to(self.ops.device)

    def packed(self, stem: str, factor: str, biased: bool, experts: Sequence[int] | None) -> Packed:
        """A member of a dense group, or an MoE layer's w13 or w2."""
        layout = self.job.plan.options.layout
        scales = self.tensor(f"{stem}weight_scale", experts)
        return Packed(
            self.tensor(f"{stem}weight", experts),
            scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales,
            self.tensor(f"{stem}{factor}", experts).float() if layout.factor else None,
            self.tensor(f"{stem}bias", experts) if biased else None,
            layout.codes.bits,
        )


def bare(b: Packed) -> Packed:
    """Without the bias, which would hide the errors of smaller products."""
    return replace(b, bias=None)


def swapped(b: Packed) -> Packed:
    """The control: the same words with two factors of the layout swapped, without the bias."""
    count, one = 32 // b.bits, (1 << b.bits) - 1
    shift = b.bits * torch.arange(count, dtype=torch.int32, device=b.weight.device)
    codes = ((b.weight[..., None] >> shift) & one)[..., SWAPPED[b.bits]]
    return replace(b, weight=(codes << shift).sum(-1, dtype=torch.int32), bias=None)


def columns_of(out: Tensor, stack: Stack) -> list[Tensor]:
    """The members' own columns of a joined output, without padding."""
    return [out[:, stack.rows(i)][:, : m.shape[0]] for i, m in enumerate(stack.groups[0])]
