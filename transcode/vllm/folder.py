"""The files of a packed folder, seen to be there and whole before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transcode.errors import CheckpointError
from transcode.files import INDEX, read_json
from transcode.header import TensorInfo, read_header
from transcode.vllm.packed import DTYPES, Packed, Stack

EXPERTS = "transcode.index.json"


@dataclass(frozen=True)
class Folder:
    """dense, experts: the tensors that vLLM's loader reads, and the fused ones; where they lie."""

    path: Path
    dense: Mapping[str, TensorInfo]
    experts: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: Path, packed: Packed) -> Folder:
        """Read all headers; CheckpointError for a file or tensor that is missing or not as said."""
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder; a packed folder is served from a disk")
        dense, experts = _tensors(path, INDEX), _tensors(path, EXPERTS)
        for name, dtype, shape in _wanted(packed):
            info = (experts if name.rpartition(".")[2].startswith(("w13_", "w2_")) else dense).get(
                name
            )
            if info is None:
                raise CheckpointError(f"{name} is missing, wanted {dtype} {list(shape)}")
            if (info.dtype, info.shape) != (dtype, shape):
                raise CheckpointError(f"{info}, wanted {dtype} {list(shape)}")
        return cls(path, dense, experts)


def row(info: TensorInfo, index: int) -> bytes:
    """The bytes of one entry along the first axis."""
    one = info.entry(index)
    with one.file.open("rb") as file:
        file.seek(one.start)
        return file.read(one.nbytes)


def _tensors(path: Path, index: str) -> dict[str, TensorInfo]:
    """The tensors that an index names; CheckpointError if one does not lie where it says."""
    named = read_json(path / index).get("weight_map")
    if not isinstance(named, dict):
        raise CheckpointError(f"{index}: no weight_map")
    headers = {file: read_header(path / file).tensors for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in headers[file]:
            raise CheckpointError(f"{name} is not in {file}, where {index} has it")
    return {name: headers[file][name] for name, file in named.items()}


def _wanted(packed: Packed) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every tensor that will be read of the packed stacks: name, dtype, shape."""
    for stack in packed.stacks.values():
        ahead: tuple[int, ...] = ()
        if stack.experts is not None:
            ahead, leaf = (stack.experts,), "weight_scale_2"
            matrices = [(f"{stack.name}_", sum(stack.padded_n))]
        else:
            leaf = "weight_global_scale"
            matrices = [
                (f"{stack.parent}.{m}.".lstrip("."), n)
                for m, n in zip(stack.members, stack.padded_n, strict=True)
            ]
        for stem, n in matrices:
            for name, (dtype, shape) in _matrix(packed, stack, n).items():
                yield f"{stem}{name}", dtype, (*ahead, *shape)
            if packed.kind.factor:
                yield f"{stem}{leaf}", "F32", ahead


def _matrix(packed: Packed, stack: Stack, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    kind, own = packed.kind, DTYPES[packed.dtype]
    found = {
        "weight": ("I32", (stack.padded_k // 16, n * kind.bits // 2)),
        "weight_scale": (kind.scale or own, (stack.scales, n)),
    }
    return found | ({"bias": (own, (n,))} if stack.biased else {})
