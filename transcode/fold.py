"""Whether up's factor may move into down: `down(act(gate) * up)` is linear in up.

With gate's global scale kept for both halves, up comes out g_gate / g_up times too large, so down's
scale takes the factor g_up / g_gate and its input scale the inverse. No code and no block scale
changes. The function is preserved, the matrices up and down are not: LoRA adapters for them need
`rescale`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcode.checkpoint import Checkpoint, Reader
from transcode.errors import LayoutError
from transcode.header import TensorInfo
from transcode.module import Module
from transcode.names import address, family
from transcode.producer import E8M0
from transcode.quant import Encoding
from transcode.stacks import Options

BREAKS = re.compile(r"swiglu_limit|swiglu_alpha|swiglu_beta|situ|clamp")
"""Config keys that put something between the projections that is not linear in up."""

ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act")

LINEAR = re.compile(r"silu|swish|gelu\w*|(fast|quick)_gelu")
"""Activations of gated MLPs: whatever they do to gate, up is only multiplied."""

REACH = {"bfloat16": 2.0**60, "float16": 16.0}
"""How far a fold may move up's output, whose size nobody knows, within the activations' range."""

TINY = torch.finfo(torch.float32).tiny
"""The smallest normal float32: a scale below it would lose bits."""


def normed(checkpoint: Checkpoint) -> frozenset[str]:
    """The modules that have a norm of their own, such as BitNet's `ffn_sub_norm` inside an MLP."""
    modules = {name.rpartition(".")[0].rpartition(".") for name in checkpoint.tensors}
    return frozenset(parent for parent, _, leaf in modules if "norm" in leaf)


@dataclass(frozen=True)
class Pair:
    """A gate and an up whose global scales differ, and the down that follows.

    ratio: g_up / g_gate.  g_down: down's own factor where down is packed too, else None.
    """

    gate: Module
    up: Module
    down: Module | None
    ratio: float
    g_down: Tensor | None


def refusal(
    checkpoint: Checkpoint,
    inner_norms: frozenset[str],
    read: Reader,
    pair: Pair,
    options: Options,
) -> str:
    """Why up's factor cannot move into down, or "" if it can."""
    config, up, down = checkpoint.text_config, pair.up, pair.down
    if not family(config.get("model_type")).foldable:
        return f"model_type {config.get('model_type')!r} is not on the checked list"
    named = [config[key] for key in ACTIVATION_KEYS if config.get(key) is not None]
    if not named or not all(LINEAR.fullmatch(str(activation)) for activation in named):
        return f"the activation is {' and '.join(map(str, named)) or 'not named'}"
    if key := next(_breaking(checkpoint, up), ""):
        return f"the config sets {key}"
    if up.name.rpartition(".")[0] in inner_norms:
        return "a norm may stand between the product and down"
    if not 1 / REACH[options.dtype] <= pair.ratio <= REACH[options.dtype]:
        return f"up would come out {1 / pair.ratio:.4g} times as large, in {options.dtype}"
    if down is None:
        return "there is no down"
    if down.encoding in (Encoding.UNQUANTISED, Encoding.NVFP4_32, Encoding.INT4):
        return f"{down.name} is {down.encoding}: no scale that takes the factor"
    if pair.g_down is not None and not _packs(pair.g_down, pair.ratio, options):
        return f"{down.name}'s global scale times {pair.ratio:g} leaves float32's normal range"
    for info, factor in changes(up, down, pair.ratio):
        if info.part_of and not options.form:
            return f"{info.part_of} holds other experts' too"
        if not _takes(read.tensor(info), info, factor):
            return f"{info} cannot take the factor {factor:.9g}"
    return ""


def folded(g: Tensor, ratio: float) -> Tensor:
    """A down projection's global scale with the factor, float32."""
    return (g.double() * ratio).float()


def _packs(g: Tensor, ratio: float, options: Options) -> bool:
    """Whether the folded scale is 0 still, or normal and within the layout's range."""
    result = folded(g, ratio)
    if (result >= TINY) != (g > 0):
        return False
    if options.form:
        return bool(torch.isfinite(result))
    try:
        assert options.layout.factor is not None
        options.layout.factor.pack(result.reshape(1), torch.ones(1), options.dtype)
    except LayoutError:
        return False
    return True


def changes(up: Module, down: Module, ratio: float) -> Iterator[tuple[TensorInfo, float]]:
    """The tensors that change with the fold and their factors, but for packed global scales."""
    if "bias" in up.leaves:
        yield up.leaf("bias"), 1 / ratio
    if down.encoding is Encoding.NVFP4:
        return
    name = next(s for s in ("weight_scale", "weight_scale_inv", "scale") if s in down.leaves)
    yield down.leaf(name), ratio
    if "input_scale" in down.leaves:
        yield down.leaf("input_scale"), 1 / ratio


def scaled(value: Tensor, info: TensorInfo, factor: float) -> Tensor:
    """A scale or bias times a factor; E8M0 (F8_E8M0, or U8) takes a power of two as an exponent."""
    if info.dtype in E8M0:
        exponent = value.view(torch.uint8).int() + round(math.log2(factor))
        return exponent.to(torch.uint8).view(value.dtype)
    return (value.double() * factor).to(value.dtype)


def _takes(value: Tensor, info: TensorInfo, factor: float) -> bool:
    power = math.frexp(factor)[0] == 0.5
    if info.dtype in E8M0:
        if not power:
            return False
        exponent = value.view(torch.uint8).int() + round(math.log2(factor))
        return bool(((exponent >= 0) & (exponent <= 254)).all())
    result = scaled(value, info, factor)
    if info.dtype == "F32" and not info.name.endswith(".bias"):
        kept = torch.where(value.abs() >= TINY, result.abs() >= TINY, result == value)
        return bool((torch.isfinite(result) & kept).all())
    return power and torch.equal(result.double(), value.double() * factor)


def _breaking(checkpoint: Checkpoint, up: Module) -> Iterator[str]:
    """Keys that are set for this kind of MLP and this layer, in the config and its text_config."""
    where = address(up.name)
    for config in (checkpoint.config, checkpoint.text_config):
        for key, value in config.items():
            if not BREAKS.search(key):
                continue
            twin = f"{key}_shared" in config
            applies = where.shared if "shared" in key else not (where.shared and twin)
            if applies and _set(value, None if where.draft else where.layer):
                yield key


def _set(value: Any, layer: int | None) -> bool:
    """Whether a value, or its entry for the layer, or any where that is not known, is set."""
    if not isinstance(value, list):
        return bool(value)
    return bool(value[layer]) if layer is not None and layer < len(value) else any(value)
