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
    t, c = tensors(folder), config(folder)
    report = json.loads((folder / "transcode_report.json").read_text())
    lifts = {s["name"]: s["lift"] for s in report["stacks"]}
    dtype, out = c["activation_dtype"], dict[str, Tensor]()
    for name, size in c["sizes"].items():
        parent, _, members = name.rpartition(".")
        lift = lifts[name]
        if size["experts"] is None:
            for leaf, n in zip(members.split("+"), size["n"], strict=True):
                m = f"{parent}.{leaf}"
                g = float(t[f"{m}.weight_global_scale"])
                w = marlin_decode.weight(t[f"{m}.weight"], t[f"{m}.weight_scale"], g, lift, dtype)
                out[m] = w[:n, : size["k"]]
            continue
        stack = next(s for s in report["stacks"] if s["name"] == name)
        for e in range(size["experts"]):
            g = float(t[f"{name}_weight_scale_2"][e])
            own = lift[e] if isinstance(lift, list) else lift
            w = marlin_decode.weight(
                t[f"{name}_weight"][e], t[f"{name}_weight_scale"][e], g, own, dtype
            )
            at = 0
            for leaf, n, pn in zip(stack["members"], size["n"], size["padded_n"], strict=True):
                out[f"{parent}.{e}.{leaf}"] = w[at : at + n, : size["k"]]
                assert not torch.count_nonzero(w[at + n : at + pn])
                at += pn
            assert not torch.count_nonzero(w[:, size["k"] :])
    return out
