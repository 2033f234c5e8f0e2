"""The layers that a runtime builds from modules: fusion groups, layers of experts, the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transcode.checkpoint import Checkpoint
from transcode.module import Module
from transcode.names import DELTA, GATE_UP, MLA, QKV, W1_W3, address, family
from transcode.quant import Encoding

JOINED_AS = {
    QKV: "qkv_proj", GATE_UP: "gate_up_proj", W1_W3: "gate_up_proj", MLA: "fused_qkv_a_proj",
    DELTA[0]: "in_proj_qkvz", DELTA[1]: "in_proj_ba", ("wq_a", "wkv"): "fused_wqa_wkv",
}  # fmt: skip
"""The name under which a runtime builds a fusion group as one layer (vLLM's models)."""

BITS = dict.fromkeys((Encoding.NVFP4, Encoding.NVFP4_32, Encoding.MXFP4, Encoding.INT4), 4)
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.")
_TRUNK = re.compile(r"(?:model\.|language_model\.|backbone\.|transformer\.)*layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Unit:
    """Modules that a runtime builds as one layer, and the name that it gives the layer."""

    name: str
    modules: tuple[Module, ...]
    experts: bool

    @property
    def bits(self) -> int:
        """Bits of the first module's weights, 0 where it is unquantised."""
        encoding = self.modules[0].encoding
        return 0 if encoding is Encoding.UNQUANTISED else BITS.get(encoding, 8)


def units(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> list[Unit]:
    """Every layer with a weight matrix, but for tables that are looked up."""
    rows = family(checkpoint.text_config.get("model_type")).joined
    place = {leaf: JOINED_AS.get(row) for row in rows for leaf in row}
    found: dict[tuple[str, bool], list[Module]] = {}
    for module in modules.values():
        where = address(module.name)
        if len(module.shape) != 2 or where.table:
            continue
        joined = place.get(where.leaf)
        if where.expert is not None:
            name = where.parent
        else:
            name = f"{where.parent}.{joined}" if joined else module.name
        found.setdefault((name, where.expert is not None), []).append(module)
    return [Unit(name, tuple(members), experts) for (name, experts), members in found.items()]


def draft(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor or module belongs to a head that predicts several tokens (MTP)."""
    match, layers = _TRUNK.match(name), checkpoint.text_config.get("num_hidden_layers")
    inlined = match and isinstance(layers, int) and int(match[1]) >= layers
    return bool(inlined or _DRAFT.search(name))
