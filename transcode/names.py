"""Module names to addresses, and which projections a runtime joins into one GEMM.

Families that the table does not list follow the rule by structure, STRUCTURE. How ranks share out a
linear is said by its name too, in degrees.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
class Family:
    """A row of the table: model types, what their runtimes join, and whether up's factor may move
    into down (`act(gate) * up` goes straight into down: read in each model's code)."""

    model_types: tuple[str, ...]
    joined: tuple[tuple[str, ...], ...]
    foldable: bool


FAMILIES = (
    Family(
        ("llama", "llama4", "llama4_text", "mistral", "mistral3", "ministral3"),
        (QKV, GATE_UP),
        True,
    ),
    Family(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_vl_text"), (QKV, GATE_UP), True),
    Family(("qwen3_vl_moe_text", "olmo2", "olmoe", "dots1"), (QKV, GATE_UP), True),
    Family(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (QKV, GATE_UP, *DELTA), True),
    Family(("mixtral", "minimax_m2"), (QKV, W1_W3), True),
    Family(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), (MLA, GATE_UP), True),
    Family(("glm4_moe",), (QKV, GATE_UP), True),
    Family(("glm4_moe_lite",), (MLA, GATE_UP), True),
    Family(("gemma2", "gemma3_text"), (QKV, GATE_UP), True),
    Family(("deepseek_v4",), (("wq_a", "wkv"), W1_W3), False),
    Family(("gpt_oss",), (QKV,), False),
    Family(("nemotron_h",), (QKV,), False),
    Family(("phi3", "phimoe"), (QKV, W1_W3), False),
)

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
