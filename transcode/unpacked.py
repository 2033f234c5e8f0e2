"""A folder that was packed for a kernel, read back: its modules as the source wrote them.

Codes, block scales and biases are unpacked where they are read (`TensorInfo.cut`), without their
padding; scalars are the source's own, which are kept word for word. Block scales that the kernel's
bytes could not hold stand in the Report. What `rescale` rounded stays rounded, with the global
scale that it was rounded for; a fold is undone, since only scalars took part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transcode.catalog import layouts, producer, variant
from transcode.checkpoint import Checkpoint
from transcode.errors import CheckpointError, FormatError
from transcode.files import REPORT, read_json
from transcode.formats.canonical import VERSION
from transcode.header import TensorInfo
from transcode.module import Module, Recognised
from transcode.packed_stack import PackedStack
from transcode.recognise import recognise
from transcode.spec import Layout


def opened(path: Path) -> tuple[Checkpoint, Recognised]:
    """A checkpoint and its modules; of a packed folder, as its source had them."""
    checkpoint = Checkpoint.open(path)
    config = packed_config(checkpoint.config)
    if config is None:
        _require_version(checkpoint)
        return checkpoint, recognise(checkpoint)
    modules = unpacked(checkpoint, config)
    source, used = config.get("source"), {t.stored_name for m in modules.values() for t in _all(m)}
    rest = {name: t for name, t in checkpoint.tensors.items() if name not in used}
    described = {**checkpoint.config, "quantization_config": source}
    others = config.get("source_others")
    aside = others.get("hf_quant_config.json") if isinstance(others, dict) else None
    if config.get("source_file") == "hf_quant_config.json":
        aside = source
        del described["quantization_config"]
    kept = (note for note in checkpoint.notes if not note.startswith("experts-"))
    as_source = replace(
        checkpoint,
        config=described,
        hf_quant_config=aside if isinstance(aside, dict) else None,
        notes=(*kept, *_rounded(checkpoint, variant(config["layout"], config.get("variant")))),
    )
    found = recognise(replace(as_source, tensors=rest))
    return as_source, Recognised(found.modules | modules, found.problems)


def _require_version(checkpoint: Checkpoint) -> None:
    """Raise FormatError for our own form in a version that is not known here."""
    config = checkpoint.config.get("quantization_config")
    ours = isinstance(config, dict) and producer("canonical").claims(config)
    if config and ours and config.get("layout_version") != VERSION:
        version = config.get("layout_version")
        raise FormatError(f"canonical version {version}, wanted {VERSION}")


def _rounded(checkpoint: Checkpoint, layout: Layout) -> Iterator[str]:
    """What packing rounded, which does not come back but where the source's scales are kept."""
    report = _report(checkpoint)
    counts = [s.get("rounded_scales") for s in report.get("stacks", ()) if isinstance(s, dict)]
    scales = sum(count for count in counts if isinstance(count, int))
    if scales and layout.factor:
        yield f"{scales} block scales were rounded when it was packed; they stay so"
    biases = report.get("rounded_biases")
    if isinstance(biases, list) and biases:
        yield f"{len(biases)} biases were rounded when it was packed; they stay so"


def _all(module: Module) -> Iterator[TensorInfo]:
    yield from module.parts.values()
    yield from module.leaves.values()


def require_packed(path: Path) -> None:
    """Raise FormatError for a folder that is not packed for a kernel."""
    if packed_config(read_json(path / "config.json")) is None:
        raise FormatError(f"{path}: --kernel is for folders that are packed for a kernel")


def packed_config(whole: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a config.json that this program wrote for a kernel; None in any other."""
    config = whole.get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "transcode":
        return None
    name = config.get("layout")
    return config if isinstance(name, str) and name in layouts() else None


def unpacked(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Module]:
    """The packed modules; FormatError for a layout version or a config that is not ours."""
    layout = variant(config["layout"], config.get("variant"))
    if config.get("layout_version") != layout.version:
        raise FormatError(
            f"{layout.name} version {config.get('layout_version')}, wanted {layout.version}"
        )
    consumer = config.get("consumer")
    runtime = consumer.get("runtime") if isinstance(consumer, dict) else None
    if (runtime, config.get("activations")) != (layout.runtime, layout.activations):
        raise FormatError(
            f"variant {layout.variant!r} is for {layout.runtime} with {layout.activations} "
            f"activations, the config says {runtime} with {config.get('activations')}"
        )
    report = _report(checkpoint)
    if scaled := report.get("scaled"):
        name = next(iter(scaled)) if isinstance(scaled, dict) else scaled
        raise FormatError(f"{name} was scaled by a fold, which is not undone here")
    try:
        found = [
            module
            for name, size in config["sizes"].items()
            for module in PackedStack(checkpoint, layout, name, size, config, report).modules()
        ]
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        StopIteration,
        RuntimeError,
    ) as error:
        raise FormatError(
            f"the config or Report of a packed folder is not ours: {error!r}"
        ) from None
    return {module.name: module for module in found}


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return read_json(checkpoint.path / REPORT)
    except CheckpointError as error:
        raise FormatError(f"a packed folder is read back with its Report: {error}") from None
