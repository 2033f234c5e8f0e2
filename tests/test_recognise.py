"""Tensors decide what a checkpoint is; the config is cross-checked, and what disagrees is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import packed
from tests.build import Spec, build, edit, edit_config
from tests.convert import pack, run

SPEC = Spec(hidden=128, intermediate=64, experts=2, layers=1)
Json = dict[str, Any]


def without(config: Json) -> Json:
    return {k: v for k, v in config.items() if k != "quantization_config"}


def quantization(**entries: Any) -> Callable[[Json], Json]:
    return lambda c: c | {"quantization_config": c["quantization_config"] | entries}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, ""),
        (quantization(quant_method=None), ""),
        (quantization(producer=None), ""),
        (quantization(quant_algo="nvfp4"), ""),
        (quantization(quant_method="compressed-tensors", quant_algo=None, producer=None), "says"),
        (quantization(quant_method="fp8", quant_algo=None, producer=None), "says"),
        (quantization(quant_method="fp8", moe_quant_algo="NVFP4"), ""),
        (quantization(quant_method="gptq"), "says"),
    ],
)
def test_whatever_the_config_says_the_tensors_are_believed(
    tmp_path: Path, change: Callable[[Json], Json], said: str
) -> None:
    truth = build(tmp_path / "src", SPEC)
    edit_config(tmp_path / "src", change)
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    assert all(torch.equal(found[m], truth[m]) for m in truth)
    oddities = json.loads(run("inspect", "--json", tmp_path / "src").out)["oddities"]
    assert any("says quant_method" in o for o in oddities) == bool(said)


def test_no_quantization_config_at_all_is_said(tmp_path: Path) -> None:
    build(tmp_path / "src", SPEC)
    edit_config(tmp_path / "src", without)
    (tmp_path / "src" / "hf_quant_config.json").unlink()
    assert "no quantization config" in run("inspect", tmp_path / "src").out
    pack(tmp_path / "src", tmp_path / "dst")


def test_experts_named_the_other_way_round_are_read(tmp_path: Path) -> None:
    """ModelOpt 0.43 wrote `experts.gate_proj.<X>` for Qwen3-VL-MoE."""
    truth = build(tmp_path / "src", SPEC)

    def turn(name: str) -> str:
        head, mark, tail = name.partition(".experts.")
        if not mark:
            return name
        expert, projection, *leaf = tail.split(".")
        return ".".join([head + ".experts", projection, expert, *leaf])

    edit(tmp_path / "src", lambda t: {turn(n): v for n, v in t.items()})
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    assert all(torch.equal(found[m], truth[m]) for m in truth)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_vision_models_prefix_makes_no_difference(tmp_path: Path, prefix: str) -> None:
    truth = build(tmp_path / "src", SPEC)
    edit(tmp_path / "src", lambda t: {prefix + n: v for n, v in t.items()})
    edit_config(tmp_path / "src", lambda c: {"text_config": without(c), **c, "model_type": "vl"})
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    assert all(torch.equal(found[prefix + m], truth[m]) for m in truth)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("model.layers.0.feed_forward.experts.gate_up_proj", torch.uint8, (2, 64, 256)),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8, (2, 256, 4, 16)),
        ("model.layers.0.mlp.experts.down_proj.weight", torch.uint8, (2, 128, 32)),
    ],
)
def test_fused_experts_are_refused_by_name(
    tmp_path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    build(tmp_path / "src", SPEC)
    edit(tmp_path / "src", lambda t: t | {name: torch.zeros(shape, dtype=dtype)})
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert name in ran.err
    assert "not read yet" in ran.err


def test_a_table_that_is_looked_up_is_carried(tmp_path: Path) -> None:
    build(tmp_path / "src", SPEC)
    table = {
        "model.embed_tokens.weight": torch.zeros(16, 64, dtype=torch.uint8),
        "model.embed_tokens.weight_scale": torch.ones(16, 8).to(torch.float8_e4m3fn),
        "model.embed_tokens.weight_scale_2": torch.tensor(1.0),
    }
    edit(tmp_path / "src", lambda t: t | table)
    target = pack(tmp_path / "src", tmp_path / "dst")
    out = packed.tensors(target)
    assert torch.equal(out["model.embed_tokens.weight"], table["model.embed_tokens.weight"])
    assert packed.config(target)["modules"]["nvfp4-unpacked"] == ["model.embed_tokens"]


def test_inspect_counts_modules_by_group(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(attention="fp8", experts=4, layers=2))
    seen = json.loads(run("inspect", "--json", tmp_path / "src").out)
    groups = {(g["modules"], g["encoding"]): g["count"] for g in seen["groups"]}
    assert groups["model.layers.*.mlp.experts.*.gate_proj", "modelopt-nvfp4"] == 8
    assert groups["model.layers.*.self_attn.q_proj", "fp8-tensor"] == 2
    assert seen["tensors"] == len(packed.tensors(tmp_path / "src"))
    assert "modelopt-nvfp4" in run("inspect", tmp_path / "src").out


def test_formats_and_layouts_are_listed() -> None:
    assert "modelopt-nvfp4" in run("formats").out
    assert "compressed-tensors-nvfp4" in run("formats").out
    assert "marlin-nvfp4" in run("layouts").out
