"""The destination: guarded, written beside itself in `DST.partial`, visible by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.errors import CheckpointError, DestinationError
from transcode.files import INDEX, PLAN, REPORT, UNFINISHED, read_json, resolved
from transcode.header import TensorInfo, is_text, layout
from transcode.origins import origins
from transcode.output import OutputShard
from transcode.plan import Plan
from transcode.stacks import Options

EXPERT_INDEX = "transcode.index.json"
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
    src, dst = resolved(source), resolved(target)
    if src == dst or src.is_relative_to(dst) or dst.is_relative_to(src):
        how = "is" if src == dst else "lies around" if src.is_relative_to(dst) else "lies inside"
        raise DestinationError(f"{target} {how} {source}: choose another place")
    for place in (partial(target), old(target)):
        if src.is_relative_to(resolved(place)):
            raise DestinationError(f"{source} lies where {place} would be: choose another place")
    if not is_text(str(dst)):
        raise DestinationError(f"{target}: no Unicode text, as safetensors' reader wants paths")
    if not (target.exists() or target.is_symlink()):
        return
    if not target.is_dir() or target.is_symlink():
        raise DestinationError(f"{target} exists and is no folder")
    if not any(target.iterdir()):
        return
    if os.path.lexists(old(target)):
        raise DestinationError(f"{old(target)} is in the way: an old {target} would go there")
    if not overwrite:
        raise DestinationError(
            f"{target} exists; --overwrite replaces it once the new one is complete"
        )
    if not (target / "config.json").exists():
        raise DestinationError(f"{target} is no checkpoint (no config.json): it is not replaced")


def partial(target: Path) -> Path:
    """Where the work lies until it is complete."""
    return target.absolute().parent / f"{target.absolute().name}.partial"


def old(target: Path) -> Path:
    """Where what is replaced lies for the moment."""
    return target.absolute().parent / f"{target.absolute().name}.old"


def identity(checkpoint: Checkpoint, plan: Plan, version: str) -> dict[str, Any]:
    """What must be equal for two runs to make the same bytes."""
    options = plan.options
    return {
        "transcode": version,
        "target": target_of(options),
        "dtype": options.dtype,
        "unify": options.unify,
        "exact": options.exact,
        "tp": options.tp,
        "shard_size": options.shard_size,
        "encodings": options.recipe.asked(),
        "source": checkpoint.fingerprint(),
        "taken": [one.entry() for one in checkpoint.taken],
        "origin": asdict(origins(checkpoint)) if options.form else None,
        "last change of each shard": [shard.header.changed for shard in checkpoint.every_shard()],
        "config": checkpoint.config,
        "hf_quant_config": checkpoint.hf_quant_config,
    }


def target_of(options: Options) -> dict[str, Any]:
    """The layout and its version, or the form and what was asked of it."""
    if options.form:
        return {"to": options.form.target.name, **options.form.asked()}
    layout = options.layout
    return {"to": layout.name, "version": layout.version, "variant": layout.variant}


def begin(target: Path, wanted: Mapping[str, Any]) -> Path:
    """Make or take up `DST.partial`; DestinationError if another plan's work lies there."""
    place = partial(target)
    if place.is_symlink():
        raise DestinationError(f"{place} is a link; the work must lie beside {target}")
    place.mkdir(parents=True, exist_ok=True)
    if (place / PLAN).is_file():
        _same(place, _plan_of(place), wanted)
        return place
    if any(path.name != PLAN + UNFINISHED for path in place.iterdir()):
        raise DestinationError(f"{place} exists and is not ours; remove it or choose another place")
    write_json(place / PLAN, wanted)
    return place


def _plan_of(place: Path) -> dict[str, Any]:
    try:
        return read_json(place / PLAN)
    except CheckpointError as error:
        raise DestinationError(f"{place} holds a plan that cannot be read ({error})") from None


def _same(place: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in wanted:
        if json.dumps(found.get(key), sort_keys=True) != json.dumps(wanted[key], sort_keys=True):
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
    unfinished = place / f"{shard.name}{UNFINISHED}"
    with _named(unfinished), unfinished.open("wb") as file:
        file.write(head)
        file.flush()
        file.truncate(len(head) + shard.nbytes)
        for index, output in enumerate(shard.outputs):
            fill(file.fileno(), index, starts[output.name])
        os.fsync(file.fileno())
    unfinished.rename(place / shard.name)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which file could not be written, and that nothing finished is lost."""
    try:
        yield
    except OSError as error:
        raise DestinationError(
            f"{path}: {error.strerror}; what is finished stays in {path.parent}"
        ) from error


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
            try:
                data = os.pread(source, min(left, CHUNK), start)
            except OSError as error:
                raise CheckpointError(f"{info.file.name}: {error.strerror}") from error
            count = os.pwrite(fd, data, at)
        if not count:
            raise DestinationError(f"{info.file.name}: ends inside {info.name}; did it change?")
        start, at, left = start + count, at + count, left - count


def copy_companions(checkpoint: Checkpoint, place: Path) -> list[str]:
    """Copy the other files that go along; those that would mislead a loader stay behind."""
    carried = [name for name in checkpoint.companions if name not in MISLEADING]
    for name in carried:
        with (checkpoint.path / name).open("rb") as source, _named(place / name):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            with (place / name).open("wb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
            shutil.copymode(checkpoint.path / name, place / name)
    return carried


def write_json(path: Path, value: Any) -> None:
    """JSON with an indent, fsynced, in place by a rename."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with _named(path), unfinished.open("w", encoding="utf-8") as file:
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


def finish(place: Path, target: Path, wanted: Container[str]) -> None:
    """Make the work visible; an old destination goes only after that, and the plan last.

    Raises DestinationError if a file that is not `wanted` lies among the work.
    """
    files = (p.relative_to(place).as_posix() for p in sorted(place.rglob("*")) if not p.is_dir())
    if stray := next((name for name in files if name != PLAN and name not in wanted), ""):
        raise DestinationError(f"{place / stray} is no part of the work; remove it and run again")
    _sync_folder(place)
    target, aside = target.absolute(), old(target)
    if not target.exists():
        place.rename(target)
    else:
        if os.path.lexists(aside):
            raise DestinationError(f"{aside} is in the way; the new one lies complete in {place}")
        target.rename(aside)
        place.rename(target)
        shutil.rmtree(aside)
    (target / PLAN).unlink()
    _sync_folder(target)
    _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
