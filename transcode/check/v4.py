"""DeepSeek-V4's `expert_dtype` against its experts.

vLLM (models/deepseek_v4/quant_config.py) builds experts and the scales of all linears by it, and
takes fp4 where it is missing (vllm-project/vllm#42970: FP8 experts are then read as FP4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transcode.check.findings import Finding
from transcode.checkpoint import Checkpoint
from transcode.module import Module
from transcode.names import address, natural
from transcode.quant import Encoding

DTYPES = {Encoding.MXFP4: "fp4", Encoding.NVFP4: "fp4", Encoding.FP8_BLOCK: "fp8"}


def of_v4(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """A missing or another `expert_dtype`."""
    if checkpoint.text_config.get("model_type") != "deepseek_v4":
        return
    experts = [m for m in modules.values() if address(m.name).expert is not None]
    kinds = {DTYPES[m.encoding] for m in experts if m.encoding in DTYPES}
    if len(kinds) != 1:
        return
    kind, told = kinds.pop(), checkpoint.config.get("expert_dtype")
    if told == kind:
        return
    first = min((m.name for m in experts), key=natural)
    if told is None and kind == "fp4":
        yield Finding(
            "WEAK", "expert-dtype", first,
            "experts are fp4, config.json has no expert_dtype: vLLM takes fp4 for granted, other "
            "readers may not",
        )  # fmt: skip
        return
    says = "has no expert_dtype, for which vLLM takes fp4" if told is None else f"says {told!r}"
    yield Finding(
        "FAILS", "expert-dtype", first,
        f"experts are {kind}, config.json {says}: experts and scales are built for other tensors",
    )  # fmt: skip
