"""Marlin's rules in closed form: places in tiles, padding, lifts, and what the kernel takes for
zero (shared/facts/marlin.md, sections 1 to 4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from tests import marlin_decode
from tests.kernels.reference import LAYOUTS, grid, name
from transcode import catalog
from transcode.errors import LayoutError
from transcode.kernels import _marlin_scales as of_scales
from transcode.kernels import marlin
from transcode.quant import unpack_nibbles
from transcode.spec import Layout
from transcode.tiling import Tiling

VLLM, SGLANG = catalog.layouts()["marlin-nvfp4"]
MXFP4, MXFP4_SGLANG, A8 = catalog.layouts()["marlin-mxfp4"]
FP8, MXFP8 = (catalog.layout(f"marlin-{word}") for word in ("fp8", "mxfp8"))
E4M3 = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn)
SORTED = (0, 2, 1, 3, 4, 6, 5, 7)


def places(layout: Layout, n: int, k: int) -> tuple[Tensor, Tensor]:
    """In which word of all, and how far up in it, each code `[n, k]` lies."""
    row, column = torch.arange(n)[:, None], torch.arange(k)
    if layout is A8:
        kt, kh, q, i = column // 32, column // 16 % 2, column // 4 % 4, column % 4
        nt, w, c = row // 32, row // 8 % 4, row % 8
        return (kt * (n // 32) + nt) * 128 + 16 * c + 4 * q + w, 4 * (2 * i + kh) + 0 * row
    kt, kh, q, b = column // 16, column // 8 % 2, column // 2 % 4, column % 2
    nt, w, h, c = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    if layout.codes.bits == 4:
        return kt * 2 * n + 128 * nt + 16 * c + 4 * q + w, 4 * (4 * b + 2 * h + kh)
    return kt * 4 * n + 256 * nt + 32 * c + 8 * q + 2 * w + h, 8 * (2 * b + kh) + 0 * row


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (192, 160), (448, 96)])
def test_codes_lie_where_the_closed_form_says(layout: Layout, n: int, k: int) -> None:
    bits = layout.codes.bits
    codes = grid(torch.arange(256).to(torch.uint8), n, k * bits // 8)
    words = layout.codes.pack(codes).flatten()
    word, shift = places(layout, n, k)
    assert torch.equal(words[word] >> shift & (1 << bits) - 1, _elements(codes, bits).int())


def _elements(codes: Tensor, bits: int) -> Tensor:
    return unpack_nibbles(codes) if bits == 4 else codes


@pytest.mark.parametrize(
    ("tiling", "block", "source"),
    [
        (of_scales.BLOCKS, 64, lambda i, j: i + 8 * j),
        (of_scales.BYTES, 64, lambda i, j: i + 8 * SORTED[j]),
        (of_scales.COLUMNS, 32, lambda i, j: 2 * i + j % 2 + 8 * (j // 2)),
    ],
    ids=["blocks", "bytes", "columns"],
)
def test_scales_and_biases_lie_where_the_closed_form_says(
    tiling: Tiling, block: int, source: Callable[[int, int], int]
) -> None:
    scales = torch.arange(192 * 3).view(192, 3)
    stored = tiling.apply(scales)
    for start, i, j in product(range(0, 192, block), range(block // 8), range(8)):
        assert torch.equal(stored[:, start + 8 * i + j], scales[start + source(i, j)])
    if block == 32:
        assert torch.equal(marlin.BIAS.apply(scales[:, 0]), stored[0])


def test_bytes_of_scales_are_what_the_kernels_decode() -> None:
    for lift in (1.0, 2.0, 4.0, 2.0**15):
        scales = grid(E4M3[E4M3.float() * lift <= 448], 64, 4)
        stored = VLLM.scales.pack(scales, lift)
        left = torch.where(VLLM.scales.flushed(scales, lift, "bfloat16"), 0, scales.float())
        assert torch.equal(marlin_decode.scales(stored, lift), left)
    scales = grid(E4M3, 64, 4)
    assert torch.equal(marlin_decode.scales(SGLANG.scales.pack(scales, 1.0), 1.0), scales.float())


def test_the_lift_moves_the_largest_scale_into_range() -> None:
    lift = VLLM.scales.lift
    assert [lift(x, "bfloat16") for x in (448.0, 224.0, 0.0)] == [1.0, 2.0, 1.0]
    assert all(224 < lift(x, "bfloat16") * x <= 448 for x in E4M3[1:].float().tolist())
    for x in E4M3.float().tolist():
        assert VLLM.scales.lift(x, "float16") == 1.0
        assert {SGLANG.scales.lift(x, dtype) for dtype in SGLANG.dtypes} == {1.0}
        assert {one.scales.lift(x, "bfloat16") for one in (MXFP4, MXFP8)} == {1.0}
        assert A8.scales.lift(x, "bfloat16") == 64.0
        assert (FP8.scales.lift(x, "bfloat16"), FP8.scales.lift(x, "float16")) == (2.0**120, 256.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_flushed_are_the_scales_that_are_zero_to_the_kernel(layout: Layout) -> None:
    for dtype in layout.dtypes:
        if layout.scales.dtype == "F8_E4M3":
            for lift in (1.0, 8.0) if layout is VLLM else (1.0,):
                value = E4M3.float() * lift
                small = (value > 0) & (value < 2.0**-6)
                if layout is SGLANG and dtype == "float16":
                    small = torch.zeros_like(small)
                assert torch.equal(layout.scales.flushed(E4M3, lift, dtype), small)
            continue
        own = torch.uint8 if layout.scales.dtype else getattr(torch, dtype)
        every = torch.arange(256).to(own)
        zero = every == 0 if layout in (MXFP4, MXFP4_SGLANG, MXFP8) else every < 0
        assert torch.equal(layout.scales.flushed(every, 1.0, dtype), zero)
    assert layout.scales.kept == (layout is not VLLM)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_too_large_are_the_scales_that_the_lift_takes_out_of_range(layout: Layout) -> None:
    for dtype in layout.dtypes:
        lift = layout.scales.lift(448.0, dtype)
        if layout.scales.dtype == "F8_E4M3":
            assert not layout.scales.overflows(E4M3, lift).any()
        elif layout.scales.dtype == "U8":
            every = torch.arange(256).to(torch.uint8)
            limit = 249 if layout is A8 else 255
            assert torch.equal(layout.scales.overflows(every, lift), every > limit)
        else:
            scales = torch.tensor([0, 1e-3, 255, 255.9, 256, 3e4]).to(getattr(torch, dtype))
            large = scales.float() >= 256
            assert torch.equal(layout.scales.overflows(scales, lift), large)


@pytest.mark.parametrize(
    ("layout", "dtype", "good", "bad"),
    [
        (VLLM, "bfloat16", (0.0, 2.0**-149, 511.9), (512.0, 1e38)),
        (VLLM, "float16", (0.0, 2.0**-133, 2.0**120), (2.0**-134, 2.0**121)),
        (SGLANG, "bfloat16", (0.0, 2.0**-133, 510.0), (2.0**-149, 511.0)),  # 511 becomes 512
        (SGLANG, "float16", (0.0, 2.0**-21, 511.75), (2.0**-22, 1e-9, 512.0, 1e38)),
    ],
    ids=lambda value: name(value) if isinstance(value, Layout) else "",
)
def test_a_global_scale_that_is_no_finite_normal_number_is_an_error(
    layout: Layout, dtype: str, good: tuple[float, ...], bad: tuple[float, ...]
) -> None:
    factor, lift = layout.factor, torch.ones(2)
    assert factor
    for g in good:
        factor.pack(torch.tensor([1.0, g]), lift, dtype)
    for g in bad:
        with pytest.raises(LayoutError, match=re.escape(f"scale {g:g} has no finite normal")):
            factor.pack(torch.tensor([1.0, g]), lift, dtype)
