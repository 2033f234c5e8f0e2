"""The tensors that a target has of a module, or of the stacked experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.module import Module
from transcode.origins import Origins
from transcode.output import Kind, Output, Recipe
from transcode.producer import E8M0, FLOATS, Form, Fusion, Leaf, Role, Shape
from transcode.quant import Encoding
from transcode.stacking import Groups, stacked_shape
from transcode.told import standard

KEPT = {Role.GLOBAL: Role.SOURCE_GLOBAL, Role.INPUT: Role.SOURCE_INPUT}
"""The scalars that producers store in two senses, and where ours keeps them word for word."""

BASES = {kept: role for role, kept in KEPT.items()}
SCALARS = (*KEPT, *BASES)
"""They are always read: they are few, and some are turned over."""


def stacked(
    fusion: Fusion, groups: Groups, form: Form, source: Origins, filled: frozenset[str]
) -> Iterator[Output]:
    """The tensors of one container's stacked experts."""
    for stem, rows in groups.items():
        all_ = [m for row in rows for m in row]
        first = next((m for m in all_ if Role.INPUT in m.parts), all_[0])
        for role, leaf in _leaves(first, form, filled):
            if role not in fusion.suffixes:
                raise FormatError(f"{first.name}: {form.target.name} stacks no {role}")
            name = stem + fusion.suffixes[role]
            one = shape_of(first, role, form)
            shape = stacked_shape(one, role, fusion, len(rows), len(rows[0]))
            infos = [part for m in all_ if (part := m.parts.get(base_of(role)))]
            dtype = dtype_of(first, role, leaf, infos, source, form)
            recipe = Recipe(role, leaf, rows, fusion)
            yield Output(name, dtype, shape, Kind.REWRITE, recipe=recipe)


def single(module: Module, form: Form, source: Origins, filled: frozenset[str]) -> Iterator[Output]:
    """The tensors of a module by itself."""
    name, group = standard(module.name), ((module,),)
    if module.encoding is Encoding.INT4:
        for info in module.leaves.values():
            yield Output(info.name, info.dtype, info.shape, Kind.COPY, source=info)
        return
    for role, leaf in _leaves(module, form, filled):
        infos = [part] if (part := module.parts.get(base_of(role))) else []
        dtype = dtype_of(module, role, leaf, infos, source, form)
        shape = shape_of(module, role, form)
        stored = leaf.stored(shape) if leaf else shape
        leaf_name = leaf.name if leaf else {Role.CODES: "weight", Role.BIAS: "bias"}[role]
        recipe = Recipe(role, leaf, group)
        yield Output(f"{name}.{leaf_name}", dtype, stored, Kind.REWRITE, recipe=recipe)


BIAS = Leaf("bias", FLOATS)


def _leaves(
    module: Module, form: Form, filled: frozenset[str]
) -> Iterator[tuple[Role, Leaf | None]]:
    """The roles that are written of a module, with their leaves; None where it is decoded."""
    format_ = form.producer.format(module.encoding)
    if format_ is None:
        yield Role.CODES, None
    else:
        for role, leaf in format_.leaves.items():
            if _has(module, role, form) or (role is Role.INPUT and module.name in filled):
                yield role, leaf
    if Role.BIAS in module.parts:
        yield Role.BIAS, BIAS


def _has(module: Module, role: Role, form: Form) -> bool:
    """Whether the target's tensor of this role can be made; divisors are kept word for word."""
    inputs = form.quantises_inputs(module.encoding)
    if role in (Role.INPUT, Role.SOURCE_INPUT) and not inputs:
        return False
    if role in BASES:
        base = base_of(role)
        leaf = module.written.leaves.get(base)
        return role in module.parts or (base in module.parts and leaf is not None and leaf.divisor)
    return role in module.parts


def base_of(role: Role) -> Role:
    """The role whose tensor a scalar that is kept word for word is taken from."""
    return BASES.get(role, role)


def shape_of(module: Module, role: Role, form: Form) -> Shape:
    """The logical shape of a role; of the decoded matrix where it is decoded."""
    if role is Role.CODES and not form.producer.formats:
        return module.shape
    return () if role in SCALARS else module.parts[role].shape


def dtype_of(
    module: Module,
    role: Role,
    leaf: Leaf | None,
    infos: Sequence[TensorInfo],
    source: Origins,
    form: Form,
) -> str:
    """The dtype that is written: the source's where the leaf may have it, or its first."""
    if leaf is None:
        return "BF16"
    told = {info.dtype for info in infos}
    own = infos[0].dtype if len(told) == 1 else "F32"
    once = source.dtype(module, role)
    if once in leaf.dtypes:
        return once
    if own in leaf.dtypes:
        return own
    if own in E8M0:
        return next((d for d in leaf.dtypes if d in E8M0), leaf.dtypes[0])
    return leaf.dtypes[0]
