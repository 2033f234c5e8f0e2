"""Layouts for CUTLASS, TensorRT-LLM and DeepGEMM: packed, proved, decoded as kernels do, back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import blackwell_decode, packed
from tests.layouts import Place, ways
from tests.producers import KINDS, WHOLE
from tests.rewriting import ULP, convert, load_json, meaning, one_thread, proved, same_bytes

__all__ = ["one_thread"]

DATA = Path(__file__).parent / "data"
# fmt: off
TAKEN = {
    ("cutlass-nvfp4",): "modelopt_nvfp4_qwen3moe ct_nvfp4_qwen3moe_sharded modelopt_nvfp4_llama "
                        "modelopt_nvfp4_llama4 pair_cast_mxfp4_to_nvfp4_gptoss "
                        "modelopt_mixed_fp8attn_nvfp4exp_qwen3moe "
                        "modelopt-nvfp4 ct-nvfp4 modelopt-nvfp4-gptoss v4-nvfp4",
    ("cutlass-nvfp4", "--for", "flashinfer"): "modelopt_nvfp4_qwen3moe ct-nvfp4 "
                                                "modelopt-nvfp4-gptoss",
    ("trtllm-nvfp4",): "modelopt_nvfp4_qwen3moe ct_nvfp4_qwen3moe_sharded modelopt_nvfp4_llama4 "
                       "pair_cast_mxfp4_to_nvfp4_gptoss modelopt-nvfp4-gptoss v4-nvfp4",
    ("megamoe-nvfp4",): "wide:modelopt-nvfp4 wide:ct-nvfp4",
    ("megamoe-nvfp4", "--variant", "sgl"): "wide:modelopt-nvfp4 wide:ct-nvfp4",
    ("cutlass-mxfp4",): "hf_mxfp4_gptoss ct_mxfp4_qwen3moe quark_mxfp4_llama deepgemm_fp4fp8_dsv4 "
                        "modelopt-mxfp4 quark-mxfp4-fp8",
    ("cutlass-mxfp4", "--for", "flashinfer"): "hf_mxfp4_gptoss ct-mxfp4",
    ("trtllm-mxfp4",): "hf_mxfp4_gptoss ct_mxfp4_qwen3moe deepgemm_fp4fp8_dsv4 gptoss-mxfp4",
    ("trtllm-mxfp4", "--for", "sglang"): "hf_mxfp4_gptoss ct-mxfp4",
    ("megamoe-mxfp4",): "wide:ct-mxfp4 wide:v4-hub",
    ("cutlass-mxfp8",): "modelopt_mxfp8_qwen3moe",
    ("cutlass-fp8",): "modelopt_fp8_llama ct_fp8dynamic_qwen3moe hf_fp8ops_qwen3moe "
                      "modelopt_fp8block_qwen3moe modelopt-fp8-channel ct-fp8-channel "
                      "wide:fp8-qwen",
    ("cutlass-fp8", "--for", "flashinfer"): "ct_fp8dynamic_qwen3moe wide:fp8-deepseek",
    ("deepgemm-fp8",): "wide:fp8-deepseek wide:modelopt-fp8-block",
    ("deepgemm-fp8", "--variant", "sm100"): "wide:fp8-deepseek-ue8m0 wide:fp8-deepseek-e8m0",
    ("megamoe-fp8-sm90",): "wide:fp8-deepseek",
}
# fmt: on
ROWS = [(words, name) for words, names in TAKEN.items() for name in names.split()]


def kind_of(name: str) -> str:
    return name.partition(":")[2] or name


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder of a built or real checkpoint; `wide:` in sizes that MegaMoE takes."""
    there: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name not in KINDS and ":" not in name:
            return DATA / name
        if name not in there:
            kind = KINDS[kind_of(name)]
            if ":" in name:
                spec = WHOLE if "deepseek" in name else kind.spec
                kind = replace(kind, spec=replace(spec, hidden=256, intermediate=128))
            there[name] = tmp_path_factory.mktemp("blackwell") / kind_of(name)
            kind(there[name])
        return there[name]

    return made


def words_of(row: object) -> str:
    return " ".join(row) if isinstance(row, tuple) else str(row)


@pytest.mark.parametrize(("words", "name"), ROWS, ids=words_of)
def test_what_is_packed_means_the_source_and_comes_back(
    source: Place, tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    path = source(name)
    target = proved(words[0], path, tmp_path / "packed", *words[1:])
    found, wanted = blackwell_decode.weights(target), meaning(path)
    assert found
    rel = ULP if kind_of(name).startswith("ct") else 0.0
    for module, weight in found.items():
        theirs = wanted.weights[module]
        assert ((weight - theirs).abs() <= rel * theirs.abs()).all(), module
    for form, *options in ways(kind_of(name)):
        back = convert(form, target, tmp_path / "back", *options)
        direct = convert(form, path, tmp_path / "direct", *options)
        same_bytes(packed.tensors(back), packed.tensors(direct))
        for file in ("config.json", "hf_quant_config.json"):
            if (direct / file).exists():
                assert load_json(back / file) == load_json(direct / file)
