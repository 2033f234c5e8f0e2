"""The KV cache's scales and the key of the config that switches them on: four spellings.

Sources: vllm/model_executor/model_loader/weight_utils.py (maybe_remap_kv_scale_name) and
sglang/srt/model_loader/weight_utils.py. A scale is `amax / 448`, a factor in every spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transcode.catalog import producer
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.output import Kind, Output
from transcode.producer import Form
from transcode.recognise import quantization

SPELLINGS = {
    "k_proj.k_scale": re.compile(r"(.+)\.[kv]_proj\.([kv])_scale"),
    "attn.k_scale": re.compile(r"(.+)\.attn\.([kv])_scale"),
    "k_proj.output_scale": re.compile(r"(.+)\.([kv])_proj\.output_scale"),
    "k_scale": re.compile(r"(.+)\.([kv])_scale"),
    "kv_scale": re.compile(r"(.+)\.(kv)_scale"),
}
"""How a scale's name goes on after its attention module's, the first that fits."""

KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache")
"""Where a config says how the cache is stored; null is an answer too."""

ENDS = ("k_scale", "v_scale", "kv_scale", "_proj.output_scale")


def spelled(name: str) -> tuple[str, str, str]:
    """(spelling, attention module, k or v or kv); all empty for a name that is none."""
    for spelling, pattern in SPELLINGS.items() if name.endswith(ENDS) else ():
        if match := pattern.fullmatch(name):
            return spelling, match[1], match[2]
    return "", "", ""


def scheme(checkpoint: Checkpoint) -> str:
    """What the configs say of the KV cache: "FP8", another word, or ""."""
    config, _ = quantization(checkpoint)
    beside = checkpoint.hf_quant_config if producer("modelopt").claims(config) else None
    for source in (config, config.get("quantization"), (beside or {}).get("quantization")):
        told = source if isinstance(source, dict) else {}
        if key := next((key for key in KEYS if key in told), ""):
            return _word(told[key])
    return "FP8" if config.get("kv_cache_quant_config") else ""


def _word(told: Any) -> str:
    if not isinstance(told, dict):
        return told.upper() if isinstance(told, str) else ""
    bits = told.get("num_bits")
    return "FP8" if bits == 8 and told.get("type", "float") == "float" else f"{bits} bit"


def rewritten(
    checkpoint: Checkpoint, form: Form, loose: Mapping[str, TensorInfo]
) -> tuple[tuple[Output, ...], tuple[str, ...], str]:
    """The KV scales among the tensors that belong to no module, as the target spells them.

    Returns outputs, the names of the source's scales (taken or dropped), and the scheme's word.
    FormatError for what the target cannot say, unless it is dropped.
    """
    scales = {name: where for name in loose if (where := spelled(name))[0]}
    word = scheme(checkpoint)
    if not form.producer.kv and (scales or word) and not form.drop_kv:
        first = next(iter(scales), f"KV cache {word}")
        raise FormatError(
            f"{first}: {form.target.name} cannot say how the KV cache is stored; --drop-kv-scales"
        )
    if form.drop_kv:
        return (), tuple(scales), ""
    return tuple(_outputs(form, scales, loose)), tuple(scales), word


def _outputs(
    form: Form, scales: Mapping[str, tuple[str, str, str]], loose: Mapping[str, TensorInfo]
) -> Iterator[Output]:
    for name, (_, attention, which) in scales.items():
        info = loose[name]
        for letter in which:
            target, shape = form.producer.kv.format(attention, letter), form.producer.kv_shape
            if info.shape not in ((), (1,)):
                if form.producer.verbatim:
                    target = name
                if target != name:
                    raise FormatError(f"{info}: one scale a head; --drop-kv-scales leaves it out")
                shape = info.shape
            yield Output(target, info.dtype, shape, Kind.COPY, source=info)
