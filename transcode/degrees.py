"""Tensor-parallel degrees that a packed file serves: every rank's slice must be whole tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transcode.plan import Plan
from transcode.spec import Layout
from transcode.stacks import Stack, group_of

HIGHEST = 64

COLUMNS = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3",
    "q_b_proj", "kv_b_proj", "wq_b", "lm_head",
)  # fmt: skip
ROWS = ("o_proj", "down_proj", "w2", "out_proj", "wo_b")
REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv")
SECTIONS = (
    "qkv_proj", "gate_up_proj", "in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
    "in_proj_qkvz", "in_proj_ba",
)  # fmt: skip
"""How runtimes split a dense linear, by its name. SECTIONS are cut within parts that only the model
knows: they serve one rank. A name that is not listed must fit by columns and by rows."""

HEADS = (
    "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads",
)  # fmt: skip
"""Config keys of heads that are shared out among ranks."""


def degrees(plan: Plan, config: Mapping[str, Any]) -> list[int]:
    """Every degree up to HIGHEST that divides the heads and cuts all packed tensors at tiles."""
    return [
        d
        for d in range(1, HIGHEST + 1)
        if shared_out(config, d)
        and all(_serves(plan.options.layout, stack, d, config) for stack in plan.stacks)
    ]


def shared_out(config: Mapping[str, Any], d: int) -> bool:
    """Whether the heads can be shared out among `d` ranks."""
    heads = all(_count(config, key) % d == 0 for key in HEADS)
    return heads and _kv_fits(_count(config, "num_key_value_heads"), d)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _kv_fits(heads: int, d: int) -> bool:
    """Key and value heads are shared out, or replicated where there are fewer than ranks."""
    return not heads or heads % d == 0 or d % heads == 0


def _serves(layout: Layout, stack: Stack, d: int, config: Mapping[str, Any]) -> bool:
    rows, k = stack.padded.rows, stack.padded.k
    if d == 1:
        return True
    if stack.fused == "w13":
        return rows[0] % d == 0 and _tiles(layout, [n // d for n in rows], k)
    if stack.fused == "w2":
        return _by_rows(layout, stack, d) and _tiles(layout, rows, k // d)
    logical = [m.shape for m in stack.groups[0]]
    unpadded = stack.padded.whole and all(
        shape == (n, k) for shape, n in zip(logical, rows, strict=True)
    )
    roles = stack.roles()
    if all(role in REPLICATED for role in roles):
        return True
    if any(role in SECTIONS for role in roles):
        return False
    columns = all(role in COLUMNS for role in roles)
    down = all(role in ROWS for role in roles)
    parts = [_part(n, d, role, config) for n, role in zip(rows, roles, strict=True)]
    by_columns = all(parts) and _tiles(layout, parts, k)
    by_rows = _by_rows(layout, stack, d) and _tiles(layout, rows, k // d)
    return unpadded and (by_columns or down) and (by_rows or columns)


def _by_rows(layout: Layout, stack: Stack, d: int) -> bool:
    """Whether K is cut between whole tiles and groups. A rank that is left with one group would
    take its scales for those of whole rows, which lie in another order."""
    group, k, tile = group_of(stack.first), stack.padded.k, layout.tile[1]
    apart = not group or k == group or k // d > group
    return tile > 0 and k % (d * max(tile, group)) == 0 and apart


def _part(n: int, d: int, role: str, config: Mapping[str, Any]) -> int:
    """A rank's rows; 0 if they cannot be shared out."""
    kv = _count(config, "num_key_value_heads")
    parts = min(d, kv) if kv and role in ("k_proj", "v_proj") else d
    return n // parts if n % parts == 0 else 0


def _tiles(layout: Layout, rows: list[int] | tuple[int, ...], k: int) -> bool:
    tile = layout.tile[0]
    return tile > 0 and all(n % tile == 0 for n in rows) and layout.serves(sum(rows), k)
