"""A plan for the eye: what `convert --dry-run` prints."""

from __future__ import annotations

from typing import Any

from transcode.plan import Plan


def outline(plan: Plan) -> dict[str, Any]:
    """The plan as JSON: shards with their tensors and sizes, stacks with their padding."""
    kernel, form = plan.options.kernel, plan.options.form
    return {
        **({"layout": kernel.label} if kernel else {}),
        **({"format": form.target.name} if form else {}),
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
            if kernel
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
    """The plan as lines: stacks with their sizes, shards, the sum. Tensors are in the JSON."""
    lines = list[str]()
    for stack in plan.stacks if plan.options.kernel else ():
        rows, k = [m.shape[0] for m in stack.groups[0]], stack.groups[0][0].shape[1]
        padded = f", padded to {list(stack.padded.rows)} x {stack.padded.k}"
        same = (list(stack.padded.rows), stack.padded.k) == (rows, k)
        experts = f"{len(stack.groups)} x " if stack.fused else ""
        lines.append(f"{stack.name}  {experts}{rows} x {k}{'' if same else padded}")
    for shard in plan.shards:
        lines.append(f"{shard.name}  {shard.nbytes} bytes, {len(shard.outputs)} tensors")
    count = sum(len(shard.outputs) for shard in plan.shards)
    total = f"{len(plan.shards)} shards, {count} tensors, {plan.nbytes} bytes"
    lines.append(f"{total}; nothing written; no scale was looked at, which may yet be refused")
    return "\n".join(lines)
