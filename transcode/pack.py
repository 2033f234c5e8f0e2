"""One output tensor in the order of the file, each packed piece unpacked again as proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode.checkpoint import Reader
from transcode.errors import LayoutError, Mismatch
from transcode.fold import scaled
from transcode.job import Job
from transcode.module import Module
from transcode.plan import Kind, Output, has_input_scale
from transcode.rewritten import made
from transcode.settle import prepare
from transcode.stacks import Stack
from transcode.unify import Unified


def pieces(output: Output, job: Job) -> Iterator[Tensor]:
    """The tensor in pieces that follow each other: one for each expert, or the whole."""
    stack = output.stack
    if output.recipe:
        yield from made(output, job)
        return
    if stack is None:
        yield copied(output, job)
        return
    members = range(len(stack.groups[0])) if output.member is None else (output.member,)
    if output.kind in _PER_GROUP:
        for e in range(len(stack.groups)):
            yield torch.cat([_PER_GROUP[output.kind](job, stack, e, i) for i in members], -1)
    else:
        whole = _SCALARS[output.kind](job, stack)
        yield (whole if output.member is None else whole[0, output.member]).reshape(output.shape)


def raw_bytes(value: Tensor) -> Tensor:
    """A tensor's bytes in storage order, 1-D uint8."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def copied(output: Output, job: Job) -> Tensor:
    """A tensor that is carried; scaled where a fold moves a factor into it."""
    assert output.source is not None
    value = job.read.tensor(output.source)
    factor = job.unified.scaled.get(output.source.name)
    return value if factor is None else scaled(value, output.source, factor)


def padded_codes(job: Job, stack: Stack, e: int, i: int) -> Tensor:
    """`[N, K/2]` uint8 with the stack's zero padding."""
    module = stack.groups[e][i]
    codes = job.read.tensor(module.codes)
    return _padded(codes, stack.padded.rows[i], stack.padded.k // 2)


def padded_scales(job: Job, stack: Stack, e: int, i: int) -> Tensor:
    """`[N, K/16]` float8_e4m3fn as prepared, with the stack's zero padding."""
    scales = prepare(stack.groups[e][i], job.unified, job.read)
    raw = _padded(scales.view(torch.uint8), stack.padded.rows[i], stack.padded.k // 16)
    return raw.view(scales.dtype)


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    if t.shape == (rows, columns):
        return t
    return pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))


def _weight(job: Job, stack: Stack, e: int, i: int) -> Tensor:
    codes = padded_codes(job, stack, e, i).to(job.device)
    layout = job.plan.options.layout
    words = layout.pack_codes(codes)
    if not torch.equal(layout.unpack_codes(words), codes):
        raise Mismatch(f"{stack.groups[e][i].name}: the codes do not come back from {layout.name}")
    return words.cpu()


def _scale(job: Job, stack: Stack, e: int, i: int) -> Tensor:
    scales = padded_scales(job, stack, e, i).to(job.device)
    layout, lift = job.plan.options.layout, float(job.settled[stack.name].lift[e])
    stored = layout.pack_scales(scales, lift)
    want = torch.where(layout.flushed(scales, lift), 0, scales.view(torch.uint8))
    if not torch.equal(layout.unpack_scales(stored, lift).view(torch.uint8), want):
        raise Mismatch(f"{stack.groups[e][i].name}: the scales do not come back from {layout.name}")
    return stored.cpu()


def _bias(job: Job, stack: Stack, e: int, i: int) -> Tensor:
    value, _ = bias(stack.groups[e][i], job.plan.options.dtype, job.unified, job.read)
    value = pad(value, (0, stack.padded.rows[i] - len(value)))
    layout = job.plan.options.layout
    stored = layout.pack_bias(value)
    if not torch.equal(layout.unpack_bias(stored).view(torch.int16), value.view(torch.int16)):
        raise Mismatch(f"{stack.groups[e][i].name}: the bias does not come back from {layout.name}")
    return stored


def bias(module: Module, dtype: str, unified: Unified, read: Reader) -> tuple[Tensor, bool]:
    """`[N]` in the activation dtype, and whether that is exact; LayoutError if it overflows."""
    info = module.leaf("bias")
    source = scaled(read.tensor(info), info, unified.scaled.get(info.name, 1.0))
    value = source.to(getattr(torch, dtype))
    if not torch.isfinite(value).all():
        raise LayoutError(f"{info}: has values that {dtype} cannot hold")
    return value, torch.equal(value.double(), source.double())


def _global(job: Job, stack: Stack) -> Tensor:
    settled, options = job.settled[stack.name], job.plan.options
    g = options.layout.pack_global(settled.g, settled.lift, options.dtype)
    return g if stack.fused else g[:, None].expand(-1, len(stack.groups[0]))


def _source_global(job: Job, stack: Stack) -> Tensor:
    return _of_each(stack, lambda m: job.unified.scalars[m.name].stored)


def _source_input(job: Job, stack: Stack) -> Tensor:
    """NaN stands for an input scale that the source does not have."""
    nothing = torch.tensor(float("nan"))
    return _of_each(
        stack, lambda m: job.unified.scalars[m.name].input if has_input_scale(m) else nothing
    )


def _of_each(stack: Stack, scalar: Callable[[Module], Tensor | None]) -> Tensor:
    values = [[scalar(module) for module in group] for group in stack.groups]
    return torch.stack([torch.stack([v for v in row if v is not None]) for row in values])


_PER_GROUP: dict[Kind, Callable[[Job, Stack, int, int], Tensor]] = {
    Kind.WEIGHT: _weight,
    Kind.SCALE: _scale,
    Kind.BIAS: _bias,
}
_SCALARS: dict[Kind, Callable[[Job, Stack], Tensor]] = {
    Kind.GLOBAL: _global,
    Kind.SOURCE_GLOBAL: _source_global,
    Kind.SOURCE_INPUT: _source_input,
}
