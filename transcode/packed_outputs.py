"""The tensors that a stack becomes in a kernel's layout, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transcode.errors import FormatError, LayoutError
from transcode.header import TensorInfo
from transcode.module import Module
from transcode.output import ACTIVATION, Kind, Output
from transcode.producer import Role
from transcode.quant import FP8, Encoding
from transcode.spec import Layout, Scalar
from transcode.stacks import Options, Stack


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a stack: of each group, or (`each`) of each member of w13."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    each: bool = False


def packed_outputs(stack: Stack, options: Options) -> Iterator[Output]:
    """What a stack becomes: fused `<prefix>.w13_*`, or tensors of every member."""
    modules = [module for group in stack.groups for module in group]
    for module in modules:
        if "bias" in module.leaves and module.leaf("bias").shape != module.shape[:1]:
            raise FormatError(f"{module.leaf('bias')}: wanted [{module.shape[0]}]")
    if stack.fused:
        count, members = len(stack.groups), len(stack.groups[0])
        halves = (members,) if stack.fused == "w13" else ()
        for t in _tensors(stack, modules, range(members), options):
            shape = (count, *(halves if t.each else ()), *t.shape)
            yield Output(
                f"{stack.prefix}.{stack.fused}_{t.leaf}", t.dtype, shape, t.kind, None, stack
            )
        for scalar in scalars(stack, options):
            shape = (count, *(halves if scalar.each else ()))
            yield Output(f"{stack.prefix}.{scalar.name}", "F32", shape, Kind.SCALAR, None, stack)
        return
    for i, module in enumerate(stack.groups[0]):
        for t in _tensors(stack, [module], range(i, i + 1), options):
            yield Output(f"{module.name}.{t.leaf}", t.dtype, t.shape, t.kind, None, stack, i)
        for scalar in scalars(stack, options):
            name = f"{module.name}.{scalar.name}"
            yield Output(name, "F32", (), Kind.SCALAR, None, stack, i)


def _tensors(
    stack: Stack, modules: Sequence[Module], which: range, options: Options
) -> Iterator[_Tensor]:
    """The tensors of these modules, which are those members of their groups."""
    n = sum(stack.padded.rows[i] for i in which)
    layout, own, parts = options.layout, ACTIVATION[options.dtype], stack.stored(options.layout)
    codes, scales = parts.codes, parts.scales
    yield _Tensor("weight", codes.dtype, codes.shape(n, stack.padded.k), Kind.WEIGHT)
    rows = sum(stack.scale_rows(i, layout) for i in which)
    shape = () if stack.one_scale(layout) else scales.shape(rows, stack.scales)
    yield _Tensor("weight_scale", scales.dtype or own, shape, Kind.SCALE)
    if layout.factor:
        leaf = "weight_scale_2" if stack.fused else "weight_global_scale"
        dtype, each = layout.factor.dtype or own, layout.factor.each and len(which) > 1
        yield _Tensor(leaf, dtype, (), Kind.GLOBAL, each)
        yield _Tensor("source_global_scale", "F32", (), Kind.SOURCE_GLOBAL, True)
    if takes_inputs(stack, layout):
        yield _Tensor(input_leaf(stack), "F32", (), Kind.INPUT)
    if _all_or_none(modules, "bias"):
        if parts.bias is None:
            raise LayoutError(f"{modules[0].leaf('bias')}: {layout.name} has no bias")
        yield _Tensor("bias", parts.bias.dtype or own, (n,), Kind.BIAS)
    if modules[0].encoding in FP8:
        dtype = _common(m.scales for m in modules)
        yield _Tensor(
            "source_weight_scale", dtype, modules[0].scales.shape, Kind.SOURCE_SCALE, True
        )
    if dtype := input_dtype(modules):
        yield _Tensor("source_input_scale", dtype, (), Kind.SOURCE_INPUT, True)


def scalars(stack: Stack, options: Options) -> list[Scalar]:
    """What the runtime works out of a stack's factors, if that is asked for."""
    return [s for s in options.layout.scalars if options.scalars and s.of == stack.fused]


def takes_inputs(stack: Stack, layout: Layout) -> bool:
    """Whether the activations' scales are stored: NVFP4's always, FP8's if there are some."""
    every = all(has_input_scale(m) for m in stack.modules)
    four = stack.first.encoding is Encoding.NVFP4
    return layout.inputs != "" and (four or (stack.first.encoding is Encoding.FP8_TENSOR and every))


def input_leaf(stack: Stack) -> str:
    """The name of the activations' scale, as vLLM has it."""
    four = stack.first.encoding is Encoding.NVFP4
    return "input_global_scale" if four and not stack.fused else "input_scale"


def _common(infos: Iterable[TensorInfo]) -> str:
    """The tensors' dtype, F32 where they differ."""
    dtypes = {info.dtype for info in infos}
    return dtypes.pop() if len(dtypes) == 1 else "F32"


def input_dtype(modules: Iterable[Module]) -> str:
    """The dtype that the activations' scales are kept in; "" where the source gives none."""
    infos = [m.parts[Role.INPUT] for m in modules if has_input_scale(m)]
    return _common(infos) if infos else ""


def has_input_scale(module: Module) -> bool:
    """Whether the source gives the activations' scale."""
    return Role.INPUT in module.parts


def _all_or_none(modules: Sequence[Module], leaf: str) -> bool:
    having = [m for m in modules if leaf in m.leaves]
    if having and len(having) != len(modules):
        without = next(m for m in modules if leaf not in m.leaves)
        raise FormatError(f"{without.name} has no {leaf}, {having[0].name} has one")
    return bool(having)
