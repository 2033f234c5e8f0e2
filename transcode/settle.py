"""Block scales of a stack, read once before any code, in the way of their encoding.

Prepared scales are what is packed, one for each row and group of columns.
"""

from __future__ import annotations

from torch import Tensor

from transcode import settle_e4m3, settle_e8m0, settle_float
from transcode.checkpoint import Reader
from transcode.module import Module
from transcode.quant import Encoding
from transcode.settled import Settled
from transcode.stacks import Options, Stack
from transcode.unify import Unified


def prepare(module: Module, unified: Unified, options: Options, read: Reader) -> Tensor:
    """`[N, G]` as packed: float8_e4m3fn (NVFP4), uint8 (MXFP4, MXFP8), else the activations' dtype.

    Raises FormatError for scales that mean nothing.
    """
    match module.encoding:
        case Encoding.NVFP4:
            return settle_e4m3.prepare(module, unified, read)
        case Encoding.MXFP4 | Encoding.MXFP8:
            return settle_e8m0.prepare(module, read)
    return settle_float.prepare(module, options, read)


def settle(stack: Stack, unified: Unified, options: Options, read: Reader) -> Settled:
    """What a stack's scales say; with `--exact`, LossError where one would be rounded or lost."""
    match stack.first.encoding:
        case Encoding.NVFP4:
            return settle_e4m3.settle(stack, unified, options, read)
        case Encoding.MXFP4 | Encoding.MXFP8:
            return settle_e8m0.settle(stack, options, read)
    return settle_float.settle(stack, options, read)
