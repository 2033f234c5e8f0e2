"""Which stacks a layout packs of a checkpoint, and how they are padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError, LayoutError
from transcode.module import Module
from transcode.names import address, family, natural
from transcode.spec import Layout, Order, Padded
from transcode.stacks import (
    Options,
    Stack,
    all_there,
    experts_of,
    group_of,
    packable,
    same_projections,
    siblings,
)


def expert_stacks(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> Iterator[Stack]:
    """`w13` and `w2` of every MoE layer whose experts are in one of the layout's encodings."""
    layout = options.layout
    own = family(checkpoint.text_config.get("model_type")).fused
    turns = layout.interleaves and own is not None and own.interleaved
    order: Order = "interleaved" if turns else layout.order
    for container, experts in sorted(experts_of(modules).items(), key=lambda e: natural(e[0])):
        if not any(packable(m, layout) for parts in experts.values() for m in parts.values()):
            continue
        _complete(container, experts, checkpoint)
        first = experts[0]
        unknown = [m.name for m in first.values() if not address(m.name).projection]
        if odd := [name for name in unknown if packable(modules[name], layout)]:
            raise FormatError(f"{odd[0]}: an expert's projection that is not known here")
        up, down = first["up"].shape, first["down"].shape
        if up and down and down != up[::-1]:
            raise FormatError(
                f"{container}: up is {list(up)}, down {list(down)}, wanted the transpose"
            )
        inner, hidden = up or down[::-1]
        gated = ("gate", "up") if "gate" in first else ("up",)
        packed = [m for m in (first["up"], first["down"]) if packable(m, layout)]
        unit = lcm(*(_group(m, layout) or 1 for m in packed))
        try:
            wide, size = layout.pad_experts(hidden, inner, unit, options.tp, len(gated) > 1)
        except LayoutError as error:
            raise LayoutError(f"{container}: {error}") from None
        if first["up"] in packed:
            padded = Padded((size,) * len(gated), wide, True)
            groups = tuple(tuple(experts[e][p] for p in gated) for e in sorted(experts))
            only = "gate_up" if len(gated) == 1 else order
            yield _checked(Stack(container, "w13", groups, padded, only), layout)
        if first["down"] in packed:
            padded = Padded((wide,), size, True)
            groups = tuple((experts[e]["down"],) for e in sorted(experts))
            yield _checked(Stack(container, "w2", groups, padded), layout)


def _complete(
    container: str, experts: Mapping[int, Mapping[str, Module]], checkpoint: Checkpoint
) -> None:
    """Every expert there, all with the same projections, encodings and shapes."""
    all_there(container, experts, checkpoint)
    first = experts[0]
    if not {"up", "down"} <= set(first):
        raise FormatError(
            f"{container}.0: has {', '.join(sorted(first))}, wanted (gate,) up and down"
        )
    same_projections(container, experts)
    for parts in experts.values():
        for key, module in parts.items():
            if module.encoding is not first[key].encoding:
                raise FormatError(
                    f"{module.name} is {module.encoding}, expert 0's is {first[key].encoding}"
                )
            if module.shape != first[key].shape:
                raise FormatError(
                    f"{module.name} is {list(module.shape)}, expert 0's is {list(first[key].shape)}"
                )
            _alike(module, first[key])
    if "gate" in first and (
        first["gate"].encoding is not first["up"].encoding
        or first["gate"].shape != first["up"].shape
    ):
        gate, up = first["gate"], first["up"]
        raise FormatError(
            f"{container}: gate is {gate.encoding} {list(gate.shape)}, "
            f"wanted up's {up.encoding} {list(up.shape)}"
        )
    if "gate" in first:
        _alike(first["gate"], first["up"])


def dense_stacks(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> Iterator[Stack]:
    """One stack for every fusion group of dense linears."""
    layout = options.layout
    groups = siblings(checkpoint, modules, lambda m: packable(m, layout))
    for members in sorted(groups, key=lambda g: natural(g[0].name)):
        first = members[0]
        if layout.dense == "refused":
            raise LayoutError(
                f"{first.name}: {layout.runtime} has a kernel for experts only in {layout.name} "
                f"with {layout.activations} activations, and this is a single linear"
            )
        for m in members:
            if m.shape[1] != first.shape[1]:
                raise FormatError(
                    f"{m.name} has K = {m.shape[1]}, {first.name} has {first.shape[1]}"
                )
            if m.encoding is not first.encoding:
                raise FormatError(
                    f"{m.name} is {m.encoding}, {first.name} is {first.encoding}: a runtime joins "
                    "them, so they must be alike"
                )
            _alike(m, first)
        rows = [m.shape[0] for m in members]
        padded = layout.pad(rows, first.shape[1], _group(first, layout) or 1)
        yield _checked(Stack(address(first.name).parent, "", (tuple(members),), padded), layout)


def _alike(module: Module, other: Module) -> None:
    """Raise FormatError unless two modules of one packed tensor have one granularity and format:
    the way back knows one for both."""
    if module.block != other.block:
        raise FormatError(
            f"{module.name} has tiles of {module.block}, {other.name} has {other.block}"
        )
    if module.format != other.format:
        raise FormatError(
            f"{module.name} is as {_word(module)} writes it, {other.name} as {_word(other)}"
        )


def _word(module: Module) -> str:
    return module.format.name if module.format else str(module.encoding)


def _group(module: Module, layout: Layout) -> int:
    group = group_of(module)
    if group not in layout.groups:
        wanted = " or ".join(str(g) for g in layout.groups if g)
        raise LayoutError(
            f"{module.name}: {group} columns share a scale, {layout.name} wants {wanted}"
        )
    if module.block not in (None, (128, 128)) and layout.scales.of != "rows":
        raise LayoutError(
            f"{module.name} has tiles of {module.block}, {layout.name} wants 128 x 128"
        )
    return group


def _checked(stack: Stack, layout: Layout) -> Stack:
    n, k = sum(stack.padded.rows), stack.padded.k
    if not n or not k or not layout.serves(n, k):
        raise LayoutError(f"{stack.name}: {layout.name} has no kernel for N = {n}, K = {k}")
    return stack
