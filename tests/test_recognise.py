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
from tests.producers import KINDS

SPEC = Spec(hidden=128, intermediate=64, experts=2, layers=1)
UNKNOWN = "stacked quantised experts of a kind that is not known here"
Json = dict[str, Any]


def without(config: Json) -> Json:
    return {k: v for k, v in config.items() if k != "quantization_config"}


def quantization(**entries: Any) -> Callable[[Json], Json]:
    return lambda c: c | {"quantization_config": c["quantization_config"] | entries}


def oddities(src: Path) -> list[str]:
    found: list[str] = json.loads(run("inspect", "--json", src).out)["oddities"]
    return found


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
    assert any("says quant_method" in o for o in oddities(tmp_path / "src")) == bool(said)


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
    ("name", "shape", "words"),
    [
        ("model.layers.0.feed_forward.experts.gate_up_proj", (2, 64, 256), UNKNOWN),
        ("model.layers.0.mlp.experts.down_proj.weight", (2, 128, 32), UNKNOWN),
        (
            "model.layers.0.mlp.experts.gate_up_proj_blocks", (2, 256, 4, 16),
            "MXFP4 blocks without what belongs to them",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["marlin-nvfp4", "modelopt", "canonical"])
def test_stacked_experts_without_scales_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str, form: str
) -> None:
    build(tmp_path / "src", SPEC)
    edit(tmp_path / "src", lambda t: t | {name: torch.zeros(shape, dtype=torch.uint8)})
    ran = run("convert", "--to", form, tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert name in ran.err
    assert words in ran.err
    assert any(words in o for o in oddities(tmp_path / "src"))


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
    assert groups["model.layers.*.self_attn.q_proj", "modelopt-fp8-tensor"] == 2
    assert seen["tensors"] == len(packed.tensors(tmp_path / "src"))
    assert "modelopt-nvfp4" in run("inspect", tmp_path / "src").out


NAMED = {
    "modelopt-nvfp4-llama4": {"modelopt-nvfp4"},
    "modelopt-w4a8": {"modelopt-nvfp4-32"},
    "modelopt-fp8-block": {"modelopt-fp8-block"},
    "ct-mixed": {"compressed-tensors-fp8-channel", "compressed-tensors-nvfp4"},
    "ct-int4-nvfp4": {"compressed-tensors-int4", "compressed-tensors-nvfp4"},
    "fp8-deepseek": {"deepseek-fp8-block"},
    "fp8-fbgemm": {"fbgemm-fp8-channel"},
    "v4-hub": {"deepseek-v4-fp8-block", "deepseek-v4-mxfp4"},
    "gptoss-mxfp4": {"gpt-oss-mxfp4"},
    "quark-mxfp4": {"quark-mxfp4"},
    "quark-nvfp4": {"quark-nvfp4"},
}


@pytest.mark.parametrize("kind", NAMED)
def test_inspect_names_every_producers_formats_and_finds_no_oddity(
    tmp_path: Path, kind: str
) -> None:
    made = KINDS[kind](tmp_path / "src")
    seen = json.loads(run("inspect", "--json", tmp_path / "src").out)
    quantised = [g for g in seen["groups"] if g["encoding"] != "unquantised"]
    assert {g["encoding"] for g in quantised} == NAMED[kind]
    assert sum(g["count"] for g in quantised) == len(made.truth)
    assert not seen["oddities"]
    listed = sum(g["bytes"] for g in seen["groups"]) + seen["other_tensors"]["bytes"]
    assert listed >= seen["bytes"]  # a scalar that many experts share counts for each


def test_inspect_shows_our_own_stacked_form_module_by_module(tmp_path: Path) -> None:
    build(tmp_path / "src", SPEC)
    assert run("convert", "--to", "canonical", tmp_path / "src", tmp_path / "own").code == 0
    seen = json.loads(run("inspect", "--json", tmp_path / "own").out)
    groups = {(g["modules"], g["encoding"]): g["count"] for g in seen["groups"]}
    assert groups["model.layers.*.mlp.experts.*.up_proj", "canonical-nvfp4"] == 2
    assert seen["quant_method"] == "transcode"
    assert not seen["oddities"]


def test_formats_and_layouts_are_listed() -> None:
    assert "modelopt-nvfp4" in run("formats").out
    assert "compressed-tensors-nvfp4" in run("formats").out
    assert "marlin-nvfp4" in run("layouts").out
