"""Where the kernels of CUTLASS, TensorRT-LLM and DeepGEMM look for a row and for its scales.

Closed forms, not Tilings, so that a check by them does not share a layout's lines. Rows of w13: row
q of half h (0 gate, 1 up). Sources: NVIDIA/cutlass include/cutlass/detail/
sm100_blockscaled_layout.hpp; flashinfer-ai/flashinfer flashinfer/fused_moe/core.py; deepseek-ai/
DeepGEMM deep_gemm/mega/__init__.py and csrc/utils/layout.hpp.
"""

from __future__ import annotations

from torch import Tensor

from transcode.spec import Layout


def row(layout: Layout, q: Tensor, half: int, members: int, size: int) -> Tensor:
    """Where row q of a member lies among the rows of a matrix of so many members of this size."""
    family = layout.name.partition("-")[0]
    gated = members == 2
    if family == "trtllm":  # up 0, gate 0, up 1, ...; then 0, 4, ..., 28, 1, 5, ... within 32
        j = 2 * q + 1 - half if gated else q
        return 32 * (j // 32) + 8 * (j % 4) + j % 32 // 4
    if family == "megamoe" and gated and layout.variant == "sgl":
        return 32 * (q // 16) + 16 * (q % 2) + 8 * half + q % 16 // 2
    if family == "megamoe" and gated:
        return 16 * (q // 8) + 8 * half + q % 8
    if gated:
        return q + size * (1 - half if layout.order == "up_gate" else half)
    return q


def scale(layout: Layout, r: Tensor, c: Tensor, rows: int, groups: int) -> Tensor:
    """The byte of the scale of stored row r and group c, of so many rows and groups."""
    family = layout.name.partition("-")[0]
    if family == "megamoe":
        return 4 * (c // 4 * rows + 128 * (r // 128) + 4 * (r % 32) + r % 128 // 32) + c % 4
    if family == "deepgemm":
        return 4 * (c // 4 * (-(-rows // 4) * 4) + r) + c % 4
    return (r // 128 * -(-groups // 4) + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
