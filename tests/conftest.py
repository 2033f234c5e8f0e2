"""Without a GPU Triton's kernels run in its interpreter; new memory is never zero by luck."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transcode.kernels import _tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # has to be there before the first kernel is imported


@pytest.fixture
def device() -> str:
    """Where Triton's kernels can run."""
    return DEVICE


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of new memory that nobody writes comes back as 0xA5."""

    def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = empty(*args, **kwargs)
            if t.device.type in ("cpu", "cuda"):
                t.reshape(-1).view(torch.uint8).fill_(0xA5)
            return t

        return call

    for module in (torch, _tiles):
        monkeypatch.setattr(module, "empty", poisoned(module.empty))
