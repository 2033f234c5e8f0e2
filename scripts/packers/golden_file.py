"""A golden file: what goes into a runtime's packers and what comes out, and where it is from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.packers.tensors import Tensors, same
from scripts.packers.wheel import Runtime

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Case(Protocol):
    """A layer of a checkpoint."""

    @property
    def name(self) -> str:
        """What the keys of its tensors say."""

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, for activations of this dtype."""


@dataclass(frozen=True)
class Kind:
    """Cases that go through the same functions of a runtime.

    Kinds of one name are one kind, for which several runtimes have to give the same bytes.
    """

    name: str
    functions: str
    prepare: Callable[[Runtime, Any, Tensors, torch.dtype], Tensors]
    cases: Sequence[Case]
    dtypes: tuple[str, ...] = ("bf16",)
    by: str = ""
    """The runtime whose functions they are, where the file has answers of several."""
    releases: tuple[str, ...] = ()
    """The versions of the runtime that have them, where not all do."""

    def asks(self, runtime: Runtime) -> bool:
        """Whether this runtime has the functions."""
        has = not self.releases or runtime.wheel.version in self.releases
        return has and self.by in ("", runtime.name)

    def answers(self, runtime: Runtime) -> Tensors:
        """What goes into and comes out of every case, by key."""
        found: Tensors = {}
        for case in self.cases:
            by_dtype = {name: self._run(runtime, case, DTYPES[name]) for name in self.dtypes}
            for tensor, dtype, value in shared(by_dtype):
                found[f"{self.name}.{dtype}.{case.name}.{tensor}"] = value
        return found

    def _run(self, runtime: Runtime, case: Case, dtype: torch.dtype) -> Tensors:
        given = case.draw(dtype)
        made = self.prepare(runtime, case, given, dtype)
        return {
            **{f"in.{name}": tensor for name, tensor in given.items()},
            **{f"out.{name}": stored(tensor) for name, tensor in made.items()},
        }


def stored(tensor: Tensor) -> Tensor:
    """A tensor as the file holds it: contiguous, and E8M0 as uint8."""
    e8m0 = tensor.dtype == torch.float8_e8m0fnu
    return (tensor.view(torch.uint8) if e8m0 else tensor).contiguous()


def shared(by_dtype: dict[str, Tensors]) -> Iterator[tuple[str, str, Tensor]]:
    """Name, dtype and value of every tensor; `any` stands for several dtypes that agree."""
    first, *others = by_dtype.values()
    for name, value in first.items():
        if others and all(same(value, other[name]) for other in others):
            yield name, "any", value
        else:
            yield from ((name, dtype, tensors[name]) for dtype, tensors in by_dtype.items())


def of_kinds(keys: Iterable[str], others: Iterable[str]) -> set[str]:
    """The keys whose kind occurs among the others' kinds."""
    kinds = {key.partition(".")[0] for key in others}
    return {key for key in keys if key.partition(".")[0] in kinds}


@dataclass(frozen=True)
class GoldenFile:
    """A file of tests/golden that can be made again."""

    name: str
    inputs: str
    """The convention of the checkpoint's tensors, in words."""
    kinds: tuple[Kind, ...]
    driven: tuple[str, ...]
    """The modules of the runtime whose code made the answers."""

    def answers(self, runtime: Runtime) -> Tensors:
        """Every tensor of the file, as one version of the runtime makes it."""
        kinds = [kind for kind in self.kinds if kind.asks(runtime)]
        return {key: value for kind in kinds for key, value in kind.answers(runtime).items()}

    def make(self, versions: Sequence[Runtime]) -> Tensors:
        """Every tensor of the file; stop unless all versions give the same bytes."""
        expected: Tensors = {}
        for runtime in versions:
            found = self.answers(runtime)
            before, again = of_kinds(expected, found), of_kinds(found, expected)
            if again != before:
                raise SystemExit(f"{runtime} shares other tensors among the dtypes: {self.name}")
            if wrong := [key for key in before if not same(expected[key], found[key])]:
                raise SystemExit(f"{runtime} gives other bytes: {self.name}: {', '.join(wrong)}")
            expected |= found
        return expected

    def keys(self) -> str:
        """How the keys are put together."""
        kinds = "|".join(self.functions())
        dtypes = [name for name in DTYPES if any(name in kind.dtypes for kind in self.kinds)]
        if len(dtypes) == 1:
            return f"{{{kinds}}}.{dtypes[0]}.{{case}}.{{in|out}}.{{tensor}}"
        return (
            f"{{{kinds}}}.{{{'|'.join(dtypes)}|any}}.{{case}}.{{in|out}}.{{tensor}}; "
            "any: the same for both dtypes, stored once"
        )

    def functions(self) -> dict[str, str]:
        """The functions of each kind, of all runtimes that answered it."""
        found: dict[str, list[str]] = {}
        for kind in self.kinds:
            only = f" ({', '.join(kind.releases)} only)" if kind.releases else ""
            found.setdefault(kind.name, []).append(kind.functions + only)
        return {name: " and ".join(of_one) for name, of_one in found.items()}

    def provenance(self, versions: Sequence[Runtime], repack: str) -> dict[str, object]:
        """Where the bytes come from, in words; `repack` tells of Marlin's operator's stand-in."""
        by_name: dict[str, list[str]] = {}
        for runtime in versions:
            by_name.setdefault(runtime.name, []).append(runtime.wheel.version)
        names = " and ".join(f"{name}'s" for name in by_name)
        several = any(len(of_one) > 1 for of_one in by_name.values())
        beside = {str(of): of.digests() for runtime in versions for of in runtime.beside}
        those = " that have the functions" if any(k.releases for k in self.kinds) else ""
        agreement = {"agreement": f"all these versions{those} gave the same bytes"}
        return {
            "made_by": f"scripts/golden.py, on the CPU, from the Python files of {names} wheels",
            **{name.lower(): of_one for name, of_one in by_name.items()},
            **(agreement if several else {}),
            "torch": torch.__version__,
            "functions": self.functions(),
            **({"repack": repack} if repack else {}),
            "keys": self.keys(),
            "in": self.inputs,
            "sha256": {
                runtime.wheel.version: {
                    module: runtime.wheel.digest(module)
                    for module in self.driven
                    if module in runtime.modules
                }
                for runtime in versions
            },
            **({"beside": beside} if beside else {}),
        }

    def write(self, folder: Path, versions: Sequence[Runtime], repack: str = "") -> str:
        """Make the file in a folder; say how large it became."""
        tensors = self.make(versions)
        path = folder / f"{self.name}.safetensors"
        # One key only: safetensors writes several in an order of its own, anew each time.
        history = self.provenance(versions, repack)
        save_file(tensors, path, {"provenance": json.dumps(history, indent=1)})
        return f"{path}: {len(tensors)} tensors, {path.stat().st_size} bytes"
