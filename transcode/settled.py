"""What was found in the block scales of a stack, before any code is read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import FormatError, LossError
from transcode.module import Module
from transcode.quant import E2M1, unpack_nibbles
from transcode.stacks import Options, Stack


@dataclass(frozen=True)
class Flush:
    """Non-zero block scales of one matrix that are zero to the kernel.

    at, bytes: for the way back, flat indices into `[n, k/group]` (little-endian uint32) and the
    bytes there; both in base64, and empty where the bytes are stored all the same.
    lost, norm: sums of squares of the flushed blocks' values and of the whole matrix.
    """

    module: str
    count: int
    at: str
    bytes: str
    lost: float
    norm: float


@dataclass(frozen=True)
class Settled:
    """What the scales of a stack say. g and lift: float32 `[E]`; g is 1 without global scales.

    lifts: "one" for a lift shared by all groups, "per expert" where that flushes fewer scales.
    rounded, fallen: scales that rounding changed, and those of them that became zero.
    worst: the largest relative change of a rounded scale (NVFP4: that is normal afterwards).
    short: the largest relative change of a global scale that is stored in fewer bits.
    nan: blocks of zeros whose scale was NaN.  zero: names of matrices that are zero.
    """

    g: Tensor
    lift: Tensor
    lifts: str
    flushes: tuple[Flush, ...] = ()
    rounded: int = 0
    fallen: int = 0
    worst: float = 0.0
    nan: int = 0
    zero: tuple[str, ...] = ()
    short: float = 0.0

    def lift_entry(self) -> float | list[float]:
        """The lift as a config states it: one number, or one for each expert."""
        return float(self.lift[0]) if self.lifts == "one" else self.lift.tolist()


def plain(stack: Stack, lift: float) -> Settled:
    """What is settled where there is no global scale, one lift for all, and nothing to tell."""
    ones = torch.ones(len(stack.groups))
    return Settled(ones, ones * lift, "one")


def flush(module: Module, scales: Tensor, values: Tensor, lost: Tensor, read: Reader, *,
          kept: bool) -> Flush:  # fmt: skip
    """The record of a matrix's lost scales: `[N, G]` as packed, their values, and which."""
    squares = magnitudes(module, lost.shape, read).square().sum(-1) * values.double().square()
    at = lost.flatten().nonzero().flatten()
    return Flush(
        module.name,
        len(at),
        "" if kept else _base64(at.numpy().astype("<u4").tobytes()),
        "" if kept else _base64(scales.view(torch.uint8).flatten()[at].numpy().tobytes()),
        float(squares[lost].sum()),
        float(squares.sum()),
    )


def magnitudes(module: Module, blocks: tuple[int, ...], read: Reader) -> Tensor:
    """What the codes of a matrix mean without their signs, float64 `[N, G, columns]`."""
    codes = read.tensor(module.codes)
    if codes.dtype is torch.float8_e4m3fn:
        return codes.double().abs().reshape(*blocks, -1)
    nibbles = unpack_nibbles(codes.view(torch.uint8)) & 7
    return torch.tensor(E2M1, dtype=torch.float64)[nibbles.int()].reshape(*blocks, -1)


def over_codes(module: Module, some: Tensor, read: Reader) -> Tensor:
    """Which of the blocks `[N, G]` bool hold codes that are not zero."""
    codes = read.tensor(module.codes)
    unsigned = codes.view(torch.uint8) & (0x7F if codes.dtype is torch.float8_e4m3fn else 0x77)
    return some & unsigned.reshape(*some.shape, -1).any(-1).bool()


def require_over_zeros(module: Module, nan: Tensor, read: Reader) -> None:
    """Raise FormatError where a block's scale is NaN and its codes are not all zero."""
    if (bad := over_codes(module, nan, read)).any():
        row, block = bad.nonzero()[0].tolist()
        raise FormatError(
            f"{module.name}: weight_scale is NaN in row {row}, block {block}, over codes that are "
            "not zero"
        )


def refuse_flushes(stack: Stack, flushes: Sequence[Flush], options: Options) -> None:
    """Raise LossError with `--exact` if a scale is lost."""
    if flushes and options.exact:
        raise LossError(
            f"{flushes[0].module}: {flushes[0].count} block scales are too small for "
            f"{options.layout.name}, whose kernel takes them for zero; {len(flushes)} matrices in "
            f"{stack.name}"
        )


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def norm_share(flushes: Sequence[Flush]) -> float:
    """The share of the Frobenius norm of the matrices concerned that is lost."""
    norm = sum(f.norm for f in flushes)
    return float((sum(f.lost for f in flushes) / norm) ** 0.5) if norm else 0.0
