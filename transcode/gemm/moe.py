"""MoE layers: each GEMM by itself, the control, and both GEMMs as the runtime runs them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transcode.gemm.ops import Packed, Routing
from transcode.gemm.trial import (
    ROWS,
    Trial,
    bare,
    columns_of,
    swapped,
)
from transcode.gemm.wanted import (
    Wanted,
    activations,
    error,
    group,
    held,
    kept,
    meant,
    power,
    product,
    size,
)
from transcode.job import Job
from transcode.quant import QuantTensor
from transcode.stacks import Stack
from transcode.unify import Decision

EXPERTS = 4
"""Experts of a layer that are run by default, evenly spread; the first one folded comes on top."""


@dataclass(frozen=True)
class Run:
    """One GEMM of an MoE layer. level: brings the largest expert's products near 1.

    error: the largest of all experts and members.  control: outputs of the control, and wanted.
    """

    stack: Stack
    packed: Packed
    level: float
    error: float
    control: list[tuple[Tensor, Tensor]]


def moe_run(trial: Trial, layer: Sequence[Stack], everything: bool) -> dict[str, Any]:
    """One MoE layer: each GEMM by itself, the control, and both GEMMs as the runtime runs them."""
    chosen = _experts(layer, trial.job.unified.decisions, everything)
    to = _route(layer[0].prefix, len(chosen))
    runs = {stack.fused: _one(trial, stack, chosen, to) for stack in layer}
    pairs = [pair for run in runs.values() for pair in run.control]
    entry: dict[str, Any] = {
        "shape": {
            stack.fused: [[m.shape[0] for m in stack.groups[0]], stack.groups[0][0].shape[1]]
            for stack in layer
        },
        "experts": chosen,
        "top_k": to.top_k,
        "errors": {fused: run.error for fused, run in runs.items()},
        "control": trial.control(layer[0].prefix, pairs),
    }
    return entry | (_layer(trial, chosen, to, runs["w13"], runs["w2"]) if len(runs) == 2 else {})


def _route(name: str, experts: int) -> Routing:
    """Every expert gets tokens; the two of a token differ; the weights of a token add up to 1."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} routing".encode()))
    tokens, top_k = max(ROWS, experts), min(2, experts)
    one = torch.randperm(experts, generator=draw)[torch.arange(tokens) % experts]
    other = (one + torch.randint(1, max(2, experts), (tokens,), generator=draw)) % experts
    weights = torch.randn(tokens, top_k, generator=draw).softmax(-1)
    return Routing(torch.stack((one, other), 1)[:, :top_k].contiguous(), weights)


def _one(trial: Trial, stack: Stack, chosen: Sequence[int], to: Routing) -> Run:
    """One GEMM by itself, with a row of activations for each pair of a token and an expert."""
    biased = "bias" in stack.groups[0][0].leaves
    stem = f"{stack.prefix}.{stack.fused}_"
    packed = trial.packed(stem, "weight_scale_2", biased, chosen)
    x = activations(stack.name, to.experts.numel(), stack.groups[0][0].shape[1])
    wanted = list[Wanted]()
    for j, e in enumerate(chosen):
        wanted.append(group(trial.job, stack, e, x[to.pairs(j)]))
        x[to.pairs(j)] *= wanted[j].level
    entering = trial.entering(x, stack.padded.k)
    found, plain, broken = (
        columns_of(trial.ops.moe_gemm(entering, b, to, second=True, weigh=False).cpu(), stack)
        for b in (packed, bare(packed), swapped(packed))
    )
    errors, control = list[float](), list[tuple[Tensor, Tensor]]()
    for j, e in enumerate(chosen):
        rows = to.pairs(j)
        for i, module in enumerate(stack.groups[e]):
            want, products = wanted[j].outputs[i], wanted[j].products[i]
            apart = max(error(found[i][rows], want), error(plain[i][rows], products))
            errors.append(trial.judge(module.name, apart, trial.accept.gemm))
            control.append((broken[i][rows], products))
    return Run(stack, packed, min(w.level for w in wanted), max(errors), control)


def _layer(trial: Trial, chosen: Sequence[int], to: Routing, w13: Run, w2: Run) -> dict[str, Any]:
    """Both GEMMs, with the activation between them and the experts' outputs added up."""
    prefix, columns = w13.stack.prefix, w13.stack.groups[0][0].shape[1]
    x = activations(prefix, len(to.experts), columns) * w13.level
    entering = trial.entering(x, w13.packed.k)
    leaving = trial.ops.moe_gemm(entering, w13.packed, to, second=False, weigh=False).float()
    hidden = trial.act([leaving[:, w13.stack.rows(i)] for i in range(len(w13.stack.padded.rows))])
    source = _function(trial, chosen, to, w13, w2, x, meant)
    wanted, against = source, "the source"
    if not all(kept(trial.job, run.stack, e) for run in (w13, w2) for e in chosen):
        wanted, against = _function(trial, chosen, to, w13, w2, x, held), "what is packed"
    # Routing weights of another power of two keep a layer of small weights in float16's range.
    level = power(1 / (size(wanted) or 1.0), trial.job.plan.options.dtype)
    source, wanted, to = source * level, wanted * level, replace(to, weights=to.weights * level)
    second = partial(trial.ops.moe_gemm, hidden.to(trial.dtype), w2.packed, to, second=True)
    found = second(weigh=True).reshape(*to.experts.shape, -1).sum(1)[:, : wanted.shape[1]]
    apart = error(found, wanted)
    if w2.packed.bias is not None and not apart < trial.accept.moe:
        trial.notes.append(
            f"{prefix}: vLLM's kernel does not add w2's bias rightly where it applies the routing "
            f"weights (relative error {apart:.2e}); they were applied after it"
        )
        rows = second(weigh=False) * to.weights.flatten()[:, None].to(trial.ops.device)
        found = rows.to(trial.dtype).reshape(*to.experts.shape, -1).sum(1)[:, : wanted.shape[1]]
        apart = error(found, wanted)
    trial.judge(f"{prefix}, the layer against {against}", apart, trial.accept.moe)
    return {"layer": apart, "against": against, "from_source": error(found, source)}


def _function(
    trial: Trial,
    chosen: Sequence[int],
    to: Routing,
    w13: Run,
    w2: Run,
    x: Tensor,
    weight: Callable[[Job, Stack, int, int], tuple[QuantTensor, Tensor]],
) -> Tensor:
    """The layer's function of `x` in float64 with these weights: `[tokens, H]`."""
    total = torch.zeros(len(x), w2.stack.groups[0][0].shape[0], dtype=torch.float64)
    for j, e in enumerate(chosen):
        rows, outs = to.pairs(j), list[Tensor]()
        for i in range(len(w13.stack.groups[e])):
            w, bias = weight(trial.job, w13.stack, e, i)
            outs.append(product(x[rows // to.top_k], w) + bias)
        w, bias = weight(trial.job, w2.stack, e, 0)
        down = product(trial.act(outs), w) + bias
        total.index_add_(0, rows // to.top_k, down * to.weights.flatten()[rows, None].double())
    return total


def _experts(layer: Sequence[Stack], decisions: Iterable[Decision], everything: bool) -> list[int]:
    count, names = len(layer[0].groups), {stack.name for stack in layer}
    if everything or count <= EXPERTS:
        return list(range(count))
    first = dict[str, int]()
    for decision in decisions:
        if decision.stack in names:
            first.setdefault(decision.how, decision.group)
    return sorted({i * (count - 1) // (EXPERTS - 1) for i in range(EXPERTS)} | {*first.values()})
