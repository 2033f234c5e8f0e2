"""Changes of encoding by kernels: the bytes of quantise.py, which defines them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from transcode import change, quantise, requantise
from transcode.kernels import _recode, _recode_cpu
from transcode.kernels._source import WHOLE, Source, source
from transcode.quant import Encoding, QuantTensor
from transcode.recipe import ENCODINGS

N, K = 66, 96
SOURCES = ("bf16", "fp16", "nvfp4", "mxfp4", "mxfp8", "tile", "row", "tensor")


def drawn(kind: str, rows: int = N, columns: int = K) -> QuantTensor | Tensor:
    """Random bits in every kind of source: zeros, -0, ties, tiny and large blocks among them."""
    draw = torch.Generator().manual_seed(sum(kind.encode()))

    def octets(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=draw).to(torch.uint8)

    if kind in ("bf16", "fp16"):
        value = torch.randn(rows, columns, generator=draw)
        value *= 2.0 ** torch.randint(
            -12, 6, (rows, columns // 32), generator=draw
        ).repeat_interleave(32, 1)
        value[3], value[4, ::2], value[5] = 0.0, -0.0, 2.0**-14
        value[6] = torch.arange(columns) * 0.25 - 6  # ties
        return value.to(torch.bfloat16 if kind == "bf16" else torch.float16)
    four, eight = octets(rows, columns // 2), octets(rows, columns)
    eight = (
        torch.where((eight & 0x7F) == 0x7F, 0x3C, eight).to(torch.uint8).view(torch.float8_e4m3fn)
    )
    four[2], eight.view(torch.uint8)[2] = 0x88, 0x80
    if kind == "nvfp4":
        scales = octets(rows, columns // 16, high=0x7F).view(torch.float8_e4m3fn)
        return QuantTensor(Encoding.NVFP4, four, scales, torch.tensor(0.0173))
    if kind == "mxfp4":
        return QuantTensor(Encoding.MXFP4, four, octets(rows, columns // 32, low=90, high=150))
    if kind == "mxfp8":
        return QuantTensor(Encoding.MXFP8, eight, octets(rows, columns // 32, low=90, high=150))
    scales = torch.rand(-(-rows // 32), columns // 32, generator=draw) * 0.01
    if kind == "tile":
        return QuantTensor(Encoding.FP8_BLOCK, eight, scales, None, (32, 32))
    if kind == "row":
        return QuantTensor(Encoding.FP8_CHANNEL, eight, torch.rand(rows, generator=draw))
    return QuantTensor(Encoding.FP8_TENSOR, eight, torch.tensor(0.37))


def meaning(of: QuantTensor | Tensor) -> Tensor:
    return of.float() if isinstance(of, Tensor) else of.dequantize()


def moved(of: QuantTensor | Tensor, device: str) -> Source:
    if isinstance(of, QuantTensor):
        factor = None if of.global_scale is None else of.global_scale.to(device)
        of = QuantTensor(of.encoding, of.codes.to(device), of.scales.to(device), factor, of.block)
    else:
        of = of.to(device)
    found = source(of)
    assert found is not None
    return found


@pytest.fixture(params=[_recode, _recode_cpu], ids=["triton", "cpu"])
def run(request: pytest.FixtureRequest) -> ModuleType:
    """The module that changes encodings."""
    module: ModuleType = request.param
    return module


@pytest.fixture
def at(run: ModuleType, device: str) -> str:
    """Where it runs."""
    return device if run is _recode else "cpu"


def equal(made: Tensor, wanted: Tensor) -> bool:
    return torch.equal(made.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", SOURCES)
def test_the_largest_of_a_piece_is_found(run: ModuleType, at: str, kind: str) -> None:
    of = drawn(kind)
    found = run.largest(moved(of, at)).cpu()
    assert torch.equal(found, meaning(of).abs().reshape(N, -1, 32).amax(-1))


@pytest.mark.parametrize("search", ["max", "mse"])
@pytest.mark.parametrize("kind", SOURCES)
def test_nvfp4_is_that_of_the_definition(run: ModuleType, at: str, kind: str, search: str) -> None:
    of = drawn(kind)
    factor = quantise.nvfp4_factor(meaning(of).abs().max())
    wanted = quantise.nvfp4(meaning(of), factor, search)
    steps = (quantise.BELOW, quantise.ABOVE) if search == "mse" else (0, 0)
    codes, scales = run.nvfp4(moved(of, at), factor.reshape(1).to(at), *steps)
    assert equal(scales, wanted.scales)
    assert equal(codes, wanted.codes)


@pytest.mark.parametrize("search", ["max", "mse"])
@pytest.mark.parametrize("kind", SOURCES)
def test_mxfp4_is_that_of_the_definition(run: ModuleType, at: str, kind: str, search: str) -> None:
    of = drawn(kind)
    wanted = quantise.mxfp4(meaning(of), search)
    codes, scales = run.mxfp4(moved(of, at), search)
    assert equal(scales, wanted.scales)
    assert equal(codes, wanted.codes)


@pytest.mark.parametrize("kind", SOURCES)
def test_mxfp8_is_that_of_the_definition(run: ModuleType, at: str, kind: str) -> None:
    of = drawn(kind)
    wanted = quantise.mxfp8(meaning(of))
    codes, scales = run.mxfp8(moved(of, at))
    assert equal(scales, wanted.scales)
    assert equal(codes, wanted.codes)


def scaled(value: Tensor) -> Iterator[tuple[Tensor, Tensor, tuple[int, int]]]:
    """Codes of tiles, rows and all, their scales, and of how many rows and columns one is."""
    tiles = quantise.fp8_tiles(value, (64, 32), powers=False)
    yield tiles.codes, tiles.scales, (64, 32)
    rows = quantise.fp8_rows(value)
    yield rows.codes, rows.scales, (1, WHOLE)
    one = quantise.fp8_tensor(value, quantise.fp8_scale(value.abs().max()))
    yield one.codes, one.scales.reshape(1), (WHOLE, WHOLE)


@pytest.mark.parametrize("kind", SOURCES)
def test_fp8_is_that_of_the_definition(run: ModuleType, at: str, kind: str) -> None:
    of = drawn(kind)
    for codes, scales, tile in scaled(meaning(of)):
        assert equal(run.fp8(moved(of, at), scales.to(at), tile), codes)


def test_extremes_are_those_of_the_definition(run: ModuleType, at: str) -> None:
    value = torch.zeros(8, 64)
    value[0] = 3e38
    value[1], value[2] = 1e-38, torch.finfo(torch.float32).tiny
    value[3, 0] = 1e-38
    value[4] = torch.linspace(-1e38, 1e38, 64)
    value[5, ::3] = 1e-30
    of = value.bfloat16()
    for search in ("max", "mse"):
        wanted = quantise.mxfp4(of.float(), search)
        codes, scales = run.mxfp4(moved(of, at), search)
        assert equal(scales, wanted.scales)
        assert equal(codes, wanted.codes)
        factor = quantise.nvfp4_factor(of.float().abs().max())
        made = quantise.nvfp4(of.float(), factor, search)
        steps = (quantise.BELOW, quantise.ABOVE) if search == "mse" else (0, 0)
        codes, scales = run.nvfp4(moved(of, at), factor.reshape(1).to(at), *steps)
        assert equal(scales, made.scales)
        assert equal(codes, made.codes)


def test_nan_and_infinity_show_in_the_largest(run: ModuleType, at: str) -> None:
    value = torch.ones(2, 64, dtype=torch.bfloat16)
    value[0, 3], value[1, 40] = float("nan"), float("inf")
    found = run.largest(moved(value, at)).cpu()
    assert found[0].isnan().tolist() == [True, False]
    assert found[1].isinf().tolist() == [False, True]
    codes = torch.full((1, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made = QuantTensor(Encoding.FP8_TENSOR, codes, torch.tensor(1.0))
    assert run.largest(moved(made, at)).isnan().all()


@pytest.mark.parametrize("to", [*ENCODINGS])
@pytest.mark.parametrize("kind", ["bf16"])
def test_a_large_matrix_takes_the_kernels_and_means_what_a_small_one_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, to: Encoding
) -> None:
    of = drawn(kind, 128, 256)
    factor = quantise.nvfp4_factor(meaning(of).abs().max())
    made = []
    for small in (0, 1 << 30):
        monkeypatch.setattr(requantise, "SMALL", small)
        assert torch.equal(requantise.largest(of), meaning(of).abs().max())
        made.append(requantise.requantised(of, to, search="mse", factor=factor, block=(64, 64)))
    for mine, theirs in ((made[0].codes, made[1].codes), (made[0].scales, made[1].scales)):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert equal(mine.reshape(-1), theirs.reshape(-1))


def test_what_has_no_whole_pieces_is_not_read() -> None:
    assert source(torch.ones(2, 48, dtype=torch.bfloat16)) is None
    assert source(torch.ones(2, 64)) is None


def test_mxfp4_becomes_tiles_as_the_definition_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of = drawn("mxfp4", 200, 160)
    assert isinstance(of, QuantTensor)
    of.codes[:130, 16:32] = 0x80  # blocks of zeros, whose exponents do not count
    wanted = change.mxfp4_to_fp8(of, (128, 128))
    monkeypatch.setattr(requantise, "SMALL", 0)
    made = requantise.mxfp4_to_fp8(of, (128, 128))
    assert equal(made.codes, wanted.codes)
    assert equal(made.scales, wanted.scales)
