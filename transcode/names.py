"""Module names to addresses, and which projections a runtime joins into one GEMM.

Families that the table does not list follow the rule by structure, STRUCTURE. How ranks share out a
linear is said by its name too, in degrees.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
W1_W3 = ("w1", "w3")
MLA = ("q_a_proj", "kv_a_proj_with_mqa")
DELTA = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
STRUCTURE = (QKV, GATE_UP, W1_W3, MLA, *DELTA, ("wq_a", "wkv"))

PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
"""An MLP's leaf names: w1 = gate, w3 = up, w2 = down, as Mixtral named them."""

_EXPERT = re.compile(r"(?P<container>.+\.experts)\.(?P<expert>\d{1,9})\.(?P<projection>\w+)")
_TURNED = re.compile(r"(?P<container>.+\.experts)\.(?P<projection>\w+)\.(?P<expert>\d{1,9})")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|mtp)\.(\d{1,9})(?=\.|$)")
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.")
_DOWN = {"up_proj": "down_proj", "w3": "w2"}


@dataclass(frozen=True)
class Address:
    """Where a module stands.

    parent: the module that holds it (for an expert's projection, the `...experts` container).
    leaf: its last name.  expert: its number among the parent's experts, or None.
    projection: "gate", "up", "down", or "" where it is no part of an MLP.
    layer: the number of the innermost numbered layer, or None.
    draft: whether it belongs to a head that predicts several tokens (`mtp...`).
    """

    parent: str
    leaf: str
    expert: int | None
    projection: str
    layer: int | None
    draft: bool

    @property
    def shared(self) -> bool:
        """Whether it is part of a shared expert."""
        return "shared_expert" in self.parent

    @property
    def table(self) -> bool:
        """Whether it is a table that is looked up, not multiplied: an embedding."""
        return self.leaf in ("wte", "wpe") or ("embed" in self.leaf and self.leaf != "embed_out")


@dataclass(frozen=True)
class Stacked:
    """How one layer's experts stand in a BF16 repo that keeps them in two tensors.

    gate_up, down: the tensors' names, relative to the module that holds `experts`.
    transposed: `[E, H, 2I]` and `[E, I, H]` (in, out) instead of `[E, 2I, H]` and `[E, H, I]`.
    interleaved: gate's and up's rows take turns, instead of all of gate's before all of up's.
    """

    gate_up: str
    down: str
    transposed: bool
    interleaved: bool


@dataclass(frozen=True)
class Family:
    """A row of the table.

    joined: the modules that its runtimes make one GEMM of.
    foldable: whether up's factor may move into down (`act(gate) * up` goes straight into down: read
    in each model's code; False also where nobody has read it).
    fused: how its BF16 repo on the Hub stores experts, None where every expert has its own tensors
    (as the quantised repos of such a family may have them all the same).
    """

    model_types: tuple[str, ...]
    joined: tuple[tuple[str, ...], ...]
    foldable: bool
    fused: Stacked | None = None


BY_ROWS = Stacked("experts.gate_up_proj", "experts.down_proj", False, False)
BY_COLUMNS = replace(BY_ROWS, transposed=True)
TAKING_TURNS = replace(BY_COLUMNS, interleaved=True)
LINEARS = replace(BY_ROWS, gate_up="input_linear.weight", down="output_linear.weight")

FAMILIES = (
    Family(("llama",), (QKV, GATE_UP), True),
    Family(("llama4", "llama4_text"), (QKV, GATE_UP), True, BY_COLUMNS),
    Family(("mistral", "mistral3", "ministral", "ministral3"), (QKV, GATE_UP), True),
    Family(("mixtral",), (QKV, W1_W3), True),
    Family(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
           (QKV, GATE_UP), True),
    Family(("qwen3", "qwen3_vl", "qwen3_vl_text"), (QKV, GATE_UP), True),
    Family(("qwen2_moe", "qwen3_moe"), (QKV, GATE_UP), True),
    Family(("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
           (QKV, GATE_UP), True),
    Family(("qwen3_vl_moe", "qwen3_vl_moe_text"), (QKV, GATE_UP), True, BY_COLUMNS),
    Family(("qwen3_next",), (QKV, GATE_UP, *DELTA), True),
    Family(("qwen3_5", "qwen3_5_text"), (QKV, GATE_UP, *DELTA), True),
    Family(("qwen3_5_moe", "qwen3_5_moe_text"), (QKV, GATE_UP, *DELTA), True, BY_ROWS),
    Family(("olmo2", "olmoe", "dots1"), (QKV, GATE_UP), True),
    Family(("deepseek_v2", "deepseek_v3", "deepseek_v32"), (MLA, GATE_UP), True),
    Family(("deepseek_v4", "deepseek_v41"), (("wq_a", "wkv"), W1_W3), False),
    Family(("kimi_k2", "kimi_k25"), (MLA, GATE_UP), True),
    Family(("glm4_moe", "glm4v_moe", "glm4v_moe_text"), (QKV, GATE_UP), True),
    Family(("glm4_moe_lite", "glm_moe_dsa"), (MLA, GATE_UP), True),
    Family(("minimax", "minimax_text_01", "minimax_m1"), (QKV, W1_W3), False),
    Family(("minimax_m2",), (QKV, W1_W3), True),
    Family(("minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_mtp"),
           (QKV, GATE_UP, W1_W3), False),
    Family(("gpt_oss",), (QKV,), False, TAKING_TURNS),
    Family(("nemotron_h", "nemotron_h_puzzle", "nemotron_h_omni", "NemotronH_Nano_VL_V2",
            "NemotronH_Nano_Omni_Reasoning_V3"), (QKV,), False),
    Family(("phi3",), (), False),
    Family(("phimoe",), (QKV, W1_W3), False),
    Family(("granite",), (QKV, GATE_UP), True),
    Family(("granitemoe", "granitemoeshared", "granitemoehybrid"), (QKV,), True, LINEARS),
    Family(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
           (QKV, GATE_UP), True),
    Family(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
           (QKV, GATE_UP), True, BY_ROWS),
)  # fmt: skip
"""A row per family. Read in vLLM 0.33 (`packed_modules_mapping`, `stacked_params_mapping`: joined),
transformers 5.24 (modeling files: foldable; those and `conversion_mapping.py`: fused) and SGLang
0.5.23. A family that stores gate and up, or q, k and v, as one matrix (Phi-3) joins nothing more.
"""

BY_STRUCTURE = Family((), STRUCTURE, False)


def family(model_type: object) -> Family:
    """The row of a model type, or the rule by structure."""
    return next((f for f in FAMILIES if model_type in f.model_types), BY_STRUCTURE)


def address(module: str) -> Address:
    """The address of a module's name."""
    numbers = _LAYER.findall(module)
    layer = int(numbers[-1]) if numbers else None
    draft = _DRAFT.search(module) is not None
    if match := _EXPERT.fullmatch(module) or _TURNED.fullmatch(module):
        projection = match["projection"]
        kind = PROJECTIONS.get(projection, "")
        return Address(match["container"], projection, int(match["expert"]), kind, layer, draft)
    parent, _, leaf = module.rpartition(".")
    return Address(parent, leaf, None, PROJECTIONS.get(leaf, ""), layer, draft)


def down_of(up: str) -> str:
    """The name of the down projection that follows an up projection."""
    where = address(up)
    turned = where.expert is not None and up.endswith(f".{where.expert}")
    stem = up.removesuffix(f".{where.expert}") if turned else up
    down = stem.removesuffix(where.leaf) + _DOWN.get(where.leaf, "")
    return f"{down}.{where.expert}" if turned else down


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts names with their numbers as numbers, so that layer 10 follows layer 9."""
    pieces = enumerate(re.split(r"(\d+)", name))
    return tuple((1, len(p.lstrip("0")), p) if i % 2 else (0, 0, p) for i, p in pieces)
