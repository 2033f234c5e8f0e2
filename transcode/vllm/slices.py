"""Which bytes of a fused tensor are a rank's: its experts, its columns of w13, its rows of w2.

Rows and columns are those of the stored tensor. A packed matrix is cut where an unpacked one is:
columns of w13 are out features, in equal parts of each half; rows of w2 are in features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod


@dataclass(frozen=True)
class Rank:
    """experts: the file's expert for each slot of this rank; one may stand there twice.

    tp, at: into how many parts each expert is cut, and which of them is this rank's.
    """

    experts: tuple[int, ...]
    tp: int = 1
    at: int = 0


@dataclass(frozen=True)
class Part:
    """A rank's part of a fused tensor `[E, rows, columns]`, `[E, columns]` or `[E]`."""

    experts: tuple[int, ...]
    rows: range
    columns: tuple[range, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Bytes that are read at once: of `rows` rows, `stride` apart from `start`, the same runs.

    runs: `(offset, size)` inside a row.  at: where the bytes go, one after another, in the part.
    """

    start: int
    rows: int
    stride: int
    runs: tuple[tuple[int, int], ...]
    at: int

    @property
    def width(self) -> int:
        """The bytes of one row."""
        return sum(size for _, size in self.runs)

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return self.rows * self.width


def part(leaf: str, shape: Sequence[int], rank: Rank, halves: int) -> Part:
    """The part of `w13_weight` and the like; halves: 2 where gate's rows stand before up's."""
    rows = range(shape[1] if len(shape) == 3 else 1)
    columns: tuple[range, ...] = (range(shape[-1] if len(shape) > 1 else 1),)
    if rank.tp > 1 and len(shape) > 1 and leaf.startswith("w13_"):
        half = shape[-1] // halves
        mine = _cut(half, rank)
        columns = tuple(range(h * half + mine.start, h * half + mine.stop) for h in range(halves))
    elif leaf in ("w2_weight", "w2_weight_scale") and len(rows) > 1:
        rows = _cut(len(rows), rank)
    sizes = (len(rows), sum(map(len, columns)))
    inner = {1: (), 2: sizes[1:], 3: sizes}[len(shape)]
    return Part(rank.experts, rows, columns, (len(rank.experts), *inner))


def _cut(size: int, rank: Rank) -> range:
    each = size // rank.tp
    return range(rank.at * each, (rank.at + 1) * each)


def pieces(
    start: int, itemsize: int, shape: Sequence[int], part: Part, limit: int
) -> Iterator[Piece]:
    """All bytes of a part, in pieces of at most `limit` bytes; start: of the tensor in its file."""
    row = (shape[-1] if len(shape) > 1 else 1) * itemsize
    expert = prod(shape[1:]) * itemsize
    runs = tuple((c.start * itemsize, len(c) * itemsize) for c in part.columns)
    at, size = 0, len(part.rows) * sum(run for _, run in runs)
    for first, count in _following(part.experts, joined=size == expert):
        begin = start + first * expert + part.rows.start * row
        if runs == ((0, row),):
            whole = Piece(begin, 1, count * size, ((0, count * size),), at)
        else:
            whole = Piece(begin, len(part.rows), row, runs, at)
        yield from _split(whole, limit)
        at += count * size


def _following(experts: Sequence[int], *, joined: bool) -> Iterator[tuple[int, int]]:
    """Runs of experts that follow each other in the file: the first, and how many."""
    fresh = [
        i for i, expert in enumerate(experts) if not (joined and i and expert == experts[i - 1] + 1)
    ]
    for begin, end in pairwise([*fresh, len(experts)]):
        yield experts[begin], end - begin


def _split(piece: Piece, limit: int) -> Iterator[Piece]:
    if piece.rows == len(piece.runs) == 1:
        [(offset, width)] = piece.runs
        for done in range(0, width, limit):
            size = min(limit, width - done)
            begin = piece.start + offset + done
            yield Piece(begin, 1, size, ((0, size),), piece.at + done)
        return
    each = max(1, limit // piece.width)
    for first in range(0, piece.rows, each):
        yield replace(
            piece,
            start=piece.start + first * piece.stride,
            rows=min(each, piece.rows - first),
            at=piece.at + first * piece.width,
        )
