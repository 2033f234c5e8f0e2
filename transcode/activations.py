"""How a module's activations are quantised: from its tensors, else from the source's config.

"none": 16 bit.  "dynamic": a scale for each token or group, made at run time.  "static": by the
input scale that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.config import description
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recognise import Module, quantization

FOUR = (Encoding.NVFP4, Encoding.NVFP4_32)


def activations(checkpoint: Checkpoint, module: Module) -> str:
    """ "none", "dynamic" or "static"."""
    if Role.INPUT in module.parts:
        return "static"
    if module.encoding in FOUR:
        return "none"
    config = quantization(checkpoint)[0]
    method = str(config.get("quant_method") or "").lower()
    if method == "mxfp4" or module.encoding is Encoding.INT4:
        return "none"
    if method == "transcode":
        return _ours(config, module)
    if method == "quark":
        return _quark(config, module)
    told = description(checkpoint, module)
    if "input_activations" in told:
        return "none" if told["input_activations"] is None else "dynamic"
    return "dynamic"


def _ours(config: Mapping[str, Any], module: Module) -> str:
    groups = config.get("groups")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and module.name in (group.get("modules") or ()):
            word = group.get("activations")
            return word if word in ("none", "dynamic") else "dynamic"
    return "dynamic"


def _quark(config: Mapping[str, Any], module: Module) -> str:
    """The layer's own entry, else the global one: without input_tensors, weights only."""
    layers = config.get("layer_quant_config")
    entry = config.get("global_quant_config")
    for pattern, own in layers.items() if isinstance(layers, dict) else ():
        if fnmatchcase(module.name, pattern):
            entry = own
            break
    inputs = entry.get("input_tensors") if isinstance(entry, dict) else None
    return "dynamic" if inputs else "none"
