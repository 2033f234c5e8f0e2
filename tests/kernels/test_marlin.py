"""Marlin's order against words of the compiled kernel, and the traps of its scales."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import marlin_decode
from transcode.errors import LayoutError
from transcode.kernels import marlin
from transcode.quant import unpack_nibbles
from transcode.tiling import Tiling

GOLDEN = Path(__file__).parents[1] / "golden"
REPACK = load_file(GOLDEN / "marlin_repack.safetensors")
VLLM = load_file(GOLDEN / "vllm_marlin_nvfp4.safetensors")
SIZES = ("64x128", "128x128", "192x320")
E4M3 = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn)


def swapped(tiling: Tiling) -> list[Tiling]:
    """The tiling with every pair of neighbouring stored factors swapped that differ in size 1."""
    source, stored = tiling.pattern.split("->")
    factors = re.findall(r"\w+", stored)
    found = []
    for a, b in itertools.pairwise(factors):
        other = " ".join({a: b, b: a}.get(f, f) for f in factors)
        found.append(Tiling(f"{source}-> {other}"))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_words_equal_the_compiled_repack(size: str) -> None:
    codes, words = REPACK[f"repack4.{size}.a80.in"], REPACK[f"repack4.{size}.a80.out"]
    assert torch.equal(marlin.pack_codes(codes), words)
    assert torch.equal(marlin.unpack_codes(words), codes)
    assert torch.equal(marlin_decode.codes(words), unpack_nibbles(codes).int())


def test_a_swapped_factor_is_caught() -> None:
    codes = unpack_nibbles(REPACK["repack4.192x320.a80.in"])
    right = marlin.CODES.apply(codes).flatten()
    assert all(not torch.equal(t.apply(codes).flatten(), right) for t in swapped(marlin.CODES))
    scales = VLLM["dense.any.192x320.in.weight_scale"].view(torch.uint8)
    right = marlin.SCALES.apply(scales).flatten()
    wrong = [t for t in swapped(marlin.SCALES) if torch.equal(t.apply(scales).flatten(), right)]
    assert not wrong
    bias = torch.arange(128)
    wrong = [t for t in swapped(marlin.BIAS) if torch.equal(t.apply(bias), marlin.BIAS.apply(bias))]
    assert not wrong


@pytest.mark.parametrize("lift", [1.0, 2.0, 4.0, 2.0**15])
def test_every_scale_comes_back_or_is_flushed(lift: float) -> None:
    scales = E4M3[E4M3.float() * lift <= 448]
    grid = scales.view(torch.uint8).repeat(64, 1).view(torch.float8_e4m3fn)
    stored, lost = marlin.pack_scales(grid, lift), marlin.flushed(grid, lift)
    back = marlin.unpack_scales(stored, lift)
    assert torch.equal(back.float(), torch.where(lost, 0, grid.float()))
    assert torch.equal(marlin_decode.scales(stored, lift), back.float())
    assert torch.equal(lost, (grid.float() > 0) & (grid.float() * lift < 2.0**-6))


def test_the_lift_moves_the_largest_scale_into_range() -> None:
    assert marlin.lift(448.0, "bfloat16") == 1.0
    assert marlin.lift(224.0, "bfloat16") == 2.0
    assert marlin.lift(0.0, "bfloat16") == 1.0
    assert marlin.lift(1.75, "float16") == 1.0
    for largest in E4M3[1:].float().tolist():
        assert 224 < marlin.lift(largest, "bfloat16") * largest <= 448


@pytest.mark.parametrize("g", [1e38, 512.0 * 2, 3e-45])
def test_a_global_scale_out_of_range_is_an_error(g: float) -> None:
    factor = torch.tensor([1.0])
    with pytest.raises(LayoutError, match="no finite normal float32"):
        marlin.pack_global(torch.tensor([g]), factor, "bfloat16" if g > 1 else "float16")


def test_a_size_that_cannot_be_tiled_is_an_error() -> None:
    with pytest.raises(LayoutError, match="hidden size 96"):
        marlin.pad_experts(96, 64, 1)


@pytest.mark.parametrize(
    ("rows", "k", "padded", "padded_k", "whole"),
    [
        ([72], 112, (128,), 128, True),
        ([192], 320, (192,), 384, True),
        ([96, 96], 64, (128, 128), 64, True),
        ([64, 64, 64], 192, (64, 64, 64), 256, True),
        ([64, 64, 64], 64, (64, 64, 128), 64, False),
    ],
)
def test_members_are_padded_to_tiles(
    rows: list[int], k: int, padded: tuple[int, ...], padded_k: int, whole: bool
) -> None:
    found = marlin.pad(rows, k)
    assert (found.rows, found.k, found.whole) == (padded, padded_k, whole)
    assert marlin.serves(sum(found.rows), found.k)
