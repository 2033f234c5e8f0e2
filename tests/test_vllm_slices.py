"""What a rank reads of a fused tensor are the bytes that packing its slice of the source gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from transcode.catalog import layouts
from transcode.errors import CheckpointError
from transcode.header import read_header
from transcode.spec import Layout
from transcode.vllm import reading
from transcode.vllm.reading import Job, Reader
from transcode.vllm.slices import Part, Piece, Rank, part, pieces

EXPERTS, HIDDEN, INNER = 5, 256, 512
LIFT = {"": 1.0, "F8_E4M3": 2.0, "U8": 1.0}


@dataclass(frozen=True)
class Case:
    """A layout, and how many columns share a scale (0: whole rows)."""

    layout: str
    group: int

    @property
    def packer(self) -> Layout:
        return layouts()[self.layout][0]


CASES = {
    "nvfp4": Case("marlin-nvfp4", 16),
    "mxfp4": Case("marlin-mxfp4", 32),
    "mxfp8": Case("marlin-mxfp8", 32),
    "fp8-block": Case("marlin-fp8", 128),
    "fp8-channel": Case("marlin-fp8", 0),
}
RANKS = {
    "tp 1": [Rank((0, 1, 2, 3, 4))],
    "tp 2": [Rank((0, 1, 2, 3, 4), 2, 0), Rank((0, 1, 2, 3, 4), 2, 1)],
    "ep 2": [Rank((0, 1, 2)), Rank((3, 4))],
    "round robin": [Rank((0, 2, 4)), Rank((1, 3))],
    "eplb, one redundant": [Rank((0, 1, 2)), Rank((3, 4, 0))],
    "tp 2 of some": [Rank((4, 1), 2, 0), Rank((4, 1), 2, 1)],
}
ORDERS = ("gate_up", "interleaved", "up")
Sources = dict[str, Tensor]


@cache
def sources(case: Case, order: str) -> Sources:
    """Random w13 and w2 of all experts as a source has them: codes, scales, biases, factors."""
    draw = torch.Generator().manual_seed(len(order) + case.group)
    rows = INNER * (1 if order == "up" else 2)
    found = dict[str, Tensor]()
    for name, n, k in (("w13", rows, HIDDEN), ("w2", HIDDEN, INNER)):
        width = k * case.packer.codes.bits // 8
        codes = torch.randint(256, (EXPERTS, n, width), generator=draw, dtype=torch.uint8)
        scales = torch.randint(60, 120, (EXPERTS, n, k // case.group if case.group else 1),
                               generator=draw, dtype=torch.uint8)  # fmt: skip
        dtype = case.packer.scales.dtype
        if dtype == "F8_E4M3":
            scales = scales.view(torch.float8_e4m3fn)
        found[f"{name}_weight"] = codes
        found[f"{name}_weight_scale"] = scales if dtype else scales.to(torch.bfloat16) / 256
        found[f"{name}_bias"] = torch.randn(EXPERTS, n, generator=draw).to(torch.bfloat16)
        found[f"{name}_weight_scale_2"] = torch.rand(EXPERTS, generator=draw)
    return found


@cache
def packed(case: Case, order: str, tp: int, at: int) -> Sources:
    """A part of every expert, each packed by itself, then stacked."""
    layout, lift = case.packer, LIFT[case.packer.scales.dtype]
    assert layout.bias
    how: dict[str, Callable[[Tensor], Tensor]] = {
        "weight": layout.codes.pack,
        "weight_scale": lambda scales: layout.scales.pack(scales, lift),
        "bias": layout.bias.pack,
        "weight_scale_2": lambda factor: factor,
    }
    parts = {n: sliced(n, t, order, tp, at) for n, t in sources(case, order).items()}
    return {n: torch.stack([how[n.partition("_")[2]](t) for t in ts]) for n, ts in parts.items()}


def sliced(name: str, tensor: Tensor, order: str, tp: int, at: int) -> Tensor:
    """One of `tp` parts of a source tensor `[E, N, ...]`."""
    if name.startswith("w13") and tensor.dim() > 1:
        blocks = tensor.chunk(2, 1) if order == "gate_up" else (tensor,)
        return torch.cat([block.chunk(tp, 1)[at] for block in blocks], 1)
    if name in ("w2_weight", "w2_weight_scale") and tensor.shape[2] > 1:
        return tensor.chunk(tp, 2)[at].contiguous()
    return tensor


def read(path: Path, name: str, rank: Rank, order: str, limit: int) -> Tensor:
    """What a rank reads of a tensor in a file."""
    info = read_header(path).tensors[name]
    like = {"I32": torch.int32, "F32": torch.float32, "BF16": torch.bfloat16}
    mine = part(name, info.shape, rank, 2 if order == "gate_up" else 1)
    data = torch.empty(mine.shape, dtype=like.get(info.dtype, torch.uint8))
    flat = data.view(-1).view(torch.uint8)
    found = [*pieces(info.start, data.itemsize, info.shape, mine, limit)]
    assert sum(piece.nbytes for piece in found) == flat.numel()
    assert all(piece.at + piece.nbytes == after.at for piece, after in pairwise(found))
    reader = Reader(torch.device("cpu"))
    reader.read([Job(path, piece, flat) for piece in found])
    reader.close()
    return data


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_reads_what_packing_its_slice_gives(tmp_path: Path, name: str, order: str) -> None:
    case, file = CASES[name], tmp_path / "experts.safetensors"
    save_file(packed(case, order, 1, 0), file)
    for ranks in RANKS.values():
        for rank in ranks:
            for tensor, every in packed(case, order, rank.tp, rank.at).items():
                want, found = every[list(rank.experts)], read(file, tensor, rank, order, 10_000)
                raw = want.view(-1).view(torch.uint8)
                assert found.shape == want.shape
                assert torch.equal(found.view(-1).view(torch.uint8), raw), (tensor, rank)


@pytest.mark.parametrize("limit", [1, 7, 100, 1 << 20])
def test_a_piece_is_never_larger_than_asked_but_for_one_row_that_is_cut(limit: int) -> None:
    shape, rank = (4, 6, 32), Rank((2, 3, 0), 2, 1)
    for leaf, cut in (("w13_weight", True), ("w2_weight", False)):
        found = [*pieces(0, 4, shape, part(leaf, shape, rank, 2), limit)]
        assert all(p.nbytes <= limit or (cut and p.rows == 1) for p in found)


def test_experts_that_follow_each_other_are_read_in_one_go() -> None:
    mine = part("w2_weight", (8, 16, 4), Rank((2, 3, 4, 1)), 1)
    assert [p.nbytes for p in pieces(0, 4, (8, 16, 4), mine, 1 << 20)] == [768, 256]


def test_a_part_of_no_experts_has_no_pieces() -> None:
    nothing = part("w13_weight", (4, 6, 32), Rank(()), 2)
    assert nothing == Part((), range(6), (range(32),), (0, 6, 32))
    assert [*pieces(0, 4, (4, 6, 32), nothing, 100)] == []


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"1234567")
    reader = Reader(torch.device("cpu"))
    with pytest.raises(CheckpointError, match="short: ends at byte 7"):
        reader.read([Job(path, Piece(4, 1, 8, ((0, 8),), 0), torch.empty(8, dtype=torch.uint8))])
    reader.close()


def test_host_memory_is_bounded() -> None:
    assert reading.THREADS * reading.BUFFERS * reading.CHUNK <= 128 << 20
