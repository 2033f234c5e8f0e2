"""Every encoding as compressed-tensors (llm-compressor) writes it, dense and per expert.

| encoding    | codes                      | `weight_scale`                        | scalars (F32 [1])        |
|-------------|----------------------------|---------------------------------------|--------------------------|
| nvfp4       | weight_packed U8 [N, K/2]  | F8_E4M3 [N, K/16]                     | weight_global_scale, input_global_scale, both DIVISORS (2688 / amax); no input if W4A16 |
| mxfp4       | weight_packed U8 [N, K/2]  | U8, E8M0 [N, K/32]                    |                          |
| mxfp8       | weight F8_E4M3 [N, K]      | U8, E8M0 [N, K/32]                    |                          |
| fp8-tensor  | weight F8_E4M3 [N, K]      | float [1]                             | input_scale (a factor), static only |
| fp8-channel | weight F8_E4M3 [N, K]      | float [N, 1]                          | input_scale, static only |
| fp8-block   | weight F8_E4M3 [N, K]      | float [ceil(N/128), ceil(K/128)]      |                          |
| int4        | weight_packed I32, carried | float [N, K/g]; weight_shape I64 [2]  |                          |

A float is F32, BF16 or F16, as the model was. The even column is in the low nibble. The factor of
NVFP4 is `fp32(1 / divisor)`; decoded weights differ from the producer's `scale / divisor` by at
most 1.6e-7 relative, because a reciprocal is rounded. A divisor of +inf stands for zeros.

Source: vllm-project/compressed-tensors 0.20.1, src/compressed_tensors/{compressors,quantization}.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transcode.errors import FormatError
from transcode.formats._lists import ignored, patterns
from transcode.producer import (
    FLOATS,
    SGLANG,
    VLLM,
    Configs,
    Format,
    Group,
    Leaf,
    Producer,
    Role,
    Shape,
    Target,
    Told,
)
from transcode.quant import Encoding


def _one(shape: Shape) -> Shape:
    return shape or (1,)


def _column(shape: Shape) -> Shape:
    return shape[0], 1


def _format(encoding: Encoding, codes: Leaf, scales: Leaf, more: Mapping[Role, Leaf]) -> Format:
    leaves = {Role.CODES: codes, Role.SCALES: scales, **more}
    return Format("compressed-tensors", encoding, leaves)


PACKED, EIGHT = Leaf("weight_packed", ("U8",)), Leaf("weight", ("F8_E4M3",))
SCALE = "weight_scale"
DIVISORS = {
    Role.GLOBAL: Leaf("weight_global_scale", ("F32",), _one, divisor=True),
    Role.INPUT: Leaf("input_global_scale", ("F32",), _one, divisor=True),
}
STATIC = {Role.INPUT: Leaf("input_scale", FLOATS, _one)}

FORMATS = (
    _format(Encoding.NVFP4, PACKED, Leaf(SCALE, ("F8_E4M3",)), DIVISORS),
    _format(Encoding.MXFP4, PACKED, Leaf(SCALE, ("U8",)), {}),
    _format(Encoding.MXFP8, EIGHT, Leaf(SCALE, ("U8",)), {}),
    _format(Encoding.FP8_TENSOR, EIGHT, Leaf(SCALE, FLOATS, _one), STATIC),
    _format(Encoding.FP8_CHANNEL, EIGHT, Leaf(SCALE, FLOATS, _column), STATIC),
    _format(Encoding.FP8_BLOCK, EIGHT, Leaf(SCALE, FLOATS), {}),
    _format(Encoding.INT4, Leaf("weight_packed", ("I32",)), Leaf(SCALE, FLOATS), {}),
)


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config is compressed-tensors'."""
    method = config.get("quant_method")
    written = "nvfp4-pack-quantized" in str(config.get("format"))
    return method == "compressed-tensors" or (not method and written)


def _args(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    base = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return {**base, "dynamic": False, **more}


FOUR = _args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
MX = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}

WEIGHTS = {
    Encoding.NVFP4: ("nvfp4-pack-quantized", FOUR),
    Encoding.MXFP4: ("mxfp4-pack-quantized", _args(4, "group", **MX)),
    Encoding.MXFP8: ("mxfp8-quantized", _args(8, "group", **MX)),
    Encoding.FP8_TENSOR: ("float-quantized", _args(8, "tensor")),
    Encoding.FP8_CHANNEL: ("float-quantized", _args(8, "channel")),
    Encoding.FP8_BLOCK: ("float-quantized", _args(8, "block")),
}
INPUTS = {
    (Encoding.NVFP4, "static"): FOUR | {"dynamic": "local"},
    (Encoding.MXFP4, "dynamic"): _args(4, "group", **MX) | {"dynamic": True},
    (Encoding.MXFP8, "dynamic"): _args(8, "group", **MX) | {"dynamic": True},
    (Encoding.FP8_TENSOR, "static"): _args(8, "tensor"),
    (Encoding.FP8_TENSOR, "dynamic"): _args(8, "token", dynamic=True),
    (Encoding.FP8_CHANNEL, "static"): _args(8, "tensor"),
    (Encoding.FP8_CHANNEL, "dynamic"): _args(8, "token", dynamic=True),
    (Encoding.FP8_BLOCK, "dynamic"): _args(8, "group", group_size=128, dynamic=True),
}


def describe(told: Told) -> Configs:
    """quantization_config with a group for each encoding; targets are disjoint."""
    others = [group.modules for group in told.groups]
    groups = {
        f"group_{i}": _group(
            group,
            told,
            [m for j, modules in enumerate(others) if j != i for m in modules] + [*told.plain],
        )
        for i, group in enumerate(told.groups)
    }
    formats = {group["format"] for group in groups.values()}
    if told.kv not in ("", "FP8"):
        raise FormatError(f"a KV cache in {told.kv}: compressed-tensors has FP8; --drop-kv-scales")
    return Configs(
        {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "ignore": ignored(told.plain, [m for modules in others for m in modules]),
            "kv_cache_scheme": _kv_cache(told) if told.kv else None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    )


def _kv_cache(told: Told) -> dict[str, Any]:
    """The source's own scheme if it is compressed-tensors' (it may be one scale a head)."""
    own = told.source.get("kv_cache_scheme") if claims(told.source) else None
    return own if isinstance(own, dict) else _args(8, "tensor")


def _group(group: Group, told: Told, others: list[str]) -> dict[str, Any]:
    one = len(told.groups) == 1
    targets = _linears(group.modules) if one else patterns(group.modules, others)
    if group.encoding is Encoding.INT4:
        return _own(group, told) | {"targets": targets}
    format_, weights = WEIGHTS[group.encoding]
    if group.encoding is Encoding.FP8_BLOCK:
        weights = weights | {"block_structure": list(group.block or ())}
    inputs = None
    if group.activations != "none":
        if (group.encoding, group.activations) not in INPUTS:
            raise FormatError(
                f"{group.modules[0]}: {group.encoding} with {group.activations} activations: "
                "compressed-tensors has no word for it"
            )
        inputs = INPUTS[group.encoding, group.activations]
    elif format_ == "float-quantized":
        format_ = "naive-quantized"  # weights only
    return {
        "targets": targets,
        "format": format_,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _linears(names: Sequence[str]) -> list[str]:
    """The class of all linears, and a head, which runtimes keep in another class."""
    heads = [r"re:.*lm_head$"] if any(n.endswith("lm_head") for n in names) else []
    return ["Linear", *heads]


def _own(group: Group, told: Told) -> dict[str, Any]:
    """The source's own group of INT4 weights, for modules that are carried."""
    groups = told.source.get("config_groups")
    found = list[dict[str, Any]]()
    for own in groups.values() if isinstance(groups, dict) else ():
        weights = own.get("weights") if isinstance(own, dict) else None
        if isinstance(weights, dict) and weights.get("type") == "int":
            found.append({**own, "format": own.get("format") or "pack-quantized"})
    if len(found) != 1:
        raise FormatError(f"{group.modules[0]} is int4: {len(found)} groups of that, wanted one")
    return found[0]


PRODUCERS = (
    Producer(
        name="compressed-tensors",
        formats=FORMATS,
        claims=claims,
        describe=describe,
        kv="{0}.{1}_scale",
        kv_shape=(1,),
        targets=(
            Target("compressed-tensors", "compressed-tensors, the encodings as they are"),
            Target(
                "compressed-tensors-nvfp4",
                "NVFP4, W4A4 or W4A16",
                (Encoding.NVFP4,),
                loads_in=(VLLM, SGLANG),
            ),
            Target(
                "compressed-tensors-nvfp4a16",
                "NVFP4, 16 bit activations",
                (Encoding.NVFP4,),
                activations=False,
                loads_in=(VLLM, SGLANG),
            ),
            Target("compressed-tensors-mxfp4", "MXFP4", (Encoding.MXFP4,), loads_in=(VLLM,)),
            Target("compressed-tensors-mxfp8", "MXFP8", (Encoding.MXFP8,), loads_in=(VLLM,)),
            Target(
                "compressed-tensors-fp8",
                "FP8 per tensor or channel, as it is",
                (Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL),
                loads_in=(VLLM, SGLANG),
            ),
            Target(
                "compressed-tensors-fp8-block",
                "FP8 in blocks",
                (Encoding.FP8_BLOCK,),
                loads_in=(VLLM, SGLANG),
            ),
        ),
    ),
)
