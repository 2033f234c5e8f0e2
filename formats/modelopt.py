"""Every encoding as NVIDIA ModelOpt writes it, dense and per expert, or stacked (Llama-4, gpt-oss).

| encoding    | `weight`        | `weight_scale`                         | scalars (F32 [])         |
|-------------|-----------------|----------------------------------------|--------------------------|
| nvfp4       | U8 [N, K/2]     | F8_E4M3 [N, K/16]                      | weight_scale_2 (a factor, amax / (6 * 448)), input_scale; none if W4A16 |
| nvfp4-32    | U8 [N, K/2]     | F8_E4M3 [N, K/32]                      | weight_scale_2, input_scale (W4A8_NVFP4_FP8) |
| mxfp4       | U8 [N, K/2]     | U8, E8M0 [N, K/32]                     | input_scale if W4A8      |
| mxfp8       | F8_E4M3 [N, K]  | U8, E8M0 [N, K/32]                     |                          |
| fp8-tensor  | F8_E4M3 [N, K]  | F32 []                                 | input_scale              |
| fp8-channel | F8_E4M3 [N, K]  | F32 [N]                                |                          |
| fp8-block   | F8_E4M3 [N, K]  | F32 [ceil(N/128), 1, ceil(K/128), 1]   |                          |

The even column is in the low nibble; every scale is a factor. Stacked: `experts.gate_up_proj` U8
[E, H/2, 2I] packed along H, `..._weight_scale` [E, H/16, 2I], `..._weight_scale_2` [] one for all
experts and both halves, `..._input_scale` [], `..._bias` [E, 2I]; `down_proj` [E, I/2, H] alike.
Llama-4's columns are gate's, then up's; gpt-oss' alternate.

Source: NVIDIA/Model-Optimizer, modelopt/torch/export/{unified_export_hf,quant_utils,
convert_hf_config}.py. NVIDIA's DeepSeek-V4 repack uses the NVFP4 leaves under `quant_method: fp8`
with `moe_quant_algo: NVFP4` (deepseek_v4.py).
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transcode.errors import FormatError
from transcode.formats._lists import with_containers, without_traps
from transcode.producer import (
    SGLANG,
    VLLM,
    VLLM_DENSE,
    Configs,
    Format,
    Fusion,
    Group,
    Leaf,
    Producer,
    Role,
    Shape,
    Target,
    Told,
    leaf_names,
)
from transcode.quant import Encoding

FACTOR = {
    Role.GLOBAL: Leaf("weight_scale_2", ("F32",)),
    Role.INPUT: Leaf("input_scale", ("F32",)),
}


def _four_axes(shape: Shape) -> Shape:
    return shape[0], 1, shape[1], 1


def _format(encoding: Encoding, codes: str, scales: Leaf, more: Mapping[Role, Leaf]) -> Format:
    leaves = {Role.CODES: Leaf("weight", (codes,)), Role.SCALES: scales, **more}
    return Format("modelopt", encoding, leaves)


INPUT = {Role.INPUT: FACTOR[Role.INPUT]}
SCALE = "weight_scale"

FORMATS = (
    _format(Encoding.NVFP4, "U8", Leaf(SCALE, ("F8_E4M3",)), FACTOR),
    _format(Encoding.NVFP4_32, "U8", Leaf(SCALE, ("F8_E4M3",)), FACTOR),
    _format(Encoding.MXFP4, "U8", Leaf(SCALE, ("U8",)), INPUT),
    _format(Encoding.MXFP8, "F8_E4M3", Leaf(SCALE, ("U8",)), {}),
    _format(Encoding.FP8_TENSOR, "F8_E4M3", Leaf(SCALE, ("F32",)), INPUT),
    _format(Encoding.FP8_CHANNEL, "F8_E4M3", Leaf(SCALE, ("F32",)), {}),
    _format(Encoding.FP8_BLOCK, "F8_E4M3", Leaf(SCALE, ("F32",), _four_axes), {}),
)

LEAVES = leaf_names(FORMATS)
SUFFIXES = {role: f"_{leaf}" for role, leaf in LEAVES.items()} | {Role.CODES: ""}

LLAMA4 = Fusion("gate_up_proj", "down_proj", SUFFIXES, LEAVES, transposed=True, one_scalar=True)
GPT_OSS = Fusion(
    "gate_up_proj", "down_proj", SUFFIXES, LEAVES, transposed=True, interleaved=True,
    one_scalar=True,
)  # fmt: skip

ALGORITHMS = {
    Encoding.NVFP4: "NVFP4",
    Encoding.NVFP4_32: "W4A8_NVFP4_FP8",
    Encoding.MXFP4: "MXFP4",
    Encoding.MXFP8: "MXFP8",
    Encoding.FP8_TENSOR: "FP8",
    Encoding.FP8_CHANNEL: "FP8_PER_CHANNEL_PER_TOKEN",
    Encoding.FP8_BLOCK: "FP8_PB_WO",
}
SIZES = {Encoding.NVFP4: 16, Encoding.NVFP4_32: 32, Encoding.MXFP4: 32, Encoding.MXFP8: 32}
WHO = {"name": "modelopt", "version": "0.47.0"}
"""Whose conventions are written, and their version."""


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config is ModelOpt's, in either file's form."""
    method = str(config.get("quant_method") or "").lower()
    producer = config.get("producer")
    named = producer.get("name") if isinstance(producer, dict) else None
    algorithms = (config.get("quant_algo"), config.get("moe_quant_algo"))
    nvfp4 = any("NVFP4" in str(name).upper() for name in algorithms)
    says = named == "modelopt" or "quantization" in config or nvfp4
    return method.startswith("modelopt") or (method in ("", "fp8") and says)


def describe(told: Told) -> Configs:
    """config.json's flat form and hf_quant_config.json.

    FormatError for FP8 per tensor without input scales: ModelOpt has no word for it.
    """
    quantised = [name for group in told.groups for name in group.modules]
    plain = without_traps(sorted([*with_containers(told.plain), *told.tables]), quantised)
    algorithms = [_algorithm(group) for group in told.groups]
    mixed = len(told.groups) > 1
    layers = {
        name: {"quant_algo": algorithm} | _size(group)
        for group, algorithm in zip(told.groups, algorithms, strict=True)
        for name in group.modules
    }
    algorithm = "MIXED_PRECISION" if mixed else algorithms[0]
    size = {} if mixed else _size(told.groups[0])
    named = {"quantized_layers": layers} if mixed else {}
    quantization: dict[str, Any] = {
        "config_groups": {
            f"group_{i}": _group(group, told, mixed=mixed) for i, group in enumerate(told.groups)
        },
        "ignore": plain,
        "quant_algo": algorithm,
        "producer": WHO,
        "quant_method": "modelopt",
        **named,
        **size,
    }
    if mixed:
        quantization["kv_cache_scheme"] = None  # vLLM wants the key beside quantized_layers
    if told.kv == "FP8":
        quantization["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif told.kv:
        if not re.fullmatch(r"(NV|MX)?FP\d.*", told.kv):
            raise FormatError(f"a KV cache in {told.kv}: ModelOpt has FP8; --drop-kv-scales")
        quantization["kv_cache_scheme"] = told.kv
    hf_quant = {
        "producer": WHO,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": told.kv or None,
            **size,
            **named,
            "exclude_modules": plain,
        },
    }
    return Configs(quantization, hf_quant=hf_quant)


def _algorithm(group: Group) -> str:
    static, first = group.activations == "static", group.modules[0]
    if group.encoding is Encoding.FP8_TENSOR and not static:
        raise FormatError(
            f"{first}: FP8 per tensor without an input scale: ModelOpt has no word; "
            "--input-scale gives one"
        )
    if group.encoding is Encoding.FP8_CHANNEL and group.activations == "none":
        raise FormatError(f"{first}: FP8 per channel with 16 bit activations: ModelOpt has no word")
    if group.encoding is Encoding.FP8_BLOCK and group.block != (128, 128):
        raise FormatError(f"{first}: FP8 in blocks of {group.block}, ModelOpt has (128, 128)")
    if group.encoding is Encoding.MXFP4 and static:
        return "W4A8_MXFP4_FP8"
    if group.encoding is Encoding.NVFP4 and not static:
        return "W4A16_NVFP4"
    return ALGORITHMS[group.encoding]


def _size(group: Group) -> dict[str, Any]:
    return {"group_size": SIZES[group.encoding]} if group.encoding in SIZES else {}


def _group(group: Group, told: Told, *, mixed: bool) -> dict[str, Any]:
    bits = 4 if group.encoding in (Encoding.NVFP4, Encoding.NVFP4_32, Encoding.MXFP4) else 8
    weights = {"dynamic": False, "num_bits": bits, "type": "float"} | _size(group)
    eight = group.encoding is Encoding.NVFP4_32 or _algorithm(group) == "W4A8_MXFP4_FP8"
    inputs = {"dynamic": False, "num_bits": 8, "type": "float"} if eight else dict(weights)
    if group.activations == "dynamic":
        inputs["dynamic"] = True
    targets = list(dict.fromkeys(_container(name, told) for name in group.modules))
    return {
        **({} if group.activations == "none" else {"input_activations": inputs}),
        "weights": weights,
        "targets": targets if mixed else ["Linear"],
    }


def _container(name: str, told: Told) -> str:
    head, experts, _ = name.partition(".experts.")
    container = f"{head}.experts"
    return container if experts and container in told.containers else name


PRODUCERS = (
    Producer(
        name="modelopt",
        formats=FORMATS,
        claims=claims,
        describe=describe,
        fusions={"llama4": LLAMA4, "llama4_text": LLAMA4, "gpt_oss": GPT_OSS, "": LLAMA4},
        stackable=(Encoding.NVFP4, Encoding.FP8_TENSOR),
        kv="{0}.{1}_proj.{1}_scale",
        targets=(
            Target("modelopt", "NVIDIA ModelOpt, the encodings as they are"),
            Target(
                "modelopt-nvfp4", "NVFP4, W4A4 or W4A16", (Encoding.NVFP4,), loads_in=(VLLM, SGLANG)
            ),
            Target(
                "modelopt-fp8",
                "FP8 per tensor, static",
                (Encoding.FP8_TENSOR,),
                loads_in=(VLLM, SGLANG),
            ),
            Target("modelopt-mxfp8", "MXFP8", (Encoding.MXFP8,), loads_in=(VLLM,)),
            Target("modelopt-mxfp4", "MXFP4", (Encoding.MXFP4,)),
            Target(
                "modelopt-fp8-block",
                "FP8 in blocks (FP8_PB_WO)",
                (Encoding.FP8_BLOCK,),
                loads_in=(VLLM_DENSE,),
            ),
            Target(
                "modelopt-fp8-channel",
                "FP8 per channel",
                (Encoding.FP8_CHANNEL,),
                loads_in=(VLLM_DENSE,),
            ),
        ),
    ),
)
