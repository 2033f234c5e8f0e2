"""What is decided of a rewriting before its first byte: scalars, bad scales, input scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from tqdm import tqdm

from transcode.checkpoint import Checkpoint, Reader
from transcode.chosen import rows_of
from transcode.errors import FormatError, LossError
from transcode.inputs import input_factor
from transcode.job import Job
from transcode.module import Module
from transcode.names import natural
from transcode.origins import origins
from transcode.output import Output
from transcode.outputs import KEPT
from transcode.plan import Plan
from transcode.producer import E8M0, Form, Role
from transcode.quant import FP8
from transcode.recoding import judge
from transcode.rewritten import loss, made, turns, value
from transcode.sayable import layers_of, missing
from transcode.settle_e4m3 import NAN, prepare
from transcode.unify import Unified, unify
from transcode.unify_fp8 import one_scale, unify_fp8
from transcode.valuecast import require_meant


def decide(checkpoint: Checkpoint, plan: Plan, read: Reader, device: torch.device) -> Job:
    """Read scalars, NVFP4's block scales and all that is cast; every refusal comes from here."""
    form = plan.options.form
    assert form is not None
    losses = judge(plan.modules, plan.options, read)
    unified = unify(checkpoint, plan, read)
    quantised = {n: m for n, m in plan.modules.items() if m.format is not None}
    if plan.options.unify != "keep" and not form.codes_stay:
        rows = rows_of(checkpoint, quantised, form)
        eights = [row for row in rows if all(map(one_scale, row)) and len(row) > 1]
        unified = unify_fp8(checkpoint, plan, eights, unified, read)
    if not form.producer.verbatim:
        _sound(quantised, read)
    cleaned = frozenset(_cleaned(quantised, unified, form, read))
    filled = dict(_filled(quantised, form, read))
    job = Job(
        plan, unified, {}, read, device, (), origins(checkpoint), cleaned, filled, recoded=losses
    )
    for output in plan.outputs():
        recipe = output.recipe
        if recipe and recipe.leaf and recipe.role in KEPT and not form.producer.verbatim:
            _finite(output, job)
        if recipe and recipe.leaf and recipe.role in (Role.SCALES, Role.GLOBAL, Role.INPUT):
            parts = (m.parts.get(recipe.role) for m in recipe.modules)
            cast = any(part and part.dtype != output.dtype for part in parts)
            if cast or (recipe.fusion and recipe.fusion.one_scalar and not output.shape):
                for _ in made(output, job):  # raises where the target cannot hold the value
                    pass
    if plan.options.exact:
        _exact(job)
    return job


def _sound(quantised: Mapping[str, Module], read: Reader) -> None:
    """Raise FormatError for an FP8 scale that is NaN, infinite or negative, and for exponents that
    were cast by value."""
    for module in (m.was or m for m in quantised.values()):
        if Role.SCALES not in module.parts or Role.GLOBAL in module.parts:
            continue
        scales = read.tensor(module.scales)
        require_meant(module, scales, read)
        if module.encoding not in FP8 or module.scales.dtype in E8M0:
            continue
        scales = scales.float()
        if not (scales.isfinite() & (scales >= 0)).all():
            bad = scales[~(scales.isfinite() & (scales >= 0))].flatten()[0]
            raise FormatError(f"{module.scales.name} holds {bad:g}, wanted finite numbers >= 0")


def _finite(output: Output, job: Job) -> None:
    """Raise FormatError for a scalar that has no finite number in the target's sense."""
    recipe = output.recipe
    assert recipe is not None
    for module in recipe.modules:
        if not torch.isfinite(value(recipe, module, "F32", job)):
            raise FormatError(f"{module.name}: its {recipe.role} has no finite reciprocal")


def _exact(job: Job) -> None:
    """Raise LossError for the first scalar or decoded weight that would be rounded."""
    if name := next(iter(job.unified.requantised), ""):
        raise LossError(f"{name}: its codes would be rounded again, to one scale with others'")
    for output in job.plan.outputs():
        recipe = output.recipe
        if loss(output, job):
            raise LossError(f"{output.name} is not exact in {output.dtype}")
        if recipe is None or recipe.leaf is None or recipe.role not in KEPT:
            continue
        for module in recipe.modules:
            if turns(module, recipe.role, recipe.leaf, job):
                stored = job.read.tensor(module.parts[recipe.role]).float()
                if 1.0 / value(recipe, module, "F32", job) != stored:
                    raise LossError(f"{output.name} is not the exact reciprocal of the source's")


def _cleaned(
    quantised: Mapping[str, Module], unified: Unified, form: Form, read: Reader
) -> Iterator[str]:
    """Modules whose scales are not written as they are; FormatError for meaningless ones."""
    names = [n for n in unified.scalars if not form.producer.verbatim]
    for name in tqdm(names, desc="scales", unit="matrix", disable=None, leave=False):
        module = quantised[name]
        if read.tensor(module.scales).view(torch.uint8).max() >= NAN:
            prepare(module, unified, read)
            yield name


def _filled(
    quantised: Mapping[str, Module], form: Form, read: Reader
) -> Iterator[tuple[str, Tensor]]:
    """Input scales for those without a valid one: the largest valid one of the layer's experts."""
    if form.producer.verbatim:
        return
    wanting = set(missing(quantised, form))
    static = {
        n: m
        for n, m in quantised.items()
        if Role.INPUT in m.parts and form.quantises_inputs(m.encoding)
    }
    factors = {name: input_factor(m, read) for name, m in static.items()}
    wanting |= {name for name, f in factors.items() if f.numel() != 1 or not 0 < f < math.inf}
    if not wanting:
        return
    first = min(wanting, key=natural)
    if not form.fill_input:
        value = float(factors[first].flatten()[0])
        raise FormatError(
            f"{static[first].parts[Role.INPUT].name} is a factor of {value:g}, wanted a finite "
            f"number > 0 ({len(wanting)} in all); --fill-input-scale takes the largest of its "
            "layer's experts"
        )
    for members in (row for layer in layers_of(quantised) for row in layer):
        row = [m.name for m in members]
        valid = [factors[n] for n in row if n in factors and n not in wanting]
        for name in wanting.intersection(row) if valid else ():
            yield name, torch.stack(valid).max()
            wanting -= {name}
    if wanting:
        raise FormatError(
            f"{min(wanting, key=natural)}: no valid input scale to take another's for"
        )
