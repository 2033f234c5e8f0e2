"""Modules whose encoding changes, seen as if the source had them so.

`recoded` gives modules whose parts are made when they are read (`TensorInfo.made`), so nothing
after it knows that they were not stored: layouts pack them, forms write them. Headers alone say
their names, dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transcode import change, quantise
from transcode.catalog import producer
from transcode.checkpoint import DTYPES, Reader
from transcode.errors import FormatError, Mismatch
from transcode.header import TensorInfo, bytes_of
from transcode.inputs import InputScale
from transcode.module import Module
from transcode.producer import E8M0, Role
from transcode.quant import Encoding, QuantTensor, exponents
from transcode.requantise import largest, meaning, mxfp4_to_fp8, requantised
from transcode.settle_e8m0 import prepare
from transcode.settled import require_over_zeros
from transcode.unify import read_scalars

BLOCK = (128, 128)
"""The tiles of FP8 that are written; the last ones may be cut."""

LEAST = -118
"""The least exponent for a global scale: 2^(k - 8) and its reciprocal are normal float32."""

FOUR = (Encoding.NVFP4, Encoding.MXFP4)
"""What has two codes a byte."""

EIGHT = (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK)

EXACT = {
    Encoding.MXFP4: (Encoding.FP8_BLOCK, Encoding.NVFP4, Encoding.MXFP8),
    Encoding.NVFP4: (Encoding.MXFP4,),
    Encoding.NVFP4_32: (Encoding.NVFP4,),
}
"""What an encoding may become without loss, if its scales allow it."""

ALWAYS = ((Encoding.MXFP4, Encoding.MXFP8), (Encoding.NVFP4_32, Encoding.NVFP4))
"""What is exact whatever the scales."""


@dataclass(frozen=True, eq=False)
class Recoded:
    """A module in another encoding, or FP8 tiles whose scales become powers of two.

    shared: all modules that have one global scale (FP8_TENSOR: one scale) with it.
    powers: whether scales of FP8 tiles have to be powers of two.
    search: how block scales are chosen (quantise.py).
    """

    module: Module
    encoding: Encoding
    shared: tuple[Module, ...]
    powers: bool = False
    search: str = "mse"

    @property
    def block(self) -> tuple[int, int]:
        """The tiles of FP8: the module's own, if it has any."""
        return self.module.block or BLOCK

    def made(self, read: Reader) -> QuantTensor:
        """The matrix in the new encoding, on the CPU."""
        made: QuantTensor = moved(self.both(read)[1], torch.device("cpu"))
        return made

    def both(self, read: Reader) -> tuple[QuantTensor | Tensor, QuantTensor]:
        """The source and the matrix in the new encoding, on the reader's device; the last ones are
        kept. FormatError for a source with values that are no finite numbers."""
        kept = read.memo.get("recoded")
        if kept is None or kept[0] is not self:
            source = moved(source_of(self.module, read), read.device)
            if not torch.isfinite(largest(source)):
                raise FormatError(f"{self.module.name} has values that are not finite")
            made = self._cast(source, read) or self._rounded(source, read)
            if self.surely_exact(read) and not torch.equal(made.dequantize(), meaning(source)):
                raise Mismatch(f"{self.module.name}: values change, though its scales allow all")
            read.memo["recoded"] = kept = self, (source, made)
        found: tuple[QuantTensor | Tensor, QuantTensor] = kept[1]
        return found

    def _cast(self, source: QuantTensor | Tensor, read: Reader) -> QuantTensor | None:
        """What is made from codes, not from values; None if nothing is."""
        if isinstance(source, Tensor):
            return None
        match source.encoding, self.encoding:
            case Encoding.MXFP4, Encoding.MXFP8:
                return change.mxfp4_to_mxfp8(source)
            case Encoding.MXFP4, Encoding.NVFP4:
                return change.mxfp4_to_nvfp4(source, self.exponent(read))
            case Encoding.MXFP4, Encoding.FP8_BLOCK:
                return mxfp4_to_fp8(source, self.block)
            case Encoding.NVFP4_32, Encoding.NVFP4:
                return change.halved(source)
        stays = source.encoding is self.encoding and change.are_powers(source.scales)
        return source if stays else None

    def _rounded(self, source: QuantTensor | Tensor, read: Reader) -> QuantTensor:
        factor = None
        if self.encoding is Encoding.NVFP4:
            factor = self.factor(read)
        elif self.encoding is Encoding.FP8_TENSOR:
            factor = quantise.fp8_scale(self._largest(read))
        return requantised(
            source, self.encoding, search=self.search, factor=factor, block=self.block,
            powers=self.powers,
        )  # fmt: skip

    def factor(self, read: Reader) -> Tensor:
        """NVFP4's global scale, `[]` float32."""
        if self.module.encoding is Encoding.NVFP4_32:
            return read_scalars(self.module, read).factor
        if self.module.encoding is Encoding.MXFP4:
            return change.nvfp4_factor(self.exponent(read))
        return quantise.nvfp4_factor(self._largest(read))

    def exponent(self, read: Reader) -> int:
        """MXFP4's largest exponent of those that share a global scale, NaN over zeros apart."""
        found = self._shared(read, lambda m: float(change.top(prepare(m, read))))
        return max(int(found), LEAST)

    def _largest(self, read: Reader) -> Tensor:
        """The largest magnitude of the modules that share a scale, `[]` float32."""
        return torch.tensor(
            self._shared(read, lambda m: float(largest(moved(source_of(m, read), read.device))))
        )

    def _shared(self, read: Reader, of: Callable[[Module], float]) -> float:
        """The largest of a number that is found once for all that share a scale."""
        kept: dict[int, float] = read.memo.setdefault("largest", {})
        if id(self.shared) not in kept:
            kept[id(self.shared)] = max(of(module) for module in self.shared)
        return kept[id(self.shared)]

    def surely_exact(self, read: Reader) -> bool:
        """Whether the scales alone tell that every value stays."""
        source, target = self.module.encoding, self.encoding
        if source is target:
            return change.are_powers(read.tensor(self.module.scales))
        if (source, target) in ALWAYS:
            return True
        if source is not Encoding.MXFP4 or target not in EXACT[source]:
            return False
        scales = prepare(self.module, read)
        if (scales == 0).any():  # blocks of zeros, or numbers that no one counts on
            return False
        if target is Encoding.NVFP4:
            return self.exponent(read) - change.deep(scales) <= change.DEEP4
        return change.top(scales) - change.deep(scales) <= change.DEEP8


def source_of(module: Module, read: Reader) -> QuantTensor | Tensor:
    """A module as its source has it, NaN scales over zeros being 0; `[N, K]` floats if it is not
    quantised."""
    if module.encoding is Encoding.UNQUANTISED:
        return read.tensor(module.leaf("weight"))
    if module.encoding in (Encoding.MXFP4, Encoding.MXFP8):
        scales = prepare(module, read)
    else:
        scales = read.tensor(module.scales)
        if (scales.float() < 0).any():
            raise FormatError(f"{module.scales.name} has negative scales")
    factor = read_scalars(module, read).factor if Role.GLOBAL in module.parts else None
    nan = scales.float().isnan() if factor is not None and factor > 0 else None
    if nan is not None and nan.any():
        require_over_zeros(module, nan, read)
    codes = read.tensor(module.codes)
    return QuantTensor(module.encoding, codes, scales, factor, module.block)


def moved(of: QuantTensor | Tensor, device: torch.device) -> Any:
    """A matrix on another device; its global scale stays on the CPU."""
    if isinstance(of, Tensor):
        return of.to(device)
    return replace(of, codes=of.codes.to(device), scales=of.scales.to(device))


@dataclass(frozen=True)
class Part:
    """One tensor of a recoded module, in place of stored bytes."""

    recoded: Recoded
    role: Role
    dtype: torch.dtype

    def make(self, read: Reader) -> Tensor:
        """The tensor in its logical shape."""
        if self.role is Role.GLOBAL:
            return self.recoded.factor(read)
        made = self.recoded.made(read)
        return made.codes if self.role is Role.CODES else _as(made.scales, self.dtype)


def _as(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the dtype that is stored: bytes as they are, powers of two as E8M0."""
    if scales.dtype == dtype or scales.element_size() == dtype.itemsize == 1:
        return scales.view(dtype)
    if dtype.itemsize == 1:
        return exponents(scales).view(dtype)
    return scales.to(dtype)


def virtual(recoded: Recoded, scales_dtype: str, input_scale: InputScale | None) -> Module:
    """A module whose parts are made when they are read.

    scales_dtype: of FP8 tiles' scales.  input_scale: its activations', None where it has none.
    """
    module, encoding = recoded.module, recoded.encoding
    n, k = module.shape
    form = producer("canonical").format(encoding)
    assert form is not None
    codes = ("U8", (n, k // 2)) if encoding in FOUR else ("F8_E4M3", (n, k))
    kinds: dict[Role, tuple[str, tuple[int, ...]]] = {Role.CODES: codes}
    block = recoded.block if encoding is Encoding.FP8_BLOCK else None
    match encoding:
        case Encoding.NVFP4:
            kinds[Role.SCALES] = "F8_E4M3", (n, k // 16)
            kinds[Role.GLOBAL] = "F32", ()
        case Encoding.MXFP4 | Encoding.MXFP8:
            kinds[Role.SCALES] = "U8", (n, k // 32)
        case Encoding.FP8_TENSOR:
            kinds[Role.SCALES] = "F32", ()
        case Encoding.FP8_CHANNEL:
            kinds[Role.SCALES] = "F32", (n,)
    if block:
        kinds[Role.SCALES] = scales_dtype, (-(-n // block[0]), -(-k // block[1]))
    parts = {role: _part(recoded, role, *kind) for role, kind in kinds.items()}
    if input_scale is not None:
        parts[Role.INPUT] = replace(
            parts[Role.CODES], name=f"{module.name}.input_scale", dtype="F32", shape=(), nbytes=4,
            made=input_scale,
        )  # fmt: skip
    if "bias" in module.leaves:
        parts[Role.BIAS] = module.leaf("bias")
    leaves = {form.leaf(role) or "bias": part for role, part in parts.items()}
    return Module(module.name, encoding, module.shape, leaves, form, parts, block, module)


def _part(recoded: Recoded, role: Role, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    module = recoded.module
    stored = module.parts.get(Role.CODES) or module.leaf("weight")
    return replace(
        stored, name=f"{module.name}.{role}", dtype=dtype, shape=shape,
        nbytes=bytes_of(dtype, shape), part_of=stored.stored_name, cut=None,
        made=Part(recoded, role, DTYPES[dtype]),
    )  # fmt: skip


def stored_dtype(modules: Mapping[str, Module]) -> str:
    """The dtype of FP8 tiles' scales: E8M0 where the checkpoint's own are, else F32."""
    own = {m.scales.dtype for m in modules.values() if m.encoding is Encoding.FP8_BLOCK}
    return "F8_E8M0" if own and own <= set(E8M0) else "F32"
