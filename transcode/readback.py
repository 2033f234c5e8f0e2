"""A rewriting read back with the readers, before it becomes visible.

Every module must be there in its encoding and shape; whatever is no plain copy of bytes must have
the source's codes and scales, taken apart again by another way than it was put together. What was
unified is judged by what it means (unlike.py), decoded weights too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from transcode.checkpoint import Checkpoint, reader
from transcode.chosen import apart
from transcode.errors import Mismatch
from transcode.header import TensorInfo
from transcode.job import Job
from transcode.module import Module, Recognised
from transcode.names import address
from transcode.producer import Role
from transcode.quant import Encoding, powers
from transcode.recognise import recognise
from transcode.rewritten import direct
from transcode.told import standard
from transcode.unlike import unlike

CLOSE = 2.0**-22
"""Two float32 roundings: a scalar turned over and back."""


def read_back(place: Path, job: Job) -> None:
    """Raise Mismatch for the first module that does not mean what the source's means."""
    form = job.plan.options.form
    assert form is not None
    written = Checkpoint.open(place)
    found = recognise(written)
    if found.problems:
        raise Mismatch(f"what was written is not sound: {found.problems[0]}")
    remade = {
        (module.name, output.recipe.role)
        for output in job.plan.outputs()
        if output.recipe and direct(output, job) is None
        for module in output.recipe.modules
    }
    with reader() as read:
        for name, module in job.plan.modules.items():
            if (
                module.encoding in (Encoding.UNQUANTISED, Encoding.INT4)
                or not form.producer.formats
            ):
                continue
            again = _found(module, found.modules)
            if again is None or (again.encoding, again.shape) != (module.encoding, module.shape):
                what = f"{again.encoding} {list(again.shape)}" if again else "missing"
                raise Mismatch(
                    f"{name}: {what} in the output, wanted {module.encoding} {list(module.shape)}"
                )
            roles = [role for role in Role if (name, role) in remade]
            _same(module, again, roles, job, read.tensor)
    if wrong := next(changed(job, written, found), ""):
        raise Mismatch(wrong)


def changed(job: Job, written: Checkpoint, found: Recognised) -> Iterator[str]:
    """What `--unify` changed and is not what the source computes (unlike.py)."""
    modules = {**apart(written, found.modules), **found.modules}
    return unlike(job, lambda module: _found(module, modules))


def _found(module: Module, modules: Mapping[str, Module]) -> Module | None:
    """The output's module, whatever it is called there."""
    return modules.get(standard(module.name)) or _by_place(modules, module)


def _by_place(modules: Mapping[str, Module], module: Module) -> Module | None:
    """Stacked experts whose projections the readers call otherwise."""
    where = address(module.name)
    if where.expert is None:
        return None
    for leaf in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"):
        other = modules.get(f"{where.parent}.{where.expert}.{leaf}")
        if other and address(other.name).projection == where.projection:
            return other
    return None


def _same(
    module: Module,
    again: Module,
    roles: Sequence[Role],
    job: Job,
    read: Callable[[TensorInfo], Tensor],
) -> None:
    """Compare the parts of these roles."""
    if Role.CODES in roles and module.name not in job.unified.requantised:
        ours, theirs = job.read.tensor(module.codes), read(again.codes)
        if not torch.equal(_bytes(ours), _bytes(theirs)):
            raise Mismatch(f"{module.name}: the codes do not come back")
    name = module.name
    changed = name in {**job.unified.multiplier, **job.unified.own} or name in job.cleaned
    scalars = job.unified.scalars.get(name)
    if changed or (scalars and scalars.zero) or module.scales.name in job.unified.scaled:
        return
    if Role.SCALES in roles:
        ours, theirs = job.read.tensor(module.scales), read(again.scales)
        if not torch.equal(_values(ours), _values(theirs)):
            raise Mismatch(f"{module.name}: the scales do not come back")
    if Role.GLOBAL in roles:
        factor = again.written.factor(read(again.global_scale)).double()
        wanted = job.unified.g[name].double()
        if abs(float(factor - wanted)) > CLOSE * float(wanted):
            raise Mismatch(f"{name}: global scale {float(factor):.9g}, wanted {float(wanted):.9g}")


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def _values(scales: Tensor) -> Tensor:
    """Scales as numbers that compare: E8M0 by its byte's power, the rest as they are."""
    e8m0 = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return (powers(scales) if e8m0 else scales).double().nan_to_num(-1.0)
