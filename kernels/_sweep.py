"""The search over E4M3 block scales on the CPU: quantise._swept, pruned, in one numba loop.

The same float32 arithmetic in the same order, so the same bytes. Going down from the centre, a
scale whose error for the largest value alone exceeds the best sum so far ends the search: sums of
numbers that are not negative are never rounded below one of them, and lower scales clip it further.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transcode.kernels._tiles import uninterrupted

SHARE = 1 << 16
"""The least number of blocks that is worth a thread."""


def sweep(blocks: Tensor, centre: Tensor, below: int, above: int) -> Tensor:
    """The byte of the best E4M3 scale, int32 `[N, G]`, for float32 blocks `[N, G, 16]`.

    centre: int32 `[N, G]`, where the search begins; below, above: how many bytes it may go.
    """
    flat = blocks.abs().contiguous().reshape(-1, 16).numpy()
    start = centre.reshape(-1).to(torch.int32).numpy()
    found = np.empty_like(start)
    scales = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    table, inverse = scales.numpy(), (1 / scales).numpy()
    run = _compiled()
    threads = max(1, min(torch.get_num_threads(), len(start) // SHARE))
    cuts = [len(start) * i // threads for i in range(threads + 1)]

    def share(i: int) -> None:
        part = slice(cuts[i], cuts[i + 1])
        run(flat[part], start[part], table, inverse, below, above, found[part])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))
    return torch.from_numpy(found).reshape(centre.shape)


@cache
def _compiled() -> Callable[..., None]:
    """`_run`, compiled by running it on nothing."""
    with uninterrupted():
        from numba import njit  # slow to import

        error = njit(nogil=True)(_error)
        run: Callable[..., None] = njit(nogil=True)(_made(error))
        none, one = np.empty((0, 16), np.float32), np.empty(0, np.int32)
        table = np.ones(127, np.float32)
        run(none, one, table, table, 0, 0, one)
    return run


def _error(values: Any, scale: Any, inverse: Any, squares: Any) -> Any:
    """The sum of squared errors of 16 magnitudes, added up pairwise."""
    for i in range(16):
        y = values[i] * inverse
        step = np.float32(0.5)
        if y >= np.float32(2):
            step = np.float32(1)
        if y >= np.float32(4):
            step = np.float32(2)
        magic = np.float32(12582912) * step  # what is added and taken away rounds to a step, even
        rounded = min((y + magic) - magic, np.float32(6))
        error = values[i] - rounded * scale
        squares[i] = error * error
    for half in (8, 4, 2, 1):
        for i in range(half):
            squares[i] = squares[2 * i] + squares[2 * i + 1]
    return squares[0]


def _made(error: Callable[..., Any]) -> Callable[..., None]:
    """The loop over blocks, with this `_error`."""

    def run(
        values: Any, start: Any, table: Any, inverse: Any, below: int, above: int, found: Any
    ) -> None:
        squares = np.empty(16, np.float32)
        for b in range(len(start)):
            row, centre = values[b], start[b]
            largest = np.float32(0)
            for i in range(16):
                largest = max(largest, row[i])
            best, byte = np.float32(np.inf), centre
            for step in range(below + 1):
                at = max(centre - step, 1)
                clipped = largest - np.float32(6) * table[at]
                if clipped > 0 and clipped * clipped > best:
                    break
                this = error(row, table[at], inverse[at], squares)
                if this <= best:
                    best, byte = this, at
            for step in range(1, above + 1):
                at = min(centre + step, 126)
                this = error(row, table[at], inverse[at], squares)
                if this < best:
                    best, byte = this, at
            found[b] = byte

    return run
