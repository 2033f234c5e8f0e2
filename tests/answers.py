"""Cases of the golden files: inputs of a runtime's packers, as checkpoints, and their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from transcode import catalog
from transcode.quant import Encoding
from transcode.spec import Layout

FOLDER = Path(__file__).parent / "golden"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

# fmt: off
KINDS = {
    "vllm_marlin_nvfp4": {"marlin-nvfp4 vllm": "dense moe moe_inplace"},
    "vllm_marlin_mxfp4": {"marlin-mxfp4 vllm": "dense moe moe_inplace moe_buffers",
                          "marlin-mxfp4 vllm-a8": "dense_a8 moe_a8 moe_buffers_a8"},
    "vllm_marlin_mxfp8": {"marlin-mxfp8 vllm": "dense moe"},
    "vllm_marlin_fp8": {"marlin-fp8 vllm": "dense moe"},
    "sglang_marlin": {"marlin-nvfp4 sglang": "nvfp4_dense nvfp4_moe",
                      "marlin-mxfp4 sglang": "mxfp4_moe mxfp4_moe_buffers"},
}
"""The kinds of each file by the layout's name and variant."""

CONFIGS: dict[str, dict[str, Any]] = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gpt-oss": {"quant_method": "mxfp4"},
}
# fmt: on

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One layer as its packer was given it."""

    file: str
    kind: str
    dtype: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}-{self.kind}-{self.dtype}-{self.name}"

    def _side(self, side: str) -> Tensors:
        found: Tensors = {}
        for key, value in load(self.file).items():
            kind, dtype, name, end, tensor = key.split(".")
            if (kind, name, end) == (self.kind, self.name, side) and dtype in ("any", self.dtype):
                found[tensor] = value
        return found

    @property
    def given(self) -> Tensors:
        return self._side("in")

    @property
    def wanted(self) -> Tensors:
        """The answers, under the names that they have here."""
        made = self._side("out")
        ours = {n: n.replace("_inv", "").replace("weight_bias", "bias") for n in made}
        return {ours[name]: value for name, value in made.items()}

    @property
    def layout(self) -> Layout:
        kinds = KINDS[self.file]
        return catalog.variant(
            *next(k for k, of in kinds.items() if self.kind in of.split()).split()
        )

    @property
    def dense(self) -> bool:
        return "weight" in self.given

    def checkpoint(self, folder: Path, *, apart: bool = False) -> Path:
        """A folder with this layer in a producer's convention; apart: joined linears one by one."""
        folder.mkdir()
        tensors: Tensors = {}
        given = _linears(self, apart) if self.dense else _experts(self)
        if "interleaved" in self.name:
            producer, tensors = "gpt-oss", _stacked(self.given)
        else:
            for module, part in given:
                producer = _producer(self.layout, part)
                codes = "weight_packed" if producer == "mxfp4" else "weight"
                tensors |= {f"{module}.{leaf}": t for leaf, t in part.items() if leaf != "weight"}
                tensors[f"{module}.{codes}"] = part["weight"]
        experts = len(self.given.get("w2_weight", ()))
        config = {
            "model_type": "gpt_oss" if producer == "gpt-oss" else "llama",
            "hidden_act": "silu",
            "num_local_experts": experts,
            "quantization_config": CONFIGS[producer],
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
        return folder


@cache
def load(file: str) -> Tensors:
    return load_file(FOLDER / f"{file}.safetensors")


def cases(*kinds: str) -> list[Case]:
    """All cases of these kinds, or of all kinds."""
    found = set[Case]()
    for file in KINDS:
        for kind, dtype, name, *_ in (key.split(".") for key in load(file)):
            both = DTYPES if dtype == "any" else (dtype,)
            found |= {Case(file, kind, d, name) for d in both if not kinds or kind in kinds}
    return sorted(found, key=str)


def rows(case: Case, *, apart: bool = False) -> list[int]:
    """The rows of joined linears, or of all at once.

    Here each member is padded by itself, in the runtime all of them together: where that is not the
    same they go in as one linear, unless `apart`.
    """
    members: list[int] = case.given["members"].tolist() if "members" in case.given else []
    split = members and (apart or not any(n % 64 for n in members))
    return members if split else [len(case.given["weight"])]


def modules(case: Case, *, apart: bool = False) -> list[str]:
    """The names of the linears."""
    names = (["o_proj"], ["gate_proj", "up_proj"], ["q_proj", "k_proj", "v_proj"])
    leaves = names[len(rows(case, apart=apart)) - 1]
    return [f"model.layers.0.self_attn.{leaf}" for leaf in leaves]


def _linears(case: Case, apart: bool) -> Iterator[tuple[str, Tensors]]:
    """The tensors of each linear."""
    given, sizes = case.given, rows(case, apart=apart)
    members, scale = given.pop("members", None), given.get("weight_scale")
    if members is not None and scale is not None and scale.dim() == 1:
        given["weight_scale"] = scale.repeat_interleave(members)[:, None]
    for name, n, end in zip(modules(case, apart=apart), sizes, accumulate(sizes), strict=True):
        yield name, {leaf: t[end - n : end] if t.dim() else t for leaf, t in given.items()}


def _experts(case: Case) -> Iterator[tuple[str, Tensors]]:
    """The tensors of each projection of each expert."""
    gated = "ungated" not in case.name
    for stack, names in (
        ("w13", ["gate_proj", "up_proj"] if gated else ["up_proj"]),
        ("w2", ["down_proj"]),
    ):
        own = {k.partition("_")[2]: v for k, v in case.given.items() if k.startswith(stack)}
        for e, (i, name) in product(range(len(own["weight"])), enumerate(names)):
            part = {
                leaf: t[e].chunk(len(names))[i] if t[e].dim() else t[e] for leaf, t in own.items()
            }
            if "weight_scale" in part and part["weight_scale"].dim() == 1:  # one of each half
                part["weight_scale"] = part["weight_scale"][0]
            yield f"model.layers.0.mlp.experts.{e}.{name}", part


def _producer(layout: Layout, part: Tensors) -> str:
    """Whose convention a linear's tensors are in."""
    if Encoding.FP8_TENSOR not in layout.encodings:
        return str(layout.encodings[0])
    scale = part.get("weight_scale")
    return "block" if scale is None else "channel" if scale.dim() else "tensor"


def _stacked(given: Tensors) -> Tensors:
    """As gpt-oss: the rows of gate and up take turns there already."""
    found: Tensors = {}
    for stack, stem in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        where, weight = f"model.layers.0.mlp.experts.{stem}", given[f"{stack}_weight"]
        found[f"{where}_blocks"] = weight.reshape(*weight.shape[:2], -1, 16)
        found[f"{where}_scales"] = given[f"{stack}_weight_scale"]
        found[f"{where}_bias"] = given[f"{stack}_bias"]
    return found


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether dtype, shape and every byte agree."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (ours, theirs))
    return torch.equal(a, b)
