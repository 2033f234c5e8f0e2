"""Tilings on the CPU: one numba loop runs them all, on tiles of machine words that fit the cache.

It is compiled when it is first needed, once for each size of word (about a second), and runs in as
many threads as torch does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transcode.kernels._digits import Moves

WORD = 64
"""Bits of a word, at most."""

TILE = 12
"""A tile has `2^TILE` words, at most: 32 KiB, which the first level of cache holds."""

ROW = 5
"""Words are moved in rows of `2^ROW`: short ones cost loop overhead, long ones need big tables."""

SHARE = 1 << 18
"""Bytes that are worth a thread."""

Array = np.ndarray[Any, np.dtype[Any]]


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory, on huge pages where Linux has them: numpy asks for them, torch does not.

    To be given 64 MiB in pages of 4 KiB takes longer than to move them.
    """
    size = prod(shape) * dtype.itemsize
    octets = torch.from_numpy(np.empty(max(size, 1), np.uint8))  # of none numpy has no strides
    return octets[:size].view(dtype).view(*shape)


def move(moves: Moves, source: Tensor, out: Tensor, table: Tensor | None) -> None:
    """Run the moves; source and out are 1-D, contiguous, of unsigned words; table 256 uint8."""
    words, moved = source.numpy(), out.numpy()
    pairwise = _pairs(None if table is None else table.numpy())
    steps, run = _steps(moves), _compiled(moves.word)
    threads = min(torch.get_num_threads(), moves.tiles, 1 + words.nbytes // SHARE)
    cuts = [np.uintp(moves.tiles * i // threads) for i in range(threads + 1)]

    def share(i: int) -> None:
        run(cuts[i], cuts[i + 1], words, moved, pairwise, *steps)

    if threads == 1:
        share(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


@cache
def _compiled(word: int) -> Callable[..., None]:
    """`_run` for words of so many bits, compiled by running it on no tiles."""
    with uninterrupted():
        from numba import njit  # slow to import

        compiled: Callable[..., None] = njit(nogil=True)(_run)
        none, one, size = np.uintp(0), np.zeros(1, np.uintp), np.dtype(f"u{word // 8}")
        words, pairs = np.empty(0, size), np.empty((0, 2), size)
        outer, table = np.empty((0, 3), np.uintp), np.empty(0, np.uint16)
        compiled(none, none, words, words, table, outer, one, one, pairs, pairs, *[one] * 4)
    return compiled


def _pairs(table: Array | None) -> Array:
    """A table of 256 bytes as one of 2^16 pairs of them, as half the look-ups take less time."""
    if table is None:
        return np.empty(0, np.uint16)
    wide = table.astype(np.uint16)
    pairs: Array = np.bitwise_or.outer(wide << 8, wide).reshape(-1)
    return pairs


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back: inside LLVM's callbacks it would be printed and forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)


@lru_cache
def _steps(moves: Moves) -> tuple[Array, ...]:
    """Moves as the arrays that `_run` takes.

    In the buffer the axes of the crosses come first, so that what they exchange lies in long rows.
    A place in it, or in memory, is that of a row plus that within the row.
    """
    n, word = len(moves.read), np.dtype(f"u{moves.word // 8}")
    crossed = [axis for axis, _, _ in moves.crosses]
    buffered = crossed + [axis for axis in range(n) if axis not in crossed]
    pick = [1 << n - 1 - buffered.index(axis) for axis, _ in moves.write]
    return (
        np.array(moves.outer, np.uintp).reshape(-1, 3),
        *_places([moves.read[axis] for axis in buffered]),
        np.array(moves.swaps, word).reshape(-1, 2),
        np.array([(shift, mask) for _, shift, mask in moves.crosses], word).reshape(-1, 2),
        *_places([stride for _, stride in moves.write]),
        *_places(pick),
    )


def _places(strides: Sequence[int]) -> tuple[Array, Array]:
    """The places of rows, and those within a row, over axes of two with these strides."""
    places = np.zeros(1, np.uintp)
    for stride in strides:
        places = np.add.outer(places, np.array([0, stride], np.uintp)).reshape(-1)
    row = min(len(places), 1 << ROW)
    return places[::row].copy(), places[:row].copy()


def _run(
    first: Any,
    last: Any,
    source: Array,
    out: Array,
    table: Array,
    outer: Array,
    take_rows: Array,
    take: Array,
    swaps: Array,
    crosses: Array,
    put_rows: Array,
    put: Array,
    pick_rows: Array,
    pick: Array,
) -> None:
    """Move the tiles from `first` to before `last`."""
    # Unsigned throughout: numba would ask of each signed index whether it counts from the end.
    row = np.uintp(len(take))
    words = row * np.uintp(len(take_rows))
    straight = np.all(take[1:] - take[:-1] == 1)
    buffer = np.empty(words + words % np.uintp(2), source.dtype)  # pairs of bytes have to be whole
    pairs = buffer.view(np.uint16)
    for tile in range(first, last):
        number, start, target = tile, np.uintp(0), np.uintp(0)
        for d in range(len(outer) - 1, -1, -1):
            digit = number % outer[d, 0]
            number //= outer[d, 0]
            start += digit * outer[d, 1]
            target += digit * outer[d, 2]

        to = np.uintp(0)
        for r in range(len(take_rows)):
            at = start + take_rows[r]
            if straight:
                for i in range(row):
                    buffer[to + i] = source[at + i]
            else:
                for i in range(row):
                    buffer[to + i] = source[at + take[i]]
            to += row
        if len(table):
            for p in range(len(pairs)):
                pairs[p] = table[pairs[p]]

        for s in range(len(swaps)):
            shift, mask = swaps[s, 0], swaps[s, 1]
            for i in range(words):
                change = ((buffer[i] >> shift) ^ buffer[i]) & mask
                buffer[i] ^= change ^ (change << shift)
        half = words
        for s in range(len(crosses)):
            shift, mask = crosses[s, 0], crosses[s, 1]
            half //= np.uintp(2)
            for pair in range(1 << s):
                a = np.uintp(2 * pair) * half
                b = a + half
                for i in range(half):
                    change = ((buffer[a + i] >> shift) ^ buffer[b + i]) & mask
                    buffer[a + i] ^= change << shift
                    buffer[b + i] ^= change

        for r in range(len(put_rows)):
            to, at = target + put_rows[r], pick_rows[r]
            for i in range(row):
                out[to + put[i]] = buffer[at + pick[i]]
