"""From one encoding to another by rounding: by kernels where they read the source, else in torch.

This is the one place that chooses. quantise.py defines the bytes; the kernels (kernels/_recode.py
on a GPU, kernels/_recode_cpu.py on the CPU) give the same ones from the source's own.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from transcode import change, quantise
from transcode.kernels._source import PIECE, WHOLE, Source, source
from transcode.quant import Encoding, QuantTensor

SMALL = 1 << 18
"""Elements of a matrix that are worth compiling a numba loop for, which takes some seconds."""


def _kernels(device: torch.device, elements: int) -> ModuleType | None:
    """The kernels for a matrix on a device, None where the definition is to do it."""
    if device.type == "cuda":
        from transcode.kernels import _recode  # needs triton

        return _recode
    if device.type == "cpu" and elements >= SMALL:
        from transcode.kernels import _recode_cpu

        return _recode_cpu
    return None


def _read(of: QuantTensor | Tensor) -> tuple[ModuleType, Source] | None:
    """The kernels for a source, and how they read it."""
    device = (of.codes if isinstance(of, QuantTensor) else of).device
    run = _kernels(device, of.shape[0] * of.shape[1])
    found = source(of) if run else None
    return (run, found) if run and found else None


def meaning(of: QuantTensor | Tensor) -> Tensor:
    """`[N, K]` float32."""
    return of.float() if isinstance(of, Tensor) else of.dequantize()


def largest(of: QuantTensor | Tensor) -> Tensor:
    """The largest magnitude, `[]` float32; NaN if there is one, infinity likewise."""
    read = _read(of)
    if read is None:
        value = meaning(of)
        nan = torch.full((), torch.nan, device=value.device)
        return torch.where(value.isnan().any(), nan, value.abs().max())
    found: Tensor = read[0].largest(read[1]).max()  # NaN if any is
    return found


def requantised(
    of: QuantTensor | Tensor,
    to: Encoding,
    *,
    search: str,
    factor: Tensor | None = None,
    block: tuple[int, int] = (128, 128),
    powers: bool = False,
) -> QuantTensor:
    """A finite source in another encoding.

    factor: NVFP4's global scale, FP8_TENSOR's scale; `[]` float32.  search: see quantise.py.
    block, powers: of FP8 tiles.
    """
    read = _read(of)
    tiled = to is Encoding.FP8_BLOCK and block[1] % PIECE != 0
    if read is None or tiled:
        return _defined(meaning(of), to, search, factor, block, powers=powers)
    run, found = read
    match to:
        case Encoding.NVFP4:
            assert factor is not None
            steps = (quantise.BELOW, quantise.ABOVE) if search == "mse" else (0, 0)
            codes, scales = run.nvfp4(found, factor.reshape(1).to(found.words.device), *steps)
            return QuantTensor(to, codes, scales.view(torch.float8_e4m3fn), factor)
        case Encoding.MXFP4:
            return QuantTensor(to, *run.mxfp4(found, search))
        case Encoding.MXFP8:
            codes, scales = run.mxfp8(found)
            return QuantTensor(to, codes.view(torch.float8_e4m3fn), scales)
        case Encoding.FP8_BLOCK:
            return _tiles(of, run, found, block, powers=powers)
        case Encoding.FP8_CHANNEL:
            scales = quantise.fp8_scale(run.largest(found).amax(-1))
            tile = (1, WHOLE)
        case _:
            assert factor is not None
            scales, tile = factor.reshape(1).to(found.words.device), (WHOLE, WHOLE)
    codes = run.fp8(found, scales.contiguous(), tile).view(torch.float8_e4m3fn)
    return QuantTensor(to, codes, scales if tile[0] == 1 else scales.reshape(()))


def _tiles(
    of: QuantTensor | Tensor,
    run: ModuleType,
    found: Source,
    block: tuple[int, int],
    *,
    powers: bool,
) -> QuantTensor:
    """As quantise.fp8_tiles: powers of two if they are asked for or exact, else floats."""
    largest = of_tiles(run.largest(found), block)

    def made(scales: Tensor) -> QuantTensor:
        codes = run.fp8(found, scales.contiguous(), block).view(torch.float8_e4m3fn)
        return QuantTensor(Encoding.FP8_BLOCK, codes, scales, None, block)

    exact = torch.pow(2.0, quantise.above(largest).clamp(min=-126).double()).float()
    if powers:
        return made(exact)
    some = block[0] * max(1, (1 << 20) // block[0] // max(1, found.shape[1]))
    if _same(
        _rows(of, some), quantise.tiled(meaning(_rows(of, some)), exact[: some // block[0]], block)
    ):
        whole = made(exact)
        if _same(of, whole):
            return whole
    return made(quantise.fp8_scale(largest))


def of_tiles(pieces: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest number of each tile, from those of its pieces, `[N, K/32]`, none below 0."""
    wide = block[1] // PIECE
    rows, columns = (-(-n // size) for n, size in zip(pieces.shape, (block[0], wide), strict=True))
    more = (0, columns * wide - pieces.shape[1], 0, rows * block[0] - pieces.shape[0])
    full = pad(pieces, more) if any(more) else pieces
    return full.reshape(rows, block[0], columns, wide).amax(3).amax(1)


def mxfp4_to_fp8(of: QuantTensor, block: tuple[int, int]) -> QuantTensor:
    """change.mxfp4_to_fp8, by kernels where they read it."""
    read = _read(of)
    if read is None or block[1] % PIECE:
        return change.mxfp4_to_fp8(of, block)
    run, found = read
    live = run.largest(found) > 0
    exponent = torch.where(live, of.scales.view(torch.uint8).int(), 0)
    scales = change.tile_scales(of_tiles(exponent, block))
    codes = run.fp8(found, scales.contiguous(), block).view(torch.float8_e4m3fn)
    return QuantTensor(Encoding.FP8_BLOCK, codes, scales, None, block)


def _rows(of: QuantTensor | Tensor, count: int) -> QuantTensor | Tensor:
    """The first rows: whole tiles of them."""
    if isinstance(of, Tensor):
        return of[:count]
    tall = of.block[0] if of.block else 1
    return of.rows(0, min(of.shape[0], -(-count // tall) * tall)) if count < of.shape[0] else of


def _same(of: QuantTensor | Tensor, made: QuantTensor) -> bool:
    return torch.equal(made.dequantize(), meaning(of))


def _defined(
    value: Tensor, to: Encoding, search: str, factor: Tensor | None, block: tuple[int, int], *,
    powers: bool,
) -> QuantTensor:  # fmt: skip
    """By quantise.py alone."""
    match to:
        case Encoding.NVFP4:
            assert factor is not None
            return quantise.nvfp4(value, factor.to(value.device), search)
        case Encoding.MXFP4:
            return quantise.mxfp4(value, search)
        case Encoding.MXFP8:
            return quantise.mxfp8(value)
        case Encoding.FP8_BLOCK:
            return quantise.fp8_tiles(value, block, powers=powers)
        case Encoding.FP8_CHANNEL:
            return quantise.fp8_rows(value)
    assert factor is not None
    return quantise.fp8_tensor(value, factor.to(value.device))
