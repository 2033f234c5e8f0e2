"""What is in a checkpoint: encodings by module group, sizes, oddities."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transcode.files import read_json
from transcode.module import Module
from transcode.names import address, natural
from transcode.recognise import disagreements, quantization
from transcode.unpacked import opened, packed_config


def inspect(source: Path) -> dict[str, Any]:
    """Read headers and configs only; what is wrong is listed, not raised."""
    checkpoint, recognised = opened(source)
    groups: dict[str, dict[str, Any]] = {}
    for module in recognised.modules.values():
        entry = groups.setdefault(
            f"{_pattern(module)} {_encoding(module)}",
            {"modules": _pattern(module), "encoding": _encoding(module), "count": 0, "bytes": 0,
             "shapes": []},
        )  # fmt: skip
        entry["count"] += 1
        entry["bytes"] += sum(t.nbytes for t in module.leaves.values())
        if list(module.shape) not in entry["shapes"]:
            entry["shapes"].append(list(module.shape))
    owned = {t.stored_name for m in recognised.modules.values() for t in m.leaves.values()}
    loose = [t for name, t in checkpoint.tensors.items() if name not in owned]
    config, where = quantization(checkpoint)
    mine = packed_config(read_json(checkpoint.path / "config.json"))
    return {
        "packed": f"{mine['layout']} {mine['layout_version']}" if mine else None,
        "model_type": checkpoint.text_config.get("model_type"),
        "quant_method": config.get("quant_method"),
        "quantization_in": where,
        "tensors": len(checkpoint.tensors),
        "bytes": sum(t.nbytes for t in checkpoint.tensors.values()),
        "shards": checkpoint.fingerprint(),
        "groups": sorted(groups.values(), key=lambda g: natural(g["modules"])),
        "other_tensors": {"count": len(loose), "bytes": sum(t.nbytes for t in loose)},
        "left_out": [asdict(entry) for entry in checkpoint.left_out],
        "oddities": [
            *checkpoint.notes,
            *[f"{name}: in the index, in no shard" for name in checkpoint.ghosts],
            *map(str, recognised.problems),
            *disagreements(checkpoint, recognised.modules),
        ],
    }


def _pattern(module: Module) -> str:
    """The module's name with its numbers as `*`; projections of experts and siblings together."""
    where = address(module.name)
    name = module.name if where.expert is None else f"{where.parent}.*.{where.leaf}"
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _encoding(module: Module) -> str:
    return module.format.name if module.format else str(module.encoding)


def table(seen: dict[str, Any]) -> str:
    """One line a group, then totals and oddities."""
    place = seen["quantization_in"] or "no quantization config"
    lines = [f"packed by transcode: {seen['packed']}; its source:"] if seen["packed"] else []
    lines += [f"{seen['model_type']}, quant_method {seen['quant_method']} ({place})"]
    width = max((len(g["modules"]) for g in seen["groups"]), default=0)
    wide = max((len(g["encoding"]) for g in seen["groups"]), default=0)
    for group in seen["groups"]:
        shapes = " ".join("x".join(map(str, shape)) or "[]" for shape in group["shapes"][:3])
        more = " ..." if len(group["shapes"]) > 3 else ""
        lines.append(
            f"{group['modules']:{width}}  {group['encoding']:{wide}} {group['count']:6} "
            f"{group['bytes']:14} bytes  {shapes}{more}"
        )
    other = seen["other_tensors"]
    lines.append(f"{other['count']} other tensors, {other['bytes']} bytes")
    lines.append(f"{seen['tensors']} tensors, {seen['bytes']} bytes, {len(seen['shards'])} shards")
    lines += [f"left out: {e['name']} ({e['reason']})" for e in seen["left_out"]]
    lines += [f"oddity: {text}" for text in seen["oddities"]]
    return "\n".join(lines)
