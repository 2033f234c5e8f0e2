"""flashinfer_rows: single permutations of FlashInfer's, on small matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scripts.packers.draw import draw_bytes, generator
from scripts.packers.flashinfer import DRIVEN, FP4, MOE, STAND_IN
from scripts.packers.golden_file import GoldenFile, Kind
from scripts.packers.tensors import Tensors
from scripts.packers.wheel import Runtime


@dataclass(frozen=True)
class Matrix:
    """A matrix of bytes."""

    rows: int
    columns: int

    @property
    def name(self) -> str:
        """What the keys of its tensors say."""
        return f"{self.rows}x{self.columns}"

    def draw(self, _dtype: torch.dtype) -> Tensors:
        """Draw it."""
        return {"bytes": draw_bytes(generator(self.name), self.rows, self.columns)}


def shuffle(flashinfer: Runtime, _case: Matrix, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `shuffle_matrix_a` for both kinds of tiles."""
    permute = flashinfer.modules[FP4].shuffle_matrix_a
    return {f"tile{tile}": permute(given["bytes"], tile) for tile in (128, 64)}


def scales(flashinfer: Runtime, _case: Matrix, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `block_scale_interleave`, and `shuffle_matrix_sf_a` where the rows allow it."""
    fp4 = flashinfer.modules[FP4]
    made = {"swizzled": fp4.block_scale_interleave(given["bytes"])}
    if len(given["bytes"]) % 128 == 0:
        made["shuffled"] = fp4.shuffle_matrix_sf_a(given["bytes"], 128)
    return made


def gated(flashinfer: Runtime, _case: Matrix, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `reorder_rows_for_gated_act_gemm`."""
    return {"reordered": flashinfer.modules[MOE].reorder_rows_for_gated_act_gemm(given["bytes"])}


def blocks(flashinfer: Runtime, _case: Matrix, given: Tensors, _dtype: torch.dtype) -> Tensors:
    """Drive `convert_to_block_layout` with 128 columns a block."""
    return {"blocks": flashinfer.modules[MOE].convert_to_block_layout(given["bytes"], 128)}


FILE = GoldenFile(
    "flashinfer_rows",
    "bytes: a matrix of uint8",
    (
        Kind("shuffle", f"{FP4}.shuffle_matrix_a", shuffle, (Matrix(96, 5),)),
        Kind(
            "scales",
            f"{FP4}.block_scale_interleave, shuffle_matrix_sf_a; {STAND_IN}",
            scales,
            (Matrix(256, 12), Matrix(200, 11)),
        ),
        Kind(
            "gated",
            f"{MOE}.reorder_rows_for_gated_act_gemm",
            gated,
            (Matrix(96, 5),),
        ),
        Kind("blocks", f"{MOE}.convert_to_block_layout", blocks, (Matrix(24, 384),)),
    ),
    DRIVEN,
)
