"""The destination's config.json: the source's, with what a loader of packed weights needs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.degrees import degrees
from transcode.job import Job
from transcode.module import Module
from transcode.names import address, natural
from transcode.plan import ACTIVATION, Plan
from transcode.producer import Configs
from transcode.quant import Encoding
from transcode.recognise import quantization
from transcode.stacks import experts_of, packable

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


def quantization_config(checkpoint: Checkpoint, job: Job) -> dict[str, Any]:
    """What a loader needs, and the source's own words for the way back."""
    plan = job.plan
    source, where = quantization(checkpoint)
    fused = [s for s in plan.stacks if s.fused == "w13"]
    orders = {"gate_up" if len(s.groups[0]) == 2 else "up" for s in fused}
    others = {path: block for path, block in removed(checkpoint).items() if block is not source}
    if checkpoint.hf_quant_config is not None and where != "hf_quant_config.json":
        others["hf_quant_config.json"] = checkpoint.hf_quant_config
    return {
        "quant_method": METHOD,
        "layout": plan.options.layout.name,
        "layout_version": plan.options.layout.version,
        "activation_dtype": plan.options.dtype,
        "w13_order": min(orders, default=None),
        "options": {
            "unify": plan.options.unify,
            "exact": plan.options.exact,
            "tp": plan.options.tp,
        },
        "tp": degrees(plan, checkpoint.text_config),
        "modules": _modules(plan),
        "carried": list(_carried(checkpoint, plan)),
        "ignore": [m.name for m in ordered(plan.modules) if _ignored(m)],
        "kv_cache": _kv_cache(checkpoint, source),
        "groups": _groups(job),
        "sizes": _sizes(job),
        "source": source,
        "source_file": where,
        "source_others": others,
    }


def ordered(modules: Mapping[str, Module]) -> list[Module]:
    """Modules in the natural order of their names."""
    return sorted(modules.values(), key=lambda m: natural(m.name))


def _ignored(module: Module) -> bool:
    return module.encoding is Encoding.UNQUANTISED and len(module.shape) == 2


def _modules(plan: Plan) -> dict[str, list[str]]:
    """Names by encoding, an experts container for its experts where they are all of one."""
    names: dict[str, list[str]] = {}
    uniform = {
        container: {key_of(m) for parts in experts.values() for m in parts.values()}
        for container, experts in experts_of(plan.modules).items()
    }
    for module in ordered(plan.modules):
        where = address(module.name)
        whole = where.expert is not None and len(uniform[where.parent]) == 1
        name = where.parent if whole else module.name
        listed = names.setdefault(key_of(module), [])
        if module.encoding is not Encoding.UNQUANTISED and name not in listed[-1:]:
            listed.append(name)
    return {encoding: listed for encoding, listed in sorted(names.items()) if listed}


def key_of(module: Module) -> str:
    """A module's encoding; "nvfp4-unpacked" for a table that is not multiplied with."""
    if module.encoding is Encoding.NVFP4 and not packable(module):
        return "nvfp4-unpacked"
    return str(module.encoding)


def _carried(checkpoint: Checkpoint, plan: Plan) -> Iterator[dict[str, Any]]:
    """Quantised modules that are not packed, with the source's own description of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for module in ordered(plan.modules):
        if module.encoding is Encoding.UNQUANTISED or packable(module):
            continue
        told = json.dumps(description(checkpoint, module), sort_keys=True)
        found.setdefault((key_of(module), told), []).append(module.name)
    for (encoding, told), names in found.items():
        yield {"encoding": encoding, "modules": names, "config": json.loads(told)}


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


def _kv_cache(checkpoint: Checkpoint, source: Mapping[str, Any]) -> Any:
    if source.get("kv_cache_scheme"):
        return source["kv_cache_scheme"]
    for config in (source, checkpoint.hf_quant_config or {}):
        inner = config.get("quantization")
        if isinstance(inner, dict) and inner.get("kv_cache_quant_algo"):
            return inner["kv_cache_quant_algo"]
    return source.get("kv_cache_quant_algo")


def _groups(job: Job) -> list[dict[str, Any]]:
    """The fusion groups whose global scales differed, and what was done to them."""
    found: dict[tuple[str, str], list[int]] = {}
    for decision in job.unified.decisions:
        found.setdefault((decision.stack, decision.how), []).append(decision.group)
    return [{"name": name, "how": how, "groups": at} for (name, how), at in found.items()]


def _sizes(job: Job) -> dict[str, dict[str, Any]]:
    """Every stack: source format, logical and padded rows of each member and K, and the lift."""
    return {
        stack.name: {
            "experts": len(stack.groups) if stack.fused else None,
            "members": list(stack.roles()),
            "formats": [m.format.name for m in stack.groups[0] if m.format],
            "n": [m.shape[0] for m in stack.groups[0]],
            "k": stack.groups[0][0].shape[1],
            "padded_n": list(stack.padded.rows),
            "padded_k": stack.padded.k,
            "splits": stack.padded.whole,
            "lift": job.settled[stack.name].lift_entry(),
        }
        for stack in job.plan.stacks
    }
