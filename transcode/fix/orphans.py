"""Scales beside a weight that is not quantised, or beside none where the head is tied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from transcode.checkpoint import Checkpoint, Reader, reader
from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.recognise import QUANTISED, SCALES

INPUTS = ("input_scale", "input_global_scale", "input_scale_2")
PART = 16_000_000
"""How many elements of a weight are looked at at a time."""


def tied_head(checkpoint: Checkpoint, module: str) -> bool:
    """Whether a module is a head whose weight is the embedding's."""
    configs = (checkpoint.config, checkpoint.text_config)
    tied = any(config.get("tie_word_embeddings") for config in configs)
    return tied and module.endswith("lm_head") and f"{module}.weight" not in checkpoint.tensors


def mend(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Without such scales. FormatError where the weight may be codes that need the scale: all its
    numbers are E4M3's."""
    tensors = checkpoint.tensors
    stray = [name for name in tensors if _stray(name, tensors, checkpoint)]
    if not stray:
        return checkpoint, []
    with reader() as read:
        for name in {name.rpartition(".")[0]: name for name in stray}.values():
            weight = tensors.get(f"{name.rpartition('.')[0]}.weight")
            if weight is not None and _codes(weight, read):
                raise FormatError(
                    f"{weight}: all its numbers are E4M3's, beside {name}: codes that were cast, "
                    "or a weight? Quantise it again, or take it from the original"
                )
    rest = {name: info for name, info in tensors.items() if name not in set(stray)}
    told = f"{len(stray)} scales of weights that are not quantised left out, {stray[0]} first"
    return replace(checkpoint, tensors=rest), [told]


def _stray(name: str, tensors: Mapping[str, TensorInfo], checkpoint: Checkpoint) -> bool:
    module, _, leaf = name.rpartition(".")
    if not module or leaf not in (*SCALES, *INPUTS) or f"{module}.weight_packed" in tensors:
        return False
    weight = tensors.get(f"{module}.weight")
    if weight is None:
        return tied_head(checkpoint, module)
    plain = weight.dtype not in QUANTISED and len(weight.shape) == 2
    return plain and any(f"{module}.{own}" in tensors for own in SCALES)


def _codes(weight: TensorInfo, read: Reader) -> bool:
    """Whether the numbers of an unquantised weight may be FP8's or FP4's codes."""
    value = read.tensor(weight).flatten()
    parts = (value[at : at + PART] for at in range(0, len(value), PART))
    return all(torch.equal(p.to(torch.float8_e4m3fn).float(), p.float()) for p in parts)
