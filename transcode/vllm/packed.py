"""What a packed folder's config.json says, checked; no vLLM is needed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transcode.errors import FormatError, LayoutError
from transcode.kernels import marlin

VERSION = 1
VARIANT = "vllm"


@dataclass(frozen=True)
class Kind:
    """How a layout stores its matrices.

    bits: of a code.  group: columns that share a scale, 0 for FP8's tiles or whole rows.
    scale: safetensors' dtype of the scales, "" for the activations'.
    factor: whether there are global scales.
    """

    bits: int
    group: int
    scale: str
    factor: bool


LAYOUTS = {
    one.name: Kind(one.codes.bits, one.groups[0], one.scales.dtype, one.factor is not None)
    for one in marlin.LAYOUTS
    if one.variant == VARIANT
}
DTYPES = {"bfloat16": "BF16", "float16": "F16"}
"""The activation dtypes, and safetensors' names of them."""


@dataclass(frozen=True)
class Stack:
    """Matrices that were packed together: a dense group, or w13 or w2 of all experts of a layer.

    experts: their count, None where it is dense.  members: leaf names, in order.
    n, k: logical rows of each member, and columns.  padded_n, padded_k: as they are stored.
    scales: rows of the stored scales `[scales, N]`.
    """

    name: str
    experts: int | None
    members: tuple[str, ...]
    n: tuple[int, ...]
    k: int
    padded_n: tuple[int, ...]
    padded_k: int
    scales: int
    interleaved: bool
    biased: bool

    @property
    def padded(self) -> bool:
        """Whether anything is padded, so that only the whole can be used."""
        return (self.n, self.k) != (self.padded_n, self.padded_k)

    @property
    def parent(self) -> str:
        """The module that holds the members, or the experts' container."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Packed:
    """A packed folder's quantization config.

    dtype: of the activations.  tp: tensor-parallel degrees that the folder serves.
    carried, plain: modules that are quantised but not packed, and unquantised ones.
    source, source_file: the source's quantization config, and where it stood.
    """

    layout: str
    kind: Kind
    dtype: str
    tp: tuple[int, ...]
    stacks: Mapping[str, Stack]
    carried: tuple[str, ...]
    plain: tuple[str, ...]
    kv_cache: Any
    source: Mapping[str, Any]
    source_file: str


def parse(config: Mapping[str, Any]) -> Packed:
    """A packed folder's config; LayoutError for what vLLM cannot serve, FormatError if not ours."""
    name, variant = config.get("layout"), config.get("variant")
    if name not in LAYOUTS:
        raise LayoutError(f"layout {name!r}, wanted one of {', '.join(LAYOUTS)}")
    if (version := config.get("layout_version")) != VERSION:
        raise LayoutError(f"{name} version {version}, wanted {VERSION}: convert it again")
    if variant != VARIANT:
        raise LayoutError(
            f"{name} in variant {variant!r} with {config.get('activations')} activations, wanted "
            f"{VARIANT!r} with 16-bit ones: convert it again, --for vllm and without --activations"
        )
    if (dtype := config.get("activation_dtype")) not in DTYPES:
        raise LayoutError(f"{name} for {dtype!r} activations, wanted {' or '.join(DTYPES)}")
    try:
        kind = LAYOUTS[name]
        return Packed(
            name,
            kind,
            dtype,
            tuple(config["tp"]),
            {s: _stack(s, size, kind, config["w13_order"]) for s, size in config["sizes"].items()},
            tuple(m for entry in config["carried"] for m in entry["modules"]),
            tuple(config["ignore"]),
            config["kv_cache"],
            config["source"],
            config["source_file"],
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"the config of a packed folder is not ours: {error!r}") from None


def _stack(name: str, size: Mapping[str, Any], kind: Kind, order: str | None) -> Stack:
    k = size["padded_k"]
    group = kind.group or (size["block"][1] if size["block"] else k)
    return Stack(
        name,
        size["experts"],
        tuple(size["members"]),
        tuple(size["n"]),
        size["k"],
        tuple(size["padded_n"]),
        k,
        k // group,
        name.endswith(".w13") and order == "interleaved",
        any("bias" in stored for stored in size["stored"]),
    )


tiles = marlin.serves
"""Whether the kernels have thread tiles for a matrix that one rank holds, of rows and columns."""


def require_part(packed: Packed, stack: Stack, rows: tuple[int, ...], columns: int) -> None:
    """Raise LayoutError unless a rank's part, so many rows of each member, is whole tiles.

    A part of the rows or columns of a padded stack is refused, and one block of 128 columns out of
    several: the kernel takes a lone block's scales for those of whole rows, in another order.
    """
    if (rows, columns) in ((stack.n, stack.k), (stack.padded_n, stack.padded_k)):
        return
    cut = columns != stack.padded_k and stack.scales > 1
    scales = stack.scales * columns // stack.padded_k if cut else stack.scales
    if (
        (stack.padded and not stack.experts)
        or any(n % 64 for n in rows)
        or not tiles(sum(rows), columns)
        or (cut and (stack.scales * columns % stack.padded_k or columns % 16))
        or (cut and packed.kind.group == 0 and scales == 1)
    ):
        raise LayoutError(
            f"{stack.name}: this rank's part is {list(rows)} x {columns} of {list(stack.padded_n)} "
            f"x {stack.padded_k}, no whole tiles; the folder serves tensor-parallel degrees "
            f"{list(packed.tp)}"
        )
