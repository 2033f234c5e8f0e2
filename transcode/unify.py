"""Global scales made right: one for every fusion group, decided from scalars alone.

Where the members of a group differ, `fold` keeps gate's and moves up's factor into down, `rescale`
takes the largest and rounds the others' block scales again, `none` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transcode.checkpoint import Checkpoint, Reader
from transcode.errors import FormatError, LossError
from transcode.fold import Pair, changes, folded, normed, refusal
from transcode.module import Module
from transcode.names import address, down_of
from transcode.packed_outputs import has_input_scale
from transcode.plan import Plan
from transcode.producer import Role


@dataclass(frozen=True)
class Scalars:
    """A module's own scalars as stored, and its global scale as a factor; all float32 `[]`.

    `factor` is 0 for a matrix that is zero whatever its codes say; never NaN, negative or infinite.
    """

    stored: Tensor
    factor: Tensor
    input: Tensor | None

    @property
    def zero(self) -> bool:
        """Whether the matrix is zero."""
        return bool(self.factor == 0)


@dataclass(frozen=True)
class Decision:
    """What was done to one group whose members' global scales differ.

    ratio: the largest factor between two members.  why: the reason why it was not folded.
    """

    stack: str
    group: int
    how: str
    ratio: float
    why: str


@dataclass(frozen=True)
class Unified:
    """Global scales by module name, float32 `[]`, bit-equal inside a group.

    multiplier: `g_i / g` for modules whose block scales must be rounded again, else absent.
    scaled: factors of tensors that are carried or permuted but take part in a fold.
    folds: down projections by name, and the factor that moved into them.
    owner: the module of a group whose scalar all its members have.
    own: scales of FP8 modules in place of the stored ones.  requantised: what codes of those are
    multiplied with and rounded.
    """

    scalars: Mapping[str, Scalars]
    g: Mapping[str, Tensor]
    multiplier: Mapping[str, float]
    scaled: Mapping[str, float]
    folds: Mapping[str, float]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    owner: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    requantised: Mapping[str, float] = field(default_factory=dict)


def read_scalars(module: Module, read: Reader) -> Scalars:
    """A module's scalars; FormatError for a global scale that is NaN, negative or infinite."""
    info = module.global_scale
    stored = read.tensor(info).reshape(())
    factor = module.written.factor(stored)
    if not torch.isfinite(factor) or stored < 0:
        raise FormatError(f"{info.name} is {stored.item():g}, a factor of {factor.item():g}")
    given = module.parts.get(Role.INPUT)
    return Scalars(stored, factor.abs(), read.tensor(given).reshape(()) if given else None)


def unify(checkpoint: Checkpoint, plan: Plan, read: Reader) -> Unified:
    """Decide every group; raises FormatError for invalid scalars, LossError where not allowed."""
    every = (m for stack in plan.stacks for group in stack.groups for m in group)
    modules = [m for m in every if Role.GLOBAL in m.parts]
    scalars = {m.name: read_scalars(m, read) for m in modules}
    g = {name: s.factor for name, s in scalars.items()}
    multiplier, scaled, folds = dict[str, float](), dict[str, float](), dict[str, float]()
    decisions, owner = list[Decision](), dict[str, str]()
    inner_norms = normed(checkpoint)
    keep = plan.options.unify == "keep"
    for stack in plan.stacks:
        for i, group in enumerate(stack.groups):
            live = [m for m in group if m.name in scalars and not scalars[m.name].zero]
            values = [float(scalars[m.name].factor) for m in live]
            if len(set(values)) < 2:
                if live and not keep:
                    g |= {m.name: scalars[live[0].name].factor for m in group}
                    owner |= {m.name: live[0].name for m in group}
                continue
            ratio = max(values) / min(values)
            if keep:
                decisions.append(Decision(stack.name, i, "keep", ratio, "as asked"))
                continue
            pair = _pair(plan, scalars, live)
            if plan.options.unify != "fold":
                how, why = plan.options.unify, "as asked"
            elif pair is None:
                how, why = "rescale", "not a gate and an up"
            else:
                why = refusal(checkpoint, inner_norms, read, pair, plan.options)
                how = "rescale" if why else "fold"
            decisions.append(Decision(stack.name, i, how, ratio, why))
            if how == "fold" and pair and pair.down:
                scaled |= {t.name: f for t, f in changes(pair.up, pair.down, pair.ratio)}
                folds[pair.down.name] = pair.ratio
                first = pair.gate
            else:
                first = max(live, key=lambda m: float(scalars[m.name].factor))
                common = float(scalars[first.name].factor)
                others = [m for m in live if float(scalars[m.name].factor) != common]
                multiplier |= {m.name: float(g[m.name]) / common for m in others}
            g |= {m.name: scalars[first.name].factor for m in group}
            owner |= {m.name: first.name for m in group}
    g |= {name: folded(g[name], ratio) for name, ratio in folds.items() if name in g}
    _allowed(plan, decisions)
    used = plan.options.form or plan.options.layout.inputs
    warnings = () if used else tuple(_warnings(modules, scalars))
    return Unified(scalars, g, multiplier, scaled, folds, tuple(decisions), warnings, owner)


def _pair(plan: Plan, scalars: Mapping[str, Scalars], live: list[Module]) -> Pair | None:
    """The members as a gate and an up with their down; None if they are something else."""
    if [address(m.name).projection for m in live] != ["gate", "up"]:
        return None
    gate, up = live
    down = plan.modules.get(down_of(up.name))
    ratio = float(scalars[up.name].factor) / float(scalars[gate.name].factor)
    own = scalars.get(down.name) if down else None
    return Pair(gate, up, down, ratio, own.factor if own else None)


def _allowed(plan: Plan, decisions: list[Decision]) -> None:
    if not decisions:
        return
    first, more = decisions[0], len(decisions) - 1
    place = f"{first.stack}, group {first.group}" + (f" (and {more} more)" if more else "")
    if plan.options.unify == "none":
        raise LossError(
            f"{place}: global scales differ {first.ratio:.4g}-fold, and --unify is none; "
            "use --unify fold or --unify rescale"
        )
    rounded = [d for d in decisions if d.how == "rescale"]
    if plan.options.exact and rounded:
        raise LossError(
            f"{rounded[0].stack}, group {rounded[0].group}: global scales differ "
            f"{rounded[0].ratio:.4g}-fold and would be rescaled ({rounded[0].why}), which is not "
            f"exact; {len(rounded)} groups in all; without --exact it is done and counted"
        )


def _warnings(modules: list[Module], scalars: Mapping[str, Scalars]) -> Iterator[str]:
    """Input scales that no runtime could use; Marlin does not need them."""
    missing = [m.name for m in modules if not has_input_scale(m)]
    if missing and len(missing) < len(modules):
        yield f"{len(missing)} modules have no input scale, {missing[0]} among them (not used here)"
    given = {name: float(s.input) for name, s in scalars.items() if s.input is not None}
    wrong = [name for name, value in given.items() if not 0 < value < math.inf]
    if wrong:
        yield (
            f"{len(wrong)} input scales are not finite and > 0, {wrong[0]}'s is "
            f"{given[wrong[0]]:g} (not used here)"
        )
