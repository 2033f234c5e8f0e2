"""The strongest proof: the runtime's own GEMM, on what lies on disk, gives the source's product.

Every kind of dense group and of MoE layer is run; a kind is the projections, sizes and padding, and
what was done to unequal global scales. Its first and last layer are taken, and EXPERTS experts of a
layer, unless everything is asked for. What is wanted (wanted.py) has three senses:

- one GEMM: the matrix that the file is meant to hold;
- columns that a runtime joins (q, k, v): the same, and what each member gives by itself;
- an MoE layer: the source's own function, `down(act(gate) * up)`, which a fold preserves; where
  scales were rounded again or flushed, the matrices that the file is meant to hold.

The control runs the same words with two factors of the layout swapped. Where that does not fail by
far, the check proves nothing, and is reported as broken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from transcode.checkpoint import reader
from transcode.convert import plan_of
from transcode.errors import TranscodeError
from transcode.files import read_json, resolved
from transcode.gemm import cutlass_fp8, deep_gemm, scaled_mm
from transcode.gemm.activation import activation
from transcode.gemm.dense import dense_run
from transcode.gemm.emulated import Emulation
from transcode.gemm.engines import Engine, engine_run
from transcode.gemm.moe import moe_run
from transcode.gemm.ops import Ops, load
from transcode.gemm.trial import Trial
from transcode.header import read_header
from transcode.job import Job
from transcode.plan import Plan
from transcode.settle import settle
from transcode.spec import Layout
from transcode.stacks import Stack
from transcode.unify import Decision, unify
from transcode.unpacked import opened
from transcode.verify import options_of

T = TypeVar("T")

UNRUN = {
    "cutlass": "FP8's wants vLLM's libraries (--vllm-lib) and compute capability 9.0, the others' "
    "10.0 or higher",
    "trtllm": "TensorRT-LLM's wants FlashInfer and compute capability 10.0",
    "deepgemm": "DeepGEMM's for sm90 wants the package deep_gemm and a Hopper GPU; sm100's is not "
    "called here",
    "megamoe": "MegaMoE wants several GPUs' expert parallelism, compiled at run time",
}
"""Why a kernel is not run, by the layout's family."""


def kernel_check(
    source: Path, target: Path, libraries: Sequence[Path], everything: bool
) -> dict[str, Any]:
    """Run vLLM's kernels on DST and return the evidence: `passed`, `failures`, `notes`, figures.

    libraries: vLLM's compiled files; none means those of the installed vLLM. Raises TranscodeError
    where no kernel or GPU can be used.
    """
    written = read_json(resolved(target) / "config.json").get("quantization_config")
    options = options_of(target, written)
    if not options.layout.name.startswith("marlin"):
        return check(source, target, _ops(options.layout, libraries, options.dtype), everything)
    if options.layout.activations != "16-bit":
        raise TranscodeError(
            f"{options.layout.name} with {options.layout.activations} activations: its kernel is "
            "not run here (it wants compute capability 8.9 or 12.x)"
        )
    ops = load(libraries, options.dtype)
    return check(source, target, ops, everything)


def _ops(layout: Layout, libraries: Sequence[Path], dtype: str) -> Ops:
    """vLLM's libraries for cutlass-fp8 where they are named, torch's own GEMM where the GPU has it;
    else none, and the layout is emulated."""
    if layout.name == "cutlass-fp8" and libraries:
        return load(libraries, dtype)
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    fits = blackwell and layout.name in scaled_mm.LAYOUTS
    fits |= _deep_gemm(layout)
    return Ops(None, None, (), torch.device("cuda" if fits else "cpu"))


def _deep_gemm(layout: Layout) -> bool:
    return layout.label == "deepgemm-fp8 1 (sm90)" and deep_gemm.installed()


def _engine(trial: Trial) -> tuple[Engine, str]:
    """What multiplies, and how the evidence names it."""
    layout, ops = trial.job.plan.options.layout, trial.ops
    if ops.libraries:
        return cutlass_fp8.CutlassFp8(trial, cutlass_fp8.found()), cutlass_fp8.OP
    if _deep_gemm(layout):
        return deep_gemm.DeepGemm(trial, deep_gemm.found()), deep_gemm.OP
    if ops.device.type == "cuda":
        return scaled_mm.ScaledMM(trial), "torch._scaled_mm"
    trial.notes.append(
        f"no kernel was run: {UNRUN.get(layout.name.partition('-')[0], UNRUN['megamoe'])}; the "
        "bytes were read where it looks for them, by closed forms, and multiplied in float64"
    )
    return Emulation(trial), "emulation"


def check(source: Path, target: Path, ops: Ops, everything: bool) -> dict[str, Any]:
    """The same with ops that are loaded already."""
    root = resolved(target)
    written = read_json(root / "config.json").get("quantization_config")
    checkpoint, recognised = opened(source)
    plan = plan_of(checkpoint, recognised, options_of(target, written))
    stored = [read_header(path).tensors for path in sorted(root.glob("*.safetensors"))]
    with reader() as read:
        unified = unify(checkpoint, plan, read)
        dense, layers = _chosen(plan, unified.decisions, everything)
        stacks = [*dense, *(stack for layer in layers for stack in layer)]
        settled = {stack.name: settle(stack, unified, plan.options, read) for stack in stacks}
        trial = Trial(
            Job(plan, unified, settled, read, ops.device),
            {output.name: output for output in plan.outputs()},
            {name: info for header in stored for name, info in header.items()},
            ops,
            *activation(checkpoint),
            [],
            [],
        )
        ran = ops.evidence()
        if plan.options.layout.name.startswith("marlin"):
            groups = [trial.entry(stack.name, partial(dense_run, trial, stack)) for stack in dense]
            moes = [
                trial.entry(layer[0].prefix, partial(moe_run, trial, layer, everything))
                for layer in layers
            ]
        else:
            engine, name = _engine(trial)
            ran |= {"ops": {name: "by members"}}
            groups, moes = (
                [
                    trial.entry(stack.name, partial(engine_run, trial, engine, stack, everything))
                    for stack in some
                ]
                for some in (dense, [stack for layer in layers for stack in layer])
            )
    controls = [entry["control"] for entry in (*groups, *moes) if entry.get("control") is not None]
    if not controls and not trial.failures:
        trial.failures.append("every matrix that was run is zero: nothing is proved")
    return {
        "passed": not trial.failures,
        "failures": trial.failures,
        "notes": trial.notes,
        "kernel": ran,
        "activation_dtype": plan.options.dtype,
        "activation": trial.activation,
        "acceptance": asdict(trial.accept),
        "stacks": {"run": len(stacks), "of": len(plan.stacks), "everything": everything},
        "dense": groups,
        "moe": moes,
        "control": min(controls, default=None),
    }


def _chosen(
    plan: Plan, decisions: Iterable[Decision], everything: bool
) -> tuple[list[Stack], list[tuple[Stack, ...]]]:
    """Dense stacks and MoE layers (w13, w2 or both): all, or the first and last of each kind."""
    layers, hows = dict[str, tuple[Stack, ...]](), dict[str, set[str]]()
    for stack in plan.stacks:
        if stack.fused:
            layers[stack.prefix] = (*layers.get(stack.prefix, ()), stack)
    for decision in decisions:
        hows.setdefault(decision.stack, set()).add(decision.how)

    def kind(stack: Stack) -> Hashable:
        sizes = tuple((m.shape, "bias" in m.leaves) for m in stack.groups[0])
        done = frozenset(hows.get(stack.name, ()))
        return stack.fused, stack.roles(), sizes, stack.padded, len(stack.groups), done

    dense, moe = [stack for stack in plan.stacks if not stack.fused], list(layers.values())
    if everything:
        return dense, moe
    return _ends(dense, kind), _ends(moe, lambda layer: tuple(map(kind, layer)))


def _ends(items: Iterable[T], kind: Callable[[T], Hashable]) -> list[T]:
    """The first and last of each kind."""
    found = dict[Hashable, list[T]]()
    for item in items:
        found.setdefault(kind(item), []).append(item)
    return [item for same in found.values() for item in (same[:1] + same[1:][-1:])]


def table(evidence: Mapping[str, Any]) -> str:
    """One line a group or layer, then what ran, notes, and what failed."""

    def text(value: Any) -> str:
        return f"{value:.1e}" if isinstance(value, float) else "-"

    rows = [("run", "relative errors", "layer", "control")]
    for entry in (*evidence["dense"], *evidence["moe"]):
        errors = " ".join(f"{role} {text(e)}" for role, e in entry.get("errors", {}).items())
        last = text(entry.get("layer")), text(entry.get("control"))
        rows.append((entry["name"], errors or "-", *last))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    kernel, accept, run = evidence["kernel"], evidence["acceptance"], evidence["stacks"]
    lines.append("")
    if set(kernel["ops"].values()) == {"by members"}:
        by, limits = " and ".join(kernel["ops"]), ""
    else:
        told, called = ", ".join(kernel["libraries"]), sorted(set(kernel["ops"].values()))
        by = f"vLLM's kernels ({told}, called as {' and '.join(called)})"
        limits = f"accepted below {accept['gemm']:g} for a GEMM and {accept['moe']:g} for a layer, "
    lines.append(
        f"{run['run']} of {run['of']} stacks run in {evidence['activation_dtype']} on "
        f"{kernel['gpu']} by {by}; {limits}control above {accept['control']:g}"
    )
    notes = [f"note: {note}" for note in evidence["notes"]]
    return "\n".join([*lines, *notes, *evidence["failures"]])
