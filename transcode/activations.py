"""How a module's activations are quantised: from its tensors, else from the source's config.

"none": 16 bit.  "dynamic": a scale for each token or group, made at run time.  "static": by the
input scale that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.config import description
from transcode.module import Module
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recognise import quantization

FOUR = (Encoding.NVFP4, Encoding.NVFP4_32)


def activations(checkpoint: Checkpoint) -> Callable[[Module], str]:
    """A function from a module to "none", "dynamic" or "static"."""
    config = quantization(checkpoint)[0]
    method = str(config.get("quant_method") or "").lower()
    ours, quark = _ours(config), _quark(config)
    taken = {name: word for one in checkpoint.taken for name, word in one.activations.items()}

    def of(module: Module) -> str:
        if module.name in taken:
            return taken[module.name]
        if Role.INPUT in module.parts:
            return "static"
        if module.was:
            return "none" if module.encoding in (*FOUR, Encoding.MXFP4) else "dynamic"
        if module.encoding in FOUR or method == "mxfp4" or module.encoding is Encoding.INT4:
            return "none"
        if method == "transcode":
            return ours.get(module.name, "dynamic")
        if method == "quark":
            return quark(module.name)
        told = description(checkpoint, module)
        if "weights" in told or "input_activations" in told:  # a config group
            return "none" if told.get("input_activations") is None else "dynamic"
        return "dynamic"

    return of


def _ours(config: Mapping[str, Any]) -> dict[str, str]:
    """By module, as our canonical form says it."""
    groups = config.get("groups")
    return {
        name: group["activations"]
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
        and group.get("activations") in ("none", "dynamic")
        and isinstance(group.get("modules"), list)
        for name in group["modules"]
        if isinstance(name, str)
    }


def _quark(config: Mapping[str, Any]) -> Callable[[str], str]:
    """The layer's own entry, else the global one: without input_tensors, weights only."""
    layers = config.get("layer_quant_config")
    exact = layers if isinstance(layers, dict) else {}
    patterns = {pattern: own for pattern, own in exact.items() if set(pattern) & set("*?[")}

    def of(name: str) -> str:
        entry = exact.get(name)
        if entry is None:
            fitting = (own for pattern, own in patterns.items() if fnmatchcase(name, pattern))
            entry = next(fitting, config.get("global_quant_config"))
        inputs = entry.get("input_tensors") if isinstance(entry, dict) else None
        return "dynamic" if inputs else "none"

    return of
