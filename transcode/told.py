"""What the configs of a rewritten checkpoint have to say, from its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from transcode.activations import activations
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.fused import STACKED
from transcode.header import TensorInfo
from transcode.module import Module
from transcode.names import address, natural
from transcode.output import Output
from transcode.producer import E8M0, Form, Group, Role, Told
from transcode.quant import Encoding
from transcode.recognise import QUANTISED, quantization
from transcode.stacks import experts_of


def tell(
    checkpoint: Checkpoint,
    form: Form,
    modules: Mapping[str, Module],
    outputs: list[Output],
    kv: str,
    filled: frozenset[str],
) -> Told:
    """All that the target's configs say; `modules` by the names that they have in DST.

    filled: the modules whose missing input scales are made up.
    """
    stored = {id(m): o.dtype for o in outputs if (r := o.recipe) and r.role is Role.SCALES
              for m in r.modules}  # fmt: skip
    quantised_as = activations(checkpoint)
    found: dict[tuple[Encoding, str, tuple[int, int] | None, str], list[str]] = {}
    for name, module in sorted(modules.items(), key=lambda m: natural(m[0])):
        if module.encoding is Encoding.UNQUANTISED:
            continue
        how = "static" if module.name in filled else quantised_as(module)
        if how == "static" and not form.quantises_inputs(module.encoding):
            how = "none"
        dtype = stored.get(id(module), "")
        scales = "E8M0" if dtype in E8M0 else "float"
        found.setdefault((module.encoding, how, module.block, scales), []).append(name)
    groups = tuple(
        Group(encoding, how, block, "F8_E8M0" if scales == "E8M0" else "F32", tuple(names))
        for (encoding, how, block, scales), names in found.items()
    )
    if not groups and not checkpoint.taken:
        raise FormatError("there is nothing quantised to write")
    place = {name: i for i, group in enumerate(groups) for name in group.modules}
    return Told(
        model_type=str(checkpoint.text_config.get("model_type")),
        groups=groups,
        plain=tuple(_plain(checkpoint, modules)),
        tables=tuple(sorted(_tables(modules), key=natural)),
        containers=tuple(_uniform(place)),
        experts=dict(_experts(modules)),
        kv=kv,
        source=quantization(checkpoint)[0],
        powers=form.target.powers,
    )


def _plain(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[str]:
    """Linears that are not quantised; the container for experts none of which is; a tied head."""
    found = dict[str, None]()
    mixed = {
        address(n).parent for n, m in modules.items() if m.encoding is not Encoding.UNQUANTISED
    }
    for name, module in modules.items():
        where = address(name)
        if module.encoding is Encoding.UNQUANTISED and len(module.shape) == 2 and not where.table:
            whole = where.expert is not None and where.parent not in mixed
            found[where.parent if whole else name] = None
    for name, info in checkpoint.tensors.items():
        match = STACKED.fullmatch(name)
        if match and _matrices(info) and match["container"] not in mixed:
            found[match["container"]] = None
    configs = (checkpoint.config, checkpoint.text_config)
    tied = any(config.get("tie_word_embeddings") for config in configs)
    if tied and not any(name.endswith("lm_head") for name in modules):
        found["lm_head"] = None
    yield from sorted(found, key=natural)


def _tables(modules: Mapping[str, Module]) -> Iterator[str]:
    for name, m in modules.items():
        if m.encoding is Encoding.UNQUANTISED and len(m.shape) == 2 and address(name).table:
            yield name


def _matrices(info: TensorInfo) -> bool:
    return len(info.shape) == 3 and info.dtype not in QUANTISED


def _uniform(place: Mapping[str, int]) -> Iterator[str]:
    """Containers of experts whose modules are all in one group."""
    found: dict[str, set[int]] = {}
    for name, group in place.items():
        where = address(name)
        if where.expert is not None:
            found.setdefault(where.parent, set()).add(group)
    return (container for container, groups in found.items() if len(groups) == 1)


def _experts(modules: Mapping[str, Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The projections' leaves of every container that holds quantised experts."""
    for container, experts in experts_of(modules).items():
        first = next(iter(experts.values()))
        if any(m.encoding is not Encoding.UNQUANTISED for m in first.values()):
            leaves = (first.get(part) for part in ("gate", "up", "down"))
            yield container, tuple(address(m.name).leaf for m in leaves if m)


def standard(name: str) -> str:
    """A module's name with the expert's number before the projection, as all write it now."""
    where = address(name)
    turned = where.expert is not None and re.search(rf"\.{where.expert}$", name)
    return f"{where.parent}.{where.expert}.{where.leaf}" if turned else name
