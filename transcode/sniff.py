"""The encoding of a quantised module, from its tensors' names, dtypes and shapes alone.

Whoever wrote it: a scale's name and shape differ between producers, its meaning does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.producer import E8M0, FLOATS, Role, Shape
from transcode.quant import Encoding

CODES = ("weight_packed", "weight", "blocks")
BLOCK_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales")
"""Leaves of codes and of their scales, whoever writes them."""

SIZES = tuple(1 << i for i in range(4, 16))
"""Sizes that a tile may have where no config says it."""


@dataclass(frozen=True)
class Found:
    """An encoding, the logical `(N, K)`, codes, scales and global scale in their logical shapes,
    and the tile of FP8_BLOCK."""

    encoding: Encoding
    shape: tuple[int, ...]
    parts: Mapping[Role, TensorInfo]
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tiles:
    """The tiles of block FP8 that a config speaks of: of single modules, and of no one in
    particular."""

    own: Mapping[str, tuple[int, int]]
    others: tuple[tuple[int, int], ...]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Tiles:
        """Whatever key the producer has for it."""
        found = [_tile(config.get("weight_block_size"))]
        for group in _dicts(config.get("config_groups")):
            found += [_tile(w.get("block_structure")) for w in _dicts([group.get("weights")])]
        specs = [config.get("global_quant_config"), *_dicts(config.get("layer_quant_config"))]
        for spec in _dicts(specs):
            found += [_tile(w.get("block_size")) for w in _dicts([spec.get("weight")])]
        own = {
            name: tile
            for group in _dicts(config.get("groups"))
            if (tile := _tile(group.get("block"))) and isinstance(group.get("modules"), list)
            for name in group["modules"]
            if isinstance(name, str)
        }
        return Tiles(own, tuple(dict.fromkeys(tile for tile in found if tile)))

    def around(self, module: str) -> tuple[tuple[int, int], ...]:
        """What the config says that may be meant for a module."""
        if module in self.own:
            return (self.own[module],)
        return self.others


def _dicts(values: Any) -> list[dict[str, Any]]:
    """Those of a dict's or list's values that are dicts."""
    every = values.values() if isinstance(values, dict) else values
    return [v for v in every if isinstance(v, dict)] if isinstance(every, Iterable) else []


def _tile(size: Any) -> tuple[int, int] | None:
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


def sniff(leaves: Mapping[str, TensorInfo], tiles: tuple[tuple[int, int], ...]) -> Found:
    """Raises FormatError, with what was found and wanted, for what is no encoding known here.

    tiles: what block FP8 may be cut into; the first that fits the shapes is believed.
    """
    for codes, scales, factor in (
        ("weight_packed", "weight_scale", "weight_global_scale"),
        ("weight", "weight_scale", "weight_scale_2"),
    ):
        if _is_nvfp4(leaves, codes, scales, factor):
            return _nvfp4(leaves, codes, scales, factor)
    weight = next(leaves[c] for c in CODES if c in leaves)
    present = [
        leaves[s] for s in (*BLOCK_SCALES, "weight_scale_2", "weight_global_scale") if s in leaves
    ]
    if len(present) > 1:
        raise FormatError(f"{weight} has {present[0]} and {present[1]}, wanted one of them")
    scale = next((leaves[s] for s in BLOCK_SCALES if s in leaves), None)
    if scale is None:
        raise FormatError(f"{weight} has no scale")
    if weight.dtype == "I32" and "weight_shape" in leaves:
        return Found(Encoding.INT4, (), {})  # K is in the data of weight_shape
    if len(weight.shape) != 2:
        raise FormatError(f"{weight}: wanted a matrix")
    if not weight.nbytes:
        raise FormatError(f"{weight}: has no elements")
    if weight.dtype in ("U8", "I8") and scale.dtype in E8M0:
        return _blocks_of_32(Encoding.MXFP4, weight, scale, 2 * weight.shape[1])
    if weight.dtype != "F8_E4M3":
        raise FormatError(f"{weight} with {scale}: no encoding known here")
    return _fp8(weight, scale, tiles)


def _is_nvfp4(leaves: Mapping[str, TensorInfo], codes: str, scales: str, factor: str) -> bool:
    if codes not in leaves or leaves[codes].dtype != "U8":
        return False
    return factor in leaves or (scales in leaves and leaves[scales].dtype == "F8_E4M3")


def _nvfp4(leaves: Mapping[str, TensorInfo], codes: str, scales: str, factor: str) -> Found:
    for leaf in (scales, factor):
        if leaf not in leaves:
            raise FormatError(f"{leaf} is missing beside {codes}")
    weight, scale = leaves[codes], leaves[scales]
    if len(weight.shape) != 2:
        raise FormatError(f"{weight}: wanted a matrix [N, K/2]")
    if not weight.nbytes:
        raise FormatError(f"{weight}: has no elements")
    if scale.dtype != "F8_E4M3":
        raise FormatError(f"{scale}: wanted F8_E4M3")
    n, k = weight.shape[0], weight.shape[1] * 2
    for leaf in (factor, "input_scale", "input_global_scale", "input_scale_2"):
        if leaf in leaves and (leaves[leaf].dtype != "F32" or leaves[leaf].nbytes != 4):
            raise FormatError(f"{leaves[leaf]}: wanted one F32")
    parts = {
        Role.CODES: weight,
        Role.SCALES: scale,
        Role.GLOBAL: replace(leaves[factor], shape=()),
    }
    if scale.shape == (n, k // 16) and k % 16 == 0:
        return Found(Encoding.NVFP4, (n, k), parts)
    if scale.shape == (n, k // 32) and k % 32 == 0:
        return Found(Encoding.NVFP4_32, (n, k), parts)
    raise FormatError(
        f"{scales} is {list(scale.shape)}, wanted {[n, k // 16]} (K = {k}, one scale per 16)"
    )


def _blocks_of_32(encoding: Encoding, weight: TensorInfo, scale: TensorInfo, k: int) -> Found:
    n = weight.shape[0]
    if k % 32 or scale.shape != (n, k // 32):
        raise FormatError(f"{scale}: wanted {[n, k // 32]} (K = {k}, one scale per 32)")
    return Found(encoding, (n, k), {Role.CODES: weight, Role.SCALES: scale})


def _fp8(weight: TensorInfo, scale: TensorInfo, tiles: tuple[tuple[int, int], ...]) -> Found:
    n, k = weight.shape
    mx = scale.dtype in E8M0
    if mx and k % 32 == 0 and scale.shape == (n, k // 32):
        return _blocks_of_32(Encoding.MXFP8, weight, scale, k)
    if not mx and scale.dtype not in FLOATS:
        raise FormatError(f"{scale}: wanted {', '.join(FLOATS)} or E8M0")

    def found(encoding: Encoding, shape: Shape, block: tuple[int, int] | None = None) -> Found:
        parts = {Role.CODES: weight, Role.SCALES: replace(scale, shape=shape)}
        return Found(encoding, (n, k), parts, block)

    if not mx and scale.shape in ((), (1,)):
        return found(Encoding.FP8_TENSOR, ())
    if not mx and scale.shape in ((n,), (n, 1)) and n > 1:
        return found(Encoding.FP8_CHANNEL, (n,))
    if not mx and n == 1 and scale.shape == (1, 1) and not tiles:
        return found(Encoding.FP8_CHANNEL, (1,))
    for blocks in _as_blocks(scale.shape):
        for size in (*tiles, (128, 128), *(() if tiles else _guess((n, k), blocks))):
            if blocks == (-(-n // size[0]), -(-k // size[1])):
                return found(Encoding.FP8_BLOCK, blocks, size)
    if mx and scale.dtype == "U8":
        raise FormatError(f"{scale}: wanted {[n, k // 32]} (K = {k}, one scale per 32)")
    raise FormatError(f"{scale}: wanted one for each block of {[n, k]}")


def _guess(shape: tuple[int, int], blocks: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The tile of powers of two that cuts a shape into so many blocks: there is at most one for
    an axis of several blocks; along an axis of one block it is the other axis'."""
    sizes = [
        next((t for t in SIZES if count > 1 and -(-n // t) == count), 0)
        for n, count in zip(shape, blocks, strict=True)
    ]
    rows, columns = sizes[0] or sizes[1], sizes[1] or sizes[0]
    if rows and columns:
        yield rows, columns


def _as_blocks(shape: Shape) -> list[tuple[int, int]]:
    """What blocks of rows and columns a scale's shape may stand for: 2-D, ModelOpt's 4-D, and 1-D
    where there is but one block along the other axis."""
    if len(shape) == 4 and shape[1::2] == (1, 1):
        shape = shape[::2]
    if len(shape) == 1:
        return [(1, shape[0]), (shape[0], 1)] if shape[0] else []
    return [(shape[0], shape[1])] if len(shape) == 2 and all(shape) else []
