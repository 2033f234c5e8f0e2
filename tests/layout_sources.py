"""Small sources in every encoding that Marlin packs, with single values altered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.build import Spec, Tensors, build, edit
from tests.producers import KINDS, Kind

MOE = Spec(hidden=128, intermediate=96, experts=2, layers=1)
FP8 = replace(MOE, attention="fp8", gate_up="fp8_channel", down="fp8_channel")
MX = replace(MOE, attention="bf16", gate_up="mxfp4", down="mxfp4")
EXPERTS = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"
UP = f"{EXPERTS}.1.up_proj"


def small(name: str, **changes: object) -> Kind:
    """A kind of one layer with few rows."""
    kind = KINDS[name]
    spec = replace(kind.spec, layers=1, hidden=128, intermediate=128, experts=2, **changes)  # type: ignore[arg-type]
    return replace(kind, spec=spec)


def source(path: Path, spec: Spec | Kind, **changes: Callable[[Tensor], Tensor]) -> Path:
    """A built checkpoint with some tensors altered, by name with `__` for a dot."""
    if isinstance(spec, Spec):
        build(path, spec)
    else:
        spec(path)
    if changes:
        named = {name.replace("__", "."): change for name, change in changes.items()}

        def alter(tensors: Tensors) -> Tensors:
            assert named.keys() <= tensors.keys(), sorted(tensors)
            return {n: named[n](t) if n in named else t for n, t in tensors.items()}

        edit(path, alter)
    return path


def at(name: str) -> str:
    return name.replace(".", "__")


def put(value: float) -> Callable[[Tensor], Tensor]:
    """One element in the middle, a byte of what has one byte an element."""

    def change(t: Tensor) -> Tensor:
        new = t.clone().reshape(-1)
        flat = new.view(torch.uint8) if t.element_size() == 1 else new
        flat[flat.numel() // 2] = value
        return new.reshape(t.shape)

    return change


MXFP8 = small("modelopt-mxfp8")
