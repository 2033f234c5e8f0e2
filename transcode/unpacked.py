"""A folder that was packed for a kernel, read back: its modules as the source wrote them.

Codes, block scales and biases are unpacked where they are read (`TensorInfo.cut`), without their
padding; scalars are the source's own, which are kept word for word. Block scales that the kernel's
bytes could not hold stand in the Report. What `rescale` rounded stays rounded, with the global
scale that it was rounded for; a fold is undone, since only scalars took part in it.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transcode.catalog import layouts, producer
from transcode.checkpoint import Checkpoint
from transcode.errors import CheckpointError, FormatError
from transcode.files import REPORT, read_json
from transcode.formats.canonical import VERSION
from transcode.header import TensorInfo, bytes_of
from transcode.module import Module, Recognised
from transcode.producer import Format, Role
from transcode.quant import Encoding
from transcode.recognise import recognise
from transcode.spec import Layout

_KERNEL = {False: "weight_scale_2", True: "weight_global_scale"}
"""The kernel's global scale, of stacked experts and of a dense linear."""

DEFAULT = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


@dataclass(frozen=True)
class Unpack:
    """How a matrix lies in a packed one: see header.Cut, whose place it takes.

    first, width: its columns of the stored words or bytes.  role: codes, scales or bias.
    lift: the power of two that scales were multiplied with.
    flushed: positions in `[n, k/16]` and E4M3 bytes of scales that were stored as zero.
    """

    stored: tuple[int, ...]
    dtype: str
    layout: Layout
    role: Role
    first: int
    width: int
    lift: float = 1.0
    flushed: tuple[bytes, bytes] = (b"", b"")

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The matrix of this shape, without padding."""
        mine = stored[..., self.first : self.first + self.width].contiguous()
        if self.role is Role.BIAS:
            return self.layout.unpack_bias(mine)[: shape[0]]
        if self.role is Role.CODES:
            return self.layout.unpack_codes(mine)[: shape[0], : shape[1]].contiguous()
        scales = self.layout.unpack_scales(mine, self.lift).view(torch.uint8)
        scales = scales[: shape[0], : shape[1]].contiguous()
        at, raw = self.flushed
        if at:
            places = torch.frombuffer(bytearray(at), dtype=torch.uint32).long()
            scales.view(-1)[places] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return scales.view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Rescaled:
    """The global scale that a group's block scales were rounded for, from the kernel's own.

    constant: what the kernel's is to the factor, a power of two.  divisor: the source's sense.
    """

    stored: tuple[int, ...]
    dtype: str
    constant: float
    divisor: bool

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`[]` float32."""
        factor = (stored.double() / self.constant).float()
        return (1.0 / factor if self.divisor else factor).reshape(shape)


def opened(path: Path) -> tuple[Checkpoint, Recognised]:
    """A checkpoint and its modules; of a packed folder, as its source had them."""
    checkpoint = Checkpoint.open(path)
    config = packed_config(checkpoint.config)
    if config is None:
        _require_version(checkpoint)
        return checkpoint, recognise(checkpoint)
    modules = unpacked(checkpoint, config)
    source, used = config.get("source"), {t.stored_name for m in modules.values() for t in _all(m)}
    rest = {name: t for name, t in checkpoint.tensors.items() if name not in used}
    described = {**checkpoint.config, "quantization_config": source}
    others = config.get("source_others")
    aside = others.get("hf_quant_config.json") if isinstance(others, dict) else None
    if config.get("source_file") == "hf_quant_config.json":
        aside = source
        del described["quantization_config"]
    kept = (note for note in checkpoint.notes if not note.startswith("experts-"))
    as_source = replace(
        checkpoint,
        config=described,
        hf_quant_config=aside if isinstance(aside, dict) else None,
        notes=(*kept, *_rounded(checkpoint)),
    )
    found = recognise(replace(as_source, tensors=rest))
    return as_source, Recognised(found.modules | modules, found.problems)


def _require_version(checkpoint: Checkpoint) -> None:
    """Raise FormatError for our own form in a version that is not known here."""
    config = checkpoint.config.get("quantization_config")
    ours = isinstance(config, dict) and producer("canonical").claims(config)
    if config and ours and config.get("layout_version") != VERSION:
        version = config.get("layout_version")
        raise FormatError(f"canonical version {version}, wanted {VERSION}")


def _rounded(checkpoint: Checkpoint) -> Iterator[str]:
    """What packing rounded, which does not come back."""
    report = _report(checkpoint)
    scales = sum(int(s.get("rounded_scales") or 0) for s in report.get("stacks", ()))
    if scales:
        yield f"{scales} block scales were rounded when it was packed; they stay so"
    if biases := report.get("rounded_biases"):
        yield f"{len(biases)} biases were rounded when it was packed; they stay so"


def _all(module: Module) -> Iterator[TensorInfo]:
    yield from module.parts.values()
    yield from module.leaves.values()


def require_packed(path: Path) -> None:
    """Raise FormatError for a folder that is not packed for a kernel."""
    if packed_config(read_json(path / "config.json")) is None:
        raise FormatError(f"{path}: --kernel is for folders that are packed for a kernel")


def packed_config(whole: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a config.json that this program wrote for a kernel; None in any other."""
    config = whole.get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "transcode":
        return None
    layout = config.get("layout")
    return config if isinstance(layout, str) and layout in layouts() else None


def unpacked(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Module]:
    """The packed modules; FormatError for a layout version or a config that is not ours."""
    layout = layouts()[config["layout"]]
    if config.get("layout_version") != layout.version:
        raise FormatError(
            f"{layout.name} version {config.get('layout_version')}, wanted {layout.version}"
        )
    report = _report(checkpoint)
    if scaled := report.get("scaled"):
        raise FormatError(f"{next(iter(scaled))} was scaled by a fold, which is not undone here")
    try:
        found = [
            module
            for name, size in config["sizes"].items()
            for module in _Stack(checkpoint, layout, name, size, config, report).modules()
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"the config of a packed folder is not ours: {error!r}") from None
    return {module.name: module for module in found}


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return read_json(checkpoint.path / REPORT)
    except CheckpointError as error:
        raise FormatError(f"a packed folder is read back with its Report: {error}") from None


@dataclass(frozen=True)
class _Stack:
    """A stack as the config describes it."""

    checkpoint: Checkpoint
    layout: Layout
    name: str
    size: Mapping[str, Any]
    config: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def dense(self) -> bool:
        """Whether every member has tensors of its own, and there are no experts."""
        return self.size["experts"] is None

    def _of(self, info: TensorInfo, e: int) -> TensorInfo:
        """An expert's entry of a stacked tensor; a dense member's is its own."""
        return info if self.dense else info.entry(e)

    def modules(self) -> Iterator[Module]:
        """Every member of every group."""
        prefix, _, last = self.name.rpartition(".")
        experts = self.size["experts"]
        leaves = self.size.get("members") or DEFAULT.get(last) or last.split("+")
        rescaled = {
            e
            for group in self.config["groups"]
            if group["name"] == self.name and group["how"] == "rescale"
            for e in group["groups"]
        }
        entry: Mapping[str, Any] = next(
            (s for s in self.report["stacks"] if s["name"] == self.name), {}
        )
        flushed = {f["module"]: f for f in entry.get("flushed", {}).get("scales", ())}
        missing = set(entry.get("missing_input_scales", ()))
        for e in range(experts or 1):
            for i, leaf in enumerate(leaves):
                name = ".".join(filter(None, (prefix, str(e) if experts else "", leaf)))
                yield self._module(name, e, i, e in rescaled, flushed.get(name), name in missing)

    def _module(
        self, name: str, e: int, i: int, rescaled: bool, flushed: Any, no_input: bool
    ) -> Module:
        n, k = self.size["n"][i], self.size["k"]
        format_ = _format(self.size["formats"][0])
        lifts = self.size["lift"]
        lift = float(lifts[e] if isinstance(lifts, list) else lifts)
        stem = f"{name}." if self.dense else f"{self.name}_"
        lost = (b64decode(flushed["at"]), b64decode(flushed["bytes"])) if flushed else (b"", b"")
        parts = {
            Role.CODES: self._part(stem + "weight", e, i, Role.CODES, "U8", (n, k // 2)),
            Role.SCALES: self._part(
                stem + "weight_scale", e, i, Role.SCALES, "F8_E4M3", (n, k // 16),
                lift, lost,
            ),
            Role.GLOBAL: self._scalar(stem + "source_global_scale", e, i),
        }  # fmt: skip
        kernel = self.checkpoint.tensors[stem + _KERNEL[self.dense]]
        if rescaled:
            parts[Role.GLOBAL] = self._rescaled(kernel, e, lift, format_)
        if stem + "source_input_scale" in self.checkpoint.tensors and not no_input:
            parts[Role.INPUT] = self._scalar(stem + "source_input_scale", e, i)
        if stem + "bias" in self.checkpoint.tensors:
            dtype = self.checkpoint.tensors[stem + "bias"].dtype
            parts[Role.BIAS] = self._part(stem + "bias", e, i, Role.BIAS, dtype, (n,))
        named = {role: replace(part, name=f"{name}.{format_.leaf(role) or 'bias'}")
                 for role, part in parts.items()}  # fmt: skip
        leaves = {format_.leaf(role) or "bias": part for role, part in named.items()}
        leaves["packed_global_scale"] = kernel
        for leaf in ("source_global_scale", "source_input_scale"):
            if stem + leaf in self.checkpoint.tensors:
                leaves[leaf] = self.checkpoint.tensors[stem + leaf]
        return Module(name, Encoding.NVFP4, (n, k), leaves, format_, named)

    def _part(
        self, stored: str, e: int, i: int, role: Role, dtype: str, shape: tuple[int, ...],
        lift: float = 1.0, flushed: tuple[bytes, bytes] = (b"", b""),
    ) -> TensorInfo:  # fmt: skip
        """A member's columns of a packed tensor; a dense member has a tensor of its own."""
        info = self.checkpoint.tensors[stored]
        one = self._of(info, e)
        rows, k = self.size["padded_n"], self.size["padded_k"]
        widths = [n if role is not Role.CODES else self.layout.weight_shape(n, k)[1] for n in rows]
        first = 0 if self.dense else sum(widths[:i])
        cut = Unpack(one.shape, info.dtype, self.layout, role, first, widths[i], lift, flushed)
        nbytes = bytes_of(dtype, shape)
        return replace(one, dtype=dtype, shape=shape, nbytes=nbytes, part_of=info.name, cut=cut)

    def _scalar(self, stored: str, e: int, i: int) -> TensorInfo:
        """A source's scalar, word for word."""
        info = self.checkpoint.tensors[stored]
        one = self._of(info, e)
        one = one.entry(i) if one.shape else one
        return replace(one, part_of=info.name)

    def _rescaled(self, info: TensorInfo, e: int, lift: float, format_: Format) -> TensorInfo:
        """The global scale of a group whose block scales were rounded, from the kernel's."""
        one = self._of(info, e)
        constant = self.layout.pack_global(
            torch.ones(1), torch.tensor([lift]), self.config["activation_dtype"]
        )
        divisor = format_.leaves[Role.GLOBAL].divisor
        cut = Rescaled(one.shape, "F32", float(constant), divisor)
        return replace(one, part_of=info.name, cut=cut)


def _format(name: str) -> Format:
    """`modelopt-nvfp4` and the like, as a packed folder's config names its source's."""
    format_ = producer(name.removesuffix("-nvfp4")).format(Encoding.NVFP4)
    if format_ is None:
        raise FormatError(f"{name}: no such format")
    return format_
