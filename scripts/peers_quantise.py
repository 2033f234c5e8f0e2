#!/usr/bin/env python3
"""What other projects make of the same weights: the answers that tests/test_quantise.py compares
with. Runs in the peers' environments (scripts/peers), one after the other:

    .peers/mo/bin/python scripts/peers_quantise.py modelopt tests/golden/quantised_modelopt.safetensors
    .peers/ct20/bin/python scripts/peers_quantise.py compressed-tensors tests/golden/quantised_ct.safetensors

Weights: 128 x 512, bfloat16 values, with the statistics of trained linears: rows and columns of
different size, heavy tails (Student's t with 5 degrees), one row of outliers, one block of zeros.
"""  # noqa: E501

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from torch import Tensor


def weights() -> Tensor:
    """`[128, 512]` float32 that bfloat16 holds."""
    draw = torch.Generator().manual_seed(7)
    normal = torch.randn(6, 128, 512, generator=draw)
    tails = normal[0] / normal[1:].square().mean(0).sqrt()
    rows = torch.exp(0.4 * torch.randn(128, 1, generator=draw))
    columns = torch.exp(0.3 * torch.randn(1, 512, generator=draw))
    value = 0.02 * tails * rows * columns
    value[17] *= 20
    value[3, 32:64] = 0
    return value.bfloat16().float()


def error(values: Tensor, weight: Tensor) -> Tensor:
    """The relative Frobenius error, `[]` float64."""
    relative: Tensor = (values.double() - weight.double()).norm() / weight.double().norm()
    return relative


def modelopt(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """NVFP4 by the max recipe and by the sweep over E4M3 scales; MXFP4.

    The sweep's own rounding is a kernel for GPUs: its calibrator is given ModelOpt's other one.
    """
    from modelopt.torch.quantization.calib import NVFP4MSECalibrator
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    yield "weight", weight.bfloat16()
    made, scales, factor = NVFP4QTensor.quantize(weight, 16)
    yield "nvfp4_max.codes", made._quantized_data
    yield "nvfp4_max.scales", scales
    yield "nvfp4_max.global_scale", factor.float().reshape(())

    def rounded(blocks: Tensor, amax: Tensor) -> Tensor:
        scale = NVFP4QTensor._cast_per_block_scale_to_fp8(amax.flatten() / 6 / factor)
        one = scale.reshape(weight.shape[0], -1)
        value = NVFP4QTensor.quantize(blocks.reshape(weight.shape), 16, one, factor)[0]
        how = {"scale": one, "double_scale": factor, "block_sizes": {-1: 16}}
        back: Tensor = value.dequantize(torch.float32, **how)
        return back.reshape(blocks.shape)

    blocks = weight.reshape(-1, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    sweep = NVFP4MSECalibrator(largest, weight.abs().max(), axis=0, quant_func=rounded)
    sweep.collect(blocks)
    values = rounded(blocks, sweep.compute_amax()).reshape(weight.shape)
    yield "nvfp4_sweep.error", error(values, weight)
    packed, exponents = MXFP4QTensor.quantize(weight, 32)
    yield "mxfp4.codes", packed._quantized_data
    yield "mxfp4.scales", exponents.reshape(weight.shape[0], -1)


def compressed_tensors(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """NVFP4, MXFP4, FP8 by rows and by tiles, as its own schemes and helpers have them."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    n, k = weight.shape
    views = {
        "NVFP4A16": weight.reshape(n, -1, 16),
        "MXFP4A16": weight.reshape(n, -1, 32),
        "FP8_DYNAMIC": weight.reshape(n, 1, -1),
        "FP8_BLOCK": weight.reshape(n // 128, 128, k // 128, 128).transpose(1, 2).flatten(-2),
    }
    for name, view in views.items():
        args = preset_name_to_scheme(name, ["Linear"]).weights
        low, high = view.amin(-1), view.amax(-1)
        gparam = generate_gparam(weight.min(), weight.max()) if "NVFP4" in name else None
        scale, zero = calculate_qparams(low, high, args, global_scale=gparam)
        values = fake_quantize(weight, scale, zero, args, global_scale=gparam)
        yield f"{name.lower()}.error", error(values, weight)


PEERS = {
    "modelopt": ("nvidia-modelopt", modelopt),
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
}


def main() -> None:
    """Write one peer's answers."""
    package, made = PEERS[sys.argv[1]]
    weight = weights()
    save_file(
        {k: v.contiguous() for k, v in made(weight)},
        sys.argv[2],
        {package: importlib.metadata.version(package)},
    )


if __name__ == "__main__":
    main()
