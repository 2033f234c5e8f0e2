"""Tensor-parallel degrees that the width of experts and MLPs forbids.

A rank gets `width / degree` rows of gate and up and as many columns of down; blocks of scales must
not be cut. Sources: vllm/model_executor/layers/quantization/utils/fp8_utils.py
(validate_fp8_block_shape: it raises), and the loaders that narrow block scales by columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transcode.check.findings import Finding, many
from transcode.checkpoint import Checkpoint
from transcode.degrees import shared_out
from transcode.module import Module
from transcode.names import address, natural
from transcode.quant import Encoding
from transcode.stacks import group_of

DEGREES = (2, 4, 8)


def of_tp(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Down projections whose columns cannot be shared out, of the degrees that the heads allow."""
    allowed = [d for d in DEGREES if shared_out(checkpoint.text_config, d)]
    found: dict[tuple[int, int, str, tuple[int, ...]], list[str]] = {}
    for module in modules.values():
        where = address(module.name)
        if module.encoding is Encoding.UNQUANTISED or where.projection != "down":
            continue
        if len(module.shape) != 2:
            continue
        width, unit = module.shape[1], max(group_of(module), 1)
        if module.encoding is Encoding.NVFP4_32:
            unit = 32
        misfits = tuple(d for d in allowed if width % (d * unit))
        if misfits:
            kind = width, unit, "expert" if where.expert is not None else "MLP", misfits
            found.setdefault(kind, []).append(module.name)
    for (width, unit, what, misfits), names in found.items():
        pad = "; transcode convert --pad-for-tp N pads experts" * (what == "expert")
        yield Finding(
            "WEAK", "tp-misfit", min(names, key=natural),
            f"{what} of width {width}, in blocks of {unit}; {many(len(names), 'matrix')} of this "
            f"kind: its blocks cannot be shared out among {' or '.join(map(str, misfits))} ranks "
            f"(tensor parallelism), which loaders refuse{pad}",
        )  # fmt: skip
