"""FP8's scales of tensors, rows and tiles: one for each row and group of columns, in the
activations' dtype.

Rounding is to nearest even: at most 2^-8 (bfloat16) or 2^-11 (float16) of a value that is normal
afterwards, at most 2^-25 absolute in float16 where it is not; one that becomes zero over codes that
are not is refused. The source's own scales are kept beside them.
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
    """`[N, G]` in the activations' dtype: G is 1, or K/128 for tiles."""
    return expanded(module, _values(module, read).to(getattr(torch, options.dtype)))


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
    dtype: torch.dtype = getattr(torch, options.dtype)
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
        error = (value.double() - source.double()).abs()
        rounded += int((error > 0).sum())
        if options.exact and rounded:
            raise LossError(f"{module.scales}: not exact in {options.dtype}, as the kernel has it")
        gone = (value == 0) & (source > 0)
        if gone.any():
            _require_zeros(module, gone, source, options, read)
        if (live := value > 0).any():
            worst = max(worst, float((error / source.double())[live].max()))
        fallen += int(gone.sum())
    return replace(plain(stack, lift), rounded=rounded, fallen=fallen, worst=worst)


def _require_zeros(
    module: Module, gone: Tensor, source: Tensor, options: Options, read: Reader
) -> None:
    """Raise LayoutError where a scale that becomes zero stands over codes that are not zero."""
    if over_codes(module, expanded(module, gone), read).any():
        raise LayoutError(
            f"{module.scales}: {source[gone].max().item():g} is zero in {options.dtype}, which "
            f"{options.layout.name} stores" + "; bfloat16 holds it" * (options.dtype == "float16")
        )
