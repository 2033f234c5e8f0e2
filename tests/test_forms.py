"""What a rewritten checkpoint says of itself: configs as their producers write them, lists, KV
scales, the index. Expectations are written by hand from the producers' own files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import packed
from tests.build import Tensors, edit, edit_config
from tests.convert import run
from tests.producers import KINDS, Built
from tests.rewriting import (
    Json,
    convert,
    copied,
    kind,
    load_json,
    meaning,
    one_thread,
    proved,
    raw,
    refused,
    report,
)

__all__ = ["kind", "one_thread"]

Made = Callable[[str], tuple[Path, Built]]
HF = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
ROUTERS = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
PLAIN = ["lm_head", *ROUTERS]
TABLED = ["lm_head", "model.embed_tokens", *ROUTERS]  # ModelOpt lists embeddings too
WHO = {"name": "modelopt", "version": "0.47.0"}


def quantization(folder: Path) -> Json:
    return packed.config(folder)


# ModelOpt.

FOUR = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT: dict[str, tuple[str, Json, Json | None, Json]] = {
    "ct-nvfp4": ("NVFP4", FOUR, FOUR, {"group_size": 16}),
    "ct-nvfp4a16": ("W4A16_NVFP4", FOUR, None, {"group_size": 16}),
    "ct-fp8-block": ("FP8_PB_WO", EIGHT, EIGHT | {"dynamic": True}, {}),
    "ct-fp8-channel": ("FP8_PER_CHANNEL_PER_TOKEN", EIGHT, EIGHT | {"dynamic": True}, {}),
    "fp8-mxfp8": ("MXFP8", EIGHT | {"group_size": 32},
                  EIGHT | {"group_size": 32, "dynamic": True}, {"group_size": 32}),
    "quark-mxfp4-fp8": ("W4A8_MXFP4_FP8", FOUR | {"group_size": 32}, EIGHT, {"group_size": 32}),
    "modelopt-w4a8": ("W4A8_NVFP4_FP8", FOUR | {"group_size": 32}, EIGHT, {"group_size": 32}),
}  # fmt: skip
"""quant_algo, weights and input_activations of the group, and what beside quant_algo."""


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_is_described_in_both_files(kind: Made, tmp_path: Path, name: str) -> None:
    algorithm, weights, inputs, size = MODELOPT[name]
    out = convert("modelopt", kind(name)[0], tmp_path / "dst")
    plain = {
        "ct-nvfp4a16": [n.replace("mlp", "block_sparse_moe") for n in TABLED],
        "quark-mxfp4-fp8": ["lm_head", "model.embed_tokens", *(
            f"model.layers.{n}.{leaf}" for n in (0, 1) for leaf in
            ("mlp.gate", *(f"self_attn.{x}_proj" for x in "koqv")))],
    }.get(name, TABLED)  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights}
    assert quantization(out) == {
        "quant_method": "modelopt", "quant_algo": algorithm, "producer": WHO, "ignore": plain,
        "config_groups": {
            "group_0": group | ({} if inputs is None else {"input_activations": inputs})
        },
        **size,
    }  # fmt: skip
    assert load_json(out / HF) == {
        "producer": WHO,
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": plain, **size,
        },
    }  # fmt: skip


def test_modelopt_mixed_names_every_layer(kind: Made, tmp_path: Path) -> None:
    out = convert("modelopt", kind("ct-mixed")[0], tmp_path / "dst")
    said, beside = quantization(out), load_json(out / HF)["quantization"]
    at = "model.language_model.layers"
    eight = ["lm_head", *(f"{at}.{n}.self_attn.{x}_proj" for n in (0, 1) for x in "koqv")]
    four = [f"{at}.{n}.mlp.experts.{e}.{p}_proj" for n in (0, 1) for e in range(3)
            for p in ("down", "gate", "up")]  # fmt: skip
    layers: Json = {n: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} for n in eight}
    layers |= {n: {"quant_algo": "NVFP4", "group_size": 16} for n in four}
    for block in (said, beside):
        assert block["quant_algo"] == "MIXED_PRECISION"
        assert block["quantized_layers"] == layers
        assert "group_size" not in block
    plain = [
        "model.language_model.embed_tokens", f"{at}.0.mlp.gate", f"{at}.1.mlp.gate",
        "model.visual.blocks.0.attn.qkv", "model.visual.pos_embed",
    ]  # fmt: skip
    assert said["ignore"] == beside["exclude_modules"] == plain
    targets = sorted(g["targets"] for g in said["config_groups"].values())
    assert targets == sorted([eight, [f"{at}.{n}.mlp.experts" for n in (0, 1)]])


# compressed-tensors.


def args(bits: int, strategy: str, dynamic: bool | str = False, **more: Any) -> Json:
    base = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return base | {"dynamic": dynamic} | more


NV: Json = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MX: Json = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
COMPRESSED: dict[str, tuple[str, Json, Json | None]] = {
    "modelopt-nvfp4": ("nvfp4-pack-quantized", args(4, "tensor_group", **NV),
                       args(4, "tensor_group", "local", **NV)),
    "modelopt-nvfp4-w4a16": ("nvfp4-pack-quantized", args(4, "tensor_group", **NV), None),
    "modelopt-mxfp4": ("mxfp4-pack-quantized", args(4, "group", **MX),
                       args(4, "group", True, **MX)),
    "modelopt-mxfp8": ("mxfp8-quantized", args(8, "group", **MX), args(8, "group", True, **MX)),
    "modelopt-fp8-channel": ("float-quantized", args(8, "channel"), args(8, "token", True)),
    "fp8-qwen": ("float-quantized", args(8, "block", block_structure=[128, 128]),
                 args(8, "group", True, group_size=128)),
    "ct-fp8-naive": ("naive-quantized", args(8, "channel"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_are_described_in_one_group(
    kind: Made, tmp_path: Path, name: str
) -> None:
    format_, weights, inputs = COMPRESSED[name]
    out = convert("compressed-tensors", kind(name)[0], tmp_path / "dst")
    group = {"targets": ["Linear"], "format": format_, "weights": weights,
             "input_activations": inputs, "output_activations": None}  # fmt: skip
    assert quantization(out) == {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": format_, "config_groups": {"group_0": group}, "ignore": PLAIN,
        "kv_cache_scheme": None,
    }  # fmt: skip
    assert not (out / HF).exists()


def test_static_fp8_is_described_as_static(kind: Made, tmp_path: Path) -> None:
    out = convert("compressed-tensors", kind("modelopt-fp8")[0], tmp_path / "dst")
    group = quantization(out)["config_groups"]["group_0"]
    assert (group["weights"], group["input_activations"]) == (args(8, "tensor"), args(8, "tensor"))
    assert group["format"] == "float-quantized"


DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("model", ["qwen3moe", "llama"])
def test_modelopts_words_are_those_of_its_own_files(tmp_path: Path, model: str) -> None:
    """The same model as llm-compressor and as ModelOpt wrote it."""
    out = convert("modelopt", DATA / f"ct_nvfp4_{model}", tmp_path / "dst")
    own = DATA / f"modelopt_nvfp4_{model}"
    for read in (quantization, lambda at: load_json(at / HF)["quantization"]):
        ours, theirs = read(out), read(own)
        assert {k: ours.get(k) for k in theirs} == theirs


@pytest.mark.parametrize(
    "name", ["ct_nvfp4_qwen3moe", "ct_mxfp4_qwen3moe", "ct_fp8dynamic_qwen3moe"]
)
def test_compressed_tensors_words_are_those_of_its_own_files(tmp_path: Path, name: str) -> None:
    """After a way over another form; of what its own files say, nothing but observers is lost."""
    there = convert("modelopt", DATA / name, tmp_path / "there")
    ours = quantization(convert("compressed-tensors", there, tmp_path / "dst"))
    theirs = quantization(DATA / name)
    assert sorted(ours["ignore"]) == sorted(theirs["ignore"])
    for key in ("format", "quant_method", "quantization_status", "kv_cache_scheme"):
        assert ours[key] == theirs[key]
    (mine,), (group,) = ours["config_groups"].values(), theirs["config_groups"].values()
    for part in ("weights", "input_activations"):
        said = {k: v for k, v in group[part].items() if v is not None and "observer" not in k}
        assert {k: mine[part].get(k) for k in said} == said


# The others.


@pytest.mark.parametrize(("name", "powers"), [
    ("ct-fp8-block", False), ("fp8-deepseek", False), ("fp8-deepseek-ue8m0", True),
    ("fp8-deepseek-e8m0", True),
])  # fmt: skip
def test_deepseek_fp8_lists_full_names(kind: Made, tmp_path: Path, name: str, powers: bool) -> None:
    out = convert("deepseek-fp8", kind(name)[0], tmp_path / "dst")
    plain = PLAIN if name.startswith("ct") else [
        *PLAIN, "model.layers.2.eh_proj", "model.layers.2.mlp.gate",
        "model.layers.2.shared_head.head"]  # fmt: skip
    assert quantization(out) == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": plain,
        **({"scale_fmt": "ue8m0"} if powers else {}),
    }  # fmt: skip


def test_gpt_oss_is_described_in_openais_words(kind: Made, tmp_path: Path) -> None:
    there = convert("modelopt", kind("gptoss-mxfp4")[0], tmp_path / "there")
    out = convert("gpt-oss", there, tmp_path / "dst")
    assert quantization(out) == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    }  # fmt: skip
    assert not (out / HF).exists()


@pytest.mark.parametrize(("name", "experts", "powers"), [
    ("v4-hub", "fp4", True), ("v4-base", "fp8", False),
])  # fmt: skip
def test_deepseek_v4_is_described_as_deepseek_does(
    kind: Made, tmp_path: Path, name: str, experts: str, powers: bool
) -> None:
    """-Base keeps float scales: to call them ue8m0 lets a runtime round them to powers of two."""
    there = convert("compressed-tensors", kind(name)[0], tmp_path / "there")
    assert quantization(there)["quant_method"] == "compressed-tensors"
    out = convert("deepseek-v4", there, tmp_path / "dst")
    assert quantization(out) == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], **({"scale_fmt": "ue8m0"} if powers else {}),
    }  # fmt: skip
    assert load_json(out / "config.json")["expert_dtype"] == experts


def test_the_v4_repack_has_modelopts_words_beside(kind: Made, tmp_path: Path) -> None:
    source, _ = kind("v4-nvfp4")
    there = convert("compressed-tensors", source, tmp_path / "there")
    out = convert("deepseek-v4-nvfp4", there, tmp_path / "dst")
    wanted = quantization(source)
    del wanted["config_groups"]  # NVIDIA's own names the experts by their containers
    assert quantization(out) == wanted
    assert load_json(out / HF) == load_json(source / HF)
    assert load_json(out / "config.json")["expert_dtype"] == "fp4"


def test_quark_names_what_is_not_global(kind: Made, tmp_path: Path) -> None:
    out = convert("quark", kind("v4-hub")[0], tmp_path / "dst")
    said = quantization(out)
    assert (said["quant_method"], said["quant_mode"]) == ("quark", "eager_mode")
    fours = [n for n in meaning(out).weights if ".experts." in n]
    entries = said["layer_quant_config"]
    for name in meaning(out).weights:
        spec = entries.get(name, said["global_quant_config"])["weight"]
        wanted = ("fp4", "per_group", 32) if name in fours else ("fp8_e4m3", "per_block", None)
        assert (spec["dtype"], spec["qscheme"], spec["group_size"]) == wanted, name
    assert entries.keys() <= meaning(out).weights.keys()


@pytest.mark.parametrize("name", ["modelopt-mxfp4", "modelopt-fp8-channel", "fp8-deepseek-e8m0"])
def test_quark_describes_weights_and_inputs(kind: Made, tmp_path: Path, name: str) -> None:
    said = quantization(convert("quark", kind(name)[0], tmp_path / "dst"))["global_quant_config"]
    weight, inputs = said["weight"], said["input_tensors"]
    keys = ("dtype", "qscheme", "group_size", "ch_axis", "is_dynamic")
    wanted: dict[str, tuple[list[Any], list[Any]]] = {
        "modelopt-mxfp4": (["fp4", "per_group", 32, -1, False], ["fp4", "per_group", 32, -1, True]),
        "modelopt-fp8-channel": (["fp8_e4m3", "per_channel", None, 0, False],
                                 ["fp8_e4m3", "per_channel", None, 1, True]),
        "fp8-deepseek-e8m0": (
            ["fp8_e4m3", "per_block", None, None, False], ["fp8_e4m3", "per_group", 128, -1, True]),
    }  # fmt: skip
    assert ([weight[k] for k in keys], [inputs[k] for k in keys]) == wanted[name]
    if name == "modelopt-mxfp4":
        assert weight["scale_format"] == inputs["scale_format"] == "e8m0"
    if name == "fp8-deepseek-e8m0":
        assert weight["block_size"] == [128, 128]
        assert weight["scale_type"] == "float8_e8m0fnu"


def test_canonical_groups_name_every_module(kind: Made, tmp_path: Path) -> None:
    source, made = kind("ct-mixed")
    said = quantization(convert("canonical", source, tmp_path / "dst"))
    assert {k: said[k] for k in ("quant_method", "layout", "layout_version", "kv_cache")} == {
        "quant_method": "transcode", "layout": "canonical", "layout_version": 1, "kv_cache": None,
    }  # fmt: skip
    groups = {g["encoding"]: g for g in said["groups"]}
    assert (groups["nvfp4"]["activations"], groups["fp8-channel"]["activations"]) == (
        "static", "dynamic")  # fmt: skip
    assert sorted(n for g in groups.values() for n in g["modules"]) == sorted(made.truth)
    assert said["experts"] == {
        f"model.language_model.layers.{n}.mlp.experts": ["gate_proj", "up_proj", "down_proj"]
        for n in (0, 1)
    }
    assert said["source"] == quantization(source)


@pytest.mark.parametrize(("name", "target"), [
    ("ct-fp8-naive", "modelopt"), ("ct-fp8-block", "deepseek-fp8"),
])  # fmt: skip
def test_weights_alone_are_not_called_weights_and_activations(
    kind: Made, tmp_path: Path, name: str, target: str
) -> None:
    """FP8 with 16 bit activations: ModelOpt's and DeepSeek's words mean FP8 activations."""
    source = copied(kind(name)[0], tmp_path / "src")

    def alone(config: Json) -> Json:
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"] = None
        return config

    edit_config(source, alone)
    ct = quantization(convert("compressed-tensors", source, tmp_path / "ct"))
    assert ct["format"] == "naive-quantized"
    assert "activations" in refused(target, source, tmp_path / "dst")


# What is not quantised, by each runtime's own rule.


def linears(folder: Path) -> tuple[list[str], list[str]]:
    """Names of quantised linears, and of those that are not."""
    found = meaning(folder)
    plain = [
        n.removesuffix(".weight") for n, t in found.rest.items()
        if n.endswith(".weight") and t.dim() == 2 and "embed" not in n
    ]  # fmt: skip
    int4 = [n.removesuffix(".weight_packed") for n in found.rest if n.endswith(".weight_packed")]
    return [*found.weights, *int4], plain


def exact(entry: str, name: str) -> bool:
    return entry == name


def vllm_modelopt(entry: str, name: str) -> bool:
    return entry == name or entry in name or fnmatchcase(name, entry)


def sglang_modelopt(entry: str, name: str) -> bool:
    pattern = entry.replace(".", r"\.").replace("*", ".*")
    return any(re.fullmatch(pattern, part) for part in (name, *name.split(".")))


def compressed(entry: str, name: str) -> bool:
    return re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name


def transformers(entry: str, name: str) -> bool:
    return re.match(rf"{entry}(\.|$)", name) is not None or name.endswith(entry)


def dotted(entry: str, name: str) -> bool:
    return f".{entry}." in f".{name}."


RULES: dict[str, tuple[str, list[Callable[[str, str], bool]]]] = {
    "modelopt": ("ignore", [exact, vllm_modelopt, sglang_modelopt, dotted]),
    "compressed-tensors": ("ignore", [exact, compressed]),
    "deepseek-fp8": ("modules_to_not_convert", [exact, transformers, dotted]),
    "quark": ("exclude", [exact, lambda entry, name: fnmatchcase(name, entry)]),
    "canonical": ("ignore", [exact]),
}


def said_of(target: str) -> list[str]:
    """Kinds that the target can say."""
    block = ["ct-fp8-block", "fp8-deepseek", "fp8-minimax"]
    every = ["modelopt-nvfp4", "modelopt-mixed", "modelopt-nvfp4-vl", "ct-mixed", "v4-nvfp4",
             "ct-nvfp4a16", "gptoss-mxfp4", "modelopt-nvfp4-llama4", "fp8-fbgemm"]  # fmt: skip
    quark = ["quark-mxfp4-fp8", "v4-hub", "fp8-fbgemm"]
    return block + {"quark": quark, "deepseek-fp8": []}.get(target, every)


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target in RULES for name in said_of(target)]
)
def test_lists_hit_all_that_is_plain_and_nothing_else(
    kind: Made, tmp_path: Path, target: str, name: str
) -> None:
    out = convert(target, kind(name)[0], tmp_path / "dst")
    key, rules = RULES[target]
    entries = quantization(out)[key]
    quantised, plain = linears(out)
    assert quantised
    assert plain
    for rule in rules:
        hit = {n: e for n in quantised for e in entries if rule(e, n)}
        assert hit == {}, rule.__name__
        assert [n for n in plain if not any(rule(e, n) for e in entries)] == [], rule.__name__


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "modelopt-mixed", "ct-mixed", "ct-nvfp4a16",
                                  "modelopt-nvfp4-hf-only", "ct-nvfp4-kv"])  # fmt: skip
def test_check_finds_nothing_in_the_lists(
    kind: Made, tmp_path: Path, target: str, name: str
) -> None:
    out = convert(target, kind(name)[0], tmp_path / "dst")
    found = json.loads(run("check", out, "--json").out)["findings"]
    codes = {f["code"] for f in found if f["level"] in ("FAILS", "WRONG")}
    lists = {"ignored-quantised", "unlisted", "partly-listed", "other-bits", "config-disagrees",
             "hf-quant-config-stale", "hf-quant-config-only", "nothing-quantised"}  # fmt: skip
    assert codes & lists == set()


@pytest.mark.parametrize("name", ["modelopt-mixed", "ct-mixed", "ct-int4-nvfp4", "v4-nvfp4",
                                  "v4-hub"])  # fmt: skip
def test_targets_of_groups_are_disjoint(kind: Made, tmp_path: Path, name: str) -> None:
    out = convert("compressed-tensors", kind(name)[0], tmp_path / "dst")
    said = quantization(out)
    quantised, plain = linears(out)
    assert said["format"] == "mixed-precision"
    assert "Linear" not in str(said["config_groups"])
    tensors = packed.tensors(out)
    bits = dict[str, set[int]]()
    for module in quantised:
        hit = [g for g in said["config_groups"].values()
               if any(compressed(t, module) for t in g["targets"])]  # fmt: skip
        assert len(hit) == 1, module
        bits.setdefault(module, set()).add(hit[0]["weights"]["num_bits"])
        four = f"{module}.weight_packed" in tensors
        assert bits[module] == {4 if four else 8}, module
    for module in plain:
        assert not any(
            compressed(t, module) for g in said["config_groups"].values() for t in g["targets"]
        ), module


def test_patterns_are_no_traps_where_layers_differ(kind: Made, tmp_path: Path) -> None:
    """Layer 0's q_proj in NVFP4, layer 1's in FP8: a pattern over layers would hit both."""
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")

    def eight(tensors: Tensors) -> Tensors:
        name = "model.layers.1.self_attn.q_proj"
        own = {f"{name}.weight": torch.ones(128, 192).to(torch.float8_e4m3fn),
               f"{name}.weight_scale": torch.tensor(0.5),
               f"{name}.input_scale": torch.tensor(0.25)}  # fmt: skip
        return {n: t for n, t in tensors.items() if not n.startswith(name)} | own

    edit(source, eight)
    out = convert("compressed-tensors", source, tmp_path / "dst")
    for group in quantization(out)["config_groups"].values():
        four = group["weights"]["num_bits"] == 4
        for layer, here in ((0, four), (1, not four)):
            name = f"model.layers.{layer}.self_attn.q_proj"
            assert any(compressed(t, name) for t in group["targets"]) == here


# Stale configs, the index, and what lies beside.


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "canonical", "bf16"])
def test_no_other_quantization_config_is_left(kind: Made, tmp_path: Path, target: str) -> None:
    source = copied(kind("modelopt-nvfp4-vl")[0], tmp_path / "src")
    stale = load_json(source / "config.json")["quantization_config"]

    def nest(config: Json) -> Json:
        text = config["text_config"] | {"quantization_config": stale}
        vision = config["vision_config"] | {"quantization_config": {"quant_method": "gptq"}}
        more = {"compression_config": {"quant_method": "compressed-tensors"}}
        return config | more | {"text_config": text, "vision_config": vision}

    before = load_json(source / "config.json")
    edit_config(source, nest)
    out = proved(target, source, tmp_path / "dst")
    config = load_json(out / "config.json")
    own = config.pop("quantization_config", None)
    assert (own is None) == (target == "bf16")
    del before["quantization_config"]
    assert config == before
    assert (out / HF).exists() == (target == "modelopt")


def test_a_config_that_stood_in_one_file_stands_in_both(kind: Made, tmp_path: Path) -> None:
    source, _ = kind("modelopt-nvfp4-hf-only")
    assert "quantization_config" not in load_json(source / "config.json")
    out = proved("modelopt", source, tmp_path / "dst")
    assert quantization(out)["quant_algo"] == "NVFP4"
    assert load_json(out / HF)["quantization"]["quant_algo"] == "NVFP4"


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "canonical", "bf16"])
def test_the_index_is_made_anew(kind: Made, tmp_path: Path, target: str) -> None:
    source = copied(kind("ct-nvfp4")[0], tmp_path / "src")
    edit_config(source, lambda index: index | {"metadata": {"total_size": 7}}, INDEX)
    out = proved(target, source, tmp_path / "dst", "--shard-size", "100KB")
    index = load_json(out / INDEX)
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files == sorted(p.name for p in out.glob("*.safetensors"))
    tensors = packed.tensors(out)
    assert sorted(index["weight_map"]) == sorted(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert not [*tmp_path.glob("*.partial")]


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "canonical"])
def test_a_tied_head_is_listed_and_not_written(kind: Made, tmp_path: Path, target: str) -> None:
    source, _ = kind("ct-mxfp8")
    out = proved(target, source, tmp_path / "dst")
    assert load_json(out / "config.json")["tie_word_embeddings"] is True
    assert "lm_head" in quantization(out)["ignore"]
    assert not [n for n in packed.tensors(out) if "lm_head" in n]


@pytest.mark.parametrize("target", ["compressed-tensors", "canonical", "bf16"])
def test_companions_are_copied(kind: Made, tmp_path: Path, target: str) -> None:
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")
    (source / "chat_template.jinja").write_text("{{ x }}")
    out = convert(target, source, tmp_path / "dst")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / HF).exists()


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "quark", "deepseek-fp8"])
def test_other_keys_of_the_config_stay(kind: Made, tmp_path: Path, target: str) -> None:
    source, _ = kind("fp8-qwen")
    ours = load_json(convert(target, source, tmp_path / "dst") / "config.json")
    theirs = load_json(source / "config.json")
    del ours["quantization_config"], theirs["quantization_config"]
    assert ours == theirs


# KV scales.

AT = "model.layers.{}.self_attn."
SPELLINGS = {
    "modelopt": "{at}{x}_proj.{x}_scale", "sglang": "{at}attn.{x}_scale",
    "quark": "{at}{x}_proj.output_scale", "ct": "{at}{x}_scale",
}  # fmt: skip
WRITTEN = {
    "modelopt": ("modelopt", ()), "canonical": ("modelopt", ()),
    "compressed-tensors": ("ct", (1,)), "quark": ("quark", ()),
}  # fmt: skip
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def respelt(source: Path, spelling: str) -> Tensors:
    """Rename the KV scales; returns them by "<layer>.<k or v>"."""
    found: Tensors = {}

    def rename(tensors: Tensors) -> Tensors:
        for layer in (0, 1):
            for x in "kv":
                old = SPELLINGS["modelopt"].format(at=AT.format(layer), x=x)
                found[f"{layer}.{x}"] = value = tensors.pop(old)
                if spelling in SPELLINGS:
                    new = SPELLINGS[spelling].format(at=AT.format(layer), x=x)
                    tensors[new] = value.reshape(1) if spelling == "ct" else value
                elif x == "k":
                    tensors[f"{AT.format(layer)}kv_scale"] = value
        return tensors

    edit(source, rename)
    return found


@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("spelling", [*SPELLINGS, "one for both"])
def test_every_spelling_of_kv_scales_is_written_as_the_targets(
    kind: Made, tmp_path: Path, spelling: str, target: str
) -> None:
    source = copied(kind("modelopt-fp8")[0], tmp_path / "src")
    scales = respelt(source, spelling)
    tensors = packed.tensors(proved(target, source, tmp_path / "dst"))
    into, shape = WRITTEN[target]
    names = {n for n in tensors if re.search(r"[kv]_scale$|output_scale$", n)}
    wanted = set[str]()
    for layer in (0, 1):
        for x in "kv":
            name = SPELLINGS[into].format(at=AT.format(layer), x=x)
            wanted.add(name)
            assert tensors[name].shape == shape
            own = scales[f"{layer}.{'k' if spelling == 'one for both' else x}"]
            assert torch.equal(tensors[name].reshape(()), own)
    assert names == wanted


def test_the_configs_key_goes_both_ways(kind: Made, tmp_path: Path) -> None:
    ct = proved("compressed-tensors", kind("modelopt-nvfp4-kv")[0], tmp_path / "ct")
    scheme = quantization(ct)["kv_cache_scheme"]
    assert scheme == SCHEME | {"strategy": "tensor", "symmetric": True}
    back = proved("modelopt", ct, tmp_path / "back")
    assert quantization(back)["kv_cache_scheme"] == SCHEME
    assert load_json(back / HF)["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert quantization(convert("canonical", ct, tmp_path / "c"))["kv_cache"] == "FP8"


def test_quark_says_so_of_k_and_v(kind: Made, tmp_path: Path) -> None:
    said = quantization(proved("quark", kind("modelopt-fp8")[0], tmp_path / "dst"))
    assert sorted(said["kv_cache_quant_config"]) == ["*k_proj", "*v_proj"]
    assert said["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
    for name in ("*k_proj", "*v_proj"):
        for table in ("kv_cache_quant_config", "layer_quant_config"):
            cache = said[table][name]["output_tensors"]
            assert (cache["dtype"], cache["qscheme"]) == ("fp8_e4m3", "per_tensor")


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "canonical", "bf16"])
def test_kv_scales_can_be_dropped(kind: Made, tmp_path: Path, target: str) -> None:
    source, _ = kind("modelopt-nvfp4-kv")
    out = proved(target, source, tmp_path / "dst", "--drop-kv-scales")
    assert not [n for n in packed.tensors(out) if re.search(r"[kv]_scale$", n)]
    assert any("KV scales" in note for note in report(out)["notes"])
    text = (out / "config.json").read_text() + (
        (out / HF).read_text() if (out / HF).exists() else "")  # fmt: skip
    said = json.loads((out / "config.json").read_text()).get("quantization_config", {})
    said.pop("source", None)
    assert not said.get("kv_cache_scheme")
    assert not said.get("kv_cache")
    assert '"kv_cache_quant_algo": "FP8"' not in text or target == "canonical"


@pytest.mark.parametrize(("name", "target"), [
    ("modelopt-nvfp4-kv", "bf16"), ("fp8-qwen", "deepseek-fp8"), ("gptoss-mxfp4", "gpt-oss"),
])  # fmt: skip
def test_kv_scales_that_cannot_be_said_are_refused(
    kind: Made, tmp_path: Path, name: str, target: str
) -> None:
    source = copied(kind(name)[0], tmp_path / "src")
    if name != "modelopt-nvfp4-kv":
        at = AT.format(0)
        edit(source, lambda t: t | {f"{at}k_scale": torch.ones(1), f"{at}v_scale": torch.ones(1)})
    error = refused(target, source, tmp_path / "dst")
    assert "k_scale" in error
    assert "--drop-kv-scales" in error
    proved(target, source, tmp_path / "dst", "--drop-kv-scales")


def test_one_kv_scale_a_head_stays_or_is_refused(kind: Made, tmp_path: Path) -> None:
    source = copied(kind("ct-nvfp4-kv")[0], tmp_path / "src")

    def heads(tensors: Tensors) -> Tensors:
        return {n: t.reshape(1, 1, 1).expand(2, 1, 1) if is_kv(n) else t
                for n, t in tensors.items()}  # fmt: skip

    edit(source, heads)
    out = packed.tensors(proved("compressed-tensors", source, tmp_path / "same"))
    assert all(t.shape == (2, 1, 1) for n, t in out.items() if is_kv(n))
    assert "one scale a head" in refused("modelopt", source, tmp_path / "dst")
    proved("modelopt", source, tmp_path / "dropped", "--drop-kv-scales")


def is_kv(name: str) -> bool:
    return re.search(r"self_attn\.[kv]_scale$", name) is not None


def test_a_kv_cache_in_fp4_is_modelopts_alone(kind: Made, tmp_path: Path) -> None:
    source = copied(kind("modelopt-nvfp4-kv")[0], tmp_path / "src")

    def four(config: Json) -> Json:
        own = config["quantization_config"] | {"kv_cache_scheme": "NVFP4"}
        return config | {"quantization_config": own}

    edit_config(source, four)
    out = proved("modelopt", source, tmp_path / "same")
    assert quantization(out)["kv_cache_scheme"] == "NVFP4"
    assert load_json(out / HF)["quantization"]["kv_cache_quant_algo"] == "NVFP4"
    assert "NVFP4" in refused("compressed-tensors", source, tmp_path / "dst")


# The command's words.


def test_every_target_is_listed_once() -> None:
    lines = run("formats").out.splitlines()
    names = [line.split()[0] for line in lines]
    assert len(names) == len({*names})
    assert {"canonical", "bf16", "modelopt", "compressed-tensors", "quark", "deepseek-fp8",
            "deepseek-v4", "deepseek-v4-nvfp4", "gpt-oss"} <= {*names}  # fmt: skip


def test_a_refusal_names_no_target_that_is_not_there(kind: Made, tmp_path: Path) -> None:
    """`--to X` in a message is a word that the command takes."""
    names = {line.split()[0] for line in run("formats").out.splitlines()}
    for name in ("modelopt-nvfp4", "modelopt-mxfp8", "fp8-deepseek"):
        for target in sorted(names):
            ran = run("convert", "--to", target, "--dry-run", kind(name)[0], tmp_path / "dst")
            for word in re.findall(r"--to ([\w-]+)", ran.err):
                assert word in names, ran.err
                assert word != target, ran.err


def test_options_of_forms_are_not_for_layouts(kind: Made, tmp_path: Path) -> None:
    source, _ = kind("modelopt-nvfp4")
    for option in ("--fused", "--drop-kv-scales", "--fill-input-scale"):
        ran = run("convert", "--to", "marlin-nvfp4", option, source, tmp_path / "dst")
        assert (ran.code, "are for forms" in ran.err) == (2, True)
    for options in (("--dtype", "float16"), ("--tp", "2")):
        ran = run("convert", "--to", "canonical", *options, source, tmp_path / "dst")
        assert (ran.code, "are for kernels" in ran.err) == (2, True)
    assert not (tmp_path / "dst").exists()


def test_a_dry_run_writes_nothing(kind: Made, tmp_path: Path) -> None:
    source, _ = kind("modelopt-nvfp4")
    for target in ("canonical", "compressed-tensors", "bf16"):
        ran = run("convert", "--to", target, "--dry-run", source, tmp_path / "dst")
        assert ran.code == 0
        assert "nothing written" in ran.out
    assert not [*tmp_path.iterdir()]


def test_targets_for_one_encoding_write_what_the_general_one_does(
    kind: Made, tmp_path: Path
) -> None:
    pairs = [("modelopt-nvfp4", "compressed-tensors", "compressed-tensors-nvfp4"),
             ("ct-mxfp4", "modelopt", "modelopt-mxfp4"), ("ct-fp8", "modelopt", "modelopt-fp8"),
             ("fp8-deepseek", "compressed-tensors", "compressed-tensors-fp8-block"),
             ("ct-mxfp4", "quark", "quark-mxfp4"), ("ct-mxfp8", "modelopt", "modelopt-mxfp8"),
             ("ct-fp8-channel", "quark", "quark-fp8")]  # fmt: skip
    for name, general, special in pairs:
        source, _ = kind(name)
        one = convert(general, source, tmp_path / "one")
        two = convert(special, source, tmp_path / "two")
        assert same_files(one, two, leave=("transcode_report.json",))


def same_files(one: Path, two: Path, leave: Iterable[str]) -> bool:
    names = {p.name for at in (one, two) for p in at.iterdir()} - {*leave}
    return all((one / n).read_bytes() == (two / n).read_bytes() for n in names)


def test_every_kind_is_inspected(kind: Made) -> None:
    for name in KINDS:
        ran = run("inspect", kind(name)[0])
        assert ran.code == 0, name


def test_no_scale_is_written_without_its_weight(kind: Made, tmp_path: Path) -> None:
    """And input scales that are left out are not carried as loose tensors."""
    for name, target in (
        ("modelopt-w4a8", "compressed-tensors"), ("modelopt-w4a8", "modelopt-nvfp4"),
        ("ct-nvfp4", "compressed-tensors-nvfp4a16"),
    ):  # fmt: skip
        out = packed.tensors(proved(target, kind(name)[0], tmp_path / "dst"))
        assert [n for n in out if "input" in n and "layernorm" not in n] == []


def test_blocks_of_two_kinds_are_refused_or_described(kind: Made, tmp_path: Path) -> None:
    """One linear's scales as E8M0 bytes among floats: no one config says both."""
    source = copied(kind("fp8-deepseek-ue8m0")[0], tmp_path / "src")
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"

    def bytes_of(value: Tensor) -> Tensor:
        return (torch.log2(value) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    edit(source, lambda t: t | {name: bytes_of(t[name])})
    ran = run("convert", "--to", "deepseek-fp8", source, tmp_path / "dst")
    assert ran.code in (0, 1)
    if ran.code == 0:
        assert raw(packed.tensors(tmp_path / "dst")[name]) == raw(packed.tensors(source)[name])
        assert quantization(tmp_path / "dst")["weight_block_size"] == [128, 128]
