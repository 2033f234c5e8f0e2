"""Padding against searches for the smallest sizes that Marlin's kernels serve."""

from __future__ import annotations

from math import lcm

import pytest

from tests.kernels.reference import LAYOUTS, name
from transcode import catalog
from transcode.errors import LayoutError
from transcode.kernels import marlin
from transcode.spec import Layout

WIDE = catalog.layouts()["marlin-mxfp4"]
TIGHT = [one for one in LAYOUTS if one not in WIDE]
SERVED = [(64, 128), (128, 64), (192, 128), (384, 64), (128, 192)]


def up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def test_the_kernel_has_thread_tiles_for_64_by_128_or_128_by_64() -> None:
    assert all(marlin.serves(*size) for size in SERVED)
    assert not any(marlin.serves(n, k) for n, k in [(64, 64), (192, 192), (96, 128), (128, 96)])


@pytest.mark.parametrize("unit", [1, 16, 32, 128])
@pytest.mark.parametrize("rows", [(8,), (72,), (192,), (96, 96), (64, 64, 64), (128, 8), (200, 72)])
def test_joined_linears_get_the_smallest_area_and_then_perimeter(
    rows: tuple[int, ...], unit: int
) -> None:
    least = sum(up(n, 64) for n in rows)
    for k in range(max(unit, 16), 400, max(unit, 16)):
        sizes = [
            (n, wide)
            for n in range(least, least + 129, 64)
            for wide in range(k, k + 257)
            if wide % unit == 0 and marlin.serves(n, wide)
        ]
        n, wide = min(sizes, key=lambda s: (s[0] * s[1], sum(s)))
        found = marlin.pad(rows, k, unit)
        assert (sum(found.rows), found.k) == (n, wide)
        assert found.rows[:-1] == tuple(up(each, 64) for each in rows[:-1])
        assert found.whole == (n == least)


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
    found = marlin.pad(rows, k, 16)
    assert (found.rows, found.k, found.whole) == (padded, padded_k, whole)


@pytest.mark.parametrize("layout", TIGHT, ids=name)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_experts_get_the_smallest_width_that_every_rank_has_a_kernel_for(
    layout: Layout, tp: int, gated: bool
) -> None:
    for unit in {group or 1 for group in layout.groups}:
        for hidden in (lcm(64, unit), 128, 3 * lcm(64, unit)):
            for inner in range(8, 600, 72):
                least = 128 if layout.runtime == "sglang" and not gated else 64
                rank = next(
                    size
                    for size in range(least, 1400, 64)
                    if size * tp >= inner
                    and size % unit == 0 == size % least
                    and marlin.serves(size * (1 + gated), hidden)
                    and marlin.serves(hidden, size)
                )
                assert layout.pad_experts(hidden, inner, unit, tp, gated) == (hidden, rank * tp)


@pytest.mark.parametrize("layout", WIDE, ids=name)
def test_experts_in_mxfp4_get_buffers_as_wide_as_the_runtimes_make_them(layout: Layout) -> None:
    for hidden, inner in [(96, 32), (192, 96), (256, 128), (2880, 2880)]:
        for gated in (True, False):
            sizes = (up(hidden, 256), up(inner, 128))
            assert layout.pad_experts(hidden, inner, 32, 1, gated) == sizes
            sizes = (up(hidden, 256), 4 * up(-(-inner // 4), 128))
            assert layout.pad_experts(hidden, inner, 32, 4, gated) == sizes


@pytest.mark.parametrize("layout", TIGHT, ids=name)
def test_a_hidden_size_that_cannot_be_tiled_is_an_error(layout: Layout) -> None:
    for unit in {group or 1 for group in layout.groups}:
        for hidden in (96, 32, lcm(64, unit) + 32):
            with pytest.raises(LayoutError, match=f"hidden size {hidden} .* {lcm(64, unit)}"):
                layout.pad_experts(hidden, 64, unit, 1, True)


def test_only_sglangs_mxfp4_pads_with_scales_of_one() -> None:
    ones = {name(one) for one in LAYOUTS if one.scales.fill}
    assert ones == {"marlin-mxfp4 sglang"}
    assert next(one.scales.fill for one in LAYOUTS if name(one) in ones) == 127
