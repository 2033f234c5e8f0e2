"""`verify` finds every difference, and believes neither the Report nor the packed file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.build import Spec, build, edit
from tests.convert import pack, run

SPEC = Spec(hidden=192, intermediate=96, experts=2, layers=1, attention="nvfp4", biases=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and what was packed from it."""
    root = tmp_path_factory.mktemp("verify")
    build(root / "src", SPEC)
    return root / "src", pack(root / "src", root / "dst")


@pytest.fixture
def copies(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Both, to be spoilt."""
    for folder in pair:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "src", tmp_path / "dst"


def shard_of(folder: Path, tensor: str) -> Path:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if tensor in set(file.keys()):
                return path
    raise AssertionError(tensor)


def rewrite(folder: Path, tensor: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = shard_of(folder, tensor)
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def difference(src: Path, dst: Path, *words: str) -> None:
    ran = run("verify", src, dst)
    assert ran.code == 3, ran.err
    for word in words:
        assert word in ran.out
    assert json.loads(run("verify", "--json", src, dst).out)["equal"] is False


def test_a_sound_pair_is_equal(pair: tuple[Path, Path]) -> None:
    ran = run("verify", "--json", *pair)
    assert ran.code == 0
    assert json.loads(ran.out) == {"equal": True, "differences": []}


EVERY = (
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.0.mlp.experts.w13_weight_scale",
    "model.layers.0.mlp.experts.w13_weight_scale_2",
    "model.layers.0.mlp.experts.w13_source_global_scale",
    "model.layers.0.mlp.experts.w13_source_input_scale",
    "model.layers.0.mlp.experts.w2_weight",
    "model.layers.0.mlp.experts.w2_weight_scale",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.q_proj.weight_scale",
    "model.layers.0.self_attn.q_proj.weight_global_scale",
    "model.layers.0.self_attn.q_proj.source_global_scale",
    "model.layers.0.self_attn.k_proj.bias",
    "lm_head.weight",
    "model.norm.weight",
)


@pytest.mark.parametrize("tensor", EVERY)
@pytest.mark.parametrize("at", [0, -1])
def test_one_changed_bit_in_any_tensor_is_found(
    copies: tuple[Path, Path], tensor: str, at: int
) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        value = tensors[tensor]
        raw = value.flatten().view(torch.uint8)
        raw[at] ^= 1
        tensors[tensor] = raw.view(value.dtype).reshape(value.shape)

    rewrite(copies[1], tensor, flip)
    difference(*copies, tensor)


def test_a_changed_source_is_found(copies: tuple[Path, Path]) -> None:
    name = "model.layers.0.mlp.experts.1.down_proj.weight"

    def flip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name][7, 3] ^= 0x10
        return tensors

    edit(copies[0], flip)
    difference(*copies, "experts.1.down_proj's codes differ")


def test_missing_extra_and_reshaped_tensors_are_found(copies: tuple[Path, Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["stray"] = torch.ones(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()

    rewrite(copies[1], "model.norm.weight", change)
    difference(*copies, "model.norm.weight: missing", "stray: not wanted", "lm_head.weight BF16")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("activation_dtype", "float16", 3),
        ("tp", [1, 2, 3], 3),
        ("ignore", [], 3),
        ("source", {}, 3),
        ("layout_version", 2, 1),
        ("quant_method", "modelopt", 1),
        ("options", {"unify": "rescale", "exact": False, "tp": -1}, 1),
        ("options", None, 1),
    ],
)
def test_a_changed_config_is_found(
    copies: tuple[Path, Path], key: str, value: Any, code: int
) -> None:
    path = copies[1] / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][key] = value
    path.write_text(json.dumps(config))
    assert run("verify", *copies).code == code


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "transcode.index.json"])
def test_a_changed_index_is_found(copies: tuple[Path, Path], name: str) -> None:
    path = copies[1] / name
    entries = json.loads(path.read_text())
    entries["metadata"]["total_size"] += 1
    path.write_text(json.dumps(entries))
    difference(*copies, "total_size")
    entries["weight_map"].popitem()
    path.write_text(json.dumps(entries))
    difference(*copies, "names other tensors")
    path.unlink()
    difference(*copies, f"{name}: missing")


def test_the_mark_of_a_finished_folder_is_asked_for(copies: tuple[Path, Path]) -> None:
    (copies[1] / "transcode_report.json").unlink()
    difference(*copies, "transcode_report.json: missing")


def test_other_files_are_compared(copies: tuple[Path, Path]) -> None:
    (copies[1] / "generation_config.json").write_text("{}")
    (copies[1] / "tokenizer.json").unlink()
    (copies[1] / "hf_quant_config.json").write_text("{}")
    difference(
        *copies,
        "generation_config.json: differs",
        "tokenizer.json: missing",
        "hf_quant_config.json: neither in SRC",
    )


def test_a_truncated_shard_is_a_difference(copies: tuple[Path, Path]) -> None:
    path = shard_of(copies[1], "lm_head.weight")
    path.write_bytes(path.read_bytes()[:-1])
    difference(*copies, f"{path.name}: ", "truncated")


def test_what_is_no_folder_is_exit_1(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("verify", pair[0], tmp_path / "none").code == 1
    assert run("verify", tmp_path / "none", pair[1]).code == 1
    assert run("verify", pair[0], pair[0]).code == 1
