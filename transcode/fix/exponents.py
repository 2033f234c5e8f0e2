"""E8M0 exponents that stand as numbers (valuecast.py), in the dtype that the form has for them."""

from __future__ import annotations

from dataclasses import replace

from transcode.checkpoint import Checkpoint, reader
from transcode.errors import FormatError
from transcode.header import TensorInfo, bytes_of
from transcode.valuecast import Cast, Held, by_32, held, suspects


def mend(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Bytes as numbers are exponents again, and powers of two bytes where bytes are wanted."""
    tensors, done = dict(checkpoint.tensors), list[str]()
    with reader() as read:
        for codes, scale in suspects(checkpoint.tensors):
            kind, apiece = held(read.tensor(scale)), by_32(codes, scale)
            if kind is Held.NUMBERS or (kind is Held.POWERS and not apiece):
                continue
            if len(scale.shape) > 2 or len(codes.shape) > 2:
                raise FormatError(f"{scale}: {kind}, of stacked experts: not mended here")
            tensors[scale.name] = _mended(scale, kind, apiece=apiece)
            done.append(scale.name)
    if not done:
        return checkpoint, []
    told = f"{len(done)} tensors of exponents that were cast by value turned back, {done[0]} first"
    return replace(checkpoint, tensors=tensors), [told]


def _mended(scale: TensorInfo, kind: Held, *, apiece: bool) -> TensorInfo:
    """The scales as bytes; of native FP8's tiles as the powers of two that its readers multiply."""
    own = scale.name.endswith(".scale")
    wanted = "F8_E8M0" if own else "U8" if apiece else scale.dtype
    cast = Cast(scale.shape, scale.dtype, kind, wanted)
    return replace(scale, dtype=wanted, nbytes=bytes_of(wanted, scale.shape), cut=cast)
