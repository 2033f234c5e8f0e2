"""All formats and layouts, by their files: `formats/x.py` has PRODUCERS, `kernels/x.py` LAYOUTS."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import transcode.formats
import transcode.kernels
from transcode.errors import LayoutError
from transcode.producer import Producer, Target
from transcode.quant import Encoding
from transcode.spec import Layout


def _collect(package: str, path: Iterable[str], constant: str) -> list[Any]:
    names = sorted(m.name for m in iter_modules(path) if not m.name.startswith("_"))
    return [entry for n in names for entry in getattr(import_module(f"{package}.{n}"), constant)]


@cache
def producers() -> tuple[Producer, ...]:
    """Every producer whose checkpoints can be read."""
    return tuple(_collect("transcode.formats", transcode.formats.__path__, "PRODUCERS"))


@cache
def producer(name: str) -> Producer:
    """The producer of this name."""
    return next(p for p in producers() if p.name == name)


@cache
def targets() -> dict[str, tuple[Producer, Target]]:
    """Every format that can be written, by the word for `--to`."""
    return {target.name: (p, target) for p in producers() for target in p.targets}


@cache
def layouts() -> dict[str, tuple[Layout, ...]]:
    """Every layout that can be packed, by name: its variants, the usual one first."""
    found: dict[str, tuple[Layout, ...]] = {}
    for one in _collect("transcode.kernels", transcode.kernels.__path__, "LAYOUTS"):
        found[one.name] = (*found.get(one.name, ()), one)
    return found


def layout(
    name: str, runtime: str | None = None, activations: str | None = None, word: str | None = None
) -> Layout:
    """The layout of this name, for a runtime, activations and variant if they are given;
    LayoutError with those that there are."""
    if name not in layouts():
        raise LayoutError(f"no layout {name!r}; there are {', '.join(layouts())}")
    for one in layouts()[name]:
        same = runtime in (None, one.runtime) and activations in (None, one.activations)
        if same and word in (None, one.variant):
            return one
    kind = f"variant {word!r} " if word else ""
    asked = " with ".join(filter(None, (f"for {runtime}" * bool(runtime), activations)))
    there = " and ".join(
        f"{one.variant!r} for {one.runtime} with {one.activations}" for one in layouts()[name]
    )
    raise LayoutError(f"{name} {kind}{asked}: there is no such variant, only {there} activations")


def layouts_for(encodings: Iterable[Encoding]) -> str:
    """The layouts that take any of these encodings, as the end of a sentence."""
    there = set(encodings)
    fitting = [name for name, (first, *_) in layouts().items() if there & set(first.encodings)]
    return f"; layouts for it: {', '.join(fitting)}" if fitting else ""


def variant(name: str, word: object) -> Layout:
    """The layout of this name and variant, as a packed folder's config names them."""
    found = next((one for one in layouts().get(name, ()) if one.variant == word), None)
    if found is None:
        raise LayoutError(f"no layout {name!r} in variant {word!r}")
    return found
