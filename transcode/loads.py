"""Which runtimes load what is written, as the targets' `loads_in` state it for each encoding, but
for what follows from the modules themselves.

Kept honest by scripts/loads.py, which lets the runtimes' own code load a folder on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from transcode.activations import activations
from transcode.catalog import producer, targets
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.module import Module
from transcode.names import GATE_UP, QKV, address, family
from transcode.producer import Form, Group, Loads, Producer, Role, Target
from transcode.quant import Encoding

BIASED = ("gpt-oss", "bf16")
"""The forms whose experts' biases the runtimes have a place for."""

Kinds = Mapping[Encoding, set[str]]
"""Where an encoding occurs: "dense", "moe"."""


def kinds_of(modules: Mapping[str, Module]) -> Kinds:
    """The quantised modules' encodings, and where they occur."""
    found: dict[Encoding, set[str]] = {}
    for m in modules.values():
        if m.encoding is not Encoding.UNQUANTISED:
            kind = "dense" if address(m.name).expert is None else "moe"
            found.setdefault(m.encoding, set()).add(kind)
    return found


def loaders(
    form: Form, modules: Mapping[str, Module], groups: Sequence[Group], model_type: object
) -> list[Loads]:
    """The runtimes that load all of these modules from this form."""
    found = _loaders(form.target, form.producer.name, kinds_of(modules))
    failing = {runtime for runtime, _ in _failing(form, modules, groups, model_type)}
    return [] if "" in failing else [e for e in found if e.runtime not in failing]


def _loaders(target: Target, producer: str, kinds: Kinds) -> list[Loads]:
    if not target.encodings and target.loads_in:
        return list(target.loads_in)
    own = [t for p, t in targets().values() if p.name == producer and t.encodings]
    found = list[list[Loads]]()
    for encoding, where in kinds.items():
        choices = [target] if encoding in target.encodings else own
        fitting = (t for t in choices if encoding in t.encodings)
        loading = [e for t in fitting for e in t.loads_in if where <= set(e.kinds)]
        found.append(list({e.runtime: e for e in loading}.values()))
    first = found[0] if found else []
    return [e for e in first if all(e.runtime in {o.runtime for o in more} for more in found)]


def _failing(
    form: Form, modules: Mapping[str, Module], groups: Sequence[Group], model_type: object
) -> Iterator[tuple[str, str]]:
    """Runtimes that do not load this for another reason than its encodings ("" for all), and the
    reason."""
    quantised = {n: m for n, m in modules.items() if m.encoding is not Encoding.UNQUANTISED}
    experts = {n: m for n, m in quantised.items() if address(n).expert is not None}
    if form.producer.formats and form.fused and not form.producer.always_fused:
        yield "", "no text-only model has names for stacked experts' scales; leave out --fused"
    if any(Role.BIAS in m.parts for m in experts.values()) and form.producer.name not in BIASED:
        yield "", "no place for biases of quantised experts"
    if not form.producer.formats:
        if experts and not form.fused and family(model_type).fused:
            yield "", f"{model_type} keeps its BF16 experts stacked; add --fused"
        return
    place = {name: i for i, group in enumerate(groups) for name in group.modules}
    if any(len(kinds) > 1 for kinds in _joined(modules, place)):
        yield "", "layers that runtimes join are quantised in two ways"
    for group in groups:
        eight = group.encoding in (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK)
        wanted = "static" if group.encoding is Encoding.FP8_TENSOR else "dynamic"
        moe = any(address(name).expert is not None for name in group.modules)
        if moe and eight and group.activations != wanted:
            yield "", f"FP8 experts with {group.activations} activations"
        if form.producer.name == "modelopt" and moe and group.encoding is Encoding.NVFP4:
            if group.activations == "none":
                yield "sglang", "it quantises 16 bit activations of experts all the same"
            if len(groups) > 1 and model_type == "mixtral":
                yield "sglang", "MIXED_PRECISION of Mixtral fails there without a word"
    if any(address(name).table for name in quantised):
        yield "", "a quantised embedding"


def _joined(modules: Mapping[str, Module], place: Mapping[str, int]) -> Iterator[set[int]]:
    """The groups that the members of what runtimes join are in; -1 for none."""
    containers: dict[str, set[int]] = {}
    for name in modules:
        where = address(name)
        if where.expert is not None:
            containers.setdefault(where.parent, set()).add(place.get(name, -1))
        for members in (QKV, GATE_UP):
            others = [f"{where.parent}.{leaf}" for leaf in members]
            if where.expert is None and where.leaf == members[0]:
                yield {place.get(other, -1) for other in others if other in modules}
    yield from containers.values()


def as_it_is(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> list[Loads] | None:
    """The runtimes that load a checkpoint as it is, whatever they make of its activations; None
    where that is not said here: nothing is quantised, two producers' forms are mixed, or it is a
    form that is only read."""
    quantised = {n: m for n, m in modules.items() if m.format is not None}
    names = {m.written.producer for m in quantised.values()}
    if len(names) != 1 or any(m.written.read_only for m in quantised.values()):
        return None
    own = producer(names.pop())
    judged = {encoding for target in own.targets for encoding in target.encodings}
    if own.shared or not {m.encoding for m in quantised.values()} <= judged:
        return None
    quantised_as, found = activations(checkpoint), dict[tuple[Encoding, str], list[str]]()
    for name, module in quantised.items():
        found.setdefault((module.encoding, quantised_as(module)), []).append(name)
    groups = [
        Group(e, "static" if e is Encoding.NVFP4 else how, None, "", tuple(names))
        for (e, how), names in found.items()
    ]
    stacked = any(m.codes.part_of for m in quantised.values() if Role.CODES in m.parts)
    form = Form(own, own.targets[0], fused=stacked)
    return loaders(form, modules, groups, checkpoint.text_config.get("model_type"))


def require_loads(
    form: Form,
    modules: Mapping[str, Module],
    groups: Sequence[Group],
    model_type: object,
    runtime: str | None,
) -> None:
    """Raise FormatError, with the nearest target that loads, if `runtime` does not load this."""
    if runtime is None:
        return
    if runtime in {e.runtime for e in loaders(form, modules, groups, model_type)}:
        return
    reasons = [w for r, w in _failing(form, modules, groups, model_type) if r in ("", runtime)]
    kinds = kinds_of(modules)
    nearest = [
        name + " --fused" * (not producer.formats and family(model_type).fused is not None)
        for name, (producer, target) in targets().items()
        if target.encodings or not producer.formats
        if set(kinds) & set(target.encodings) or not producer.formats
        if all(producer.format(encoding) for encoding in kinds) or not producer.formats
        if model_type in (producer.model_types or (model_type,))
        if runtime in _runtimes(producer, target, modules, groups, model_type)
    ]
    told = "".join(f" ({reason})" for reason in reasons[:1])
    what = ", ".join(f"{e} ({' and '.join(sorted(where))})" for e, where in kinds.items())
    raise FormatError(
        f"{form.target.name}: {runtime} does not load {what} from it{told}; it loads "
        + (" or ".join(nearest) or "none of the forms")
    )


def _runtimes(
    producer: Producer,
    target: Target,
    modules: Mapping[str, Module],
    groups: Sequence[Group],
    model_type: object,
) -> set[str]:
    fused = not producer.formats and family(model_type).fused is not None
    form = Form(producer, target, fused)
    return {e.runtime for e in loaders(form, modules, groups, model_type)}
