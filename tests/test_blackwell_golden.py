"""Whole conversions for CUTLASS, TensorRT-LLM and DeepGEMM against the runtimes' own code (golden).

A golden file has a layer as a runtime's packer was given it, and what it made of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import packed
from tests.convert import run
from transcode import catalog
from transcode import convert as line
from transcode.quant import Encoding

FOLDER = Path(__file__).parent / "golden"
EXPERTS = "model.layers.0.mlp.experts"
LINEAR = "model.layers.0.self_attn.o_proj"

# fmt: off
KINDS = {
    "vllm_cutlass_nvfp4": {"cutlass-nvfp4 vllm": "dense moe",
                           "cutlass-nvfp4 flashinfer": "moe_flashinfer"},
    "vllm_cutlass_mx": {"cutlass-mxfp4 vllm": "mxfp4_dense mxfp4_moe",
                        "cutlass-mxfp4 flashinfer": "mxfp4_moe_flashinfer",
                        "cutlass-mxfp8 vllm": "mxfp8_dense"},
    "vllm_cutlass_fp8": {"cutlass-fp8 vllm": "moe",
                         "cutlass-fp8 flashinfer": "moe_flashinfer moe_flashinfer_padded"},
    "vllm_trtllm": {"trtllm-nvfp4 vllm": "nvfp4 nvfp4_padded", "trtllm-mxfp4 vllm": "mxfp4"},
    "sglang_trtllm": {"trtllm-nvfp4 sglang": "nvfp4", "trtllm-mxfp4 sglang": "mxfp4"},
    "deepgemm_megamoe": {"megamoe-mxfp4 mxfp4": "mxfp4", "megamoe-nvfp4 vllm": "nvfp4_vllm",
                         "megamoe-nvfp4 sgl": "nvfp4_sgl"},
    "deepgemm_fp8": {"deepgemm-fp8 sm100": "sm100 sm100_powers",
                     "megamoe-fp8-sm90 sm90": "megamoe_sm90"},
}
"""The kinds of each file by the layout's name and variant."""

CONFIGS = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "gpt-oss": {"quant_method": "mxfp4"},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
# fmt: on

AS_IT_IS = "deepgemm-fp8 sm90"
"""It has no packer: the runtime takes the checkpoint's own bytes."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One layer."""

    file: str
    layout: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.layout.replace(' ', '-')}-{self.file}-{self.kind}-{self.name}"

    def side(self, side: str) -> Tensors:
        stem = f"{self.kind}.bf16.{self.name}.{side}."
        found = {k[len(stem) :]: v for k, v in load(self.file).items() if k.startswith(stem)}
        if self.kind == "sm100" and side == "in":  # the packer rounds first: take what it packed
            made = self.side("out")
            scales = powers(made["weight_scale_inv"], found["weight_scale_inv"].shape)
            found = {"weight": made["weight"], "weight_scale_inv": scales}
        return found

    @property
    def given(self) -> Tensors:
        """What the packer was given; the same scales under one name."""
        return self.cleared({n.replace("_inv", ""): t for n, t in self.side("in").items()})

    @property
    def wanted(self) -> Tensors:
        return self.cleared({n.replace("_inv", ""): t for n, t in self.side("out").items()})

    def cleared(self, side: Tensors) -> Tensors:
        """FlashInfer's tiles of FP8: zeros where the scale is next to nothing, as it is for."""
        if self.kind != "moe_flashinfer" or self.producer != "block":
            return side
        for stack in ("w13", "w2"):
            scales = side[f"{stack}_weight_scale"]
            empty = (scales <= 1e-10).repeat_interleave(128, 1).repeat_interleave(128, 2)
            raw = side[f"{stack}_weight"].view(torch.uint8)
            side[f"{stack}_weight"] = torch.where(empty, 0, raw).view(torch.float8_e4m3fn)
        return side

    @property
    def producer(self) -> str:
        layout = catalog.variant(*self.layout.split())
        if "interleaved" in self.name:
            return "gpt-oss"
        if Encoding.FP8_TENSOR in layout.encodings:
            return self.name.split("-")[0]
        return "block" if layout.groups == (128,) else str(layout.encodings[0])

    def checkpoint(self, folder: Path) -> Path:
        """A folder with this layer in a producer's convention."""
        folder.mkdir()
        if self.producer == "gpt-oss":
            tensors = stacked(self.given)
        else:
            tensors = linears(self.given, self.producer, gated="ungated" not in self.name)
        count = [len(t) for name, t in self.given.items() if name == "w2_weight"]
        if self.kind.startswith("sm100") and self.given["weight"].dim() == 3:
            count = [len(self.given["weight"])]
        config = {
            "model_type": "gpt_oss" if self.producer == "gpt-oss" else "llama",
            "hidden_act": "silu",
            "num_local_experts": sum(count),
            "quantization_config": CONFIGS[self.producer],
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
        return folder


def load(file: str) -> Tensors:
    return load_file(FOLDER / f"{file}.safetensors")


def powers(words: Tensor, shape: torch.Size) -> Tensor:
    """Float32 scales of 128 x 128 tiles from DeepGEMM's words, by the words' own definition."""
    octets = words.contiguous().view(torch.uint8).reshape(*words.shape, 4)
    rows = octets.transpose(-3, -2).flatten(-2)[..., ::128, : shape[-1]]
    return (rows[..., : shape[-2], :].int() << 23).view(torch.float32)


def linears(given: Tensors, producer: str, *, gated: bool) -> Tensors:
    """One linear, or each projection of each expert."""
    if "weight" in given:
        return leaves(LINEAR, given, producer)
    found: Tensors = {}
    for stack, names in (
        ("w13", ["gate_proj", "up_proj"] if gated else ["up_proj"]),
        ("w2", ["down_proj"]),
    ):
        own = {k.partition("_")[2]: v for k, v in given.items() if k.startswith(f"{stack}_")}
        for e, (i, name) in product(range(len(own["weight"])), enumerate(names)):
            part = {
                leaf: t[e].chunk(len(names))[i] if t[e].dim() else t[e] for leaf, t in own.items()
            }
            for leaf, t in part.items():
                if ("_scale_2" in leaf or "input" in leaf or producer == "tensor") and t.dim() == 1:
                    part[leaf] = t[0]
            found |= leaves(f"{EXPERTS}.{e}.{name}", part, producer)
    return found


def leaves(module: str, part: Tensors, producer: str) -> Tensors:
    names = {
        "mxfp4": {"weight": "weight_packed"},
        "block": {"weight_scale": "weight_scale_inv"},
    }.get(producer, {})
    return {f"{module}.{names.get(leaf, leaf)}": t for leaf, t in part.items()}


def stacked(given: Tensors) -> Tensors:
    """As gpt-oss: the rows of gate and up take turns there already."""
    found: Tensors = {}
    for stack, stem in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        weight = given[f"{stack}_weight"]
        found[f"{EXPERTS}.{stem}_blocks"] = weight.reshape(*weight.shape[:2], -1, 16)
        found[f"{EXPERTS}.{stem}_scales"] = given[f"{stack}_weight_scale"]
        found[f"{EXPERTS}.{stem}_bias"] = given[f"{stack}_bias"]
    return found


def cases() -> list[Case]:
    found = set[Case]()
    for file, kinds in KINDS.items():
        names = {tuple(key.split(".")[:3:2]) for key in load(file)}
        for layout, of in kinds.items():
            found |= {Case(file, layout, *one) for one in names if one[0] in of.split()}
    return sorted(found, key=str)


def convert(case: Case, folder: Path) -> Path:
    name, variant = case.layout.split()
    source, target = case.checkpoint(folder / "src"), folder / "dst"
    if case.kind.startswith("sm100"):  # sizes that the runtime gives to another kernel
        layout = replace(catalog.variant(name, variant), serves=lambda n, k: True)
        checkpoint, plan = line.prepare(source, line.Ask(layout))
        line.convert(source, target, checkpoint, plan, torch.device("cpu"), overwrite=False)
        return target
    runtime = catalog.variant(name, variant).runtime
    ran = run("convert", "--to", name, "--variant", variant, "--for", runtime, source, target)
    assert ran.code == 0, ran.err
    return target


@pytest.mark.parametrize("case", [c for c in cases() if not c.name.startswith("experts-")], ids=str)
def test_what_is_written_equals_the_runtimes_words(tmp_path: Path, case: Case) -> None:
    out = packed.tensors(convert(case, tmp_path))
    place = f"{LINEAR}." if "weight" in case.given else f"{EXPERTS}."
    compared = set[str]()
    for tensor, theirs in case.wanted.items():
        ours = out[f"{place}{tensor.replace('_weight_bias', '_bias')}"]
        raw = [t.contiguous().view(torch.uint8) for t in (ours, theirs)]
        if "dense" in case.kind and "weight" in tensor and ours.shape != theirs.shape:
            if tensor == "weight":  # MXFP4 and MXFP8 are padded here, to 128 both ways
                n, k = theirs.shape
                assert not raw[0][n:].any()
                assert not raw[0][:, k:].any()
                raw[0] = raw[0][:n, :k]
            else:  # the same tiles under one axis
                raw = [t.flatten() for t in raw]
        if tensor == "w13_weight_scale_2" and ours.dim() == 2:
            raw[0] = ours[:, 0].contiguous().view(torch.uint8)  # the runtime takes gate's for both
        else:
            assert ours.shape == theirs.shape or "dense" in case.kind, tensor
        assert torch.equal(*raw), tensor
        compared.add(tensor)
    weights = {name for name in case.given if name.endswith(("weight", "weight_scale"))}
    assert weights - compared <= ({"weight"} if case.kind == "sm100_powers" else set())


def test_every_file_is_compared_and_says_where_it_is_from() -> None:
    for file, kinds in KINDS.items():
        with safe_open(FOLDER / f"{file}.safetensors", "pt") as opened:
            history = json.loads(opened.metadata()["provenance"])
        there = {kind for of in kinds.values() for kind in of.split()}
        assert there == history["functions"].keys() == {key.split(".")[0] for key in load(file)}
        for name in kinds:
            layout = catalog.variant(*name.split())
            runtime = "vllm" if layout.runtime == "flashinfer" else layout.runtime
            if runtime in history:
                assert layout.release in history[runtime]


def test_every_layout_has_golden_words() -> None:
    variants = {f"{v.name} {v.variant}" for of in catalog.layouts().values() for v in of}
    there = {name for kinds in KINDS.values() for name in kinds}
    assert {name for name in variants if not name.startswith("marlin-")} == {*there, AS_IT_IS}
