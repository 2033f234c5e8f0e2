"""Runs a Tiling where the tensor lies: numba on the CPU, Triton on a GPU.

`Tiling.apply` and `Tiling.undo` are the definition. Nibbles are stored eight to an int32, the first
in the lowest bits; on a little-endian machine those are bytes with the even nibble in the low half,
as in the source, so they too are only permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels._digits import Moves, orders, plan
from transcode.tiling import Tiling

WORDS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
"""The dtype of words of so many bits."""


def apply(tiling: Tiling, source: Tensor, bits: int, table: Tensor | None = None) -> Tensor:
    """Source order to stored order. Raises LayoutError where something does not fit.

    bits: 8, 16 or 32, for a source of any dtype of that size, which is kept; or 4, for `[..., K/2]`
        uint8, the even column in the low nibble, to int32 with the last stored axis in words.
    table: 256 uint8, only for 8 bits: what each byte is replaced by.
    """
    _check(source, bits, torch.uint8, table)
    shape = tuple(source.shape)
    if bits == 4:
        shape = (*shape[:-1], shape[-1] * 2)
    out = _empty(_stored(tiling, shape), bits, torch.int32, source)
    _move(_forth, (tiling, shape, bits), source, out, table)
    return out


def undo(
    tiling: Tiling, stored: Tensor, shape: Sequence[int], bits: int, table: Tensor | None = None
) -> Tensor:
    """Stored order back to a source of `shape`, counted in elements; else as `apply`."""
    _check(stored, bits, torch.int32, table)
    out = _empty(shape, bits, torch.uint8, stored)
    if out.nbytes != stored.nbytes:
        raise LayoutError(f"{tuple(stored.shape)} stored, wanted {prod(shape)} of {bits} bits")
    _move(_back, (tiling, tuple(shape), bits), stored, out, table)
    return out


def executor(device: torch.device) -> ModuleType:
    """The module that runs Moves on tensors of this device."""
    match device.type:
        case "cpu":
            from transcode.kernels import _tiles

            return _tiles
        case "cuda":
            from transcode.kernels import _gather  # needs triton

            return _gather
    raise LayoutError(f"nothing moves tensors on {device}, only on cpu and cuda")


def _move(
    make: Callable[..., Moves],
    what: tuple[Tiling, tuple[int, ...], int],
    source: Tensor,
    out: Tensor,
    table: Tensor | None,
) -> None:
    if not out.numel():
        return
    run = executor(source.device)
    moves = make(*what, run.WORD, run.TILE)
    dtype, size = WORDS[moves.word], moves.word // 8
    source = source.contiguous()
    if source.data_ptr() % size or source.storage_offset() * source.itemsize % size:
        source = source.clone()  # words have to be aligned
    run.move(moves, source.view(-1).view(dtype), out.view(-1).view(dtype), table)


@lru_cache
def _stored(tiling: Tiling, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tiling.sizes(shape)
    return tuple(prod(sizes[factor] for factor in group) for group in tiling.groups)


@lru_cache
def _forth(tiling: Tiling, shape: tuple[int, ...], bits: int, word: int, tile: int) -> Moves:
    source, stored = orders(tiling, shape)
    return plan(source, stored, bits, word, tile)


@lru_cache
def _back(tiling: Tiling, shape: tuple[int, ...], bits: int, word: int, tile: int) -> Moves:
    source, stored = orders(tiling, shape)
    return plan(stored, source, bits, word, tile)


def _empty(shape: Sequence[int], bits: int, nibbles: torch.dtype, like: Tensor) -> Tensor:
    """Room for `shape` elements; `nibbles` is the dtype that holds those of 4 bits."""
    dtype = like.dtype if bits != 4 else nibbles
    each = 1 if bits != 4 else nibbles.itemsize * 2
    if shape[-1] % each:
        raise LayoutError(f"the last axis has {shape[-1]} nibbles, wanted a multiple of {each}")
    run = executor(like.device)
    out: Tensor = run.empty((*shape[:-1], shape[-1] // each), dtype, like.device)
    return out


def _check(given: Tensor, bits: int, nibbles: torch.dtype, table: Tensor | None) -> None:
    if bits not in (4, 8, 16, 32):
        raise LayoutError(f"elements of {bits} bits, wanted 4, 8, 16 or 32")
    if given.dtype != nibbles if bits == 4 else given.itemsize * 8 != bits:
        raise LayoutError(f"{given.dtype} cannot hold elements of {bits} bits here")
    if table is not None and (bits != 8 or table.shape != (256,) or table.dtype != torch.uint8):
        raise LayoutError(f"a table of {tuple(table.shape)} {table.dtype} for {bits} bits")
