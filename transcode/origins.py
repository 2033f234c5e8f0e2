"""What a rewritten checkpoint's Report keeps for the way back: what its tensors cannot hold.

A reciprocal in float32 comes back for about six scalars in seven; a scale that was widened to
float32 does not say that it was BF16. Both stand in the Report of the conversion, under `origin`,
and are believed only where the stored tensor agrees: `1 / original` must be what is stored, and a
narrowed scale must be exact.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from transcode.checkpoint import Checkpoint
from transcode.errors import CheckpointError
from transcode.files import REPORT, read_json
from transcode.module import Module
from transcode.producer import Role


@dataclass(frozen=True)
class Origins:
    """dtypes: the source's, by `"<encoding> <role>"`.  reciprocals: float32 by tensor name."""

    dtypes: Mapping[str, str]
    reciprocals: Mapping[str, float]

    def dtype(self, module: Module, role: Role) -> str:
        """The dtype that a role's tensors once had, "" if nothing is kept."""
        return self.dtypes.get(key(module, role), "")


NOTHING = Origins({}, {})


def key(module: Module, role: Role) -> str:
    """How the Report calls the tensors of one role and encoding."""
    return f"{module.encoding} {role}"


def origins(checkpoint: Checkpoint) -> Origins:
    """What the source's Report keeps; nothing where there is none, or it cannot be read."""
    path = checkpoint.path / REPORT
    try:
        found = read_json(path).get("origin") if path.is_file() else None
    except CheckpointError:
        found = None
    kept = found if isinstance(found, dict) else {}
    dtypes, reciprocals = kept.get("dtypes"), kept.get("reciprocals")
    return Origins(
        {k: v for k, v in dtypes.items() if isinstance(v, str)} if isinstance(dtypes, dict) else {},
        {
            name: value
            for name, text in (reciprocals.items() if isinstance(reciprocals, dict) else ())
            if (value := _float(text)) is not None
        },
    )


def hexed(value: float) -> str:
    """A float32 as eight hex digits, big-endian."""
    return struct.pack(">f", value).hex()


def _float(text: object) -> float | None:
    try:
        return float(struct.unpack(">f", bytes.fromhex(str(text)))[0])
    except (ValueError, struct.error):
        return None
