"""What every row of the table of layouts takes of the built and the real checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.producers import KINDS, Kind
from tests.rewriting import Meaning, convert, meaning
from tests.test_rewrite import BACK, FUSED, HOLDS, OWN, READ_ONLY, SOUND, first

DATA = Path(__file__).parent / "data"
HALF = ("--dtype", "float16")
VARIANTS = {
    "nvfp4": ("marlin-nvfp4",),
    "nvfp4-half": ("marlin-nvfp4", *HALF),
    "nvfp4-sglang": ("marlin-nvfp4", "--for", "sglang"),
    "nvfp4-sglang-half": ("marlin-nvfp4", "--for", "sglang", *HALF),
    "mxfp4": ("marlin-mxfp4",),
    "mxfp4-sglang": ("marlin-mxfp4", "--for", "sglang"),
    "mxfp4-a8": ("marlin-mxfp4", "--activations", "fp8"),
    "fp8": ("marlin-fp8",),
    "fp8-half": ("marlin-fp8", *HALF),
    "mxfp8": ("marlin-mxfp8",),
}
"""What follows `--to`."""

TAKES = {
    "nvfp4": {"nvfp4"}, "mxfp4": {"mxfp4", "mxfp4+input"}, "mxfp8": {"mxfp8"},
    "fp8": {"tensor", "channel", "channel+none", "block"},
}  # fmt: skip
EXPERTS_ONLY = ("mxfp4-sglang", "mxfp4-a8")
DENSE = ("modelopt-mxfp4", "ct-mxfp4", "quark-mxfp4", "quark-mxfp4-llama", "ct_mxfp4_qwen3moe",
         "quark_mxfp4_llama")  # fmt: skip
"""MXFP4 in single linears too."""

REAL = {
    "ct_fp8dynamic_qwen3moe": "channel", "ct_mxfp4_qwen3moe": "mxfp4",
    "deepgemm_fp4fp8_dsv4": "mxfp4 block", "hf_fp8ops_qwen3moe": "block",
    "hf_mxfp4_gptoss": "mxfp4", "modelopt_fp8_llama": "tensor",
    "modelopt_fp8block_qwen3moe": "block", "modelopt_mxfp8_qwen3moe": "mxfp8",
    "modelopt_mixed*": "nvfp4 tensor", "quark_mxfp4_llama": "mxfp4", "*nvfp4*": "nvfp4",
}  # fmt: skip
"""What each real checkpoint holds, the first pattern that fits."""

REAL_NAMES = sorted(p.name for p in DATA.iterdir())
ODD_ORDER = "modelopt-nvfp4-turned"


def holds(name: str) -> set[str]:
    return {*(first(HOLDS, name) if name in KINDS else first(REAL, name)).split()}


def takes(variant: str, name: str) -> bool:
    """Whether it packs all that it should of a checkpoint."""
    wanted = TAKES[variant.partition("-")[0]]
    return bool(wanted & holds(name)) and not (variant in EXPERTS_ONLY and name in DENSE)


FEW = {
    "nvfp4-half": ("*qwen3moe_sharded", "modelopt_mixed*", "*llama4"),
    "nvfp4-sglang-half": ("ct_nvfp4_llama", "*zeros"),
    "nvfp4-sglang": ("*llama4", "*gptoss", "*mixed*", "v4-nvfp4", "*-kv", "*nvfp4_llama",
                     "*sharded", "*zeros"),
    "fp8-half": ("modelopt-fp8", "*-channel-f32", "*-ragged", "*-naive", "*dynamic*",
                 "hf_fp8ops*", "*dsv4", "*mixed*"),
}  # fmt: skip
"""Fewer checkpoints for what differs in the dtype or in SGLang's scalars alone."""


def some(variant: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FEW.get(variant, "*"))


ROWS = [
    (name, variant)
    for variant in VARIANTS
    for name in (*SOUND, *REAL_NAMES)
    if takes(variant, name) and some(variant, name)
]


def fitting(name: str) -> Kind:
    """The kind, with whole blocks along the hidden size where its experts are FP8 in blocks."""
    kind = KINDS[name]
    if "block" in holds(name) and kind.spec.hidden % 128:
        return replace(kind, spec=replace(kind.spec, hidden=384))
    return kind


def own(name: str) -> tuple[str, ...]:
    """The words that rewrite it in its own form; none where that is only read."""
    if name in KINDS:
        form = "" if name in READ_ONLY else first(BACK, name) or "deepseek-fp8"
        stacked = name in FUSED
    else:
        form, stacked = first(OWN, name), name.startswith("pair") or "llama4" in name
    return (form, *["--fused"] * stacked) if form else ()


def ways(name: str) -> Iterator[tuple[str, ...]]:
    """The words of every form in which it is compared: its own, and canonical."""
    if words := own(name):
        yield words
    if "int4" not in holds(name):
        yield ("canonical",)


Place = Callable[[str], Path]
Form = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder of a built or real checkpoint."""

    @cache
    def made(name: str) -> Path:
        if name not in KINDS:
            return DATA / name
        path = tmp_path_factory.mktemp("layouts") / name
        fitting(name)(path)
        return path

    return made


@pytest.fixture(scope="session")
def direct(source: Place, tmp_path_factory: pytest.TempPathFactory) -> Form:
    """A checkpoint in another form, rewritten without being packed."""

    @cache
    def made(name: str, form: str) -> Path:
        into = tmp_path_factory.mktemp("direct") / form
        options = own(name)[1:] if form != "canonical" else ()
        return convert(form, source(name), into, *options)

    return made


@cache
def truth(path: Path, variant: str) -> Meaning:
    """What a checkpoint says, with the scales that the layout has in the activations' dtype."""
    dtype = torch.float16 if variant.endswith("half") else torch.bfloat16
    return meaning(path, dtype, dtype if "sglang" in variant else None)
