"""Experts' numbers after their projections: `experts.gate_proj.3` to `experts.3.gate_proj`.

NVIDIA/Model-Optimizer 0.43 wrote them so (vllm-project/vllm#40885).
"""

from __future__ import annotations

from dataclasses import replace

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.told import standard


def mend(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Every tensor under its standard name; FormatError if two would have the same."""
    names = {name: _standard(name) for name in checkpoint.tensors}
    turned = [name for name, now in names.items() if name != now]
    if not turned:
        return checkpoint, []
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if names[name] in tensors:
            raise FormatError(f"{name} and {names[name]} are the same expert's: wanted one")
        tensors[names[name]] = replace(info, name=names[name])
    told = f"{len(turned)} tensors renamed: {turned[0]} to {names[turned[0]]}"
    return replace(checkpoint, tensors=tensors), [told]


def _standard(tensor: str) -> str:
    module, dot, leaf = tensor.rpartition(".")
    return f"{standard(module)}{dot}{leaf}"
