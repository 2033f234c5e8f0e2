"""Which module becomes what: rules by name, and what is done where no rule says anything."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transcode.errors import CheckpointError, FormatError
from transcode.groups import GROUPS, group, multiplied
from transcode.header import is_text, unique
from transcode.quant import Encoding

ENCODINGS = (
    Encoding.NVFP4, Encoding.MXFP4, Encoding.MXFP8, Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL,
    Encoding.FP8_TENSOR,
)  # fmt: skip
"""What a rule may ask for."""

KEEP = "keep"
SEARCHES = ("mse", "max")

REDUCED = ("experts", "mlp")
"""What is quantised further where no rule says anything: routed experts and dense MLPs."""


@dataclass(frozen=True)
class Rule:
    """`GLOB=ENCODING|keep`: a group's name or a glob of module names, and what those become."""

    pattern: str
    encoding: Encoding | None

    def __str__(self) -> str:
        return f"{self.pattern}={self.encoding or KEEP}"

    @staticmethod
    def parse(text: str) -> Rule:
        """A rule; ValueError for what is none."""
        pattern, equals, word = text.rpartition("=")
        if not equals or not pattern or not is_text(text) or word not in (KEEP, *ENCODINGS):
            words = ", ".join((*ENCODINGS, KEEP))
            raise ValueError(f"{text!r} is no rule such as 'experts=nvfp4'; encodings: {words}")
        return Rule(pattern, None if word == KEEP else Encoding(word))

    def matches(self, name: str, part: str) -> bool:
        """Whether a module in this group ("" for none) is meant.

        Embeddings, routers and others without a group are multiplied with by no runtime in any
        encoding, so a glob has to name their leaf; those inside a group (MTP, vision) are not meant
        by its name either.
        """
        if self.pattern in GROUPS:
            return self.pattern == part and (part == "embeddings" or multiplied(name))
        named = not set("*?[") & set(self.pattern.rpartition(".")[2])
        some = part not in ("", "embeddings") and multiplied(name)
        return fnmatchcase(name, self.pattern) and (named or some)


@dataclass(frozen=True)
class InputScales:
    """The activations' scales of what becomes W4A4 or static FP8.

    every: of all modules; None for none, 16-bit activations.
    named: by module name or glob, before `every`; the first that fits.
    per_expert: whether each expert keeps its own, instead of the largest of its projection.
    """

    every: float | None = 1.0
    named: Mapping[str, float] = field(default_factory=dict)
    per_expert: bool = False

    @staticmethod
    def given(value: float | Path | str | None, *, per_expert: bool) -> InputScales:
        """As the command line has it: a number for all, a file, "none", or nothing."""
        if value == "none":
            return InputScales(None, {}, per_expert)
        named = input_scales(value) if isinstance(value, Path) else {}
        return InputScales(1.0, {"*": value} if isinstance(value, float) else named, per_expert)

    def by_name(self, name: str) -> float | None:
        """What is given for a module."""
        if name in self.named:
            return self.named[name]
        return next((v for glob, v in self.named.items() if fnmatchcase(name, glob)), None)

    def asked(self) -> dict[str, Any]:
        """What was asked, as a Report keeps it."""
        return {"every": self.every, "named": dict(self.named), "per_expert": self.per_expert}


@dataclass(frozen=True)
class EncodingRecipe:
    """All that a user says of encodings.

    search: how block scales are chosen, "mse" or "max" (quantise.py).
    lossy: whether values may change where an encoding does.
    """

    rules: tuple[Rule, ...] = ()
    search: str = "mse"
    lossy: bool = False
    inputs: InputScales = InputScales()

    def rule(self, name: str, layers: int) -> Rule | None:
        """The first rule that means a module."""
        part = group(name, layers)
        return next((rule for rule in self.rules if rule.matches(name, part)), None)

    def asked(self) -> dict[str, Any]:
        """What was asked, as a Report keeps it."""
        return {
            "rules": [str(rule) for rule in self.rules],
            "scale_search": self.search,
            "lossy": self.lossy,
            "input_scale": self.inputs.asked(),
        }

    @staticmethod
    def of(asked: Mapping[str, Any]) -> EncodingRecipe:
        """`asked` backwards; FormatError for what it does not give."""
        try:
            inputs = asked["input_scale"]
            given = InputScales(inputs["every"], inputs["named"], inputs["per_expert"])
            rules = tuple(Rule.parse(text) for text in asked["rules"])
            made = EncodingRecipe(rules, asked["scale_search"], asked["lossy"], given)
            values = [*given.named.values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"unknown options of encodings: {error!r}") from None
        numbers = [*values, *([given.every] if given.every is not None else [])]
        sound = all(type(v) is float and valid(v) for v in numbers)
        flags = type(made.lossy) is bool and type(given.per_expert) is bool
        if not sound or not flags or made.search not in SEARCHES:
            raise FormatError("unknown options of encodings")
        return made


def idle(
    recipe: EncodingRecipe, linears: Mapping[str, bool], taking: Collection[str], layers: int
) -> Iterator[str]:
    """What was asked for no module: rules that mean none, input scales that none takes.

    linears: whether a module is a linear whose encoding can change, for all modules by name.
    taking: the modules whose input scale may be given.
    """
    for rule in recipe.rules:
        meant = [name for name in linears if rule.matches(name, group(name, layers))]
        if not meant:
            yield f"--rule {rule}: there is no such module"
        elif not any(linears[name] for name in meant):
            yield f"--rule {rule}: it means nothing whose encoding can change ({meant[0]})"
    for glob in recipe.inputs.named:
        if _names(glob, taking):
            continue
        if _names(glob, linears):
            yield f"--input-scale: no module of {glob} takes one (it keeps its own, or has none)"
        else:
            yield f"--input-scale: {glob} is no module here"


def _names(glob: str, names: Collection[str]) -> bool:
    return glob in names or any(fnmatchcase(name, glob) for name in names)


AS_THEY_ARE = EncodingRecipe()
"""No rules, and nothing may be lost."""


def valid(scale: float) -> bool:
    """Whether it and its reciprocal are normal in float32."""
    return 1e-37 < scale < 1e37


def rules_of(texts: Sequence[str], path: Path | None) -> tuple[Rule, ...]:
    """Rules as they are given, then those of a TOML file, `rules = ["experts=nvfp4", ...]`;
    FormatError for anything else."""
    told = _toml(path) if path else []
    try:
        return tuple(Rule.parse(text) for text in (*texts, *told))
    except ValueError as error:
        raise FormatError(str(error)) from None


def _toml(path: Path) -> list[str]:
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {error}") from None
    rules = told.pop("rules", None)
    if told or not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise FormatError(f"{path}: wanted only rules = ['experts=nvfp4', ...]")
    return rules


def input_scales(path: Path) -> dict[str, float]:
    """`{module or glob: scale}` from JSON, or from safetensors with `<module>.input_scale`, which
    other tools write; FormatError for anything else."""
    found = _json(path) if path.suffix == ".json" else _safetensors(path)
    for name, scale in found.items():
        if not is_text(name):
            raise FormatError(f"{path}: {name!a} is no Unicode text")
        if not isinstance(scale, float) or not valid(scale):
            raise FormatError(f"{path}: {name} is {scale!r}, wanted a positive number")
    if not found:
        raise FormatError(f"{path}: no input scales")
    return found


def _json(path: Path) -> dict[str, float]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(told, dict):
        raise FormatError(f"{path}: wanted an object of modules and their input scales")
    try:
        return {k: float(v) if type(v) is int else v for k, v in told.items()}
    except OverflowError as error:
        raise FormatError(f"{path}: {error}") from None


def _safetensors(path: Path) -> dict[str, float]:
    from safetensors import SafetensorError, safe_open

    found = dict[str, float]()
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not name.endswith(".input_scale"):
                    continue
                kind, shape = file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()
                if kind not in ("F64", "F32", "F16", "BF16") or shape not in ([], [1]):
                    raise FormatError(f"{path}: {name} is {kind} {shape}, wanted one float")
                found[name.removesuffix(".input_scale")] = float(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise FormatError(f"{path}: {error}") from None
    return found
