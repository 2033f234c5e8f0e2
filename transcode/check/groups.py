"""Scalars that must agree or be there: global scales of fusion groups, and input scales.

Where members of a group have different global scales, vLLM and SGLang keep one for a dense layer
(ModelOpt's largest factor, compressed-tensors' largest divisor) without touching block scales, and
gate's for routed experts. Right are vLLM's Humming, which folds each half's own into its block
scales, and SGLang's trtllm-gen, which takes two scalars (ModelOpt only). Sources:
vllm/model_executor/layers/quantization/{modelopt,compressed_tensors/*}.py and
layers/fused_moe/oracle/nvfp4.py; sglang/srt/layers/quantization/modelopt_quant.py and its
compressed_tensors/schemes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from transcode.check.declared import Declared
from transcode.check.findings import Finding, many
from transcode.check.values import Group, Values
from transcode.checkpoint import Checkpoint, Reader
from transcode.errors import FormatError, LossError
from transcode.names import address
from transcode.plan import Plan
from transcode.unify import unify

CLOSE = 1e-5
"""Differences that vLLM's torch.allclose passes over, far below a step of E2M1."""


REMEDY = {
    True: "--to a form with --fill-input-scale takes the largest of the layer's experts",
    False: "--to compressed-tensors-nvfp4a16 says 16 bit activations",
}
"""What `convert` can do about missing input scales, of experts or not."""


def of_groups(
    checkpoint: Checkpoint,
    declared: Declared,
    values: Values,
    groups: Sequence[Group],
    plan: Plan | None,
    read: Reader,
) -> Iterator[Finding]:
    """All findings of this file."""
    yield from _differences(checkpoint, values, groups, plan, read)
    yield from _inputs(declared, values)


def _differences(
    checkpoint: Checkpoint,
    values: Values,
    groups: Sequence[Group],
    plan: Plan | None,
    read: Reader,
) -> Iterator[Finding]:
    """Fusion groups whose members' global scales differ."""
    kinds: dict[tuple[bool, str, str], list[tuple[float, Group]]] = {}
    totals: dict[tuple[bool, str, str], int] = {}
    for group in groups:
        if len(group) < 2:
            continue
        live = [m for m in group if m.name in values.scalars and not values.zero(m.name)]
        factors = [float(values.scalars[m.name].factor) for m in live]
        where = address(group[0].name)
        roles = "+".join(address(m.name).leaf for m in group)
        kind = (where.expert is not None, roles, group[0].written.name)
        totals[kind] = totals.get(kind, 0) + 1
        if len(set(factors)) > 1:
            kinds.setdefault(kind, []).append((max(factors) / min(factors), group))
    hows = _hows(checkpoint, values, plan, read) if kinds else {}
    for kind, found in kinds.items():
        ratio, worst = max(found, key=lambda entry: entry[0])
        yield _difference(kind, totals[kind], len(found), ratio, worst, _would(found, hows))


def _difference(
    kind: tuple[bool, str, str],
    total: int,
    count: int,
    ratio: float,
    worst: Group,
    would: str,
) -> Finding:
    experts, roles, format_ = kind
    modelopt = format_.startswith(("modelopt", "deepseek-v4"))
    where = worst[0].name.rpartition(".")[0]
    told = f"global scales of {roles} differ in {count} of {total} groups, worst {ratio:.7g}-fold"
    if ratio - 1 <= CLOSE:
        text = f"{told}, which nobody will notice; {would}"
        return Finding("NOTE", "group-scales-close", where, text)
    if not modelopt and not format_.startswith("compressed"):
        text = "a runtime that joins them has one scale for all"
        return Finding("WRONG", f"{'expert' if experts else 'group'}-scales", where,
                       f"{told}: {text}; {would}")  # fmt: skip
    if not experts:
        which = "largest" if modelopt else "smallest (the largest divisor)"
        text = f"vLLM, with any backend, and SGLang take the {which} for all, behind one warning"
        return Finding("WRONG", "group-scales", where, f"{told}: {text}; {would}")
    sglang = (
        "SGLang's Marlin and CUTLASS do the same, its trtllm-gen takes both and is right"
        if modelopt
        else "SGLang does the same with every backend"
    )
    text = (
        "vLLM's Marlin, CUTLASS and FlashInfer take gate's for both, behind one warning "
        f"(vllm-project/vllm#54974), its Humming is right; {sglang}"
    )
    return Finding("WRONG", "expert-scales", where, f"{told}: {text}; {would}")


def _hows(
    checkpoint: Checkpoint, values: Values, plan: Plan | None, read: Reader
) -> dict[str, str]:
    """What `convert --unify fold`, to a layout or a form, would do, by a group's first module."""
    if plan is None or values.invalid:
        return {}
    try:
        decisions = unify(checkpoint, plan, read).decisions
    except (FormatError, LossError):
        return {}
    stacks = {stack.name: stack for stack in plan.stacks}
    return {stacks[d.stack].groups[d.group][0].name: d.how for d in decisions}


def _would(found: Sequence[tuple[float, Group]], hows: Mapping[str, str]) -> str:
    done = [hows[group[0].name] for _, group in found if group[0].name in hows]
    folded, rescaled = done.count("fold"), done.count("rescale")
    if not done:
        return "transcode convert --unify fold (or rescale) makes them one"
    parts = [f"fold {folded} exactly"] if folded else []
    parts += [f"round the block scales of {many(rescaled, 'group')} again"] if rescaled else []
    return f"transcode convert --unify fold would {' and '.join(parts)}"


def _inputs(declared: Declared, values: Values) -> Iterator[Finding]:
    """Input scales where activations are FP4; Marlin and Humming use none."""
    missing: dict[tuple[bool, bool], list[str]] = {}
    wrong, unwanted = list[str](), list[str]()
    having = {name for name, s in values.scalars.items() if s.input is not None}
    for name, scalars in values.scalars.items():
        experts = address(name).expert is not None
        format_ = values.modules[name].format
        assert format_ is not None
        modelopt = format_.name.startswith("modelopt")
        weight_only = declared.weight_only(name, experts=experts)
        if scalars.input is None:
            if weight_only is False or (weight_only is None and having):
                missing.setdefault((experts, modelopt), []).append(name)
        elif weight_only:
            unwanted += [] if modelopt else [name]
        elif not 0 < float(scalars.input) < math.inf:
            wrong.append(name)
    for (experts, modelopt), names in missing.items():
        yield from _missing_input(names, experts, modelopt)
    if wrong:
        scalar = values.scalars[wrong[0]].input
        assert scalar is not None
        yield Finding(
            "WRONG", "input-scale-invalid", wrong[0],
            f"its input scale is {float(scalar):g}; {many(len(wrong), 'input scale')} not finite "
            "and > 0: inverted, they make NaN wherever activations are FP4 (Marlin and Humming "
            "use none); transcode convert --to marlin-nvfp4 does not need them, --to a form takes "
            "the largest of the layer's experts with --fill-input-scale",
        )  # fmt: skip
    if unwanted:
        yield Finding(
            "FAILS", "input-scale-unwanted", unwanted[0],
            f"{many(len(unwanted), 'input scale')}, but the config says 16 bit activations: vLLM "
            "has no place for them (vllm-project/vllm#39256: KeyError ...input_global_scale)",
            ("vllm",),
        )  # fmt: skip


def _missing_input(names: Sequence[str], experts: bool, modelopt: bool) -> Iterator[Finding]:
    kind = "expert matrix" if experts else "dense matrix"
    text = f"{many(len(names), kind)} without an input scale, although activations are FP4"
    thread = " (vllm-project/vllm#45212: empty output for some prompts)" if experts else ""
    lax = experts and modelopt
    yield Finding(
        "WRONG", "input-scale-missing", names[0],
        f"{text}: what is not loaded stays uninitialised{thread}; Marlin and Humming use none, nor "
        f"does transcode convert --to marlin-nvfp4; {REMEDY[experts]}",
        ("vllm",) if lax else ("vllm", "sglang"),
    )  # fmt: skip
    if lax:
        yield Finding(
            "WEAK", "input-scale-missing", names[0],
            f"{text}: SGLang takes 1.0, a coarse scale, and where it takes the largest of all "
            "experts, it does so for all",
            ("sglang",),
        )  # fmt: skip
