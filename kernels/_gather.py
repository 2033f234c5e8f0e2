"""Tilings on the GPU: one Triton kernel runs them all, on tiles of machine words.

All elements are raw unsigned integers; nothing here knows what a number means.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transcode.kernels._digits import Moves, runs

WORD = 32
"""Bits of a word, at most."""

TILE = 12
"""A tile has `2^TILE` words, at most."""

WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _places(RUNS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where each word of a tile is, from the tile's first."""
    index = tl.arange(0, TILE)
    at = tl.zeros([TILE], tl.int64)
    for i in tl.static_range(len(RUNS)):
        at += (index // RUNS[i][0] % RUNS[i][1]).to(tl.int64) * RUNS[i][2]
    return at


@triton.jit  # type: ignore[untyped-decorator]
def move_tile(  # type: ignore[no-untyped-def]
    source,
    out,
    table,
    OUTER: tl.constexpr,
    READ: tl.constexpr,
    SWAPS: tl.constexpr,
    GATHER: tl.constexpr,
    PAIRS: tl.constexpr,
    CROSSES: tl.constexpr,
    SCATTER: tl.constexpr,
    WRITE: tl.constexpr,
    TILE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """One tile; see `constants` for the parameters, and `Moves` for the steps."""
    number = tl.program_id(0)
    for i in tl.static_range(len(OUTER)):
        digit = (number % OUTER[i][0]).to(tl.int64)
        number = number // OUTER[i][0]
        source += digit * OUTER[i][1]
        out += digit * OUTER[i][2]

    x = tl.load(source + _places(READ, TILE))
    if table is not None:
        old = x
        x = tl.zeros_like(old)
        for i in tl.static_range(BYTES):
            x |= tl.load(table + ((old >> (8 * i)) & 0xFF)).to(x.dtype) << (8 * i)

    for i in tl.static_range(len(SWAPS)):
        change = ((x >> SWAPS[i][0]) ^ x) & SWAPS[i][1]
        x ^= change ^ (change << SWAPS[i][0])

    x = x.reshape(GATHER[0]).permute(GATHER[1])
    for i in tl.static_range(len(CROSSES)):
        first, second = x.reshape(PAIRS[0]).split()
        change = ((first >> CROSSES[i][0]) ^ second) & CROSSES[i][1]
        x = tl.join(first ^ (change << CROSSES[i][0]), second ^ change).permute(PAIRS[1])
    x = x.reshape(SCATTER[0]).permute(SCATTER[1])

    tl.store(out + _places(WRITE, TILE), x.reshape([TILE]))


@lru_cache
def constants(moves: Moves) -> dict[str, Any]:
    """The compile-time parameters of `move_tile`.

    OUTER is Moves' with the fastest digit first; READ and WRITE are `runs`. GATHER is the reshape
    and permutation that bring the axes of the crosses to the end of the tile, the first of them
    last; PAIRS a shape with these axes, and the permutation that brings the next one to the end;
    SCATTER goes from there to the order of writing.
    """
    crossed = [axis for axis, _, _ in moves.crosses]
    n, m = len(moves.read), len(crossed)
    middle = [axis for axis in range(n) if axis not in crossed] + crossed[::-1]
    return {
        "OUTER": moves.outer[::-1],
        "READ": runs(moves.read),
        "SWAPS": moves.swaps,
        "GATHER": _permutation(middle),
        "PAIRS": ((1 << n - m, *[2] * m), (0, m, *range(1, m))),
        "CROSSES": tuple((shift, mask) for _, shift, mask in moves.crosses),
        "SCATTER": _permutation([middle.index(axis) for axis, _ in moves.write]),
        "WRITE": runs([stride for _, stride in moves.write]),
        "TILE": 1 << n,
        "BYTES": moves.word // 8,
    }


def _permutation(order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A permutation of axes of two as (shape, permutation) of as few axes as can be."""
    groups: list[list[int]] = []
    for axis in order:
        if groups and groups[-1][-1] + 1 == axis:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    by_source = sorted(groups)
    shape = tuple(1 << len(group) for group in by_source)
    return shape or (1,), tuple(by_source.index(group) for group in groups) or (0,)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory on a GPU, from torch's own pool."""
    return torch.empty(shape, dtype=dtype, device=device)


def move(moves: Moves, source: Tensor, out: Tensor, table: Tensor | None) -> None:
    """Run the moves; source and out are 1-D, contiguous, of unsigned words; table 256 uint8."""
    with torch.cuda.device(source.get_device()):
        move_tile[(moves.tiles,)](source, out, table, **constants(moves), num_warps=WARPS)
