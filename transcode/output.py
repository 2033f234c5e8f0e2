"""One tensor of the destination, and how its bytes come about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from transcode.header import TensorInfo, bytes_of
from transcode.module import Module
from transcode.producer import Fusion, Leaf, Role
from transcode.stacks import Stack

ACTIVATION = {"bfloat16": "BF16", "float16": "F16"}
"""safetensors' names of the activation dtypes."""


class Kind(StrEnum):
    """How the bytes of an output come about."""

    COPY = "copy"
    WEIGHT = "weight"
    SCALE = "weight_scale"
    GLOBAL = "global"
    BIAS = "bias"
    INPUT = "input_scale"
    SCALAR = "scalar"
    SOURCE_SCALE = "source_weight_scale"
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
