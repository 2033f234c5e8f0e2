"""Names as they stand in the Hub's files, the table of families, the rule for unlisted ones."""

from __future__ import annotations

from collections import Counter

import pytest

from transcode.check.units import JOINED_AS
from transcode.names import (
    BY_STRUCTURE,
    DELTA,
    FAMILIES,
    GATE_UP,
    MLA,
    QKV,
    W1_W3,
    Address,
    Stacked,
    address,
    down_of,
    family,
)

LM, LM_OUTSIDE = "model.language_model.layers", "language_model.model.layers"

# model type | module | expert | projection | layer | draft
NAMES: list[tuple[str, str, int | None, str, int | None, bool]] = [
    ("llama", "model.layers.0.mlp.gate_proj", None, "gate", 0, False),
    ("llama4_text", f"{LM_OUTSIDE}.1.feed_forward.experts.15.down_proj", 15, "down", 1, False),
    ("llama4_text", f"{LM_OUTSIDE}.1.feed_forward.shared_expert.up_proj", None, "up", 1, False),
    ("llama4", "vision_model.model.layers.33.mlp.fc1", None, "", 33, False),
    ("mistral", f"{LM_OUTSIDE}.39.mlp.down_proj", None, "down", 39, False),
    ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w1", 7, "gate", 3, False),
    ("qwen2_5_vl", "model.layers.10.mlp.up_proj", None, "up", 10, False),
    ("qwen2_5_vl", "visual.blocks.4.mlp.gate_proj", None, "gate", 4, False),
    ("qwen3", "model.layers.2.self_attn.q_proj", None, "", 2, False),
    ("qwen3_vl_text", f"{LM}.2.mlp.up_proj", None, "up", 2, False),
    ("qwen3_moe", "model.layers.0.mlp.experts.127.gate_proj", 127, "gate", 0, False),
    ("qwen3_moe", "model.layers.0.mlp.gate", None, "", 0, False),
    ("qwen3_omni_moe", "thinker.model.layers.5.mlp.experts.9.up_proj", 9, "up", 5, False),
    ("qwen3_vl_moe_text", f"{LM}.0.mlp.experts.3.down_proj", 3, "down", 0, False),
    ("qwen3_vl_moe_text", f"{LM}.0.mlp.experts.gate_proj.3", 3, "gate", 0, False),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz", None, "", 0, False),
    ("qwen3_next", "mtp.layers.0.mlp.experts.511.down_proj", 511, "down", 0, True),
    ("qwen3_5_text", f"{LM}.0.linear_attn.in_proj_qkv", None, "", 0, False),
    ("qwen3_5_moe_text", f"{LM}.0.mlp.experts.255.gate_proj", 255, "gate", 0, False),
    ("qwen3_5_moe_text", f"{LM}.0.mlp.shared_expert.up_proj", None, "up", 0, False),
    ("qwen3_5_moe_text", "mtp.layers.0.mlp.experts.255.up_proj", 255, "up", 0, True),
    ("qwen3_5_moe_text", "mtp.fc", None, "", None, True),
    ("olmoe", "model.layers.0.mlp.experts.63.up_proj", 63, "up", 0, False),
    ("deepseek_v3", "model.layers.3.mlp.experts.255.down_proj", 255, "down", 3, False),
    ("deepseek_v3", "model.layers.3.mlp.shared_experts.gate_proj", None, "gate", 3, False),
    ("deepseek_v3", "model.layers.61.mlp.experts.0.up_proj", 0, "up", 61, False),
    ("deepseek_v3", "model.layers.61.eh_proj", None, "", 61, False),
    ("deepseek_v32", "model.layers.0.self_attn.indexer.wq_b", None, "", 0, False),
    ("deepseek_v4", "layers.0.ffn.experts.0.w1", 0, "gate", 0, False),
    ("deepseek_v4", "layers.42.ffn.shared_experts.w2", None, "down", 42, False),
    ("deepseek_v4", "mtp.0.ffn.experts.255.w3", 255, "up", 0, True),
    ("deepseek_v4", "model.layers.0.ffn.experts.12.w2", 12, "down", 0, False),
    ("deepseek_v4", "model.layers.0.mlp.experts.12.down_proj", 12, "down", 0, False),
    ("kimi_k2", "model.layers.60.mlp.experts.383.up_proj", 383, "up", 60, False),
    ("kimi_k25", f"{LM_OUTSIDE}.1.mlp.experts.383.gate_proj", 383, "gate", 1, False),
    ("glm4_moe", "model.layers.92.mlp.experts.159.down_proj", 159, "down", 92, False),
    ("glm4v_moe_text", f"{LM}.1.mlp.experts.0.gate_proj", 0, "gate", 1, False),
    ("glm_moe_dsa", "model.layers.78.mlp.shared_experts.up_proj", None, "up", 78, False),
    ("glm4_moe_lite", "model.layers.1.self_attn.kv_a_proj_with_mqa", None, "", 1, False),
    ("minimax_m1", "model.layers.79.block_sparse_moe.experts.31.w2", 31, "down", 79, False),
    ("minimax_m2", "model.layers.61.block_sparse_moe.experts.255.w3", 255, "up", 61, False),
    ("minimax_m3_vl", f"{LM_OUTSIDE}.9.block_sparse_moe.experts.4.w1", 4, "gate", 9, False),
    ("minimax_m3_vl", f"{LM_OUTSIDE}.0.self_attn.index_q_proj", None, "", 0, False),
    ("gpt_oss", "model.layers.0.mlp.experts.31.gate_up_proj", 31, "", 0, False),
    ("gpt_oss", "model.layers.0.mlp.router", None, "", 0, False),
    ("nemotron_h", "backbone.layers.1.mixer.experts.511.up_proj", 511, "up", 1, False),
    ("nemotron_h", "backbone.layers.1.mixer.shared_experts.down_proj", None, "down", 1, False),
    ("nemotron_h", "language_model.backbone.layers.0.mixer.in_proj", None, "", 0, False),
    ("nemotron_h", "mtp.layers.1.mixer.experts.3.down_proj", 3, "down", 1, True),
    ("phi3", "model.layers.31.mlp.gate_up_proj", None, "", 31, False),
    ("phimoe", "model.layers.0.block_sparse_moe.experts.15.w3", 15, "up", 0, False),
    ("granite", "model.layers.0.mlp.gate_proj", None, "gate", 0, False),
    ("granitemoe", "model.layers.0.block_sparse_moe.experts.39.gate_proj", 39, "gate", 0, False),
    ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear", None, "", 0, False),
    ("gemma3_text", f"{LM_OUTSIDE}.0.mlp.down_proj", None, "down", 0, False),
    ("gemma4_text", f"{LM}.0.experts.127.up_proj", 127, "up", 0, False),
    ("gemma4_text", "model.vision_tower.encoder.layers.0.mlp.up_proj.linear", None, "", 0, False),
]


@pytest.mark.parametrize(("kind", "name", "expert", "projection", "layer", "draft"), NAMES)
def test_an_address(
    kind: str, name: str, expert: int | None, projection: str, layer: int | None, draft: bool
) -> None:
    assert family(kind) is not BY_STRUCTURE
    found = address(name)
    parent, _, leaf = name.rpartition(".")
    if expert is not None:
        holder, _, rest = name.partition(".experts.")
        parent = f"{holder}.experts"
        (leaf,) = {*rest.split(".")} - {str(expert)}
    assert found == Address(parent, leaf, expert, projection, layer, draft)
    assert found.shared == ("shared_expert" in name)
    assert parent.endswith(".experts") == (expert is not None)


def test_every_family_has_names_here_and_a_row_of_its_own() -> None:
    assert {family(kind) for kind, *_ in NAMES} == set(FAMILIES)
    kinds = Counter(kind for row in FAMILIES for kind in row.model_types)
    assert set(kinds.values()) == {1}
    assert all(family(kind) is row for row in FAMILIES for kind in row.model_types)


# model type | whether a runtime makes one GEMM of: q k v | gate up | w1 w3 | q_a kv_a | DeltaNet
JOINED = [
    ("llama4_text", True, True, False, False, False),
    ("mixtral", True, False, True, False, False),
    ("qwen3_vl_moe_text", True, True, False, False, False),
    ("qwen3_next", True, True, False, False, True),
    ("qwen3_5_moe_text", True, True, False, False, True),
    ("deepseek_v2", False, True, False, True, False),
    ("deepseek_v4", False, False, True, False, False),
    ("kimi_k25", False, True, False, True, False),
    ("glm4_moe", True, True, False, False, False),
    ("glm_moe_dsa", False, True, False, True, False),
    ("minimax_m2", True, False, True, False, False),
    ("minimax_m3_vl_text", True, True, True, False, False),
    ("gpt_oss", True, False, False, False, False),
    ("nemotron_h", True, False, False, False, False),
    ("phi3", False, False, False, False, False),
    ("phimoe", True, False, True, False, False),
    ("granitemoehybrid", True, False, False, False, False),
    ("gemma4_text", True, True, False, False, False),
    ("nobody_listed_this", True, True, True, True, True),
]


@pytest.mark.parametrize("row", JOINED, ids=lambda row: row[0])
def test_what_a_runtime_joins(row: tuple[str, bool, bool, bool, bool, bool]) -> None:
    kind, *wanted = row
    joined = family(kind).joined
    assert [group in joined for group in (QKV, GATE_UP, W1_W3, MLA, DELTA[0])] == wanted
    assert (DELTA[1] in joined) == wanted[-1]
    assert (("wq_a", "wkv") in joined) == (kind in ("deepseek_v4", "nobody_listed_this"))
    leaves = [leaf for group in joined for leaf in group]
    assert len(set(leaves)) == len(leaves)


def test_what_is_joined_has_the_name_of_a_runtime_s_layer() -> None:
    assert {g for row in (*FAMILIES, BY_STRUCTURE) for g in row.joined} == set(JOINED_AS)


UNFOLDABLE = {
    "deepseek_v4": "both halves are clamped", "gpt_oss": "clamped, and up + 1",
    "minimax_m3_text": "clamped, and up + 1", "nemotron_h": "no gate",
    "minimax_m1": "not read", "phi3": "one matrix", "phimoe": "not read in vLLM",
}  # fmt: skip


def test_only_a_checked_family_folds() -> None:
    assert {family(kind) for kind in UNFOLDABLE} == {f for f in FAMILIES if not f.foldable}


# model type | where a layer's experts stand | gate and up's tensor | transposed | interleaved
FUSED = [
    ("qwen3_5_moe_text", f"{LM}.0.mlp", "experts.gate_up_proj", False, False),
    ("qwen3_vl_moe_text", f"{LM}.0.mlp", "experts.gate_up_proj", True, False),
    ("llama4_text", f"{LM_OUTSIDE}.1.feed_forward", "experts.gate_up_proj", True, False),
    ("gpt_oss", "model.layers.0.mlp", "experts.gate_up_proj", True, True),
    ("granitemoe", "model.layers.0.block_sparse_moe", "input_linear.weight", False, False),
    ("gemma4_text", f"{LM}.0", "experts.gate_up_proj", False, False),
]
DOWN = {"experts.gate_up_proj": "experts.down_proj", "input_linear.weight": "output_linear.weight"}


@pytest.mark.parametrize(("kind", "holder", "gate_up", "transposed", "interleaved"), FUSED)
def test_how_a_bf16_repo_stacks_experts(
    kind: str, holder: str, gate_up: str, transposed: bool, interleaved: bool
) -> None:
    assert family(kind).fused == Stacked(gate_up, DOWN[gate_up], transposed, interleaved)
    assert address(f"{holder}.experts.0.up_proj").parent == f"{holder}.experts"


def test_the_other_families_have_tensors_for_every_expert() -> None:
    assert {family(kind) for kind, *_ in FUSED} == {f for f in FAMILIES if f.fused}


@pytest.mark.parametrize("kind", ["nobody_listed_this", "exaone_moe", "", None, ["llama"]])
def test_an_unlisted_family_goes_by_structure(kind: object) -> None:
    found = family(kind)
    assert found is BY_STRUCTURE
    assert (found.foldable, found.fused) == (False, None)


def test_the_structure_of_names_that_nobody_listed() -> None:
    name = "decoder.trunk.blocks.7.sparse.experts.19.w3"
    assert address(name) == Address(
        "decoder.trunk.blocks.7.sparse.experts", "w3", 19, "up", 7, False
    )
    assert address("lm_head") == Address("", "lm_head", None, "", None, False)
    assert address("model.nextn_layers.0.mlp.up_proj").draft
    assert address("mtp.1.layers.0.mlp.up_proj").layer == 0
    assert address("model.layers.0.experts_norm.0.up_proj").expert is None


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"),
        ("model.layers.1.mlp.experts.1.up_proj", "model.layers.1.mlp.experts.1.down_proj"),
        (f"{LM}.3.mlp.experts.up_proj.3", f"{LM}.3.mlp.experts.down_proj.3"),
        ("backbone.layers.1.mixer.up_proj", "backbone.layers.1.mixer.down_proj"),
        ("layers.0.ffn.experts.0.w3", "layers.0.ffn.experts.0.w2"),
        ("mtp.0.ffn.shared_experts.w3", "mtp.0.ffn.shared_experts.w2"),
        ("up_proj.0.mlp.up_proj", "up_proj.0.mlp.down_proj"),
        ("w3", "w2"),
    ],
)
def test_the_down_that_follows_an_up(up: str, down: str) -> None:
    assert down_of(up) == down
    assert address(down).projection == "down"
    assert address(down).parent == address(up).parent
