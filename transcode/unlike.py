"""What `--unify` changed, judged by what it means: source and output decoded as they stand.

`convert` and `verify` make the output by the same rules, so a wrong rule would prove itself. Here
no factor of `unify` is asked: how much larger a matrix has become is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from transcode.checkpoint import Reader
from transcode.inputs import input_factor
from transcode.job import Job
from transcode.module import Module
from transcode.names import address, down_of
from transcode.producer import Role
from transcode.quant import QuantTensor
from transcode.recode import source_of
from transcode.requantise import meaning

ROWS = 128
"""How many rows of a matrix are looked at: a whole tile. Scalars are wrong in all or in none."""

CLOSE, BF16 = 2.0**-20, 2.0**-8
"""Relative errors: a scalar multiplied, turned over and back in float32; a value in BF16."""

E4M3, SUBNORMAL = 2.0**-4, 2.0**-10
"""Rounding to E4M3: of a normal value, relative, and of a subnormal one."""

Find = Callable[[Module], Module | None]


@dataclass(frozen=True)
class Compared:
    """How many times as large a matrix has become (None: zeros, any number of times), and what is
    left then, of its norm."""

    times: float | None
    rest: float

    def same(self, close: float) -> bool:
        """Whether it is the source's up to `times`."""
        return self.rest <= close


def unlike(job: Job, find: Find) -> Iterator[str]:
    """What does not compute what the source does, one line each.

    find: the module of the output for one of the plan's, None if it is not there.
    """
    form = job.plan.options.form
    assert form is not None
    close = CLOSE if form.producer.formats else BF16
    ups = {down_of(name): m for name, m in job.plan.modules.items()
           if address(name).projection == "up"}  # fmt: skip
    gates = {_mlp(m): m for m in job.plan.modules.values() if address(m.name).projection == "gate"}
    for name in job.unified.folds:
        up, down = ups[name], job.plan.modules[name]
        yield from _folded(job, find, (gates[_mlp(up)], up, down), close)
    for name in {**job.unified.multiplier, **job.unified.requantised}:
        yield from _rounded(job, find, job.plan.modules[name], close)


def _mlp(module: Module) -> tuple[str, int | None]:
    where = address(module.name)
    return where.parent, where.expert


def _folded(
    job: Job, find: Find, mlp: tuple[Module, Module, Module], close: float
) -> Iterator[str]:
    """gate stays, what up has lost down has won, and biases and input scales go with them."""
    made = [find(module) for module in mlp]
    for module, other in zip(mlp, made, strict=True):
        if other is None:
            yield f"{module.name}: missing in the output"
            return
    pairs = [(module, other) for module, other in zip(mlp, made, strict=True) if other]
    gate, up, down = (_compared(a, b, job.read) for a, b in pairs)
    for one, (module, _) in zip((gate, up, down), pairs, strict=True):
        if not one.same(close):
            yield f"{module.name}: no multiple of the source's, {one.rest:.2%} are left"
    if gate.times is not None and abs(gate.times - 1) > close:
        yield f"{mlp[0].name}: {gate.times:.6g} times the source's, wanted the same"
    if up.times is None or down.times is None:
        return  # nothing comes out
    if abs(up.times * down.times - 1) > close:
        yield (
            f"{mlp[2].name}: up and down together are {up.times * down.times:.6g} times the "
            "source's, wanted the same"
        )
    yield from _beside(job, pairs[1], Role.BIAS, up.times, close)
    yield from _beside(job, pairs[2], Role.INPUT, up.times, close)


def _beside(
    job: Job, pair: tuple[Module, Module], role: Role, times: float, close: float
) -> Iterator[str]:
    """Up's bias, or the scale of down's activations, which is what up gives."""
    form = job.plan.options.form
    module, made = pair
    if module.name in job.filled or (form and form.fused):
        return
    if role is Role.BIAS and all("bias" in m.leaves for m in pair):
        theirs, ours = (job.read.tensor(m.leaf("bias")).double() for m in pair)
    elif role is Role.INPUT and all(role in m.parts for m in pair):
        theirs, ours = (input_factor(m, job.read).double() for m in pair)
    else:
        return
    if float((ours - theirs * times).norm()) > close * float(ours.norm()):
        yield f"{made.name}: its {role} did not go with a factor of {times:.6g}"


def _rounded(job: Job, find: Find, module: Module, close: float) -> Iterator[str]:
    """Rounded to one scale: no value further off than E4M3 rounds, a scale or a code."""
    other = find(module)
    if other is None:
        yield f"{module.name}: missing in the output"
        return
    theirs, ours = (_some(m, job.read) for m in (module, other))
    if module.name in job.unified.multiplier:
        least = 6 * SUBNORMAL * float(job.unified.g[module.name])
    else:
        least = SUBNORMAL * float(job.unified.own[module.name])
    bound = theirs.abs() * (E4M3 + 2 * close) + least * (1 + 2 * close)
    if bool(((ours - theirs).abs() > bound).any()):
        yield f"{module.name}: rounded by more than to one scale"


def _compared(source: Module, made: Module, read: Reader) -> Compared:
    """Both float64 `[ROWS, K]`; a matrix of zeros has to be one still."""
    theirs, ours = _some(source, read), _some(made, read)
    square, norm = float((theirs * theirs).sum()), float(ours.norm())
    if not square or not norm:
        return Compared(None, float(bool(square) != bool(norm)))
    times = float((ours * theirs).sum()) / square
    return Compared(times, float((ours - times * theirs).norm()) / norm)


def _some(module: Module, read: Reader) -> Tensor:
    """What the first rows mean, float64."""
    source = source_of(module, read)
    some = source.rows(0, ROWS) if isinstance(source, QuantTensor) else source[:ROWS]
    return meaning(some).double().nan_to_num(0.0)
