"""ue8m0_requant: FP8 with a factor per block of 128x128, requantised to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil

import torch
from torch import Tensor

from scripts.packers import sglang_blackwell, vllm_blackwell
from scripts.packers.draw import draw_bytes, generator
from scripts.packers.fp8 import BLOCK, USUAL
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.tensors import Tensors
from scripts.packers.wheel import Runtime, running

TOPS = (0x7E, 0x79, 0x78, 0x70, 0x41, 0x08, 0x03, 0x00)
"""The largest code in a block: 448, 288, 256, 128, 2.25, the least normal, a subnormal, zero."""

SPECIAL = (
    2.0**-6,  # a power of two already
    2.0**-6 * (1 + 2.0**-23),  # float32's next; log2 rounds it down to the power of two
    2.0**-6 * (1 + 2.0**-20),
    2.0**-6 * (1 - 2.0**-24),
    2.0**-30,  # below the least amax, 1e-4
    2.0**-130,  # subnormal in float32
    2.0**20,
    0.1,
)


@dataclass(frozen=True)
class Blocks:
    """A matrix, or one for each expert; `factors` stand first among those of the blocks."""

    name: str
    shape: tuple[int, ...]
    factors: tuple[float, ...] = ()
    tops: tuple[int, ...] = TOPS

    def draw(self, _dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        random = generator(self.name)
        *experts, n, k = self.shape
        scales = USUAL.draw(random, *experts, ceil(n / BLOCK), ceil(k / BLOCK))
        scales.view(-1)[: len(self.factors)] = torch.tensor(self.factors)
        codes = draw_bytes(random, *self.shape)
        rows, columns = scales.shape[-2:]
        blocks = product(range(scales[..., 0, 0].numel()), range(rows), range(columns))
        for i, (expert, row, column) in enumerate(blocks):
            top = self.tops[i % len(self.tops)]
            part = codes.view(-1, n, k)[expert, row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
            part.copy_((part & 0x80) | (part & 0x7F) % (top + 1))
            part[0, 0] = top
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}


def by_vllm(vllm: Runtime, _case: Blocks, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `requant_weight_ue8m0_inplace`, not compiled."""
    weight, scales = given["weight"].clone(), given["weight_scale_inv"].clone()
    with running(vllm), torch.compiler.set_stance("force_eager"):
        vllm.modules[vllm_blackwell.FP8].requant_weight_ue8m0_inplace(weight, scales)
    return {"weight": weight, "weight_scale_inv": scales}


def by_sglang(sglang: Runtime, _case: Blocks, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive what `requant_weight_ue8m0` does to each matrix before it packs the scales."""
    fp8, size = sglang.modules[sglang_blackwell.FP8], [BLOCK, BLOCK]

    def requantised(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        if weight.dim() > 2:
            pairs = [requantised(w, s) for w, s in zip(weight, scales, strict=True)]
            weights, factors = zip(*pairs, strict=True)
            return torch.stack(weights), torch.stack(factors)
        plain = fp8.block_quant_dequant(weight, scales, size, torch.bfloat16)
        codes, made = fp8.quant_weight_ue8m0(weight_dequant=plain, weight_block_size=size)
        return codes, made

    weight, scales = requantised(given["weight"], given["weight_scale_inv"])
    return {"weight": weight, "weight_scale_inv": scales}


CASES = (
    Blocks("usual-136x264", (136, 264), tops=(0x7E,)),
    Blocks("tops-8x1024", (8, 1024)),
    Blocks("factors-8x1024", (8, 1024), SPECIAL, tops=(0x7E,)),
    Blocks("experts-2x136x136", (2, 136, 136), tops=(0x7E, 0x78)),
)

FILE = GoldenFile(
    "ue8m0_requant",
    "weight float8_e4m3fn [N, K] or [E, N, K]; weight_scale_inv float32, a factor in spite of its "
    "name, per block of 128x128; out: the same with powers of two",
    (
        Kind(
            "vllm", f"{vllm_blackwell.FP8}.requant_weight_ue8m0_inplace", by_vllm, CASES, by="vLLM"
        ),
        Kind(
            "sglang",
            f"{sglang_blackwell.FP8}: block_quant_dequant and quant_weight_ue8m0, which are "
            "requant_weight_ue8m0 before it packs the scales",
            by_sglang,
            CASES,
            by="SGLang",
        ),
    ),
    (*vllm_blackwell.DRIVEN, *sglang_blackwell.DRIVEN),
)
