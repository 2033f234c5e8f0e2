"""E8M0 exponents stored as numbers: which scales may be such, and what their values are.

A byte b means 2^(b - 127), and a cast between dtypes goes by value where a view was meant: the byte
118 becomes 118.0 instead of 2^-9. What comes of it is told apart by the values alone, since no
weight has scales from 64 on: an E4M3 code would mean up to 28672.
Source of the fault: vllm-project/vllm#51946 and #43416.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from transcode.checkpoint import DTYPES, Reader
from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.module import Module
from transcode.producer import FLOATS
from transcode.quant import Encoding, exponents, powers

LEAST, NAN = 64, 255
"""The smallest byte that is taken for an exponent; E8M0's NaN."""

FROM_BYTES = (132, 135)
"""E8M0 bytes of 2^5 to 2^8: what float8_e8m0fnu makes of the numbers 24 to 255."""

PAIRS = (
    (".weight_packed", ".weight_scale"),
    (".weight", ".weight_scale"),
    (".weight", ".weight_scale_inv"),
    (".weight", ".scale"),
    ("_blocks", "_scales"),
)
"""Ends of the names of codes and of their scales."""


class Held(StrEnum):
    """What float scales hold."""

    POWERS = "powers of two"
    BYTES = "exponents' bytes as numbers"
    NUMBERS = "numbers"


def suspects(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Codes and their float scales, where exponents may stand: one for 32 codes, or FP8's tiles."""
    for name, codes in tensors.items():
        for own, end in PAIRS:
            scale = tensors.get(name.removesuffix(own) + end) if name.endswith(own) else None
            if scale is None or scale.dtype not in FLOATS:
                continue
            tiles = codes.dtype == "F8_E4M3" and scale.shape not in ((), (1,))
            if by_32(codes, scale) or tiles:
                yield codes, scale


def by_32(codes: TensorInfo, scale: TensorInfo) -> bool:
    """Whether there is one scale for 32 codes, as in MXFP4 and MXFP8."""
    each = {"U8": 2, "I8": 2, "F8_E4M3": 1}.get(codes.dtype, 0)
    along = len(scale.shape) > 1 and scale.shape[:-1] == codes.shape[: len(scale.shape) - 1]
    return along and bool(each) and prod(codes.shape) * each == 32 * prod(scale.shape)


def held(scales: Tensor) -> Held:
    """What they are. Zeros, which stand for blocks of zeros, tell nothing."""
    values = scales.double()
    live = values[values != 0]
    if not live.numel() or not live.isfinite().all():
        return Held.NUMBERS
    if ((live >= LEAST) & (live < NAN) & (live == live.round())).all():
        return Held.BYTES
    mantissas = torch.frexp(live)[0]
    return Held.POWERS if (mantissas == 0.5).all() else Held.NUMBERS


def lost(module: Module, scales: Tensor, read: Reader) -> str:
    """How a cast by value has destroyed E8M0 scales, "" if they may be true."""
    byte = scales.view(torch.uint8)
    least, most = (int(byte.min()), int(byte.max())) if byte.numel() else (1, 1)
    if FROM_BYTES[0] <= least and most <= FROM_BYTES[1]:
        told = f"exponents of 2^{least - 127} to 2^{most - 127}, which no weight has"
        return f"{told}: bytes that were cast to E8M0 by value"
    if most == 0:
        raw = read.tensor(module.codes).view(torch.uint8)
        magnitudes = 0x77 if module.encoding is Encoding.MXFP4 else 0x7F
        if (raw & magnitudes).any():
            return "all exponents are 0 (2^-127): powers of two that were cast to bytes by value"
    return ""


def require_meant(module: Module, scales: Tensor, read: Reader) -> None:
    """Raise FormatError for scales that a cast by value has made of exponents."""
    if scales.element_size() == 1:
        how = lost(module, scales, read)
        if how:
            raise FormatError(f"{module.scales}: {how}")
    elif module.encoding is not Encoding.FP8_TENSOR and held(scales) is Held.BYTES:
        raise FormatError(
            f"{module.scales}: holds {float(scales.max()):g}: exponents' bytes that were cast by "
            "value; transcode check --fix turns them back"
        )


@dataclass(frozen=True)
class Cast:
    """Takes scales that are stored as float numbers for what was meant (header.Taken).

    stored, dtype: the shape and dtype of the bytes.  held: what they hold, BYTES or POWERS.
    wanted: the dtype to have, a float's for powers of two or one of E8M0's.
    """

    stored: tuple[int, ...]
    dtype: str
    held: Held
    wanted: str

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The scales of this shape, in the dtype `wanted`."""
        byte = stored.to(torch.uint8) if self.held is Held.BYTES else exponents(stored)
        value = powers(byte) if self.wanted in FLOATS else byte
        dtype = DTYPES[self.wanted]
        same = value.to(dtype) if self.wanted in FLOATS else value.view(dtype)
        return same.reshape(shape)
