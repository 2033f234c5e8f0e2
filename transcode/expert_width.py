"""Which MLPs have the routed experts' width, by model family: what has to grow with it.

Source: huggingface/transformers 5.24, src/transformers/models/*/modeling_*.py: what the shared
experts and dense MLPs of a family are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transcode.errors import FormatError


@dataclass(frozen=True)
class Widths:
    """key: the config's key of the routed experts' width.

    shared: of shared experts: "none", there are none; "same", as wide; "own", by a key of its own;
    else the key that says how many experts wide they are.
    """

    key: Literal["moe_intermediate_size", "intermediate_size"]
    shared: str = "none"


MOE, PLAIN = "moe_intermediate_size", "intermediate_size"
# fmt: off
FAMILIES: tuple[tuple[str, Widths], ...] = (
    ("deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 kimi_k2 kimi_k25 kimi_linear dots1 axk1",
     Widths("moe_intermediate_size", "n_shared_experts")),
    ("glm4_moe glm4_moe_lite glm4v_moe glm4v_moe_text glm_moe_dsa solar_open mistral4",
     Widths("moe_intermediate_size", "n_shared_experts")),
    ("ernie4_5_moe ernie4_5_vl_moe", Widths("moe_intermediate_size", "moe_num_shared_experts")),
    ("afmoe", Widths("moe_intermediate_size", "num_shared_experts")),
    ("qwen2_moe qwen3_next qwen3_5_moe qwen3_5_moe_text nemotron_h",
     Widths("moe_intermediate_size", "own")),
    ("qwen3_moe qwen3_vl_moe qwen3_vl_moe_text", Widths("moe_intermediate_size")),
    ("mixtral phimoe gpt_oss minimax_m2 olmoe", Widths("intermediate_size")),
    ("llama4 llama4_text", Widths("intermediate_size", "same")),
)
# fmt: on
"""Llama-4's dense MLPs have intermediate_size_mlp, the others' intermediate_size beside
moe_intermediate_size."""


def widths(config: Mapping[str, Any], width: int, *, shared: bool, dense: bool) -> Widths:
    """The family's widths, for experts of this width.

    shared, dense: whether the checkpoint has such MLPs. FormatError where a family is not listed
    and something beside its routed experts might have their width, or no key says that.
    """
    model_type = config.get("model_type")
    listed = next((w for names, w in FAMILIES if model_type in names.split()), None)
    key = next((k for k in (MOE, PLAIN) if config.get(k) == width), None)
    if listed is not None:
        key = listed.key if config.get(listed.key) == width else None
    if key is None:
        raise FormatError(f"experts are {width} wide, and no {MOE} or {PLAIN} is that")
    if listed is not None:
        return listed
    if shared or (dense and key == PLAIN):
        what = "shared experts" if shared else "dense MLPs"
        raise FormatError(
            f"model_type {model_type!r} is not listed here, and has {what}: whether they have the "
            f"experts' width ({key}) is not known"
        )
    return Widths(key)  # type: ignore[arg-type]
