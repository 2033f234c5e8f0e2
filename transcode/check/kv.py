"""The KV cache's scheme against its scales.

vLLM (model_executor/layers/quantization/{base_config,kv_cache}.py) and SGLang
(srt/model_loader/weight_utils.py) rename all spellings below but `output_scale`, which vLLM knows
from FP8 and Quark only.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from transcode.check.declared import Declared
from transcode.check.findings import Finding, many
from transcode.checkpoint import Checkpoint, Reader
from transcode.header import TensorInfo
from transcode.kv import spelled


def of_kv(checkpoint: Checkpoint, declared: Declared, read: Reader) -> Iterator[Finding]:
    """Scheme without scales, scales without scheme, odd spellings, bad values."""
    found: dict[str, dict[str, dict[str, TensorInfo]]] = {}
    for name, info in checkpoint.tensors.items():
        if name.endswith(("k_scale", "v_scale", "kv_scale", "_proj.output_scale")):
            spelling, attention, which = spelled(name)
            if which:
                found.setdefault(attention, {}).setdefault(spelling, {})[which] = info
    where = declared.where or "config.json"
    if declared.kv == "FP8" and not found:
        yield Finding(
            "WEAK", "kv-scales-missing", where,
            "an FP8 KV cache without a scale for it: the runtimes take 1.0",
        )  # fmt: skip
    if not found:
        return
    first = next(iter(found))
    scales = [info for by in found.values() for which in by.values() for info in which.values()]
    if declared.kv in ("", "NONE"):
        yield Finding(
            "WEAK", "kv-scheme-missing", first,
            f"{many(len(scales), 'KV scale')}, but no KV scheme in the config: the cache stays "
            "16 bit and they are not used, unless --kv-cache-dtype fp8 is asked for",
        )  # fmt: skip
    yield from _spelling(declared, found)
    lone = [
        attention
        for attention, by in found.items()
        if len({which[0] for each in by.values() for which in each}) < 2
        and not any("kv" in each for each in by.values())
    ]
    if lone:
        yield Finding(
            "WEAK", "kv-scale-lone", lone[0],
            f"{many(len(lone), 'layer')} with a scale for k or for v only: vLLM takes one for both",
        )  # fmt: skip
    yield from _values(scales, read)


def _spelling(
    declared: Declared, found: dict[str, dict[str, dict[str, TensorInfo]]]
) -> Iterator[Finding]:
    own = "k_proj.k_scale" if declared.modelopt else "k_scale" if declared.compressed else ""
    if not own:
        return
    other = {a: s for a, by in found.items() for s in by if s != own}
    for spelling in dict.fromkeys(other.values()):
        places = [a for a, s in other.items() if s == spelling]
        unknown = spelling == "k_proj.output_scale"
        yield Finding(
            "WEAK" if unknown else "NOTE", "kv-spelling", places[0],
            f"{many(len(places), 'layer')} with KV scales spelt {spelling}, where "
            f"{declared.method} writes {own}: "
            + ("vLLM has no rule for it" if unknown else "the runtimes rename it, not all readers"),
            ("vllm",) if unknown else ("vllm", "sglang"),
        )  # fmt: skip


def _values(scales: list[TensorInfo], read: Reader) -> Iterator[Finding]:
    single = [info for info in scales if info.shape in ((), (1,)) and info.dtype[0] in "BF"]
    values = {info.name: float(read.tensor(info).float().reshape(())) for info in single}
    wrong = [name for name, value in values.items() if not (isfinite(value) and value > 0)]
    if wrong:
        yield Finding(
            "FAILS", "kv-scale-invalid", wrong[0],
            f"is {values[wrong[0]]:g}; {many(len(wrong), 'KV scale')} not finite and > 0: with an "
            "FP8 cache vLLM stops at an assertion for 0 and NaN, and takes 1.0 for a negative one",
            ("vllm",),
        )  # fmt: skip
