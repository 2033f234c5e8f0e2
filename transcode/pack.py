"""One output tensor in the order of the file, each packed piece unpacked again as proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode.checkpoint import DTYPES, Reader
from transcode.errors import FormatError, LayoutError, Mismatch
from transcode.fold import scaled
from transcode.given_inputs import input_factors
from transcode.job import Job
from transcode.module import Module
from transcode.output import Kind, Output
from transcode.packed_outputs import has_input_scale
from transcode.producer import Role
from transcode.quant import powers
from transcode.rewritten import made
from transcode.settle import prepare
from transcode.spec import Factors, Parts
from transcode.stacks import Stack
from transcode.unify import Unified


def pieces(output: Output, job: Job) -> Iterator[Tensor]:
    """The tensor in pieces that follow each other: one for each expert, or the whole."""
    stack = output.stack
    if output.recipe:
        yield from made(output, job)
    elif stack is None:
        yield copied(output, job)
    elif output.kind is Kind.GLOBAL:
        yield _global(job, stack, output.member)
    elif output.kind is Kind.SCALAR:
        yield _scalar(job, stack, output)
    elif output.kind is Kind.INPUT:
        yield input_factors(job, stack) if stack.fused else input_factors(job, stack)[0]
    else:
        for e in range(len(stack.groups)):
            yield _PIECES[output.kind](job, output, e)


def members(output: Output) -> range:
    """The members of a group that an output holds: one, or all."""
    assert output.stack is not None
    if output.member is not None:
        return range(output.member, output.member + 1)
    return range(len(output.stack.groups[0]))


def _members(output: Output, e: int) -> list[Module]:
    assert output.stack is not None
    return [output.stack.groups[e][i] for i in members(output)]


def raw_bytes(value: Tensor) -> Tensor:
    """A tensor's bytes in storage order, 1-D uint8."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def copied(output: Output, job: Job) -> Tensor:
    """A tensor that is carried; scaled where a fold moves a factor into it."""
    assert output.source is not None
    value = job.read.tensor(output.source)
    factor = job.unified.scaled.get(output.source.name)
    return value if factor is None else scaled(value, output.source, factor)


def _stack(output: Output) -> Stack:
    assert output.stack is not None
    return output.stack


def _parts(job: Job, output: Output) -> Parts:
    return _stack(output).stored(job.plan.options.layout)


def _rectangle(t: Tensor) -> tuple[int, int]:
    return t.shape[0], t.shape[1]


def padded_codes(job: Job, output: Output, e: int) -> Tensor:
    """Members' codes as rows of one matrix, `[N, K/2]` or `[N, K]` uint8, with zero padding.

    FormatError for codes that are NaN, which the kernel would take for numbers.
    """
    stack = _stack(output)
    columns = stack.padded.k * job.plan.options.layout.codes.bits // 8
    parts = list[Tensor]()
    for i in members(output):
        module = stack.groups[e][i]
        codes = job.read.tensor(module.codes)
        raw = codes.view(torch.uint8)
        if codes.dtype is torch.float8_e4m3fn and ((raw & 0x7F) == 0x7F).any():
            raise FormatError(f"{module.codes}: has codes that are NaN")
        parts.append(_padded(raw, stack.padded.rows[i], columns))
    return stack.join(parts)


def padded_scales(job: Job, output: Output, e: int) -> Tensor:
    """Members' block scales as prepared, `[R, G]`, with padding."""
    stack, parts = _stack(output), list[Tensor]()
    for i in members(output):
        scales = prepare(stack.groups[e][i], job.unified, job.plan.options, job.read)
        raw = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        layout = job.plan.options.layout
        rows, fill = stack.scale_rows(i, layout), layout.scales.fill
        parts.append(_padded(raw, rows, stack.scales, fill).view(scales.dtype))
    return parts[0] if stack.one_scale(job.plan.options.layout) else stack.join(parts)


def _padded(t: Tensor, rows: int, columns: int, fill: int = 0) -> Tensor:
    if t.shape == (rows, columns):
        return t
    return pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]), value=fill)


def _weight(job: Job, output: Output, e: int) -> Tensor:
    codes = padded_codes(job, output, e).to(job.device)
    stored = _parts(job, output).codes
    words = stored.pack(codes)
    if not torch.equal(stored.unpack(words), codes):
        raise _mismatch(job, output, e, "codes do")
    return words.cpu()


def _scale(job: Job, output: Output, e: int) -> Tensor:
    scales = padded_scales(job, output, e).to(job.device)
    how, lift = _parts(job, output).scales, float(job.settled[_stack(output).name].lift[e])
    stored = how.pack(scales, lift)
    want = scales
    if not how.kept:
        lost = how.flushed(scales, lift, job.plan.options.dtype)
        want = torch.where(lost, 0, scales.view(torch.uint8)).view(scales.dtype)
    if not torch.equal(raw_bytes(how.unpack(stored, lift, _rectangle(scales))), raw_bytes(want)):
        raise _mismatch(job, output, e, "scales do")
    return stored.cpu()


def _bias(job: Job, output: Output, e: int) -> Tensor:
    stack, parts = _stack(output), list[Tensor]()
    for i in members(output):
        module = stack.groups[e][i]
        value, _ = bias(module, job.plan.options.dtype, job.unified, job.read)
        parts.append(pad(value, (0, stack.padded.rows[i] - len(value))))
    value, how = stack.join(parts), _parts(job, output).bias
    assert how is not None
    stored = how.pack(value)
    if not torch.equal(raw_bytes(how.unpack(stored).to(value.dtype)), raw_bytes(value)):
        raise _mismatch(job, output, e, "bias does")
    return stored


def _mismatch(job: Job, output: Output, e: int, what: str) -> Mismatch:
    names = " and ".join(module.name for module in _members(output, e))
    return Mismatch(f"{names}: the {what} not come back from {job.plan.options.layout.name}")


def bias(module: Module, dtype: str, unified: Unified, read: Reader) -> tuple[Tensor, bool]:
    """`[N]` in the activation dtype, and whether that is exact; LayoutError if it overflows."""
    info = module.leaf("bias")
    source = scaled(read.tensor(info), info, unified.scaled.get(info.name, 1.0))
    value = source.to(getattr(torch, dtype))
    if not torch.isfinite(value).all():
        raise LayoutError(f"{info}: has values that {dtype} cannot hold")
    return value, torch.equal(value.double(), source.double())


def _global(job: Job, stack: Stack, member: int | None) -> Tensor:
    settled, options = job.settled[stack.name], job.plan.options
    assert options.layout.factor is not None
    lift = settled.lift.reshape(-1, *[1] * (settled.g.dim() - 1))
    g = options.layout.factor.pack(settled.g, lift, options.dtype)
    return g if member is None else g[0]


def _scalar(job: Job, stack: Stack, output: Output) -> Tensor:
    """What the runtime works out of the factors that are stored."""
    g, a, a2 = job.settled[stack.name].g, input_factors(job, stack), None
    if stack.fused == "w13":
        second = [s for s in job.plan.stacks if s.name == f"{stack.prefix}.w2"]
        a2 = input_factors(job, second[0]) if second else None
    name = output.name.rpartition(".")[2]
    make = next(s.make for s in job.plan.options.layout.scalars if s.name == name)
    value = make(Factors(g, a, a2))
    return value if stack.fused else value[0]


def _source_global(job: Job, output: Output, e: int) -> Tensor:
    scalars = job.unified.scalars
    return torch.stack([scalars[m.name].stored for m in _members(output, e)])


def _source_scale(job: Job, output: Output, e: int) -> Tensor:
    """FP8's scales word for word; float32 where a layer's experts have several dtypes."""
    values = [job.read.tensor(m.scales) for m in _members(output, e)]
    if output.dtype == "F32":
        values = [powers(v) if v.element_size() == 1 else v.float() for v in values]
    return torch.cat([raw_bytes(value) for value in values])


def _source_input(job: Job, output: Output, e: int) -> Tensor:
    """NaN stands for an input scale that the source does not have."""
    dtype = DTYPES[output.dtype]
    nothing = torch.tensor(float("nan"), dtype=dtype)
    return torch.stack(
        [
            job.read.tensor(m.parts[Role.INPUT]).reshape(()).to(dtype)
            if has_input_scale(m)
            else nothing
            for m in _members(output, e)
        ]
    )


_PIECES: dict[Kind, Callable[[Job, Output, int], Tensor]] = {
    Kind.WEIGHT: _weight,
    Kind.SCALE: _scale,
    Kind.BIAS: _bias,
    Kind.SOURCE_GLOBAL: _source_global,
    Kind.SOURCE_SCALE: _source_scale,
    Kind.SOURCE_INPUT: _source_input,
}
