"""The plan of a checkpoint that is written anew as another producer writes it.

Nothing changes its encoding here: tensors are renamed, reshaped, stacked or taken apart, scalars
turned over, and everything that is not quantised is carried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from transcode.checkpoint import Checkpoint
from transcode.header import TensorInfo
from transcode.kv import rewritten
from transcode.module import Module
from transcode.names import family, natural
from transcode.origins import origins
from transcode.output import Kind, Output
from transcode.outputs import single, stacked
from transcode.plan import Plan, consumed, cut, once
from transcode.producer import Configs, Form, Role
from transcode.quant import Encoding
from transcode.recognise import quantization
from transcode.sayable import (
    adapted,
    is_adapted,
    missing,
    require_encodings,
    require_experts,
    require_family,
    stray_input,
)
from transcode.stacking import containers, stacks
from transcode.stacks import Options, experts_of
from transcode.told import standard, tell
from transcode.widen import widened


def make(checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options) -> Plan:
    """Plan it from headers; raises FormatError for what the target cannot say."""
    form = options.form
    assert form is not None
    require_family(checkpoint, form)
    known = {name: adapted(module, form) for name, module in modules.items()}
    known, sizes = widened(checkpoint, known, form.pad_for_tp)
    quantised = {n: m for n, m in known.items() if m.encoding is not Encoding.UNQUANTISED}
    model_type = checkpoint.text_config.get("model_type")
    require_encodings(quantised, form, model_type, taken=bool(checkpoint.taken))
    require_experts(checkpoint, known)
    source, filled = origins(checkpoint), missing(quantised, form)
    layers = [*containers(checkpoint, quantised, form)]
    inside = {m.name for _, groups in layers for part in groups.values() for g in part for m in g}
    outputs = [
        output
        for fusion, groups in layers
        for output in stacked(fusion, groups, form, source, filled)
    ]
    for name, module in sorted(quantised.items(), key=lambda m: natural(m[0])):
        if name not in inside:
            outputs += single(module, form, source, filled)
    used = {t.stored_name for m in quantised.values() for t in consumed(m)}
    used |= {t.stored_name for m in quantised.values() for t in _unused(m, form)}
    loose = {name: t for name, t in checkpoint.tensors.items() if name not in used}
    kv_scales, taken, word = rewritten(checkpoint, form, loose)
    copies = [
        Output(name, info.dtype, info.shape, Kind.COPY, source=info)
        for name, info in loose.items()
        if name not in taken
    ]
    once(outputs, kv_scales, copies)
    names = {standard(n) if m.name in quantised else n: m for n, m in known.items()}
    assert form.producer.describe is not None
    told = tell(checkpoint, form, names, outputs, word, filled)
    configs = form.producer.describe(told) if quantised else Configs(None)
    configs = replace(configs, sizes=sizes)
    shards = cut("model", [*outputs, *kv_scales, *copies], options.shard_size)
    notes = (*_notes(checkpoint, quantised, form, len(taken)), *_padded(form, sizes))
    return Plan(options, known, tuple(stacks(checkpoint, quantised, layers)),
                tuple(shards), configs, told.groups, notes)  # fmt: skip


def _unused(module: Module, form: Form) -> Iterator[TensorInfo]:
    """What a module has that is not written: scalars kept for a way back, where there is none."""
    if module.encoding is Encoding.INT4:
        yield from module.leaves.values()  # carried as they are
    stray = stray_input(module)
    if stray and (is_adapted(module) or not form.quantises_inputs(module.encoding)):
        yield stray


def _padded(form: Form, sizes: Mapping[str, int]) -> Iterator[str]:
    """What --pad-for-tp did."""
    for key, wide in sizes.items():
        yield f"experts are padded by zeros: {key} is {wide} now, for {form.pad_for_tp} ranks"
    if form.pad_for_tp > 1 and not sizes:
        yield f"experts are as wide as {form.pad_for_tp} ranks want: nothing is padded"


def _notes(
    checkpoint: Checkpoint, quantised: Mapping[str, Module], form: Form, kv_scales: int
) -> Iterator[str]:
    model_type = checkpoint.text_config.get("model_type")
    decoded = not (form.producer.formats or form.fused)
    if decoded and family(model_type).fused and experts_of(quantised):
        yield f"{model_type!r} keeps its BF16 experts stacked; --fused writes them so"
    config = quantization(checkpoint)[0]
    if "W4A16" in str(config.get("quant_algo")).upper() and any(
        Role.INPUT in m.parts for m in quantised.values()
    ):
        yield "quant_algo says 16 bit activations, but input scales are there: they are believed"
    compressed = {m.format.producer for m in quantised.values() if m.format}
    if model_type == "gpt_oss" and "compressed-tensors" in compressed:
        yield (
            "gpt-oss by compressed-tensors: before vllm-project/llm-compressor#3100 gate_proj "
            "and up_proj hold halves of alternating rows, after it gate and up: taken for those"
        )
    if form.drop_kv and kv_scales:
        yield f"{kv_scales} KV scales are left out (--drop-kv-scales)"
    inputs = [
        m
        for m in quantised.values()
        if Role.INPUT in m.parts and not form.quantises_inputs(m.encoding)
    ]
    if inputs:
        yield f"{len(inputs)} input scales are left out: {form.target.name} has 16 bit activations"
    halved = [m for m in quantised.values() if is_adapted(m)]
    if halved:
        yield (
            f"{len(halved)} modules had one scale for 32 columns: each stands twice; their FP8 "
            "input scales are left out, activations are 16 bit"
        )
