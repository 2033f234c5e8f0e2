"""A conversion when all is decided: what packing, configs and reports go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.origins import NOTHING, Origins
from transcode.plan import Plan
from transcode.recoding import Loss
from transcode.settled import Settled
from transcode.unify import Unified


@dataclass(frozen=True)
class Job:
    """All that is decided before the first byte is written. `settled` is keyed by stack name.

    rounded_biases: packed modules whose bias is not exact in the activation dtype.
    cleaned: rewritten modules whose block scales are NaN over zeros, or -0.
    filled: input scales, as factors, of modules that had none that is valid.
    losses: of decoded outputs, a memo of `rewritten.loss`.
    rounding: of modules as they are decoded, the largest relative error, and whether all is finite.
    recoded: what changes of encoding cost, by module.
    """

    plan: Plan
    unified: Unified
    settled: Mapping[str, Settled]
    read: Reader
    device: torch.device
    rounded_biases: tuple[str, ...] = ()
    origins: Origins = NOTHING
    cleaned: frozenset[str] = frozenset()
    filled: Mapping[str, Tensor] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    rounding: dict[str, tuple[float, bool]] = field(default_factory=dict)
    recoded: Mapping[str, Loss] = field(default_factory=dict)
