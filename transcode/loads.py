"""Which runtimes load what is written, as the targets' `loads_in` state it for each encoding, but
for what follows from the modules themselves.

Kept honest by scripts/loads.py, which lets the runtimes' own code load a folder on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from transcode.catalog import targets
from transcode.errors import FormatError
from transcode.module import Module
from transcode.names import GATE_UP, QKV, address, family
from transcode.producer import Form, Group, Loads, Role, Target
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
    failing = set(_failing(form, modules, groups, model_type))
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
) -> Iterator[str]:
    """Runtimes that do not load this for another reason than its encodings; "" for all."""
    quantised = {n: m for n, m in modules.items() if m.encoding is not Encoding.UNQUANTISED}
    experts = {n: m for n, m in quantised.items() if address(n).expert is not None}
    if form.producer.formats and form.fused and not form.producer.always_fused:
        yield ""  # stacked by ModelOpt: no text-only model has names for their scales
    if any(Role.BIAS in m.parts for m in experts.values()) and form.producer.name not in BIASED:
        yield ""
    if not form.producer.formats:
        if experts and not form.fused and family(model_type).fused:
            yield ""  # BF16 experts of such a family are looked for in one tensor
        return
    place = {name: i for i, group in enumerate(groups) for name in group.modules}
    if any(len(kinds) > 1 for kinds in _joined(modules, place)):
        yield ""  # a layer that runtimes join, quantised in two ways
    for group in groups:
        eight = group.encoding in (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK)
        wanted = "static" if group.encoding is Encoding.FP8_TENSOR else "dynamic"
        moe = any(address(name).expert is not None for name in group.modules)
        if moe and eight and group.activations != wanted:
            yield ""  # vLLM compressed_tensors_moe_w8a8_fp8.py, SGLang compressed_tensors_w8a8_fp8
        if form.producer.name == "modelopt" and moe and group.encoding is Encoding.NVFP4:
            if group.activations == "none":
                yield "sglang"  # it quantises activations with a scale of 1.0 on Blackwell
            if len(groups) > 1 and model_type == "mixtral":
                yield "sglang"  # MIXED_PRECISION fails there without a word
    if any(address(name).table for name in quantised):
        yield ""  # a quantised embedding


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
    kinds = kinds_of(modules)
    nearest = [
        name
        for name, (producer, target) in targets().items()
        if set(kinds) & set(target.encodings)
        and all(producer.format(encoding) for encoding in kinds)
        and not producer.model_types
        and runtime
        in {e.runtime for e in loaders(Form(producer, target), modules, groups, model_type)}
    ]
    what = ", ".join(f"{e} ({' and '.join(sorted(where))})" for e, where in kinds.items())
    instead = f"it loads {' or '.join(nearest)}" if nearest else "it loads bf16"
    raise FormatError(f"{form.target.name}: {runtime} does not load {what} from it; {instead}")
