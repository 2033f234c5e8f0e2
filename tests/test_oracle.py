"""Real checkpoints, converted, read back with other code: the weights are the producers' own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import marlin_decode, packed
from tests.convert import pack

HERE = Path(__file__).parent
ORACLE = json.loads((HERE / "golden" / "oracle.json").read_text())
ULP = 1.6e-7
"""compressed-tensors divides where we multiply with a rounded reciprocal: two roundings of 2^-24 in
the factor and the product, and one in the quotient."""


def sha256(value: Tensor) -> str:
    """Of the float32 bytes with -0 as +0: the producers' decoders differ in that sign."""
    return hashlib.sha256((value + 0.0).contiguous().numpy().tobytes()).hexdigest()


def raw(value: Tensor) -> Tensor:
    return value.flatten().view(torch.uint8)


def compressed(source: dict[str, Tensor], module: str) -> Tensor:
    """compressed-tensors' own formula, code * (scale / divisor)."""
    raw = source[f"{module}.weight_packed"]
    codes = torch.stack((raw & 15, raw >> 4), -1).flatten(-2).int()
    scale = source[f"{module}.weight_scale"].float() / source[f"{module}.weight_global_scale"]
    return marlin_decode.E2M1[codes] * scale.repeat_interleave(16, -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ORACLE)
def test_packed_weights_decode_to_the_oracle(tmp_path: Path, name: str, dtype: str) -> None:
    folder = HERE / "data" / name
    source = packed.tensors(folder)
    found = packed.weights(pack(folder, tmp_path / "dst", "--dtype", dtype))
    nvfp4 = {m for m in ORACLE[name]["sha256"] if f"{m}.weight_scale" in source}
    nvfp4 = {m for m in nvfp4 if source[f"{m}.weight_scale"].dim() == 2}
    assert set(found) == nvfp4
    for module, weight in found.items():
        wanted = ORACLE[name]["sha256"][module]
        if f"{module}.weight_packed" in source:
            theirs = compressed(source, module)
            assert sha256(theirs) == wanted, f"{module}: the oracle's formula is another"
            assert ((weight - theirs).abs() <= ULP * theirs.abs()).all()
        elif source[f"{module}.weight_scale_2"] == 0:
            assert not torch.count_nonzero(weight)
        else:
            assert sha256(weight) == wanted, module


@pytest.mark.parametrize("name", ORACLE)
def test_what_is_not_packed_is_carried_byte_for_byte(tmp_path: Path, name: str) -> None:
    source = packed.tensors(HERE / "data" / name)
    out = packed.tensors(pack(HERE / "data" / name, tmp_path / "dst"))
    packed_modules = set(packed.weights(tmp_path / "dst"))
    rest = [t for t in source if t.rpartition(".")[0] not in packed_modules]
    assert rest
    for t in rest:
        assert torch.equal(raw(out[t]), raw(source[t])), t


@pytest.mark.parametrize("name", ORACLE)
def test_the_sources_own_scalars_are_kept_word_for_word(tmp_path: Path, name: str) -> None:
    source = packed.tensors(HERE / "data" / name)
    out = packed.tensors(pack(HERE / "data" / name, tmp_path / "dst"))
    for ours, theirs in (
        ("source_global_scale", ("weight_scale_2", "weight_global_scale")),
        ("source_input_scale", ("input_scale", "input_global_scale")),
    ):
        for module in packed.weights(tmp_path / "dst"):
            want = next(source[f"{module}.{t}"] for t in theirs if f"{module}.{t}" in source)
            found = out.get(f"{module}.{ours}")
            if found is None:
                parent, expert, leaf = module.rsplit(".", 2)
                which = "w2" if leaf == "down_proj" else "w13"
                found = out[f"{parent}.{which}_{ours}"][int(expert)].flatten()
                found = found[["gate_proj", "up_proj"].index(leaf)] if which == "w13" else found[0]
            assert torch.equal(found.reshape(()), want.reshape(())), module


def test_safetensors_reads_every_shard(tmp_path: Path) -> None:
    target = pack(HERE / "data" / "ct_nvfp4_qwen3moe_sharded", tmp_path / "dst")
    assert all(load_file(path) for path in target.glob("*.safetensors"))
