"""A packed folder is a source: rewriting it gives back what was packed, byte for byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.build import Spec, build
from tests.convert import pack, run
from tests.packed import tensors
from tests.rewriting import same_bytes

DATA = Path(__file__).parent / "data"
SMALL = Spec(hidden=192, intermediate=96, experts=3)
REAL = {
    "ct_nvfp4_llama": "compressed-tensors",
    "ct_nvfp4_qwen3moe_sharded": "compressed-tensors",
    "modelopt_mixed_fp8attn_nvfp4exp_qwen3moe": "modelopt",
    "modelopt_nvfp4_llama": "modelopt",
    "modelopt_nvfp4_llama4": "modelopt",
    "pair_cast_mxfp4_to_nvfp4_gptoss": "modelopt",
}
STACKED = ("modelopt_nvfp4_llama4", "pair_cast_mxfp4_to_nvfp4_gptoss")


def back(packed: Path, target: Path, form: str, *options: str) -> dict[str, torch.Tensor]:
    ran = run("convert", "--to", form, *options, packed, target)
    assert ran.code == 0, ran.err
    assert run("verify", packed, target).code == 0
    return tensors(target)


@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints_come_back(tmp_path: Path, name: str) -> None:
    packed = pack(DATA / name, tmp_path / "packed")
    stacked = ("--fused",) if name in STACKED else ()
    found, wanted = back(packed, tmp_path / "back", REAL[name], *stacked), tensors(DATA / name)
    same_bytes(found, wanted)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"gate_up_ratio": (4.0, 1.37, 1.0)}, ()),  # folded: only scalars change
        ({"tiny_scales": True}, ()),  # flushed scales stand in the Report
        ({"w4a16": True, "expert_biases": True, "biases": True}, ()),
        ({"model_type": "mixtral"}, ("--tp", "2")),  # padded
        ({"model_type": "nemotron_h"}, ()),  # not gated
        ({"kv_scales": True, "shards": 3}, ("--dtype", "float16")),
    ],
    ids=["folded", "flushed", "biases", "padded", "not gated", "float16"],
)
def test_built_checkpoints_come_back(
    tmp_path: Path, dialect: str, change: dict[str, object], options: tuple[str, ...]
) -> None:
    build(tmp_path / "src", replace(SMALL, dialect=dialect, **change))  # type: ignore[arg-type]
    packed = pack(tmp_path / "src", tmp_path / "packed", *options)
    found, wanted = back(packed, tmp_path / "back", dialect), tensors(tmp_path / "src")
    same_bytes(found, wanted)


def test_what_was_rounded_stays_so_and_means_the_same(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(SMALL, qkv_ratio=1.37))
    packed = pack(tmp_path / "src", tmp_path / "packed")
    found = back(packed, tmp_path / "back", "modelopt")
    scalars = {found[f"model.layers.0.self_attn.{x}_proj.weight_scale_2"].item() for x in "qkv"}
    wanted = tensors(tmp_path / "src")
    largest = max(wanted[f"model.layers.0.self_attn.{x}_proj.weight_scale_2"].item() for x in "qkv")
    assert scalars == {largest}
    assert "stay so" in run("convert", "--to", "canonical", packed, tmp_path / "c").err


def test_a_packed_folder_is_packed_again_for_more_ranks(tmp_path: Path) -> None:
    first = pack(DATA / "modelopt_nvfp4_qwen3moe", tmp_path / "first")
    again = run("convert", "--to", "marlin-nvfp4", "--tp", "4", first, tmp_path / "again")
    assert again.code == 0, again.err
    pack(DATA / "modelopt_nvfp4_qwen3moe", tmp_path / "direct", "--tp", "4")
    found, wanted = tensors(tmp_path / "again"), tensors(tmp_path / "direct")
    same_bytes(found, wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout_version": 7}, "version 7, wanted 1"),
        ({"sizes": {"model.layers.0.mlp.experts.w13": {}}}, "is not ours"),
        ({"sizes": 5}, "is not ours"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    packed = pack(DATA / "modelopt_nvfp4_qwen3moe", tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    ran = run("convert", "--to", "modelopt", packed, tmp_path / "back")
    assert ran.code == 1
    assert words in ran.err


def test_without_its_report_a_packed_folder_is_refused(tmp_path: Path) -> None:
    packed = pack(DATA / "modelopt_nvfp4_llama", tmp_path / "packed")
    (packed / "transcode_report.json").unlink()
    ran = run("convert", "--to", "modelopt", packed, tmp_path / "back")
    assert ran.code == 1
    assert "Report" in ran.err


@pytest.mark.parametrize(
    ("file", "where", "value"),
    [
        ("transcode_report.json", ("rounded_biases",), -1),
        ("transcode_report.json", ("scaled",), 7),
        ("config.json", ("sizes", "block"), []),
        ("config.json", ("sizes", "padded_n"), [1.5]),
        ("config.json", ("sizes", "padded_k"), 10**30),
    ],
)
def test_what_was_tampered_with_is_refused_in_a_line_or_ignored(
    tmp_path: Path, file: str, where: tuple[str, ...], value: object
) -> None:
    packed = pack(DATA / "modelopt_nvfp4_qwen3moe", tmp_path / "packed")
    told = json.loads((packed / file).read_text())
    inner = told if file != "config.json" else told["quantization_config"]["sizes"]
    if file == "config.json":
        inner, where = inner["model.layers.1.mlp.experts.w2"], where[1:]
    inner[where[0]] = value
    (packed / file).write_text(json.dumps(told))
    ran = run("convert", "--to", "canonical", packed, tmp_path / "dst")
    assert ran.code in (0, 1)
    assert len(ran.err.strip().splitlines()) <= 1 or ran.code == 0


def test_a_canonical_folders_list_of_experts_may_be_anything(tmp_path: Path) -> None:
    done = run("convert", "--to", "canonical", DATA / "modelopt_nvfp4_qwen3moe", tmp_path / "c")
    assert done.code == 0
    told = json.loads((tmp_path / "c" / "config.json").read_text())
    experts = told["quantization_config"]["experts"]
    told["quantization_config"]["experts"] = dict.fromkeys(experts, 1.5)
    (tmp_path / "c" / "config.json").write_text(json.dumps(told))
    ran = run("convert", "--to", "modelopt", tmp_path / "c", tmp_path / "dst")
    assert ran.code == 0, ran.err
