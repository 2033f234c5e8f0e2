"""A plan for the eye: what `convert --dry-run` prints."""

from __future__ import annotations

from typing import Any

from transcode.plan import Plan


def outline(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: shards with their tensors and sizes, stacks with their padding."""
    return {
        "layout": f"{plan.options.layout.name} {plan.options.layout.version}",
        "activation_dtype": plan.options.dtype,
        "bytes": plan.nbytes,
        "stacks": [
            {
                "name": stack.name,
                "groups": len(stack.groups),
                "rows": [m.shape[0] for m in stack.groups[0]],
                "k": stack.groups[0][0].shape[1],
                "padded_rows": list(stack.padded.rows),
                "padded_k": stack.padded.k,
            }
            for stack in plan.stacks
        ],
        "shards": [
            {
                "name": shard.name,
                "bytes": shard.nbytes,
                "tensors": [
                    {"name": o.name, "dtype": o.dtype, "shape": o.shape, "from": str(o.kind)}
                    for o in shard.outputs
                ],
            }
            for shard in plan.shards
        ],
    }


def describe(plan: Plan) -> str:
    """The plan as lines: each shard with its tensors, then the sum."""
    lines = list[str]()
    for shard in plan.shards:
        lines.append(f"{shard.name}  {shard.nbytes} bytes, {len(shard.outputs)} tensors")
        lines += [f"  {o.name}  {o.dtype} {list(o.shape)}  {o.kind}" for o in shard.outputs]
    count = sum(len(shard.outputs) for shard in plan.shards)
    lines.append(
        f"{len(plan.shards)} shards, {count} tensors, {plan.nbytes} bytes; nothing written"
    )
    return "\n".join(lines)
