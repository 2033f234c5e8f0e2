"""Which runtimes load what is written, as the targets' `loads_in` state it for each encoding.

Kept honest by scripts/loads.py, which lets the runtimes' own code load a folder on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from transcode.catalog import targets
from transcode.errors import FormatError
from transcode.names import address
from transcode.producer import Form, Loads, Role, Target
from transcode.quant import Encoding
from transcode.recognise import Module

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


def loaders(form: Form, modules: Mapping[str, Module]) -> list[Loads]:
    """The runtimes that load all of these modules from this form."""
    if form.fused and form.producer.formats and not form.producer.always_fused:
        return []  # Llama-4 and gpt-oss NVFP4 stacked by ModelOpt: neither runtime's text models
    experts = (m for name, m in modules.items() if address(name).expert is not None)
    if any(Role.BIAS in m.parts for m in experts) and form.producer.name not in BIASED:
        return []
    return _loaders(form.target, form.producer.name, kinds_of(modules))


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


def require_loads(form: Form, modules: Mapping[str, Module], runtime: str | None) -> None:
    """Raise FormatError, with the nearest target that loads, if `runtime` does not load this."""
    if runtime is None or runtime in {e.runtime for e in loaders(form, modules)}:
        return
    kinds = kinds_of(modules)
    nearest = [
        name
        for name, (producer, target) in targets().items()
        if set(kinds) & set(target.encodings)
        and all(producer.format(encoding) for encoding in kinds)
        and runtime in {e.runtime for e in loaders(Form(producer, target), modules)}
        and not producer.model_types
    ]
    what = ", ".join(f"{e} ({' and '.join(sorted(where))})" for e, where in kinds.items())
    instead = f"it loads {' or '.join(nearest)}" if nearest else "it loads bf16"
    raise FormatError(f"{form.target.name}: {runtime} does not load {what} from it; {instead}")
