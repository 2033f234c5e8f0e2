"""Block FP8 as DeepSeek-V3 and its relatives write it (Qwen3-FP8, MiniMax, GLM-5), and two kin.

| encoding   | `weight`       | scale                                                              |
|------------|----------------|--------------------------------------------------------------------|
| fp8-block  | F8_E4M3 [N, K] | `weight_scale_inv` F32, BF16 (Qwen3) or F8_E8M0 [ceil(N/128), ceil(K/128)]: a FACTOR, despite its name |
| fp8-tensor | F8_E4M3 [N, K] | `weight_scale_inv` float [] (transformers without a block size), only read |
| mxfp8      | F8_E4M3 [N, K] | `weight_scale_inv` U8, E8M0 [N, K/32] (MiniMax), only read         |
| fp8-channel | F8_E4M3 [N, K] | `weight_scale` F32 [N, 1] (fbgemm_fp8), only read                 |

The last block of an axis may be shorter (576 rows have 5 blocks); a scale of one row of blocks may
come 1-D. `activation_scale_ub` of fbgemm clamps activations: no other format can say so.

Source: deepseek-ai/DeepSeek-V3, inference/kernel.py; transformers, integrations/finegrained_fp8.py
and integrations/fbgemm_fp8.py.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transcode.errors import FormatError
from transcode.producer import (
    E8M0,
    FLOATS,
    SGLANG,
    VLLM,
    Configs,
    Format,
    Leaf,
    Producer,
    Role,
    Target,
    Told,
)
from transcode.quant import Encoding

CODES = Leaf("weight", ("F8_E4M3",))
INPUT = Leaf("input_scale", FLOATS)
SCALE_INV = "weight_scale_inv"


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") in ("fp8", "mxfp8") and "moe_quant_algo" not in config


def _fbgemm(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "fbgemm_fp8"


def _said(source: Mapping[str, Any]) -> Any:
    """The source's scale_fmt; of our canonical form, that of its own source."""
    inner = source.get("source")
    return source.get("scale_fmt") or (inner.get("scale_fmt") if isinstance(inner, dict) else None)


def describe(told: Told) -> Configs:
    """quantization_config, with the full names of all linears that are not quantised."""
    group, *others = told.groups
    if others:
        raise FormatError(
            f"{others[0].modules[0]}: its blocks, scales or activations are not those of "
            f"{group.modules[0]}, and this form has one config for all"
        )
    if group.activations == "none":
        raise FormatError(f"{group.modules[0]}: 16 bit activations: deepseek-fp8 has no word")
    powers = told.powers or group.scales in E8M0 or _said(told.source) == "ue8m0"
    return Configs(
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            **({"scale_fmt": "ue8m0"} if powers else {}),
            "weight_block_size": list(group.block or ()),
            "modules_to_not_convert": list(told.plain),
        }
    )


def _format(encoding: Encoding, scales: Leaf, *, read_only: bool) -> Format:
    leaves = {Role.CODES: CODES, Role.SCALES: scales}
    if encoding is Encoding.FP8_TENSOR:
        leaves[Role.INPUT] = INPUT
    return Format("deepseek", encoding, leaves, read_only)


PRODUCERS = (
    Producer(
        name="deepseek",
        formats=(
            _format(Encoding.FP8_BLOCK, Leaf(SCALE_INV, (*FLOATS, "F8_E8M0")), read_only=False),
            _format(Encoding.FP8_TENSOR, Leaf(SCALE_INV, FLOATS), read_only=True),
            _format(Encoding.MXFP8, Leaf(SCALE_INV, ("U8", "F8_E8M0")), read_only=True),
        ),
        claims=_claims,
        describe=describe,
        targets=(
            Target(
                "deepseek-fp8",
                "block FP8 with weight_scale_inv",
                (Encoding.FP8_BLOCK,),
                loads_in=(VLLM, SGLANG),
            ),
            Target(
                "deepseek-fp8-ue8m0",
                "the same, scales powers of two (scale_fmt ue8m0), as DeepSeek-V3.1",
                (Encoding.FP8_BLOCK,),
                powers=True,
                loads_in=(VLLM, SGLANG),
            ),
        ),
    ),
    Producer(
        name="fbgemm",
        formats=(
            Format(
                "fbgemm",
                Encoding.FP8_CHANNEL,
                {Role.CODES: CODES, Role.SCALES: Leaf("weight_scale", FLOATS)},
                read_only=True,
            ),
        ),
        claims=_fbgemm,
        shared=True,
    ),
)
