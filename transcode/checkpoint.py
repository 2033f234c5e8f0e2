"""A checkpoint on disk: opened header-first, its tensors read one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transcode.errors import CheckpointError
from transcode.files import (
    INDEX,
    LeftOut,
    Shard,
    companions,
    instead,
    read_json,
    resolved,
    shards,
    weight_map,
)
from transcode.header import Taken, TensorInfo, bytes_of

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of the dtypes that are computed with here."""


@dataclass(frozen=True)
class Borrowed:
    """What `compose` took from another checkpoint.

    tensors: how many the glob took.  replaced: how many of those the base had.  dropped: how many
    others of the base it matches, which are left out.  shards: the other's, that have them.
    activations: of the quantised modules that came along, as the other's own config has them
    (activations.py).
    """

    glob: str
    tensors: int
    replaced: int
    dropped: int
    shards: tuple[Shard, ...]
    activations: Mapping[str, str] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """What the Report calls it."""
        counts = {k: getattr(self, k) for k in ("glob", "tensors", "replaced", "dropped")}
        return {**counts, "source": fingerprint(self.shards)}


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors with its config.

    tensors: every tensor of every shard, in the order of shards and headers.
    companions: other files that go along, relative names.
    ghosts: names in the index that no shard holds.  strays: tensors that the index does not name.
    taken: what `compose` put in.
    """

    path: Path
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo]
    companions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    ghosts: tuple[str, ...]
    strays: tuple[str, ...]
    notes: tuple[str, ...]
    taken: tuple[Borrowed, ...] = ()

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Read headers, index and config; raises CheckpointError for what no reader could use."""
        root = resolved(path)
        if not root.is_dir():
            what = "a file, wanted the folder it lies in" if root.exists() else "no such folder"
            raise CheckpointError(f"{path}: {what}")
        index = weight_map(root)
        found, strange = shards(root, index)
        if not found:
            why = instead(root, strange)
            raise CheckpointError(f"{path}: no checkpoint: no *.safetensors at its top level{why}")
        if not (root / "config.json").is_file():
            raise CheckpointError(f"{path}: no checkpoint: config.json is missing")
        tensors = {name: t for shard in found for name, t in shard.header.tensors.items()}
        others, left_out = companions(root)
        hf_quant = root / "hf_quant_config.json"
        return Checkpoint(
            path=root,
            config=read_json(root / "config.json"),
            hf_quant_config=read_json(hf_quant) if os.path.lexists(hf_quant) else None,
            shards=tuple(found),
            tensors=tensors,
            companions=tuple(others),
            left_out=(*strange, *left_out),
            ghosts=tuple(sorted(set(index) - set(tensors))),
            strays=tuple(name for name in tensors if index and name not in index),
            notes=tuple(_index_notes(root, index, found)),
        )

    def require_sound(self) -> None:
        """Raise CheckpointError if the index names tensors that no shard holds."""
        if self.ghosts:
            raise CheckpointError(
                f"{INDEX} names {len(self.ghosts)} tensors that no shard holds: "
                + ", ".join(self.ghosts[:5])
                + (", ..." if len(self.ghosts) > 5 else "")
            )

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a shard is not what it was when it was opened."""
        for shard in self.every_shard():
            try:
                now = shard.path.stat()
            except OSError as error:
                raise CheckpointError(f"{shard.name}: {error.strerror} while being read") from error
            then = shard.header
            if (now.st_size, now.st_mtime_ns, now.st_ino) != (then.size, then.changed, then.inode):
                raise CheckpointError(f"{shard.name} changed while it was being read")

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config: `text_config` where there is one."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    def every_shard(self) -> Iterator[Shard]:
        """Its own, then those of what was taken."""
        yield from self.shards
        for one in self.taken:
            yield from one.shards

    def fingerprint(self) -> list[dict[str, Any]]:
        """What the Report calls the source."""
        return fingerprint(self.shards)


def fingerprint(shards: Iterable[Shard]) -> list[dict[str, Any]]:
    """Name, size and the header's sha256 of each shard."""
    return [
        {"name": s.name, "size": s.header.size, "header_sha256": s.header.digest} for s in shards
    ]


def _index_notes(root: Path, index: dict[str, str], found: list[Shard]) -> Iterator[str]:
    where = {name: shard.name for shard in found for name in shard.header.tensors}
    moved = [name for name, file in index.items() if name in where and where[name] != file]
    if moved:
        yield f"{INDEX}: {len(moved)} tensors lie in another shard than it says ({moved[0]})"
    for shard in found:
        if not shard.named:
            yield f"{shard.name}: not in the index; its {len(shard.header.tensors)} tensors go too"
    if not index:
        return
    unlisted = sum(
        1 for shard in found if shard.named for n in shard.header.tensors if n not in index
    )
    if unlisted:
        yield f"{INDEX}: {unlisted} tensors of its shards are missing from it; they go along"
    metadata = read_json(root / INDEX).get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    sizes = [(s.named, sum(t.nbytes for t in s.header.tensors.values())) for s in found]
    total = sum(size for _, size in sizes)
    if claimed is not None and claimed not in (total, sum(size for named, size in sizes if named)):
        yield f"{INDEX}: total_size is {claimed}, the shards hold {total} bytes"


@dataclass(frozen=True)
class Reader:
    """Reads tensors; keeps each shard's file open, and in `memo` what was made last.

    device: where changes of encoding are worked out; tensors come back on the CPU.
    """

    files: dict[Path, int]
    memo: dict[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def file(self, info: TensorInfo) -> int:
        """The descriptor of the tensor's file."""
        if info.file not in self.files:
            try:
                self.files[info.file] = os.open(info.file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{info.file.name}: {error.strerror}") from error
        return self.files[info.file]

    def bytes(self, info: TensorInfo) -> bytearray:
        """The tensor's bytes; CheckpointError if the file has become shorter."""
        data = bytearray(info.nbytes)
        view, at, fd = memoryview(data), info.start, self.file(info)
        while view:
            try:
                count = os.preadv(fd, [view], at)
            except OSError as error:
                raise CheckpointError(f"{info.file.name}: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{info.file.name}: ends inside {info.name}; did it change?")
            view, at = view[count:], at + count
        return data

    def tensor(self, info: TensorInfo) -> Tensor:
        """The tensor in its own dtype and shape, on the CPU."""
        if info.dtype not in DTYPES:
            raise CheckpointError(f"{info}: a dtype that is carried but never computed with")
        if info.made:
            return info.made.make(self).reshape(info.shape)
        if info.cut:
            return info.cut.take(self.tensor(_whole(info, info.cut)), info.shape)
        if not info.nbytes:
            return torch.empty(info.shape, dtype=DTYPES[info.dtype])
        flat = torch.frombuffer(self.bytes(info), dtype=DTYPES[info.dtype])
        return flat.reshape(info.shape)


def _whole(info: TensorInfo, cut: Taken) -> TensorInfo:
    dtype = cut.dtype or info.dtype
    nbytes = bytes_of(dtype, cut.stored)
    return replace(info, dtype=dtype, shape=cut.stored, nbytes=nbytes, cut=None)


@contextmanager
def reader(device: torch.device | None = None) -> Iterator[Reader]:
    """A Reader whose files are closed at the end; None is the CPU."""
    files: dict[Path, int] = {}
    try:
        yield Reader(files, device=device or torch.device("cpu"))
    finally:
        for fd in files.values():
            os.close(fd)
