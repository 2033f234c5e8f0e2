"""Every kind of trouble is found once it is there, at its level, and not before."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.build import Json, Spec, Tensors, build, edit, edit_config
from tests.convert import pack, run
from tests.producers import KINDS
from transcode.check import LEVELS, Finding, examine
from transcode.errors import CheckpointError

INDEX = "model.safetensors.index.json"
CT: Any = "compressed-tensors"
EXPERT = "model.layers.1.mlp.experts.2."
QKV = "model.layers.0.self_attn."

DEFAULT = Spec()

Change = Callable[[Path], None]


def tensors(**new: Any) -> Change:
    """Replace tensors by name ("." for "__"): a value for what was there, None removes."""

    def change(all_: Tensors) -> Tensors:
        for key, value in new.items():
            name = key.replace("__", ".")
            if value is None:
                del all_[name]
            elif callable(value):
                all_[name] = value(all_[name])
            else:
                all_[name] = value
        return all_

    return lambda folder: edit(folder, change)


def on(name: str, value: Any) -> Change:
    return tensors(**{name.replace(".", "__"): value})


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def config(**new: Any) -> Change:
    return lambda folder: edit_config(folder, lambda c: c | new)


def quantization(**new: Any) -> Change:
    def change(found: Json) -> Json:
        return found | {"quantization_config": found["quantization_config"] | new}

    return lambda folder: edit_config(folder, change)


def ignore(*more: str, without: tuple[str, ...] = ()) -> Change:
    def change(found: Json) -> Json:
        block = found["quantization_config"]
        kept = [entry for entry in block["ignore"] if entry not in without]
        return found | {"quantization_config": block | {"ignore": [*kept, *more]}}

    return lambda folder: edit_config(folder, change)


def index(change: Callable[[dict[str, str]], dict[str, str]]) -> Change:
    def edit_index(found: Json) -> Json:
        return found | {"weight_map": change(dict(found["weight_map"]))}

    return lambda folder: edit_config(folder, edit_index, INDEX)


def only_hf_quant(*, without: str = "", algo: str = "NVFP4") -> Change:
    def change(folder: Path) -> None:
        edit_config(folder, lambda c: {k: v for k, v in c.items() if k != "quantization_config"})
        path = folder / "hf_quant_config.json"
        found = json.loads(path.read_text())
        found["quantization"] |= {"quant_algo": algo}
        found["quantization"].pop(without, None)
        path.write_text(json.dumps(found))

    return change


def renamed(old: str, new: str) -> Change:
    return lambda folder: edit(
        folder, lambda all_: {name.replace(old, new): t for name, t in all_.items()}
    )


def nan(scales: Tensor) -> Tensor:
    raw = scales.view(torch.uint8).clone()
    raw[3, 1] = 0x7F
    return raw.view(torch.float8_e4m3fn)


def negative(scales: Tensor) -> Tensor:
    raw = scales.view(torch.uint8).clone()
    raw[3, 1] |= 0x80
    return raw.view(torch.float8_e4m3fn)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t * factor


def tiny(scales: Tensor) -> Tensor:
    raw = scales.view(torch.uint8).clone()
    raw[3, 1] = 1
    return raw.view(torch.float8_e4m3fn)


def drop(*fragments: str) -> Change:
    def change(all_: Tensors) -> Tensors:
        return {n: t for n, t in all_.items() if not any(f in n for f in fragments)}

    return lambda folder: edit(folder, change)


def without(*keys: str, file: str = "config.json") -> Change:
    """Drop keys of a JSON file and of its quantization config."""

    def change(found: Json) -> Json:
        kept = {key: value for key, value in found.items() if key not in keys}
        if block := kept.get("quantization_config"):
            kept["quantization_config"] = {k: v for k, v in block.items() if k not in keys}
        return kept

    return lambda folder: edit_config(folder, change, file)


def forget(module: str) -> Change:
    """Drop a module from the lists of a mixed config."""

    def change(found: Json) -> Json:
        block = found["quantization_config"]
        layers = {k: v for k, v in block["quantized_layers"].items() if k != module}
        return found | {"quantization_config": block | {"quantized_layers": layers}}

    return lambda folder: edit_config(folder, change)


def write(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def more(name: str, tensor: str) -> Change:
    """One more file with one tensor."""
    return lambda folder: save_file({tensor: torch.ones(1)}, folder / name)


def turn(all_: Tensors) -> Tensors:
    """`experts.3.up_proj` to `experts.up_proj.3`."""
    return {re.sub(r"\.experts\.(\d+)\.(\w+)\.", r".experts.\2.\1.", n): t for n, t in all_.items()}


def extra_expert(folder: Path) -> None:
    def change(all_: Tensors) -> Tensors:
        more = {n.replace(".experts.3.", ".experts.4."): t.clone() for n, t in all_.items()}
        return more | all_

    edit(folder, change)


@dataclass(frozen=True)
class Case:
    """What makes a finding appear in a healthy checkpoint."""

    level: str
    code: str
    change: Change
    spec: Spec = DEFAULT
    runtimes: tuple[str, ...] = ("vllm", "sglang")
    where: str = ""
    words: tuple[str, ...] = ()


NESTED: dict[str, Any] = {"producer": {"name": "modelopt"}}
SHARDED = Spec(shards=3, mtp_layers=1, model_type="deepseek_v3")
DENSE = Spec(model_type="llama")
KV = Spec(kv_scales=True)
VLLM, SGLANG = ("vllm",), ("sglang",)

CASES = [
    # scalars
    Case(
        "WRONG", "expert-scales", on(EXPERT + "up_proj.weight_scale_2", times(4)),
        where=EXPERT[:-1], words=("1 of 8 groups", "4-fold", "Humming", "trtllm-gen", "fold 1"),
    ),
    Case(
        "WRONG", "expert-scales", on(EXPERT + "up_proj.weight_global_scale", times(0.25)),
        Spec(CT), where=EXPERT[:-1], words=("4-fold", "SGLang does the same with every backend"),
    ),
    Case(
        "WRONG", "group-scales", on(QKV + "k_proj.weight_scale_2", times(1.5)),
        where=QKV[:-1],
        words=("q_proj+k_proj+v_proj", "largest", "round the block scales of 1 group again"),
    ),
    Case(
        "WRONG", "group-scales", on(QKV + "k_proj.weight_global_scale", times(2)), Spec(CT),
        words=("smallest (the largest divisor)",),
    ),
    Case(
        "WRONG", "group-scales", on("model.layers.1.mlp.up_proj.weight_scale_2", times(3)), DENSE,
        where="model.layers.1.mlp", words=("1 of 2 groups", "fold 1 exactly"),
    ),
    Case(
        "NOTE", "group-scales-close", on(EXPERT + "up_proj.weight_scale_2", times(1 + 2e-6)),
    ),
    Case(
        "WRONG", "global-scale-invalid", on(EXPERT + "down_proj.weight_scale_2", times(torch.nan)),
        where=EXPERT + "down_proj", words=("nan",),
    ),
    Case(
        "WRONG", "global-scale-invalid", on(QKV + "o_proj.weight_scale_2", times(-1)),
        where=QKV + "o_proj",
    ),
    Case(
        "WRONG", "global-scale-invalid", on(EXPERT + "down_proj.weight_global_scale", times(0)),
        Spec(CT), words=("inf",),
    ),
    Case(
        "WRONG", "global-scale-large", on(QKV + "o_proj.weight_scale_2", torch.tensor(1000.0)),
        where=QKV + "o_proj",
    ),
    Case("WEAK", "global-scale-zero", on(QKV + "o_proj.weight_scale_2", times(0))),
    Case(
        "WEAK", "global-scale-zero", on(QKV + "o_proj.weight_global_scale", times(torch.inf)),
        Spec(CT),
    ),
    Case("WEAK", "global-scale-zero", on(EXPERT + "gate_proj.weight_scale_2", times(0))),
    Case(
        "WRONG", "zero-member", on(EXPERT + "up_proj.weight_scale_2", times(0)),
        where=EXPERT + "up_proj",
    ),
    Case(
        "WRONG", "zero-member", on(QKV + "k_proj.weight_global_scale", times(torch.inf)), Spec(CT),
        where=QKV + "k_proj",
    ),
    Case(
        "WRONG", "zero-matrix-nan",
        both(
            on(EXPERT + "down_proj.weight_scale_2", times(0)),
            on(EXPERT + "down_proj.weight_scale", nan),
        ),
        where=EXPERT + "down_proj", words=("1 block scale NaN", "packs zeros"),
    ),
    # block scales
    Case(
        "WRONG", "block-scale-nan", on(EXPERT + "down_proj.weight_scale", nan),
        where=EXPERT + "down_proj", words=("1 block scale NaN",),
    ),
    Case(
        "WRONG", "block-scale-nan", on(QKV + "o_proj.weight_scale", nan), runtimes=SGLANG,
        where=QKV + "o_proj",
    ),
    Case(
        "FAILS", "block-scale-nan", on(QKV + "o_proj.weight_scale", nan), runtimes=VLLM,
        where=QKV + "o_proj",
    ),
    Case("WRONG", "block-scale-nan", on(QKV + "o_proj.weight_scale", nan), Spec(CT)),
    Case(
        "WRONG", "block-scale-negative", on(EXPERT + "up_proj.weight_scale", negative),
        where=EXPERT + "up_proj",
    ),
    # input scales
    Case(
        "WRONG", "input-scale-missing", on(EXPERT + "up_proj.input_scale", None), runtimes=VLLM,
        where=EXPERT + "up_proj", words=("1 expert matrix", "45212"),
    ),
    Case(
        "WEAK", "input-scale-missing", on(EXPERT + "up_proj.input_scale", None), runtimes=SGLANG,
    ),
    Case("WRONG", "input-scale-missing", on(QKV + "o_proj.input_scale", None)),
    Case("WRONG", "input-scale-missing", drop(".1.up_proj.input_global_scale"), Spec(CT)),
    Case("WRONG", "input-scale-missing", drop("input_scale"), DENSE, words=("14 dense matrices",)),
    Case("WRONG", "input-scale-invalid", on(EXPERT + "down_proj.input_scale", times(0))),
    Case(
        "WRONG", "input-scale-invalid", on(EXPERT + "down_proj.input_global_scale", times(0)),
        Spec(CT),
    ),
    Case(
        "FAILS", "input-scale-unwanted", on(QKV + "o_proj.input_global_scale", torch.ones(1)),
        Spec(CT, w4a16=True), VLLM,
    ),
    # leaves
    Case(
        "WRONG", "scale-without-weight", on(EXPERT + "up_proj.weight", None),
        where=EXPERT + "up_proj",
    ),
    Case("WRONG", "scale-without-weight", on(QKV + "o_proj.weight_packed", None), Spec(CT)),
    Case("WRONG", "scale-missing", on(EXPERT + "up_proj.weight_scale", None)),
    Case("WRONG", "scale-missing", on(EXPERT + "up_proj.weight_scale_2", None)),
    Case("WRONG", "scale-missing", on(QKV + "q_proj.weight_global_scale", None), Spec(CT)),
    Case("WRONG", "scale-missing", on(QKV + "q_proj.weight_scale", None), Spec(attention="fp8")),
    Case("FAILS", "scale-without-codes", on(QKV + "q_proj.weight", torch.ones(128, 256))),
    Case("FAILS", "malformed", on(QKV + "q_proj.weight_scale", lambda t: t[:, :-1])),
    Case(
        "FAILS", "pre-quant-scale", on(QKV + "o_proj.pre_quant_scale", torch.ones(128)),
        runtimes=VLLM,
    ),
    Case("NOTE", "not-read", on(QKV + "o_proj.weight_g_idx", torch.ones(128).int()), Spec(CT)),
    Case("WRONG", "experts-missing", drop(EXPERT), where=EXPERT[:-1]),
    Case("WRONG", "experts-missing", drop(EXPERT + "up_proj"), words=("(up)",)),
    Case("WRONG", "experts-missing", config(num_local_experts=6), words=("4 experts missing",)),
    Case("FAILS", "experts-surplus", extra_expert, words=("2 layers", "4")),
    Case(
        "FAILS", "expert-names", lambda folder: edit(folder, turn), runtimes=VLLM,
    ),
    Case(
        "FAILS", "mixed-group",
        both(drop(QKV + "k_proj."), on(QKV + "k_proj.weight", torch.ones(64, 256).bfloat16())),
        where=QKV + "qkv_proj", words=("q_proj nvfp4", "k_proj unquantised"),
    ),
    Case(
        "WEAK", "mixed-group",
        both(
            config(model_type="new"), drop(QKV + "k_proj."),
            on(QKV + "k_proj.weight", torch.ones(64, 256).bfloat16()),
        ),
    ),
    # the index and the folder
    Case(
        "FAILS", "ghosts", index(lambda m: m | {"mtp.fc.weight": m["lm_head.weight"]}), SHARDED,
        where="mtp.fc.weight",
    ),
    Case(
        "WEAK", "strays", index(lambda m: {k: v for k, v in m.items() if k != "lm_head.weight"}),
        SHARDED, where="lm_head.weight",
    ),
    Case(
        "WEAK", "moved", index(lambda m: m | {"lm_head.weight": max(m.values())}), SHARDED,
        where="lm_head.weight",
    ),
    Case(
        "NOTE", "total-size",
        lambda folder: edit_config(folder, lambda i: i | {"metadata": {"total_size": 1}}, INDEX),
        SHARDED,
    ),
    Case(
        "WRONG", "shard-not-indexed",
        more("more.safetensors", "model.layers.0.x"),
        SHARDED, where="more.safetensors", words=("model.layers.0.x",),
    ),
    Case(
        "WEAK", "shard-not-indexed",
        more("mtp.safetensors", "mtp.x.weight"),
        SHARDED, where="mtp.safetensors",
    ),
    Case(
        "WEAK", "loose-weights",
        more("adapter_model.safetensors", "x"),
        where="adapter_model.safetensors",
    ),
    Case(
        "NOTE", "left-out",
        more("adapter_model.safetensors", "x"),
    ),
    Case("FAILS", "unsound", lambda folder: os.truncate(folder / "model.safetensors", 5000)),
    Case(
        "FAILS", "unsound", remove("model-00002-of-00003.safetensors"),
        SHARDED, words=("model-00002-of-00003.safetensors is missing",),
    ),
    Case("FAILS", "unsound", write("config.json", "{"), words=("config.json",)),
    # the ignore list
    Case(
        "FAILS", "ignored-quantised", ignore(QKV + "o_proj"), where=QKV + "o_proj",
    ),
    Case(
        "FAILS", "ignored-quantised", ignore("model.layers.1"), runtimes=VLLM,
        spec=Spec(layers=11), where="model.layers.1.mlp.experts", words=("6 layers",),
    ),
    Case(
        "FAILS", "ignored-quantised", ignore("mlp.gate"), DENSE, VLLM,
        "model.layers.0.mlp.gate_up_proj", ("substring", "2 layers"),
    ),
    Case(
        "FAILS", "ignored-quantised", ignore(EXPERT + "up_proj"), runtimes=VLLM,
        where="model.layers.1.mlp.experts", words=("whole layer of experts",),
    ),
    Case(
        "FAILS", "ignored-quantised", ignore("gate*"), DENSE, SGLANG,
        "model.layers.0.mlp.gate_up_proj",
    ),
    Case("FAILS", "ignored-quantised", ignore("model.layers.0*"), words=("3 layers",)),
    Case(
        "FAILS", "ignored-quantised", ignore("re:.*mlp.gate"), Spec(CT, "llama"), VLLM,
        "model.layers.0.mlp.gate_up_proj", ("re:.*mlp.gate",),
    ),
    Case("FAILS", "partly-listed", ignore("re:.*mlp.gate"), Spec(CT, "llama"), SGLANG),
    Case("FAILS", "ignored-quantised", ignore("re:.*down"), Spec(CT, "llama")),
    Case("FAILS", "ignored-quantised", ignore("o_proj"), Spec(CT, "llama"), SGLANG),
    Case(
        "FAILS", "partly-listed", ignore(QKV + "q_proj"), where=QKV + "qkv_proj",
    ),
    Case("FAILS", "partly-listed", ignore(QKV + "q_proj"), Spec(CT)),
    Case("FAILS", "unlisted", ignore(without=("lm_head",)), where="lm_head"),
    Case(
        "FAILS", "unlisted", ignore(without=(QKV + "o_proj",)), Spec(attention="bf16"),
        where=QKV + "o_proj",
    ),
    Case(
        "FAILS", "unlisted", ignore(without=(QKV + "o_proj",)), Spec(CT, attention="bf16"),
        where=QKV + "o_proj",
    ),
    Case("FAILS", "unlisted", ignore(without=("model.layers.0.mlp.gate",)), runtimes=VLLM),
    Case("NOTE", "unlisted", ignore(without=("model.layers.0.mlp.gate",)), runtimes=SGLANG),
    Case(
        "NOTE", "unlisted", ignore(without=("model.layers.0.block_sparse_moe.gate",)),
        Spec(model_type="mixtral"), where="model.layers.0.block_sparse_moe.gate",
    ),
    Case(
        "WEAK", "ignored-quantised", ignore("mtp.layers.0.mlp.experts.0.up_proj"),
        Spec(mtp_layers=1, mtp="fp8", attention="fp8"), VLLM,
    ),
    Case(
        "FAILS", "ignored-quantised",
        forget(QKV + "o_proj"), Spec(attention="fp8"),
        where=QKV + "o_proj", words=("quantized_layers does not name it",),
    ),
    Case(
        "FAILS", "other-bits", quantization(quant_algo="FP8"), words=("4 bit", "8 bit"),
    ),
    # the config
    Case("FAILS", "quant-method-null", quantization(quant_method=None)),
    Case("FAILS", "quant-method-missing", without("quant_method"), runtimes=VLLM),
    Case("FAILS", "quant-method-missing", without("quant_method"), Spec(CT)),
    Case(
        "FAILS", "config-disagrees",
        both(quantization(quant_method="compressed-tensors"), without("producer", "quant_algo")),
    ),
    Case("FAILS", "config-disagrees", quantization(quant_method="modelopt"), Spec(CT)),
    Case(
        "FAILS", "config-disagrees", without("quantization_config"), Spec(CT),
        where="config.json", words=("no quantization config",),
    ),
    Case(
        "FAILS", "config-disagrees",
        both(without("quantization_config"), remove("hf_quant_config.json")),
        Spec(attention="fp8", gate_up="fp8", down="fp8"),
        where="config.json", words=("no quantization config",),
    ),
    Case("WEAK", "hf-quant-config-only", only_hf_quant(), where="hf_quant_config.json"),
    Case("FAILS", "nested-fields", only_hf_quant(without="exclude_modules"), runtimes=VLLM),
    Case("FAILS", "nested-algorithm", only_hf_quant(algo="W4A16_NVFP4"), runtimes=VLLM),
    Case(
        "FAILS", "producer-missing",
        both(only_hf_quant(), without("producer", file="hf_quant_config.json")),
        runtimes=VLLM,
    ),
    Case(
        "NOTE", "hf-quant-config-stale", write("hf_quant_config.json", "{}"), Spec(CT),
    ),
    Case("FAILS", "algorithm-missing", without("quant_algo"), runtimes=VLLM),
    Case("FAILS", "algorithm-case", quantization(quant_algo="nvfp4"), runtimes=SGLANG),
    Case("FAILS", "algorithm-unknown", quantization(quant_algo="NVFP4_AWQ"), runtimes=VLLM),
    Case("FAILS", "algorithm-unknown", quantization(quant_algo="W4A8_NVFP4_FP8")),
    Case(
        "FAILS", "layers-missing",
        both(
            quantization(quant_algo="MIXED_PRECISION", quantized_layers={}),
            remove("hf_quant_config.json"),
        ),
    ),
    Case(
        "FAILS", "nothing-quantised",
        lambda folder: edit(folder, lambda all_: {
            n: t for n, t in all_.items() if n.rpartition(".")[0] in ("lm_head", "model.norm")
        }),
    ),
    # the KV cache
    Case("WEAK", "kv-scales-missing", drop("k_scale", "v_scale"), KV),
    Case("WEAK", "kv-scheme-missing", quantization(kv_cache_scheme=None), KV),
    Case("WEAK", "kv-scheme-missing", quantization(kv_cache_scheme=None), Spec(CT, kv_scales=True)),
    Case("NOTE", "kv-spelling", renamed("k_proj.k_scale", "k_scale"), KV),
    Case("NOTE", "kv-spelling", renamed("attn.k_scale", "attn.k_proj.k_scale"),
         Spec(CT, kv_scales=True)),
    Case("WEAK", "kv-spelling", renamed("attn.k_scale", "attn.k_proj.output_scale"),
         Spec(CT, kv_scales=True), VLLM),
    Case("WEAK", "kv-scale-lone", drop("v_proj.v_scale"), KV, words=("2 layers",)),
    Case("FAILS", "kv-scale-invalid", on(QKV + "k_proj.k_scale", times(0)), KV, VLLM),
    # MTP
    Case("WEAK", "mtp-missing", config(num_nextn_predict_layers=1)),
    Case("WEAK", "mtp-missing", drop("mtp."), Spec(model_type="qwen3_next", mtp_layers=1)),
    Case(
        "NOTE", "mtp-undeclared", config(num_nextn_predict_layers=0),
        Spec(model_type="deepseek_v3", mtp_layers=1),
    ),
    # what the kernels cannot do
    Case("FAILS", "w4a8", on(QKV + "o_proj.weight_scale", lambda t: t[:, ::2])),
    Case(
        "WEAK", "scales-flushed", on(EXPERT + "up_proj.weight_scale", tiny), runtimes=VLLM,
        where=EXPERT + "up_proj", words=("1 block scale in 1 matrix",),
    ),
    Case("WEAK", "scales-flushed", on(QKV + "o_proj.weight_scale", tiny), runtimes=SGLANG),
    Case(
        "NOTE", "not-packable", both(drop("experts.0.up_proj.bias")),
        Spec(expert_biases=True), words=("has no bias",),
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Spec, Path], set[str]]:
    """Copies a checkpoint, built once, and says what was found in it."""
    seen: dict[Spec, tuple[Path, set[str]]] = {}

    def copy(spec: Spec, target: Path) -> set[str]:
        if spec not in seen:
            folder = tmp_path_factory.mktemp("healthy") / "source"
            build(folder, spec)
            seen[spec] = folder, {f.code for f in examine(folder, None)}
        shutil.copytree(seen[spec][0], target)
        return seen[spec][1]

    return copy


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.level}")
def test_a_trouble_is_found_once_it_is_there(
    tmp_path: Path, healthy: Callable[[Spec, Path], set[str]], case: Case
) -> None:
    folder = tmp_path / "source"
    assert case.code not in healthy(case.spec, folder)
    case.change(folder)
    wanted = case.level, case.code, case.runtimes
    found = examine(folder, None)
    same = [f for f in found if (f.level, f.code, f.runtimes) == wanted]
    assert len(same) == 1, [str(f) for f in found]
    assert same[0].where == case.where or not case.where
    for word in case.words:
        assert word in str(same[0])
    assert [f.level for f in found] == sorted((f.level for f in found), key=LEVELS.index)


APART = ("tensor-parallel", "left-out", "form-not-loaded", "expert-order-assumed", "tp-misfit")
"""Not faults, or of tests of their own."""


def quiet(folder: Path) -> list[Finding]:
    return [f for f in examine(folder, None) if f.code not in APART]


HEALTHY = [
    *(Spec(d, m, **more)  # type: ignore[arg-type]
      for d in ("modelopt", CT)
      for m, more in (
          ("qwen3_moe", {}), ("qwen3_moe", {"w4a16": True}), ("qwen3_moe", {"shards": 3}),
          ("qwen3_moe", {"attention": "fp8"}), ("qwen3_moe", {"attention": "bf16"}),
          ("qwen3_moe", {"attention": "mxfp4"}), ("qwen3_moe", {"kv_scales": True}),
          ("qwen3_moe", {"biases": True}), ("qwen3_moe", {"config_dtype": "float16"}),
          ("llama", {}), ("llama", {"down": "fp8"}), ("mixtral", {}), ("minimax_m2", {}),
          ("deepseek_v3", {"shared_experts": 1, "mtp_layers": 1}),
          ("nemotron_h", {"mtp_layers": 1}), ("qwen3_next", {"shared_experts": 1, "mtp_layers": 1}),
      )),
    Spec(model_type="deepseek_v4", mtp_layers=1, shared_experts=1),
]  # fmt: skip


@pytest.mark.parametrize("spec", HEALTHY, ids=str)
def test_a_sound_checkpoint_raises_no_alarm(tmp_path: Path, spec: Spec) -> None:
    build(tmp_path / "source", spec)
    assert not quiet(tmp_path / "source")


DATA = sorted(path for path in (Path(__file__).parent / "data").iterdir() if path.is_dir())


DOWN = "model.layers.0.mlp.experts.0.down_proj"
KNOWN_FAULTS = {
    "modelopt_nvfp4_qwen3moe_zeros": (
        "WRONG", "zero-matrix-nan", DOWN.replace(".0.down", ".1.down"), "2048 block scales NaN",
    ),
    "modelopt_nvfp4_llama4": (
        "FAILS", "fused-scales", "model.layers.0.feed_forward.experts.down_proj_weight_scale",
        "4 fused block scales",
    ),
    "hf_fp8ops_qwen3moe": (
        "WRONG", "unlisted", "model.layers.0.mlp.gate", "vLLM builds qwen3_moe's router",
    ),
    "pair_cast_mxfp4_to_nvfp4_gptoss": (
        "WRONG", "expert-down-bias", DOWN, "stored in model.layers.0.mlp.experts.down_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("folder", DATA, ids=lambda folder: folder.name)
def test_the_producers_own_checkpoints_are_sound_but_for_known_faults(folder: Path) -> None:
    found = quiet(folder)
    if "nvfp4" not in folder.name:
        note = found.pop()
        assert (note.level, note.code) == ("NOTE", "not-judged")
        assert "only scales that are no numbers are found; found " in note.message
    if folder.name in KNOWN_FAULTS:
        *wanted, words = KNOWN_FAULTS[folder.name]
        assert [[f.level, f.code, f.where] for f in found] == [wanted]
        assert words in found[0].message
    else:
        assert not found


def drawn(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(100, 120, shape, dtype=torch.uint8).view(dtype)


GATES = [f"model.layers.{i}.mlp.gate" for i in (0, 1)]
ALL_FP8_BLOCK = Spec(attention="fp8_block", gate_up="fp8_block", down="fp8_block")
GPT_OSS = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts."
BLOCKS = {
    EXPERTS + "gate_up_proj_blocks": drawn(4, 64, 2, 16),
    EXPERTS + "gate_up_proj_scales": drawn(4, 64, 2),
    EXPERTS + "gate_up_proj_bias": torch.ones(4, 64).bfloat16(),
    EXPERTS + "down_proj_blocks": drawn(4, 64, 1, 16),
    EXPERTS + "down_proj_scales": drawn(4, 64, 1),
}
FUSED = {
    EXPERTS + "gate_up_proj": drawn(4, 32, 64),
    EXPERTS + "gate_up_proj_weight_scale": drawn(4, 4, 64, dtype=torch.float8_e4m3fn),
    EXPERTS + "gate_up_proj_weight_scale_2": torch.tensor(1e-4),
    EXPERTS + "gate_up_proj_input_scale": torch.tensor(1e-2),
    EXPERTS + "down_proj": drawn(4, 16, 64),
    EXPERTS + "down_proj_weight_scale": drawn(4, 2, 64, dtype=torch.float8_e4m3fn),
    EXPERTS + "down_proj_weight_scale_2": torch.tensor(1e-4),
    EXPERTS + "down_proj_input_scale": torch.tensor(1e-2),
}


def fp8_native(**more: Any) -> Change:
    """DeepSeek's own config: no list at all."""
    block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], **more}
    return both(config(quantization_config=block), remove("hf_quant_config.json"))


def native_experts(all_: Tensors) -> Tensors:
    """DeepSeek-V4's own: I8 codes, one F8_E8M0 `scale` for 32."""
    out: Tensors = {}
    for name, t in all_.items():
        module, _, leaf = name.rpartition(".")
        if ".experts." not in name:
            out[name] = t
        elif leaf == "weight":
            out[name] = t.view(torch.int8)
            out[f"{module}.scale"] = drawn(len(t), t.shape[1] // 16, dtype=torch.float8_e8m0fnu)
    return out


FOREIGN: dict[str, tuple[Spec, Change]] = {
    **{
        f"{kind}-{dialect}": (Spec(dialect, attention=kind, gate_up=kind, down=kind), both())
        for dialect in ("modelopt", CT)
        for kind in ("fp8", "fp8_channel", "fp8_block", "mxfp4", "int4")
        if kind != "int4" or dialect == CT
    },
    "bf16": (
        Spec(CT, "llama", attention="bf16", gate_up="bf16", down="bf16"),
        without("quantization_config"),
    ),
    "deepseek-fp8": (
        ALL_FP8_BLOCK,
        fp8_native(modules_to_not_convert=GATES),
    ),
    "deepseek-v4": (
        Spec(model_type="deepseek_v4"),
        both(lambda folder: edit(folder, native_experts), fp8_native(scale_fmt="ue8m0")),
    ),
    "quark": (
        Spec(attention="mxfp4", gate_up="mxfp4", down="mxfp4"),
        both(
            config(quantization_config={"quant_method": "quark", "exclude": ["lm_head", *GATES]}),
            remove("hf_quant_config.json"),
        ),
    ),
    "gpt-oss": (
        Spec(attention="bf16"),
        both(
            drop(".experts."), lambda folder: edit(folder, lambda all_: all_ | BLOCKS),
            config(**GPT_OSS), remove("hf_quant_config.json"),
        ),
    ),
    "llama-4": (
        Spec(),
        both(
            drop(".experts."), lambda folder: edit(folder, lambda all_: all_ | FUSED),
            config(model_type="llama4_text"),
        ),
    ),
    "gptq": (
        Spec(attention="bf16"),
        both(
            drop(".experts."), on("model.layers.0.mlp.up_proj.qweight", drawn(8, 8).int()),
            config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_sound_foreign_checkpoint_is_only_not_judged_or_not_read(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "source"
    spec, change = FOREIGN[name]
    build(folder, spec)
    change(folder)
    found = [(f.level, f.code, f.runtimes) for f in quiet(folder)]
    code = "not-read" if name == "gptq" else "not-judged"
    llama4 = [("FAILS", "fused-scales", SGLANG)]
    assert found == (llama4 if name == "llama-4" else [("NOTE", code, ("vllm", "sglang"))])


ODD_KINDS = {
    "modelopt-nvfp4-hf-only": ["hf-quant-config-only"],
    "modelopt-nvfp4-llama4": ["fused-scales"],
    "modelopt-nvfp4-gptoss": ["expert-down-bias"],
    "modelopt-nvfp4-turned": ["expert-names"],
    "modelopt-nvfp4-awq": ["pre-quant-scale", "algorithm-unknown"],
    "modelopt-w4a8": ["w4a8", "algorithm-unknown"],
    "ct-fp8": ["kv-spelling"],
    "fp8-mxfp8": ["unlisted"],  # Qwen3-MoE without a list: vLLM quantises the router
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_producers_checkpoint_has_its_own_faults_only(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind](tmp_path / "source")
    found = quiet(tmp_path / "source")
    assert [f.code for f in found if f.level != "NOTE"] == ODD_KINDS.get(kind, [])
    notes = [f for f in found if f.level == "NOTE"]
    assert len(notes) <= 1
    for note in notes:
        assert note.code == "not-judged"
        told = note.message.rpartition("found ")[2].split(", ")
        assert sum(int(entry.split()[0]) for entry in told) == len(made.truth)
    assert notes or "nvfp4" in kind or "mixed" in kind


STACKED = "model.layers.0.mlp.experts."
BY_STACK = [
    ("llama-4", on(STACKED + "down_proj_weight_scale_2", None), "WRONG", "scale-missing",
     STACKED + "0.down_proj"),
    ("llama-4", on(STACKED + "down_proj_weight_scale", lambda t: t[:3]), "FAILS", "malformed",
     STACKED[:-1]),
    ("llama-4", on(STACKED + "down_proj_weight_scale", lambda t: t[:, :, :-2]), "FAILS",
     "malformed", STACKED + "0.down_proj"),
    ("llama-4", on(STACKED + "down_proj_weight_scale_2", times(torch.nan)), "WRONG",
     "global-scale-invalid", STACKED + "0.down_proj"),
    ("llama-4", on(STACKED + "gate_up_proj_input_scale", None), "WRONG", "input-scale-missing",
     STACKED + "0.gate_proj"),
    ("llama-4", on(STACKED + "gate_up_proj_weight_scale_2",
                   torch.tensor([[1.0, 3.0]] * 4) / 2**10), "WRONG", "expert-scales",
     STACKED + "0"),
    ("llama-4", config(num_experts=6), "WRONG", "experts-missing", STACKED + "4"),
    ("gpt-oss", on(STACKED + "down_proj_scales", None), "WRONG", "scale-missing",
     STACKED + "0.down_proj"),
    ("gpt-oss", drop("_scales"), "WRONG", "scale-missing", ""),
    ("gpt-oss", on(STACKED + "down_proj_scales", lambda t: t[:2]), "FAILS", "malformed",
     STACKED[:-1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "level", "code", "where"), BY_STACK)
def test_a_trouble_of_stacked_experts_is_found(
    tmp_path: Path, name: str, change: Change, level: str, code: str, where: str
) -> None:
    folder = tmp_path / "source"
    spec, make = FOREIGN[name]
    build(folder, spec)
    make(folder)
    assert code not in {f.code for f in examine(folder, None)}
    change(folder)
    found = {(f.level, f.code): f for f in examine(folder, None)}
    assert (level, code) in found, [*map(str, found.values())]
    assert where in ("", found[level, code].where)


def test_a_part_of_stacked_experts_is_told_with_its_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    spec, make = FOREIGN["llama-4"]
    build(folder, spec)
    both(make, on(STACKED + "down_proj_weight_scale_2", times(torch.nan)))(folder)
    found = {f.code: f for f in examine(folder, None)}["global-scale-invalid"]
    assert found.message.endswith(f"; stored in {STACKED}down_proj")
    assert "4 global scales of this kind" in found.message


def int8(folder: Path) -> None:
    """compressed-tensors' W8A8 of o_proj: INT8 codes, a float for each row."""
    name = QKV + "o_proj."
    codes = torch.ones(256, 128, dtype=torch.int8)
    both(
        drop(name),
        tensors(**{(name + "weight").replace(".", "__"): codes}),
        tensors(**{(name + "weight_scale").replace(".", "__"): torch.ones(256, 1).bfloat16()}),
    )(folder)


def test_an_encoding_that_is_not_read_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    build(tmp_path / "source", Spec(CT, attention="bf16"))
    quantization(ignore=[])(tmp_path / "source")
    int8(tmp_path / "source")
    found = {f.code: f for f in examine(tmp_path / "source", None)}
    assert "malformed" not in found
    assert "o_proj" in found["not-read"].message
    assert "no encoding known here" in found["not-read"].message


def test_a_method_of_others_over_nvfp4_tensors_loads_nowhere(tmp_path: Path) -> None:
    build(tmp_path / "source", Spec())
    quantization(quant_method="gptq")(tmp_path / "source")
    found = [(f.level, f.code) for f in quiet(tmp_path / "source")]
    assert found == [("FAILS", "config-disagrees"), ("NOTE", "not-judged")]


@pytest.mark.parametrize("kind", ["modelopt-nvfp4-kv", "gptoss-mxfp4", "v4-hub", "ct-mixed"])
def test_the_canonical_form_loads_nowhere_and_says_what_to_do(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind](tmp_path / "source")
    own = tmp_path / "own"
    assert run("convert", "--to", "canonical", tmp_path / "source", own).code == 0
    (found,) = examine(own, None)
    assert (found.level, found.code) == ("NOTE", "canonical")
    assert "transcode's canonical form" in found.message
    assert sum(map(int, re.findall(r"(\d+) (?:nv|mx|fp)", found.message))) == len(made.truth)
    ran = run("check", own)
    assert ran.code == 0
    assert ran.out.strip().endswith("no runtime loads it: convert it")
    drop("w2_weight_scale")(own)
    assert ("FAILS", "unsound") in {(f.level, f.code) for f in examine(own, None)}
    assert run("check", own).code == 3


def test_a_runtime_is_judged_without_the_others_findings(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    build(folder, Spec())
    on(EXPERT + "up_proj.input_scale", None)(folder)
    on(EXPERT + "gate_proj.weight_scale_2", times(2))(folder)
    level = {"vllm": "WRONG", "sglang": "WEAK"}
    for runtime in ("vllm", "sglang"):
        found = {f.code: f for f in examine(folder, runtime)}
        assert found["input-scale-missing"].level == level[runtime]
        assert found["expert-scales"].runtimes == ("vllm", "sglang")
        assert "tensor-parallel" in found


def test_prefixes_that_a_runtime_maps_away_raise_no_alarm(tmp_path: Path) -> None:
    """Files say `model.language_model.`, the list says `language_model.model.`."""
    folder = tmp_path / "source"
    build(folder, Spec(attention="bf16", layers=1))
    renamed("model.layers.", "model.language_model.layers.")(folder)
    edit_config(
        folder,
        lambda c: json.loads(
            json.dumps(c).replace("model.layers.", "language_model.model.layers.")
        ),
    )
    assert not [f for f in quiet(folder) if f.level != "NOTE"]


def test_a_router_that_no_list_names_may_be_unquantised_in_a_mixed_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "source"
    build(folder, Spec(attention="fp8"))
    quantization(ignore=[])(folder)
    assert not quiet(folder)


def test_heads_and_routers_of_mtp_layers_do_not_stop_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    build(folder, Spec(mtp_layers=1))
    ignore(without=("mtp*",))(folder)
    found = [f for f in quiet(folder) if f.level != "NOTE"]
    assert {(f.level, f.code) for f in found} == {("WEAK", "unlisted")}


def test_a_packed_checkpoint_loads_nowhere_yet_and_has_no_other_fault(tmp_path: Path) -> None:
    build(tmp_path / "source", Spec(shared_experts=1, model_type="deepseek_v3", kv_scales=True))
    packed = pack(tmp_path / "source", tmp_path / "packed")
    found = examine(packed, None)
    assert [(f.level, f.code) for f in found] == [("NOTE", "packed")]
    assert "plug-in" in found[0].message


@pytest.mark.parametrize("missing", ["the folder", "config.json", "model.safetensors"])
def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "source"
    build(folder, Spec(layers=1))
    if missing == "the folder":
        shutil.rmtree(folder)
    else:
        remove(missing)(folder)
    with pytest.raises(CheckpointError):
        examine(folder, None)
    ran = run("check", folder)
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 1


def test_the_command_prints_a_line_each_and_exits_with_3_where_it_must(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    build(folder, Spec(layers=1))
    sound = run("check", folder)
    assert sound.code == 0
    assert sound.out.splitlines()[-1].startswith(f"{folder}: 0 WRONG, 0 FAILS, 1 WEAK, 2 NOTE; ")
    on(QKV + "k_proj.weight_scale_2", times(2))(folder)
    ran = run("check", folder, "--for", "sglang")
    assert ran.code == 3
    first = ran.out.splitlines()[0]
    assert first.startswith("WRONG  model.layers.0.self_attn: ")
    assert first.endswith("(vllm, sglang)")
    told = json.loads(run("check", "--json", folder).out)["findings"]
    assert told[0] == examine(folder, None)[0].as_dict() | {"runtimes": ["vllm", "sglang"]}
    assert set(told[0]) == {"level", "code", "where", "message", "runtimes"}


def test_fp16_loses_scales_that_bf16_lifts(tmp_path: Path) -> None:
    """All of a layer's scales below 2^-6: bfloat16 lifts them, float16 never does."""
    for dtype, lost in (("bfloat16", False), ("float16", True)):
        folder = tmp_path / dtype
        build(folder, Spec(layers=1, config_dtype=dtype))  # type: ignore[arg-type]
        shape = (256, 8)
        on(QKV + "o_proj.weight_scale", torch.full(shape, 2**-8).to(torch.float8_e4m3fn))(folder)
        found = {f.code for f in examine(folder, "vllm")}
        assert ("scales-flushed" in found) == lost


def test_a_bias_of_down_is_served_wrong_by_vllm(tmp_path: Path) -> None:
    build(tmp_path / "a", Spec(layers=1))
    build(tmp_path / "b", Spec(layers=1, expert_biases=True))
    assert "expert-down-bias" not in {f.code for f in examine(tmp_path / "a", None)}
    found = {f.code: f for f in examine(tmp_path / "b", None)}
    assert found["expert-down-bias"].level == "WRONG"
    assert "expert-down-bias" not in {f.code for f in examine(tmp_path / "b", "sglang")}


def test_encodings_that_are_not_judged_are_not_said_to_load(tmp_path: Path) -> None:
    build(tmp_path / "a", Spec(layers=1))
    assert "nothing found that keeps" in run("check", tmp_path / "a").out
    build(tmp_path / "b", Spec(layers=1, attention="fp8", gate_up="fp8", down="fp8"))
    assert "not all of its encodings are judged yet" in run("check", tmp_path / "b").out


BOTH = ["vllm", "sglang"]
UNLOADED = {
    "ct_mxfp4_qwen3moe": ["sglang"], "modelopt_mxfp8_qwen3moe": ["sglang"],
    "modelopt_fp8block_qwen3moe": BOTH, "modelopt_nvfp4_llama4": BOTH,
    "pair_cast_mxfp4_to_nvfp4_gptoss": BOTH,
    "modelopt-nvfp4-llama4": BOTH, "modelopt-nvfp4-gptoss": BOTH, "modelopt-fp8-channel": BOTH,
    "modelopt-fp8-block": BOTH, "modelopt-fp8-block-ragged": BOTH, "modelopt-mxfp8": ["sglang"],
    "modelopt-mxfp4": BOTH, "ct-mxfp4": ["sglang"], "ct-mxfp8": ["sglang"], "ct-fp8-naive": BOTH,
    "quark-mxfp4-fp8-gptoss": BOTH,
}  # fmt: skip


def unloaded(folder: Path) -> list[str]:
    found = [f for f in examine(folder, None) if f.code == "form-not-loaded"]
    assert all(f.level == "FAILS" for f in found)
    return [runtime for f in found for runtime in f.runtimes]


@pytest.mark.parametrize("folder", DATA, ids=lambda folder: folder.name)
def test_a_form_that_a_runtime_does_not_load_is_said(folder: Path) -> None:
    assert unloaded(folder) == UNLOADED.get(folder.name, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_built_form_that_a_runtime_does_not_load_is_said(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "source")
    assert unloaded(tmp_path / "source") == UNLOADED.get(kind, [])
