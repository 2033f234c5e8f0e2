"""The destination's config.json: the source's, with what a loader of packed weights needs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.module import Module
from transcode.output import ACTIVATION
from transcode.producer import Configs
from transcode.quant import Encoding
from transcode.recognise import quantization

METHOD = "transcode"
BLOCKS = ("quantization_config", "compression_config")
"""Keys under which a config describes its quantisation, at the top or in a nested block."""

MODULE_LISTS = (
    "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "quantized_layers",
    "config_groups", "quantization",
)  # fmt: skip
"""Keys that list modules: the rest of a quantization config describes all of them."""

WEIGHTS: dict[Encoding, dict[str, Any]] = {
    Encoding.NVFP4: {"num_bits": 4, "type": "float", "group_size": 16},
    Encoding.NVFP4_32: {"num_bits": 4, "type": "float", "group_size": 32},
    Encoding.MXFP4: {"num_bits": 4, "type": "float", "group_size": 32},
    Encoding.MXFP8: {"num_bits": 8, "type": "float", "group_size": 32},
    Encoding.INT4: {"type": "int"},
}
"""How a config group describes an encoding's weights; FP8 has no group size."""


def activation_dtype(checkpoint: Checkpoint) -> str:
    """The config's dtype if a Marlin kernel has it, else bfloat16."""
    for config in (checkpoint.config, checkpoint.text_config):
        for key in ("dtype", "torch_dtype"):
            dtype = str(config.get(key)).removeprefix("torch.")
            if dtype in ACTIVATION:
                return dtype
    return "bfloat16"


def target_config(checkpoint: Checkpoint, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The source's config with this quantization config and no other, and the packed dtype."""
    config = _in_dtype(_without(checkpoint), mine["activation_dtype"])
    return config | {"quantization_config": dict(mine)}


def _in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same config, which now names this dtype wherever it named one."""
    text = config.get("text_config")
    for block in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if block.get(key) is not None:
                block[key] = dtype
    return config


def _without(checkpoint: Checkpoint) -> dict[str, Any]:
    """The source's config without any quantization config."""
    config = copy.deepcopy(checkpoint.config)
    for path in removed(checkpoint):
        *parents, last = path.split("/")
        holder = config
        for key in parents:
            holder = holder[key]
        del holder[last]
    return config


def form_configs(checkpoint: Checkpoint, configs: Configs) -> dict[str, dict[str, Any]]:
    """config.json, and hf_quant_config.json if there is one, of a rewritten checkpoint."""
    config = _without(checkpoint)
    config.pop("expert_dtype", None)  # DeepSeek-V4's: another form's experts are in another
    config |= dict(configs.top)
    if configs.dtype:
        _in_dtype(config, configs.dtype)
    text = config.get("text_config")
    (text if isinstance(text, dict) else config).update(configs.sizes)
    if configs.quantization is not None:
        config |= {"quantization_config": configs.quantization}
    beside = {"hf_quant_config.json": configs.hf_quant} if configs.hf_quant else {}
    return {"config.json": config, **beside}


def removed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every quantization config in config.json, however deep, by its path `a/b/c`."""

    def walk(block: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key, value in block.items():
            if key in BLOCKS:
                yield path + key, value
            elif isinstance(value, dict):
                yield from walk(value, f"{path}{key}/")

    return dict(walk(checkpoint.config, ""))


def description(checkpoint: Checkpoint, module: Module) -> dict[str, Any]:
    """What the source says of one module: its entry, its group, or all but the lists of modules."""
    source = quantization(checkpoint)[0]
    for config in (source, checkpoint.hf_quant_config or {}):
        for block in (config, config.get("quantization")):
            layers = block.get("quantized_layers") if isinstance(block, dict) else None
            if entry := _nearest(layers, module.name):
                return entry
    groups = source.get("config_groups")
    fitting = [
        (_specific(group, module), group)
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and _describes(group.get("weights"), module.encoding)
    ]
    best = max((rank for rank, _ in fitting), default=0)
    if best:
        return dict(next(group for rank, group in fitting if rank == best))
    return {key: value for key, value in source.items() if key not in MODULE_LISTS}


def _nearest(layers: Any, name: str) -> dict[str, Any]:
    """The entry of the module, or of the nearest container that has one."""
    while name and isinstance(layers, dict):
        if isinstance(layers.get(name), dict):
            return dict(layers[name])
        name = name.rpartition(".")[0]
    return {}


def _describes(weights: Any, encoding: Encoding) -> bool:
    """Whether a group's weights are of this encoding, as far as it says."""
    wanted = WEIGHTS.get(encoding, {"num_bits": 8, "type": "float"})
    return isinstance(weights, dict) and all(
        weights.get(key) in (value, None) for key, value in wanted.items()
    )


def _specific(group: Mapping[str, Any], module: Module) -> int:
    """3 for a target that names the module, 2 for a pattern, 1 for a class, 0 for none."""
    targets = group.get("targets")
    ranks = [0]
    for target in targets if isinstance(targets, list) else ():
        if target == module.name or module.name.startswith(f"{target}."):
            ranks.append(3)
        elif isinstance(target, str) and target.startswith("re:"):
            ranks.append(2 if _matches(target[3:], module.name) else 0)
        elif target == "Linear":
            ranks.append(1)
    return max(ranks)


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits; one that repeats a repetition could run without end, and does not."""
    if re.search(r"[+*}]\)+[+*{]|\|[^()]*\)+[+*{]", pattern):
        return False
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False
