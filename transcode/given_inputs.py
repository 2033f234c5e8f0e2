"""The activations' scales that a kernel for 4-bit activations wants beside the weights.

A factor for every matrix, or joined ones: the largest of what is given by name (`--input-scale`)
or of the source's; where the source has none at all, the one for all (1.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from transcode.errors import FormatError, LayoutError
from transcode.inputs import input_factor
from transcode.job import Job
from transcode.module import Module
from transcode.packed_outputs import has_input_scale
from transcode.stacks import Stack


def input_factors(job: Job, stack: Stack) -> Tensor:
    """`[E]` float32: each expert's own, or the largest of all where the kernel takes one.

    FormatError for one that is no positive number, or where some have one and others do not;
    LayoutError where none is wanted (`--input-scale none`) but the kernel does not do without.
    """
    layout, asked = job.plan.options.layout, job.plan.options.recipe.inputs
    if asked.every is None:
        raise LayoutError(
            f"{stack.name}: {layout.name} quantises activations, --input-scale none wants 16-bit "
            "ones: marlin layouts have those"
        )
    if without(stack) == stack.modules and not any(asked.by_name(m.name) for m in stack.modules):
        return torch.full((len(stack.groups),), asked.every)
    found = torch.stack([_largest(job, group) for group in stack.groups])
    return found if layout.inputs == "each" else found.max().expand(len(found)).clone()


def without(stack: Stack) -> list[Module]:
    """The modules that the source gives no input scale."""
    return [m for m in stack.modules if not has_input_scale(m)]


def _largest(job: Job, group: Sequence[Module]) -> Tensor:
    return torch.stack([*_factors(job, group)]).max()


def _factors(job: Job, group: Sequence[Module]) -> Iterator[Tensor]:
    for module in group:
        named = job.plan.options.recipe.inputs.by_name(module.name)
        if named is not None:
            yield torch.tensor(named)
            continue
        if not has_input_scale(module):
            raise FormatError(
                f"{module.name} has no input scale, others of its layer have one: "
                "`transcode check --fix` gives it theirs"
            )
        factor = input_factor(module, job.read).reshape(())
        if not 0 < factor < math.inf:
            raise FormatError(
                f"{module.name}: its input scale is a factor of {float(factor):g}, wanted a finite "
                "number > 0: `transcode check --fix` gives it its layer's largest"
            )
        yield factor
