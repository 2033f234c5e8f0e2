"""What Marlin's layouts keep, on every executor; whose words it stores is in test_swapped.py."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels import reference
from tests.kernels.reference import LAYOUTS, RAW, grid, lifts, name, values
from transcode.errors import LayoutError
from transcode.kernels import _execute, _gather, _tiles
from transcode.spec import Layout

SIZES = [(64, 128), (192, 96), (320, 224)]
"""Rows and columns; numbers of tiles that are one, and no power of two."""

WITH_DTYPES = [(one, dtype) for one in LAYOUTS for dtype in one.dtypes]


def word(value: Layout | str) -> str:
    return value if isinstance(value, str) else name(value)


each = pytest.mark.parametrize("layout", LAYOUTS, ids=name)
each_dtype = pytest.mark.parametrize(("layout", "dtype"), WITH_DTYPES, ids=word)


@pytest.fixture(params=[_tiles, _gather], ids=["cpu", "triton"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """The device of each executor in turn, which is made to run there."""
    module: ModuleType = request.param
    monkeypatch.setattr(_execute, "executor", lambda device: module)
    return "cpu" if module is _tiles else device


def equal(ours: Tensor, theirs: Tensor) -> bool:
    """The same dtype, shape and bytes."""
    raw = RAW.get(theirs.itemsize, theirs.dtype)
    alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return alike and torch.equal(ours.cpu().contiguous().view(raw), theirs.contiguous().view(raw))


def drawn_codes(layout: Layout, n: int, k: int) -> Tensor:
    return grid(torch.arange(256).to(torch.uint8), n, k * layout.codes.bits // 8)


@each
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_codes_are_where_the_tiling_says_and_come_back(
    layout: Layout, n: int, k: int, place: str
) -> None:
    codes = drawn_codes(layout, n, k)
    words = layout.codes.pack(codes.to(place))
    assert equal(words, reference.codes(layout, codes).view(layout.codes.shape(n, k)))
    assert words.nbytes * 8 == n * k * layout.codes.bits
    assert equal(layout.codes.unpack(words), codes)


@each_dtype
@pytest.mark.parametrize(("n", "groups"), [(64, 4), (192, 7), (320, 1)])
def test_scales_are_where_the_tiling_says_and_come_back(
    layout: Layout, dtype: str, n: int, groups: int, place: str
) -> None:
    how, tiling = layout.scales, reference.order(layout, groups)
    for lift in lifts(layout, dtype):
        scales = grid(values(layout, dtype, lift), n, groups)
        stored = how.pack(scales.to(place), lift)
        assert stored.shape == how.shape(n, groups)
        assert stored.dtype == scales.dtype
        want = tiling.apply(reference.scales(layout, scales, lift))
        assert torch.equal(stored.cpu().view(want.dtype), want)
        lost = torch.zeros_like(scales, dtype=torch.bool)
        if not how.kept:
            lost = how.flushed(scales, lift, dtype)
        raw = RAW[scales.itemsize]
        left = torch.where(lost, 0, scales.view(raw)).view(scales.dtype)
        assert equal(how.unpack(stored, lift, (n, groups)), left)


@each_dtype
def test_every_scale_there_is_comes_back_but_a_flushed_one(layout: Layout, dtype: str) -> None:
    how = layout.scales
    for lift in lifts(layout, dtype):
        every = values(layout, dtype, lift)
        scales = grid(every, 64, -(-len(every) // 64) + 1)
        assert torch.equal(reference.distinct(scales), reference.distinct(every))
        back = how.unpack(how.pack(scales, lift), lift, (64, scales.shape[1]))
        differs = back.view(RAW[scales.itemsize]) != scales.view(RAW[scales.itemsize])
        flushed = how.flushed(scales, lift, dtype)
        if how.kept:
            assert not differs.any()
        else:
            assert torch.equal(differs, flushed)
            assert not back.view(RAW[scales.itemsize])[flushed].any()


@each_dtype
@pytest.mark.parametrize("n", [64, 192, 320])
def test_a_bias_is_where_the_tiling_says_and_comes_back(
    layout: Layout, dtype: str, n: int, place: str
) -> None:
    assert layout.bias
    tiling, bits = layout.tilings["bias"]
    bias = grid(torch.arange(1 << 16).to(torch.int16).view(getattr(torch, dtype)), 1, n)[0]
    stored = layout.bias.pack(bias.to(place))
    assert bits == 16
    assert equal(stored.view(torch.int16), tiling.apply(bias.view(torch.int16)))
    assert equal(layout.bias.unpack(stored), bias)


@pytest.mark.parametrize(
    ("layout", "dtype"), [(one, dtype) for one, dtype in WITH_DTYPES if one.factor], ids=word
)
def test_global_scales_come_back_as_the_kernel_multiplies(layout: Layout, dtype: str) -> None:
    assert layout.factor
    g = torch.cat([torch.linspace(1e-4, 0.02, 64), 2.0 ** torch.arange(-12, 5), torch.zeros(1)])
    for lift in lifts(layout, dtype):
        factors = torch.full_like(g, lift)
        stored = layout.factor.pack(g, factors, dtype)
        own: torch.dtype = getattr(torch, dtype)
        assert stored.dtype == (torch.float32 if layout.factor.dtype else own)
        rounded = g if layout.factor.dtype else g.to(own).float()
        assert equal(layout.factor.unpack(stored, factors, dtype), rounded)


@each
def test_what_does_not_fit_is_refused(layout: Layout) -> None:
    assert layout.bias
    width, bias = layout.codes.bits, layout.bias
    octets = torch.uint8
    numbers = octets if layout.scales.dtype else getattr(torch, layout.dtypes[0])
    lift = layout.scales.lift(1.0, layout.dtypes[0])
    calls: list[Callable[[], Tensor]] = [
        lambda: layout.codes.pack(torch.zeros(48, 64 * width // 8, dtype=octets)),
        lambda: layout.codes.pack(torch.zeros(64, 24 * width // 8, dtype=octets)),
        lambda: layout.codes.unpack(torch.zeros(4, 24 * width, dtype=torch.int32)),
        lambda: layout.scales.pack(torch.zeros(48, 4, dtype=numbers), lift),
        lambda: layout.scales.unpack(torch.zeros(4, 48, dtype=numbers), lift, (48, 4)),
        lambda: bias.pack(torch.zeros(48, dtype=torch.bfloat16)),
        lambda: bias.unpack(torch.zeros(48, dtype=torch.bfloat16)),
    ]
    for call in calls:
        with pytest.raises(LayoutError):
            call()


@each
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_padded_sizes_hold_what_is_padded_and_have_a_kernel(layout: Layout, tp: int) -> None:
    for unit in {group or 1 for group in layout.groups}:
        for hidden, inner, gated in [(128, 32, True), (192, 96, False), (640, 200, True)]:
            inner = -(-inner // unit) * unit
            hidden = -(-hidden // max(64, unit)) * max(64, unit)
            wide, size = layout.pad_experts(hidden, inner, unit, tp, gated)
            rank = size // tp
            assert size % tp == 0 == rank % unit
            assert wide >= hidden
            assert size >= inner
            assert layout.serves(rank * (1 + gated), wide)
            assert layout.serves(wide, rank)
            layout.codes.pack(drawn_codes(layout, rank * (1 + gated), wide))
        for rows, k in [((72,), 3), ((192,), 5), ((96, 96), 2), ((64, 64, 64), 6)]:
            found = layout.pad(rows, k * unit * 16, unit)
            assert layout.serves(sum(found.rows), found.k)
            assert found.k % unit == 0
            assert all(padded >= n for padded, n in zip(found.rows, rows, strict=True))
