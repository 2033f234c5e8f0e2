"""Which of an expert's matrices is gate, up and down: what the file tells, and what is assumed.

Gate and up have the same shape, and no number tells one from the other. Runtimes go by names
(w1 = gate, w3 = up, w2 = down) and by halves (gate's rows first, or the family's own order).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from transcode.check.findings import Finding, many
from transcode.checkpoint import Checkpoint
from transcode.module import Module
from transcode.names import family
from transcode.stacks import belong, experts_of

TURNED = re.compile(r".+\.experts\.(?:up_gate_proj|w31)(?:[._]\w+)?")
"""Stacked tensors whose name puts up before gate: no runtime knows them, and PaddlePaddle's
`up_gate_proj` holds gate first all the same."""


def of_order(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Names and shapes that contradict the order; else what is taken for granted."""
    turned = [name for name in checkpoint.tensors if TURNED.fullmatch(name)]
    if turned:
        yield Finding(
            "FAILS", "expert-order", turned[0],
            f"gate and up stacked under a name that puts up first; {many(len(turned), 'tensor')} "
            "of this kind: no runtime knows it, and files do not agree on whose rows it puts "
            "first, so transcode refuses it: name it gate_up_proj once gate's rows are first",
        )  # fmt: skip
    layers = experts_of(modules)
    odd = [
        (f"{container}.{e}", parts)
        for container, experts in layers.items()
        for e, parts in experts.items()
        if not belong(parts)
    ]
    if odd:
        where, parts = odd[0]
        shapes = ", ".join(f"{key} {list(m.shape)}" for key, m in parts.items())
        yield Finding(
            "FAILS", "expert-shapes", where,
            f"{shapes}; {many(len(odd), 'expert')} of this kind: its matrices do not belong "
            "together; where all are so, the names mean something else than w1 = gate, w3 = up, "
            "w2 = down",
        )  # fmt: skip
    gated = [(c, e) for c, e in layers.items() if all("gate" in parts for parts in e.values())]
    if gated and not odd and not turned:
        container, experts = gated[0]
        first = experts[min(experts)]
        yield Finding(
            "NOTE", "expert-order-assumed", container,
            f"{_assumed(checkpoint, first['gate'], first.get('up'))}; nothing in the file can tell "
            "gate from up: were they swapped, every expert would compute act(up) * gate",
            (),
        )  # fmt: skip


def _assumed(checkpoint: Checkpoint, gate: Module, up: Module | None) -> str:
    if not any(info.part_of for info in gate.leaves.values()):
        leaves = [m.name.rpartition(".")[2] for m in (gate, up) if m]
        return f"{leaves[0]} is taken for gate, {leaves[-1]} for up, by their names"
    own = family(checkpoint.text_config.get("model_type")).fused
    turns = own is not None and own.interleaved
    return "of stacked rows " + ("even ones are" if turns else "the first half is") + " gate's"
