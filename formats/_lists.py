"""Names of modules as configs list them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")


JOINED = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj", "in_proj_qkvz", "in_proj_ba")
"""What runtimes call linears that they join."""


MEMBERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def with_containers(names: Iterable[str]) -> list[str]:
    """Full names; containers as `x.experts` and `x.experts.*`, of which each runtime wants one."""
    return [n for name in names for n in ((name, f"{name}.*") if _container(name) else (name,))]


def _container(name: str) -> bool:
    return name.endswith(".experts")


def without_traps(entries: Iterable[str], quantised: Iterable[str]) -> list[str]:
    """Entries that a search for substrings finds in no quantised module: `x.gate` as `x.gat[e]`,
    which fnmatch and regexes take for the same, where `x.gate_up_proj` is quantised."""
    names = set(quantised)
    parents = {name.rpartition(".")[0] for name in names}
    names |= {f"{parent}.{leaf}" for parent in parents for leaf in JOINED}
    begun = {name[:i] for name in names for i in range(name.rfind(".") + 2, len(name))}
    return [f"{e[:-1]}[{e[-1]}]" if e in begun else e for e in entries]


def patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """`re:` patterns that match all of `names` and none of `others`; names where one would.

    Numbers become `\\d+`, and what stands before `layers.` any prefix, since runtimes rename it;
    experts go by their container, whatever their projections are called.
    """
    found = dict[str, list[str]]()
    for name in (*names, *_joined(names)):
        found.setdefault(_pattern(name), []).append(name)
    rest = "\n".join(others)
    kept = list[str]()
    for pattern, fitting in found.items():
        trap = re.search(f"^{pattern}", rest, re.MULTILINE)
        kept += fitting if trap else [f"re:{pattern}"]
    return kept


def _joined(names: Iterable[str]) -> Iterator[str]:
    """What runtimes call dense linears that they join, which SGLang looks up by that name."""
    linears = {name: None for name in names if not _EXPERT.fullmatch(name)}
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        for whole, members in MEMBERS.items():
            if leaf == members[0] and linears.keys() >= {f"{parent}.{m}" for m in members}:
                yield f"{parent}.{whole}"


def ignored(names: Iterable[str], quantised: Sequence[str]) -> list[str]:
    """Full names; a container as a pattern for all that lies in it, and for nothing quantised."""
    rest = "\n".join(quantised)
    found = list[str]()
    for name in names:
        wide = rf"{_generalised(name, numbers=False)}\..*"
        trap = re.search(f"^{wide}", rest, re.MULTILINE)
        container = f"re:{re.escape(name)}\\..*" if trap else f"re:{wide}"
        found.append(container if _container(name) else name)
    return found


def _pattern(name: str) -> str:
    if match := _EXPERT.fullmatch(name):
        return _generalised(match[1]) + r"\.\d+\..+$"
    return _generalised(name) + "$"


def _generalised(name: str, *, numbers: bool = True) -> str:
    _, layers, tail = name.partition("layers.")
    text = re.escape(tail if layers else name)
    if numbers:
        text = re.sub(r"(?<![A-Za-z_0-9])\d+(?![A-Za-z_0-9])", r"\\d+", text)
    return (r".*layers\." if layers else "") + text
