"""What `check` has to say: findings, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = ("WRONG", "FAILS", "WEAK", "NOTE")
"""Served silently wrong; will not load; works, at a cost; worth knowing."""

RUNTIMES = ("vllm", "sglang")
"""Judged as vLLM 0.25.1 and 0.33.0, and SGLang 0.5.23, behave."""


@dataclass(frozen=True)
class Finding:
    """One kind of trouble, with all its places counted in the message.

    code: a short name that scripts can rely on.  where: the worst or the first place.
    runtimes: those of RUNTIMES that it concerns; none where it is about transcode alone.
    """

    level: str
    code: str
    where: str
    message: str
    runtimes: tuple[str, ...] = RUNTIMES

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        concerns = f" ({', '.join(self.runtimes)})" if self.runtimes else ""
        return f"{self.level:5}  {self.where}: {self.message}{concerns}"


def many(count: int, noun: str) -> str:
    """`1 module`, `3 modules`, `2 matrices`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ces" if noun.endswith("x") else f"{count} {noun}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
