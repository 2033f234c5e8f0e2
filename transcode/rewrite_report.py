"""The Report of a rewriting: what is the same, what is not bit-exact and by how much.

Like a packing's it holds no time, host, user or absolute path. `origin` is for the way back
(origins.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from transcode import __version__
from transcode.checkpoint import Checkpoint
from transcode.job import Job
from transcode.loads import loaders
from transcode.origins import hexed, key
from transcode.output import Output
from transcode.outputs import KEPT
from transcode.producer import Loads, Role
from transcode.recoding import summary, told
from transcode.recognise import disagreements
from transcode.report import COMPLETE, unused
from transcode.rewritten import loss, turns, value
from transcode.settle_e4m3 import change, prepare
from transcode.told import standard
from transcode.unify_fp8 import requantised

DONE = {"keep": "kept", "fold": "folded", "rescale": "rescaled"}


def rewrite_report(checkpoint: Checkpoint, job: Job, companions: Sequence[str]) -> dict[str, Any]:
    """The Report of a rewriting whose output was read back."""
    plan, unified = job.plan, job.unified
    form = plan.options.form
    assert form is not None
    outputs = list(plan.outputs())
    carried = [o for o in outputs if o.recipe is None]
    reciprocals, turned = _reciprocals(outputs, job)
    zero = [name for name, s in unified.scalars.items() if s.zero]
    model_type = checkpoint.text_config.get("model_type")
    loads_in = loaders(form, plan.modules, plan.groups, model_type)
    rescaled = _rescaled(job)
    return {
        "status": COMPLETE,
        "versions": {"transcode": __version__, "torch": torch.__version__},
        "format": form.target.name,
        "options": {
            "unify": plan.options.unify,
            "exact": plan.options.exact,
            "encodings": plan.options.recipe.asked(),
            **form.asked(),
            "shard_size": plan.options.shard_size,
        },
        "source": checkpoint.fingerprint(),
        **({"taken": [t.entry() for t in checkpoint.taken]} if checkpoint.taken else {}),
        "loads_in": [asdict(loads) for loads in loads_in],
        "modules": dict(Counter(str(m.encoding) for m in plan.modules.values())),
        "proved": _proved(job),
        "recoded": summary(job.recoded, plan.modules),
        "unified": [asdict(d) for d in unified.decisions],
        "scaled": dict(unified.scaled),
        "rescaled": rescaled,
        "folded_into": dict(unified.folds),
        "zero_matrices": zero,
        "cleaned_scales": sorted(job.cleaned),
        "filled_input_scales": {name: float(value) for name, value in job.filled.items()},
        "scalars_turned_over": {"count": turned, "not_bit_exact": len(reciprocals)},
        "carried": {"tensors": len(carried), "bytes": sum(o.nbytes for o in carried)},
        "companions": list(companions),
        "left_out": [asdict(entry) for entry in checkpoint.left_out],
        "origin": {"dtypes": _dtypes(outputs), "reciprocals": reciprocals},
        "notes": [
            *_before(checkpoint, job, loads_in),
            *_changed(job, rescaled),
            *_oddities(job, len(reciprocals), turned, zero),
        ],
    }


def _rescaled(job: Job) -> dict[str, Any]:
    """How many block scales were rounded again, by how much, and how many became zero; and how many
    FP8 codes did."""
    scales = fallen = 0
    worst = 0.0
    for name in job.unified.multiplier:
        module = job.plan.modules[name]
        source, now = job.read.tensor(module.scales).float(), prepare(module, job.unified, job.read)
        count, by = change(module, now, job.unified, job.read)
        zero = int(((now.float() == 0) & (source.nan_to_num(0.0) != 0)).sum())
        scales, fallen, worst = scales + count, fallen + zero, max(worst, by)
    codes = sum(_codes_to_zero(job, name) for name in job.unified.requantised)
    return {"scales": scales, "by_at_most": worst, "to_zero": fallen, "codes_to_zero": codes}


def _codes_to_zero(job: Job, name: str) -> int:
    """How many FP8 codes became zero when they were rounded again."""
    codes = job.read.tensor(job.plan.modules[name].codes)
    now = requantised(codes, job.unified.requantised[name])
    return int(((now.float() == 0) & (codes.float() != 0)).sum())


def _proved(job: Job) -> dict[str, str]:
    form = job.plan.options.form
    assert form is not None
    if not form.producer.formats:
        worst = max((loss(o, job) for o in job.plan.outputs() if o.recipe), default=0.0)
        how = f"rounded to BF16 by at most {worst:.2e} relative" if worst else "exact in BF16"
        return {"weights": f"decoded in float32, {how}"}
    rounded = " but for those rounded again" * bool(job.unified.multiplier)
    cleaned = " but for those that stand over zeros" * bool(job.cleaned)
    encoded = " to those of the new encoding" * bool(job.recoded)
    again = " but for those rounded again" * bool(job.unified.requantised)
    return {
        "codes": f"bit-equal{encoded}{again}",
        "scales": f"value-equal{encoded}{rounded}{cleaned}",
    }


def _reciprocals(outputs: Sequence[Output], job: Job) -> tuple[dict[str, str], int]:
    """Source scalars whose reciprocal does not come back, by the name that they have in DST, and
    how many are turned over. What was unified or filled in is another number anyhow."""
    found, count = dict[str, str](), 0
    beside = {o.recipe.role for o in outputs if o.recipe}
    for recipe in (o.recipe for o in outputs if o.recipe):
        if recipe.leaf is None or recipe.role not in KEPT:
            continue
        for module in recipe.modules:
            if not turns(module, recipe.role, recipe.leaf, job):
                continue
            count += 1
            stored = job.read.tensor(module.parts[recipe.role]).float()
            written = value(recipe, module, "F32", job)
            if 1.0 / written != stored and KEPT[recipe.role] not in beside:
                found[f"{standard(module.name)}.{recipe.leaf.name}"] = hexed(float(stored))
    return found, count


def _dtypes(outputs: Sequence[Output]) -> dict[str, str]:
    """Source dtypes of scales that were stored in another, where all of a kind had the same."""
    found: dict[str, set[tuple[str, str]]] = {}
    for output in outputs:
        recipe = output.recipe
        if recipe and recipe.leaf and recipe.role in (Role.SCALES, Role.INPUT):
            for module in recipe.modules:
                if part := module.parts.get(recipe.role):
                    found.setdefault(key(module, recipe.role), set()).add(
                        (part.dtype, output.dtype)
                    )
    pairs = {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}
    return {name: source for name, (source, stored) in pairs.items() if source != stored}


def _before(checkpoint: Checkpoint, job: Job, loads_in: Sequence[Loads]) -> Iterator[str]:
    """What the source, the plan and the runtimes are to be known for."""
    yield from checkpoint.notes
    yield from disagreements(checkpoint, job.plan.modules)
    yield from job.plan.notes
    yield from unused(checkpoint, job.plan)
    yield from told(job.recoded, job.plan.modules)
    form = job.plan.options.form
    if form and not loads_in:
        yield f"no runtime that was read loads this from {form.target.name} (docs/formats.md)"


def _changed(job: Job, rescaled: Mapping[str, Any]) -> Iterator[str]:
    """Groups whose global scales differ, and what was done to them."""
    kept = [d for d in job.unified.decisions if d.how == "keep"]
    if kept:
        worst = max(kept, key=lambda d: d.ratio)
        yield (
            f"global scales differ in {len(kept)} groups that runtimes join, worst "
            f"{worst.ratio:.4g}-fold in {worst.stack}: vLLM and SGLang take one of them for all, "
            "behind one warning; --unify fold makes them one"
        )
    if any(d.how == "fold" for d in job.unified.decisions):
        yield (
            "folded: the function is preserved, the matrices up and down are not; "
            "LoRA adapters for them need --unify rescale"
        )
    instead = [d for d in job.unified.decisions if d.how == "rescale"]
    if instead and job.plan.options.unify == "fold":
        yield f"{len(instead)} groups are rescaled, not folded: {instead[0].why}"
    if job.unified.requantised:
        yield (
            f"codes of {len(job.unified.requantised)} FP8 matrices rounded again, to one scale: "
            f"{rescaled['codes_to_zero']} to zero"
        )
    if job.unified.multiplier:
        yield (
            f"block scales of {len(job.unified.multiplier)} matrices rounded again: "
            f"{rescaled['scales']}, by {rescaled['by_at_most']:.1%} at most, "
            f"{rescaled['to_zero']} to zero"
        )


def _oddities(job: Job, inexact: int, turned: int, zero: Sequence[str]) -> Iterator[str]:
    """What is not exact, not finite, zero, or made up."""
    if bad := [name for name, loss in job.losses.items() if loss == math.inf]:
        yield f"{len(bad)} matrices hold NaN or infinity, as the source says, {bad[0]} among them"
    if inexact:
        yield (
            f"{inexact} of {turned} scalars are rounded reciprocals (1 ulp, 6e-8): they need "
            "transcode_report.json beside the weights to come back bit for bit"
        )
    if zero:
        yield f"{len(zero)} matrices are zero by their global scale, {zero[0]} among them"
    if job.cleaned:
        yield f"{len(job.cleaned)} matrices had NaN or -0 scales over zeros; they are 0 now"
    if job.filled:
        yield f"{len(job.filled)} input scales filled in with the largest of their layer"


def form_table(done: Mapping[str, Any]) -> str:
    """The Report for a terminal."""
    kinds = sorted(done["modules"].items())
    lines = ["modules: " + ", ".join(f"{count} {encoding}" for encoding, count in kinds)]
    lines += [f"{what}: {how}" for what, how in done["proved"].items()]
    how = Counter(d["how"] for d in done["unified"])
    if how:
        told = ", ".join(f"{count} {DONE[name]}" for name, count in sorted(how.items()))
        lines.append(f"groups with different global scales: {told}")
    turned = done["scalars_turned_over"]
    if turned["count"]:
        lines.append(f"scalars turned over: {turned['count']}")
    carried = done["carried"]
    lines.append(f"carried byte for byte: {carried['tensors']} tensors, {carried['bytes']} bytes")
    lines += [f"left out: {e['name']} ({e['reason']})" for e in done["left_out"]]
    loads = [
        f"{e['runtime']} {e['version']} ({', '.join([*e['kinds'], *filter(None, [e['note']])])})"
        for e in done["loads_in"]
    ]
    wrong = ", but is SERVED WRONG where global scales differ (--unify fold)" * bool(how["keep"])
    where = "; ".join(loads) or "no runtime"
    lines.append(f"{done['format']}: {done['status']}; loads in {where}{wrong}")
    return "\n".join(lines)
