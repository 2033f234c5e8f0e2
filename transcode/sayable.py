"""What a target can say of a checkpoint's modules, and what it has no word for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from transcode.catalog import targets
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.header import Cut, TensorInfo
from transcode.module import Module
from transcode.names import GATE_UP, QKV, W1_W3, address, natural
from transcode.producer import Form, Role
from transcode.quant import Encoding
from transcode.recognise import REFUSED
from transcode.stacks import all_there, belong, experts_of, same_projections


def require_family(checkpoint: Checkpoint, form: Form) -> None:
    """Raise FormatError for a model that the target is not for."""
    model_type = checkpoint.text_config.get("model_type")
    if form.producer.model_types and model_type not in form.producer.model_types:
        raise FormatError(
            f"{form.target.name} is for model_type {' or '.join(form.producer.model_types)}, "
            f"this is {model_type!r}"
        )


def adapted(module: Module, form: Form) -> Module:
    """NVFP4 in blocks of 32 with every scale twice, where the target has blocks of 16 only.

    Its input scale is one of FP8 activations, so the result is W4A16.
    """
    wanted = form.target.encodings
    if module.encoding is not Encoding.NVFP4_32 or not form.producer.formats:
        return module
    if form.producer.format(Encoding.NVFP4_32) and Encoding.NVFP4 not in wanted:
        return module
    scales = module.scales
    shape = (scales.shape[0], scales.shape[1] * 2)
    own = scales.cut if isinstance(scales.cut, Cut) else Cut(scales.shape)
    twice = replace(scales, shape=shape, nbytes=scales.nbytes * 2, cut=replace(own, repeat=2))
    dropped = (Role.INPUT, Role.SOURCE_INPUT)
    parts = {role: part for role, part in module.parts.items() if role not in dropped}
    return replace(module, encoding=Encoding.NVFP4, parts=parts | {Role.SCALES: twice})


def require_encodings(
    quantised: Mapping[str, Module], form: Form, model_type: object, *, taken: bool
) -> None:
    """The encodings that the target asks for, and has a form for; taken: whether something was put
    in from another checkpoint."""
    kinds = sorted({str(m.encoding) for m in quantised.values()})
    wanted = form.target.encodings
    if not kinds and not form.producer.formats and taken:
        return  # compose: plain weights among plain weights
    if not kinds:
        raise FormatError("nothing in the checkpoint is quantised")
    if wanted and not any(m.encoding in wanted for m in quantised.values()):
        raise FormatError(
            f"{form.target.name} wants {' or '.join(wanted)}, the checkpoint has "
            f"{', '.join(kinds)}: encodings are not changed yet{_forms(quantised, model_type)}"
        )
    for module in quantised.values():
        if (refused := [leaf for leaf in module.leaves if leaf in REFUSED]) and (
            module.encoding is not Encoding.INT4
        ):
            raise FormatError(
                f"{module.name}.{refused[0]} cannot be carried: {REFUSED[refused[0]]}"
            )
        if form.producer.formats:
            _sayable(module, form)
        elif module.encoding is Encoding.INT4:
            raise FormatError(f"{module.name} is int4, which is not decoded here")


def _forms(quantised: Mapping[str, Module], model_type: object) -> str:
    """The targets that take these encodings as they are, as the end of a sentence."""
    kinds = {m.encoding for m in quantised.values()}
    fitting = [
        name
        for name, (producer, target) in targets().items()
        if kinds & set(target.encodings) and model_type in (producer.model_types or (model_type,))
        if all((f := producer.format(kind)) and not f.read_only for kind in kinds)
    ]
    return f"; forms for it: {', '.join([*fitting, 'canonical', 'bf16'])}"


def missing(quantised: Mapping[str, Module], form: Form) -> frozenset[str]:
    """Modules without an input scale beside others that have one: experts of a layer, or linears
    that see the same input.

    FormatError unless they are to be filled in, or none is written, or no other of their row has
    one to take.
    """
    wanted = (
        {}
        if form.producer.verbatim
        else {n: m for n, m in quantised.items() if form.quantises_inputs(m.encoding)}
    )
    found = set[str]()
    for layer in layers_of(wanted):
        every = {m.name for row in layer for m in row}
        without = {m.name for row in layer for m in row if Role.INPUT not in m.parts}
        found |= without if len(without) < len(every) else set()
    if found and not form.fill_input:
        first = min(found, key=natural)
        raise FormatError(
            f"{first} has no input scale, others of its layer do ({len(found)} in all); "
            "--fill-input-scale takes the largest of theirs"
        )
    return frozenset(found)


def layers_of(modules: Mapping[str, Module]) -> Iterator[list[list[Module]]]:
    """Rows of modules in one encoding that may lend each other an input scale, by layer: the same
    projection of all experts; q, k and v; gate and up."""
    for experts in experts_of(modules).values():
        rows = [[e[p] for e in experts.values() if p in e] for p in ("gate", "up", "down")]
        yield from _alike([row for row in rows if row])
    for members in (QKV, GATE_UP, W1_W3):
        for name, module in modules.items():
            parent, _, leaf = name.rpartition(".")
            if leaf == members[0] and address(name).expert is None:
                row = [modules.get(f"{parent}.{member}") for member in members]
                yield from _alike([[module, *(m for m in row[1:] if m)]])


def _alike(rows: list[list[Module]]) -> Iterator[list[list[Module]]]:
    """The rows of each encoding."""
    for encoding in dict.fromkeys(m.encoding for row in rows for m in row):
        same = [[m for m in row if m.encoding is encoding] for row in rows]
        yield [row for row in same if row]


def require_experts(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> None:
    """Raise FormatError for a layer that lacks an expert or a projection of one, or whose shapes
    do not belong together. Layers without any quantised expert are not looked at."""
    for container, experts in experts_of(modules).items():
        parts = [m for e in experts.values() for m in e.values()]
        if all(m.encoding is Encoding.UNQUANTISED for m in parts):
            continue
        all_there(container, experts, checkpoint)
        same_projections(container, experts)
        for e, mine in experts.items():
            if not belong(mine):
                shapes = ", ".join(f"{part} is {list(m.shape)}" for part, m in mine.items())
                raise FormatError(f"{container}.{e}: {shapes}: they do not belong together")


def is_adapted(module: Module) -> bool:
    """Whether its scales stand twice, and its activations are 16 bit."""
    return module.format is not None and module.encoding is not module.format.encoding


def stray_input(module: Module) -> TensorInfo | None:
    """An input scale that the module's format has no leaf for."""
    known = {part.name for part in module.parts.values()}
    leaves = ("input_scale", "input_global_scale", "input_scale_2")
    found = (module.leaves[leaf] for leaf in leaves if leaf in module.leaves)
    return next((info for info in found if info.name not in known), None)


def _sayable(module: Module, form: Form) -> None:
    format_ = form.producer.format(module.encoding)
    foreign = module.encoding is Encoding.INT4 and (
        module.format is None or module.format.producer != form.producer.name
    )
    if format_ is None or format_.read_only or foreign:
        raise FormatError(
            f"{module.name} is {module.encoding}: {form.target.name} has no word for it"
        )
    lost = None if is_adapted(module) else stray_input(module)
    if Role.INPUT not in format_.leaves:
        lost = lost or module.parts.get(Role.INPUT)
    if lost and form.quantises_inputs(module.encoding):
        raise FormatError(f"{lost.name}: {form.target.name} has no place for it")
