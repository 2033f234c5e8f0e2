"""The form that a checkpoint has, as a target to write it anew."""

from __future__ import annotations

from collections.abc import Mapping

from transcode.catalog import producer, producers
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.module import Module
from transcode.producer import Form, Producer, Target
from transcode.quant import Encoding
from transcode.recognise import quantization


def own_form(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Form:
    """FormatError where there is none: two producers' forms, or one that is only read."""
    quantised = [m for m in modules.values() if m.format is not None]
    if not quantised:
        raise FormatError("nothing in the checkpoint is quantised: there is nothing to mend")
    kinds = {m.encoding for m in quantised}
    names = sorted({m.written.producer for m in quantised})
    model_type = str(checkpoint.text_config.get("model_type"))
    own = producer(names[0]) if len(names) == 1 else _of_family(kinds, model_type)
    if own is None:
        raise FormatError(
            f"written in the forms of {' and '.join(names)}: transcode convert --to one of them"
        )
    if read_only := next((m for m in quantised if m.written.read_only), None):
        raise FormatError(
            f"{read_only.name} is {read_only.written.name}, which is only read here: transcode "
            "convert --to another form"
        )
    config = quantization(checkpoint)[0]
    if config.get("quant_method") == "fp8" and not own.claims(config):
        raise FormatError(
            f"{quantised[0].name} is {quantised[0].encoding} under quant_method fp8, which is only "
            "read here: transcode convert --to another form"
        )
    stacked = any(part.part_of for m in quantised for part in m.parts.values())
    fused = stacked and bool(own.fusions) and not own.always_fused
    return Form(own, target_of(own, kinds), fused, fill_input=True, codes_stay=True)


def _of_family(kinds: set[Encoding], model_type: str) -> Producer | None:
    """The producer that is for this family alone and writes all of it (DeepSeek-V4)."""
    fitting = (p for p in producers() if model_type in p.model_types)
    return next((p for p in fitting if all(p.format(kind) for kind in kinds)), None)


def target_of(own: Producer, kinds: set[Encoding]) -> Target:
    """The producer's target for any encoding, else the closest one for these."""
    for target in own.targets:
        if not target.encodings:
            return target
    fitting = [t for t in own.targets if kinds <= {*t.encodings}]
    partly = [t for t in own.targets if kinds & {*t.encodings} and not t.whole]
    choices = fitting or partly
    if not choices:
        told = ", ".join(sorted(kinds))
        raise FormatError(f"{own.name} has no form of its own for {told}: transcode convert --to")
    return min(choices, key=lambda t: len(t.encodings))
