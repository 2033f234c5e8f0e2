"""What is packed together: fusion groups of dense linears, and the experts of an MoE layer.

A *stack* is what becomes one packed weight, or several whose columns a runtime joins: the members
of a fusion group, once for a dense group and once for every expert of an MoE layer. All its groups
share one lift (Marlin's factor) by default, all members of a group one global scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError, LayoutError
from transcode.module import Module
from transcode.names import address, family, natural
from transcode.producer import Form
from transcode.quant import Encoding
from transcode.spec import Layout, Padded

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Config keys that say how many experts a layer has."""


@dataclass(frozen=True)
class Options:
    """What the user asked for: a kernel's layout, or another form of the checkpoint."""

    kernel: Layout | None
    dtype: str
    unify: str = "fold"
    exact: bool = False
    tp: int = 1
    shard_size: int = 5_000_000_000
    form: Form | None = None

    @property
    def layout(self) -> Layout:
        """The kernel's layout that is packed for."""
        assert self.kernel is not None
        return self.kernel


@dataclass(frozen=True)
class Stack:
    """Groups of matrices that are packed together.

    groups: `[E][M]` modules; E is 1 for a dense group, M the members joined along N.
    padded: the members' padded rows and the padded K.
    fused: "w13" or "w2" where the groups become one tensor under `prefix`, "" where every member
    keeps its own name.
    """

    prefix: str
    fused: str
    groups: tuple[tuple[Module, ...], ...]
    padded: Padded

    @property
    def name(self) -> str:
        """`<container>.w13`, or `<parent>.q_proj+k_proj+v_proj`."""
        if self.fused:
            return f"{self.prefix}.{self.fused}"
        joined = "+".join(address(m.name).leaf for m in self.groups[0])
        return f"{self.prefix}.{joined}".removeprefix(".")

    def roles(self) -> tuple[str, ...]:
        """The members' leaf names."""
        return tuple(address(m.name).leaf for m in self.groups[0])


def packable(module: Module) -> bool:
    """Whether a module is in the encoding that the layout packs, and is multiplied with."""
    return module.encoding is Encoding.NVFP4 and not address(module.name).table


def experts_of(modules: Mapping[str, Module]) -> dict[str, dict[int, dict[str, Module]]]:
    """`{container: {expert: {projection or leaf: module}}}` of every routed expert."""
    found: dict[str, dict[int, dict[str, Module]]] = {}
    for name, module in modules.items():
        where = address(name)
        if where.expert is not None:
            key = where.projection or where.leaf
            found.setdefault(where.parent, {}).setdefault(where.expert, {})[key] = module
    return found


def expert_stacks(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> Iterator[Stack]:
    """`w13` and `w2` of every MoE layer whose experts are in the layout's encoding."""
    for container, experts in sorted(experts_of(modules).items(), key=lambda e: natural(e[0])):
        if not any(packable(m) for parts in experts.values() for m in parts.values()):
            continue
        _complete(container, experts, checkpoint)
        first = experts[0]
        odd = [m.name for m in first.values() if packable(m) and not address(m.name).projection]
        if odd:
            raise FormatError(f"{odd[0]}: an expert's projection that is not known here")
        up, down = first["up"].shape, first["down"].shape
        if up and down and down != up[::-1]:
            raise FormatError(
                f"{container}: up is {list(up)}, down {list(down)}, wanted the transpose"
            )
        inner, hidden = up or down[::-1]
        try:
            size = options.layout.pad_experts(hidden, inner, options.tp)
        except LayoutError as error:
            raise LayoutError(f"{container}: {error}") from None
        gated = ("gate", "up") if "gate" in first else ("up",)
        if packable(first["up"]):
            padded = Padded((size,) * len(gated), hidden, True)
            groups = tuple(tuple(experts[e][p] for p in gated) for e in sorted(experts))
            yield _checked(Stack(container, "w13", groups, padded), options)
        if packable(first["down"]):
            padded = Padded((hidden,), size, True)
            groups = tuple((experts[e]["down"],) for e in sorted(experts))
            yield _checked(Stack(container, "w2", groups, padded), options)


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
    if "gate" in first and (
        first["gate"].encoding is not first["up"].encoding
        or first["gate"].shape != first["up"].shape
    ):
        gate, up = first["gate"], first["up"]
        raise FormatError(
            f"{container}: gate is {gate.encoding} {list(gate.shape)}, "
            f"wanted up's {up.encoding} {list(up.shape)}"
        )


def all_there(container: str, experts: Collection[int], checkpoint: Checkpoint) -> None:
    """Raise FormatError if an expert is missing, of those that the config counts."""
    config = checkpoint.text_config
    wanted = next((config[key] for key in COUNTS if isinstance(config.get(key), int)), 0)
    count = max(wanted, max(experts) + 1)
    if holes := [e for e in range(min(count, len(experts) + 1)) if e not in experts]:
        raise FormatError(f"{container}: expert {holes[0]} is missing; there are {len(experts)}")


def same_projections(container: str, experts: Mapping[int, Mapping[str, Module]]) -> None:
    """Raise FormatError if an expert has other projections than the first."""
    first = experts[min(experts)]
    for e, parts in experts.items():
        if parts.keys() != first.keys():
            differs = ", ".join(sorted(set(parts) ^ set(first)))
            raise FormatError(f"{container}.{e}: experts 0 and {e} differ in {differs}")


def siblings(
    checkpoint: Checkpoint,
    modules: Mapping[str, Module],
    wanted: Callable[[Module], bool] = packable,
) -> Iterator[list[Module]]:
    """The dense modules that are `wanted`, those that a runtime joins together."""
    joined = family(checkpoint.text_config.get("model_type")).joined
    place = {leaf: (row, i) for row, group in enumerate(joined) for i, leaf in enumerate(group)}

    def key(module: Module) -> tuple[str, str]:
        where = address(module.name)
        row = place.get(where.leaf)
        return where.parent, where.leaf if row is None else f"+{row[0]}"

    dense = [m for m in modules.values() if wanted(m) and address(m.name).expert is None]
    for _, group in groupby(sorted(dense, key=key), key=key):
        yield sorted(group, key=lambda m: place.get(address(m.name).leaf, (0, 0))[1])


def dense_stacks(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> Iterator[Stack]:
    """One stack for every fusion group of dense linears."""
    for members in sorted(siblings(checkpoint, modules), key=lambda g: natural(g[0].name)):
        k = members[0].shape[1]
        for m in members:
            if m.shape[1] != k:
                raise FormatError(f"{m.name} has K = {m.shape[1]}, {members[0].name} has {k}")
        padded = options.layout.pad([m.shape[0] for m in members], k)
        prefix = address(members[0].name).parent
        yield _checked(Stack(prefix, "", (tuple(members),), padded), options)


def _checked(stack: Stack, options: Options) -> Stack:
    n, k = sum(stack.padded.rows), stack.padded.k
    if not n or not k or not options.layout.serves(n, k):
        raise LayoutError(f"{stack.name}: {options.layout.name} has no kernel for N = {n}, K = {k}")
    return stack
