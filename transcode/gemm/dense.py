"""Dense groups: joined as the runtime runs them, each member by itself, and the control."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from transcode.errors import Mismatch
from transcode.gemm.ops import Packed
from transcode.gemm.trial import (
    ROWS,
    Trial,
    bare,
    columns_of,
    swapped,
)
from transcode.gemm.wanted import (
    activations,
    error,
    group,
)
from transcode.stacks import Stack


def dense_run(trial: Trial, stack: Stack) -> dict[str, Any]:
    """One group: joined as the runtime runs it, each member by itself, and the control."""
    ops, modules, limit = trial.ops, stack.groups[0], trial.accept.gemm
    members = [
        trial.packed(f"{m.name}.", "weight_global_scale", "bias" in m.leaves, None) for m in modules
    ]
    joined = _joined(members, trial.dtype)
    x = activations(stack.name, ROWS, modules[0].shape[1])
    wanted = group(trial.job, stack, 0, x)
    entering = trial.entering(x * wanted.level, stack.padded.k)
    found = columns_of(ops.gemm(entering, joined), stack)
    plain, broken = (
        columns_of(ops.gemm(entering, b), stack) for b in (bare(joined), swapped(joined))
    )
    entry: dict[str, Any] = {
        "shape": [[m.shape[0] for m in modules], modules[0].shape[1]],
        "errors": {},
        "control": trial.control(stack.name, zip(broken, wanted.products, strict=True)),
    }
    if len(modules) > 1:
        entry |= {"errors_alone": {}, "alone_and_joined": {}}
    for i, (module, role, packed) in enumerate(zip(modules, stack.roles(), members, strict=True)):
        want = wanted.outputs[i]
        apart = max(error(found[i], want), error(plain[i], wanted.products[i]))
        entry["errors"][role] = trial.judge(module.name, apart, limit)
        if len(modules) > 1 and trial.job.plan.options.layout.serves(packed.n, packed.k):
            own, what = ops.gemm(entering, packed)[:, : module.shape[0]], f"{module.name} by itself"
            apart = error(own, found[i].double().cpu())
            entry["errors_alone"][role] = trial.judge(what, error(own, want), limit)
            entry["alone_and_joined"][role] = trial.judge(f"{what} and joined", apart, limit)
    return entry


def _joined(members: Sequence[Packed], dtype: torch.dtype) -> Packed:
    """Members as a runtime joins them along N; those without a bias get zeros."""
    factors = [float(m.factor) for m in members if m.factor is not None]
    if len(set(factors)) > 1:
        raise Mismatch(f"global scales differ in one group: {factors}")
    zeros = partial(torch.zeros, dtype=dtype, device=members[0].weight.device)
    raw = torch.uint8 if members[0].scales.element_size() == 1 else members[0].scales.dtype
    biases = [zeros(m.n) if m.bias is None else m.bias for m in members]
    return Packed(
        torch.cat([m.weight for m in members], 1),
        torch.cat([m.scales.view(raw) for m in members], 1).view(members[0].scales.dtype),
        members[0].factor,
        torch.cat(biases) if any(m.bias is not None for m in members) else None,
        members[0].bits,
    )
