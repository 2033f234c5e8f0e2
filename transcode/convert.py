"""The straight line: open, plan, unify, settle, pack and prove, write, report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from transcode import __version__, rewrite
from transcode.checkpoint import Checkpoint, Reader, reader
from transcode.chosen import recoded
from transcode.config import activation_dtype, form_configs, target_config
from transcode.decide import decide as decide_form
from transcode.destination import (
    EXPERT_INDEX,
    begin,
    copy_companions,
    copy_range,
    finish,
    guard,
    identity,
    index_of,
    room_for,
    write_at,
    write_json,
    write_shard,
)
from transcode.errors import FormatError, LayoutError, LossError, Mismatch
from transcode.files import INDEX, REPORT
from transcode.given_inputs import input_factors
from transcode.job import Job
from transcode.module import Recognised
from transcode.output import OutputShard
from transcode.pack import bias, pieces, raw_bytes
from transcode.packed_config import quantization_config
from transcode.packed_outputs import takes_inputs
from transcode.packed_stack import Unpack
from transcode.plan import Plan, make
from transcode.producer import Form, Role
from transcode.readback import read_back
from transcode.recipe import AS_THEY_ARE, EncodingRecipe
from transcode.recoding import judge
from transcode.recognise import recognise, require_any, require_known
from transcode.report import report
from transcode.rewrite_report import rewrite_report
from transcode.rewritten import direct
from transcode.settle import settle
from transcode.settled import Settled
from transcode.spec import Layout
from transcode.stacks import Options
from transcode.unify import Unified, unify
from transcode.unpacked import opened


@dataclass(frozen=True)
class Ask:
    """What the user asked for: a layout or a form; a dtype of None is the config's own.

    scalars: whether what the runtime works out of factors is written too.
    unify: "" is `fold` for a layout, `keep` for a form, which has room for all scalars.
    """

    layout: Layout | None
    dtype: str | None = None
    unify: str = ""
    exact: bool = False
    tp: int = 1
    shard_size: int = 5_000_000_000
    form: Form | None = None
    recipe: EncodingRecipe = AS_THEY_ARE
    scalars: bool = False

    def options(self, checkpoint: Checkpoint) -> Options:
        """The options for this checkpoint."""
        dtype = self.dtype or activation_dtype(checkpoint)
        if self.layout and dtype not in self.layout.dtypes:
            if self.dtype:
                wanted = " or ".join(self.layout.dtypes)
                raise LayoutError(f"--dtype {dtype}: {self.layout.name} has kernels for {wanted}")
            dtype = self.layout.dtypes[0]
        both = self.layout and self.layout.factor and self.layout.factor.each
        kept = (self.form and self.unify in ("", "none")) or (both and not self.unify)
        unify = "keep" if kept else self.unify or "fold"
        return Options(
            self.layout, dtype, unify, self.exact, self.tp, self.shard_size, self.form,
            self.recipe, self.scalars,
        )  # fmt: skip


def prepare(source: Path, ask: Ask) -> tuple[Checkpoint, Plan]:
    """Open, recognise, plan: all that headers and configs can tell; raises what cannot be done."""
    checkpoint, recognised = opened(source)
    return checkpoint, plan_of(checkpoint, recognised, ask.options(checkpoint))


def plan_for(checkpoint: Checkpoint, options: Options) -> Plan:
    """From an opened checkpoint to the plan."""
    return plan_of(checkpoint, recognise(checkpoint), options)


def plan_of(checkpoint: Checkpoint, recognised: Recognised, options: Options) -> Plan:
    """From a checkpoint's modules to the plan."""
    checkpoint.require_sound()
    require_known(checkpoint, recognised)
    modules = recoded(checkpoint, recognised.modules, options)
    if options.form:
        return rewrite.make(checkpoint, modules, options)
    require_any(checkpoint, modules, options.layout)
    plan = make(checkpoint, modules, options)
    if not plan.stacks:
        raise FormatError(f"{options.layout.name} packs experts only, and there are none here")
    _require_no_words_left(plan)
    return plan


def _require_no_words_left(plan: Plan) -> None:
    """Raise FormatError where one layout's words would be carried among another's."""
    packed = {m.name for stack in plan.stacks for group in stack.groups for m in group}
    for module in plan.modules.values():
        part = module.parts.get(Role.CODES)
        if part and isinstance(part.cut, Unpack) and module.name not in packed:
            raise FormatError(
                f"{module.name} is packed as {part.cut.layout.name}, {plan.options.layout.name} "
                "has no place for it: rewrite the folder first, say --to canonical"
            )


def decide(checkpoint: Checkpoint, plan: Plan, read: Reader, device: torch.device) -> Job:
    """The first pass: all scalars, then all block scales; every refusal comes before any output."""
    if plan.options.form:
        return decide_form(checkpoint, plan, read, device)
    losses = judge(plan.modules, plan.options, read)
    unified = unify(checkpoint, plan, read)
    settled = dict[str, Settled]()
    for stack in tqdm(plan.stacks, desc="scales", unit="stack", disable=None, leave=False):
        settled[stack.name] = settle(stack, unified, plan.options, read)
    rounded = [*inexact_biases(plan, unified, read)]
    if plan.options.exact and rounded:
        raise LossError(f"{rounded[0]}.bias is not exact in {plan.options.dtype}")
    job = Job(plan, unified, settled, read, device, tuple(rounded), recoded=losses)
    for stack in plan.stacks:
        if takes_inputs(stack, plan.options.layout):
            input_factors(job, stack)
    return job


def inexact_biases(plan: Plan, unified: Unified, read: Reader) -> Iterator[str]:
    """The packed modules whose bias is rounded to the activation dtype."""
    for module in (m for stack in plan.stacks for group in stack.groups for m in group):
        if "bias" in module.leaves and not bias(module, plan.options.dtype, unified, read)[1]:
            yield module.name


def convert(
    source: Path,
    target: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    device: torch.device,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write DST and return its Report; on an error what is finished stays in `DST.partial`."""
    guard(source, target, overwrite=overwrite)
    with reader(device) as read:
        job = decide(checkpoint, plan, read, device)
        place = begin(target, identity(checkpoint, plan, __version__))
        todo = [shard for shard in plan.shards if not (place / shard.name).is_file()]
        room_for(place, sum(shard.nbytes for shard in todo))
        if kept := len(plan.shards) - len(todo):
            tqdm.write(f"going on: {kept} of {len(plan.shards)} shards are there", sys.stderr)
        with tqdm(total=plan.nbytes, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            bar.update(plan.nbytes - sum(shard.nbytes for shard in todo))
            for shard in todo:
                _write(place, shard, job, bar)
        done = _accompany(checkpoint, place, job)
        if plan.options.form:
            read_back(place, job)
        checkpoint.require_unchanged()
    finish(place, target, names_of(done, plan))
    return done


def _write(place: Path, shard: OutputShard, job: Job, bar: Any) -> None:
    def fill(fd: int, index: int, start: int) -> None:
        output = shard.outputs[index]
        source = direct(output, job)
        if source is not None:
            copy_range(source, job.read.file(source), fd, start)
            bar.update(output.nbytes)
            return
        end = start + output.nbytes
        for piece in pieces(output, job):
            data = raw_bytes(piece)
            if start + data.numel() > end:
                raise Mismatch(f"{output.name}: more bytes than the plan has for it")
            write_at(fd, memoryview(data.numpy()), start)  # type: ignore[arg-type]
            start += data.numel()
            bar.update(data.numel())
        if start < end:
            raise Mismatch(f"{output.name}: {end - start} bytes less than the plan has for it")

    packed = any(output.stack for output in shard.outputs)
    write_shard(place, shard, metadata_of(packed, job.plan), fill)


def metadata_of(packed: bool, plan: Plan) -> dict[str, str]:
    """A shard's header metadata: what layout its packed tensors are in, if it has any."""
    layout = plan.options.kernel
    mine = {"transcode.layout": layout.label} if layout and packed else {}
    return {"format": "pt", **mine}


def _accompany(checkpoint: Checkpoint, place: Path, job: Job) -> dict[str, Any]:
    """Everything but weights; the Report comes last."""
    companions = copy_companions(checkpoint, place)
    for name, entries in indexes(job.plan).items():
        write_json(place / name, entries)
    if configs := job.plan.configs:
        for name, entries in form_configs(checkpoint, configs).items():
            write_json(place / name, entries)
        done = rewrite_report(checkpoint, job, companions)
    else:
        quantization = quantization_config(checkpoint, job)
        write_json(place / "config.json", target_config(checkpoint, quantization))
        done = report(checkpoint, job, quantization, companions)
    write_json(place / REPORT, done)
    return done


def indexes(plan: Plan) -> dict[str, Mapping[str, Any]]:
    """The stock index, which knows no packed experts, and the index of those."""
    if plan.configs:
        return {INDEX: index_of(plan.shards)}
    plain = [s for s in plan.shards if not is_experts(s)]
    return {
        INDEX: index_of(plain),
        EXPERT_INDEX: index_of([s for s in plan.shards if is_experts(s)]),
    }


def names_of(done: Mapping[str, Any], plan: Plan) -> set[str]:
    """Every file of a finished destination."""
    fixed = ("config.json", INDEX, EXPERT_INDEX, REPORT, "hf_quant_config.json")
    return {*fixed, *(shard.name for shard in plan.shards), *done["companions"]}


def is_experts(shard: OutputShard) -> bool:
    """Whether a shard holds fused experts, which no stock loader may touch."""
    return any(o.stack is not None and bool(o.stack.fused) for o in shard.outputs)


def device_for(name: str) -> torch.device:
    """`auto` is the GPU where there is one; LayoutError for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise LayoutError("--device cuda: no GPU that torch can use")
    return torch.device(name)
