"""Weights packed for CUTLASS, TensorRT-LLM and DeepGEMM decoded as their kernels address them.

Closed forms of rows and of scale bytes, not Tilings. Row q of half h (0 gate, 1 up) of w13 lies at
`16 (q/8) + 8 h + q%8` (megamoe), `32 (q/16) + 16 (q%2) + 8 h + q%16/2` (sgl's FP4), and for
TensorRT-LLM, whose order is up 0, gate 0, up 1, ..., j-th at `32 (j/32) + 8 (j%4) + j%32/4`. The
scale of row R, column c is byte `((R/128) T + c/4) 512 + R%32 16 + R/32%4 4 + c%4` (T tiles in a
row), or byte c%4 of word `c/4 MN + 128 (R/128) + 4 (R%32) + R%128/32` (megamoe), `c/4 MN + R`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def weights(folder: Path) -> dict[str, Tensor]:
    """The decoded float32 matrix of every packed module, by name; padding must be zero."""
    tensors = {k: v for p in sorted(folder.glob("*.safetensors")) for k, v in load_file(p).items()}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    found: dict[str, Tensor] = {}
    for name, size in config["sizes"].items():
        parent, _, last = name.rpartition(".")
        at = f"{parent}." if parent else ""
        for e in range(size["experts"] or 1):
            for i, leaf in enumerate(size["members"]):
                single = size["experts"] is None
                stem = f"{at}{leaf}." if single else f"{name}_"
                part = {k[len(stem) :]: v for k, v in tensors.items() if k.startswith(stem)}
                part = part if single else {k: v[e] for k, v in part.items()}
                module = f"{at}{leaf}" if single else f"{at}{e}.{leaf}"
                whole = matrix(part, config, size, last, i)
                n, k = size["n"][i], size["k"]
                assert not torch.count_nonzero(whole[n:])
                assert not torch.count_nonzero(whole[:, k:])
                found[module] = whole[:n, :k]
    return found


def matrix(
    part: dict[str, Tensor], config: dict[str, Any], size: dict[str, Any], last: str, i: int
) -> Tensor:
    """A member's matrix with its padding."""
    layout = config["layout"]
    one = 1 if size["experts"] is None else len(size["members"])
    mine, columns = size["padded_n"][i], size["padded_k"]
    total = mine if one == 1 else sum(size["padded_n"])
    rows = places(torch.arange(mine), config, last, i, one, mine)
    raw = part["weight"].view(torch.uint8)[rows]
    if layout.endswith("fp4"):
        low_high = torch.stack([raw & 15, raw >> 4], -1).flatten(1)
        codes = E2M1[low_high.int()]
    else:
        codes = raw.view(torch.float8_e4m3fn).float()
    if "fp8" in layout and "mxfp8" not in layout:
        return codes * eight(part["weight_scale"], config, size, total, columns, i, one, mine)
    group = GROUPS[layout.rpartition("-")[2]]
    c = torch.arange(columns // group)
    octets = part["weight_scale"].contiguous().view(torch.uint8).flatten()
    stored = octets[offset(layout, rows[:, None], c[None], total, len(c))]
    scales = stored.view(torch.float8_e4m3fn).float() if group == 16 else power(stored)
    if group == 16:
        factor = part["weight_global_scale" if size["experts"] is None else "weight_scale_2"]
        scales = scales * (factor[i] if factor.dim() else factor)
    return codes * scales.repeat_interleave(group, 1)


def places(q: Tensor, config: dict[str, Any], last: str, h: int, members: int, half: int) -> Tensor:
    """Where a member's rows lie."""
    layout, variant = config["layout"], config["variant"]
    joined = last == "w13" and members == 2
    if layout.startswith("trtllm"):
        j = 2 * q + (1 - h) if joined else q
        return 32 * (j // 32) + 8 * (j % 4) + j % 32 // 4
    if layout.startswith("megamoe") and joined:
        if variant == "sgl":
            return 32 * (q // 16) + 16 * (q % 2) + 8 * h + q % 16 // 2
        return 16 * (q // 8) + 8 * h + q % 8
    if not joined:
        return q
    return q + half * ((1 - h) if variant == "flashinfer" else h)


def offset(layout: str, r: Tensor, c: Tensor, total: int, groups: int) -> Tensor:
    """The byte of the scale of a row and group."""
    if layout.startswith("megamoe"):
        return 4 * (c // 4 * total + 128 * (r // 128) + 4 * (r % 32) + r % 128 // 32) + c % 4
    tiles = -(-groups // 4)
    return (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4


def power(stored: Tensor) -> Tensor:
    """E8M0 bytes as float32; 0 is 2^-127."""
    return torch.pow(2.0, stored.double() - 127).float()


def eight(
    stored: Tensor, config: dict[str, Any], size: dict[str, Any], total: int, columns: int, i: int,
    members: int, half: int,
) -> Tensor:  # fmt: skip
    """FP8's scales of every element of a member."""
    q = torch.arange(half)
    r = q + half * ((1 - i) if config["variant"] == "flashinfer" else i) if members == 2 else q
    if stored.dtype == torch.int32:
        words = stored.contiguous().view(torch.uint8).flatten()
        c, wide = torch.arange(columns) // 128, stored.shape[1]
        return power(words[4 * (c // 4 * wide + r[:, None]) + c % 4])
    if size["block"]:
        return stored[r // 128][:, torch.arange(columns) // 128]
    return stored.expand(total, 1)[r] if stored.dim() else stored


def stacks(folder: Path) -> Iterator[dict[str, Any]]:
    """What the Report says of each stack."""
    yield from json.loads((folder / "transcode_report.json").read_text())["stacks"]
