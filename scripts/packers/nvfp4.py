"""Layers of NVFP4 checkpoints: ModelOpt's convention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scripts.packers.draw import Scales, draw_bias, draw_bytes, generator
from scripts.packers.tensors import Tensors, held, module

CONVENTION = (
    "ModelOpt: weight uint8, even column in the low nibble; weight_scale float8_e4m3fn, "
    "row order; weight_scale_2 a float32 factor; members: rows of the joined projections"
)
GROUP = 16

# Codes of float8_e4m3fn. 1 to 7 are its subnormals.
LEAST_NORMAL, ONE_EIGHTH, MAX_16, MAX_128, MAX_224, MAX_448 = 0x08, 0x20, 0x58, 0x70, 0x76, 0x7E
MAX_1_75, MAX_SUBNORMAL_3, FEW_NORMALS = 0x3E, 0x03, 0x0F


def up_to(top: int, low: int = LEAST_NORMAL) -> Scales:
    """Scales spread over all codes from `low` to `top`."""
    return Scales(low, top, top)


@dataclass(frozen=True)
class Dense:
    """A linear layer, perhaps of several projections joined along N."""

    name: str
    n: int
    k: int
    scales: Scales
    factor: float = 0.0123
    bias: bool = False
    members: tuple[int, ...] = ()

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        random = generator(self.name)
        tensors = {
            "weight": draw_bytes(random, self.n, self.k // 2),
            "weight_scale": self.scales.draw(random, (self.n, self.k // GROUP)),
            "weight_scale_2": torch.tensor(self.factor),
        }
        if self.bias:
            tensors["bias"] = draw_bias(random, dtype, self.n)
        if self.members:
            tensors["members"] = torch.tensor(self.members)
        return tensors


def prepared(
    prepare: Callable[[Any], object], case: Dense, given: Tensors, dtype: torch.dtype
) -> Tensors:
    """What a runtime's preparation of a linear layer makes of ModelOpt's tensors."""
    runtime = {"weight_scale_2": "weight_global_scale"}
    parameters = {runtime.get(name, name): given[name] for name in given if name != "members"}
    layer = module(
        parameters,
        output_size_per_partition=case.n,
        input_size_per_partition=case.k,
        params_dtype=dtype,
    )
    prepare(layer)
    return held(layer, parameters)


@dataclass(frozen=True)
class Moe:
    """The experts of one layer; `w13` and `w2` hold the block scales of each expert."""

    name: str
    hidden: int
    inter: int
    w13: tuple[Scales, ...]
    w2: tuple[Scales, ...]
    gated: bool = True
    bias: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        random = generator(self.name)
        rows = self.inter * (2 if self.gated else 1)
        tensors = {
            **self._weights("w13", random, self.w13, rows, self.hidden),
            **self._weights("w2", random, self.w2, self.hidden, self.inter),
        }
        if self.bias:
            tensors["w13_bias"] = draw_bias(random, dtype, len(self.w13), rows)
            tensors["w2_bias"] = draw_bias(random, dtype, len(self.w2), self.hidden)
        return tensors

    @staticmethod
    def _weights(
        name: str, random: torch.Generator, scales: tuple[Scales, ...], n: int, k: int
    ) -> Tensors:
        experts = len(scales)
        return {
            f"{name}_weight": draw_bytes(random, experts, n, k // 2),
            f"{name}_weight_scale": torch.stack([s.draw(random, (n, k // GROUP)) for s in scales]),
            f"{name}_weight_scale_2": torch.rand(experts, generator=random) * 0.02 + 0.001,
        }


DENSE = (
    Dense("128x128", 128, 128, up_to(MAX_448, low=ONE_EIGHTH)),
    Dense("192x320", 192, 320, up_to(MAX_448)),  # padded to 192x384
    Dense("72x112", 72, 112, up_to(MAX_128)),  # padded to 128x128
    Dense("bias-64x128", 64, 128, up_to(MAX_448), bias=True),
    Dense("bias-72x112", 72, 112, up_to(MAX_128), bias=True),
    # How far vLLM lifts small scales for bf16, and which scales it flushes.
    Dense("max1_75-64x128", 64, 128, up_to(MAX_1_75, low=0)),
    Dense("max224-64x128", 64, 128, up_to(MAX_224, low=0)),
    Dense("subnormal-64x128", 64, 128, up_to(MAX_SUBNORMAL_3, low=0)),
    Dense("flush-64x128", 64, 128, Scales(0, FEW_NORMALS, MAX_448)),
    Dense("zero-64x128", 64, 128, up_to(0, low=0)),
    # Joined projections, where the choice between the two ways of padding shows.
    Dense("joined-256x256", 256, 256, up_to(MAX_448), members=(128, 64, 64)),
    Dense("joined-192x64", 192, 64, up_to(MAX_448), members=(96, 96)),  # to 256x64
    Dense("joined-192x192", 192, 192, up_to(MAX_448), members=(64, 64, 64)),  # a tie: to 192x256
)

MOE = (
    Moe(
        "gated-h128-i64-e3",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_16), up_to(MAX_1_75), up_to(LEAST_NORMAL + 8)),
        w2=(up_to(MAX_1_75), up_to(MAX_224), up_to(MAX_16)),
    ),
    Moe(  # padded to I = 128
        "gated-h192-i96-e2",
        hidden=192,
        inter=96,
        w13=(up_to(MAX_448), up_to(MAX_128)),
        w2=(up_to(MAX_16), up_to(MAX_128)),
    ),
    Moe(  # padded to I = 128
        "gated-h256-i96-e2",
        hidden=256,
        inter=96,
        w13=(up_to(MAX_128), up_to(MAX_224)),
        w2=(up_to(MAX_448), up_to(MAX_16)),
    ),
    Moe(  # padded to I = 128
        "ungated-h128-i96-e2",
        hidden=128,
        inter=96,
        w13=(up_to(MAX_1_75), up_to(MAX_16)),
        w2=(up_to(MAX_224), up_to(MAX_1_75)),
        gated=False,
    ),
    Moe(  # one expert's scales keep the others' from being lifted
        "flush-h128-i64-e2",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_448), up_to(FEW_NORMALS, low=0)),
        w2=(up_to(FEW_NORMALS, low=0), up_to(MAX_224)),
    ),
)

BIASED_MOE = (
    Moe(
        "bias-h128-i64-e2",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_16), up_to(MAX_448)),
        w2=(up_to(MAX_128), up_to(MAX_1_75)),
        bias=True,
    ),
)
