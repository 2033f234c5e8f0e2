"""Our own form: what every reader comes down to. docs/canonical.md has it in full.

| dense `<module>.`     | experts `<container>.` | dtype, shape                                        |
|-----------------------|------------------------|-----------------------------------------------------|
| `weight`              | `w13_weight` [E, 2I, ..], `w2_weight` [E, H, ..] | U8 [N, K/2] or F8_E4M3 [N, K] |
| `weight_scale`        | `w13_weight_scale`, `w2_weight_scale` | E4M3, E8M0 as U8, or float as the source had it |
| `weight_scale_2`      | `w13_weight_scale_2` [E, 2], `w2_...` [E] | F32, NVFP4's factor             |
| `input_scale`         | `w13_input_scale` [E, 2], `w2_...` [E]    | float, a factor                 |
| `bias`                | `w13_bias` [E, 2I], `w2_bias` [E, H]      | as the source had it            |
| `source_global_scale`, `source_input_scale` | `w13_source_...`, `w2_source_...` | F32, the source's divisors word for word |

w13 holds gate's rows, then up's (I rows each; scales of FP8 blocks ceil(I/128) each), whatever order
the source had. Every scale is a factor; nothing is unified.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transcode.producer import (
    FLOATS,
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

VERSION = 1
INPUT = Leaf("input_scale", FLOATS)
SOURCE_INPUT = Leaf("source_input_scale", ("F32",))


def _format(encoding: Encoding, codes: str, *scales: str) -> Format:
    leaves = {
        Role.CODES: Leaf("weight", (codes,)),
        Role.SCALES: Leaf("weight_scale", scales),
        Role.INPUT: INPUT,
        Role.SOURCE_INPUT: SOURCE_INPUT,
    }
    if encoding in (Encoding.NVFP4, Encoding.NVFP4_32):
        leaves[Role.GLOBAL] = Leaf("weight_scale_2", ("F32",))
        leaves[Role.SOURCE_GLOBAL] = Leaf("source_global_scale", ("F32",))
    return Format("canonical", encoding, leaves)


FORMATS = (
    _format(Encoding.NVFP4, "U8", "F8_E4M3"),
    _format(Encoding.NVFP4_32, "U8", "F8_E4M3"),
    _format(Encoding.MXFP4, "U8", "U8"),
    _format(Encoding.MXFP8, "F8_E4M3", "U8"),
    _format(Encoding.FP8_TENSOR, "F8_E4M3", *FLOATS),
    _format(Encoding.FP8_CHANNEL, "F8_E4M3", *FLOATS),
    _format(Encoding.FP8_BLOCK, "F8_E4M3", *FLOATS, "U8"),
)

LEAVES = leaf_names(FORMATS)
STACKED = Fusion("w13", "w2", {role: f"_{leaf}" for role, leaf in LEAVES.items()}, LEAVES)


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config is ours, of the canonical form."""
    return config.get("quant_method") == "transcode" and config.get("layout") == "canonical"


def describe(told: Told) -> Configs:
    """quantization_config: groups with their modules, and the source's own words."""
    return Configs(
        {
            "quant_method": "transcode",
            "layout": "canonical",
            "layout_version": VERSION,
            "groups": [
                {
                    "encoding": str(group.encoding),
                    "activations": group.activations,
                    "block": list(group.block) if group.block else None,
                    "modules": list(group.modules),
                }
                for group in told.groups
            ],
            "experts": {container: list(leaves) for container, leaves in told.experts.items()},
            "ignore": list(told.plain),
            "kv_cache": told.kv or None,
            "source": dict(told.source),
        }
    )


PRODUCERS = (
    Producer(
        name="canonical",
        formats=FORMATS,
        claims=claims,
        describe=describe,
        shared=True,
        fusions={"": STACKED},
        always_fused=True,
        verbatim=True,
        kv="{0}.{1}_proj.{1}_scale",
        targets=(Target("canonical", "our own stacked form, any encoding"),),
    ),
)
