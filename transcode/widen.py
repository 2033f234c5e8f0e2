"""Experts padded by zeros, in a plain form, so that more ranks get whole tiles (`--pad-for-tp`).

Runtimes share out gate and up by rows and down by columns. Rows of zeros in gate and up give
`act(0) * 0`, which is 0 in every family here, and down's new columns are zero as well: what the
experts compute stays, term by term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transcode.checkpoint import Checkpoint, Reader
from transcode.errors import FormatError
from transcode.expert_width import Widths, widths
from transcode.fold import normed
from transcode.fused import unquantised
from transcode.header import TensorInfo, bytes_of
from transcode.module import Module
from transcode.names import address
from transcode.producer import Role
from transcode.quant import Encoding

UNIT = 64
"""A rank's width is a multiple of it: Marlin's narrowest tile along N (vllm-project/vllm,
marlin_utils.py, GPTQ_MARLIN_MIN_THREAD_N), and whole blocks of 16 and 32. FP8 tiles: the tile's."""


@dataclass(frozen=True)
class Wider:
    """A tensor with more rows and columns: codes and biases of zero; scales of 0 where those are
    bytes (NVFP4's, E8M0's: no largest one changes, a block of zeros means zero), and the matrix's
    own smallest one where they are floats (powers of two stay such)."""

    of: TensorInfo
    shape: tuple[int, ...]
    scales: bool

    def make(self, read: Reader) -> Tensor:
        """The padded tensor."""
        value = read.tensor(self.of)
        raw = value.view(torch.uint8) if value.element_size() == 1 else value
        floats = self.scales and value.element_size() > 1
        fill = raw.min() if floats else torch.zeros((), dtype=raw.dtype)
        wide = fill.expand(self.shape).clone()
        wide[tuple(slice(n) for n in raw.shape)] = raw
        return wide.view(value.dtype)


def widened(
    checkpoint: Checkpoint, modules: Mapping[str, Module], ranks: int
) -> tuple[dict[str, Module], dict[str, int]]:
    """All modules, experts so wide that `ranks` share them evenly; and the config's new sizes.

    FormatError where the config has no key for the width, or something that is not quantised would
    have to be widened too.
    """
    if ranks == 1:
        return dict(modules), {}
    config = checkpoint.text_config
    experts = [m for m in modules.values() if address(m.name).expert is not None]
    live = [m for m in experts if m.encoding is not Encoding.UNQUANTISED]
    if not live:
        raise FormatError("--pad-for-tp: no quantised experts")
    width = _width(live[0])
    others = [address(m.name) for m in modules.values() if _mlp(m) and m not in experts]
    rule = widths(
        config,
        width,
        shared=any(where.shared for where in others),
        dense=any(not where.shared for where in others),
    )
    units = {_unit(m) for m in live}
    step = ranks * max(units)
    wide = -(-width // step) * step
    if wide == width:
        return dict(modules), {}
    found = dict(modules)
    for module, size in _concerned(checkpoint, modules, rule, width, wide):
        if module.encoding in (Encoding.UNQUANTISED, Encoding.INT4):
            raise FormatError(
                f"{module.name} is {module.encoding} and would have to be widened too, since "
                f"{rule.key} is its width as well: not done here"
            )
        found[module.name] = _wider(module, size)
    hidden = config.get("hidden_size")
    stacked = unquantised(
        checkpoint.tensors,
        str(config.get("model_type")),
        hidden if isinstance(hidden, int) else 0,
    )
    if left := next((name for name in stacked if name not in found), ""):
        raise FormatError(f"{left} is not quantised and would have to be widened too")
    return found, {rule.key: wide}


def _unit(module: Module) -> int:
    block = module.block if module.encoding is Encoding.FP8_BLOCK else None
    return max(UNIT, *block) if block else UNIT


def _width(module: Module) -> int:
    """Down's columns, the others' rows."""
    return module.shape[1 if address(module.name).projection == "down" else 0]


def _mlp(module: Module) -> bool:
    return len(module.shape) == 2 and bool(address(module.name).projection)


def _concerned(
    checkpoint: Checkpoint, modules: Mapping[str, Module], rule: Widths, width: int, wide: int
) -> Iterator[tuple[Module, int]]:
    """The modules whose width follows from the routed experts', and their new one."""
    config, inner_norms = checkpoint.text_config, normed(checkpoint)
    told = config.get(rule.shared)
    count = told if isinstance(told, int) else 1
    for module in modules.values():
        if not _mlp(module):
            continue
        where, mine = address(module.name), _width(module)
        if where.parent in inner_norms:
            raise FormatError(f"{where.parent} has a norm inside, which padding would change")
        if where.expert is not None:
            if mine != width:
                raise FormatError(f"{module.name} is {mine} wide, other experts {width}")
            yield module, wide
        elif where.shared and rule.shared not in ("none", "own"):
            if mine != count * width:
                said = f"{rule.shared} {told}" if told is not None else "one expert"
                raise FormatError(
                    f"{module.name} is {mine} wide, the config says {said} of {width}"
                )
            yield module, count * wide
        elif where.shared and rule.shared == "none":
            raise FormatError(f"{module.name}: a shared expert, and the family has none")


def _wider(module: Module, width: int) -> Module:
    """A module with more rows, or more columns if it is a down projection."""
    n, k = module.shape
    down = address(module.name).projection == "down"
    shape = (n, width) if down else (width, k)
    block = (module.block if module.encoding is Encoding.FP8_BLOCK else None) or (1, 1)
    parts = dict[Role, TensorInfo]()
    for role, info in module.parts.items():
        size = info.shape
        if role in (Role.CODES, Role.SCALES) and len(size) == 2:
            tall = -(-shape[0] // block[0]) if role is Role.SCALES else shape[0]
            per = k // size[1] if block == (1, 1) or role is Role.CODES else block[1]
            size = (tall, -(-shape[1] // per))
        elif role in (Role.SCALES, Role.BIAS) and len(size) == 1 and not down:
            size = (shape[0],)
        parts[role] = info if size == info.shape else _padded(info, role, size)
    names = {id(old): parts[role] for role, old in module.parts.items()}
    leaves = {leaf: names.get(id(info), info) for leaf, info in module.leaves.items()}
    if Role.BIAS in parts:
        leaves["bias"] = parts[Role.BIAS]
    return replace(module, shape=shape, parts=parts, leaves=leaves)


def _padded(info: TensorInfo, role: Role, shape: tuple[int, ...]) -> TensorInfo:
    made = Wider(info, shape, role is Role.SCALES)
    return replace(
        info, shape=shape, nbytes=bytes_of(info.dtype, shape), part_of=info.stored_name, cut=None,
        made=made,
    )  # fmt: skip
