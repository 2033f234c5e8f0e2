"""The lines that say a kernel's order, against words of the kernels' own runtimes (tests/golden).

Nothing of the layouts is used but `Tiling`: the words come from code that we did not write, so a
line which is wrong in the same way here, in the layout and in its inverse cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transcode.tiling import Tiling

FOLDER = Path(__file__).parents[1] / "golden"

CUTLASS = "rt a:4 r:32 , ct c:4 -> rt ct r a c"
SHUFFLE = "b x:8 y:4 , k -> b y x k"
SHUFFLE_16 = "b x:8 y:2 , k -> b y x k"
GATED = "h:2 q , k -> q h k"
GATED_SHUFFLE = "h:2 b x:8 t:2 , k -> b t h x k"
GATED_SCALES = "h:2 rt a:4 x:8 t:2 , ct c:4 -> rt ct t h x a c"
SHUFFLED_SCALES = "rt a:4 x:8 y:4 , ct c:4 -> rt ct y x a c"
BLOCKS = "m , kb b:128 -> kb m b"
G8 = "h:2 b m:8 , k -> b h m k"
G8_SCALES = "h:2 B j:4 t:2 m:8 , kp b:4 -> kp B t h m j b"
G16EO = "h:2 b u:8 p:2 , k -> b p h u k"
G16EO_SCALES = "h:2 B j:4 u:8 p:2 , kp b:4 -> kp B p h u j b"
UTCCP = "B a:4 r:32 , kp b:4 -> kp B r a b"
WORDS = "r , kp b:4 -> kp r b"


@dataclass(frozen=True)
class Case:
    """A matrix, or one for each expert, and what a runtime made of it."""

    line: str
    file: str
    case: str
    tensor: str
    out: str = ""

    def __str__(self) -> str:
        return f"{self.file}-{self.case}-{self.out or self.tensor}"

    def end(self, side: str) -> Tensor:
        """The tensor's bytes, [E, rows, columns] on the way in."""
        name = (self.out if side == "out" else "") or self.tensor
        kind, case = self.case.split("/")
        found = load(self.file)[f"{kind}.bf16.{case}.{side}.{name}"]
        return found.contiguous().view(torch.uint8)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        given, made = self.end("in"), self.end("out")
        stack = given if given.dim() == 3 else given[None]
        for matrix, answer in zip(stack, made.reshape(len(stack), -1), strict=True):
            yield fitted(matrix, self.line), answer

    def holds(self, line: Tiling) -> bool:
        return all(
            torch.equal(line.apply(matrix).flatten(), answer) for matrix, answer in self.pairs()
        )


@cache
def load(file: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{file}.safetensors")


def fitted(matrix: Tensor, line: str) -> Tensor:
    """A matrix as the line wants it: scales with zeros up to whole tiles, w13 as up over gate."""
    if line in (GATED_SHUFFLE, GATED_SCALES):
        return torch.cat(matrix.chunk(2)[::-1])
    if line != CUTLASS:
        return matrix
    rows, columns = (-size % tile for size, tile in zip(matrix.shape, (128, 4), strict=True))
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


MEGA, ROWS, TRTLLM = "deepgemm_megamoe", "flashinfer_rows", "vllm_trtllm"
NVFP4, MX = "vllm_cutlass_nvfp4", "vllm_cutlass_mx"
GATED_EXPERTS = (
    (TRTLLM, "nvfp4/gated-h256-i128-e2"),
    (TRTLLM, "mxfp4/bias-h256-i128-e2"),
    ("sglang_trtllm", "nvfp4/apart-h256-i128-e2"),
)
MEGA_MX, MEGA_VLLM = "mxfp4/h256-i128-e2", "nvfp4_vllm/equal-h256-i128-e2"
MEGA_SGL = "nvfp4_sgl/apart-h256-i128-e2"
UNGATED = "nvfp4/ungated-h256-i128-e2"


# fmt: off
CASES = (
    *(Case(CUTLASS, NVFP4, f"dense/{size}", "weight_scale") for size in ("256x192", "200x176")),
    *(Case(CUTLASS, NVFP4, f"moe/{case}", f"{name}_weight_scale")
      for case in ("gated-h256-i128-e2", "ungated-h128-i96-e2") for name in ("w13", "w2")),
    *(Case(CUTLASS, MX, f"{kind}_dense/{size}", "weight_scale")
      for kind in ("mxfp4", "mxfp8") for size in ("256x320", "all-200x160")),
    *(Case(CUTLASS, ROWS, f"scales/{size}", "bytes", "swizzled") for size in ("256x12", "200x11")),
    Case(SHUFFLED_SCALES, ROWS, "scales/256x12", "bytes", "shuffled"),
    Case(SHUFFLE, ROWS, "shuffle/96x5", "bytes", "tile128"),
    Case(SHUFFLE_16, ROWS, "shuffle/96x5", "bytes", "tile64"),
    Case(GATED, ROWS, "gated/96x5", "bytes", "reordered"),
    Case(BLOCKS, ROWS, "blocks/24x384", "bytes", "blocks"),
    *(Case(SHUFFLE, file, case, "w2_weight") for file, case in GATED_EXPERTS),
    *(Case(SHUFFLED_SCALES, file, case, "w2_weight_scale") for file, case in GATED_EXPERTS),
    Case(SHUFFLE, TRTLLM, UNGATED, "w13_weight"),
    Case(SHUFFLED_SCALES, TRTLLM, UNGATED, "w13_weight_scale"),
    *(Case(GATED_SHUFFLE, file, case, "w13_weight") for file, case in GATED_EXPERTS),
    *(Case(GATED_SCALES, file, case, "w13_weight_scale") for file, case in GATED_EXPERTS),
    *(Case(G8, MEGA, case, "w13_weight") for case in (MEGA_MX, MEGA_VLLM)),
    *(Case(G8_SCALES, MEGA, case, "w13_weight_scale") for case in (MEGA_MX, MEGA_VLLM)),
    Case(G8, "deepgemm_fp8", "megamoe_sm90/block-h256-i128-e2", "w13_weight"),
    Case(G16EO, MEGA, MEGA_SGL, "w13_weight"),
    Case(G16EO_SCALES, MEGA, MEGA_SGL, "w13_weight_scale"),
    *(Case(UTCCP, MEGA, case, "w2_weight_scale") for case in (MEGA_MX, MEGA_VLLM, MEGA_SGL)),
)
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_line_equals_the_runtimes_words(case: Case) -> None:
    line = Tiling(case.line)
    assert case.holds(line)
    for matrix, answer in case.pairs():
        assert torch.equal(line.undo(answer, matrix.shape), matrix)


def swapped(line: str) -> Iterator[str]:
    """The line with two of its stored factors changed about."""
    source, stored = line.split("->")
    factors = stored.split()
    for i, j in combinations(range(len(factors)), 2):
        other = factors.copy()
        other[i], other[j] = other[j], other[i]
        yield f"{source}-> {' '.join(other)}"


@pytest.mark.parametrize("line", sorted({case.line for case in CASES}))
def test_the_words_tell_any_two_factors_apart(line: str) -> None:
    cases = [case for case in CASES if case.line == line]
    for other in swapped(line):
        assert not all(case.holds(Tiling(other)) for case in cases), other


def test_deepgemm_reads_a_power_of_two_for_every_row_four_to_a_word() -> None:
    words = load("deepgemm_fp8")
    for case, n in (("6x1280", 6), ("experts-2x132x256", 132)):
        scales = words[f"sm100_powers.bf16.{case}.in.weight_scale_inv"]
        answer = words[f"sm100_powers.bf16.{case}.out.weight_scale_inv"]
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        rows = exponents.repeat_interleave(128, dim=-2)[..., :n, :]
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 4, 0, answer.shape[-1] - n))
        stack = padded if padded.dim() == 3 else padded[None]
        for matrix, made in zip(stack, answer.reshape(len(stack), -1), strict=True):
            assert torch.equal(Tiling(WORDS).apply(matrix).flatten(), made.view(torch.uint8))


def test_cute_puts_the_scales_of_the_128x4_order_at_these_places() -> None:
    """CUTLASS's `Sm1xxBlockScaledConfig` compiled for the host, 200 rows of 11 scales.

    Source: NVIDIA/cutlass include/cutlass/detail/sm100_blockscaled_layout.hpp.
    """
    rows, columns = torch.arange(256)[:, None], torch.arange(12)[None]
    stored = Tiling(CUTLASS).apply(rows * 1000 + columns).flatten().tolist()
    for row, column, place in (
        (199, 10, 2682),
        (129, 5, 2065),
        (0, 4, 512),
        (1, 0, 16),
        (32, 0, 4),
    ):
        assert stored[place] == row * 1000 + column
