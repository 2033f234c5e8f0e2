"""Which files of a folder are the checkpoint, which go along, and which are left out and why.

Weights lie at the top level only. They are the files that `model.safetensors.index.json` names,
`model.safetensors`, and other `*.safetensors` whose tensor names are all new (sidecars, such as an
MTP head). A file that repeats names, or an adapter, is left out. All other files go along, except
weights in any form, `.git` and `.cache`, and another run's unfinished work.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from transcode.errors import CheckpointError
from transcode.header import Header, is_text, read_header

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
SKIPPED_FOLDERS = (".git", ".cache")
PLAN = ".transcode-plan.json"
REPORT = "transcode_report.json"
UNFINISHED = ".unfinished"
"""What a run in progress adds to the name of a file."""

DEEPEST = 100
"""How deep JSON and folders may be nested: what reads and writes them calls itself once a level."""

_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Shard:
    """A file of weights; `named` if the index, or the name `model.safetensors`, asks for it."""

    path: Path
    header: Header
    named: bool

    @property
    def name(self) -> str:
        """The file's name inside the checkpoint."""
        return self.path.name


@dataclass(frozen=True)
class LeftOut:
    """A file or folder, relative to the checkpoint, that is not carried, and the reason."""

    name: str
    reason: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is none."""
    try:
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: no JSON object, but {type(value).__name__}")
    _writable(path.name, value)
    return value


def _writable(name: str, value: dict[str, Any]) -> None:
    """What was read must be writable again: no half surrogate pairs, no endless nesting."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [*_inner(name, level)]
        if not level:
            return
    raise CheckpointError(f"{name}: nested more than {DEEPEST} deep")


def _inner(name: str, level: list[Any]) -> Iterator[Any]:
    for value in level:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value
        elif isinstance(value, str) and not is_text(value):
            raise CheckpointError(f"{name}: {value!a} is no Unicode text")


def resolved(path: Path) -> Path:
    """The path with its links followed; a circle of links leads to itself, as in Python 3.13."""
    try:
        return path.resolve()
    except RuntimeError:
        return path.absolute()


def inside(root: Path, path: Path) -> bool:
    """Whether a file, links followed, lies in the checkpoint or in its Hub cache's `blobs`."""
    target = resolved(path)
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")


def weight_map(root: Path) -> dict[str, str]:
    """The index's `{tensor: file}`, empty without an index; a file must be a plain name."""
    if not os.path.lexists(root / INDEX):
        return {}
    entries = read_json(root / INDEX).get("weight_map")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{INDEX}: weight_map is {type(entries).__name__}, wanted an object")
    for tensor, file in entries.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{INDEX}: {tensor} is said to lie in {file!r}, wanted a file beside the index"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX}: {tensor} is said to lie in {file!r}, wanted *.safetensors"
            )
    return entries


def shards(root: Path, index: dict[str, str]) -> tuple[list[Shard], list[LeftOut]]:
    """The files of weights in order, and the top-level ones that are not part of the checkpoint."""
    named = dict.fromkeys([*sorted(set(index.values())), "model.safetensors"])
    if not (root / "model.safetensors").exists() and "model.safetensors" not in index.values():
        del named["model.safetensors"]
    found = [_open(root, name, named=True) for name in named]
    owner: dict[str, str] = {}
    for shard in found:
        for tensor in shard.header.tensors:
            if tensor in owner:
                raise CheckpointError(f"{tensor} stands in {owner[tensor]} and in {shard.name}")
            owner[tensor] = shard.name
    left_out = []
    others = {n for n in os.listdir(root) if n.endswith(".safetensors") and n not in named}
    for name in sorted(others, key=lambda name: (not name.startswith("model"), name)):
        if not inside(root, root / name):
            left_out.append(LeftOut(name, "a link that leads out of the checkpoint"))
            continue
        shard = _open(root, name, named=False)
        reason = _foreign(shard, owner)
        if reason:
            left_out.append(LeftOut(name, reason))
        else:
            found.append(shard)
            owner |= dict.fromkeys(shard.header.tensors, name)
    _all_numbers(found)
    return found, left_out


def _open(root: Path, name: str, *, named: bool) -> Shard:
    path = root / name
    if not is_text(name):
        raise CheckpointError(f"{_readable(name)}: its name is no Unicode text")
    if not path.is_file():
        why = "is missing (the index names it)" if named else "is no file, or leads nowhere"
        raise CheckpointError(f"{name} {why}")
    if not inside(root, path):
        raise CheckpointError(f"{name} is a link that leads out of the checkpoint")
    return Shard(path, read_header(path), named)


def _foreign(shard: Shard, owner: dict[str, str]) -> str:
    tensors = shard.header.tensors
    if shard.name.startswith("adapter") or any(".lora_" in name for name in tensors):
        return "an adapter"
    repeated = [name for name in tensors if name in owner]
    if repeated:
        return f"repeats {len(repeated)} tensors, {repeated[0]} of {owner[repeated[0]]} among them"
    return "" if tensors else "holds no tensors"


def _all_numbers(found: list[Shard]) -> None:
    """Where the names count (`model-00001-of-00003`), none of the count may be missing."""
    names = {shard.name for shard in found}
    for name in sorted(names):
        if match := _NUMBERED.fullmatch(name):
            stem, _, total = match.groups()
            for k in range(1, min(int(total), len(names) + 1) + 1):
                wanted = f"{stem}-{k:05}-of-{total}.safetensors"
                if wanted not in names:
                    raise CheckpointError(f"{wanted} is missing ({name} stands there)")


def instead(root: Path, left_out: list[LeftOut]) -> str:
    """Why a folder has no weights to read, as the end of a sentence; "" if nothing is there."""
    for entry in left_out:
        return f"; {entry.name} is left out: {entry.reason}"
    for name in sorted(os.listdir(root)):
        suffix = PurePosixPath(name).suffix
        if suffix in WEIGHTS:
            how = "use llama.cpp's own tools" if suffix == ".gguf" else "save it as safetensors"
            return f"; for {_readable(name)}, {how}"
    return ""


def companions(root: Path) -> tuple[list[str], list[LeftOut]]:
    """The other files, relative and sorted, and those left out: weights, `.git`, stray links."""
    carried, left_out = list[str](), list[LeftOut]()
    for path in _walk(root, left_out):
        name = path.relative_to(root).as_posix()
        top = path.parent == root
        if not is_text(name):
            left_out.append(LeftOut(_readable(name), "its name is no Unicode text"))
        elif path.suffix in WEIGHTS:
            if not (top and path.suffix == ".safetensors"):
                left_out.append(LeftOut(name, "weights that are no part of the checkpoint"))
        elif not path.is_file():
            left_out.append(LeftOut(name, "no plain file"))
        elif not inside(root, path):
            left_out.append(LeftOut(name, "a link that leads out of the checkpoint"))
        elif top and (name == PLAN or name.endswith(UNFINISHED)):
            left_out.append(LeftOut(name, "another run's unfinished work"))
        elif not (top and name == INDEX):
            carried.append(name)
    return sorted(carried), sorted(left_out, key=lambda entry: entry.name)


def _walk(root: Path, left_out: list[LeftOut], *above: Path) -> Iterator[Path]:
    """Every file below `above`; links to folders are followed where they stay in the checkpoint."""
    if len(above) > DEEPEST:
        raise CheckpointError(f"{above[DEEPEST]}: folders nested more than {DEEPEST} deep")
    try:
        entries = sorted(os.scandir(above[-1] if above else root), key=lambda entry: entry.name)
    except OSError as error:
        _unreadable(error)
    for entry in entries:
        path = Path(entry.path)
        if not path.is_dir():  # a circle of links is no folder; `entry` would raise
            yield path
            continue
        if entry.name in SKIPPED_FOLDERS:
            reason = "not part of a model"
        elif entry.is_symlink() and not inside(root, path):
            reason = "a link that leads out of the checkpoint"
        elif entry.is_symlink() and any(folder.is_symlink() for folder in above):
            reason = "a link to a folder behind another one"  # they would multiply
        elif path.resolve() in (root, *(folder.resolve() for folder in above)):
            reason = "a link to a folder that it lies in"
        else:
            yield from _walk(root, left_out, *above, path)
            continue
        left_out.append(LeftOut(_readable(path.relative_to(root).as_posix() + "/"), reason))


def _unreadable(error: OSError) -> NoReturn:
    raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def _readable(name: str) -> str:
    """A file's name with the bytes that are no UTF-8 as \\xNN."""
    return os.fsencode(name).decode(errors="backslashreplace")
