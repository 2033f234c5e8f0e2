"""Find the Tiling of a pack function by asking it, or of words that it once gave.

    python scripts/infer_layout.py transcode.kernels.marlin:NVFP4.codes.pack --bits 4
    python scripts/infer_layout.py packer.py:pack --bits 8 --shapes 384x20,128x36
    python scripts/infer_layout.py 'words.safetensors:repack4.*.a80' --bits 4

The function takes `[N, K]` elements and returns a tensor of the same bytes in an order of its own:
uint8, int16 or int32 for 8, 16 and 32 bits, uint8 `[N, K/2]`, the even column in the low nibble,
for 4; `--dtype` views them as another dtype. A shape of one number asks with a vector. A file of
words has pairs of tensors, `NAME.in` in that form and `NAME.out`, for some shapes.

1. Asking. The matrix is filled with two values, by one bit of the source index at a time; what
   comes back, put together, says which source element lies at each stored index. Words on record
   say less: only the value of that element.
2. Reading. A Tiling stores element `sum d_i * P_i` (P_i: the product of the faster sizes) from the
   source place `sum d_i * stride_i`, each digit along one axis. So the digits are read from the
   fastest on: one of size n can be next if its steps lead from the P elements known so far to the
   stored elements P to nP, and if its stride fits in between those of its axis. The search goes
   back where none can (equal values fit by chance). Digits that go on from each other are joined.
3. In each axis one factor is left without a size: that with which the line fits all other shapes.
4. The function is asked again, with random elements, also for odd multiples of the line's tile.
   What differs only by a map from value to value is a table, and said to be one.

Prints the line; or, with exit code 1, where it showed first (flat indices) that there is none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, product
from math import prod
from operator import attrgetter, mul
from runpy import run_path
from typing import NamedTuple

import click
import torch
from safetensors.torch import load_file
from torch import Tensor

from transcode.errors import LayoutError
from transcode.quant import pack_nibbles, unpack_nibbles
from transcode.tiling import Tiling

Shape = tuple[int, ...]
Pack = Callable[[Tensor], Tensor]
Digits = tuple["Digit", ...]  # in stored order, the fastest first
INTS = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}


class NoTiling(Exception):
    """There is no line; says where that showed first."""


class Digit(NamedTuple):
    """`size` steps of `stride` along an axis of the source."""

    size: int
    axis: int
    stride: int


@dataclass(frozen=True)
class Case:
    """One shape: what is known of each element before and after (flat), and the shape after."""

    shape: Shape
    source: Tensor
    stored: Tensor
    axes: Shape


def spread(words: Tensor, bits: int, shape: Shape) -> tuple[Tensor, Shape]:
    """The elements of a source of this shape, flat, and their shape as stored; low bits first."""
    raw = words.contiguous().flatten().view(torch.uint8).clone()
    flat = (unpack_nibbles(raw) if bits == 4 else raw.view(INTS[bits])).long() & ((1 << bits) - 1)
    if len(flat) != prod(shape):
        raise NoTiling(f"{len(flat)} elements stored of a source {shape}, which has {prod(shape)}")
    return flat, (*words.shape[:-1], len(flat) // prod(words.shape[:-1]))


def ask(pack: Pack, values: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Shape]:
    """What the function makes of these elements, flat, and its shape."""
    given = pack_nibbles(values.to(torch.uint8)) if bits == 4 else values.to(INTS[bits])
    return spread(pack(given.view(dtype)), bits, tuple(values.shape))


def asked(pack: Pack, shape: Shape, bits: int, dtype: torch.dtype, values: Sequence[int]) -> Case:
    """Which source element the function stores where."""
    index = torch.arange(prod(shape)).view(shape)
    (off, axes), (on, _) = (ask(pack, torch.full(shape, v), bits, dtype) for v in values)
    stored = torch.zeros_like(off)
    for bit in range((prod(shape) - 1).bit_length()):
        got, _ = ask(pack, torch.tensor(values)[index >> bit & 1], bits, dtype)
        if (wrong := ((on == off) | (got != on) & (got != off)).nonzero()).numel():
            i = int(wrong[0])
            what = f"{off[i]} and {on[i]} of {values}, {got[i]} of both mixed (see --values)"
            raise NoTiling(f"stored element {i} of {shape} is {what}")
        stored += (got == on).long() << bit
    if (missing := (stored.bincount(minlength=len(stored)) == 0).nonzero()).numel():
        raise NoTiling(f"source element {int(missing[0])} of {shape} is not stored")
    return Case(shape, index.flatten(), stored, axes)


def recorded(file: str, pattern: str, bits: int) -> Iterator[Case]:
    """The pairs of a file of words."""
    words = load_file(file)
    for name in (key[:-3] for key in words if re.fullmatch(f"{pattern}.in", key)):
        source = words[f"{name}.in"]
        shape = (*source.shape[:-1], source.shape[-1] * (2 if bits == 4 else 1))
        flat, _ = spread(source, bits, shape)
        yield Case(shape, flat, *spread(words[f"{name}.out"], bits, shape))


def choices(shape: Shape, found: Digits) -> Iterator[Digit]:
    """Every digit whose stride fits in between those found."""
    for axis, length in enumerate(shape):
        taken = [d for d in found if d.axis == axis]
        divisors = [n for n in range(1, length + 1) if length % n == 0]
        for n, s in product(divisors[1:], divisors):
            if length % (n * s) == 0 and all(
                s % (d.stride * d.size) == 0 or d.stride % (s * n) == 0 for d in taken
            ):
                yield Digit(n, axis, s)


def read(case: Case) -> Iterator[Digits]:
    """Every way to read the stored order as digits; NoTiling if there is none."""
    seen: set[Digits] = set()
    known = 0

    def further(found: Digits, places: Tensor) -> Iterator[Digits]:
        nonlocal known
        if not torch.equal(case.source[places], case.stored[: len(places)]):
            return
        known = max(known, len(places))
        if len(places) == len(case.stored):
            yield found
        for digit in choices(case.shape, found):
            size, axis, stride = digit
            step = stride * prod(case.shape[axis + 1 :])
            longer = (*found, digit)
            if found and (axis, stride) == (found[-1].axis, found[-1].stride * found[-1].size):
                longer = (*found[:-1], Digit(found[-1].size * size, axis, found[-1].stride))
            if longer not in seen and case.source[step] == case.stored[len(places)]:
                seen.add(longer)
                yield from further(longer, torch.cat([places + i * step for i in range(size)]))

    yield from further((), torch.zeros(1, dtype=torch.int64))
    if known < len(case.stored):
        then = case.stored[known : known + 3].tolist()
        raise NoTiling(f"{known} elements of {case.shape} fit, but no factor leads on to {then}")


def lines(digits: Digits, case: Case) -> Iterator[str]:
    """The digits as a line, once for every choice of the factors that take what is left."""
    slowest, count = digits[::-1], len(case.shape)
    ordered = sorted(digits, key=lambda d: -d.stride)
    axes = [[d for d in ordered if d.axis == axis] for axis in range(count)]
    reached = list(accumulate((d.size for d in slowest), mul))
    ends = set(accumulate(case.axes[:-1], mul)) & set(reached[:-1])
    for free in product(*axes):
        names = {d: str(i) for axis in axes for i, d in enumerate(axis) if d not in free}
        names = {d: "abcdnk"[-max(count, 2) :][d.axis] + names.get(d, "") for d in digits}
        sized = {d: names[d] + f":{d.size}" * (d not in free) for d in digits}
        source = ", ".join(" ".join(sized[d] for d in axis) for axis in axes)
        parted = [names[d] + "," * (n in ends) for d, n in zip(slowest, reached, strict=True)]
        yield f"{source} -> {' '.join(parted)}"


def compare(line: str, case: Case) -> None:
    """NoTiling where the line stores something else."""
    want = Tiling(line).apply(case.source.view(case.shape)).flatten()
    if (wrong := (want != case.stored).nonzero()).numel():
        i = int(wrong[0])
        raise NoTiling(f"{line}: {i} of {case.shape} is {case.stored[i]}, wanted {want[i]}")


def infer(cases: Sequence[Case]) -> str:
    """The one line that fits all shapes."""
    if not cases:
        raise NoTiling("no words of that name")
    base, fit, failed = max(cases, key=lambda case: len(case.stored)), [], "an axis of one"
    for line in (line for digits in read(base) for line in lines(digits, base)):
        try:
            for case in cases:
                compare(line, case)
            fit.append(line)
        except (NoTiling, LayoutError) as error:
            failed = f"what fits {base.shape} fits no other shape: {error}"
    if len(fit) != 1:
        raise NoTiling("\n".join(["more lines than one fit:", *fit]) if fit else failed)
    axes = (Tiling(fit[0]).apply(case.source.view(case.shape)).shape == case.axes for case in cases)
    source, stored = fit[0].split("->")
    return fit[0] if all(axes) else f"{source}->{stored.replace(',', '')}"


def check(
    line: str, pack: Pack, shapes: Sequence[Shape], bits: int, dtype: torch.dtype
) -> Iterator[str]:
    """Compare on random elements, also in odd multiples of the tile; says what was equal."""
    tile = [prod(map(int, re.findall(r":(\d+)", a))) for a in line.split("->")[0].split(",")]
    tile[-1] *= 1 if tile[-1] % 8 == 0 else 8
    odd = [zip(tile, times, strict=False) for times in ((3, 5), (5, 3), (1, 7))]
    table = torch.arange(1 << min(bits, 8))
    for shape in (*shapes, *(tuple(size * n for size, n in axes) for axes in odd)):
        source = torch.randint(1 << bits, shape)
        try:
            stored, axes = ask(pack, source, bits, dtype)
        except Exception as error:  # of any kind: the function is not ours
            yield f"refused: {'x'.join(map(str, shape))}, {error}"
            continue
        if bits <= 8 and shape == shapes[0]:
            table.scatter_(0, Tiling(line).apply(source).flatten(), stored)
        source = table[source] if bits <= 8 else source
        compare(line, Case(shape, source.flatten(), stored, axes))
        through = " after a table of values" if (table.diff() != 1).any() else ""
        yield f"equal{through}: {'x'.join(map(str, shape))}"


@click.command(help=__doc__.partition("\n")[0])
@click.argument("what", metavar="MODULE:FUNCTION|FILE.py:FUNCTION|FILE.safetensors:REGEX")
@click.option("--bits", type=click.Choice([str(bits) for bits in INTS]), required=True)
@click.option("--shapes", default="384x256,640x128,128x384", show_default=True)
@click.option("--dtype", help="What the function wants, such as float8_e4m3fn.")
@click.option("--values", type=(int, int), default=(0, 1), help="Two that it stores differently.")
def main(what: str, bits: str, shapes: str, dtype: str | None, values: tuple[int, int]) -> None:
    """Print the line, or say that there is none."""
    (name, _, function), size = what.rpartition(":"), int(bits)
    given = getattr(torch, dtype) if dtype else INTS[size]
    try:
        if name.endswith(".safetensors"):
            print(infer(list(recorded(name, function, size))))
            return
        first, *rest = function.split(".")
        pack = (run_path(name) if name.endswith(".py") else vars(import_module(name)))[first]
        pack = attrgetter(".".join(rest))(pack) if rest else pack
        asking = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
        print(line := infer([asked(pack, shape, size, given, values) for shape in asking]))
        for said in check(line, pack, asking, size, given):
            print(said)
    except NoTiling as error:
        sys.exit(f"none: {error}")


if __name__ == "__main__":
    main()
