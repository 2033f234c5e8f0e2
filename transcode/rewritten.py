"""The bytes of a rewritten tensor: read, turned over or cast where the forms differ, and joined."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from transcode.checkpoint import DTYPES
from transcode.errors import FormatError, LossError
from transcode.fold import scaled
from transcode.header import TensorInfo
from transcode.inputs import divides, input_factor
from transcode.job import Job
from transcode.kernels._decode import bf16, rounded
from transcode.module import Module
from transcode.output import Output, Recipe
from transcode.outputs import KEPT, SCALARS, base_of
from transcode.producer import E8M0, Fusion, Leaf, Role
from transcode.quant import QuantTensor, exponents, powers
from transcode.settle_e4m3 import prepare
from transcode.unify_fp8 import requantised


def direct(output: Output, job: Job) -> TensorInfo | None:
    """The source's bytes, if the tensor is nothing but those; None if it must be made."""
    if output.source is not None:
        return None if output.source.name in job.unified.scaled else output.source
    recipe = output.recipe
    if recipe is None or recipe.fusion or recipe.leaf is None or recipe.role in SCALARS:
        return None
    module = recipe.groups[0][0]
    part = module.parts[recipe.role]
    if (
        part.cut
        or part.made
        or part.name in job.unified.scaled
        or (recipe.role is Role.SCALES and module.name in job.unified.own)
        or (recipe.role is Role.CODES and module.name in job.unified.requantised)
        or not _same(part.dtype, output.dtype)
    ):
        return None
    changed = recipe.role is Role.SCALES and _prepared(module, recipe.leaf, job)
    return None if changed else part


def _same(found: str, wanted: str) -> bool:
    """Whether bytes of one dtype are bytes of the other: E8M0 and packed codes under two names."""
    return found == wanted or {found, wanted} in ({"U8", "F8_E8M0"}, {"U8", "I8"})


def made(output: Output, job: Job) -> Iterator[Tensor]:
    """The tensor in pieces that follow each other: one for each group, or the whole."""
    recipe = output.recipe
    assert recipe is not None
    fusion = recipe.fusion
    if fusion is None:
        yield value(recipe, recipe.groups[0][0], output.dtype, job)
    elif fusion.one_scalar and not output.shape:
        yield _one(recipe, output, job)
    else:
        for group in recipe.groups:
            values = [value(recipe, module, output.dtype, job) for module in group]
            yield _joined(values, recipe.role, fusion)


def _joined(values: list[Tensor], role: Role, fusion: Fusion) -> Tensor:
    """A group's members along their rows, as the fusion orders them."""
    if not values[0].shape:
        return torch.stack(values)
    dtype = values[0].dtype
    raw = [v.view(torch.uint8) if v.element_size() == 1 else v for v in values]
    joined = torch.stack(raw, 1).flatten(0, 1) if fusion.interleaved else torch.cat(raw, 0)
    if fusion.transposed and joined.dim() == 2:
        joined = joined.transpose(0, 1).contiguous()
    return joined.view(dtype)


def _one(recipe: Recipe, output: Output, job: Job) -> Tensor:
    """One scalar for all experts and halves; LossError where they differ."""
    modules = [*recipe.modules]
    values = torch.stack([value(recipe, m, output.dtype, job) for m in modules])
    if not torch.equal(values, values[:1].expand_as(values)):
        worst = float(values.max() / values.min())
        if recipe.role is Role.INPUT and job.plan.options.unify != "keep":
            return values.max()
        how = (
            "--unify rescale makes them one"
            if recipe.role in (*KEPT, Role.SCALES)
            else "leave out --fused"
        )
        raise LossError(
            f"{output.name}: one scalar for all experts, theirs differ {worst:.4g}-fold; {how}"
        )
    return values[0]


def value(recipe: Recipe, module: Module, dtype: str, job: Job) -> Tensor:
    """One module's part in the dtype that is stored, in its logical shape."""
    role, leaf = recipe.role, recipe.leaf
    if leaf is None:
        return _narrowed(module, dtype, job)
    match role:
        case Role.GLOBAL | Role.INPUT:
            return _scalar(module, role, leaf, job).to(DTYPES[dtype])
        case Role.SOURCE_GLOBAL | Role.SOURCE_INPUT:
            own = module.parts.get(role) or module.parts.get(base_of(role))
            return job.read.tensor(own) if own else torch.tensor(float("nan"))
        case Role.SCALES if _prepared(module, leaf, job):
            return prepare(module, job.unified, job.read)
        case Role.SCALES if module.name in job.unified.own:
            mine = job.unified.own[module.name].to(DTYPES[module.scales.dtype])  # exact
            return _cast(mine.reshape(module.scales.shape), module.scales, dtype)
        case Role.CODES if module.name in job.unified.requantised:
            ratio = job.unified.requantised[module.name]
            return requantised(job.read.tensor(module.codes), ratio)
    info = module.parts[role]
    value = job.read.tensor(info)
    if factor := job.unified.scaled.get(info.name):
        value = scaled(value, info, factor)
    return _cast(value, info, dtype)


def _prepared(module: Module, leaf: Leaf, job: Job) -> bool:
    """Whether NVFP4's block scales are not the source's bytes: rounded again, NaN over zeros, or
    zero because the matrix is and the target's scalar cannot say so."""
    scalars = job.unified.scalars.get(module.name)
    if scalars is None:
        return False
    again = module.name in job.unified.multiplier or module.name in job.cleaned
    return again or (scalars.zero and _revalued(module, job))


def _revalued(module: Module, job: Job) -> bool:
    """Whether a zero matrix cannot keep its global scale of 0: a divisor would be infinite."""
    form = job.plan.options.form
    format_ = form.producer.format(module.encoding) if form else None
    divisor = format_ is not None and format_.leaves[Role.GLOBAL].divisor
    return divisor or job.unified.owner.get(module.name, module.name) != module.name


def _scalar(module: Module, role: Role, leaf: Leaf, job: Job) -> Tensor:
    """A global or input scale in the target's sense, word for word where it can be."""
    unified = job.unified
    ratio = unified.folds.get(module.name)
    if role is Role.INPUT:
        filled = job.filled.get(module.name)
        if filled is not None or ratio is not None:
            factor = filled if filled is not None else input_factor(module, job.read)
            factor = factor if ratio is None else (factor.double() / ratio).float()
            return 1.0 / factor if leaf.divisor else factor
        if Role.INPUT not in module.parts:
            return torch.tensor(float("nan"))  # word for word: there is none
        return _turned(module, role, job.read.tensor(module.parts[role]), leaf, job)
    owner = unified.owner.get(module.name, module.name)
    if unified.scalars[owner].zero and _revalued(module, job):
        return torch.tensor(1.0)  # the block scales are zero
    if ratio is not None:
        return 1.0 / unified.g[module.name] if leaf.divisor else unified.g[module.name]
    return _turned(job.plan.modules[owner], role, unified.scalars[owner].stored, leaf, job)


def turns(module: Module, role: Role, leaf: Leaf, job: Job) -> bool:
    """Whether a module's own scalar is written as its reciprocal."""
    if role not in module.parts or divides(module, role) == leaf.divisor:
        return False
    unified = job.unified
    if module.name in unified.folds:
        return False
    if role is Role.INPUT:
        return module.name not in job.filled
    owned = unified.owner.get(module.name, module.name) == module.name
    return owned and not unified.scalars[module.name].zero


def _turned(module: Module, role: Role, stored: Tensor, leaf: Leaf, job: Job) -> Tensor:
    """The reciprocal where the senses differ: the source's own, if that is kept and agrees."""
    if divides(module, role) == leaf.divisor:
        return stored
    kept = kept_of(module, role, job)
    if kept is not None and torch.equal(1.0 / kept, stored):
        return kept
    return 1.0 / stored.float()


def kept_of(module: Module, role: Role, job: Job) -> Tensor | None:
    """What a scalar was before it was turned over: a tensor beside it, or in the Report."""
    own = KEPT[role]
    if own in module.parts:
        return job.read.tensor(module.parts[own])
    value = job.origins.reciprocals.get(module.parts[role].name)
    return None if value is None else torch.tensor(value, dtype=torch.float32)


def _cast(value: Tensor, info: TensorInfo, dtype: str) -> Tensor:
    """Another dtype with the same values; FormatError where there are none."""
    wanted = DTYPES[dtype]
    if value.dtype == wanted:
        return value
    if _same(info.dtype, dtype):
        return value.view(wanted)
    if info.dtype in E8M0:
        return powers(value).to(wanted)
    if dtype in E8M0:
        try:
            return exponents(value).view(wanted)
        except ValueError as error:
            raise FormatError(f"{info}: wanted E8M0, but {error}") from None
    cast = value.to(wanted)
    if not torch.equal(cast.double(), value.double()):
        told = ", as which its transcode_report.json says it began: remove that" * (
            info.dtype == "F32"
        )
        raise FormatError(f"{info}: not exact in {dtype}{told}")
    return cast


def quantised(module: Module, job: Job) -> QuantTensor:
    """A module's matrix as it is meant: with scales as they are unified."""
    unified, read = job.unified, job.read
    factor = unified.g.get(module.name)
    if factor is not None and unified.scalars[module.name].zero:
        factor = torch.tensor(0.0)
    scales = (
        prepare(module, unified, read)
        if module.name in unified.multiplier
        else read.tensor(module.scales)
    )
    if module.name in unified.own:
        scales = unified.own[module.name]
    elif (info := module.scales).name in unified.scaled:
        scales = scaled(scales, info, unified.scaled[info.name])
    codes = read.tensor(module.codes)
    if module.name in unified.requantised:
        codes = requantised(codes, unified.requantised[module.name])
    return QuantTensor(module.encoding, codes, scales, factor, module.block)


def _narrowed(module: Module, dtype: str, job: Job) -> Tensor:
    """A module decoded to float32 and rounded to a dtype; what that lost is kept."""
    of = quantised(module, job)
    made = bf16(of) if dtype == "BF16" else None
    if made is None:
        made = rounded(of.dequantize(), DTYPES[dtype])
    job.rounding[module.name] = made.worst, made.finite
    return made.value


def loss(output: Output, job: Job) -> float:
    """The largest relative error of a decoded tensor's rounding, of values that are normal."""
    recipe = output.recipe
    if recipe is None or recipe.leaf is not None:
        return 0.0
    if output.name not in job.losses:
        worst = 0.0
        for module in recipe.modules:
            if module.name not in job.rounding:
                _narrowed(module, output.dtype, job)
            lost, finite = job.rounding[module.name]
            worst = max(worst, lost)
            if not finite:
                job.losses[module.name] = math.inf  # NaN or infinite, as the source says
        job.losses[output.name] = worst
    return job.losses[output.name]
