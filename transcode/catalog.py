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
def layouts() -> dict[str, Layout]:
    """Every layout that can be packed, by name."""
    found = _collect("transcode.kernels", transcode.kernels.__path__, "LAYOUTS")
    return {layout.name: layout for layout in found}


def layout(name: str) -> Layout:
    """The layout of this name; LayoutError with those that there are."""
    if name not in layouts():
        raise LayoutError(f"no layout {name!r}; there are {', '.join(layouts())}")
    return layouts()[name]
