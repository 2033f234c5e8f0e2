"""AMD Quark's Hugging Face export, dense and per expert.

| encoding    | `weight`       | `weight_scale`                    | others                           |
|-------------|----------------|-----------------------------------|----------------------------------|
| mxfp4       | U8 [N, K/2]    | U8, E8M0 [N, K/32]                | `input_scale` F32 [] (A-FP8)     |
| fp8-tensor  | F8_E4M3 [N, K] | F32 []                            | `input_scale` F32 []             |
| fp8-channel | F8_E4M3 [N, K] | F32 [N] (PTPC)                    |                                  |
| fp8-block   | F8_E4M3 [N, K] | F32 or E8M0 [ceil(N/b), ceil(K/b)] |                                 |
| nvfp4       | U8 [N, K/2]    | F8_E4M3 [N, K/16]                 | `weight_scale_2`, `input_scale_2` F32 []; only read |

Every scale is a factor, the even column in the low nibble whatever `pack_method` says.
Source: AMD Quark 0.13, quark/torch/export; vllm/model_executor/layers/quantization/quark.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transcode.errors import FormatError
from transcode.formats._lists import with_containers
from transcode.producer import (
    E8M0,
    SGLANG,
    VLLM,
    Configs,
    Format,
    Group,
    Leaf,
    Producer,
    Role,
    Target,
    Told,
)
from transcode.quant import Encoding

EMULATED = replace(VLLM, note="needs the package amd-quark; emulated on NVIDIA GPUs")
FOUR, EIGHT = Leaf("weight", ("U8",)), Leaf("weight", ("F8_E4M3",))
INPUT = {Role.INPUT: Leaf("input_scale", ("F32",))}
FLOAT = Leaf("weight_scale", ("F32",))


def _format(encoding: Encoding, codes: Leaf, scales: Leaf, more: Mapping[Role, Leaf]) -> Format:
    return Format("quark", encoding, {Role.CODES: codes, Role.SCALES: scales, **more})


FORMATS = (
    _format(Encoding.MXFP4, FOUR, Leaf("weight_scale", ("U8",)), INPUT),
    _format(Encoding.FP8_TENSOR, EIGHT, FLOAT, INPUT),
    _format(Encoding.FP8_CHANNEL, EIGHT, FLOAT, {}),
    _format(Encoding.FP8_BLOCK, EIGHT, Leaf("weight_scale", ("F32", "U8", "F8_E8M0")), {}),
    Format(
        "quark",
        Encoding.NVFP4,
        {
            Role.CODES: FOUR,
            Role.SCALES: Leaf("weight_scale", ("F8_E4M3",)),
            Role.GLOBAL: Leaf("weight_scale_2", ("F32",)),
            Role.INPUT: Leaf("input_scale_2", ("F32",)),
        },
        read_only=True,
    ),
)


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config is Quark's."""
    return config.get("quant_method") == "quark"


OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
    "per_block": "PerBlock2DMinMaxObserver",
}
"""Quark's own reader wants one that fits the scheme, though nothing is observed any more."""


def _spec(dtype: str, qscheme: str, *, dynamic: bool, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "is_dynamic": dynamic,
        "observer_cls": OBSERVERS[qscheme],
        "symmetric": True,
        "ch_axis": None,
        "group_size": None,
        "block_size": None,
        "scale_format": None,
        "scale_type": "float",
        "scale_calculation_mode": None,
        "round_method": "half_even",
        "zero_point_type": "int32",
        "is_scale_quant": False,
        "mx_element_dtype": None,
        **more,
    }


def _weight(group: Group) -> dict[str, Any]:
    match group.encoding:
        case Encoding.MXFP4:
            return _mx(dynamic=False)
        case Encoding.FP8_TENSOR:
            return _spec("fp8_e4m3", "per_tensor", dynamic=False)
        case Encoding.FP8_CHANNEL:
            return _spec("fp8_e4m3", "per_channel", dynamic=False, ch_axis=0)
    powers = {"scale_type": "float8_e8m0fnu"} if group.scales in E8M0 else {}
    size = list(group.block or ())
    return _spec("fp8_e4m3", "per_block", dynamic=False, block_size=size, **powers)


def _mx(*, dynamic: bool) -> dict[str, Any]:
    return _spec(
        "fp4", "per_group", dynamic=dynamic, ch_axis=-1, group_size=32, scale_format="e8m0"
    )


def _inputs(group: Group) -> dict[str, Any] | None:
    match group.encoding, group.activations:
        case _, "none":
            return None
        case ((Encoding.FP8_TENSOR | Encoding.MXFP4), "static"):
            return _spec("fp8_e4m3", "per_tensor", dynamic=False)
        case Encoding.MXFP4, "dynamic":
            return _mx(dynamic=True)
        case Encoding.FP8_TENSOR, "dynamic":
            return _spec("fp8_e4m3", "per_tensor", dynamic=True)
        case Encoding.FP8_CHANNEL, "dynamic":
            return _spec("fp8_e4m3", "per_channel", dynamic=True, ch_axis=1)
        case Encoding.FP8_BLOCK, "dynamic":
            return _spec("fp8_e4m3", "per_group", dynamic=True, ch_axis=-1, group_size=128)
    raise FormatError(
        f"{group.modules[0]}: {group.encoding} with {group.activations} activations: "
        "Quark has no word for it"
    )


def describe(told: Told) -> Configs:
    """quantization_config: the largest group is global, the others go by their full names."""
    if told.model_type == "gpt_oss":
        raise FormatError(
            "Quark keeps gate and up of gpt-oss' experts in one linear, which is not written here"
        )
    largest = max(told.groups, key=lambda g: len(g.modules))
    entry = {
        id(group): {
            "weight": _weight(group),
            "input_tensors": _inputs(group),
            "output_tensors": None,
            "bias": None,
        }
        for group in told.groups
    }
    layers = {
        name: entry[id(group)]
        for group in told.groups
        if group is not largest
        for name in group.modules
    }
    caches = _caches(told, entry) if told.kv else {}
    return Configs(
        {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "version": "0.13",
            "algo_config": None,
            "exclude": with_containers(told.plain),
            "global_quant_config": entry[id(largest)],
            "layer_quant_config": layers | caches,
            "layer_type_quant_config": {},
            "kv_cache_quant_config": caches,
            "kv_cache_post_rope": False,
            "softmax_quant_spec": None,
            "export": {
                "kv_cache_group": list(caches),
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }
    )


def _caches(told: Told, entry: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The entries of k and v, whose outputs are the KV cache: as their weights', with FP8."""
    if told.kv != "FP8":
        raise FormatError(f"a KV cache in {told.kv}: Quark has FP8; --drop-kv-scales")
    found = dict[str, Any]()
    plain = dict.fromkeys(("weight", "input_tensors", "output_tensors", "bias"))
    for leaf in ("k_proj", "v_proj"):
        own = [g for g in told.groups if any(name.endswith(f".{leaf}") for name in g.modules)]
        if len(own) > 1:
            raise FormatError(
                f"the layers' {leaf} are quantised in {len(own)} ways: Quark has no word for a KV "
                "cache then; --drop-kv-scales"
            )
        scheme = entry[id(own[0])] if own else plain
        cache = _spec("fp8_e4m3", "per_tensor", dynamic=False)
        found[f"*{leaf}"] = scheme | {"output_tensors": cache}
    return found


PRODUCERS = (
    Producer(
        name="quark",
        formats=FORMATS,
        claims=claims,
        describe=describe,
        kv="{0}.{1}_proj.output_scale",
        targets=(
            Target("quark", "AMD Quark, the encodings as they are"),
            Target("quark-mxfp4", "MXFP4", (Encoding.MXFP4,), loads_in=(EMULATED, SGLANG)),
            Target(
                "quark-fp8",
                "FP8 per tensor or channel, as it is",
                (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL),
                loads_in=(VLLM, SGLANG),
            ),
        ),
    ),
)
