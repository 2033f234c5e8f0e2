"""What the config of a packed folder says: for a loader, for `verify`, and for the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.config import METHOD, description, removed
from transcode.degrees import degrees
from transcode.job import Job
from transcode.module import Module
from transcode.names import address, natural
from transcode.plan import Plan
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recognise import quantization
from transcode.spec import Layout
from transcode.stacks import Stack, experts_of, packable
from transcode.unify import Decision


def quantization_config(checkpoint: Checkpoint, job: Job) -> dict[str, Any]:
    """What a loader needs, and the source's own words for the way back."""
    plan = job.plan
    source, where = quantization(checkpoint)
    layout = plan.options.layout
    orders = {_order(s) for s in plan.stacks if s.fused == "w13"}
    others = {path: block for path, block in removed(checkpoint).items() if block is not source}
    if checkpoint.hf_quant_config is not None and where != "hf_quant_config.json":
        others["hf_quant_config.json"] = checkpoint.hf_quant_config
    return {
        "quant_method": METHOD,
        "layout": layout.name,
        "layout_version": layout.version,
        "variant": layout.variant,
        "consumer": {"runtime": layout.runtime, "version": layout.release},
        "activations": layout.activations,
        "activation_dtype": plan.options.dtype,
        "w13_order": min(orders, default=None),
        "options": {
            "unify": plan.options.unify,
            "exact": plan.options.exact,
            "tp": plan.options.tp,
            "encodings": plan.options.recipe.asked(),
            **({"scalars": True} if plan.options.scalars else {}),
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


def _order(stack: Stack) -> str:
    """How gate's and up's rows lie in w13."""
    if len(stack.groups[0]) == 1:
        return "up"
    return stack.order


def _ignored(module: Module) -> bool:
    return module.encoding is Encoding.UNQUANTISED and len(module.shape) == 2


def _modules(plan: Plan) -> dict[str, list[str]]:
    """Names by encoding, an experts container for its experts where they are all of one."""
    names: dict[str, list[str]] = {}
    layout = plan.options.layout
    uniform = {
        container: {
            key_of(m, plan.options.layout) for parts in experts.values() for m in parts.values()
        }
        for container, experts in experts_of(plan.modules).items()
    }
    for module in ordered(plan.modules):
        where = address(module.name)
        whole = where.expert is not None and len(uniform[where.parent]) == 1
        name = where.parent if whole else module.name
        listed = names.setdefault(key_of(module, layout), [])
        if module.encoding is not Encoding.UNQUANTISED and name not in listed[-1:]:
            listed.append(name)
    return {encoding: listed for encoding, listed in sorted(names.items()) if listed}


def key_of(module: Module, layout: Layout) -> str:
    """A module's encoding; `nvfp4-unpacked` where it stays as the source has it."""
    table = module.encoding in layout.encodings and not packable(module, layout)
    return f"{module.encoding}-unpacked" if table else str(module.encoding)


def _carried(checkpoint: Checkpoint, plan: Plan) -> Iterator[dict[str, Any]]:
    """Quantised modules that are not packed, with the source's own description of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for module in ordered(plan.modules):
        if module.encoding is Encoding.UNQUANTISED or packable(module, plan.options.layout):
            continue
        told = json.dumps(description(checkpoint, module), sort_keys=True)
        found.setdefault((key_of(module, plan.options.layout), told), []).append(module.name)
    for (encoding, told), names in found.items():
        yield {"encoding": encoding, "modules": names, "config": json.loads(told)}


def _kv_cache(checkpoint: Checkpoint, source: Mapping[str, Any]) -> Any:
    if source.get("kv_cache_scheme"):
        return source["kv_cache_scheme"]
    for config in (source, checkpoint.hf_quant_config or {}):
        inner = config.get("quantization")
        if isinstance(inner, dict) and inner.get("kv_cache_quant_algo"):
            return inner["kv_cache_quant_algo"]
    return source.get("kv_cache_quant_algo")


def _groups(job: Job) -> list[dict[str, Any]]:
    """The fusion groups whose global scales differed, what was done to them, and the member whose
    global scale all have now."""
    found: dict[tuple[str, str], list[Decision]] = {}
    stacks = {stack.name: stack for stack in job.plan.stacks}
    for decision in job.unified.decisions:
        if decision.how == "keep":
            continue
        found.setdefault((decision.stack, decision.how), []).append(decision)

    def owner(decision: Decision) -> int:
        group = [m.name for m in stacks[decision.stack].groups[decision.group]]
        return group.index(job.unified.owner[group[0]])

    return [
        {
            "name": name,
            "how": how,
            "groups": [decision.group for decision in made],
            "of": [owner(decision) for decision in made],
        }
        for (name, how), made in found.items()
    ]


def _stored(module: Module) -> dict[str, str]:
    """The dtypes of a source's tensors, which their packed bytes do not tell."""
    bias = {Role.BIAS: module.leaf("bias")} if "bias" in module.leaves else {}
    parts = {Role.CODES: module.codes, Role.SCALES: module.scales, **bias}
    return {str(role): info.dtype for role, info in parts.items()}


def _sizes(job: Job) -> dict[str, dict[str, Any]]:
    """Every stack: how its source is stored, logical and padded rows of each member and K, lift."""
    return {
        stack.name: {
            "experts": len(stack.groups) if stack.fused else None,
            "members": list(stack.roles()),
            "formats": [m.format.name for m in stack.groups[0] if m.format],
            "stored": [_stored(m) for m in stack.groups[0]],
            "block": list(stack.first.block) if stack.first.block else None,
            "n": [m.shape[0] for m in stack.groups[0]],
            "k": stack.first.shape[1],
            "padded_n": list(stack.padded.rows),
            "padded_k": stack.padded.k,
            "splits": stack.padded.whole,
            "lift": job.settled[stack.name].lift_entry(),
            "flushed": sum(f.count for f in job.settled[stack.name].flushes),
        }
        for stack in job.plan.stacks
    }
