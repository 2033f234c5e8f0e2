"""Checks of layouts other than Marlin's: each member's GEMM by a kernel or an emulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from transcode.gemm.trial import ROWS, Trial
from transcode.gemm.wanted import activations, error, held, product
from transcode.stacks import Stack

EXPERTS = 4
"""Experts of a stack that are run by default, evenly spread."""


class Engine(Protocol):
    """Something that multiplies with what DST holds."""

    @property
    def limit(self) -> float:
        """Of a relative error."""
        ...

    def products(
        self, stack: Stack, e: int, x: Tensor, *, broken: bool = False
    ) -> Sequence[Tensor]:
        """`x @ W.T` of each member of a group; x is float64 `[M, K]` that the kernel holds."""
        ...


def engine_run(trial: Trial, engine: Engine, stack: Stack, everything: bool) -> dict[str, Any]:
    """One stack: every member of some or all groups, and the control."""
    count = len(stack.groups)
    chosen = range(count)
    if not everything and count > EXPERTS:
        chosen = sorted({i * (count - 1) // (EXPERTS - 1) for i in range(EXPERTS)})  # type: ignore[assignment]
    worst = dict.fromkeys(stack.roles(), 0.0)
    controls = list[tuple[Tensor, Tensor]]()
    for e in chosen:
        x = drawn(trial, stack)
        wanted = [product(x, held(trial.job, stack, e, i)[0]) for i in range(len(worst))]
        found = engine.products(stack, e, x)
        broken = engine.products(stack, e, x, broken=True)
        for module, role, ours, theirs in zip(
            stack.groups[e], stack.roles(), found, wanted, strict=True
        ):
            apart = trial.judge(module.name, error(ours, theirs), engine.limit)
            worst[role] = max(worst[role], apart)
        controls += zip((b.double().cpu() for b in broken), wanted, strict=True)
    entry: dict[str, Any] = {
        "shape": [[m.shape[0] for m in stack.groups[0]], stack.first.shape[1]],
        "errors": worst,
        "control": trial.control(stack.name, controls),
    }
    return entry | ({"experts": list(chosen)} if stack.fused else {})


def drawn(trial: Trial, stack: Stack) -> Tensor:
    """Activations `[M, K]`, float64, of the numbers that the kernel's activations have."""
    x = activations(stack.name, ROWS, stack.first.shape[1])
    if trial.job.plan.options.layout.activations == "fp4":
        return (x * 2).round().clamp(-4, 4) / 2  # 0, 0.5, ..., 2: E2M1 has them
    return (x * 4).round().clamp(-15, 15) / 4  # of four bits: E4M3 has them
