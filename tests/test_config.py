"""The destination's config.json: what a loader needs, and the source's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests import packed
from tests.build import Spec, build, edit, edit_config, write_json
from tests.convert import pack

FP8 = Spec(layers=1, attention="fp8_block")


def carried(target: Path, encoding: str) -> dict[str, Any]:
    found = [e for e in packed.config(target)["carried"] if e["encoding"] == encoding]
    assert len(found) == 1
    entry: dict[str, Any] = found[0]
    return entry


def test_deepseek_v4_keeps_the_words_for_what_is_not_packed(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(model_type="deepseek_v4", mtp_layers=1, shared_experts=1))
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert carried(target, "fp8-block")["config"]["weight_block_size"] == [128, 128]
    assert "group_size" not in carried(target, "mxfp4")["config"].get("weights", {})


def test_a_module_list_that_stands_only_in_the_other_file_is_found(tmp_path: Path) -> None:
    build(tmp_path / "src", FP8)
    module = "model.layers.0.self_attn.q_proj"
    other = json.loads((tmp_path / "src" / "hf_quant_config.json").read_text())
    other["quantization"]["quantized_layers"] = {module: {"quant_algo": "FP8_PB_WO", "x": 1}}
    write_json(tmp_path / "src" / "hf_quant_config.json", other)

    def strip(c: dict[str, Any]) -> dict[str, Any]:
        return c | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED"}}

    edit_config(tmp_path / "src", strip)
    target = pack(tmp_path / "src", tmp_path / "dst")
    entries = packed.config(target)["carried"]
    assert {"quant_algo": "FP8_PB_WO", "x": 1} in [e["config"] for e in entries]


def test_the_most_specific_group_describes_a_module(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(dialect="compressed-tensors", layers=1, attention="fp8"))

    def groups(c: dict[str, Any]) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float"}
        c["quantization_config"]["config_groups"] = {
            "a": {"targets": ["Linear"], "weights": weights, "is": "class"},
            "b": {"targets": ["re:.*k_proj"], "weights": weights, "is": "pattern"},
            "c": {"targets": ["model.layers.0.self_attn.q_proj"], "weights": weights, "is": "name"},
        }
        return c

    edit_config(tmp_path / "src", groups)
    entries = packed.config(pack(tmp_path / "src", tmp_path / "dst"))["carried"]
    how = {m.rpartition(".")[2]: e["config"]["is"] for e in entries for m in e["modules"]}
    assert how == {"q_proj": "name", "k_proj": "pattern", "v_proj": "class", "o_proj": "class"}


def test_nothing_of_the_sources_description_is_lost(tmp_path: Path) -> None:
    build(tmp_path / "src", FP8)

    def nest(c: dict[str, Any]) -> dict[str, Any]:
        inner = {"text_config": {"quantization_config": {"deep": 1}, "kept": 2}}
        return c | {"compression_config": {"old": 1}, "thinker_config": inner}

    edit_config(tmp_path / "src", nest)
    source = json.loads((tmp_path / "src" / "config.json").read_text())
    target = pack(tmp_path / "src", tmp_path / "dst")
    c = packed.config(target)
    assert c["source"] == source["quantization_config"]
    assert c["source_others"]["compression_config"] == {"old": 1}
    assert c["source_others"]["thinker_config/text_config/quantization_config"] == {"deep": 1}
    assert c["source_others"]["hf_quant_config.json"] == json.loads(
        (tmp_path / "src" / "hf_quant_config.json").read_text()
    )
    written = json.loads((target / "config.json").read_text())
    assert written["thinker_config"] == {"text_config": {"kept": 2}}
    assert "compression_config" not in written


def test_the_config_says_which_dtype_the_file_is_for(tmp_path: Path) -> None:
    build(tmp_path / "src", FP8)
    target = pack(tmp_path / "src", tmp_path / "dst", "--dtype", "float16")
    written = json.loads((target / "config.json").read_text())
    assert {written.get("dtype"), written.get("torch_dtype")} <= {"float16", None}
    assert packed.config(target)["activation_dtype"] == "float16"


def test_every_stack_says_its_lift_and_its_format(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(dialect="compressed-tensors", layers=1))
    target = pack(tmp_path / "src", tmp_path / "dst")
    sizes = packed.config(target)["sizes"]
    report = json.loads((target / "transcode_report.json").read_text())
    assert {n: s["lift"] for n, s in sizes.items()} == {
        s["name"]: s["lift"] for s in report["stacks"]
    }
    w13 = sizes["model.layers.0.mlp.experts.w13"]
    assert w13["formats"] == ["compressed-tensors-nvfp4"] * 2


def test_int4_experts_go_along_beside_packed_ones(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(dialect="compressed-tensors", layers=1, down="int4"))
    zero = "model.layers.0.mlp.experts.0.down_proj.weight_zero_point"
    edit(tmp_path / "src", lambda t: t | {zero: torch.zeros(4, 3, dtype=torch.int32)})
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert zero in packed.tensors(target)
    assert "int4" in packed.config(target)["modules"]


def test_an_embedding_of_any_name_is_not_packed(tmp_path: Path) -> None:
    build(tmp_path / "src", FP8)
    tables = {
        f"{name}.{leaf}": value
        for name in ("backbone.embeddings", "model.embed_tokens_per_layer")
        for leaf, value in {
            "weight": torch.zeros(16, 64, dtype=torch.uint8),
            "weight_scale": torch.ones(16, 8).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(1.0),
        }.items()
    }
    edit(tmp_path / "src", lambda t: t | tables)
    names = packed.config(pack(tmp_path / "src", tmp_path / "dst"))["modules"]["nvfp4-unpacked"]
    assert names == ["backbone.embeddings", "model.embed_tokens_per_layer"]
