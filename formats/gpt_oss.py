"""MXFP4 experts as OpenAI's gpt-oss stores them.

| tensor of `...mlp.experts.` | dtype | shape              |                                       |
|-----------------------------|-------|--------------------|---------------------------------------|
| `gate_up_proj_blocks`       | U8    | [E, 2I, H/32, 16]  | rows alternate gate, up; even column in the low nibble |
| `gate_up_proj_scales`       | U8    | [E, 2I, H/32]      | E8M0                                  |
| `gate_up_proj_bias`         | BF16  | [E, 2I]            | alternating too                       |
| `down_proj_blocks`          | U8    | [E, H, I/32, 16]   |                                       |
| `down_proj_scales`, `_bias` |       | [E, H, I/32], [E, H] |                                     |

All else is BF16. Source: openai/gpt-oss; transformers, integrations/mxfp4.py.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transcode.errors import FormatError
from transcode.producer import (
    SGLANG,
    VLLM,
    Configs,
    Format,
    Fusion,
    Leaf,
    Producer,
    Role,
    Target,
    Told,
    leaf_names,
)
from transcode.quant import Encoding

FORMAT = Format(
    "gpt-oss",
    Encoding.MXFP4,
    {Role.CODES: Leaf("blocks", ("U8",)), Role.SCALES: Leaf("scales", ("U8",))},
)

LEAVES = leaf_names([FORMAT])
STACKED = Fusion(
    "gate_up_proj", "down_proj", {role: f"_{leaf}" for role, leaf in LEAVES.items()}, LEAVES,
    interleaved=True, tail=(16,),
)  # fmt: skip

PLAIN = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip
"""What OpenAI's own config lists."""


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "mxfp4"


def _describe(told: Told) -> Configs:
    """OpenAI's own words; FormatError for anything quantised but experts."""
    for name in (name for group in told.groups for name in group.modules):
        if ".experts." not in name:
            raise FormatError(f"{name} is quantised: gpt-oss quantises experts only")
    return Configs({"modules_to_not_convert": PLAIN, "quant_method": "mxfp4"})


PRODUCERS = (
    Producer(
        name="gpt-oss",
        formats=(FORMAT,),
        claims=_claims,
        describe=_describe,
        fusions={"": STACKED},
        always_fused=True,
        model_types=("gpt_oss",),
        targets=(
            Target(
                "gpt-oss",
                "MXFP4 blocks, rows alternating",
                (Encoding.MXFP4,),
                loads_in=(VLLM, SGLANG),
            ),
        ),
    ),
)
