"""A KV cache's scheme that the config has lost: the scales are there, so the cache is FP8.

ModelOpt's, compressed-tensors' and Quark's scales are `amax / 448`, E4M3's largest number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.kv import KEYS, scheme, spelled
from transcode.recognise import quantization

FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def mend(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """With the scheme in the config, where scales for it are there and no scheme is."""
    scales = [name for name in checkpoint.tensors if spelled(name)[0]]
    config, where = quantization(checkpoint)
    if not scales or scheme(checkpoint) not in ("", "NONE") or not config:
        return checkpoint, []
    told = [f"KV cache: FP8, for which {len(scales)} scales are there, {scales[0]} first"]
    if where == "hf_quant_config.json":
        return replace(checkpoint, hf_quant_config=_with(config)), told
    return replace(checkpoint, config=_placed(checkpoint.config, config)), told


def _with(config: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in config.items() if key not in KEYS}
    return {**rest, KEYS[0]: FP8}


def _placed(block: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the scheme in the quantization config, wherever that stands."""
    return {
        key: _with(value)
        if value is config
        else _placed(value, config)
        if isinstance(value, dict)
        else value
        for key, value in block.items()
    }
