"""The ignore list against the tensors, as each runtime reads the list.

| list               | vLLM                                   | SGLang                             |
|--------------------|----------------------------------------|------------------------------------|
| ModelOpt           | exact, or a plain substring, or a glob | whole names of the path, or a glob |
|                    |                                        | on the path or on one name of it   |
| compressed-tensors | exact, or `re:` from the start         | the same, or the end of the path   |
| native FP8         | exact; `experts` as in ModelOpt's      | whole names of the path            |
| Quark              | exact, or `re:`; here also a glob; of experts any that lies in them         |

Fused layers go by the name of the whole or by all members; some but not all is an error in both.
Sources: vllm/model_executor/layers/quantization/{modelopt,fp8,quark/utils,utils/quant_utils,
utils/config_utils}.py and sglang/srt/layers/quantization/{modelopt_quant,fp8,utils,
compressed_tensors/utils}.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property

from transcode.check.declared import Declared, compiled
from transcode.check.units import Unit
from transcode.module import Module
from transcode.names import address

PARTLY = "some but not all members of the fused layer are listed"
_PREFIX = re.compile(r"^(?:model\.|language_model\.)+")


@dataclass(frozen=True)
class Rules:
    """A list's entries in the forms in which they are matched."""

    entries: tuple[str, ...]

    @cached_property
    def bare(self) -> Rules:
        """The same list without the prefixes in which names of files and of models differ."""
        return Rules(tuple(e if e.startswith("re:") else bare(e) for e in self.entries))

    @cached_property
    def exact(self) -> frozenset[str]:
        """The entries."""
        return frozenset(self.entries)

    @cached_property
    def globs(self) -> list[tuple[str, re.Pattern[str]]]:
        """fnmatch, as vLLM applies it to ModelOpt's entries that are patterns."""
        return [(e, re.compile(translate(e))) for e in self.entries if set(e) & set("*?[")]

    @cached_property
    def stars(self) -> list[tuple[str, re.Pattern[str]]]:
        """SGLang's own: dots are dots, a star is anything, all else is a regex."""
        texts = ((e, e.replace(".", r"\.").replace("*", ".*")) for e in self.entries)
        return [(e, pattern) for e, text in texts if (pattern := compiled(text))]

    @cached_property
    def regexes(self) -> list[tuple[str, re.Pattern[str]]]:
        """compressed-tensors' `re:` entries."""
        texts = ((e, e[3:]) for e in self.entries if e.startswith("re:"))
        return [(e, pattern) for e, text in texts if (pattern := compiled(text))]


def bare(name: str) -> str:
    """A name or an entry without prefixes and suffixes that runtimes map away.

    Lists are written in the names of files or in those of transformers' models, and may end in a
    dot or, for wrapped layers, in `.linear` (sgl-project/sglang#24927, vllm-project/vllm#51910).
    """
    return _PREFIX.sub("", name).removesuffix(".").removesuffix(".linear")


def _bare(unit: Unit) -> Unit:
    modules = tuple(replace(m, name=bare(m.name)) for m in unit.modules)
    return replace(unit, name=bare(unit.name), modules=modules)


def excluded(declared: Declared, rules: Rules, unit: Unit, runtime: str) -> str:
    """Why a runtime builds a layer unquantised, "" if it does not; PARTLY where it raises."""
    if declared.quark:
        return _quark_excludes(rules, unit)
    dialect = "native" if declared.native else "modelopt" if declared.modelopt else "compressed"
    excludes = {
        ("modelopt", "vllm"): _vllm_excludes, ("modelopt", "sglang"): _sglang_excludes,
        ("compressed", "vllm"): _ct_vllm_excludes, ("compressed", "sglang"): _ct_sglang_excludes,
        ("native", "vllm"): _fp8_vllm_excludes, ("native", "sglang"): _fp8_sglang_excludes,
    }[dialect, runtime]  # fmt: skip
    entry = excludes(rules, unit)
    return entry or ("" if unit.bits else excludes(rules.bare, _bare(unit)))


def looked_up(unit: Unit) -> list[Module]:
    """The modules whose names decide: all of a fused layer, of experts the first's."""
    return [m for m in unit.modules if not unit.experts or address(m.name).expert == 0]


def _vllm_excludes(rules: Rules, unit: Unit) -> str:
    if unit.experts:
        entry = next((e for e in rules.entries if "experts" in e and unit.name in e), "")
        if entry:
            return f"vLLM takes {entry!r} for the whole layer of experts"
    elif unit.name in rules.exact:
        return f"{unit.name!r} is in the ignore list"
    elif hit := [m.name for m in unit.modules if m.name in rules.exact]:
        return PARTLY if len(hit) < len(unit.modules) else f"{hit[0]!r} is in the ignore list"
    if entry := next((e for e in rules.entries if e in unit.name), ""):
        return f"{entry!r} of the ignore list is a substring of its name, which suffices for vLLM"
    entry = next((e for e, pattern in rules.globs if pattern.match(unit.name)), "")
    return f"the ignore list's pattern {entry!r} matches it" if entry else ""


def _sglang_excludes(rules: Rules, unit: Unit) -> str:
    if not unit.experts:
        names = [m.name for m in unit.modules]
        hits = [next((e for e in rules.entries if _in_path(e, name)), "") for name in names]
        if any(hits):
            raises = unit.name.endswith((".qkv_proj", ".gate_up_proj")) and not all(hits)
            entry = next(filter(None, hits))
            return PARTLY if raises else f"{entry!r} of the ignore list is in its path"
    parts = (unit.name, unit.name.removeprefix("language_model."), *unit.name.split("."))
    for entry, pattern in rules.stars:
        if any(pattern.fullmatch(part) for part in parts):
            return f"the ignore list's {entry!r} matches it, or one part of its name"
    return ""


def _in_path(entry: str, name: str) -> bool:
    return f".{entry.rstrip('.')}." in f".{name}."


def _fp8_vllm_excludes(rules: Rules, unit: Unit) -> str:
    if unit.experts:
        entry = next((e for e in rules.entries if "experts" in e and unit.name in e), "")
        return f"vLLM takes {entry!r} for the whole layer of experts" if entry else ""
    if unit.name in rules.exact:
        return f"{unit.name!r} is in the ignore list"
    return _whole([m.name if m.name in rules.exact else "" for m in unit.modules])


def _fp8_sglang_excludes(rules: Rules, unit: Unit) -> str:
    names = [unit.name] if unit.experts else [m.name for m in unit.modules]
    return _whole([next((e for e in rules.entries if _in_path(e, n)), "") for n in names])


def _quark_excludes(rules: Rules, unit: Unit) -> str:
    own = next((e for e in rules.entries if e.startswith(f"{unit.name}.")), "")
    if unit.experts and own:
        return f"{own!r} of the list lies in it"
    names = [unit.name, *(m.name for m in looked_up(unit))]
    hits = [
        next((e for e, p in rules.globs if p.match(n)), "") or _ct_vllm(rules, n) for n in names
    ]
    if hits[0]:
        return f"{hits[0]!r} of the ignore list matches it"
    return _whole(hits[1:])


def _whole(hits: list[str]) -> str:
    """The entry that is meant for a fused layer, whose members must all be listed."""
    if not any(hits):
        return ""
    return f"{next(filter(None, hits))!r} of the ignore list matches it" if all(hits) else PARTLY


def _ct_vllm_excludes(rules: Rules, unit: Unit) -> str:
    return _ct_excludes(rules, unit, _ct_vllm, _ct_vllm)


def _ct_sglang_excludes(rules: Rules, unit: Unit) -> str:
    return _ct_excludes(rules, unit, _ct_exact, _ct_sglang)


def _ct_excludes(
    rules: Rules,
    unit: Unit,
    whole: Callable[[Rules, str], str],
    part: Callable[[Rules, str], str],
) -> str:
    """The fused layer's own name first, then all of its members'."""
    if entry := "" if unit.experts else whole(rules, unit.name):
        return f"{entry!r} of the ignore list matches {unit.name}"
    return _whole([part(rules, m.name) for m in looked_up(unit)])


def _ct_exact(rules: Rules, name: str) -> str:
    return name if name in rules.exact else ""


def _ct_vllm(rules: Rules, name: str) -> str:
    hit = next((e for e, pattern in rules.regexes if pattern.match(name)), "")
    return _ct_exact(rules, name) or hit


def _ct_sglang(rules: Rules, name: str) -> str:
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((end for end in ends if end in rules.exact), "") or _ct_vllm(rules, name)
