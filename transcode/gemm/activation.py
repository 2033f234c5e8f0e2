"""What stands between an MoE layer's two GEMMs: a function of gate and up, or of up alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from transcode.checkpoint import Checkpoint
from transcode.fold import ACTIVATION_KEYS
from transcode.names import family

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("silu", "swish"), silu),
    "gelu": gelu,
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), partial(gelu, approximate="tanh")),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}

ALPHA, LIMIT = 1.702, 7.0
"""gpt-oss' constants (openai/gpt-oss, gpt_oss/torch/model.py); a config may have another limit."""

Between = Callable[[Sequence[Tensor]], Tensor]


def activation(checkpoint: Checkpoint) -> tuple[str, Between]:
    """The config's activation; silu stands in for one that is not known here."""
    config = checkpoint.text_config
    own = family(config.get("model_type")).fused
    told = config.get("swiglu_limit")
    limit = float(told) if isinstance(told, int | float) and told else 0.0
    if own is not None and own.interleaved:
        return "swigluoai", partial(_swigluoai, limit or LIMIT)
    named = next((str(v) for k in ACTIVATION_KEYS if (v := config.get(k)) is not None), "none")
    if named not in ACTIVATIONS:
        return f"silu in place of {named}", partial(_gated, silu, limit)
    clamped = f" with limit {limit:g}" if limit else ""
    return named + clamped, partial(_gated, ACTIVATIONS[named], limit)


def _gated(act: Callable[[Tensor], Tensor], limit: float, outs: Sequence[Tensor]) -> Tensor:
    gate, *up = outs
    if not up:
        return act(gate)
    if limit:
        return act(gate.clamp(max=limit)) * up[0].clamp(-limit, limit)
    return act(gate) * up[0]


def _swigluoai(limit: float, outs: Sequence[Tensor]) -> Tensor:
    gate, up = outs[0].clamp(max=limit), outs[1].clamp(-limit, limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
