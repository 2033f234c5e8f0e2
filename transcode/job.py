"""A conversion when all is decided: what packing, configs and reports go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transcode.checkpoint import Reader
from transcode.plan import Plan
from transcode.settle import Settled
from transcode.unify import Unified


@dataclass(frozen=True)
class Job:
    """All that is decided before the first byte is written. `settled` is keyed by stack name.

    rounded_biases: packed modules whose bias is not exact in the activation dtype.
    """

    plan: Plan
    unified: Unified
    settled: Mapping[str, Settled]
    read: Reader
    device: torch.device
    rounded_biases: tuple[str, ...] = ()
