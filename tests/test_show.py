"""Pictures of layouts: what they say is where the consumers' own words have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from tests.convert import run
from transcode import catalog, show
from transcode.errors import LayoutError
from transcode.quant import unpack_nibbles
from transcode.tiling import Tiling

GOLDEN = Path(__file__).parent / "golden"
REPACK = load_file(GOLDEN / "marlin_repack.safetensors")
VLLM = load_file(GOLDEN / "vllm_marlin_nvfp4.safetensors")
SVG = "{http://www.w3.org/2000/svg}"
MARLIN = catalog.layout("marlin-nvfp4")


def tables(text: str) -> list[dict[int, list[tuple[int, ...]]]]:
    """The cells of each tile, by what stands before their line."""
    found: list[dict[int, list[tuple[int, ...]]]] = []
    for line in text.splitlines():
        first, *cells = line.split()[:9] or [""]
        if first in ("word", "from"):
            found.append({})
        elif first.isdecimal():
            found[-1][int(first)] = [tuple(map(int, cell.split(","))) for cell in cells]
    return found


def drawn(monkeypatch: pytest.MonkeyPatch, line: str, bits: int) -> str:
    layout = replace(MARLIN, tilings={"rows": (Tiling(line), bits)})
    monkeypatch.setattr(show, "layout", lambda name, word: layout)
    return show.text("any")


def test_codes_are_shown_where_the_compiled_repack_has_them() -> None:
    codes, words = (REPACK[f"repack4.192x320.a80.{end}"] for end in ("in", "out"))
    source, cells = unpack_nibbles(codes), tables(show.text("marlin-nvfp4"))[0]
    assert list(cells) == list(range(32))
    for word, places in cells.items():
        nibbles = [int(words[0, word]) >> 4 * i & 15 for i in range(8)]
        assert nibbles == [int(source[place]) for place in places]


def test_scales_are_shown_where_vllm_has_them() -> None:
    """vLLM's bytes are others, but never smaller for a larger scale."""
    scales = VLLM["dense.any.192x320.in.weight_scale"].float()
    stored = VLLM["dense.any.192x320.out.weight_scale"].view(torch.uint8)[0].tolist()
    cells = tables(show.text("marlin-nvfp4"))[1]
    places = [place for start in range(0, 64, 8) for place in cells[start]]
    pairs = sorted((float(scales[p]), byte) for p, byte in zip(places, stored, strict=False))
    assert sorted(places) == [(row, 0) for row in range(64)]
    assert len({byte for _, byte in pairs}) > 10
    assert [byte for _, byte in pairs] == sorted(byte for _, byte in pairs)


def test_biases_are_shown_where_vllm_has_them() -> None:
    given, stored = (VLLM[f"dense.bf16.bias-64x128.{end}.bias"] for end in ("in", "out"))
    cells = tables(show.text("marlin-nvfp4"))[2]
    for start, places in cells.items():
        assert [given[place].item() for place in places] == stored[start : start + 8].tolist()
    assert list(cells) == [0, 8, 16, 24]


def test_the_steps_of_the_factors_are_listed_fastest_first() -> None:
    lines = [line.split() for line in show.text("marlin-nvfp4").split("\n\n")[1].splitlines()]
    assert [" ".join(line) for line in lines] == [
        "g:2 stored + 1 column + 8",
        "h:2 stored + 2 row + 8",
        "e:2 stored + 4 column + 1",
        "w:4 stored + 8 row + 16",
        "q:4 stored + 32 column + 2",
        "c:8 stored + 128 row + 1",
    ]


def test_an_unsized_factor_is_shown_where_it_is_in_every_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cells,) = tables(drawn(monkeypatch, "h:2 b m:8, k -> b h m k", 8))
    assert cells[0] == [(0, k) for k in range(8)]
    assert cells[64] == [(8, k) for k in range(8)]
    assert tables(drawn(monkeypatch, "n, k -> n, k", 4)) == [{0: [(0, k) for k in range(8)]}]
    (cells,) = tables(drawn(monkeypatch, "m, kb b:128 -> kb m b", 8))
    assert list(cells)[-1] == 120
    assert cells[120] == [(0, k) for k in range(120, 128)]


@pytest.mark.parametrize("name", sorted(catalog.layouts()))
def test_the_drawing_has_every_place_of_the_tiles_once_and_in_order(name: str) -> None:
    root = ElementTree.fromstring(show.svg(name))
    labels = [e for e in root.iter(f"{SVG}text") if e.get("text-anchor") == "middle"]
    cells = [e.text for e in labels]
    want = [",".join(map(str, p)) for t in show.tiles(name) for p in t.places[:1024]]
    assert cells == want
    squares = [e for e in root.iter(f"{SVG}rect") if e.get("stroke")]
    corners = [(int(e.attrib["x"]), int(e.attrib["y"])) for e in squares]
    assert len(set(corners)) == len(squares) == len(cells)
    for i, ((x, y), label) in enumerate(zip(corners, labels, strict=True)):
        assert x < int(label.attrib["x"]) < x + show.WIDTH
        assert y < int(label.attrib["y"]) < y + show.HEIGHT
        assert i % 8 == 0 or corners[i - 1] == (x - show.WIDTH, y)
    wide, high = (int(root.attrib[side]) for side in ("width", "height"))
    assert all(int(e.attrib["x"]) + show.WIDTH <= wide for e in squares)
    assert all(int(e.attrib["y"]) + show.HEIGHT <= high for e in squares)


@pytest.mark.parametrize("name", sorted(catalog.layouts()))
def test_every_tiling_is_named_and_written_out(name: str) -> None:
    text, drawing = show.text(name), ElementTree.fromstring(show.svg(name))
    said = [e.text for e in drawing.iter(f"{SVG}text")]
    for what, (tiling, _) in catalog.layout(name).tilings.items():
        assert f"{what}: the first tile" in text
        assert tiling.pattern in text
        assert tiling.pattern in said


def test_each_source_place_has_a_colour_of_its_own() -> None:
    codes = show.tiles("marlin-nvfp4")[0]
    drawing = ElementTree.fromstring(show.svg("marlin-nvfp4"))
    squares = [e.get("fill") for e in drawing.iter(f"{SVG}rect") if e.get("stroke")]
    fill = dict(zip(codes.places, squares, strict=False))
    assert len(set(fill.values())) == 1024


def test_a_variant_is_drawn_and_what_has_no_order_of_its_own_says_so() -> None:
    drawn = run("layouts", "show", "megamoe-nvfp4", "--variant", "sgl").out
    assert "h:2 b u:8 p:2, k -> b p h u, k" in drawn
    assert "h:2 b u:8 p:2" not in run("layouts", "show", "megamoe-nvfp4").out
    assert (
        run("layouts", "show", "cutlass-fp8").out
        == "cutlass-fp8: all bytes in the source's order\n"
    )


def test_an_unknown_layout_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"no layout 'marlin'; there are .*marlin-nvfp4"):
        show.text("marlin")


def test_the_command_draws_and_writes(tmp_path: Path) -> None:
    ran = run("layouts", "show", "marlin-nvfp4", "--svg", tmp_path / "x.svg")
    assert (ran.code, ran.out) == (0, show.text("marlin-nvfp4") + "\n")
    assert (tmp_path / "x.svg").read_text() == show.svg("marlin-nvfp4")
    assert "\nmarlin-nvfp4 " in run("layouts").out
    assert run("layouts", "show", "none").code == 1
