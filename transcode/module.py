"""A weight with what belongs to it, and what makes one unusable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.producer import Format, Role
from transcode.quant import Encoding


@dataclass(frozen=True)
class Problem:
    """Something that makes a module unusable: `where` it is, and what was found and wanted."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Module:
    """A weight with what belongs to it. `shape` is the logical `(N, K)`, () if it is no matrix.

    leaves: all its tensors as stored, by leaf name.
    parts: those that make up the weight, in their logical shapes (producer.Leaf).
    block: rows and columns of a tile where the encoding is FP8_BLOCK.
    was: the module as the source has it, where its encoding changes.
    """

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    leaves: Mapping[str, TensorInfo]
    format: Format | None
    parts: Mapping[Role, TensorInfo] = field(default_factory=dict)
    block: tuple[int, int] | None = None
    was: Module | None = None

    def leaf(self, name: str) -> TensorInfo:
        """The tensor of this leaf."""
        return self.leaves[name]

    @property
    def written(self) -> Format:
        """The format of a quantised module."""
        assert self.format is not None, f"{self.name} is {self.encoding}"
        return self.format

    @property
    def codes(self) -> TensorInfo:
        """The codes of a quantised module."""
        return self.parts[Role.CODES]

    @property
    def scales(self) -> TensorInfo:
        """The block scales of a quantised module."""
        return self.parts[Role.SCALES]

    @property
    def global_scale(self) -> TensorInfo:
        """The global scale, as stored, of an NVFP4 module."""
        return self.parts[Role.GLOBAL]


@dataclass(frozen=True)
class Recognised:
    """All modules by name, and what is wrong with the checkpoint."""

    modules: dict[str, Module]
    problems: tuple[Problem, ...]

    def require_sound(self) -> None:
        """Raise FormatError with the first problem, and how many more there are."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise FormatError(f"{self.problems[0]}{more}")
