"""The destination's config.json: the source's, with what a loader of packed weights needs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.degrees import degrees
from transcode.errors import FormatError
from transcode.names import address, natural
from transcode.pack import Job
from transcode.plan import ACTIVATION, Plan
from transcode.quant import Encoding
from transcode.recognise import Module, quantization
from transcode.stacks import experts_of, packable

METHOD = "transcode"
BLOCKS = ("quantization_config", "compression_config")
"""Keys under which a config describes its quantisation, at the top or in a nested block."""


def activation_dtype(checkpoint: Checkpoint) -> str:
    """The config's dtype if a Marlin kernel has it, else bfloat16."""
    for config in (checkpoint.config, checkpoint.text_config):
        for key in ("dtype", "torch_dtype"):
            dtype = str(config.get(key)).removeprefix("torch.")
            if dtype in ACTIVATION:
                return dtype
    return "bfloat16"


def target_config(checkpoint: Checkpoint, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The source's config with this quantization config and no other."""
    config = copy.deepcopy(checkpoint.config)
    for block in (config, *(v for v in config.values() if isinstance(v, dict))):
        for key in BLOCKS:
            block.pop(key, None)
    return config | {"quantization_config": dict(mine)}


def quantization_config(checkpoint: Checkpoint, job: Job) -> dict[str, Any]:
    """What a loader needs, and the source's own words for the way back."""
    plan = job.plan
    source, where = quantization(checkpoint)
    carried = list(_carried(source, plan))
    fused = [s for s in plan.stacks if s.fused == "w13"]
    orders = {"gate_up" if len(s.groups[0]) == 2 else "up" for s in fused}
    entries: dict[str, Any] = {
        "quant_method": METHOD,
        "layout": plan.options.layout.name,
        "layout_version": plan.options.layout.version,
        "activation_dtype": plan.options.dtype,
        "options": {
            "unify": plan.options.unify,
            "exact": plan.options.exact,
            "tp": plan.options.tp,
        },
        "tp": degrees(plan, checkpoint.text_config),
        "modules": _modules(plan),
        "carried": carried,
        "ignore": [m.name for m in ordered(plan.modules) if _ignored(m)],
        "kv_cache": _kv_cache(checkpoint, source),
        "groups": _groups(job),
        "sizes": _sizes(plan),
        "source": source,
        "source_file": where,
    }
    if orders:
        entries["w13_order"] = min(orders)
    if checkpoint.hf_quant_config is not None and where != "hf_quant_config.json":
        entries["source_hf_quant_config"] = checkpoint.hf_quant_config
    return entries


def refuse_packed(checkpoint: Checkpoint) -> None:
    """Raise FormatError for a checkpoint that was packed by this program."""
    config = quantization(checkpoint)[0]
    if config.get("quant_method") == METHOD:
        raise FormatError(f"is packed already ({config.get('layout')}): it cannot be read back yet")


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


def _carried(source: Mapping[str, Any], plan: Plan) -> Iterator[dict[str, Any]]:
    """Quantised modules that are not packed, with the source's own description of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for module in ordered(plan.modules):
        if module.encoding is Encoding.UNQUANTISED or packable(module):
            continue
        told = json.dumps(description(source, module), sort_keys=True)
        found.setdefault((key_of(module), told), []).append(module.name)
    for (encoding, told), names in found.items():
        yield {"encoding": encoding, "modules": names, "config": json.loads(told)}


def description(source: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """What the source's config says of one module: its entry, its group, or all but the lists."""
    nested = source.get("quantization")
    for config in (source, nested if isinstance(nested, dict) else {}):
        layers = config.get("quantized_layers")
        if isinstance(layers, dict):
            name = module.name
            while name:
                if isinstance(layers.get(name), dict):
                    return dict(layers[name])
                name = name.rpartition(".")[0]
    groups = source.get("config_groups")
    bits = 4 if module.encoding in (Encoding.MXFP4, Encoding.INT4, Encoding.NVFP4) else 8
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if (
            isinstance(weights, dict)
            and weights.get("num_bits") == bits
            and _targets(group, module)
        ):
            return dict(group)
    return {key: value for key, value in source.items() if not isinstance(value, list | dict)}


def _targets(group: Mapping[str, Any], module: Module) -> bool:
    targets = group.get("targets")
    for target in targets if isinstance(targets, list) else ():
        if target in ("Linear", module.name) or module.name.startswith(f"{target}."):
            return True
        if (
            isinstance(target, str)
            and target.startswith("re:")
            and _matches(target[3:], module.name)
        ):
            return True
    return False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
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


def _sizes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Logical and padded sizes of every stack: rows of each member, and K."""
    return {
        stack.name: {
            "experts": len(stack.groups) if stack.fused else None,
            "n": [m.shape[0] for m in stack.groups[0]],
            "k": stack.groups[0][0].shape[1],
            "padded_n": list(stack.padded.rows),
            "padded_k": stack.padded.k,
            "splits": stack.padded.whole,
        }
        for stack in plan.stacks
    }
