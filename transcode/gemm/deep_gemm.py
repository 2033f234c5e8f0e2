"""DeepGEMM's own GEMM of FP8 on Hopper, on what is packed as deepgemm-fp8 for sm90.

The package `deep_gemm` must be installed (it compiles its kernels with CUDA's compiler when they
are called first). Experts are run one by one. Source: deepseek-ai/DeepGEMM README.md, fp8_gemm_nt.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transcode.errors import TranscodeError
from transcode.gemm.trial import Trial, columns_of
from transcode.stacks import Stack

OP = "deep_gemm.fp8_gemm_nt"


@dataclass(frozen=True)
class DeepGemm:
    """Reads DST for a trial. gemm: deep_gemm.fp8_gemm_nt."""

    trial: Trial
    gemm: Any

    @property
    def limit(self) -> float:
        """Of a relative error: the output is rounded to 16 bits."""
        return self.trial.accept.gemm

    def products(
        self, stack: Stack, e: int, x: Tensor, *, broken: bool = False
    ) -> Sequence[Tensor]:
        """`x @ W.T` of each member of a group, of x that E4M3 holds."""
        if stack.fused:
            stem = f"{stack.prefix}.{stack.fused}_"
            return columns_of(self._gemm(stem, [e], x, broken=broken), stack)
        return [self._gemm(f"{m.name}.", None, x, broken=broken) for m in stack.groups[0]]

    def _gemm(self, stem: str, expert: list[int] | None, x: Tensor, *, broken: bool) -> Tensor:
        both = [self.trial.tensor(stem + leaf, expert) for leaf in ("weight", "weight_scale")]
        weight, scale = (t[0] if expert else t for t in both)
        if broken:
            swapped = torch.arange(len(weight), device=weight.device) ^ 1
            weight = weight.view(torch.uint8)[swapped].view(weight.dtype)
        codes = x.to(torch.float8_e4m3fn).to(weight.device)
        ones = torch.ones(len(x), -(-x.shape[1] // 128), device=weight.device)
        out = torch.full(
            (len(x), len(weight)), torch.nan, dtype=torch.bfloat16, device=codes.device
        )
        try:
            self.gemm((codes, ones), (weight, scale), out)
            torch.cuda.synchronize()
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise TranscodeError(f"{OP} does not run: {first}") from error
        return out


def installed() -> bool:
    """Whether there is a DeepGEMM, which is looked for and not imported, and a GPU for it."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return hopper and importlib.util.find_spec("deep_gemm") is not None


def found() -> Any:
    """`deep_gemm.fp8_gemm_nt`; TranscodeError where it cannot be imported."""
    try:
        return importlib.import_module("deep_gemm").fp8_gemm_nt
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise TranscodeError(f"deep_gemm cannot be used: {error}") from error
