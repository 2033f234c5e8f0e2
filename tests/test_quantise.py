"""Numbers to encodings: against ModelOpt's and compressed-tensors' own answers, and at the edges.

The answers are stored by scripts/peers_quantise.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transcode import quantise
from transcode.encode import e2m1, rounded, tiles
from transcode.quant import Encoding, QuantTensor, unpack_nibbles, unpacked4

GOLDEN = Path(__file__).parent / "golden"
TILE = (128, 128)


@pytest.fixture(scope="module")
def modelopt() -> dict[str, Tensor]:
    return load_file(GOLDEN / "quantised_modelopt.safetensors")


@pytest.fixture(scope="module")
def other() -> dict[str, Tensor]:
    return load_file(GOLDEN / "quantised_ct.safetensors")


def nvfp4(weight: Tensor, search: str) -> QuantTensor:
    return quantise.nvfp4(weight, quantise.nvfp4_factor(weight.abs().max()), search)


def error(made: QuantTensor, weight: Tensor) -> float:
    return float((made.dequantize().double() - weight.double()).norm() / weight.double().norm())


def test_max_gives_modelopts_bytes(modelopt: dict[str, Tensor]) -> None:
    weight = modelopt["weight"].float()
    made = nvfp4(weight, "max")
    assert made.global_scale is not None
    assert torch.equal(made.global_scale, modelopt["nvfp4_max.global_scale"])
    assert torch.equal(made.codes, modelopt["nvfp4_max.codes"])
    live = weight.reshape(128, -1, 16).any(-1)  # over zeros ModelOpt has scale 1
    theirs = modelopt["nvfp4_max.scales"].float()
    assert torch.equal(made.scales.float(), torch.where(live, theirs, 0))


def test_mxfp4_max_has_modelopts_exponents(modelopt: dict[str, Tensor]) -> None:
    weight = modelopt["weight"].float()
    made = quantise.mxfp4(weight, "max")
    assert torch.equal(made.scales, modelopt["mxfp4.scales"])
    ours, theirs = unpack_nibbles(made.codes), unpack_nibbles(modelopt["mxfp4.codes"])
    scaled = weight / (made.scales.double() - 127).exp2().float().repeat_interleave(32, -1)
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    tie = torch.isin(scaled.abs(), middle) | (ours & 7 == 0)  # ModelOpt's go down, its zeros are -0
    assert torch.equal(ours[~tie], theirs[~tie])


def test_the_search_is_as_good_as_the_best_of_the_peers(
    modelopt: dict[str, Tensor], other: dict[str, Tensor]
) -> None:
    weight = modelopt["weight"].float()
    mine = error(nvfp4(weight, "mse"), weight)
    assert mine <= float(modelopt["nvfp4_sweep.error"])
    assert mine < float(other["nvfp4a16.error"])
    assert error(quantise.mxfp4(weight, "mse"), weight) < float(other["mxfp4a16.error"])
    assert error(quantise.fp8_rows(weight), weight) <= float(other["fp8_dynamic.error"])
    tiles = quantise.fp8_tiles(weight, TILE, powers=False)
    assert error(tiles, weight) <= float(other["fp8_block.error"])


def test_no_other_e4m3_scale_is_better() -> None:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(8, 128, generator=draw) * torch.rand(8, 1, generator=draw).exp2()
    weight[5] *= 2.0**-14  # scales below E4M3's normal numbers
    weight[6, :16] = torch.tensor([6.0, 0.1] * 8)
    made, factor = nvfp4(weight, "mse"), quantise.nvfp4_factor(weight.abs().max())
    blocks = weight.abs().reshape(8, -1, 16) / factor
    scales = torch.arange(1, 127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    errors = torch.stack([
        quantise._squares(blocks, blocks * (1 / scale), scale) for scale in scales
    ])  # fmt: skip
    best = errors.argmin(0) + 1  # the first of those that are equal
    assert torch.equal(made.scales.view(torch.uint8).long(), best)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 1e-42])
@pytest.mark.parametrize("search", ["mse", "max"])
def test_zeros_and_any_size_are_finite(scale: float, search: str) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * scale
    weight[1], weight[2, :32] = 0.0, -0.0
    for made in (
        nvfp4(weight, search),
        quantise.mxfp4(weight, search),
        quantise.mxfp8(weight),
        quantise.fp8_rows(weight),
        quantise.fp8_tiles(weight, TILE, powers=True),
        quantise.fp8_tiles(weight, TILE, powers=False),
        quantise.fp8_tensor(weight, quantise.fp8_scale(weight.abs().max())),
    ):
        back = made.dequantize()
        assert torch.isfinite(back).all()
        assert not back[1].any()
        if scale > 1e-35:
            assert error(made, weight) < 0.16


def test_powers_of_two_are_powers_of_two_and_never_saturate() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
    weight[0, 0] = 448 * 2.0**3  # the top code exactly
    weight[199, 299] = 448 * 2.0**2 * (1 + 2.0**-20)
    made = quantise.fp8_tiles(weight, TILE, powers=True)
    assert torch.equal(torch.frexp(made.scales)[0], torch.full((2, 3), 0.5))
    assert made.scales[0, 0] == 8
    assert made.scales[1, 2] == 8
    assert error(made, weight) < 0.03


def test_powers_of_two_are_vllms_requantisation() -> None:
    """But for what vLLM clamps (below 1e-4), and one scale an ulp above a power of two, which its
    logarithm rounds down: 448 covers both."""
    golden = load_file(GOLDEN / "ue8m0_requant.safetensors")
    tails = ("in.weight", "in.weight_scale_inv", "out.weight", "out.weight_scale_inv")
    cases = {key.rpartition(".in.")[0] for key in golden if key.startswith("vllm.")} - {""}
    assert len(cases) == 4
    for case in cases:
        code, scale, wanted, wanted_scale = (golden[f"{case}.{tail}"] for tail in tails)
        for e in range(len(code) if code.dim() == 3 else 1):
            one = [t[e] if code.dim() == 3 else t for t in (code, scale, wanted, wanted_scale)]
            value = QuantTensor(Encoding.FP8_BLOCK, one[0], one[1], None, TILE).dequantize()
            made = quantise.fp8_tiles(value, TILE, powers=True)
            largest = tiles(value.abs(), TILE).amax((-1, -2))
            mantissa, _ = torch.frexp(largest / 448)
            same = (largest >= 1e-4) & ((mantissa == 0.5) | (mantissa > 0.5 + 2.0**-23))
            assert same.sum() >= same.numel() - 3
            assert torch.equal(made.scales[same], one[3][same])
            spread = same.repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: value.shape[0], : value.shape[1]]
            assert torch.equal(
                made.codes.view(torch.uint8)[spread], one[2].view(torch.uint8)[spread]
            )


def test_magnitudes_are_rounded_as_codes_are() -> None:
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30])
    near = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(x)) for x in (0.0, torch.inf))])
    some = torch.cat([near, torch.linspace(0, 8, 4098), torch.zeros(0)])[: 4128 // 2 * 2]
    assert torch.equal(rounded(some), unpacked4(e2m1(some)))
