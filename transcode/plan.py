"""The whole conversion, made from headers alone: every tensor, shard and byte of the destination.

A *stack* is what becomes one packed weight, or several whose columns a runtime joins: the members
of a fusion group, once for a dense group and once for every expert of an MoE layer. All its groups
share one lift (Marlin's factor) by default, all members of a group one global scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError, LayoutError
from transcode.header import BITS, TensorInfo, bytes_of
from transcode.names import Address, address, family, natural
from transcode.quant import Encoding
from transcode.recognise import Module
from transcode.spec import Layout, Padded

ACTIVATION = {"bfloat16": "BF16", "float16": "F16"}
"""safetensors' names of the activation dtypes."""

NO_GEMM = ("embed_tokens", "word_embeddings", "wte", "embed")
"""Leaf names of tables that are looked up, not multiplied: they stay as they are."""

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Config keys that say how many experts a layer has."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    layout: Layout
    dtype: str
    unify: str = "fold"
    exact: bool = False
    tp: int = 1
    shard_size: int = 5_000_000_000


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
        return f"{self.prefix}." + "+".join(address(m.name).leaf for m in self.groups[0])

    def roles(self) -> tuple[str, ...]:
        """The members' leaf names."""
        return tuple(address(m.name).leaf for m in self.groups[0])


class Kind(StrEnum):
    """How the bytes of an output come about."""

    COPY = "copy"
    WEIGHT = "weight"
    SCALE = "weight_scale"
    GLOBAL = "global"
    BIAS = "bias"
    SOURCE_GLOBAL = "source_global_scale"
    SOURCE_INPUT = "source_input_scale"


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
    """Everything that `convert` will write."""

    options: Options
    modules: Mapping[str, Module]
    stacks: tuple[Stack, ...]
    shards: tuple[OutputShard, ...]

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
    packed = {info.name for s in stacks for g in s.groups for m in g for info in _consumed(m)}
    outputs = [output for stack in stacks for output in _outputs(stack, options)]
    copies = [
        Output(name, info.dtype, info.shape, Kind.COPY, source=info)
        for name, info in checkpoint.tensors.items()
        if name not in packed
    ]
    _no_clash([*outputs, *copies])
    fused = [o for o in outputs if o.stack and o.stack.fused]
    plain = [o for o in outputs if o.stack and not o.stack.fused] + copies
    shards = (
        *_shards("model", plain, options.shard_size),
        *_shards("experts", fused, options.shard_size),
    )
    return Plan(options, modules, stacks, shards)


def packable(module: Module) -> bool:
    """Whether a module is in the encoding that the layout packs, and is multiplied with."""
    return module.encoding is Encoding.NVFP4 and address(module.name).leaf not in NO_GEMM


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
        if down != up[::-1]:
            raise FormatError(
                f"{container}: up is {list(up)}, down {list(down)}, wanted the transpose"
            )
        try:
            size = options.layout.pad_experts(up[1], up[0], options.tp)
        except LayoutError as error:
            raise LayoutError(f"{container}: {error}") from None
        gated = ("gate", "up") if "gate" in first else ("up",)
        if packable(first["up"]):
            padded = Padded((size,) * len(gated), up[1], True)
            groups = tuple(tuple(experts[e][p] for p in gated) for e in sorted(experts))
            yield _checked(Stack(container, "w13", groups, padded), options)
        if packable(first["down"]):
            padded = Padded((down[0],), size, True)
            groups = tuple((experts[e]["down"],) for e in sorted(experts))
            yield _checked(Stack(container, "w2", groups, padded), options)


def _complete(
    container: str, experts: Mapping[int, Mapping[str, Module]], checkpoint: Checkpoint
) -> None:
    """Every expert there, all with the same projections, encodings and shapes."""
    config = checkpoint.text_config
    wanted = next((config[key] for key in COUNTS if isinstance(config.get(key), int)), 0)
    count = max(wanted, max(experts) + 1)
    if holes := [e for e in range(min(count, len(experts) + 1)) if e not in experts]:
        raise FormatError(f"{container}: expert {holes[0]} is missing; there are {len(experts)}")
    first = experts[0]
    if not {"up", "down"} <= set(first):
        raise FormatError(
            f"{container}.0: has {', '.join(sorted(first))}, wanted (gate,) up and down"
        )
    for e, parts in experts.items():
        if set(parts) != set(first):
            differs = ", ".join(sorted(set(parts) ^ set(first)))
            raise FormatError(f"{container}.{e}: experts 0 and {e} differ in {differs}")
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
        raise FormatError(f"{container}: gate is not of up's encoding and shape")


def siblings(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[list[Module]]:
    """The dense modules in the layout's encoding, those that a runtime joins together."""
    joined = family(checkpoint.text_config.get("model_type")).joined
    place = {leaf: (row, i) for row, group in enumerate(joined) for i, leaf in enumerate(group)}

    def key(module: Module) -> tuple[str, str]:
        where = address(module.name)
        row = place.get(where.leaf)
        return where.parent, where.leaf if row is None else f"+{row[0]}"

    dense = [m for m in modules.values() if packable(m) and address(m.name).expert is None]
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


def _consumed(module: Module) -> Iterator[TensorInfo]:
    """The tensors of a packed module that become something else."""
    assert module.format is not None
    f = module.format
    for leaf in (f.codes, f.scales, f.global_scale, f.input_scale, "bias"):
        if leaf in module.leaves:
            yield module.leaf(leaf)


def _outputs(stack: Stack, options: Options) -> Iterator[Output]:
    layout, k = options.layout, stack.padded.k
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
    return module.format is not None and module.format.input_scale in module.leaves


def _all_or_none(modules: Sequence[Module], leaf: str) -> bool:
    having = [m for m in modules if leaf in m.leaves]
    if having and len(having) != len(modules):
        without = next(m for m in modules if leaf not in m.leaves)
        raise FormatError(f"{without.name} has no {leaf}, {having[0].name} has one")
    return bool(having)


def _no_clash(outputs: Sequence[Output]) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            raise FormatError(f"{output.name} would be written twice: the source has it already")
        seen.add(output.name)


def _shards(stem: str, outputs: Sequence[Output], limit: int) -> list[OutputShard]:
    """Cut in the order of names; in a file, by falling element size, so that all are aligned."""
    cut = list[list[Output]]()
    room = 0
    for output in sorted(outputs, key=lambda o: natural(o.name)):
        if not cut or output.nbytes > room:
            cut.append([])
            room = limit
        cut[-1].append(output)
        room -= output.nbytes
    return [
        OutputShard(
            f"{stem}-{i:05}-of-{len(cut):05}.safetensors",
            tuple(sorted(part, key=lambda o: -BITS[o.dtype])),
        )
        for i, part in enumerate(cut, 1)
    ]


def where(output: Output) -> Address:
    """The address of the module or container that an output belongs to."""
    return address(output.name.rpartition(".")[0])
