"""A layout as a picture: which source element lies where in its first tiles, from the Tilings."""

from __future__ import annotations

from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from math import prod

import torch

from transcode.catalog import layout
from transcode.tiling import Tiling

CELLS = 8
"""Elements in a line: of 4 bits, those of a word. Also the size shown of a factor that has none but
is not among the slowest, so that a part of it lies in every tile."""

LINES = 32
"""The most lines of a tile that `text` shows; `svg` has four columns of them."""

WIDTH, HEIGHT, MARGIN = 48, 18, 56
"""Of a cell in an SVG; and what is left of a line of cells, for its number."""

Place = tuple[int, ...]
"""Row and column of a source element, or one index into a vector."""


@dataclass(frozen=True)
class Tile:
    """The first tile of a Tiling, in elements of `bits` bits.

    sizes: of each factor, in source order. shape: of the source. places: in stored order.
    """

    name: str
    tiling: Tiling
    bits: int
    sizes: dict[str, int]
    shape: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def lines(self) -> list[tuple[int, tuple[Place, ...]]]:
        """The places, CELLS at a time, with the number of the word or else of the first element."""
        step = 1 if self.bits == 4 else CELLS
        starts = range(0, len(self.places), CELLS)
        return [(i // CELLS * step, self.places[i : i + CELLS]) for i in starts]

    def heading(self, lines: int) -> tuple[str, str, str]:
        """What is shown of the tile, when that is so many lines, and how to read it."""
        unit = {4: "nibbles", 8: "bytes"}.get(self.bits, f"elements of {self.bits} bits")
        size = " x ".join(map(str, self.shape)) + f" = {len(self.places)}" * (len(self.shape) > 1)
        words = f" in {len(self.lines)} words of 32 bits" if self.bits == 4 else ""
        more = f"; the first {lines} lines" if lines < len(self.lines) else ""
        cell = "row,column" if len(self.shape) == 2 else "the index"
        line = "a word, the lowest nibble first" if self.bits == 4 else f"{CELLS} {unit}"
        title = f"{self.name}: the first tile, {size} {unit}{words}{more}"
        return title, self.tiling.pattern, f"a cell is {cell} in the source; a line is {line}"


def tiles(name: str, variant: str | None = None) -> list[Tile]:
    """The first tile of each Tiling of a layout; LayoutError if there is no such layout."""
    tilings = layout(name, word=variant).tilings
    return [_tile(what, tiling, bits) for what, (tiling, bits) in tilings.items()]


def text(name: str, variant: str | None = None) -> str:
    """For a terminal: of each Tiling the line, the steps of its factors, and the first cells."""
    drawn = "\n".join(_text(tile) for tile in tiles(name, variant))
    return drawn or f"{name}: all bytes in the source's order"


def svg(name: str, variant: str | None = None) -> str:
    """The same as a standalone SVG: the hue says the source row, the shade its column."""
    parts: list[str] = []
    top, wide = 8, 0
    for tile in tiles(name, variant):
        lines = tile.lines[: 4 * LINES]
        for heading in tile.heading(len(lines)):
            top += 18
            parts.append(f'<text x="8" y="{top}">{escape(heading)}</text>')
            wide = max(wide, 16 + 8 * len(heading))
        for i, (number, places) in enumerate(lines):
            left = MARGIN + i // LINES * (MARGIN + CELLS * WIDTH)
            y = top + 10 + i % LINES * HEIGHT
            parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{number}</text>')
            parts += [_cell(tile, left + WIDTH * j, y, place) for j, place in enumerate(places)]
            wide = max(wide, left + CELLS * WIDTH + 8)
        top += 28 + min(len(lines), LINES) * HEIGHT
    size = f'width="{wide}" height="{top}"'
    about = f'xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {wide} {top}"'
    head = f'<svg {about} font-family="monospace" font-size="12">\n<title>{escape(name)}</title>'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>\n"])


def _tile(name: str, tiling: Tiling, bits: int) -> Tile:
    """The smallest source with a whole tile, and where its elements go."""
    axes = [
        [(factor, int(size or 0)) for factor, _, size in (f.partition(":") for f in axis.split())]
        for axis in tiling.pattern.split("->")[0].split(",")
    ]
    sized = {factor for axis in axes for factor, size in axis if size}
    stored = [factor for group in tiling.groups for factor in group]
    outer = list(takewhile(lambda factor: factor not in sized, stored[:-1]))
    shape = tuple(
        prod(size or (1 if factor in outer else CELLS) for factor, size in axis) for axis in axes
    )
    order = tiling.apply(torch.arange(prod(shape)).view(shape)).flatten()
    places = zip(*(axis.tolist() for axis in torch.unravel_index(order, shape)), strict=True)
    return Tile(name, tiling, bits, tiling.sizes(shape), shape, tuple(places))


def _text(tile: Tile) -> str:
    """The headings, the steps of the factors, and a table of cells."""
    lines = tile.lines[:LINES]
    labels = [[",".join(map(str, place)) for place in places] for _, places in lines]
    width = max(len(label) for line in labels for label in line)
    what = "word" if tile.bits == 4 else "from"
    heads = [what, *(str(i) for i in range(len(labels[0])))]
    table = [heads, *([str(n), *line] for (n, _), line in zip(lines, labels, strict=True))]
    rows = [f"{row[0]:>6}  " + "".join(f"  {cell:>{width}}" for cell in row[1:]) for row in table]
    return "\n".join([*tile.heading(len(lines)), "", *_steps(tile), "", *rows, ""])


def _steps(tile: Tile) -> list[str]:
    """Where one step of each factor leads, the fastest factor first."""
    axes = ("row", "column") if len(tile.shape) == 2 else ("index",)
    found, step = [], 1
    for factor in reversed([f for group in tile.tiling.groups for f in group]):
        if (size := tile.sizes[factor]) > 1:
            to = next(f"{a} + {n}" for a, n in zip(axes, tile.places[step], strict=True) if n)
            found.append(f"  {factor}:{size:<4} stored + {step:<6} {to}")
            step *= size
    return found


def _cell(tile: Tile, x: int, y: int, place: Place) -> str:
    """A coloured square with the place in it."""
    row, rows = place[0], tile.shape[0]
    column, columns = (*place, 0)[1], (*tile.shape, 1)[1]
    red, green, blue = hls_to_rgb(row / rows, 0.92 - 0.22 * column / columns, 0.7)
    colour = "#" + "".join(f"{round(part * 255):02x}" for part in (red, green, blue))
    label = ",".join(map(str, place))
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{colour}" stroke="#888"/>'
        f'<text x="{x + WIDTH // 2}" y="{y + 13}" text-anchor="middle">{label}</text>'
    )
