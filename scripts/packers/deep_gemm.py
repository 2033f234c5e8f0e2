"""sgl-deep-gemm's own Python, from a wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from scripts.packers.wheel import Runtime, StandIn, Wheel, importing

MEGA = "deep_gemm.mega"
LAYOUT = "deep_gemm.utils.layout"
MATH = "deep_gemm.utils.math"
DRIVEN = (MEGA, LAYOUT, MATH)

STAND_IN = (
    f"DeepGEMM's CUDA packing of scales was replaced by {LAYOUT}._pack_fp32_into_ue8m0_fallback, "
    "its own definition in Python"
)


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below the size."""
    return -(-size // multiple) * multiple


def load(path: Path) -> Runtime:
    """Import the functions of a wheel."""
    wheel = Wheel.open(path)
    with importing(wheel, "deep_gemm", DRIVEN):
        return Runtime("sgl-deep-gemm", wheel, {name: import_module(name) for name in DRIVEN})


def offered(deep_gemm: Runtime) -> dict[str, Any]:
    """The modules as other runtimes import them; columns are aligned to 16 bytes, as in C++."""
    layout, math = deep_gemm.modules[LAYOUT], deep_gemm.modules[MATH]
    pack = layout._pack_fp32_into_ue8m0_fallback

    def required(scales: Tensor, **settings: Any) -> Tensor:
        """`transform_sf_into_required_layout` of a scale for every row."""
        if settings["recipe"] != (1, 32):
            raise ValueError(f"{settings['recipe']} is another layout")
        words: Tensor = pack(scales)
        return words

    package: Any = StandIn("deep_gemm")
    package._C = StandIn("deep_gemm._C")
    package._C.get_tma_aligned_size = lambda rows, bytes_: round_up(rows, 16 // bytes_)
    package.transform_weights_for_mega_moe = deep_gemm.modules[MEGA].transform_weights_for_mega_moe
    package.transform_sf_into_required_layout = required
    utils: Any = StandIn("deep_gemm.utils")
    package.utils = utils
    utils.layout, utils.math, utils.align = layout, math, math.align
    utils.get_tma_aligned_size = layout.get_tma_aligned_size
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = pack
    return {**deep_gemm.modules, "deep_gemm": package, "deep_gemm.utils": utils}
