"""Codes decoded to BF16 by look-up: the bytes and the loss of the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from transcode.kernels import _decode
from transcode.quant import Encoding, QuantTensor

N, K = 130, 1184
"""Neither is whole tiles of 128; a table is less than half of it."""


def octets(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape) + low)
    return torch.randint(low, high, shape, generator=draw).to(torch.uint8)


def drawn(encoding: Encoding, rows: int = N) -> QuantTensor:
    """Random codes, NaN apart, and random scales."""
    draw = torch.Generator().manual_seed(len(encoding))
    eight = octets(rows, K)
    eight = torch.where(eight & 0x7F == 0x7F, 1, eight).to(torch.uint8).view(torch.float8_e4m3fn)
    match encoding:
        case Encoding.NVFP4 | Encoding.NVFP4_32:
            wide = 16 if encoding is Encoding.NVFP4 else 32
            scales = octets(rows, K // wide, high=0x7F).view(torch.float8_e4m3fn)
            return QuantTensor(encoding, octets(rows, K // 2), scales, torch.tensor(0.0173))
        case Encoding.MXFP4:
            return QuantTensor(encoding, octets(rows, K // 2), octets(rows, K // 32, high=250))
        case Encoding.MXFP8:
            return QuantTensor(encoding, eight, octets(rows, K // 32, low=1, high=240))
        case Encoding.FP8_BLOCK:
            scales = torch.rand(-(-rows // 128), -(-K // 128), generator=draw) * 1e-3
            return QuantTensor(encoding, eight, scales, None, (128, 128))
        case Encoding.FP8_CHANNEL:
            return QuantTensor(encoding, eight, torch.rand(rows, 1, generator=draw))
    return QuantTensor(encoding, eight, torch.tensor([0.37]))


def require_same(of: QuantTensor) -> _decode.Decoded:
    made = _decode.bf16(of)
    assert made is not None
    exact = of.dequantize()
    assert torch.equal(made.value.view(torch.int16), exact.bfloat16().view(torch.int16))
    finite = exact.isfinite()
    assert made.finite == bool(finite.all())
    exact = torch.where(finite, exact, 0.0)
    normal = exact.abs() >= torch.finfo(torch.float32).tiny
    error = (exact.bfloat16().float() - exact).abs()[normal] / exact.abs()[normal]
    assert made.worst == (float(error.max()) if error.numel() else 0.0)
    return made


ENCODINGS = [e for e in Encoding if e not in (Encoding.INT4, Encoding.UNQUANTISED)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_and_loss_are_those_of_the_definition(encoding: Encoding) -> None:
    require_same(drawn(encoding, 1000))


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        require_same(drawn(Encoding.FP8_BLOCK, 900))
    finally:
        torch.set_num_threads(before)


def test_tiles_that_are_cut_and_scales_of_one_byte_are_decoded() -> None:
    of = drawn(Encoding.FP8_BLOCK)
    require_same(of)
    require_same(replace(of, scales=octets(2, 10, low=60, high=200)))
    require_same(replace(of, scales=of.scales.bfloat16()))


def test_nan_codes_are_decoded_and_said() -> None:
    for code in (0x7F, 0xFF):
        of = drawn(Encoding.FP8_BLOCK)
        of.codes.view(torch.uint8)[129, 1183] = code
        assert not require_same(of).finite


def test_the_loss_is_that_of_codes_that_are_there() -> None:
    """Codes that are powers of two have the error of the scale alone."""
    of = drawn(Encoding.FP8_BLOCK)
    of.codes.view(torch.uint8).fill_(0x38)  # 1
    made = require_same(of)
    assert made.worst < _decode.bf16(drawn(Encoding.FP8_BLOCK)).worst  # type: ignore[union-attr]
    of.codes.view(torch.uint8).zero_()
    assert require_same(of).worst == 0


def test_zero_factors_and_nan_scales_over_zeros_are_zero() -> None:
    of = drawn(Encoding.NVFP4, 1000)
    assert not require_same(replace(of, global_scale=torch.tensor(0.0))).value.any()
    of.scales.view(torch.uint8)[5] = 0x7F
    assert _decode.bf16(of) is None  # left to the definition


def test_values_that_overflow_are_left_to_the_definition() -> None:
    of = drawn(Encoding.FP8_BLOCK)
    assert _decode.bf16(replace(of, scales=of.scales * 1e39)) is None
    assert require_same(replace(of, scales=of.scales * 0 + 7.59e35)).worst == float("inf")


def test_small_matrices_are_left_to_the_definition() -> None:
    assert _decode.bf16(drawn(Encoding.NVFP4, 64)) is None
