"""Tensor-parallel degrees that a packed file serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import packed
from tests.build import Spec, build, edit, edit_config
from tests.convert import pack, run

DENSE = Spec(model_type="llama", experts=0, hidden=512, intermediate=1024, heads=8, head_dim=64)


def served(tmp_path: Path, spec: Spec, **config: Any) -> list[int]:
    build(tmp_path / "src", spec)
    edit_config(tmp_path / "src", lambda c: c | config)
    found: list[int] = packed.config(pack(tmp_path / "src", tmp_path / "dst"))["tp"]
    return found


def test_heads_and_tiles_decide(tmp_path: Path) -> None:
    assert served(tmp_path, DENSE) == [1, 2, 4, 8]


def test_key_heads_are_shared_out_or_replicated(tmp_path: Path) -> None:
    """Six key heads: four ranks get neither whole heads nor one head each."""
    spec = replace(DENSE, hidden=768, intermediate=1536, heads=12, kv_heads=6)
    assert served(tmp_path, spec) == [1, 2, 3, 6, 12]


def test_heads_that_are_no_whole_tiles_serve_one_rank(tmp_path: Path) -> None:
    assert served(tmp_path, replace(DENSE, head_dim=96, kv_heads=4)) == [1, 2]


@pytest.mark.parametrize("key", ["linear_num_key_heads", "mamba_num_heads"])
def test_other_heads_must_be_shared_out_too(tmp_path: Path, key: str) -> None:
    assert served(tmp_path, DENSE, **{key: 6}) == [1, 2]


def test_projections_that_are_fused_in_the_file_serve_one_rank(tmp_path: Path) -> None:
    build(tmp_path / "src", DENSE)

    def fuse(name: str) -> str:
        return name.replace("self_attn.q_proj", "self_attn.qkv_proj")

    edit(
        tmp_path / "src",
        lambda t: {fuse(n): v for n, v in t.items() if ".k_proj" not in n and ".v_proj" not in n},
    )
    assert packed.config(pack(tmp_path / "src", tmp_path / "dst"))["tp"] == [1]


def test_a_degree_that_was_asked_for_and_is_not_served_is_said(tmp_path: Path) -> None:
    build(tmp_path / "src", Spec(heads=4))
    args = ("convert", "--to", "marlin-nvfp4", "--tp", "8", tmp_path / "src", tmp_path / "dst")
    ran = run(*args)
    assert ran.code == 0
    assert "--tp 8 is not served" in ran.err
