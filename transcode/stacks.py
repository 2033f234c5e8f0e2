"""What is packed together: fusion groups of dense linears, and the experts of an MoE layer.

A *stack* is what becomes one packed weight, or several whose columns a runtime joins: the members
of a fusion group, once for a dense group and once for every expert of an MoE layer. All its groups
share one lift (Marlin's factor) by default, all members of a group one global scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.module import Module
from transcode.names import address, family
from transcode.producer import Form
from transcode.quant import Encoding
from transcode.recipe import AS_THEY_ARE, EncodingRecipe
from transcode.spec import Layout, Order, Padded, Parts

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Config keys that say how many experts a layer has."""


@dataclass(frozen=True)
class Options:
    """What the user asked for: a kernel's layout, or another form of the checkpoint.

    recipe: what is asked of encodings.
    scalars: whether what the runtime works out of factors is written too.
    """

    kernel: Layout | None
    dtype: str
    unify: str = "fold"
    exact: bool = False
    tp: int = 1
    shard_size: int = 5_000_000_000
    form: Form | None = None
    recipe: EncodingRecipe = AS_THEY_ARE
    scalars: bool = False

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
    order: how gate's and up's rows lie among each other.
    """

    prefix: str
    fused: str
    groups: tuple[tuple[Module, ...], ...]
    padded: Padded
    order: Order = "gate_up"

    @property
    def name(self) -> str:
        """`<container>.w13`, or `<parent>.q_proj+k_proj+v_proj`."""
        if self.fused:
            return f"{self.prefix}.{self.fused}"
        joined = "+".join(address(m.name).leaf for m in self.groups[0])
        return f"{self.prefix}.{joined}".removeprefix(".")

    @property
    def first(self) -> Module:
        """The first member: in encoding and K all are like it."""
        return self.groups[0][0]

    @property
    def modules(self) -> list[Module]:
        """All members of all groups."""
        return [module for group in self.groups for module in group]

    @property
    def scales(self) -> int:
        """Block scales of a padded row."""
        return -(-self.padded.k // (group_of(self.first) or self.padded.k))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """A group's parts, one for each member or of one member only, as rows of one matrix."""
        if self.order == "interleaved" and len(parts) > 1:
            return torch.stack(list(parts), 1).flatten(0, 1)
        return torch.cat(list(parts)[:: -1 if self.order == "up_gate" else 1])

    def scale_rows(self, i: int, layout: Layout) -> int:
        """Rows of a member's scales as they are packed."""
        if layout.scales.of != "own" or self.first.encoding is Encoding.FP8_CHANNEL:
            return self.padded.rows[i]
        block = self.first.block
        return -(-self.padded.rows[i] // block[0]) if block else 1

    def one_scale(self, layout: Layout) -> bool:
        """Whether all members have one scale between them, as a kernel for FP8 tensors wants it."""
        return layout.scales.of == "own" and self.first.encoding is Encoding.FP8_TENSOR

    def stored(self, layout: Layout) -> Parts:
        """How the stack's matrices are stored."""
        return layout.joined(len(self.groups[0]) if self.fused else 1)

    def rows(self, i: int) -> slice:
        """Where a member's padded rows are among the joined ones."""
        return rows_of(self.padded.rows, i, self.order)

    def roles(self) -> tuple[str, ...]:
        """The members' leaf names."""
        return tuple(address(m.name).leaf for m in self.groups[0])


def rows_of(padded: Sequence[int], i: int, order: Order) -> slice:
    """Where a member's padded rows are among those of all members."""
    if order == "interleaved":
        return slice(i, None, len(padded))
    before = padded[i + 1 :] if order == "up_gate" else padded[:i]
    return slice(sum(before), sum(before) + padded[i])


GROUPS = {Encoding.NVFP4: 16, Encoding.MXFP4: 32, Encoding.MXFP8: 32}


def group_of(module: Module) -> int:
    """How many columns share a scale; 0 for whole rows."""
    if module.encoding is Encoding.FP8_BLOCK and module.block:
        return module.block[1]
    return GROUPS.get(module.encoding, 0)


def packable(module: Module, layout: Layout) -> bool:
    """Whether a module is in an encoding that the layout packs, and is multiplied with."""
    where = address(module.name)
    place = where.expert is not None or layout.dense != "carried"
    return module.encoding in layout.encodings and place and not where.table


def experts_of(modules: Mapping[str, Module]) -> dict[str, dict[int, dict[str, Module]]]:
    """`{container: {expert: {projection or leaf: module}}}` of every routed expert."""
    found: dict[str, dict[int, dict[str, Module]]] = {}
    for name, module in modules.items():
        where = address(name)
        if where.expert is not None:
            key = where.projection or where.leaf
            found.setdefault(where.parent, {}).setdefault(where.expert, {})[key] = module
    return found


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


def belong(parts: Mapping[str, Module]) -> bool:
    """Whether an expert's gate and up are `[I, H]` and its down is `[H, I]`."""
    gate, up, down = (parts[p].shape if p in parts else () for p in ("gate", "up", "down"))
    return not ((gate and up and gate != up) or (up and down and up != down[::-1]))


def siblings(
    checkpoint: Checkpoint, modules: Mapping[str, Module], wanted: Callable[[Module], bool]
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
