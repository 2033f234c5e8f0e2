"""vLLM's own config object of the folder's source, for what was not packed, and for KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

from transcode.vllm.packed import Packed

LATE = ("mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "humming")
"""Methods that vLLM asks last whether a config is theirs, since asking them costs imports."""


def source_config(packed: Packed, hf_config: Any) -> Any:
    """The config object that vLLM would make of the source; None if it had no config.

    As vLLM 0.25.1 and 0.33.0 do in ModelConfig._verify_quantization and get_quant_config.
    """
    source = dict(packed.source)
    if not source:
        return None
    nested = source.get("quantization")
    if "quant_method" not in source and isinstance(nested, Mapping):
        source["quant_method"] = "modelopt"
    method = source.get("quant_method")
    names = [n for n in QUANTIZATION_METHODS if n != "transcode"]
    for name in sorted(names, key=lambda n: n in LATE):
        config = get_quantization_config(name)
        if theirs := config.override_quantization_method(source, None, hf_config=hf_config):
            method = theirs
            break
    if method == "compressed-tensors":
        text = getattr(hf_config, "text_config", hf_config)
        heads = getattr(text, "num_attention_heads", None)
        source["total_num_heads"] = heads
        source["total_num_kv_heads"] = getattr(text, "num_key_value_heads", heads)
    return get_quantization_config(str(method)).from_config(source)


def kv_scheme(kv_cache: Any) -> dict[str, Any] | None:
    """An FP8 KV cache as compressed-tensors says it, which vLLM's Attention goes by; None if not.

    kv_cache: a scheme, or ModelOpt's word for one.
    """
    if isinstance(kv_cache, str) and kv_cache.upper() == "FP8":
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    if isinstance(kv_cache, Mapping) and kv_cache.get("num_bits") == 8:
        return dict(kv_cache)
    return None
