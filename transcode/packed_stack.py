"""A packed stack, as the config describes it, taken apart into modules as the source wrote them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transcode.catalog import producers
from transcode.checkpoint import DTYPES, Checkpoint
from transcode.errors import FormatError
from transcode.header import BITS, TensorInfo, bytes_of
from transcode.module import Module
from transcode.producer import Format, Role
from transcode.spec import Layout
from transcode.stacks import GROUPS, rows_of


@dataclass(frozen=True)
class Unpack:
    """How a matrix lies in a packed one: see header.Cut, whose place it takes.

    members: how many were joined.  whole: rows and columns of what was packed.
    rows: its padded rows among those.  role: codes, scales or bias.
    kind: the result's dtype, of one byte but for a bias.
    lift: the power of two that scales were multiplied with.
    flushed: positions in `[n, k/group]` and bytes of scales that were stored as zero.
    """

    stored: tuple[int, ...]
    dtype: str
    layout: Layout
    members: int
    role: Role
    rows: slice
    whole: tuple[int, int]
    kind: torch.dtype
    lift: float = 1.0
    flushed: tuple[bytes, bytes] = (b"", b"")

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The matrix of this shape, without padding."""
        how = self.layout.joined(self.members)
        if self.role is Role.BIAS:
            assert how.bias is not None
            bias = how.bias.unpack(stored)[self.rows][: shape[0]]
            return bias.to(self.kind).contiguous()
        if self.role is Role.CODES:
            whole = how.codes.unpack(stored)
        else:
            whole = how.scales.unpack(stored, self.lift, self.whole).view(torch.uint8)
        mine = whole[self.rows][: shape[0], : shape[1]].contiguous()
        at, raw = self.flushed
        if at:
            places = torch.frombuffer(bytearray(at), dtype=torch.uint32).long()
            mine.view(-1)[places] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return mine.view(self.kind)


@dataclass(frozen=True)
class PackedStack:
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

    @property
    def leaves(self) -> Sequence[str]:
        """The members' leaf names."""
        found: Sequence[str] = self.size["members"]
        return found

    def modules(self) -> Iterator[Module]:
        """Every member of every group."""
        owners = {
            e: of
            for group in self.config["groups"]
            if group["name"] == self.name and group["how"] == "rescale"
            for e, of in zip(group["groups"], group["of"], strict=True)
        }
        found = [s for s in self.report["stacks"] if s["name"] == self.name]
        entry = found[0]
        _require_sizes(self.size)
        if entry["flushed"]["count"] != self.size["flushed"]:
            raise ValueError(f"{self.name}: the Report is of another folder")
        flushed = {f["module"]: f for f in entry["flushed"]["scales"]}
        missing = set(entry["missing_input_scales"])
        for e in range(self.size["experts"] or 1):
            for i in range(len(self.leaves)):
                name = self.member(e, i)
                no_input = name in missing
                yield self._module(name, e, i, owners.get(e, i), flushed.get(name), no_input)

    def member(self, e: int, i: int) -> str:
        """The name of a member."""
        prefix = self.name.rpartition(".")[0]
        number = "" if self.dense else str(e)
        return ".".join(filter(None, (prefix, number, self.leaves[i])))

    def _module(
        self, name: str, e: int, i: int, owner: int, flushed: Any, no_input: bool
    ) -> Module:
        n, k = self.size["n"][i], self.size["k"]
        format_ = _format(self.size["formats"][i])
        block = self.size["block"] and tuple(self.size["block"])
        dtypes = self.size["stored"][i]
        lifts = self.size["lift"]
        lift = float(lifts[e] if isinstance(lifts, list) else lifts)
        stem = f"{name}." if self.dense else f"{self.name}_"
        lost = _lost(flushed, n * k) if flushed else (b"", b"")
        width = k * self.layout.codes.bits // 8
        parts = {Role.CODES: self._part(stem + "weight", e, i, Role.CODES, dtypes, (n, width))}
        if stem + "source_weight_scale" not in self.checkpoint.tensors:
            columns = k // GROUPS[format_.encoding]
            parts[Role.SCALES] = self._part(
                stem + "weight_scale", e, i, Role.SCALES, dtypes, (n, columns), lift, lost
            )
        else:
            parts[Role.SCALES] = self._own(stem + "source_weight_scale", e, i)
        if self.layout.factor:
            owned = f"{self.member(e, owner)}." if self.dense else stem
            parts[Role.GLOBAL] = self._own(owned + "source_global_scale", e, owner)
        if stem + "source_input_scale" in self.checkpoint.tensors and not no_input:
            parts[Role.INPUT] = self._own(stem + "source_input_scale", e, i)
        if stem + "bias" in self.checkpoint.tensors:
            parts[Role.BIAS] = self._part(stem + "bias", e, i, Role.BIAS, dtypes, (n,))
        named = {role: replace(part, name=f"{name}.{format_.leaf(role) or 'bias'}")
                 for role, part in parts.items()}  # fmt: skip
        leaves = {format_.leaf(role) or "bias": part for role, part in named.items()}
        if self.layout.factor:
            factor = "weight_global_scale" if self.dense else "weight_scale_2"
            leaves["packed_global_scale"] = self.checkpoint.tensors[stem + factor]
        for scalar in self.layout.scalars:
            own = (
                f"{name}.{scalar.name}"
                if self.dense
                else f"{self.name.rpartition('.')[0]}.{scalar.name}"
            )
            if own in self.checkpoint.tensors:
                leaves[f"packed_{scalar.name}"] = self.checkpoint.tensors[own]
        for leaf in ("input_global_scale", "input_scale"):
            if stem + leaf in self.checkpoint.tensors:
                leaves["packed_input_scale"] = self.checkpoint.tensors[stem + leaf]
        if stem + "source_weight_scale" in self.checkpoint.tensors:
            leaves["packed_weight_scale"] = self.checkpoint.tensors[stem + "weight_scale"]
        for leaf in ("source_global_scale", "source_input_scale", "source_weight_scale"):
            if stem + leaf in self.checkpoint.tensors:
                leaves[leaf] = self.checkpoint.tensors[stem + leaf]
        return Module(name, format_.encoding, (n, k), leaves, format_, named, block)

    def _part(
        self, stored: str, e: int, i: int, role: Role, dtypes: Mapping[str, str],
        shape: tuple[int, ...], lift: float = 1.0, flushed: tuple[bytes, bytes] = (b"", b""),
    ) -> TensorInfo:  # fmt: skip
        """A member's rows of a packed tensor; a dense member has a tensor of its own."""
        info = self.checkpoint.tensors[stored]
        one = self._of(info, e)
        dtype = dtypes[role]
        if role is not Role.BIAS and BITS[dtype] != 8:
            raise ValueError(f"{stored}: {role} in {dtype}")
        rows = [self.size["padded_n"][i]] if self.dense else self.size["padded_n"]
        group = GROUPS.get(_format(self.size["formats"][i]).encoding, 1)
        cut = Unpack(
            one.shape, info.dtype, self.layout, len(rows), role, self._rows(i),
            (sum(rows), -(-self.size["padded_k"] // group)), DTYPES[dtype], lift, flushed,
        )  # fmt: skip
        nbytes = bytes_of(dtype, shape)
        return replace(one, dtype=dtype, shape=shape, nbytes=nbytes, part_of=info.name, cut=cut)

    def _rows(self, i: int) -> slice:
        """A member's padded rows."""
        padded = self.size["padded_n"]
        if self.dense:
            return slice(None)
        order: Any = self.config["w13_order"] if len(padded) > 1 else "gate_up"
        if order not in ("gate_up", "interleaved", "up_gate"):
            raise ValueError(f"w13_order {order!r}")
        return rows_of(padded, i, order)

    def _own(self, stored: str, e: int, i: int) -> TensorInfo:
        """What a source's module had, word for word."""
        info = self.checkpoint.tensors[stored]
        one = self._of(info, e)
        split = not self.dense and len(info.shape) > 1 and self.name.endswith(".w13")
        return replace(one.entry(i) if split else one, part_of=info.name)


def _require_sizes(size: Mapping[str, Any]) -> None:
    """Raise ValueError for sizes that are none."""
    rows, padded, block = size["n"], size["padded_n"], size["block"]
    pairs = [*zip(rows, padded, strict=True), (size["k"], size["padded_k"])]
    whole = all(type(n) is int and type(p) is int and 0 < n <= p < 1 << 31 for n, p in pairs)
    tiled = block is None or (len(block) == 2 and all(type(n) is int and n > 0 for n in block))
    if not whole or not tiled:
        raise ValueError(f"sizes {rows}, {padded}, {size['k']}, {size['padded_k']}, {block}")


def _lost(flushed: Mapping[str, Any], most: int) -> tuple[bytes, bytes]:
    """Positions and bytes of flushed scales; ValueError if they do not belong together."""
    at, raw = b64decode(flushed["at"]), b64decode(flushed["bytes"])
    places = torch.frombuffer(bytearray(at), dtype=torch.uint32).long() if at else torch.zeros(1)
    if len(at) != 4 * len(raw) or int(places.max()) >= most:
        raise ValueError(f"{flushed['module']}: flushed scales at impossible places")
    return at, raw


def _format(name: str) -> Format:
    """`modelopt-nvfp4` and the like, as a packed folder's config names its source's."""
    found = next((f for p in producers() for f in p.formats if f.name == name), None)
    if found is None:
        raise FormatError(f"{name}: no such format")
    return found
