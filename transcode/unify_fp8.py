"""FP8 with one scale a matrix: one scale for those that runtimes join, where the user asks for it.

vLLM and SGLang do so at every start, by requantising to the largest. `--unify fold` keeps gate's
and moves up's factor into down, no code changing; elsewhere, and with `--unify rescale`, the
largest is taken and the others' codes are rounded again: by 2^-4 of a value at most that is normal
afterwards, by 2^-10 of the scale where it is not; exact where the ratio is a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from transcode.checkpoint import Checkpoint, Reader
from transcode.encode import e4m3
from transcode.fold import Pair, changes, folded, normed, refusal
from transcode.module import Module
from transcode.names import address, down_of
from transcode.plan import Plan
from transcode.quant import Encoding
from transcode.unify import Decision, Unified


def unify_fp8(
    checkpoint: Checkpoint,
    plan: Plan,
    rows: Sequence[Sequence[Module]],
    unified: Unified,
    read: Reader,
) -> Unified:
    """What is unified, with FP8's scales: `own` and `requantised` by module name."""
    own, requantised = dict[str, Tensor](), dict[str, float]()
    scaled, folds, decisions = dict(unified.scaled), dict(unified.folds), [*unified.decisions]
    g = dict(unified.g)
    inner_norms = normed(checkpoint)
    for row in rows:
        scales = {m.name: read.tensor(m.scales).float().reshape(()) for m in row}
        values = [float(scale) for scale in scales.values()]
        if len(set(values)) < 2 or min(values) <= 0:
            continue
        pair = _pair(plan.modules, row, scales, g)
        why = "as asked" if plan.options.unify != "fold" else "not a gate and an up"
        if plan.options.unify == "fold" and pair:
            why = refusal(checkpoint, inner_norms, read, pair, plan.options)
        if pair and pair.down and not why:
            own[pair.up.name] = scales[pair.gate.name]
            scaled |= {t.name: f for t, f in changes(pair.up, pair.down, pair.ratio)}
            folds[pair.down.name] = pair.ratio
            if pair.g_down is not None:
                g[pair.down.name] = folded(pair.g_down, pair.ratio)
        else:
            largest = max(scales.values(), key=float)
            others = [m.name for m in row if scales[m.name] != largest]
            own |= dict.fromkeys(others, largest)
            requantised |= {name: float(scales[name]) / float(largest) for name in others}
        how = "rescale" if why else "fold"
        joined = "+".join(dict.fromkeys(address(m.name).leaf for m in row))
        name = f"{address(row[0].name).parent}.{joined}"
        expert = address(row[0].name).expert
        decisions.append(Decision(name, expert or 0, how, max(values) / min(values), why))
    return replace(
        unified, g=g, scaled=scaled, folds=folds, decisions=tuple(decisions), own=own,
        requantised=requantised,
    )  # fmt: skip


def _pair(
    modules: Mapping[str, Module],
    row: Sequence[Module],
    scales: Mapping[str, Tensor],
    g: Mapping[str, Tensor],
) -> Pair | None:
    """The members as a gate and an up with their down, which may be NVFP4; None if they are
    something else."""
    if [address(m.name).projection for m in row] != ["gate", "up"]:
        return None
    gate, up = row
    down = modules.get(down_of(up.name))
    ratio = float(scales[up.name]) / float(scales[gate.name])
    return Pair(gate, up, down, ratio, g.get(down.name) if down else None)


def one_scale(module: Module) -> bool:
    """Whether a module has one scale, and it is FP8."""
    return module.encoding is Encoding.FP8_TENSOR


def requantised(codes: Tensor, ratio: float) -> Tensor:
    """Codes for a scale that is `1 / ratio` times as large, to nearest even."""
    return e4m3((codes.double() * ratio).float())
