"""A Tiling as moves of machine words, which is what both executors run.

The index of an element is a number of mixed radix, and a Tiling reorders its digits. Every power of
two in a factor can be cut into binary digits. A few of the fastest tell the elements of one word
apart, the others the words. What stays inside the word is moved by shifts; a digit that enters the
word changes places with one that leaves it, across pairs of words; all others only say where the
words go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import prod
from typing import NamedTuple

from transcode.errors import LayoutError
from transcode.tiling import Tiling


class Digit(NamedTuple):
    """One digit of an index: bit `place` of a factor, or what is odd about the factor (-1)."""

    factor: str
    place: int
    size: int


Digits = tuple[Digit, ...]
"""An order of storage, slowest digit first."""


@dataclass(frozen=True)
class Moves:
    """A permutation of elements of `bits` bits as moves of words of `word` bits.

    A tile has two words along each of its axes, which are counted in the order of reading, slowest
    first. Strides are in words. The swaps come before the crosses.

    outer: size, read stride, write stride of the digits that count the tiles, slowest first, in
        the order of writing, or of reading where a tile has shorter runs there.
    read: the stride of each axis.
    swaps: shift and mask; the elements under the mask change places with those `shift` bits up.
    crosses: axis, shift and mask; the elements under the mask of the second word along the axis
        change places with those `shift` bits up in the first.
    write: axis and stride in the order of writing, slowest first.
    """

    bits: int
    word: int
    outer: tuple[tuple[int, int, int], ...]
    read: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]
    crosses: tuple[tuple[int, int, int], ...]
    write: tuple[tuple[int, int], ...]

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return prod(size for size, _, _ in self.outer)


def orders(tiling: Tiling, shape: Sequence[int]) -> tuple[Digits, Digits]:
    """The digits of a source of this shape in source order, and in stored order."""
    sizes = tiling.sizes(tuple(shape))
    cut = {name: _cut(name, size) for name, size in sizes.items()}
    stored = chain.from_iterable(tiling.groups)
    return _join(cut[name] for name in sizes), _join(cut[name] for name in stored)


def plan(read: Digits, write: Digits, bits: int, word: int, tile: int) -> Moves:
    """From one order to another, in words of at most `word` bits and tiles of at most `2^tile`."""
    inside = _inside(read, write, word // bits)
    if bits << inside < 8:
        raise LayoutError(f"{bits}-bit elements need an even factor last, before and after")
    outside = len(read) - inside
    swaps, crosses = _within(read[outside:][::-1], write[outside:][::-1])
    read, write = read[:outside], write[:outside]
    arrived = {leaves: enters for enters, leaves, _ in crosses}
    places = [arrived.get(digit, digit) for digit in write]  # the axis that a digit is found on
    axes = _tile(read, places, [enters for enters, _, _ in crosses], tile)
    at, to = _strides(read), dict(zip(places, _strides(write).values(), strict=True))
    reads, writes = [at[d] for d in axes], [to[d] for d in places if d in axes]
    short = _run(reads) < _run(writes)  # neighbours in the order of reading then share cache lines
    return Moves(
        bits=bits,
        word=bits << inside,
        outer=_merge(
            [(d.size, at[d], to[d]) for d in (read if short else places) if d not in axes]
        ),
        read=tuple(reads),
        swaps=tuple(
            (bits * ((1 << high) - (1 << low)), _mask(bits, inside, {low: 1, high: 0}))
            for low, high in swaps
        ),
        crosses=tuple(
            (axes.index(enters), bits << place, _mask(bits, inside, {place: 0}))
            for enters, _, place in crosses
        ),
        write=tuple((axes.index(d), to[d]) for d in places if d in axes),
    )


def runs(strides: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Axes of two as longer ones: step of the index in the tile, size, stride; fastest first."""
    found: list[tuple[int, int, int]] = []
    for place, stride in enumerate(reversed(strides)):
        step, size, first = found[-1] if found else (0, 0, 0)
        if found and stride == first * size:
            found[-1] = step, size * 2, first
        else:
            found.append((1 << place, 2, stride))
    return tuple(found)


def _run(strides: Sequence[int]) -> int:
    """How many words of a tile lie side by side."""
    _, size, stride = runs(strides)[0] if strides else (1, 1, 1)
    return size if stride == 1 else 1


def _cut(factor: str, size: int) -> Digits:
    twos = (size & -size).bit_length() - 1
    odd = size >> twos
    rest = [Digit(factor, -1, odd)] if odd > 1 else []
    return (*rest, *(Digit(factor, place, 2) for place in reversed(range(twos))))


def _join(parts: Iterable[Digits]) -> Digits:
    return tuple(chain.from_iterable(parts))


def _inside(read: Digits, write: Digits, most: int) -> int:
    """How many digits a word can have: `2^n` elements, up to `most`."""
    n = 0
    for a, b in zip(reversed(read), reversed(write), strict=True):
        if a.size != 2 or b.size != 2 or 2 << n > most:
            break
        n += 1
    return n


def _within(
    have: Digits, want: Digits
) -> tuple[list[tuple[int, int]], list[tuple[Digit, Digit, int]]]:
    """Swaps of places within the word; and what enters, what leaves, where. Fastest digit first."""
    now, swaps = list(have), []
    for place, digit in enumerate(want):
        if digit in now and now[place] != digit:
            other = now.index(digit)
            swaps.append((min(place, other), max(place, other)))
            now[place], now[other] = now[other], now[place]
    pairs = zip(want, now, range(len(want)), strict=True)
    return swaps, [(enters, leaves, place) for enters, leaves, place in pairs if enters != leaves]


def _tile(read: Digits, write: Sequence[Digit], needed: Sequence[Digit], tile: int) -> list[Digit]:
    """The digits of a tile in read order: the fastest ones of both orders, and those needed."""
    fastest = zip_longest(
        (d for d in reversed(read) if d.size == 2), (d for d in reversed(write) if d.size == 2)
    )
    wanted = dict.fromkeys([*needed, *(d for pair in fastest for d in pair if d)])
    taken = list(wanted)[:tile]
    return [d for d in read if d in taken]


def _strides(digits: Digits) -> dict[Digit, int]:
    return {d: prod(e.size for e in digits[i + 1 :]) for i, d in enumerate(digits)}


def _merge(digits: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Neighbours that keep their order count as one digit."""
    merged: list[tuple[int, int, int]] = []
    for size, read, write in digits:
        if merged and merged[-1][1:] == (read * size, write * size):
            size *= merged.pop()[0]
        merged.append((size, read, write))
    return tuple(merged)


def _mask(bits: int, inside: int, places: dict[int, int]) -> int:
    """The elements of a word whose index has these bits at these places."""
    element = (1 << bits) - 1
    return sum(
        element << bits * i
        for i in range(1 << inside)
        if all(i >> place & 1 == bit for place, bit in places.items())
    )
