"""Scales of MXFP4, MXFP8 and FP8: bad numbers, and exponents that were cast by value.

Codes are read only where all scales of a matrix are zero exponents, and where it is asked for:
E4M3 has a NaN, E2M1 has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from transcode.check.findings import Finding, many
from transcode.checkpoint import Checkpoint, Reader
from transcode.module import Module
from transcode.names import natural
from transcode.producer import E8M0, FLOATS, Role
from transcode.quant import Encoding
from transcode.valuecast import Held, by_32, held, suspects
from transcode.valuecast import lost as gone

OTHERS = (
    Encoding.MXFP4, Encoding.MXFP8, Encoding.FP8_TENSOR, Encoding.FP8_CHANNEL, Encoding.FP8_BLOCK,
)  # fmt: skip
NAN = 255

AGAIN = "what they were is lost: take the tensor from the original again"


def of_scales(
    checkpoint: Checkpoint, modules: Mapping[str, Module], read: Reader, *, codes: bool
) -> Iterator[Finding]:
    """All findings of this file; `codes`: whether FP8 codes are read too."""
    yield from _cast(checkpoint, read)
    ordered = sorted(
        (m for m in modules.values() if m.encoding in OTHERS), key=lambda m: natural(m.name)
    )
    bad, lost, nan = dict[str, str](), dict[str, str](), dict[str, int]()
    for module in ordered:
        scales = read.tensor(module.scales)
        if text := _bad(scales, module.scales.dtype in E8M0):
            bad[module.scales.name] = text
        elif module.scales.dtype in E8M0 and (text := gone(module, scales, read)):
            lost[module.scales.name] = text
        if codes and module.codes.dtype == "F8_E4M3":
            raw = read.tensor(module.codes).view(torch.uint8)
            if count := int(((raw & 0x7F) == 0x7F).sum()):
                nan[module.codes.name] = count
    yield from _dtypes(ordered)
    for name, text in list(bad.items())[:1]:
        yield Finding(
            "WRONG", "scale-invalid", name,
            f"{text}; {many(len(bad), 'matrix')} of this kind: its outputs are NaN or meaningless",
        )  # fmt: skip
    for name, text in list(lost.items())[:1]:
        yield Finding(
            "WRONG", "exponents-lost", name,
            f"{text}; {many(len(lost), 'matrix')} of this kind; {AGAIN}",
        )  # fmt: skip
    for name, count in list(nan.items())[:1]:
        yield Finding(
            "WRONG", "code-nan", name,
            f"{many(count, 'code')} NaN; {many(len(nan), 'matrix')} of this kind: every token that "
            "meets it becomes NaN",
        )  # fmt: skip


def _bad(scales: Tensor, exponents: bool) -> str:
    """What is no scale, "" if all are."""
    if exponents:
        count = int((scales.view(torch.uint8) == NAN).sum())
        return f"{many(count, 'scale')} NaN (E8M0's 255)" if count else ""
    values = scales.float()
    wrong = ~(values.isfinite() & (values >= 0))
    count = int(wrong.sum())
    return f"{many(count, 'scale')} not finite and >= 0 ({values[wrong][0]:g})" if count else ""


def _cast(checkpoint: Checkpoint, read: Reader) -> Iterator[Finding]:
    """Exponents that stand as numbers."""
    found: dict[Held, list[str]] = {}
    told = dict[str, str]()
    for codes, scale in suspects(checkpoint.tensors):
        values = read.tensor(scale)
        kind = held(values)
        if kind is Held.BYTES or (kind is Held.POWERS and by_32(codes, scale)):
            found.setdefault(kind, []).append(scale.name)
            live = values[values != 0].float()
            told[scale.name] = f"{live.min():g} to {live.max():g}"
    for name in found.get(Held.BYTES, [])[:1]:
        yield Finding(
            "WRONG", "e8m0-value-cast", name,
            f"holds {told[name]}, the bytes of E8M0 exponents cast by value; "
            f"{many(len(found[Held.BYTES]), 'matrix')} of this kind: who multiplies with it, or "
            "casts it to E8M0, takes 118 for 2^-9 (who copies it into bytes by value is right by "
            "luck)",
        )  # fmt: skip
    for name in found.get(Held.POWERS, [])[:1]:
        yield Finding(
            "WRONG", "e8m0-as-float", name,
            f"holds powers of two as floats, one for 32 codes; "
            f"{many(len(found[Held.POWERS]), 'matrix')} of this kind: a loader copies them into "
            "bytes by value, and all become 0",
        )  # fmt: skip


def _dtypes(modules: list[Module]) -> Iterator[Finding]:
    """Exponents in a dtype that the producer's readers cast by value."""
    odd = list[Module]()
    for module in modules:
        leaf = module.written.leaves[Role.SCALES]
        stored = module.scales.dtype
        if stored in E8M0 and stored not in leaf.dtypes and not module.written.read_only:
            odd.append(module)
    if odd:
        stored, wanted = odd[0].scales.dtype, odd[0].written.leaves[Role.SCALES].dtypes
        yield Finding(
            "WRONG" if stored == "U8" or wanted[0] not in FLOATS else "WEAK", "e8m0-dtype",
            odd[0].scales.name,
            f"is {stored}, {odd[0].written.producer} writes {' or '.join(wanted)}; "
            f"{many(len(odd), 'matrix')} of this kind: a loader that copies one into the other "
            "casts the exponents by value",
        )  # fmt: skip
