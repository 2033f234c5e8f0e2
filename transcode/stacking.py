"""Experts that a target stacks in one tensor for a layer: which, how, and in what shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.fused import plainly
from transcode.module import Module
from transcode.names import address, family, natural
from transcode.producer import Form, Fusion, Role, Shape
from transcode.spec import Padded
from transcode.stacks import Stack, all_there, experts_of, siblings

UNPADDED = Padded((), 0, True)

Groups = Mapping[str, tuple[tuple[Module, ...], ...]]
"""`[E][M]` modules by the stem of the tensor that they are stacked in."""


def fusion_of(checkpoint: Checkpoint, form: Form) -> Fusion | None:
    """How the target stacks experts, if it is to."""
    model_type = str(checkpoint.text_config.get("model_type"))
    if not (form.fused or form.producer.always_fused):
        return None
    if form.producer.formats:
        fusions = form.producer.fusions
        named = fusions.get(model_type)
        if form.producer.always_fused:
            named = named or fusions.get("")
        if named is None:
            raise FormatError(f"--fused: {form.target.name} stacks no experts of {model_type!r}")
        return named
    own = family(model_type).fused
    if own is None:
        raise FormatError(f"--fused: {model_type!r} keeps its BF16 experts one by one")
    return plainly(own)


def containers(
    checkpoint: Checkpoint, quantised: Mapping[str, Module], form: Form
) -> Iterator[tuple[Fusion, Groups]]:
    """Every container of quantised experts that the target stacks."""
    fusion = fusion_of(checkpoint, form)
    if fusion is None:
        return
    for container, experts in sorted(experts_of(quantised).items(), key=lambda e: natural(e[0])):
        all_there(container, experts, checkpoint)
        groups: dict[str, tuple[tuple[Module, ...], ...]] = {}
        for stem, parts in ((fusion.up, ("gate", "up")), (fusion.down, ("down",))):
            rows = [[e[p] for p in parts if p in e] for _, e in sorted(experts.items())]
            if any(rows):
                _alike(container, rows, form)
                place = container.rpartition(".")[0] if fusion.beside else container
                groups[f"{place}.{stem}"] = tuple(map(tuple, rows))
        if odd := [p for e in experts.values() for p in e if p not in ("gate", "up", "down")]:
            raise FormatError(f"{container}: {odd[0]!r} is no projection that is known here")
        gated = all("gate" in e for e in experts.values())
        if form.producer.formats and not form.producer.verbatim and not gated:
            raise FormatError(f"{container}: {form.target.name} stacks gated experts only")
        yield fusion, groups


def _alike(container: str, rows: Sequence[Sequence[Module]], form: Form) -> None:
    """All experts have the same projections in one encoding and shape, or FormatError."""
    first = rows[0][0] if rows[0] else next(m for row in rows for m in row)
    for row in rows:
        if len(row) != len(rows[0]):
            raise FormatError(f"{container}: experts differ in their projections")
        for m in row:
            mine, wanted = (m.encoding, m.shape), (first.encoding, first.shape)
            if mine != wanted or _kinds(m) != _kinds(first):
                raise FormatError(
                    f"{m.name} is {m.encoding} {list(m.shape)}, {first.name} is {first.encoding} "
                    f"{list(first.shape)}, or has other tensors: they cannot be stacked"
                )
    if form.producer.stackable and first.encoding not in form.producer.stackable:
        raise FormatError(f"{first.name}: {form.target.name} stacks no experts in {first.encoding}")


def _kinds(module: Module) -> set[Role]:
    """Its roles but for input scales, which may be missing."""
    return {*module.parts} - {Role.INPUT, Role.SOURCE_INPUT}


def stacked_shape(one: Shape, role: Role, fusion: Fusion, experts: int, members: int) -> Shape:
    """The shape of `experts` times `members` joined along rows."""
    if not one:
        if fusion.one_scalar:
            return ()
        return (experts, members) if members > 1 else (experts,)
    rows, *rest = one
    joined = (rows * members, *rest)
    if fusion.transposed and len(joined) == 2 and role in (Role.CODES, Role.SCALES):
        joined = joined[::-1]
    if role is Role.CODES and fusion.tail:
        joined = (joined[0], joined[1] // prod(fusion.tail), *fusion.tail)
    return (experts, *joined)


def stacks(
    checkpoint: Checkpoint,
    quantised: Mapping[str, Module],
    stacked: Sequence[tuple[Fusion, Groups]],
) -> Iterator[Stack]:
    """What must have one global scale at run time: as for a kernel, all experts where one scalar
    is stored for them."""
    scaled = {n: m for n, m in quantised.items() if Role.GLOBAL in m.parts}
    done = set[str]()
    for fusion, groups in stacked:
        for name, rows in groups.items() if fusion.one_scalar else ():
            if rows[0][0].name in scaled:
                prefix, _, stem = name.rpartition(".")
                yield Stack(prefix, stem, (tuple(m for row in rows for m in row),), UNPADDED)
                done |= {m.name for row in rows for m in row}
    rest = {n: m for n, m in scaled.items() if n not in done}
    for container, experts in sorted(experts_of(rest).items(), key=lambda e: natural(e[0])):
        for fused, parts in (("w13", ("gate", "up")), ("w2", ("down",))):
            pairs = [tuple(e[p] for p in parts if p in e) for _, e in sorted(experts.items())]
            if any(pairs):
                yield Stack(container, fused, tuple(pair for pair in pairs if pair), UNPADDED)
        others = [(m,) for e in experts.values() for p, m in e.items()
               if p not in ("gate", "up", "down")]  # fmt: skip
        if others:
            yield Stack(container, "others", tuple(others), UNPADDED)
    dense = sorted(siblings(checkpoint, rest, lambda m: True), key=lambda g: natural(g[0].name))
    for members in dense:
        yield Stack(address(members[0].name).parent, "", (tuple(members),), UNPADDED)
