"""Checkpoints put together from several: what is taken, what is gone, what the config says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build import edit, edit_config
from tests.convert import run
from tests.packed import tensors
from tests.test_recode import DATA, NV, convert, values
from transcode.pack import raw_bytes

CT, FP8 = "ct_nvfp4_qwen3moe", "ct_fp8dynamic_qwen3moe"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in BF16, with an MTP layer of its own under `mtp.` and one as layer 2."""
    target = tmp_path_factory.mktemp("plain") / "bf16"
    assert run("convert", "--to", "bf16", DATA / NV, target).code == 0

    def add(t: dict[str, Tensor]) -> dict[str, Tensor]:
        last = {n: v for n, v in t.items() if n.startswith("model.layers.1.")}
        more = {n.replace("model.layers.1.", "mtp.layers.0."): v.clone() for n, v in last.items()}
        more |= {n.replace("layers.1.", "layers.2."): v.clone() for n, v in last.items()}
        hidden = t["model.norm.weight"].numel()
        return t | more | {"mtp.fc.weight": torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)}

    edit(target, add)
    edit_config(target, lambda c: c | {"num_nextn_predict_layers": 1})
    return target


def compose(target: Path, base: Path, *takes: tuple[str, Path], to: str = "") -> dict[str, Any]:
    """Compose and verify; both must exit 0. The Report."""
    words = [w for glob, other in takes for w in ("--take", glob, "from", other)]
    ran = run("compose", target, "--base", base, *words, *(("--to", to) if to else ()))
    assert ran.code == 0, ran.err
    proved = run("verify", base, target, *words)
    assert proved.code == 0, proved.out + proved.err
    done: dict[str, Any] = json.loads((target / "transcode_report.json").read_text())
    return done


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("glob", "prefix"), [("mtp.*", "mtp."), ("model.layers.2.*", "model.layers.2.")]
)
@pytest.mark.parametrize("base", [NV, CT])
def test_mtp_is_added_back_in_bf16_and_listed(
    tmp_path: Path, plain: Path, base: str, glob: str, prefix: str
) -> None:
    done = compose(tmp_path / "dst", DATA / base, (glob, plain))
    before, added, after = tensors(DATA / base), tensors(plain), tensors(tmp_path / "dst")
    wanted = {n for n in added if n.startswith(prefix)}
    assert set(after) == set(before) | wanted
    assert all(torch.equal(after[n], added[n]) for n in wanted)
    assert all(torch.equal(raw_bytes(after[n]), raw_bytes(before[n])) for n in before)
    told = config(tmp_path / "dst")
    assert told["num_nextn_predict_layers"] == 1
    ignore = told["quantization_config"]["ignore"]
    assert any(name.startswith(prefix) for name in ignore)
    [entry] = done["taken"]
    assert (entry["glob"], entry["tensors"], entry["replaced"]) == (glob, len(wanted), 0)
    ran = run("check", tmp_path / "dst")
    assert ran.code == 0, ran.out


def test_a_layer_of_another_producer_is_swapped_in_and_written_as_the_base_has_it(
    tmp_path: Path,
) -> None:
    done = compose(tmp_path / "dst", DATA / NV, ("model.layers.1.mlp.experts.*", DATA / CT))
    assert done["format"] == "modelopt"
    after, base, other = values(tmp_path / "dst"), values(DATA / NV), values(DATA / CT)
    assert set(after) == set(base)
    for name, value in after.items():
        wanted = other if name.startswith("model.layers.1.mlp.experts.") else base
        assert torch.allclose(value, wanted[name], rtol=1e-6, atol=0)
    assert not any(
        n.endswith(("weight_packed", "weight_global_scale")) for n in tensors(tmp_path / "dst")
    )


def test_what_is_replaced_by_bf16_is_gone_and_ignored(tmp_path: Path, plain: Path) -> None:
    done = compose(tmp_path / "dst", DATA / NV, ("model.layers.0.mlp.experts.*", plain))
    after = tensors(tmp_path / "dst")
    stale = [n for n in after if n.startswith("model.layers.0.mlp.experts.") and "scale" in n]
    assert not stale
    assert done["taken"][0]["dropped"] > 0
    ignore = config(tmp_path / "dst")["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts" in ignore


def test_plain_weights_among_plain_weights(tmp_path: Path, plain: Path) -> None:
    shutil.copytree(plain, tmp_path / "base")
    edit(tmp_path / "base", lambda t: {n: v for n, v in t.items() if not n.startswith("mtp.")})
    compose(tmp_path / "dst", tmp_path / "base", ("mtp.*", plain))
    before, after = tensors(plain), tensors(tmp_path / "dst")
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert "quantization_config" not in config(tmp_path / "dst")


def test_a_plain_base_takes_the_form_of_what_is_quantised(tmp_path: Path, plain: Path) -> None:
    done = compose(tmp_path / "dst", plain, ("model.layers.*.mlp.experts.*", DATA / CT))
    assert done["format"] == "compressed-tensors"
    assert done["modules"]["nvfp4"] == 24


def refused(base: Path, target: Path, *words: str | Path) -> str:
    ran = run("compose", target, "--base", base, *words)
    assert ran.code in (1, 2), ran.out
    assert not target.exists()
    return str(ran.err + ran.out)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, plain: Path) -> None:
    base, dst = DATA / NV, tmp_path / "dst"
    assert "no tensor of such a name" in refused(base, dst, "--take", "xyz.*", "from", plain)
    half = ("--take", "*.experts.0.up_proj.weight_scale", "from", base)
    assert "takes a part of it only" in refused(base, dst, *half)
    twice = ("--take", "mtp.*", "from", plain, "--take", "mtp.f*", "from", plain)
    assert "mtp.fc.weight is taken twice" in refused(base, dst, *twice)
    assert "wanted GLOB from OTHER" in refused(base, dst, "--take", "mtp.*", "of", plain)
    one = ("--take", "model.layers.0.mlp.experts.1.*", "from", plain)
    assert "they must be in one encoding" in refused(base, dst, *one)
    shutil.copytree(plain, tmp_path / "odd")
    name = "model.layers.2.self_attn.q_proj.weight"
    edit(tmp_path / "odd", lambda t: t | {name: t[name][:, :-16].contiguous()})
    told = refused(base, dst, "--take", "model.layers.2.*", "from", tmp_path / "odd")
    assert "model.layers.2.self_attn.q_proj is" in told
    assert run("convert", "--to", "marlin-nvfp4", base, tmp_path / "packed").code == 0
    packed = ("--take", "model.layers.0.*", "from", tmp_path / "packed")
    assert "is packed for a kernel" in refused(base, dst, *packed)


def test_verify_asks_for_what_was_taken(tmp_path: Path, plain: Path) -> None:
    compose(tmp_path / "dst", DATA / NV, ("mtp.*", plain))
    ran = run("verify", DATA / NV, tmp_path / "dst")
    assert ran.code == 1
    assert "--take 'mtp.*' from OTHER" in ran.err
    edit(tmp_path / "dst", lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"] * 2})
    ran = run("verify", DATA / NV, tmp_path / "dst", "--take", "mtp.*", "from", plain)
    assert ran.code == 3
    assert "mtp.fc.weight" in ran.out


def test_two_takes_go_together(tmp_path: Path, plain: Path) -> None:
    rules = ("--rule", "model.layers.2.mlp.experts.*=nvfp4", "--lossy", "--input-scale", "0.5")
    convert(plain, tmp_path / "draft", "compressed-tensors-nvfp4", *rules)
    takes = ("model.layers.2.*", tmp_path / "draft"), ("mtp.*", plain)
    done = compose(tmp_path / "dst", DATA / NV, *takes)
    assert done["format"] == "modelopt"
    assert [t["glob"] for t in done["taken"]] == ["model.layers.2.*", "mtp.*"]
    after, base, draft = values(tmp_path / "dst"), values(DATA / NV), values(tmp_path / "draft")
    for name, value in after.items():
        if not name.startswith("mtp."):
            wanted = draft if name.startswith("model.layers.2.") else base
            assert torch.allclose(value, wanted[name], rtol=1e-6, atol=0)
    stored, added = tensors(tmp_path / "dst"), tensors(plain)
    assert not any(n.endswith(("weight_packed", "weight_global_scale")) for n in stored)
    assert "model.layers.2.mlp.experts.0.up_proj.weight_scale_2" in stored
    assert all(torch.equal(stored[n], added[n]) for n in added if n.startswith("mtp."))
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()


def test_the_form_is_the_bases_own_also_where_it_has_fewer_modules(
    tmp_path: Path, plain: Path
) -> None:
    done = compose(tmp_path / "few", plain, ("model.layers.0.self_attn.*", DATA / CT))
    assert done["format"] == "compressed-tensors"
    done = compose(tmp_path / "dst", tmp_path / "few", ("model.layers.*.mlp.experts.*", DATA / NV))
    assert done["format"] == "compressed-tensors"
    assert any(n.endswith("weight_packed") for n in tensors(tmp_path / "dst"))


def test_a_taken_modules_activations_are_those_of_its_own_config(tmp_path: Path) -> None:
    def weights_only(told: dict[str, Any]) -> dict[str, Any]:
        for group in told["quantization_config"]["config_groups"].values():
            group["input_activations"] = None
        return told

    shutil.copytree(DATA / FP8, tmp_path / "a16")
    edit_config(tmp_path / "a16", weights_only)
    compose(tmp_path / "dst", DATA / FP8, ("model.layers.1.mlp.experts.*", tmp_path / "a16"))
    groups = config(tmp_path / "dst")["quantization_config"]["config_groups"].values()
    assert {bool(g["input_activations"]) for g in groups} == {True, False}


def test_patterns_of_joined_linears_fit_one_group_only(tmp_path: Path) -> None:
    rule = ("--rule", "model.layers.1.self_attn.*=fp8-channel", "--lossy")
    convert(DATA / CT, tmp_path / "dst", "compressed-tensors", *rule)
    groups = config(tmp_path / "dst")["quantization_config"]["config_groups"].values()
    names = [f"model.layers.{i}.self_attn.qkv_proj" for i in (0, 1)]
    for name in names:
        fitting = [
            g for g in groups
            if any(re.match(t[3:], name) if t.startswith("re:") else t == name
                   for t in g["targets"])
        ]  # fmt: skip
        assert len(fitting) == 1, name


def test_what_would_be_lost_or_never_read_is_refused(tmp_path: Path, plain: Path) -> None:
    dst = tmp_path / "dst"
    shutil.copytree(plain, tmp_path / "less")
    edit(tmp_path / "less", lambda t: {n: v for n, v in t.items() if "layers.1.mlp.gate" not in n})
    (tmp_path / "less" / "model.safetensors.index.json").unlink()
    told = refused(plain, dst, "--take", "model.layers.1.mlp.*", "from", tmp_path / "less")
    assert "model.layers.1.mlp.gate would be gone" in told
    shutil.copytree(plain, tmp_path / "far")
    (tmp_path / "far" / "model.safetensors.index.json").unlink()
    edit(tmp_path / "far", lambda t: {n.replace("layers.2.", "layers.7."): v for n, v in t.items()})
    far = ("--take", "model.layers.7.*", "from", tmp_path / "far")
    assert "layer 7 is taken, and the base has 2 layers" in refused(DATA / NV, dst, *far)
    shutil.copytree(plain, tmp_path / "tied")
    edit_config(tmp_path / "tied", lambda c: c | {"tie_word_embeddings": True})
    head = ("--take", "lm_head.*", "from", plain)
    assert "ties it to the embeddings" in refused(tmp_path / "tied", dst, *head)
