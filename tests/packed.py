"""Reads a packed folder with the safetensors package alone and decodes it with `marlin_decode`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import marlin_decode


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every shard."""
    return {k: v for p in sorted(folder.glob("*.safetensors")) for k, v in load_file(p).items()}


def config(folder: Path) -> dict[str, Any]:
    """The quantization config."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    """The decoded float32 matrix of every packed module, by module name, without padding."""
    t, c, out = tensors(folder), config(folder), dict[str, Tensor]()
    for name, size in c["sizes"].items():
        parent, _, last = name.rpartition(".")
        at = f"{parent}." if parent else ""
        if size["experts"] is None:
            for leaf, n in zip(size["members"], size["n"], strict=True):
                w = _matrix(t, c, f"{at}{leaf}.", "weight_global_scale", None, size["lift"])
                out[at + leaf] = _own(w, slice(None), n, size["k"])
            continue
        for e in range(size["experts"]):
            lift = size["lift"][e] if isinstance(size["lift"], list) else size["lift"]
            w = _matrix(t, c, f"{name}_", "weight_scale_2", e, lift)
            for i, leaf in enumerate(size["members"]):
                rows = _rows(c, last, size["padded_n"], i)
                out[f"{at}{e}.{leaf}"] = _own(w, rows, size["n"][i], size["k"])
    return out


def biases(folder: Path) -> dict[str, Tensor]:
    """The biases of packed modules, in the activations' dtype."""
    t, c, out = tensors(folder), config(folder), dict[str, Tensor]()
    for name, size in c["sizes"].items():
        parent, _, last = name.rpartition(".")
        for i, (leaf, n) in enumerate(zip(size["members"], size["n"], strict=True)):
            if size["experts"] is None and f"{parent}.{leaf}.bias" in t:
                out[f"{parent}.{leaf}"] = marlin_decode.bias(t[f"{parent}.{leaf}.bias"])[:n]
            for e in range((f"{name}_bias" in t) * (size["experts"] or 0)):
                whole = marlin_decode.bias(t[f"{name}_bias"][e])
                mine = whole[_rows(c, last, size["padded_n"], i)]
                assert not torch.count_nonzero(mine[n:])
                out[f"{parent}.{e}.{leaf}"] = mine[:n]
    return out


def _rows(c: dict[str, Any], last: str, padded: list[int], i: int) -> slice:
    """Where a member's rows are among those of an expert's matrix."""
    if last == "w13" and c["w13_order"] == "interleaved":
        return slice(i, None, 2)
    return slice(sum(padded[:i]), sum(padded[: i + 1]))


def _own(w: Tensor, rows: slice, n: int, k: int) -> Tensor:
    """A member's matrix; its padding must be zero."""
    mine = w[rows]
    assert not torch.count_nonzero(mine[n:])
    assert not torch.count_nonzero(mine[:, k:])
    return mine[:n, :k]


def _matrix(
    t: dict[str, Tensor], c: dict[str, Any], stem: str, factor: str, e: int | None, lift: float
) -> Tensor:
    """`[N, K]` with padding, as the kernel of the folder's layout takes it."""

    def part(leaf: str) -> Tensor:
        whole = t[stem + leaf]
        return whole if e is None else whole[e]

    words, stored = part("weight"), part("weight_scale")
    if c["layout"] == "marlin-nvfp4":
        dtype = c["activation_dtype"]
        return marlin_decode.weight(words, stored, float(part(factor)), lift, dtype)
    if c["layout"] == "marlin-fp8":
        return marlin_decode.fp8_weight(words, stored)
    bits = 8 if c["layout"] == "marlin-mxfp8" else 4
    return marlin_decode.mx_weight(words, stored, bits=bits, a8=c["activations"] == "fp8")
