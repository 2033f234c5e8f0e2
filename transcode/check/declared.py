"""What a quantization config declares, in whatever of its places and forms it stands.

ModelOpt's own form is nested (`{"producer": ..., "quantization": {"quant_algo": ...}}`), the one in
config.json is flat; compressed-tensors names groups of targets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transcode.checkpoint import Checkpoint
from transcode.recognise import quantization


def bits_of(algorithm: str) -> int | None:
    """The weights' bits by ModelOpt's name of an algorithm; None where it does not tell."""
    name = algorithm.upper()
    if "FP4" in name:
        return 4
    return 8 if "FP8" in name else None


def strings(value: Any) -> tuple[str, ...]:
    """The strings of a list, whatever else it holds."""
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def table(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def whole(value: Any) -> int | None:
    """A JSON integer, or None."""
    return value if type(value) is int else None


@dataclass(frozen=True)
class Group:
    """A group of compressed-tensors: bits of its weights, and whether activations stay 16 bit."""

    bits: int | None
    weight_only: bool


@dataclass(frozen=True)
class Declared:
    """The config as it stands, and what it says.

    raw: the object.  where: its file, "" if there is none.  method: lower case, "modelopt" also for
    the nested form without one.  algorithm: as written, "" if none.  ignore: the exclusions.
    layers: MIXED_PRECISION's algorithms by module or container.  kv: the KV cache's, "" if none.
    """

    raw: Mapping[str, Any]
    where: str
    method: str
    algorithm: str
    ignore: tuple[str, ...]
    layers: Mapping[str, str]
    kv: str
    groups: tuple[tuple[tuple[str, ...], Group], ...] = field(repr=False)

    @staticmethod
    def of(checkpoint: Checkpoint) -> Declared:
        """What the checkpoint's configs declare."""
        raw, where = quantization(checkpoint)
        inner = table(raw.get("quantization"))
        producer = table(raw.get("producer")).get("name")
        method = str(raw.get("quant_method") or "").lower().replace("_tensors", "-tensors")
        if not method and (inner or producer == "modelopt"):
            method = "modelopt"
        algorithm = inner.get("quant_algo") or raw.get("quant_algo") or ""
        aside = table(table(checkpoint.hf_quant_config).get("quantization"))
        places = (inner, raw, aside if method.startswith("modelopt") else {})
        layers = table(next((v for p in places if (v := p.get("quantized_layers"))), None))
        ignore = inner.get("exclude_modules") if inner else None
        if ignore is None:
            ignore = raw.get("ignore", raw.get("exclude_modules"))
        if method == "fp8":
            ignore = raw.get("ignored_layers") or raw.get("modules_to_not_convert")
        elif method == "quark":
            ignore = raw.get("exclude")
        scheme = raw.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
        scheme = scheme or raw.get("kv_cache_quant_algo")
        if not scheme and raw.get("kv_cache_quant_config"):
            scheme = "FP8"  # Quark's
        if isinstance(scheme, dict):
            scheme = "FP8" if scheme.get("num_bits") == 8 else f"{scheme.get('num_bits')} bit"
        return Declared(
            raw=raw,
            where=where,
            method=method,
            algorithm=str(algorithm),
            ignore=strings(ignore),
            layers={
                name: str(table(entry).get("quant_algo") or "").upper()
                for name, entry in layers.items()
            },
            kv=str(scheme or "").upper(),
            groups=tuple(
                (
                    strings(table(group).get("targets")),
                    Group(
                        whole(table(table(group).get("weights")).get("num_bits")),
                        table(group).get("input_activations") is None,
                    ),
                )
                for group in table(raw.get("config_groups")).values()
            ),
        )

    @property
    def modelopt(self) -> bool:
        """Whether the runtimes read it as ModelOpt's."""
        return self.method.startswith("modelopt")

    @property
    def compressed(self) -> bool:
        """Whether the runtimes read it as compressed-tensors'."""
        return self.method == "compressed-tensors"

    @property
    def native(self) -> bool:
        """Whether it is FP8 as DeepSeek-V3 and its relatives write it: all linears but a list."""
        return self.method == "fp8" and "moe_quant_algo" not in self.raw

    @property
    def quark(self) -> bool:
        """Whether the runtimes read it as Quark's."""
        return self.method == "quark"

    @property
    def eight(self) -> bool:
        """Whether a linear that no list names is built with FP8 weights (native FP8, Quark)."""
        weight = table(table(self.raw.get("global_quant_config")).get("weight"))
        return self.native or (self.quark and str(weight.get("dtype")).startswith("fp8"))

    @property
    def mixed(self) -> bool:
        """Whether algorithms stand module by module, and what is not named is unquantised."""
        return self.modelopt and self.algorithm.upper() == "MIXED_PRECISION"

    @cached_property
    def _targets(self) -> dict[str, Group]:
        return {t: group for targets, group in reversed(self.groups) for t in targets}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Group]]:
        named = [(t[3:], g) for ts, g in self.groups for t in ts if t.startswith("re:")]
        return [(pattern, g) for text, g in named if (pattern := compiled(text))]

    def group_of(self, module: str) -> Group | None:
        """compressed-tensors' group for a linear: by name, by pattern, then by class."""
        if module in self._targets:
            return self._targets[module]
        for pattern, group in self._patterns:
            if pattern.match(module):
                return group
        return None if module.endswith("lm_head") else self._targets.get("Linear")

    @cached_property
    def _inside(self) -> dict[str, str]:
        """Every container of a named module, with the algorithm of the first."""
        found: dict[str, str] = {}
        for name, algorithm in self.layers.items():
            parent = name.rpartition(".")[0]
            while parent:
                found.setdefault(parent, algorithm)
                parent = parent.rpartition(".")[0]
        return found

    def algorithm_of(self, layer: str, *, experts: bool) -> str:
        """MIXED_PRECISION's algorithm for a layer as vLLM and SGLang look it up, "" if none."""
        swapped = layer.replace("model.language_model.", "language_model.model.", 1)
        swapped = swapped if swapped != layer else _unswapped(layer)
        for name in (layer, swapped):
            if found := self.layers.get(name) or self._inside.get(name):
                return found
        return self._inside.get(layer.rpartition(".")[0], "") if experts else ""

    def weight_only(self, module: str, *, experts: bool) -> bool | None:
        """Whether activations stay 16 bit; None where the config does not tell."""
        if self.compressed:
            group = self.group_of(module)
            return group.weight_only if group else None
        if not self.modelopt:
            return None
        if self.mixed:
            parent = module.rpartition(".")[0].rpartition(".")[0]
            algorithm = self.layers.get(module) or self.algorithm_of(
                parent if experts else module, experts=experts
            )
        else:
            algorithm = self.algorithm.upper()
        if algorithm == "NVFP4":
            return bool(self.groups) and all(g.weight_only for _, g in self.groups)
        return True if algorithm == "W4A16_NVFP4" else None


def compiled(pattern: str) -> re.Pattern[str] | None:
    """A regex, or None where it is none."""
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _unswapped(layer: str) -> str:
    return layer.replace("language_model.model.", "model.language_model.", 1)
