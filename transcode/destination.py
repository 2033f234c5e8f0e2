"""The destination: guarded, written beside itself in `DST.partial`, visible by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.errors import DestinationError
from transcode.files import INDEX
from transcode.header import TensorInfo, layout
from transcode.plan import OutputShard, Plan

PLAN = ".transcode-plan.json"
EXPERT_INDEX = "transcode.index.json"
REPORT = "transcode_report.json"
MISLEADING = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    INDEX,
    EXPERT_INDEX,
    REPORT,
)
"""Files of the source that are written anew or would mislead a loader."""

CHUNK = 16 << 20


def guard(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise DestinationError unless DST is apart from SRC and free, or may be replaced."""
    src, dst = source.resolve(), target.resolve()
    if src == dst or src.is_relative_to(dst) or dst.is_relative_to(src):
        raise DestinationError(f"{target} is {source}, inside or around it: choose another place")
    if not (target.exists() or target.is_symlink()):
        return
    if not target.is_dir() or target.is_symlink():
        raise DestinationError(f"{target} exists and is no folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise DestinationError(
            f"{target} exists; --overwrite replaces it once the new one is complete"
        )
    if not (target / "config.json").exists():
        raise DestinationError(f"{target} is no checkpoint (no config.json): it is not replaced")


def partial(target: Path) -> Path:
    """Where the work lies until it is complete."""
    return target.absolute().parent / f"{target.absolute().name}.partial"


def identity(checkpoint: Checkpoint, plan: Plan, version: str) -> dict[str, Any]:
    """What must be equal for two runs to make the same bytes."""
    options = plan.options
    return {
        "transcode": version,
        "layout": f"{options.layout.name} {options.layout.version}",
        "dtype": options.dtype,
        "unify": options.unify,
        "exact": options.exact,
        "tp": options.tp,
        "shard_size": options.shard_size,
        "source": checkpoint.fingerprint(),
        "config": checkpoint.config,
        "hf_quant_config": checkpoint.hf_quant_config,
    }


def begin(target: Path, wanted: Mapping[str, Any]) -> Path:
    """Make or take up `DST.partial`; DestinationError if another plan's work lies there."""
    place = partial(target)
    if not place.is_dir():
        place.mkdir(parents=True)
    elif (place / PLAN).is_file():
        _same(place, json.loads((place / PLAN).read_bytes()), wanted)
        return place
    elif any(place.iterdir()):
        raise DestinationError(f"{place} exists and is not ours; remove it")
    write_json(place / PLAN, wanted)
    return place


def _same(place: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in wanted:
        if found.get(key) != wanted[key]:
            short = isinstance(wanted[key], str | int)
            what = (
                f"{key} was {found.get(key)}, is {wanted[key]}" if short else f"the {key} differs"
            )
            raise DestinationError(
                f"{place} holds another plan's work ({what}); finish or remove it"
            )


def room_for(place: Path, nbytes: int) -> None:
    """Raise DestinationError if the disk has not that much room."""
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise DestinationError(f"{place.parent}: no space left: {nbytes} bytes wanted, {free} free")


def write_shard(
    place: Path,
    shard: OutputShard,
    metadata: Mapping[str, str],
    fill: Callable[[int, int, int], None],
) -> None:
    """Write a shard under another name, fsync and rename it.

    `fill(fd, index, start)` writes the bytes of `shard.outputs[index]` at `start`.
    """
    head, starts = layout({o.name: (o.dtype, o.shape) for o in shard.outputs}, metadata)
    unfinished = place / f"{shard.name}.unfinished"
    with unfinished.open("wb") as file:
        file.write(head)
        file.flush()
        file.truncate(len(head) + shard.nbytes)
        for index, output in enumerate(shard.outputs):
            fill(file.fileno(), index, starts[output.name])
        os.fsync(file.fileno())
    unfinished.rename(place / shard.name)


def write_at(fd: int, data: memoryview, at: int) -> None:
    """Write all of it."""
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


def copy_range(info: TensorInfo, source: int, fd: int, at: int) -> None:
    """Copy a tensor's bytes from file to file, inside the kernel where it can."""
    start, left = info.start, info.nbytes
    while left:
        try:
            count = os.copy_file_range(source, fd, left, start, at)
        except OSError:
            data = os.pread(source, min(left, CHUNK), start)
            count = os.pwrite(fd, data, at)
        if not count:
            raise DestinationError(f"{info.file.name}: ends inside {info.name}; did it change?")
        start, at, left = start + count, at + count, left - count


def copy_companions(checkpoint: Checkpoint, place: Path) -> list[str]:
    """Copy the other files that go along; those that would mislead a loader stay behind."""
    carried = [name for name in checkpoint.companions if name not in MISLEADING]
    for name in carried:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / name, place / name)
    return carried


def write_json(path: Path, value: Any) -> None:
    """JSON with an indent, fsynced, in place by a rename."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def index_of(shards: Iterable[OutputShard]) -> dict[str, Any]:
    """An index as Hugging Face writes it."""
    entries = {o.name: (shard.name, o.nbytes) for shard in shards for o in shard.outputs}
    return {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {name: file for name, (file, _) in sorted(entries.items())},
    }


def finish(place: Path, target: Path) -> None:
    """Make the work visible; an old destination goes only after that."""
    (place / PLAN).unlink()
    _sync_folder(place)
    target = target.absolute()
    if not target.exists():
        place.rename(target)
    else:
        old = target.with_name(target.name + ".old")
        if old.exists():
            raise DestinationError(f"{old} is in the way; the new one lies complete in {place}")
        target.rename(old)
        place.rename(target)
        shutil.rmtree(old)
    _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
