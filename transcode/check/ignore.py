"""The ignore list and the config's groups against the tensors: layer by layer, as each runtime.

What a runtime builds quantised and finds unquantised, or the reverse, does not load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from transcode.check.declared import Declared, bits_of
from transcode.check.exclusions import PARTLY, Rules, excluded, looked_up
from transcode.check.findings import RUNTIMES, Finding, many
from transcode.check.units import Unit, draft
from transcode.checkpoint import Checkpoint
from transcode.degrees import COLUMNS, REPLICATED, ROWS
from transcode.names import address, natural

LINEARS = frozenset((*COLUMNS, *ROWS, *REPLICATED))
"""Projections that every runtime builds with the quantization config."""

ROUTERS = ("qwen3_moe",)
"""Model types whose router vLLM builds with the quantization config (models/qwen3_moe.py)."""

OWN = ("deepseek_v4", "deepseek_v41")
"""Model types whose code says itself which linears are FP8, without a list."""

CAST = "a BF16 weight is copied into an FP8 one, cast by value, with a scale that nobody wrote"
"""What both runtimes do with an unquantised weight where an FP8 layer is built."""

TOWERS = re.compile(r"vis|vit_|audio|image|encoder")
"""Parts of a name outside the language model, where runtimes quantise by rules of their own."""


def of_ignore(
    checkpoint: Checkpoint, declared: Declared, layers: Sequence[Unit]
) -> Iterator[Finding]:
    """Layers that are quantised but ignored, or that are not although no rule excludes them."""
    model = checkpoint.text_config.get("model_type")
    native = declared.native and model not in OWN
    judged = declared.modelopt or declared.compressed or native or declared.quark
    if not judged or not declared.raw:
        return
    rules = Rules(declared.ignore)
    found: dict[tuple[str, str, str], dict[str, list[Unit]]] = {}
    for unit in layers:
        if len({m.encoding for m in unit.modules}) > 1 or TOWERS.search(unit.name):
            continue
        for runtime in RUNTIMES:
            told = _told(declared, rules, unit, runtime)
            if kind := _judge(checkpoint, declared, unit, runtime, told):
                found.setdefault(kind, {}).setdefault(runtime, []).append(unit)
    for kind, by_runtime in found.items():
        same = len({tuple(u.name for u in hit) for hit in by_runtime.values()}) == 1
        for runtimes in [tuple(by_runtime)] if same else [(r,) for r in by_runtime]:
            hit = by_runtime[runtimes[0]]
            first = min(hit, key=lambda unit: natural(unit.name))
            told = _told(declared, rules, first, runtimes[0])
            yield _finding(declared, kind, first, told, len(hit), runtimes)


def _finding(
    declared: Declared,
    kind: tuple[str, str, str],
    first: Unit,
    told: tuple[int | None, str],
    count: int,
    runtimes: tuple[str, ...],
) -> Finding:
    level, code, what = kind
    bits, why = told
    has = f"{first.bits} bit" if first.bits else "unquantised"
    wants = f"{bits} bit" if bits else "an unquantised weight"
    text = {
        "ignored-quantised": f"it is {has}, but {why}",
        "unlisted": f"it is unquantised, {declared.where} says {wants} ({why})",
        "partly-listed": why,
        "other-bits": f"it is {has}, {declared.where} says {wants} ({why})",
    }[code]
    return Finding(level, code, first.name, f"{text}; {many(count, 'layer')}: {what}", runtimes)


def _judge(
    checkpoint: Checkpoint,
    declared: Declared,
    unit: Unit,
    runtime: str,
    told: tuple[int | None, str],
) -> tuple[str, str, str] | None:
    """(level, code, consequence) where what a runtime is told is not what lies there."""
    bits, why = told
    leaf = address(unit.modules[0].name).leaf
    head = draft(unit.name, checkpoint)
    fails = "WEAK" if head else "FAILS"
    shapes = "the weights do not fit the layer that is built" + (
        " (for speculative decoding only)" if head else ""
    )
    if why == PARTLY:
        return fails, "partly-listed", "both runtimes raise (`some but not all shards`)"
    if bits is None or bits == unit.bits:
        return None
    if unit.bits and not bits:
        return fails, "ignored-quantised", shapes
    if unit.bits:
        return fails, "other-bits", shapes
    head_less = leaf == "lm_head" and (declared.native or declared.quark or _tied(checkpoint))
    model = checkpoint.text_config.get("model_type")
    if (leaf in LINEARS and not head_less) or unit.experts:
        if declared.eight:
            return "WEAK" if head else "WRONG", "unlisted", CAST
        return fails, "unlisted", shapes
    if leaf == "gate" and model in ROUTERS and runtime == "vllm":
        level, then = ("WRONG", f", and {CAST}") if declared.eight else (fails, "")
        return level, "unlisted", f"vLLM builds {model}'s router with the quantization config{then}"
    if declared.native or declared.quark:
        return None  # not everything that is listed nowhere is built quantised
    return "NOTE", "unlisted", "loads where the runtime leaves such a layer unquantised anyhow"


def _tied(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.text_config.get("tie_word_embeddings"))


def _told(declared: Declared, rules: Rules, unit: Unit, runtime: str) -> tuple[int | None, str]:
    """The bits that a runtime expects, 0 for none, None if it cannot be said; and the rule."""
    if entry := excluded(declared, rules, unit, runtime):
        return (None, entry) if entry == PARTLY else (0, entry)
    if declared.quark:
        return unit.bits or 4, "exclude does not name it"
    if declared.native:
        return 8, "quant_method fp8 without such an entry in modules_to_not_convert"
    return _modelopt_expects(declared, unit) if declared.modelopt else _ct_expects(declared, unit)


def _modelopt_expects(declared: Declared, unit: Unit) -> tuple[int | None, str]:
    if not declared.mixed:
        return bits_of(declared.algorithm), f"quant_algo {declared.algorithm}"
    names = [unit.name, *(m.name for m in unit.modules if not unit.experts)]
    algorithms = (declared.algorithm_of(name, experts=unit.experts) for name in names)
    algorithm = next(filter(None, algorithms), "")
    if not algorithm:
        return 0, "quantized_layers does not name it"
    return bits_of(algorithm), f"quantized_layers: {algorithm}"


def _ct_expects(declared: Declared, unit: Unit) -> tuple[int | None, str]:
    groups = [declared.group_of(m.name) for m in looked_up(unit)]
    if not all(groups):
        return 0, "no group's targets name it"
    return (groups[0].bits if groups and groups[0] else None), "by its config group"
