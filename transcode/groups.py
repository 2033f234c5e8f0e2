"""What part of a model a module is, by its name: the words that rules may use instead of globs."""

from __future__ import annotations

import re

from transcode.names import address

GROUPS = (
    "experts", "shared_experts", "attention", "mlp", "lm_head", "embeddings", "mtp", "vision",
)  # fmt: skip

SENSES = re.compile(
    r"vis(ion|ual)|(^|\.)(vit|vpm|mlp1)(\.|$)|audio|speech|image|img_|projector|resampler|merger"
)
"""Modules that see or hear, and what leads from them into the language model."""

ATTENTION = re.compile(r"(^|\.)(\w*attn|attention|linear_attn|self_attention|delta_net)(\.|$)")
INDEXERS = re.compile(r"(^|\.)(indexer|compressor)(\.|$)")
ROUTERS = ("gate", "router", "shared_expert_gate", "wg", "ffn_gate", "moe_gate")
UNPACKED = ("kv_b_proj", "in_proj_b", "in_proj_a", "in_proj_ba", "eh_proj")
"""Linears that runtimes take apart, or have no quantised kernel for. Source of eh_proj, which is
torch's own Linear: vllm-project/vllm, vllm/model_executor/models/deepseek_mtp.py."""
HEADS = ("lm_head", "head", "output", "embed_out")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
"""Attention's, whatever holds them: Nemotron-H calls it mixer."""
SHARED = re.compile(r"(^|\.)(shared_mlp|share_expert)(\.|$)")
FUSED_MLP = (
    "gate_up_proj", "gate_and_up_proj", "fc1", "fc2", "c_fc", "c_proj", "dense_h_to_4h",
    "dense_4h_to_h",
)  # fmt: skip
MLPS = re.compile(r"(^|\.)(mlp|ffn|feed_forward|block_sparse_moe|moe|mixer)(\.|$)")


def group(name: str, layers: int) -> str:
    """The group of a module, "" for what is in none: routers, indexers, convolutions, kv_b_proj.

    layers: how many the model has; what is numbered from there on predicts further tokens (MTP).
    """
    where = address(name)
    if SENSES.search(name):
        return "vision"
    if where.draft or (layers and where.layer is not None and where.layer >= layers):
        return "mtp"
    if where.table:
        return "embeddings"
    if where.leaf in HEADS and where.layer is None:
        return "lm_head"
    if where.leaf in ROUTERS or INDEXERS.search(name):
        return ""
    if where.expert is not None:
        return "experts"
    if where.shared or SHARED.search(name):
        return "shared_experts"
    if ATTENTION.search(where.parent) or where.leaf in QKVO:
        return "" if "conv" in where.leaf or where.leaf in UNPACKED else "attention"
    if where.projection or (where.leaf in FUSED_MLP and MLPS.search(name)):
        return "mlp"
    return ""


def multiplied(name: str) -> bool:
    """Whether a module is a linear that runtimes multiply with as such: no router, embedding, norm,
    indexer or convolution, nor what they take apart."""
    words = name.split(".")
    if INDEXERS.search(name) or words[-1] in UNPACKED or {*ROUTERS} & {*words}:
        return False
    embeds = any("embed" in word for word in words if word not in HEADS)  # patch_embed.proj
    return not embeds and not any(word in words[-1] for word in ("norm", "conv", "bias"))
