"""Parts that several layouts are made of: plain codes, rows in another order, plain factors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels._execute import apply, undo
from transcode.spec import Bias, Codes, Factor, Scales
from transcode.tiling import Tiling

DTYPES = {"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


def plain_codes(dtype: str, bits: int) -> Codes:
    """Codes as they are, `[N, K * bits / 8]`, under a dtype of one byte."""
    return Codes(
        bits,
        dtype,
        lambda n, k: (n, k * bits // 8),
        lambda codes: codes.view(DTYPES[dtype]),
        lambda stored: stored.view(torch.uint8),
    )


def rows_of_codes(tiling: Tiling, dtype: str, bits: int) -> Codes:
    """Rows of codes in another order, each row as it is: a Tiling of bytes `[N, K * bits / 8]`."""

    def unpack(stored: Tensor) -> Tensor:
        raw = stored.view(torch.uint8)
        return undo(tiling, raw, raw.shape, 8)

    return Codes(
        bits,
        dtype,
        lambda n, k: (n, k * bits // 8),
        lambda codes: apply(tiling, codes, 8).view(DTYPES[dtype]),
        unpack,
    )


def rows_of_bias(tiling: Tiling) -> Bias:
    """A bias in float32, in the order of the rows of the weight."""
    return Bias(
        lambda bias: apply(tiling, bias.float()[:, None], 32).flatten(),
        lambda stored: undo(tiling, stored[:, None], (len(stored), 1), 32).flatten(),
        "F32",
    )


PLAIN_BIAS = Bias(lambda bias: bias, lambda stored: stored)
"""A bias as it is."""


def never(scales: Tensor, factor: float, dtype: str = "") -> Tensor:
    """No scale is lost, none is too large."""
    return torch.zeros_like(scales.view(torch.uint8) if scales.element_size() == 1 else scales,
                            dtype=torch.bool)  # fmt: skip


def no_lift(largest: float, dtype: str) -> float:
    """Scales are stored as they are."""
    return 1.0


def own_scales(least: float = 0.0) -> Scales:
    """FP8's scales as the source has them, float32 `[R, G]`, but for those below the least."""
    return Scales(
        "F32", lambda r, g: (r, g), no_lift, lambda scales, lift: scales,
        lambda stored, lift, shape: stored.reshape(shape), never, True, never,
        least=least, of="own",
    )  # fmt: skip


def tiled_scales(tiling: Tiling, dtype: str, tile: tuple[int, int], fill: int = 0) -> Scales:
    """One byte for each row and group, padded with zeros to the tile and put in another order.

    dtype: F8_E4M3 or U8, `[R, G]` of the padded sizes.  fill: of rows and columns that belong to
    the padded matrix.
    """
    return Scales(
        dtype, partial(_up, tile), no_lift, partial(_pack, tiling, tile),
        partial(_unpack, tiling, tile), never, True, never, fill,
    )  # fmt: skip


def _up(tile: tuple[int, int], r: int, g: int) -> tuple[int, int]:
    return -(-r // tile[0]) * tile[0], -(-g // tile[1]) * tile[1]


def _pack(tiling: Tiling, tile: tuple[int, int], scales: Tensor, lift: float) -> Tensor:
    raw = scales.view(torch.uint8)
    rows, groups = _up(tile, *raw.shape)
    if raw.shape != (rows, groups):
        more = (0, groups - raw.shape[1], 0, rows - raw.shape[0])
        raw = torch.nn.functional.pad(raw, more)
    return apply(tiling, raw, 8).reshape(rows, groups).view(scales.dtype)


def _unpack(
    tiling: Tiling, tile: tuple[int, int], stored: Tensor, lift: float, shape: tuple[int, int]
) -> Tensor:
    raw = undo(tiling, stored.view(torch.uint8), _up(tile, *shape), 8)
    return raw[: shape[0], : shape[1]].contiguous().view(stored.dtype)


def words_of_scales(tiling: Tiling, tile: tuple[int, int], kind: str, of: str = "rows") -> Scales:
    """One byte for each row and group, four groups to an int32, `[G/4, R]` of sizes that are padded
    with zeros to the tile; the first group in the lowest byte.

    kind: F8_E4M3 or U8, what the bytes are.  of: see `Scales`.
    """
    assert of in ("rows", "powers")

    def shape(r: int, g: int) -> tuple[int, int]:
        rows, groups = _up(tile, r, g)
        return groups // 4, rows

    def pack(scales: Tensor, lift: float) -> Tensor:
        words = _pack(tiling, tile, scales.view(torch.uint8), lift).flatten().view(torch.int32)
        return words.reshape(shape(*scales.shape))

    def unpack(stored: Tensor, lift: float, size: tuple[int, int]) -> Tensor:
        return _unpack(tiling, tile, stored.view(torch.uint8), lift, size).view(DTYPES[kind])

    return Scales("I32", shape, no_lift, pack, unpack, never, True, never, of=of)  # type: ignore[arg-type]


def _pack_factor(g: Tensor, lift: Tensor, dtype: str) -> Tensor:
    bad = ~torch.isfinite(g) | ((g != 0) & (g < torch.finfo(torch.float32).tiny))
    if bad.any():
        raise LayoutError(f"global scale {g[bad].flatten()[0].item():g} is no normal number")
    return g


FACTOR = Factor("F32", _pack_factor, lambda stored, lift, dtype: stored)
"""The global scale as a factor, float32."""
