"""Reads a rewritten folder with the safetensors package alone and says what it stands for.

An independent hand: nothing comes from `transcode`. A leaf's name, dtype and shape tell the form;
the config only where stacked experts need it. NVFP4 is `code * fp32(scale * global)`, in
compressed-tensors `code * (scale / global)`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import packed
from tests.build import GRID, Tensors
from tests.convert import Ran, run
from tests.producers import KINDS, Built

Json = dict[str, Any]
ULP = 1.6e-7
"""A scalar and its reciprocal: two roundings of 2^-24 in the factor and the product, one in the
quotient."""

POWERS = (torch.uint8, torch.float8_e8m0fnu)
PACKED = (torch.uint8, torch.int8)
CODES, SCALES = ("weight_packed", "weight"), ("weight_scale", "weight_scale_inv", "scale")
GLOBALS = ("weight_scale_2", "weight_global_scale")
INPUTS = ("input_scale", "input_scale_2", "input_global_scale")
OURS = ("source_global_scale", "source_input_scale")
LEAVES = (*CODES, *SCALES, *GLOBALS, *INPUTS, *OURS, "bias")
SUFFIXED = re.compile(rf"(.+\.experts)\.(w13|w2)_({'|'.join(LEAVES)})")
FUSED = re.compile(
    r"(.+\.experts)\.(gate_up|down)_proj(?:_(blocks|scales|bias|weight_scale|weight_scale_2|"
    r"input_scale))?"
)
PAIRED = re.compile(r"(.+\.experts\.\d+)\.gate_up_proj\.(.+)")
KV = re.compile(r"(.+?\.)(?:attn\.)?([kv])(?:_proj\.(?:\2|output))?_scale")


@dataclass(frozen=True)
class Meaning:
    """What a folder holds, by per-expert module name.

    weights: float32 `[N, K]` of every quantised linear.  inputs: activation scales as factors.
    biases: of quantised linears.  kv: by "...self_attn.k".  rest: tensors that belong to none.
    """

    weights: Tensors = field(default_factory=dict)
    inputs: Tensors = field(default_factory=dict)
    biases: Tensors = field(default_factory=dict)
    kv: Tensors = field(default_factory=dict)
    rest: Tensors = field(default_factory=dict)


def load_json(path: Path) -> Json:
    found: Json = json.loads(path.read_text())
    return found


def powers(scale: Tensor) -> Tensor:
    """E8M0 bytes as float32; 255 is NaN."""
    byte = scale.view(torch.uint8).double()
    return torch.where(byte == 255, torch.nan, torch.exp2(byte - 127)).float()


def matrix(
    leaves: Tensors, rounded: torch.dtype = torch.float32, factors: torch.dtype | None = None
) -> Tensor:
    """The float32 `[N, K]` of one linear; scales of FP8, and factors, are rounded to a dtype."""
    codes = next(leaves[leaf] for leaf in CODES if leaf in leaves)
    stored = next(leaves[leaf] for leaf in SCALES if leaf in leaves)
    if codes.dtype in PACKED:
        byte = codes.view(torch.uint8)
        value = GRID[torch.stack((byte & 15, byte >> 4), -1).flatten(-2).long()]
    else:
        value = codes.float()
    scale = powers(stored) if stored.dtype in POWERS else stored.float()
    if codes.dtype not in PACKED:
        scale = scale.to(rounded).float()
    if "weight_global_scale" in leaves and factors:
        scale = scale * (1 / leaves["weight_global_scale"]).to(factors).float()
    elif "weight_global_scale" in leaves:
        scale = scale / leaves["weight_global_scale"]
    if "weight_scale_2" in leaves:
        scale = scale * leaves["weight_scale_2"].to(factors or torch.float32).float()
        if leaves["weight_scale_2"] == 0:
            return torch.zeros(value.shape)
    n, k = value.shape
    if scale.numel() == 1:
        return value * scale.reshape(())
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    if scale.dim() == 1:
        scale = scale[:, None] if len(scale) == n else scale[None]
    tall, wide = (1, k // scale.shape[1]) if scale.shape[0] == n else (128, 128)
    return value * scale.repeat_interleave(tall, 0)[:n].repeat_interleave(wide, 1)[:, :k]


def one_by_one(tensors: Tensors, config: Json) -> Tensors:
    """Every tensor, with stacked experts taken apart into the leaves of single ones."""
    quant = config.get("quantization_config") or {}
    turns = (config.get("text_config") or config)["model_type"] == "gpt_oss"
    found: Tensors = {}
    for name, value in tensors.items():
        if (m := SUFFIXED.fullmatch(name)) and quant.get("layout") == "canonical":
            leaves = quant["experts"][m[1]]
            parts = leaves[:-1] if m[2] == "w13" else leaves[-1:]
            found |= apart(m[1], parts, m[3], value, turns=False)
        elif (m := FUSED.fullmatch(name)) and quantised_stack(tensors, m):
            parts = ["gate_proj", "up_proj"] if m[2] == "gate_up" else ["down_proj"]
            leaf = {None: "weight", "blocks": "weight", "scales": "weight_scale"}.get(m[3], m[3])
            experts = tensors[f"{m[1]}.down_proj{'_blocks' * blocks(tensors, m)}"].shape[0]
            if not value.dim():
                value = value.expand(experts, len(parts))
            elif m[3] == "blocks":
                value = value.flatten(-2)
            elif value.dim() == 3 and m[3] != "scales":
                value = value.transpose(1, 2)
            found |= apart(m[1], parts, leaf or "", value, turns=turns)
        elif turns and (m := PAIRED.fullmatch(name)):
            for i, part in enumerate(("gate_proj", "up_proj")):
                found[f"{m[1]}.{part}.{m[2]}"] = value[i::2] if value.dim() else value
        else:
            found[name] = value
    return found


def blocks(tensors: Tensors, m: re.Match[str]) -> bool:
    return f"{m[1]}.down_proj_blocks" in tensors


def quantised_stack(tensors: Tensors, m: re.Match[str]) -> bool:
    return blocks(tensors, m) or f"{m[1]}.down_proj_weight_scale" in tensors


def apart(container: str, parts: list[str], leaf: str, value: Tensor, *, turns: bool) -> Tensors:
    """`[E, ...]` to each expert's projections: halves of rows, alternating rows, or scalars."""
    found: Tensors = {}
    for e, one in enumerate(value):
        for i, part in enumerate(parts):
            name = f"{container}.{e}.{part}.{leaf}"
            if one.dim() < 2 and one.numel() in (1, len(parts)):
                found[name] = one.reshape(-1)[i % one.numel()]
            elif turns:
                found[name] = one[i :: len(parts)]
            else:
                rows = one.shape[0] // len(parts)
                found[name] = one[i * rows : (i + 1) * rows]
    return found


def meaning(
    folder: Path, rounded: torch.dtype = torch.float32, factors: torch.dtype | None = None
) -> Meaning:
    """What the folder's files say; scales of FP8, and global ones, may be rounded to a dtype."""
    made = Meaning()
    config = load_json(folder / "config.json")
    groups: dict[str, Tensors] = {}
    for name, value in one_by_one(packed.tensors(folder), config).items():
        module, _, leaf = name.rpartition(".")
        groups.setdefault(module if leaf in LEAVES else name, {})[leaf] = value
    for module, leaves in groups.items():
        codes = next((leaves[leaf] for leaf in CODES if leaf in leaves), None)
        scaled = any(leaf in leaves for leaf in SCALES)
        if codes is None or not scaled or codes.dtype == torch.int32:
            for leaf, value in leaves.items():
                name = f"{module}.{leaf}" if leaf in LEAVES else module
                if m := KV.fullmatch(name):
                    made.kv[m[1] + m[2]] = value
                else:
                    made.rest[name] = value
            continue
        made.weights[module] = matrix(leaves, rounded, factors)
        for leaf in INPUTS:
            if leaf in leaves and not leaves[leaf].float().isnan().all():
                given = leaves[leaf].float().reshape(())
                made.inputs[module] = 1 / given if leaf == "input_global_scale" else given
        if "bias" in leaves:
            made.biases[module] = leaves["bias"]
    return made


def raw(value: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """dtype, shape and bytes."""
    flat = value.contiguous().flatten().view(torch.uint8)
    return value.dtype, value.shape, flat.numpy().tobytes()


def same_bytes(ours: Tensors, theirs: Tensors) -> None:
    """Both have the same tensors: names, dtypes, shapes, bytes."""
    assert sorted(ours) == sorted(theirs)
    assert [n for n in ours if raw(ours[n]) != raw(theirs[n])] == []


def close(ours: Tensor, theirs: Tensor, rel: float) -> bool:
    """Equal, bit for bit with `rel` 0; else at most so far off."""
    if rel:
        return bool(((ours - theirs).abs() <= rel * theirs.abs()).all())
    return ours.shape == theirs.shape and raw(ours) == raw(theirs)


def differing(ours: Tensors, theirs: Tensors, rel: float) -> list[str]:
    """What is there once, or differs."""
    names = ours.keys() | theirs.keys()
    return sorted(
        n for n in names
        if n not in ours or n not in theirs or not close(ours[n], theirs[n], rel)
    )  # fmt: skip


def convert(target: str, source: Path, into: Path, *options: str) -> Path:
    """Convert; it must exit 0."""
    ran = run("convert", "--to", target, *options, "--overwrite", source, into)
    assert ran.code == 0, ran.err
    return into


def proved(target: str, source: Path, into: Path, *options: str) -> Path:
    """Convert, and verify from disk; both must exit 0."""
    convert(target, source, into, *options)
    ran = run("verify", source, into)
    assert ran.code == 0, ran.out + ran.err
    return into


def refused(target: str, source: Path, into: Path, *options: str, code: int = 1) -> str:
    """Convert; it must exit with the code, say why in one line, and leave nothing in DST."""
    ran: Ran = run("convert", "--to", target, *options, source, into)
    assert ran.code == code, ran.out + ran.err
    assert len(ran.err.strip().splitlines()) == 1, ran.err
    assert not into.exists()
    return ran.err


def report(folder: Path) -> Json:
    return load_json(folder / "transcode_report.json")


def copied(source: Path, into: Path) -> Path:
    shutil.copytree(source, into)
    return into


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Built]]:
    """The folder of a producer's kind and what it stands for; written once."""

    @cache
    def made(name: str) -> tuple[Path, Built]:
        path = tmp_path_factory.mktemp("kind") / name
        return path, KINDS[name](path)

    return made
