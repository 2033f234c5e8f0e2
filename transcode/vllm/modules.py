"""Which of vLLM's layers are which modules of the folder, whatever vLLM calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from transcode.errors import LayoutError
from transcode.names import GATE_UP, QKV
from transcode.vllm.packed import Packed, Stack

JOINED = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}
"""What a layer is made of where its model class does not say so."""

_EXPERT = re.compile(r"\.experts\.(\d+\..+|\w+\.\d+)$")


class How(Enum):
    """How a module is stored."""

    PACKED = "packed"
    CARRIED = "quantised, but not packed"
    PLAIN = "unquantised"


@dataclass(frozen=True)
class Module:
    """A module of the folder, or the container of all experts of a layer."""

    name: str
    how: How
    stack: str = ""


class Modules:
    """The folder's modules under every name that they may have in vLLM."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.known: dict[str, Module] = {}
        for how, names in ((How.PLAIN, packed.plain), (How.CARRIED, packed.carried)):
            for name in names:
                short = _container(name)
                self.known[short] = Module(short, how)
        for stack in packed.stacks.values():
            leaves = stack.members if stack.experts is None else ("",)
            for leaf in leaves:
                name = ".".join(filter(None, (stack.parent, leaf)))
                self.known[name] = Module(name, How.PACKED, stack.name)

    def rename(self, new_name: Callable[[str], str | None]) -> None:
        """Add the names that a model gives; those from before stay, so that it may come twice."""
        for name, module in list(self.known.items()):
            self.known.setdefault(new_name(name) or name, module)

    def linear(self, prefix: str, joined: Mapping[str, Sequence[str]]) -> tuple[How, Stack | None]:
        """How a linear is stored, and the stack that it is; LayoutError if its parts differ."""
        parent, _, leaf = prefix.rpartition(".")
        leaves = (JOINED | dict(joined)).get(leaf, ())
        names = [prefix, *(".".join(filter(None, (parent, m))) for m in leaves)]
        found = {m.name: m for n in names if (m := self.known.get(n))}
        if len({m.how for m in found.values()}) > 1:
            parts = ", ".join(f"{m.name} {m.how.value}" for m in found.values())
            raise LayoutError(f"{prefix} joins what is stored in different ways: {parts}")
        stacks = {m.stack for m in found.values()}
        if not found or stacks == {""}:
            return next((m.how for m in found.values()), How.PLAIN), None
        stack = self.packed.stacks[min(stacks)]
        if len(stacks) > 1 or len(found) != len(stack.members):
            raise LayoutError(
                f"{prefix} joins {', '.join(found)}, which were not packed together as one matrix"
            )
        return How.PACKED, stack

    def experts(self, prefix: str) -> tuple[How, str]:
        """How a layer's experts are stored, and their container; LayoutError if nobody says."""
        for name in (prefix, prefix.removesuffix(".routed_experts"), f"{prefix}.experts"):
            if module := self.known.get(name):
                return module.how, module.name
        if any(stack.experts is not None for stack in self.packed.stacks.values()):
            raise LayoutError(f"{prefix}: the folder's config names no such experts")
        return How.PLAIN, prefix


def _container(name: str) -> str:
    """An expert's projection stands for its container."""
    return _EXPERT.sub(".experts", name)
