"""What the peers' own readers said of our output (scripts/peers_answers.py) holds for today's.

Their answers are kept with a digest of the tensors and of the config that they read: here the same
conversions must give the same digests, since CI has no peers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.convert import run

HERE = Path(__file__).parent
ANSWERS: list[dict[str, Any]] = json.loads((HERE / "golden/peers.json").read_text())
JUDGED = sorted({(a["source"], a["to"]) for a in ANSWERS})

RECIPROCAL = 2.5e-7
"""compressed-tensors divides by what ModelOpt multiplies with: two roundings of float32."""

LIMITS = dict.fromkeys(
    [("ct17", "compressed-tensors"), ("ct17", "compressed-tensors-fp8-block")],
    "RuntimeError: The size of tensor",
)
"""compressed-tensors 0.17 takes block scales with one column of blocks for one scale a row."""

MODULES = {
    "ct_fp8dynamic_qwen3moe": 32,
    "ct_mxfp4_qwen3moe": 32,
    "ct_nvfp4_llama": 14,
    "ct_nvfp4_qwen3moe": 32,
    "ct_nvfp4_qwen3moe_sharded": 32,
    "deepgemm_fp4fp8_dsv4": 41,
    "hf_fp8ops_qwen3moe": 32,
    "hf_mxfp4_gptoss": 24,
    "modelopt_fp8_llama": 14,
    "modelopt_fp8block_qwen3moe": 32,
    "modelopt_mixed_fp8attn_nvfp4exp_qwen3moe": 32,
    "modelopt_mxfp8_qwen3moe": 32,
    "modelopt_nvfp4_llama": 14,
    "modelopt_nvfp4_llama4": 38,
    "modelopt_nvfp4_qwen3moe": 32,
    "modelopt_nvfp4_qwen3moe_zeros": 32,
    "pair_cast_mxfp4_to_nvfp4_gptoss": 24,
    "quark_mxfp4_llama": 14,
}
"""How many quantised modules each source has, stacked experts one by one."""

ROUNDED = {"modelopt_nvfp4_qwen3moe": 2e-2, "hf_fp8ops_qwen3moe": 2e-2}
"""How far logits may move where BF16 cannot hold the weights; elsewhere 1e-5."""


def tensors_of(folder: Path) -> str:
    """SHA-256 over dtypes, shapes and bytes, in the order of names."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    sha = hashlib.sha256()
    for name in sorted(found):
        t = found[name]
        sha.update(f"{t.dtype} {list(t.shape)}".encode())
        sha.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def config_of(folder: Path) -> str:
    """SHA-256 of what config.json says of the quantisation."""
    told = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize(("source", "target"), JUDGED)
def test_what_the_peers_judged_is_what_is_written(tmp_path: Path, source: str, target: str) -> None:
    ran = run("convert", "--to", target, HERE / "data" / source, tmp_path / "dst")
    assert ran.code == 0, ran.err
    for answer in (a for a in ANSWERS if (a["source"], a["to"]) == (source, target)):
        assert tensors_of(tmp_path / "dst") == answer["tensors"]
        assert config_of(tmp_path / "dst") == answer["config"]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: f"{a['source']}-{a['to']}-{a['peer']}")
def test_the_peers_have_no_objection_and_decode_the_same(answer: dict[str, Any]) -> None:
    limits = LIMITS.get((answer["environment"], answer["to"]), "") or "not expected"
    assert [p for p in answer["problems"] if limits not in p and "tid2eid" not in p] == []
    if answer["to"] != "bf16":
        judged = answer["modules"] + sum(": RuntimeError" in p for p in answer["problems"])
        stacked = answer["to"] == "gpt-oss"
        assert judged == (4 if stacked else MODULES[answer["source"]])
        crossed = "nvfp4" in answer["source"] and answer["source"][:2] != answer["to"][:2]
        assert answer["oracle"]["relative"] <= (RECIPROCAL if crossed else 0.0)
    if "logits" in answer:
        wanted = ROUNDED.get(answer["source"], 1e-5) if answer["to"] == "bf16" else 1e-5
        assert answer["logits"]["from_oracle"] <= wanted
