"""Names of modules as configs list them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")


JOINED = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj", "in_proj_qkvz", "in_proj_ba")
"""What runtimes call linears that they join."""


MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

MEMBERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def with_containers(names: Iterable[str]) -> list[str]:
    """Full names; containers as `x.experts` and `x.experts.*`, of which each runtime wants one."""
    return [n for name in names for n in ((name, f"{name}.*") if _container(name) else (name,))]


def _container(name: str) -> bool:
    return name.endswith(".experts")


def without_traps(entries: Iterable[str], quantised: Iterable[str]) -> list[str]:
    """Entries that a search for substrings finds in no quantised module: `x.gate` as `x.gat[e]`,
    which fnmatch and regexes take for the same, where `x.gate_up_proj` is quantised. SGLang takes
    an entry that ends in one of MLA's leaves for that leaf of all layers: it becomes `x.*`."""
    names = set(quantised)
    leaves = {name.rpartition(".")[2] for name in names} & set(MLA)
    parents = {name.rpartition(".")[0] for name in names}
    names |= {f"{parent}.{leaf}" for parent in parents for leaf in JOINED}
    begun = {name[:i] for name in names for i in range(name.rfind(".") + 2, len(name))}
    kept = dict[str, None]()
    for entry in entries:
        parent, _, leaf = entry.rpartition(".")
        if leaf in leaves and parent not in parents:
            entry = f"{parent}.*"
        kept[f"{entry[:-1]}[{entry[-1]}]" if entry in begun else entry] = None
    return list(kept)


def patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """`re:` patterns that match all of `names` and none of `others`; names where one would.

    Numbers become `\\d+`, and what stands before `layers.` any prefix, since runtimes rename it;
    experts go by their container, whatever their projections are called.
    """
    found = dict[str, list[str]]()
    for name in (*names, *_joined(names)):
        found.setdefault(_pattern(name), []).append(name)
    rest = "\n".join((*others, *_joined(others)))
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
        if not _container(name):
            found.append(name)
            continue
        wide = rf"{_generalised(name, numbers=False)}\..*"
        trap = re.search(f"^{wide}", rest, re.MULTILINE)
        found.append(f"re:{re.escape(name)}\\..*" if trap else f"re:{wide}")
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
