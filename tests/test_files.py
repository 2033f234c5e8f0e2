"""Which files are the checkpoint, what goes along, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import packed
from tests.build import Spec, build, edit
from tests.convert import pack, run
from transcode.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
SHARDED = Spec(shards=3, layers=1)


def index(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / INDEX).read_text())
    return found


def write_index(folder: Path, value: object) -> None:
    (folder / INDEX).write_text(json.dumps(value))


def refused(folder: Path, *words: str) -> None:
    """Converting is exit 1 with one line that holds the words, and leaves nothing behind."""
    target = folder.parent / "refused"
    ran = run("convert", "--to", "marlin-nvfp4", folder, target)
    assert ran.code == 1, ran.err
    assert len(ran.err.strip().splitlines()) == 1
    for word in words:
        assert word in ran.err
    assert not target.exists()
    assert not (folder.parent / "refused.partial").exists()


def test_a_sidecar_of_new_names_is_carried_and_reported(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    save_file({"mtp.fc.weight": torch.ones(3)}, tmp_path / "src" / "mtp.safetensors")
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert torch.equal(packed.tensors(target)["mtp.fc.weight"], torch.ones(3))
    assert any("mtp.safetensors" in note for note in Checkpoint.open(tmp_path / "src").notes)


def test_files_that_repeat_names_and_adapters_are_left_out(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    t = load_file(next((tmp_path / "src").glob("model-*")))
    save_file(t, tmp_path / "src" / "consolidated.safetensors")
    save_file({"x.lora_A.weight": torch.ones(2)}, tmp_path / "src" / "adapter_model.safetensors")
    save_file({"y.lora_B.weight": torch.ones(2)}, tmp_path / "src" / "other.safetensors")
    target = pack(tmp_path / "src", tmp_path / "dst")
    left = {e["name"]: e["reason"] for e in packed_report(target)["left_out"]}
    assert set(left) == {
        "consolidated.safetensors", "adapter_model.safetensors", "other.safetensors",
    }  # fmt: skip
    assert "repeats" in left["consolidated.safetensors"]
    assert not {"x.lora_A.weight", "y.lora_B.weight"} & set(packed.tensors(target))


def packed_report(target: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = json.loads(
        (target / "transcode_report.json").read_text()
    )
    return found


def test_two_named_shards_with_one_name_are_an_error(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    first, second = sorted((tmp_path / "src").glob("model-*"))[:2]
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: value}, second)
    refused(tmp_path / "src", name, first.name, second.name)


def test_a_single_file_beside_the_index_is_read_too(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    save_file({"model.extra": torch.ones(2)}, tmp_path / "src" / "model.safetensors")
    assert "model.extra" in packed.tensors(pack(tmp_path / "src", tmp_path / "dst"))


def test_shards_without_an_index_are_found(tmp_path: Path) -> None:
    truth = build(tmp_path / "src", SHARDED)
    (tmp_path / "src" / INDEX).unlink()
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    assert set(found) == set(truth)


def test_shards_without_an_index_are_counted_by_their_names(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    (tmp_path / "src" / INDEX).unlink()
    sorted((tmp_path / "src").glob("model-*"))[1].unlink()
    refused(tmp_path / "src", "model-00002-of-00003.safetensors is missing")


def test_other_files_go_along_without_weights_in_any_form(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    src = tmp_path / "src"
    for name in (
        "modeling_x.py", "original/params.json", ".git/config", ".cache/x", "a/.git/config",
        "pytorch_model.bin", "original/model.safetensors", "deep/er/w.gguf", "x.pkl", "y.pth",
    ):  # fmt: skip
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(name)
    target = pack(src, tmp_path / "dst")
    assert (target / "modeling_x.py").read_text() == "modeling_x.py"
    assert (target / "original" / "params.json").read_text() == "original/params.json"
    assert not {"pytorch_model.bin", "x.pkl", "y.pth", ".git", ".cache"} & set(os.listdir(target))
    assert not list(target.rglob("*.gguf"))
    assert not (target / "original" / "model.safetensors").exists()
    left = {e["name"] for e in packed_report(target)["left_out"]}
    assert left == {
        ".git/", ".cache/", "a/.git/", "pytorch_model.bin", "original/model.safetensors",
        "deep/er/w.gguf", "x.pkl", "y.pth",
    }  # fmt: skip


def test_misleading_configs_are_removed(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    config["text_config"] = {**config, "quantization_config": quantization}
    config["vision_config"] = {"compression_config": {"x": 1}, "depth": 2}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    target = pack(tmp_path / "src", tmp_path / "dst")
    written = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in written["text_config"]
    assert written["vision_config"] == {"depth": 2}
    assert written["quantization_config"]["source"] == quantization
    assert not (target / "hf_quant_config.json").exists()


def test_a_tensor_missing_from_the_index_is_carried(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    entries = index(tmp_path / "src")
    name = next(n for n in entries["weight_map"] if "layernorm" in n)
    del entries["weight_map"][name]
    write_index(tmp_path / "src", entries)
    assert name in packed.tensors(pack(tmp_path / "src", tmp_path / "dst"))


def test_a_ghost_in_the_index_is_an_error_that_names_it(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    entries = index(tmp_path / "src")
    entries["weight_map"]["mtp.fc.weight"] = "model-00001-of-00003.safetensors"
    write_index(tmp_path / "src", entries)
    refused(tmp_path / "src", "mtp.fc.weight")


def test_stale_places_and_sizes_in_the_index_are_corrected(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    entries = index(tmp_path / "src")
    files = sorted(set(entries["weight_map"].values()))
    entries["weight_map"] = {
        n: files[(files.index(f) + 1) % 3] for n, f in entries["weight_map"].items()
    }
    entries["metadata"] = {"total_size": 1}  # type: ignore[dict-item]
    write_index(tmp_path / "src", entries)
    pack(tmp_path / "src", tmp_path / "dst")
    notes = Checkpoint.open(tmp_path / "src").notes
    assert any("another shard" in note for note in notes)
    assert any("total_size is 1" in note for note in notes)


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "", "..", 7]
)
def test_a_path_in_the_index_that_leaves_the_folder_is_an_error(
    tmp_path: Path, place: object
) -> None:
    build(tmp_path / "src", SHARDED)
    entries = index(tmp_path / "src")
    entries["weight_map"]["x"] = place  # type: ignore[assignment]
    write_index(tmp_path / "src", entries)
    refused(tmp_path / "src", "wanted a file beside the index")


def test_links_into_the_hub_cache_are_followed_and_others_are_not(tmp_path: Path) -> None:
    build(tmp_path / "plain", SHARDED)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (tmp_path / "plain").iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (tmp_path / "secret").write_text("s")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    target = pack(snapshot, tmp_path / "dst")
    assert not (target / "notes.txt").exists()
    assert not (target / "config.json").is_symlink()
    assert {e["name"] for e in packed_report(target)["left_out"]} == {"notes.txt"}


def test_a_shard_that_links_out_of_the_folder_is_an_error(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    first = min((tmp_path / "src").glob("model-*"))
    shutil.move(first, tmp_path / "elsewhere.safetensors")
    first.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(tmp_path / "src", first.name, "leads out")


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    refused(tmp_path / "src", "no checkpoint")
    refused(tmp_path / "nothing", "no such folder")
    build(tmp_path / "other", SHARDED)
    (tmp_path / "other" / "config.json").unlink()
    refused(tmp_path / "other", "config.json is missing")


def test_tensors_of_one_linear_may_lie_in_different_shards(tmp_path: Path) -> None:
    truth = build(tmp_path / "src", SHARDED)
    where = index(tmp_path / "src")["weight_map"]
    apart = [m for m in truth if len({f for n, f in where.items() if n.startswith(m + ".")}) > 1]
    assert apart
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    assert all(torch.equal(found[m], truth[m]) for m in apart)


def test_an_unknown_leaf_of_a_packed_module_is_carried(tmp_path: Path) -> None:
    build(tmp_path / "src", SHARDED)
    name = "model.layers.0.self_attn.k_proj.k_scale"
    edit(tmp_path / "src", lambda t: t | {name: torch.tensor(0.5)})
    assert packed.tensors(pack(tmp_path / "src", tmp_path / "dst"))[name] == 0.5
