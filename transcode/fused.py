"""Experts that are stacked in one tensor, seen as if each had tensors of its own.

`expand` gives every expert's projections names and leaves as the producer writes them one by one;
the parts know where their bytes lie (`TensorInfo.cut`), so nothing after this sees stacked experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from transcode.errors import FormatError
from transcode.header import Cut, TensorInfo, bytes_of
from transcode.names import Stacked, family
from transcode.producer import FLOATS, Fusion, Producer, Role, Shape

STACKED = re.compile(r"(?P<container>.+\.experts)\.(?P<tensor>[a-z]\w*)")
"""A tensor right under `...experts`: no expert's number, no module's name in between."""

PAIRED = re.compile(r"(?P<expert>.+\.experts\.\d+)\.gate_up_proj\.(?P<leaf>\w+)")
"""Quark's gpt-oss: gate and up of an expert in one linear, rows alternating."""

LEAVES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""What the projections of stacked experts are called where nothing else is known."""


def expand(
    tensors: Mapping[str, TensorInfo],
    producers: tuple[Producer, ...],
    model_type: str,
    names: Mapping[str, tuple[str, ...]],
    hidden: int,
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors with stacked quantised experts taken apart, and why some could not be.

    names: the leaves of (gate,) up, down by container, where a config keeps them.
    hidden: the model's hidden size, 0 if the config has none.
    """
    found, wrong = dict[str, TensorInfo](), dict[str, str]()
    stacked: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = STACKED.fullmatch(name)
        pair = PAIRED.fullmatch(name) if model_type == "gpt_oss" else None
        if match:
            stacked.setdefault(match["container"], {})[match["tensor"]] = info
        elif pair:
            try:
                found |= {t.name: t for t in _pair(info, pair["expert"], pair["leaf"])}
            except FormatError as error:
                wrong[name] = str(error)
        else:
            found[name] = info
    for container, parts in stacked.items():
        apart = list[TensorInfo]()
        if fusion := _fitting(parts, producers, model_type):
            try:
                turned = _Turned(fusion, model_type, hidden)
                apart = [*_apart(container, parts, turned, names.get(container))]
            except FormatError as error:
                wrong[container] = str(error)
        used = {info.part_of for info in apart}
        found |= {t.name: t for t in parts.values() if t.name not in used}
        for part in apart:
            if part.name in found:
                wrong[part.name] = f"stands by itself and in {part.part_of}"
            found[part.name] = part
    return found, wrong


def unquantised(
    tensors: Mapping[str, TensorInfo], model_type: str, hidden: int
) -> dict[str, dict[str, TensorInfo]]:
    """Experts that a family's own checkpoints keep stacked and not quantised: `{module: {leaf:
    tensor}}`, one by one."""
    own = family(model_type).fused
    if own is None:
        return {}
    fusion, stacks = plainly(own), dict[str, dict[str, TensorInfo]]()
    tails = [stem + suffix for stem in (fusion.up, fusion.down) for suffix in ("", "_bias")]
    for name, info in tensors.items():
        for tail in tails:
            head = name.removesuffix(f".{tail}")
            container = f"{head}.experts" if fusion.beside else head
            if head != name and container.endswith(".experts") and info.dtype in FLOATS:
                stacks.setdefault(container, {})[tail] = info
    found = dict[str, dict[str, TensorInfo]]()
    for container, parts in stacks.items():
        if any(len(parts[s].shape) != 3 for s in (fusion.up, fusion.down) if s in parts):
            continue  # something else of this name
        for part in _apart(container, parts, _Turned(fusion, model_type, hidden), None):
            module, _, leaf = part.name.rpartition(".")
            found.setdefault(module, {})[leaf] = part
    return found


def plainly(own: Stacked) -> Fusion:
    """How a family's own checkpoints stack experts that are not quantised."""
    return Fusion(
        own.gate_up.removeprefix("experts."),
        own.down.removeprefix("experts."),
        {Role.CODES: "", Role.BIAS: "_bias"},
        {Role.CODES: "weight", Role.BIAS: "bias"},
        own.transposed,
        own.interleaved,
        beside=not own.gate_up.startswith("experts."),
    )


def _pair(info: TensorInfo, expert: str, leaf: str) -> Iterator[TensorInfo]:
    """An expert's gate and up: alternating rows of the joined linear; a scalar is both's."""
    for i, half in enumerate(("gate", "up")):
        name = f"{expert}.{LEAVES[half]}.{leaf}"
        if prod(info.shape) == 1:
            part = replace(info, shape=())
        else:
            part = _rows(info, info.shape, i, 2, turned=False, interleaved=True)
        yield replace(part, name=name, part_of=info.name)


def _fitting(
    parts: Mapping[str, TensorInfo], producers: tuple[Producer, ...], model_type: str
) -> Fusion | None:
    """The fusion whose quantised codes and scales are there; the model type's before any other."""
    choices = (p.fusions.get(key) for key in (model_type, "") for p in producers)
    for fusion in choices:
        if fusion is None:
            continue
        for stem in (fusion.up, fusion.down):
            codes = parts.get(stem + fusion.suffixes[Role.CODES])
            scaled = stem + fusion.suffixes[Role.SCALES] in parts
            if codes and scaled and codes.dtype in ("U8", "I8", "F8_E4M3"):
                return fusion
    return None


@dataclass(frozen=True)
class _Stem:
    """One of the two tensors: how many experts, the halves of its rows, how its codes lie."""

    experts: int
    halves: tuple[str, ...]
    transposed: bool


def _apart(
    container: str,
    parts: Mapping[str, TensorInfo],
    turned: _Turned,
    names: tuple[str, ...] | None,
) -> Iterator[TensorInfo]:
    """Every expert's tensors."""
    fusion = turned.fusion
    roles = ("gate", "up", "down")[-len(names) :] if names else tuple(LEAVES)
    leaves = dict(zip(roles, names or LEAVES.values(), strict=True))
    for stem, halves in ((fusion.up, roles[:-1]), (fusion.down, ("down",))):
        codes = parts.get(stem + fusion.suffixes[Role.CODES])
        if codes is None:
            continue
        if len(codes.shape) != 3 + len(fusion.tail) or not codes.nbytes:
            raise FormatError(f"{codes}: wanted the codes of stacked experts, [E, ...]")
        suffix = fusion.suffixes.get(Role.SCALES)
        scales = parts.get(stem + suffix) if suffix else None
        how = _Stem(codes.shape[0], halves, turned.of(codes, scales, up=stem == fusion.up))
        for role, suffix in fusion.suffixes.items():
            info = parts.get(stem + suffix)
            for e in range(how.experts if info else 0):
                for i, half in enumerate(halves):
                    assert info is not None
                    name = f"{container}.{e}.{leaves[half]}.{fusion.leaves[role]}"
                    part = _part(info, e, i, how, role, fusion)
                    yield replace(part, name=name, part_of=info.name)


@dataclass(frozen=True)
class _Turned:
    """Whether codes lie `[E, K, N]`: block scales tell, else the hidden size, else the family."""

    fusion: Fusion
    model_type: str
    hidden: int

    def of(self, codes: TensorInfo, scales: TensorInfo | None, *, up: bool) -> bool:
        """FormatError where nothing tells."""
        if self.fusion.tail or self.fusion.up == "w13":
            return self.fusion.transposed
        _, a, b = codes.shape
        if scales and len(scales.shape) == 3 and _small(scales):
            _, c, d = scales.shape
            rows, columns = a == c and b > d, b == d and a > c
        else:
            packed = 2 if codes.dtype in ("U8", "I8") else 1
            rows = self.hidden == (b * packed if up else a)
            columns = self.hidden == (a * packed if up else b)
        if rows != columns:
            return columns
        own = family(self.model_type).fused
        if own is None:
            raise FormatError(f"{codes}: which axis is hidden ({self.hidden or 'not told'})?")
        return own.transposed


def _small(scales: TensorInfo) -> bool:
    """Whether the scales are of blocks along K: E4M3 or E8M0, not floats for each row."""
    return scales.dtype in ("U8", "F8_E8M0", "F8_E4M3")


def _part(
    info: TensorInfo, e: int, half: int, how: _Stem, role: Role, fusion: Fusion
) -> TensorInfo:
    """The half of one expert, in the shape that it has by itself."""
    halves = len(how.halves)
    scalar = prod(info.shape) == 1 and how.experts * halves > 1
    if role is not Role.CODES and (scalar or not info.shape):
        return replace(info, shape=())
    if not info.shape or info.shape[0] != how.experts:
        raise FormatError(f"{info}: wanted {how.experts} experts")
    one = info.entry(e)
    matrix = len(one.shape) > 1 or role is Role.CODES
    if not matrix and role is not Role.BIAS and prod(one.shape) in (1, halves):
        return _scalar(one, half)
    shape = one.shape
    if role is Role.CODES and fusion.tail:
        shape = (shape[0], prod(shape[1:]))
    turned = how.transposed and len(shape) == 2 and role in (Role.CODES, Role.SCALES)
    return _rows(one, shape, half, halves, turned=turned, interleaved=fusion.interleaved)


def _scalar(one: TensorInfo, half: int) -> TensorInfo:
    """An expert's scalar: its only one, or the half's."""
    count = prod(one.shape)
    size = one.nbytes // count
    return replace(one, shape=(), nbytes=size, start=one.start + half * size * (count > 1))


def _rows(
    one: TensorInfo, stored: Shape, half: int, halves: int, *, turned: bool, interleaved: bool
) -> TensorInfo:
    """A half's rows of an expert's `stored` shape."""
    n, *rest = stored[::-1] if turned else stored
    if n % halves:
        raise FormatError(f"{one}: {n} rows are not {halves} halves")
    shape = (n // halves, *rest)
    nbytes = bytes_of(one.dtype, shape)
    if interleaved and halves > 1:
        cut = Cut(stored, turned, half, halves)
    elif turned:
        cut = Cut(stored, turned, half * shape[0])
    else:
        return replace(one, shape=shape, nbytes=nbytes, start=one.start + half * nbytes)
    return replace(one, shape=shape, nbytes=nbytes, cut=cut)
