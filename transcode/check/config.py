"""The quantization config against the tensors, and against what each runtime can read.

Sources: vllm/transformers_utils/{config,model_arch_config_convertor}.py and
vllm/model_executor/layers/quantization/modelopt.py (0.25.1, 0.33.0);
sglang/srt/configs/model_config.py and layers/quantization/modelopt_quant.py (0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transcode.check.declared import Declared, table
from transcode.check.findings import RUNTIMES, Finding
from transcode.check.modules import foreign
from transcode.checkpoint import Checkpoint
from transcode.module import Module, Recognised
from transcode.quant import Encoding
from transcode.recognise import disagreements

ALGORITHMS = {
    "vllm": ("NVFP4", "W4A16_NVFP4"),
    "sglang": ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"),
}
"""ModelOpt's NVFP4 algorithms that a whole checkpoint may declare, by runtime."""

NESTED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
"""Algorithms that vLLM takes in ModelOpt's nested form; it raises for any other."""

FIELDS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
"""What vLLM demands beside a nested NVFP4, null or empty if need be."""


def of_config(
    checkpoint: Checkpoint, declared: Declared, recognised: Recognised
) -> Iterator[Finding]:
    """All findings of this file."""
    modules = recognised.modules
    yield from _method(declared)
    yield from _nested(declared)
    yield from _algorithm(declared)
    if declared.where == "hf_quant_config.json":
        yield Finding(
            "WEAK", "hf-quant-config-only", declared.where,
            "the quantisation is described here only; vLLM and SGLang look here, transformers and "
            "whatever reads config.json alone takes the model for unquantised",
        )  # fmt: skip
    elif checkpoint.hf_quant_config is not None and declared.compressed:
        yield Finding(
            "NOTE", "hf-quant-config-stale", "hf_quant_config.json",
            "ModelOpt's description stands beside compressed-tensors' config, which the runtimes "
            "prefer; a reader that looks here first takes the wrong format",
        )  # fmt: skip
    for text in () if foreign(declared, recognised) else _dialects(checkpoint, declared, modules):
        what = "the runtimes look for other tensors than there are"
        yield Finding(
            "FAILS", "config-disagrees", declared.where or "config.json", f"{text}: {what}"
        )
    yield from _nothing(declared, modules, bool(recognised.problems))


def _dialects(
    checkpoint: Checkpoint, declared: Declared, modules: Mapping[str, Module]
) -> Iterator[str]:
    """Where the config names one producer and the tensors are another's."""
    if not (declared.modelopt or declared.compressed):
        if declared.method or not declared.raw:
            yield from disagreements(checkpoint, modules)
        return
    own = "modelopt-" if declared.modelopt else "compressed-tensors-"
    judged = (m for m in modules.values() if m.encoding is Encoding.NVFP4)
    for name in sorted({m.format.name for m in judged if m.format}):
        if not name.startswith(own):
            yield f"{declared.where} says {declared.method}, the tensors are {name}"


def _method(declared: Declared) -> Iterator[Finding]:
    """quant_method null or missing."""
    raw = declared.raw
    if not raw or raw.get("quant_method") or declared.where == "hf_quant_config.json":
        return
    nested = "quantization" in raw and table(raw.get("producer")).get("name") == "modelopt"
    if "quant_method" in raw:
        yield Finding(
            "FAILS", "quant-method-null", declared.where,
            "quant_method is null: the loader fails on it (`'NoneType' object has no attribute "
            "'lower'`)",
            ("sglang",) if nested else RUNTIMES,
        )  # fmt: skip
    elif not nested:
        yield Finding(
            "FAILS", "quant-method-missing", declared.where,
            "has no quant_method: the model is built unquantised, and the weights do not fit",
            ("vllm",) if "quant_algo" in raw else RUNTIMES,
        )  # fmt: skip


def _nested(declared: Declared) -> Iterator[Finding]:
    """What vLLM demands of ModelOpt's nested form."""
    inner = table(declared.raw.get("quantization"))
    if not inner:
        return
    if table(declared.raw.get("producer")).get("name") != "modelopt":
        if not declared.raw.get("quant_method"):
            yield Finding(
                "FAILS", "producer-missing", declared.where,
                "neither producer.name 'modelopt' nor a quant_method: vLLM builds the model "
                "unquantised, and the weights do not fit",
                ("vllm",),
            )  # fmt: skip
        return
    algorithm = declared.algorithm.upper()
    if algorithm and algorithm not in NESTED:
        yield Finding(
            "FAILS", "nested-algorithm", declared.where,
            f"vLLM does not take {declared.algorithm} in the nested form (`Unknown ModelOpt quant "
            "algo`), only in config.json's flat one",
            ("vllm",),
        )  # fmt: skip
    missing = [key for key in FIELDS if key not in inner]
    if algorithm == "NVFP4" and missing:
        yield Finding(
            "FAILS", "nested-fields", declared.where,
            f"vLLM demands {', '.join(missing)} beside quant_algo NVFP4, null or empty if need be",
            ("vllm",),
        )  # fmt: skip


def _algorithm(declared: Declared) -> Iterator[Finding]:
    """ModelOpt's algorithm as a runtime spells and knows it."""
    algorithm = declared.algorithm
    upper = algorithm.upper()
    if declared.modelopt and not algorithm:
        yield Finding(
            "FAILS", "algorithm-missing", declared.where,
            "has no quant_algo: vLLM stops at it (`Missing 'quant_algo' in quantization config`)",
            ("vllm",),
        )  # fmt: skip
    if not declared.modelopt or not ("NVFP4" in upper or upper == "MIXED_PRECISION"):
        return
    if algorithm != upper:
        yield Finding(
            "FAILS", "algorithm-case", declared.where,
            f"quant_algo is {algorithm!r}, and SGLang knows upper case only",
            ("sglang",),
        )  # fmt: skip
    if upper == "MIXED_PRECISION":
        if not declared.layers:
            yield Finding(
                "FAILS", "layers-missing", declared.where,
                "quant_algo is MIXED_PRECISION, but there is no quantized_layers to say which",
            )  # fmt: skip
        return
    refusing = tuple(r for r in RUNTIMES if upper not in ALGORITHMS[r])
    if refusing:
        yield Finding(
            "FAILS", "algorithm-unknown", declared.where,
            f"quant_algo {algorithm} is none that the loader knows",
            refusing,
        )  # fmt: skip


def _nothing(
    declared: Declared, modules: Mapping[str, Module], problems: bool
) -> Iterator[Finding]:
    """A config that promises quantised weights where there are none."""
    promises = (declared.compressed and declared.groups) or "FP4" in declared.algorithm.upper()
    plain = all(m.encoding is Encoding.UNQUANTISED for m in modules.values())
    if promises and plain and not problems:
        yield Finding(
            "FAILS", "nothing-quantised", declared.where,
            f"describes {declared.algorithm or declared.method} weights, but none is quantised",
        )  # fmt: skip
