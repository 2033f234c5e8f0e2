"""Global scales and block scales of NVFP4 modules: what is invalid, and what Marlin loses.

What a runtime makes of them was read in vLLM's marlin_utils_fp4.py and modelopt.py and in SGLang's
files of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transcode import catalog
from transcode.check.findings import Finding, many
from transcode.checkpoint import Checkpoint, Reader
from transcode.config import activation_dtype
from transcode.errors import FormatError
from transcode.module import Module
from transcode.names import address
from transcode.settle_e4m3 import BYTES
from transcode.settled import over_codes
from transcode.stacks import experts_of, siblings
from transcode.unify import Scalars, read_scalars

NAN, NEGATIVE = torch.tensor([0x7F, 0xFF]), torch.arange(0x81, 0xFF)
"""E4M3 bytes."""

MOST = 512
"""Marlin's global scale is `g * 2^119` for bfloat16, which is infinite from here on."""


Group = tuple[Module, ...]


@dataclass(frozen=True)
class Values:
    """What was read. histograms: `[256]` int64 of each module's block scale bytes."""

    modules: Mapping[str, Module]
    scalars: Mapping[str, Scalars]
    invalid: Mapping[str, str]
    histograms: Mapping[str, Tensor] = field(repr=False)

    @staticmethod
    def read(modules: Sequence[Module], read: Reader) -> Values:
        """Read every global scale, input scale and block scale, in the order of the files."""
        scalars, invalid, histograms = dict[str, Scalars](), dict[str, str](), dict[str, Tensor]()
        for module in modules:
            try:
                scalars[module.name] = read_scalars(module, read)
            except FormatError as error:
                invalid[module.name] = str(error)
            raw = read.tensor(module.scales).view(torch.uint8)
            histograms[module.name] = torch.bincount(raw.flatten(), minlength=256)
        return Values({m.name: m for m in modules}, scalars, invalid, histograms)

    def zero(self, name: str) -> bool:
        """Whether the global scale says that the matrix is zero."""
        return name in self.scalars and self.scalars[name].zero

    def nan(self, name: str) -> int:
        """How many block scales are NaN."""
        return int(self.histograms[name][NAN].sum())


def of_values(
    checkpoint: Checkpoint, values: Values, groups: Sequence[Group], read: Reader
) -> Iterator[Finding]:
    """All findings of this file."""
    joined = {m.name: group for group in groups for m in group}
    yield from _globals(checkpoint, values)
    yield from _zeros(values, joined, read)
    yield from _blocks(values, read)
    yield from _flushes(checkpoint, values, groups)


def groups_of(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> list[Group]:
    """Modules that a runtime joins, in its order; those that stand alone are groups of one."""
    groups = [tuple(group) for group in siblings(checkpoint, modules, lambda m: True)]
    for experts in experts_of(modules).values():
        for parts in experts.values():
            first = tuple(parts[key] for key in ("gate", "up") if key in parts)
            groups += [first] if first else []
            groups += [(m,) for key, m in parts.items() if key not in ("gate", "up")]
    return groups


def _globals(checkpoint: Checkpoint, values: Values) -> Iterator[Finding]:
    if values.invalid:
        name, text = next(iter(values.invalid.items()))
        yield Finding(
            "WRONG", "global-scale-invalid", name,
            f"{text}; {many(len(values.invalid), 'global scale')} of this kind: the runtimes "
            "multiply with it unchecked",
        )  # fmt: skip
    large = [n for n, s in values.scalars.items() if float(s.factor) >= MOST]
    if large and activation_dtype(checkpoint) == "bfloat16":
        yield Finding(
            "WRONG", "global-scale-large", large[0],
            f"a factor of {float(values.scalars[large[0]].factor):g}; "
            f"{many(len(large), 'global scale')} from {MOST} on, which Marlin turns into inf",
        )  # fmt: skip


def _zeros(values: Values, joined: Mapping[str, Group], read: Reader) -> Iterator[Finding]:
    """Matrices that are zero because their global scale is."""
    zeros = [name for name in values.scalars if values.zero(name)]
    nan = [name for name in zeros if values.nan(name)]
    if nan:
        counts = [values.nan(name) for name in nan]
        yield Finding(
            "WRONG", "zero-matrix-nan", nan[0],
            f"its global scale is 0 and {many(counts[0], 'block scale')} NaN, ModelOpt's way to "
            f"write a matrix of zeros; {many(len(nan), 'matrix')} of this kind: NaN * 0 is NaN in "
            "ModelOpt's own decoder and wherever block scales are multiplied as E4M3; vLLM 0.33 "
            "refuses it in dense ModelOpt layers; transcode convert --to marlin-nvfp4 packs zeros, "
            "--to compressed-tensors writes them",
        )  # fmt: skip
    spoilt = [name for name in zeros if _spoils(values, joined[name], name, read)]
    if spoilt:
        yield Finding(
            "WRONG", "zero-member", spoilt[0],
            "its global scale is 0, those of its fusion group are not; "
            f"{many(len(spoilt), 'matrix')} of this kind: the runtimes give the whole group one "
            "scale, and not what the tensors mean",
        )  # fmt: skip
    if harmless := [name for name in zeros if name not in nan and name not in spoilt]:
        yield Finding(
            "WEAK", "global-scale-zero", harmless[0],
            f"its global scale is 0, so the matrix is; {many(len(harmless), 'matrix')} of this "
            "kind: whatever inverts the scale gets inf (TensorRT-LLM#16447); transcode convert "
            "--to marlin-nvfp4 packs zeros",
        )  # fmt: skip


def _spoils(values: Values, group: Group, name: str, read: Reader) -> bool:
    """Whether a zero member comes out as something else, or makes the others zero."""
    if all(values.zero(m.name) for m in group):
        return False
    module = values.modules[name]
    if address(name).expert is not None:
        if name == group[0].name:
            return False  # gate's zero serves for both, and silu(0) * up is zero
    elif module.written.name.startswith("compressed"):
        return True  # the largest divisor is inf, and all members become zero
    return bool((read.tensor(module.codes) & 0x77).any())


def _blocks(values: Values, read: Reader) -> Iterator[Finding]:
    """NaN and negative block scales, but for matrices that are zero anyhow."""
    live = [name for name in values.histograms if not values.zero(name)]
    dense, other, padding = list[str](), list[str](), list[str]()
    for name in live:
        if values.nan(name):
            module = values.modules[name]
            modelopt = module.written.name.startswith("modelopt")
            checked = modelopt and address(name).expert is None
            (dense if checked else other).append(name)
            nan = read.tensor(module.scales).float().isnan()
            if not over_codes(module, nan, read).any():
                padding.append(name)
    for names, runtimes in ((dense, ("sglang",)), (other, ("vllm", "sglang"))):
        if names:
            more = f", {len(set(names) & set(padding))} of them over zeros only" if padding else ""
            yield Finding(
                "WRONG", "block-scale-nan", names[0],
                f"{many(values.nan(names[0]), 'block scale')} NaN; {many(len(names), 'matrix')} of "
                f"this kind{more}: the outputs are NaN, or garbage in Marlin; transcode convert "
                "takes NaN over zeros for zeros and refuses any other",
                runtimes,
            )  # fmt: skip
    if dense:
        yield Finding(
            "FAILS", "block-scale-nan", dense[0],
            f"{many(values.nan(dense[0]), 'block scale')} NaN; {many(len(dense), 'matrix')} of "
            "this kind: vLLM 0.33 takes NaN in a dense ModelOpt layer for a scale that was never "
            "loaded and raises (0.25.1 serves NaN)",
            ("vllm",),
        )  # fmt: skip
    negative = {name: int(values.histograms[name][NEGATIVE].sum()) for name in live}
    if names := [name for name, count in negative.items() if count]:
        yield Finding(
            "WRONG", "block-scale-negative", names[0],
            f"{many(negative[names[0]], 'block scale')} negative; {many(len(names), 'matrix')} of "
            "this kind: Marlin stores zero for them; transcode convert refuses them",
        )  # fmt: skip


def _flushes(checkpoint: Checkpoint, values: Values, groups: Sequence[Group]) -> Iterator[Finding]:
    """Block scales too small for Marlin's bytes: one lift a layer in vLLM, none in SGLang."""
    dtype = activation_dtype(checkpoint)
    stacks: dict[str, list[str]] = {}
    for group in groups:
        where = address(group[0].name)
        name = group[0].name
        if where.expert is not None:
            name = f"{where.parent}.{where.projection == 'down'}"
        stacks.setdefault(name, []).extend(m.name for m in group)
    every = BYTES.to(torch.float8_e4m3fn)
    lost: dict[str, dict[str, int]] = {"vllm": {}, "sglang": {}}
    for names in stacks.values():
        live = [name for name in names if not values.zero(name)]
        total = sum((values.histograms[name] for name in live), torch.zeros(256, dtype=torch.int64))
        present = BYTES[(total > 0) & BYTES.isfinite()]
        largest = float(present.max()) if len(present) else 0.0
        for layout in catalog.layouts()["marlin-nvfp4"]:
            lift = layout.scales.lift(largest, dtype)
            small = layout.scales.flushed(every, lift, dtype)
            for name in live:
                if count := int(values.histograms[name][small].sum()):
                    lost[layout.runtime][name] = count
    for runtime, found in lost.items():
        if found:
            worst = max(found, key=lambda name: found[name])
            how = {
                "vllm": "vLLM stores zero for them",
                "sglang": "SGLang, which never lifts scales, decodes them to about 0",
            }
            yield Finding(
                "WEAK", "scales-flushed", worst,
                f"{many(sum(found.values()), 'block scale')} in {many(len(found), 'matrix')} too "
                f"small for Marlin with {dtype}, most of them here ({found[worst]}): "
                f"{how[runtime]}",
                (runtime,),
            )  # fmt: skip
