"""FP8's scales of tensors, rows and tiles, as a layout wants them (`Scales.of`): one for each row
and group of columns in the activations' dtype; as the source has them, in float32; or one for each
row and group as an E8M0 byte, for powers of two.

Only the first rounds, to nearest even: at most 2^-8 (bfloat16) or 2^-11 (float16) of a value that
is normal afterwards, at most 2^-25 absolute in float16 where it is not; one that becomes zero over
codes that are not is refused. The source's own scales are kept beside them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import FormatError, LayoutError, LossError
from transcode.module import Module
from transcode.quant import Encoding, powers
from transcode.settled import Settled, over_codes, plain
from transcode.stacks import Options, Stack
from transcode.valuecast import require_meant


def prepare(module: Module, options: Options, read: Reader) -> Tensor:
    """`[N, G]` in the activations' dtype, or E8M0 in uint8; or the source's `[R, G]` in float32, R
    rows of blocks, N rows, or 1. G is 1, or K/128 for tiles."""
    value = _values(module, read)
    match options.layout.scales.of:
        case "own":
            value = value.clamp(min=options.layout.scales.least)
            return value.reshape(-1, 1) if module.block is None else value
        case "powers":
            return expanded(module, exponents(module, value))
    return expanded(module, value.to(getattr(torch, options.dtype)))


def exponents(module: Module, value: Tensor) -> Tensor:
    """Powers of two as E8M0 bytes, uint8; LossError for any other number."""
    bits = value.contiguous().view(torch.int32)
    if ((bits & 0x807FFFFF) != 0).any():
        bad = value[(bits & 0x807FFFFF) != 0][0].item()
        raise LossError(
            f"{module.scales}: {bad:.9g} is no power of two, and a scale that is rounded alone "
            "makes weights wrong: `--to deepseek-fp8-ue8m0 --lossy` first, which rounds codes and "
            "scales together (about 2.7 %)"
        )
    return (bits >> 23).to(torch.uint8)


def expanded(module: Module, value: Tensor) -> Tensor:
    """Scales in their logical shape as `[N, G]`."""
    n = module.shape[0]
    if module.encoding is Encoding.FP8_TENSOR:
        return value.reshape(1, 1).expand(n, 1)
    if module.encoding is Encoding.FP8_CHANNEL:
        return value.reshape(n, 1)
    assert module.block is not None
    return value.repeat_interleave(module.block[0], 0)[:n]


def _values(module: Module, read: Reader) -> Tensor:
    """The scales as the source has them, float32 in their logical shape."""
    stored = read.tensor(module.scales)
    return powers(stored) if stored.element_size() == 1 else stored.float()


def settle(stack: Stack, options: Options, read: Reader) -> Settled:
    """Read a stack's scales; FormatError for one that is no number, LayoutError where one
    overflows, LossError with `--exact` where one is rounded."""
    scales = options.layout.scales
    lift = scales.lift(1.0, options.dtype)
    dtype: torch.dtype = getattr(torch, options.dtype) if scales.of == "rows" else torch.float32
    if stack.fused and stack.one_scale(options.layout):
        _require_one(stack, read)
    rounded = fallen = 0
    worst = 0.0
    for module in (m for group in stack.groups for m in group):
        source = _values(module, read)
        value = source.to(dtype)
        require_meant(module, read.tensor(module.scales), read)
        if not (torch.isfinite(source) & (source >= 0)).all():
            bad = source[~(torch.isfinite(source) & (source >= 0))][0].item()
            raise FormatError(f"{module.scales}: has {bad:g}, wanted finite scales >= 0")
        if scales.overflows(value, lift).any():
            raise LayoutError(
                f"{module.scales}: {source.max().item():g} times {lift:g} has no finite "
                f"{options.dtype}, which {options.layout.name} stores"
            )
        if scales.of == "powers":
            exponents(module, source)
        error = (value.double() - source.double()).abs()
        rounded += int((error > 0).sum())
        if options.exact and rounded:
            raise LossError(f"{module.scales}: not exact in {options.dtype}, as the kernel has it")
        gone = ((value == 0) & (source > 0)) | (value < scales.least)
        if gone.any():
            _require_zeros(module, gone, source, options, read)
        if (live := value > 0).any():
            worst = max(worst, float((error / source.double())[live].max()))
        fallen += int(gone.sum())
    return replace(plain(stack, lift), rounded=rounded, fallen=fallen, worst=worst)


def _require_one(stack: Stack, read: Reader) -> None:
    """Raise LayoutError where members of a group have several scales, and the kernel takes one."""
    for group in stack.groups:
        values = [float(_values(m, read)) for m in group]
        if len(set(values)) > 1:
            raise LayoutError(
                f"{group[0].name} has scale {values[0]:.9g}, {group[1].name} has {values[1]:.9g}, "
                "and the kernel takes one for both: rewrite the source first with `--unify fold`"
            )


def _require_zeros(
    module: Module, gone: Tensor, source: Tensor, options: Options, read: Reader
) -> None:
    """Raise LayoutError where a scale that becomes zero stands over codes that are not zero."""
    if over_codes(module, expanded(module, gone), read).any():
        least, largest = options.layout.scales.least, source[gone].max().item()
        why = f"below {least:g}, the least that" if least else f"zero in {options.dtype}, which"
        raise LayoutError(
            f"{module.scales}: {largest:g} is {why} {options.layout.name} stores"
            + "; bfloat16 holds it" * (options.dtype == "float16" and not least)
        )
