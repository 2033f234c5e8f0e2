"""Experts padded by zeros in a plain form: what is there stays, what is new is zero."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.build import Spec, build, edit_config
from tests.convert import run
from tests.packed import tensors
from tests.test_recode import DATA, GPT, MX, NV, convert, values

BLOCK, CHANNEL = "modelopt_fp8block_qwen3moe", "ct_fp8dynamic_qwen3moe"
CASES = [
    (NV, "modelopt"), (NV, "compressed-tensors"), (MX, "compressed-tensors"),
    (BLOCK, "deepseek-fp8"), (BLOCK, "compressed-tensors"), (CHANNEL, "compressed-tensors"),
    ("modelopt_mxfp8_qwen3moe", "modelopt"), (GPT, "gpt-oss"),
    ("modelopt_nvfp4_llama4", "modelopt"),
]  # fmt: skip
KEYS = ("moe_intermediate_size", "intermediate_size")


def text_config(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, object] = config.get("text_config") or config
    return found


@pytest.mark.parametrize(("source", "to"), CASES, ids=lambda v: str(v))
def test_the_experts_are_wider_by_zeros(tmp_path: Path, source: str, to: str) -> None:
    fused = ["--fused"] * (source == "modelopt_nvfp4_llama4")
    done = convert(DATA / source, tmp_path / "dst", to, "--pad-for-tp", "16", *fused)
    assert any("experts are padded by zeros" in note for note in done["notes"])
    before, after = values(DATA / source), values(tmp_path / "dst")
    assert set(before) == set(after)
    told, old = text_config(tmp_path / "dst"), text_config(DATA / source)
    [key] = [k for k in KEYS if told.get(k) != old.get(k)]
    unit = 128 if source == BLOCK else 64
    wide = told[key]
    assert isinstance(wide, int)
    assert wide % (16 * unit) == 0
    for name, value in after.items():
        n, k = before[name].shape
        exact = 0 if (source, to) != CASES[1] else 1e-6  # scalars are turned over there
        assert torch.allclose(value[:n, :k], before[name], rtol=exact, atol=0), name
        assert not value[n:].any()
        assert not value[:, k:].any()
        if ".experts." in name:
            assert value.shape == ((n, wide) if "down" in name else (wide, k))
        elif "shared" not in name:
            assert value.shape == (n, k)
    again = convert(tmp_path / "dst", tmp_path / "again", to, "--pad-for-tp", "16", *fused)
    assert any("nothing is padded" in note for note in again["notes"])


def test_a_change_of_encoding_may_be_padded_too(tmp_path: Path) -> None:
    done = convert(DATA / MX, tmp_path / "dst", "modelopt-nvfp4", "--pad-for-tp", "8")
    assert [(e["to"], e["changed"]) for e in done["recoded"]] == [("nvfp4", 0)]
    before, after = values(DATA / MX), values(tmp_path / "dst")
    assert all(torch.equal(after[n][: v.shape[0], : v.shape[1]], v) for n, v in before.items())


def test_biases_are_padded_by_zeros(tmp_path: Path) -> None:
    convert(DATA / GPT, tmp_path / "dst", "gpt-oss", "--pad-for-tp", "4")
    for name, wide in tensors(tmp_path / "dst").items():
        if name.endswith("gate_up_proj_bias"):
            old = tensors(DATA / GPT)[name]
            assert torch.equal(wide[:, : old.shape[1]], old)
            assert not wide[:, old.shape[1] :].any()


def test_what_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    asked = ("convert", "--pad-for-tp", "8", "--to")
    ran = run(*asked, "marlin-nvfp4", DATA / NV, tmp_path / "dst")
    assert ran.code == 2
    assert "layouts have --tp" in ran.err
    ran = run(*asked, "modelopt", DATA / "modelopt_nvfp4_llama", tmp_path / "dst")
    assert ran.code == 1
    assert "no quantised experts" in ran.err
    shutil.copytree(DATA / NV, tmp_path / "src")
    edit_config(tmp_path / "src", lambda c: {k: v for k, v in c.items() if k not in KEYS})
    ran = run(*asked, "modelopt", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "no moe_intermediate_size or intermediate_size is that" in ran.err


def shared_of(folder: Path) -> set[tuple[int, ...]]:
    """The shapes of shared experts' up projections."""
    return {tuple(v.shape) for n, v in values(folder).items() if "shared_expert" in n and "up" in n}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"model_type": "deepseek_v3", "n_shared_experts": 2}, ""),
        (
            {"model_type": "deepseek_v3", "n_shared_experts": 3},
            "the config says n_shared_experts 3",
        ),
        ({"model_type": "some_moe"}, "is not listed here, and has shared experts"),
        ({"model_type": "qwen3_moe"}, "a shared expert, and the family has none"),
    ],
)
def test_shared_experts_grow_as_the_family_has_them(
    tmp_path: Path, told: dict[str, object], said: str
) -> None:
    build(tmp_path / "src", Spec(hidden=192, intermediate=96, shared_experts=2))
    edit_config(tmp_path / "src", lambda c: {**c, "n_shared_experts": None, **told})
    [(rows, k)] = shared_of(tmp_path / "src")
    assert rows == 2 * 96
    asked = ("--to", "modelopt", "--pad-for-tp", "2")
    ran = run("convert", *asked, tmp_path / "src", tmp_path / "dst")
    if said:
        assert ran.code == 1
        assert said in ran.err
        return
    assert ran.code == 0, ran.err
    assert shared_of(tmp_path / "dst") == {(2 * 128, k)}


def test_llama4s_shared_experts_grow_also_where_dense_ones_are_as_wide(tmp_path: Path) -> None:
    shutil.copytree(DATA / "modelopt_nvfp4_llama4", tmp_path / "src")
    size = text_config(tmp_path / "src")["intermediate_size"]

    def same(config: dict[str, object]) -> dict[str, object]:
        text = config.get("text_config")
        mine = text if isinstance(text, dict) else config
        mine["intermediate_size_mlp"] = size
        return config

    edit_config(tmp_path / "src", same)
    convert(tmp_path / "src", tmp_path / "dst", "modelopt", "--pad-for-tp", "16", "--fused")
    wide = text_config(tmp_path / "dst")["intermediate_size"]
    assert wide != size
    assert {rows for rows, _ in shared_of(tmp_path / "dst")} == {wide}
