"""DeepSeek-V4: FP4 experts and FP8 blocks as DeepSeek writes them, and NVIDIA's NVFP4 repack.

| encoding  | `weight`        | scales                                                            |
|-----------|-----------------|-------------------------------------------------------------------|
| mxfp4     | I8 [N, K/2]     | `scale` F8_E8M0 [N, K/32]                                         |
| fp8-block | F8_E4M3 [N, K]  | `scale` F8_E8M0, or F32 (-Base), [ceil(N/128), ceil(K/128)]       |
| nvfp4     | U8 [N, K/2]     | `weight_scale` F8_E4M3 [N, K/16]; `weight_scale_2` and            |
|           |                 | `input_scale` F32 []                                              |

Every scale is a factor. Names are the Hub's (`layers.0.ffn.experts.0.w1`, `mtp.0...`) or
transformers' (`model.layers.0...`), as the source has them. NVIDIA's repack touches the main
layers' routed experts only; those of the MTP stay MXFP4.

Source: deepseek-ai/DeepSeek-V4-Flash; vllm/models/deepseek_v4; the repack:
NVIDIA/Model-Optimizer, examples/deepseek.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transcode.errors import FormatError
from transcode.producer import SGLANG, VLLM, Configs, Format, Leaf, Producer, Role, Target, Told
from transcode.quant import Encoding

READ = (replace(VLLM, note="read, not run"), replace(SGLANG, note="read, not run"))
CODES = Leaf("weight", ("F8_E4M3",))
FOUR = Leaf("weight", ("I8",))
NVFP4 = {
    Role.CODES: Leaf("weight", ("U8",)),
    Role.SCALES: Leaf("weight_scale", ("F8_E4M3",)),
    Role.GLOBAL: Leaf("weight_scale_2", ("F32",)),
    Role.INPUT: Leaf("input_scale", ("F32",)),
}

FORMATS = (
    Format(
        "deepseek-v4",
        Encoding.MXFP4,
        {Role.CODES: FOUR, Role.SCALES: Leaf("scale", ("F8_E8M0",))},
    ),
    Format(
        "deepseek-v4",
        Encoding.FP8_BLOCK,
        {Role.CODES: CODES, Role.SCALES: Leaf("scale", ("F8_E8M0", "F32"))},
    ),
    Format("deepseek-v4", Encoding.NVFP4, NVFP4),
)


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config may be DeepSeek-V4's: only the leaves can tell."""
    return config.get("quant_method") == "fp8"


def _experts_only(told: Told) -> None:
    """FormatError unless FP4 is for routed experts only, and routed experts are of one kind."""
    names = {g.encoding: [n for n in g.modules if ".experts." in n] for g in told.groups}
    for group in told.groups:
        four = group.encoding is not Encoding.FP8_BLOCK
        outside = next((n for n in group.modules if ".experts." not in n), "")
        if four and outside:
            raise FormatError(
                f"{outside} is {group.encoding}: DeepSeek-V4 has that for experts only"
            )
    eight = names.get(Encoding.FP8_BLOCK)
    if eight and any(names.get(e) for e in (Encoding.MXFP4, Encoding.NVFP4)):
        raise FormatError(f"{eight[0]} is FP8 and other experts FP4: DeepSeek-V4 has one for all")


def describe(told: Told) -> Configs:
    """quantization_config as DeepSeek's, with ModelOpt's words for NVFP4 experts."""
    _experts_only(told)
    blocks = [g for g in told.groups if g.encoding is Encoding.FP8_BLOCK]
    four = any(g.encoding in (Encoding.MXFP4, Encoding.NVFP4) for g in told.groups)
    nvfp4 = [name for g in told.groups if g.encoding is Encoding.NVFP4 for name in g.modules]
    block = next((g.block for g in blocks if g.block), (128, 128))
    powers = not blocks or all(g.scales == "F8_E8M0" for g in blocks)
    powers = powers or told.source.get("scale_fmt") == "ue8m0"
    quantization: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        **({"scale_fmt": "ue8m0"} if powers else {}),
        "weight_block_size": list(block),
    }
    hf_quant = None
    if nvfp4:
        containers = list(dict.fromkeys(re.sub(r"\.experts\..*", ".experts", n) for n in nvfp4))
        drafts = [] if any(name.startswith("mtp.") for name in nvfp4) else ["mtp.*"]
        layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in containers}
        repack: dict[str, Any] = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "quantized_layers": layers,
            "exclude_modules": ["*.attn.*", "*.ffn.shared_experts.*", "head", *drafts],
        }
        producer = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}
        ours = {key: value for key, value in repack.items() if key != "exclude_modules"}
        quantization |= ours | {
            "moe_quant_algo": "NVFP4",
            "ignore": repack["exclude_modules"],
            "producer": producer,
        }
        hf_quant = {"producer": producer, "quantization": repack}
    top = {"expert_dtype": "fp4" if four else "fp8"}
    return Configs(quantization, hf_quant=hf_quant, top=top)


PRODUCERS = (
    Producer(
        name="deepseek-v4",
        formats=FORMATS,
        claims=claims,
        describe=describe,
        shared=True,
        model_types=("deepseek_v4",),
        targets=(
            Target(
                "deepseek-v4",
                "FP4 experts, FP8 blocks",
                (Encoding.MXFP4, Encoding.FP8_BLOCK),
                loads_in=READ,
            ),
            Target(
                "deepseek-v4-fp8",
                "FP8 blocks, experts too",
                (Encoding.FP8_BLOCK,),
                whole=True,
                loads_in=READ,
            ),
            Target(
                "deepseek-v4-nvfp4",
                "NVIDIA's repack: NVFP4 experts",
                (Encoding.NVFP4,),
                loads_in=READ,
            ),
        ),
    ),
)
