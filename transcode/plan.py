"""The whole conversion, from headers alone: every tensor, shard and byte of the destination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.grouping import dense_stacks, expert_stacks
from transcode.header import BITS, TensorInfo
from transcode.module import Module
from transcode.names import natural
from transcode.output import Kind, Output, OutputShard
from transcode.packed_outputs import packed_outputs
from transcode.producer import Configs, Group
from transcode.quant import Encoding
from transcode.stacks import Options, Stack


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
    outputs = [output for stack in stacks for output in packed_outputs(stack, options)]
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


KEPT = (
    "source_global_scale", "source_input_scale", "source_weight_scale", "activation_scale",
)  # fmt: skip
"""Leaves of a module that are no part of its meaning; `packed_*` stand for another one."""


def consumed(module: Module) -> Iterator[TensorInfo]:
    """The tensors of a quantised module that become something else, or are another's words."""
    if module.was:
        yield from consumed(module.was)
        return
    if module.encoding is Encoding.UNQUANTISED:
        yield from (module.leaves[leaf] for leaf in ("weight", "bias") if leaf in module.leaves)
    yield from module.parts.values()
    yield from (
        t for leaf, t in module.leaves.items() if leaf in KEPT or leaf.startswith("packed_")
    )


def once(*outputs: Iterable[Output]) -> None:
    """Raise FormatError if a tensor would be written twice."""
    if twice := repeated(output.name for some in outputs for output in some):
        raise FormatError(f"{twice} would be written twice: the source has it already")


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
