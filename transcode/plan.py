"""The whole conversion, from headers alone: every tensor, shard and byte of the destination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.header import BITS, TensorInfo, bytes_of
from transcode.module import Module
from transcode.names import natural
from transcode.producer import Configs, Fusion, Group, Leaf, Role
from transcode.stacks import Options, Stack, dense_stacks, expert_stacks

ACTIVATION = {"bfloat16": "BF16", "float16": "F16"}
"""safetensors' names of the activation dtypes."""


class Kind(StrEnum):
    """How the bytes of an output come about."""

    COPY = "copy"
    WEIGHT = "weight"
    SCALE = "weight_scale"
    GLOBAL = "global"
    BIAS = "bias"
    SOURCE_GLOBAL = "source_global_scale"
    SOURCE_INPUT = "source_input_scale"
    REWRITE = "rewrite"


@dataclass(frozen=True)
class Recipe:
    """What a rewritten tensor is made of: a role's part of every module.

    leaf: how it is stored; None where the module is decoded.
    groups: `[E][M]`; members are joined along their rows, groups follow each other.
    fusion: how the groups are stacked; None for a module by itself.
    """

    role: Role
    leaf: Leaf | None
    groups: tuple[tuple[Module, ...], ...]
    fusion: Fusion | None = None

    @property
    def modules(self) -> Iterator[Module]:
        """All of them, group by group."""
        return (module for group in self.groups for module in group)


@dataclass(frozen=True)
class Output:
    """One tensor of the destination. `member` is the stack's member, None for a fused tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    source: TensorInfo | None = None
    stack: Stack | None = None
    member: int | None = None
    recipe: Recipe | None = None

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return bytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class OutputShard:
    """One file of the destination, its tensors in the order of the file."""

    name: str
    outputs: tuple[Output, ...]

    @property
    def nbytes(self) -> int:
        """The size of its tensors, without the header."""
        return sum(o.nbytes for o in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Everything that `convert` will write.

    configs: what a rewritten checkpoint's configs say; None for a kernel's layout.
    groups: its quantised modules, by what is said of them.
    notes: what a user should know, as far as headers tell.
    """

    options: Options
    modules: Mapping[str, Module]
    stacks: tuple[Stack, ...]
    shards: tuple[OutputShard, ...]
    configs: Configs | None = None
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()

    def outputs(self) -> Iterator[Output]:
        """All tensors of the destination."""
        return (output for shard in self.shards for output in shard.outputs)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(shard.nbytes for shard in self.shards)


def make(checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options) -> Plan:
    """Plan a conversion; raises FormatError or LayoutError for what cannot be packed."""
    stacks = (
        *expert_stacks(checkpoint, modules, options),
        *dense_stacks(checkpoint, modules, options),
    )
    if twice := repeated(stack.name for stack in stacks):
        raise FormatError(f"{twice}: a linear has the name of packed experts")
    packed = {t.stored_name for s in stacks for g in s.groups for m in g for t in consumed(m)}
    outputs = [output for stack in stacks for output in _outputs(stack, options)]
    copies = [
        Output(name, info.dtype, info.shape, Kind.COPY, source=info)
        for name, info in checkpoint.tensors.items()
        if name not in packed
    ]
    once(outputs, copies)
    fused = [o for o in outputs if o.stack and o.stack.fused]
    plain = [o for o in outputs if o.stack and not o.stack.fused] + copies
    shards = (
        *cut("model", plain, options.shard_size),
        *cut("experts", fused, options.shard_size),
    )
    return Plan(options, modules, stacks, shards)


KEPT = ("source_global_scale", "source_input_scale", "activation_scale", "packed_global_scale")
"""Leaves of a module that are no part of its meaning, or stand for another one."""


def consumed(module: Module) -> Iterator[TensorInfo]:
    """The tensors of a quantised module that become something else, or are another's words."""
    yield from module.parts.values()
    yield from (module.leaves[leaf] for leaf in KEPT if leaf in module.leaves)


def once(*outputs: Iterable[Output]) -> None:
    """Raise FormatError if a tensor would be written twice."""
    if twice := repeated(output.name for some in outputs for output in some):
        raise FormatError(f"{twice} would be written twice: the source has it already")


def _outputs(stack: Stack, options: Options) -> Iterator[Output]:
    layout, k = options.layout, stack.padded.k
    for module in (m for group in stack.groups for m in group):
        if "bias" in module.leaves and module.leaf("bias").shape != module.shape[:1]:
            raise FormatError(f"{module.leaf('bias')}: wanted [{module.shape[0]}]")
    if stack.fused:
        e, n, m = len(stack.groups), sum(stack.padded.rows), len(stack.padded.rows)
        stem = f"{stack.prefix}.{stack.fused}_"
        scalars: tuple[int, ...] = (e, m) if stack.fused == "w13" else (e,)
        yield Output(
            stem + "weight", "I32", (e, *layout.weight_shape(n, k)), Kind.WEIGHT, stack=stack
        )
        scales = (e, *layout.scale_shape(n, k))
        yield Output(stem + "weight_scale", "F8_E4M3", scales, Kind.SCALE, stack=stack)
        yield Output(stem + "weight_scale_2", "F32", (e,), Kind.GLOBAL, stack=stack)
        modules = [module for group in stack.groups for module in group]
        if _all_or_none(modules, "bias"):
            yield Output(stem + "bias", ACTIVATION[options.dtype], (e, n), Kind.BIAS, stack=stack)
        yield Output(stem + "source_global_scale", "F32", scalars, Kind.SOURCE_GLOBAL, stack=stack)
        if any(has_input_scale(module) for module in modules):
            yield Output(
                stem + "source_input_scale", "F32", scalars, Kind.SOURCE_INPUT, stack=stack
            )
        return
    for i, (module, n) in enumerate(zip(stack.groups[0], stack.padded.rows, strict=True)):
        stem = module.name + "."
        yield Output(stem + "weight", "I32", layout.weight_shape(n, k), Kind.WEIGHT, None, stack, i)
        shape = layout.scale_shape(n, k)
        yield Output(stem + "weight_scale", "F8_E4M3", shape, Kind.SCALE, None, stack, i)
        yield Output(stem + "weight_global_scale", "F32", (), Kind.GLOBAL, None, stack, i)
        if "bias" in module.leaves:
            yield Output(stem + "bias", ACTIVATION[options.dtype], (n,), Kind.BIAS, None, stack, i)
        yield Output(stem + "source_global_scale", "F32", (), Kind.SOURCE_GLOBAL, None, stack, i)
        if has_input_scale(module):
            yield Output(stem + "source_input_scale", "F32", (), Kind.SOURCE_INPUT, None, stack, i)


def has_input_scale(module: Module) -> bool:
    """Whether the source gives the activations' scale."""
    return Role.INPUT in module.parts


def _all_or_none(modules: Sequence[Module], leaf: str) -> bool:
    having = [m for m in modules if leaf in m.leaves]
    if having and len(having) != len(modules):
        without = next(m for m in modules if leaf not in m.leaves)
        raise FormatError(f"{without.name} has no {leaf}, {having[0].name} has one")
    return bool(having)


def repeated(names: Iterable[str]) -> str:
    """The first name that stands there twice, or ""."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def cut(stem: str, outputs: Sequence[Output], limit: int) -> list[OutputShard]:
    """Cut in the order of names; in a file, by falling element size, so that all are aligned."""
    files = list[list[Output]]()
    room = 0
    for output in sorted(outputs, key=lambda o: natural(o.name)):
        if not files or output.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(output)
        room -= output.nbytes
    return [
        OutputShard(
            f"{stem}-{i:05}-of-{len(files):05}.safetensors",
            tuple(sorted(part, key=lambda o: -BITS[o.dtype])),
        )
        for i, part in enumerate(files, 1)
    ]
