"""NVFP4 experts whose gate and up have factors of their own, with activation scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from scripts.packers import nvfp4
from scripts.packers.draw import generator
from scripts.packers.nvfp4 import MAX_16, MAX_448, up_to
from scripts.packers.tensors import Tensors

CONVENTION = (
    f"{nvfp4.CONVENTION}; w13: gate over up, or up alone where the case is called ungated; "
    "w13_weight_scale_2 and w13_input_scale [E, 2], of gate and up"
)


@dataclass(frozen=True)
class Experts(nvfp4.Moe):
    """The experts of one layer; `equal`: gate and up of an expert have one factor."""

    equal: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        random = generator(f"factors of {self.name}")
        tensors = super().draw(dtype)
        projections = 2 if self.gated else 1
        factors = torch.rand(len(self.w13), projections, generator=random) * 0.02 + 0.001
        if self.equal:
            factors = factors[:, :1].repeat(1, projections)
        tensors["w13_weight_scale_2"] = factors
        for name, shape in (("w13", (len(self.w13), projections)), ("w2", (len(self.w2),))):
            tensors[f"{name}_input_scale"] = torch.rand(shape, generator=random) * 0.01 + 0.001
        return tensors


def experts(
    hidden: int, inter: int, name: str, *, gated: bool = True, equal: bool = False
) -> Experts:
    """Two experts of these sizes; some of their block scales are subnormal or zero."""
    full = f"{name}-h{hidden}-i{inter}-e2"
    w13, w2 = (up_to(MAX_448, low=0), up_to(MAX_16)), (up_to(MAX_16), up_to(MAX_448, low=0))
    return Experts(full, hidden, inter, w13, w2, gated=gated, equal=equal)


def padded(given: Tensors, hidden: int, inter: int, *, interleaved: bool = False) -> Tensors:
    """NVFP4 or MXFP4 experts with zeros up to these sizes.

    Each projection by itself, but where the rows of gate and up take turns.
    """
    made = dict(given)
    before = given["w2_weight"].shape[-1] * 2
    for kind in ("weight", "weight_scale"):
        w13, w2 = given[f"w13_{kind}"], given[f"w2_{kind}"]
        parts = torch.split(w13, before * (2 if interleaved else 1), dim=1)
        down = w2.shape[-1] * inter // before - w2.shape[-1]
        across = w13.shape[-1] * hidden // w2.shape[1] - w13.shape[-1]
        more = (inter - before) * (2 if interleaved else 1)
        rows = [filled(part, across, more) for part in parts]
        made[f"w13_{kind}"] = torch.cat(rows, 1)
        made[f"w2_{kind}"] = filled(w2, down, hidden - w2.shape[1])
    return made


def filled(tensor: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
    """A stack of matrices with zero bytes to the right and below."""
    return pad(tensor.view(torch.uint8), (0, columns, 0, rows)).view(tensor.dtype)
