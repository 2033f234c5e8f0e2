"""The Report: what was proved, stack by stack; a JSON object beside the weights, and a table.

It holds no time, host, user or absolute path: the same source and options give the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import log2
from pathlib import Path
from typing import Any

import torch

from transcode import __version__
from transcode.checkpoint import Checkpoint
from transcode.destination import write_json
from transcode.files import REPORT, read_json
from transcode.job import Job
from transcode.names import address
from transcode.packed_outputs import has_input_scale, takes_inputs
from transcode.plan import Plan
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recipe import idle
from transcode.recoding import summary, told
from transcode.recognise import disagreements
from transcode.settled import Settled, norm_share
from transcode.stacks import Stack
from transcode.unify import Decision

COMPLETE = "complete"
DONE = {"fold": "folded", "rescale": "rescaled", "keep": "kept apart"}


def report(
    checkpoint: Checkpoint,
    job: Job,
    quantization: Mapping[str, Any],
    companions: Sequence[str],
) -> dict[str, Any]:
    """The Report of a conversion that was proved from end to end."""
    plan = job.plan
    outputs = list(plan.outputs())
    carried = [o for o in outputs if o.stack is None and o.name not in job.unified.scaled]
    decisions: dict[str, list[Decision]] = {}
    for decision in job.unified.decisions:
        decisions.setdefault(decision.stack, []).append(decision)
    return {
        "status": COMPLETE,
        "versions": {"transcode": __version__, "torch": torch.__version__},
        "layout": plan.options.layout.label,
        "activation_dtype": plan.options.dtype,
        "options": {**quantization["options"], "shard_size": plan.options.shard_size},
        "tp": quantization["tp"],
        "source": checkpoint.fingerprint(),
        "stacks": [_stack(stack, job, decisions.get(stack.name, [])) for stack in plan.stacks],
        "recoded": summary(job.recoded, plan.modules),
        "scaled": {n: f for n, f in job.unified.scaled.items() if n in checkpoint.tensors},
        "rounded_biases": list(job.rounded_biases),
        "carried": {
            "tensors": len(carried),
            "bytes": sum(o.nbytes for o in carried),
            "by_layer": dict(Counter(_layer(o.name) for o in carried)),
            "encodings": dict(Counter(str(m.encoding) for m in plan.modules.values())),
        },
        "companions": list(companions),
        "left_out": [asdict(entry) for entry in checkpoint.left_out],
        "notes": [*notes(checkpoint, job, quantization["tp"])],
    }


def record(target: Path, key: str, evidence: Any) -> dict[str, Any]:
    """Put what was found out afterwards into the Report of a finished DST; the new Report."""
    done = read_json(target / REPORT) | {key: evidence}
    write_json(target / REPORT, done)
    return done


def notes_of(target: Path) -> list[str]:
    """The notes of a finished DST's Report."""
    found = read_json(target / REPORT).get("notes")
    return [str(note) for note in found] if isinstance(found, list) else []


def notes(checkpoint: Checkpoint, job: Job, served: Sequence[int]) -> Iterator[str]:
    """What a user should know: oddities of the source, losses, degrees that are not served."""
    yield from checkpoint.notes
    yield from disagreements(checkpoint, job.plan.modules)
    yield from job.unified.warnings
    yield from told(job.recoded, job.plan.modules)
    yield from unused(checkpoint, job.plan)
    if any(d.how == "fold" for d in job.unified.decisions):
        yield (
            "folded: the function is preserved, the matrices up and down are not; "
            "LoRA adapters for them need --unify rescale"
        )
    for name, settled in job.settled.items():
        if settled.flushes:
            count, share = sum(f.count for f in settled.flushes), norm_share(settled.flushes)
            yield f"{name}: {count} block scales become zero, {share:.1e} of the norm"
        if settled.rounded and job.plan.options.layout.factor:
            zero = f", {settled.fallen} of them to zero" if settled.fallen else ""
            by = f"by {settled.worst:.1%} at most{zero}"
            yield f"{name}: {settled.rounded} block scales rounded, {by}"
    yield from _rounded_scales(job)
    yield from _of_layout(job)
    if job.plan.options.tp not in served:
        yield f"--tp {job.plan.options.tp} is not served: the packed file fits tp {served}"
    for stack in job.plan.stacks:
        if not stack.padded.whole and len(stack.groups[0]) > 1:
            yield f"{stack.name}: padded as a whole, its members cannot be split"


def unused(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Rules and input scales that were given for nothing: most likely misspelt."""
    layers = checkpoint.text_config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else 0
    linears = {
        name: len(m.shape) == 2 and m.encoding is not Encoding.INT4
        for name, m in plan.modules.items()
    }
    yield from idle(plan.options.recipe, linears, _given_inputs(plan), count)


def _given_inputs(plan: Plan) -> set[str]:
    """The modules whose input scale may be given: a form's in a new encoding, a layout's all."""
    if plan.options.form:
        return {n for n, m in plan.modules.items() if m.was and Role.INPUT in m.parts}
    layout = plan.options.layout
    return {m.name for s in plan.stacks if takes_inputs(s, layout) for m in s.modules}


def _rounded_scales(job: Job) -> Iterator[str]:
    """FP8's scales, which the kernel has in the activations' dtype."""
    every = list(job.settled.values())
    options, count = job.plan.options, sum(s.rounded for s in every)
    if count and not options.layout.factor:
        yield (
            f"{count} scales are rounded to {options.dtype}, as the kernel reads them, by "
            f"{max(s.worst for s in every):.2%} at most"
            + f", {sum(s.fallen for s in every)} of them to zero" * any(s.fallen for s in every)
            + "; the source's own are kept beside them"
        )


def _of_layout(job: Job) -> Iterator[str]:
    """What a variant, or the way back, does not keep."""
    options, short = job.plan.options, max((s.short for s in job.settled.values()), default=0.0)
    modules = [m for stack in job.plan.stacks for group in stack.groups for m in group]
    if short:
        yield (
            f"global scales are rounded to {options.dtype}, as {options.layout.runtime} has them, "
            f"by {short:.2%} at most; the source's own are kept beside them"
        )
    biased = [m for m in modules if "bias" in m.leaves and address(m.name).expert is None]
    if biased and options.layout.runtime == "sglang":
        yield (
            f"{len(biased)} linears have a bias, {biased[0].name} among them: SGLang 0.5.23 "
            "permutes it as here, but adds it after the kernel as if it had not"
        )
    yield from _of_inputs(job)
    if said := next(filter(None, (_advice(stack, job) for stack in job.plan.stacks)), ""):
        yield said
    if any(Role.SOURCE_GLOBAL in m.parts or Role.SOURCE_INPUT in m.parts for m in modules):
        yield "source_global_scale and source_input_scale of the canonical form are left out"
    mixed = [stack.name for stack in job.plan.stacks if len(_dtypes(stack)) > 1]
    if mixed:
        yield (
            f"{mixed[0]}: its experts' scales or biases have several dtypes, and come back in one "
            f"({len(mixed)} stacks of this kind)"
        )


def _of_inputs(job: Job) -> Iterator[str]:
    """Where the activations' scales of a kernel for 4-bit activations come from."""
    options = job.plan.options
    taking = [stack for stack in job.plan.stacks if takes_inputs(stack, options.layout)]
    bare = [m for stack in taking for m in stack.modules if not has_input_scale(m)]
    if bare:
        given = options.recipe.inputs
        yield (
            f"{len(bare)} modules have no input scale, {bare[0].name} among them: "
            + ("the given ones are" if given.named else f"{given.every:g} is")
            + " written, which decides how activations are rounded"
        )


def _advice(stack: Stack, job: Job) -> str:
    """What a layout says of an MoE layer's sizes."""
    rows, k = stack.padded.rows[0], stack.padded.k
    return job.plan.options.layout.advice(k, rows) if stack.fused == "w13" else ""


def _dtypes(stack: Stack) -> set[tuple[str, ...]]:
    """The dtypes of a stack's modules that the packed bytes do not tell, by member."""
    return {
        tuple(m.parts[r].dtype for m in group for r in (Role.SCALES, Role.BIAS) if r in m.parts)
        for group in stack.groups
    }


def _stack(stack: Stack, job: Job, decisions: Sequence[Decision]) -> dict[str, Any]:
    settled = job.settled[stack.name]
    rows = [m.shape[0] for m in stack.groups[0]]
    modules = [m for group in stack.groups for m in group]
    names = [m.name for m in modules]
    rounded = bool(settled.rounded or settled.short)
    proved = "value-equal" + " once rounded" * rounded
    proved += " but for those flushed" * bool(settled.flushes)
    return {
        "name": stack.name,
        "members": list(stack.roles()),
        "experts": len(stack.groups) if stack.fused else None,
        "proved": {"codes": "bit-equal after unpacking", "scales": proved},
        "size": [rows, stack.groups[0][0].shape[1]],
        "padded": [list(stack.padded.rows), stack.padded.k],
        "unified": [asdict(d) for d in decisions],
        "folded_into": {m: job.unified.folds[m] for m in names if m in job.unified.folds},
        "missing_input_scales": [m.name for m in modules if not has_input_scale(m)],
        "global_scales": job.plan.options.layout.factor is not None,
        "lift": settled.lift_entry(),
        "lifts": settled.lifts,
        "rounded_scales": settled.rounded,
        "rounded_by_at_most": settled.worst,
        "fallen_to_zero": settled.fallen,
        "global_scales_rounded_by_at_most": settled.short,
        "nan_over_zeros": settled.nan,
        "zero_matrices": list(settled.zero),
        "flushed": _flushed(settled),
    }


def _layer(name: str) -> str:
    """A tensor's layer, `model.layers.3`, or "" outside of layers."""
    found = re.match(r"(.*?\.)?(layers|blocks|h|mtp)\.\d+", name)
    return found[0] if found else ""


def _flushed(settled: Settled) -> dict[str, Any]:
    """How many scales became zero, their share of the norm, and the bytes for the way back."""
    return {
        "count": sum(f.count for f in settled.flushes),
        "norm_share": norm_share(settled.flushes),
        "scales": [
            {"module": f.module, "count": f.count, "at": f.at, "bytes": f.bytes}
            for f in settled.flushes
        ],
    }


def table(done: Mapping[str, Any]) -> str:
    """The Report for a terminal: one line a stack, then totals and notes."""
    rows: list[tuple[str, ...]] = [
        ("stack", "size", "padded", "global scales", "lift", "flushed", "proved")
    ]
    rows += [_row(stack) for stack in done["stacks"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    carried = done["carried"]
    lines.append("")
    lines.append(f"carried byte for byte: {carried['tensors']} tensors, {carried['bytes']} bytes")
    if done["scaled"]:
        lines.append(f"scaled by a fold: {len(done['scaled'])} tensors")
    lines += [f"left out: {e['name']} ({e['reason']})" for e in done["left_out"]]
    lines.append(f"{done['layout']}, {done['activation_dtype']}, tp {done['tp']}: {done['status']}")
    return "\n".join(lines)


def _row(stack: Mapping[str, Any]) -> tuple[str, ...]:
    def size(rows: list[int], k: int) -> str:
        return "+".join(str(n) for n in rows) + f" x {k}"

    n, k = stack["size"]
    pn, pk = stack["padded"]
    experts = f"{stack['experts']} x " if stack["experts"] else ""
    flushed = stack["flushed"]
    lift = stack["lift"]
    return (
        stack["name"],
        experts + size(n, k),
        size(pn, pk) if (n, k) != (pn, pk) else "-",
        _how(stack),
        "per expert" if isinstance(lift, list) else _power(lift),
        f"{flushed['count']} ({flushed['norm_share']:.1e})" if flushed["count"] else "0",
        "codes, scales" + " once rounded" * ("once rounded" in stack["proved"]["scales"]),
    )


def _power(lift: float) -> str:
    """A power of two, as such if it is large."""
    return f"{lift:g}" if lift < 1000 else f"2^{int(log2(lift))}"


def _how(stack: Mapping[str, Any]) -> str:
    if not stack["global_scales"]:
        return "-"
    counts = Counter(decision["how"] for decision in stack["unified"])
    done = [f"{count} {DONE[how]}" for how, count in sorted(counts.items())]
    return ", ".join(done + ["takes a fold"] * bool(stack["folded_into"])) or "equal"
