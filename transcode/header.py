"""One safetensors file: its header read with every claim checked, or laid out anew.

The format (safetensors, README.md of huggingface/safetensors): eight bytes with the header's length
(little endian), the header as a JSON object, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from reprlib import repr as short
from stat import S_ISREG
from typing import Any, Protocol

import torch
from torch import Tensor

from transcode.errors import CheckpointError

LONGEST = 100_000_000
"""The longest header that safetensors itself accepts, in bytes."""

LARGEST = 1 << 60
"""No tensor has so many elements; sizes of 0 count as 1 here, so that torch can hold the shape."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Every dtype of safetensors 0.8 and the bits of one element."""


@dataclass(frozen=True)
class Cut:
    """How a tensor is taken out of bytes that are not its own alone.

    stored: the shape of the bytes.  transposed: whether its two axes are swapped then.
    first, step: which rows are the tensor's after that.
    repeat: how often every element stands in the tensor, along its last axis.
    """

    stored: tuple[int, ...]
    transposed: bool = False
    first: int = 0
    step: int = 1
    repeat: int = 1
    dtype: str = ""

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this shape, from one of the stored shape."""
        one_byte = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        turned = one_byte.transpose(-1, -2) if self.transposed else one_byte
        rows = turned[self.first :: self.step][: shape[0]] if shape else turned
        if self.repeat > 1:
            rows = rows.repeat_interleave(self.repeat, -1)
        return rows.contiguous().view(stored.dtype).reshape(shape)


class Maker(Protocol):
    """What makes a tensor that is not stored."""

    def make(self, read: Any) -> Tensor:
        """The tensor, from others that a Reader reads."""


class Taken(Protocol):
    """What a tensor's bytes must go through: `stored` and `dtype` of the bytes ("": its own)."""

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the bytes."""

    @property
    def dtype(self) -> str:
        """The dtype of the bytes, "" for the tensor's own."""

    def take(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this shape."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes of `file` from `start`, counted from the file's begin.

    part_of: the stored tensor that it is a part of (an expert's of a fused one), "" if it is whole.
    cut: how its elements lie in the bytes from `start`, if not one after another; `nbytes` is then
    what it has, not what must be read.
    made: makes it where it is not stored at all; `file` is then where what it is made of lies.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int
    part_of: str = ""
    cut: Taken | None = None
    made: Maker | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"

    @property
    def stored_name(self) -> str:
        """The name of the tensor in the file."""
        return self.part_of or self.name

    def entry(self, index: int) -> TensorInfo:
        """One entry along the first axis, as a tensor of its own."""
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, nbytes=size)

    def span(self, at: int, size: int) -> TensorInfo:
        """`size` of its bytes from `at`, as a flat U8 tensor."""
        return replace(self, dtype="U8", shape=(size,), start=self.start + at, nbytes=size)

    def chunks(self, size: int) -> Iterator[TensorInfo]:
        """All its bytes in spans of at most this size."""
        return (self.span(at, min(size, self.nbytes - at)) for at in range(0, self.nbytes, size))


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    digest: the sha256 of the header's bytes, in hex.
    changed: the time of the file's last change, in nanoseconds.  inode: the file's number.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    digest: str
    size: int
    changed: int
    inode: int


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor without gaps."""
    return -(-prod(shape) * BITS[dtype] // 8)


def read_header(path: Path) -> Header:
    """Read and check a header; CheckpointError names the file, what was found and wanted."""
    try:
        status = path.stat()
        size = status.st_size
        if not S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name}: no file of bytes")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(f"{path.name}: {size} bytes, too short for safetensors")
            if length > LONGEST or length > size - 8:
                raise CheckpointError(
                    f"{path.name}: claims a header of {length} bytes, but the file has {size} "
                    f"and the limit is {LONGEST}; it is truncated or no safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from error
    entries = _parse(path, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path.name}: __metadata__ is no object")
    for key, value in metadata.items():
        if not isinstance(value, str) or not is_text(key + value):
            raise CheckpointError(
                f"{path.name}: __metadata__: {key!a} is {short(value)}, wanted text"
            )
    begin = 8 + length
    tensors = {name: _tensor(path, name, entry, begin) for name, entry in entries.items()}
    _cover(path, list(tensors.values()), begin, size)
    digest = hashlib.sha256(raw).hexdigest()
    return Header(tensors, metadata, digest, size, status.st_mtime_ns, status.st_ino)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: CheckpointError for a name that stands twice in one object."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"{twice!r} stands twice in one object")
    return found


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode(), object_pairs_hook=unique)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: header: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: the header is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path.name}: the header is no JSON object")
    return entries


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON's escapes, and file names, may hold half a pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tensor(path: Path, name: str, entry: Any, begin: int) -> TensorInfo:
    if not is_text(name):
        raise CheckpointError(f"{path.name}: the tensor name {name!a} is no Unicode text")
    where = f"{path.name}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where}: the header wants dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where}: unknown dtype {short(dtype)}")
    if not _naturals(shape):
        raise CheckpointError(f"{where}: shape is {short(shape)}, wanted a list of natural numbers")
    if _too_many(shape):
        raise CheckpointError(f"{where}: shape {short(shape)} is larger than any tensor can be")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets is {short(offsets)}, wanted [begin, end]")
    if prod(shape) * BITS[dtype] % 8:
        raise CheckpointError(f"{where}: {dtype} {shape} is no whole number of bytes")
    found, wanted = offsets[1] - offsets[0], bytes_of(dtype, shape)
    if found != wanted:
        raise CheckpointError(f"{where}: {found} bytes, wanted {wanted} for {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), path, begin + offsets[0], found)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _too_many(shape: list[int]) -> bool:
    count = 1
    for n in shape:
        count *= max(n, 1)
        if count > LARGEST:
            return True
    return False


def _cover(path: Path, tensors: list[TensorInfo], begin: int, size: int) -> None:
    """The tensors must lie side by side and fill the file, as safetensors itself demands."""
    at = begin
    for t in sorted(tensors, key=lambda t: (t.start, t.start + t.nbytes)):
        if t.start != at:
            what = "overlaps the tensor before it" if t.start < at else "leaves a gap before it"
            raise CheckpointError(f"{path.name}: {t.name} {what} (byte {t.start}, wanted {at})")
        at += t.nbytes
    if at != size:
        what = "truncated" if size < at else "longer than its header says"
        raise CheckpointError(f"{path.name}: {what}: {size} bytes, wanted {at}")


def layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header's bytes for `{name: (dtype, shape)}` in this order, and each tensor's first byte.

    The header is padded with spaces to a multiple of 8. Order the tensors by falling element size,
    so that every one is aligned: safetensors allows no gaps.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, at = dict[str, int](), 0
    for name, (dtype, shape) in tensors.items():
        end = at + bytes_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    head = len(raw).to_bytes(8, "little") + raw
    return head, {name: len(head) + start for name, start in starts.items()}
