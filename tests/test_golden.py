"""Whole conversions against the runtimes' own preparation code, word for word (tests/golden)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests import packed
from tests.answers import DTYPES, FOLDER, KINDS, Case, cases, load, modules, rows, same
from tests.convert import run
from transcode import catalog
from transcode import convert as line
from transcode.kernels import marlin
from transcode.spec import Layout

FUNCTIONS = ("moe", "moe_a8", "moe_inplace", "mxfp4_moe")
"""Kinds of MXFP4 whose answers start behind the method that makes the buffers wide."""

EXPERTS = "model.layers.0.mlp.experts"


def as_driven(case: Case) -> Layout:
    """The layout, with what is no whole method of the runtime as the function alone has it."""
    layout = case.layout
    if case.kind == "dense_a8":
        return replace(
            layout, dense="packed"
        )  # vLLM packs such linears, but has no kernel for them
    if "mxfp4" in layout.name and case.kind in FUNCTIONS:
        unfilled = replace(layout.scales, fill=0)
        return replace(layout, pad_experts=marlin.pad_experts, scales=unfilled)
    return layout


def convert(case: Case, folder: Path, *, apart: bool = False) -> Path:
    """The case as a packed folder; by the command line, but where the layout is another."""
    source, target = case.checkpoint(folder / "src", apart=apart), folder / "dst"
    layout, dtype = as_driven(case), DTYPES[case.dtype]
    if layout is case.layout:
        ran = run(
            "convert", "--to", layout.name, "--for", layout.runtime, "--dtype", dtype,
            "--activations", layout.activations, source, target,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        return target
    checkpoint, plan = line.prepare(source, line.Ask(layout, dtype))
    line.convert(source, target, checkpoint, plan, torch.device("cpu"), overwrite=False)
    return target


def stacks(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "transcode_report.json").read_text())[
        "stacks"
    ]
    return found


@pytest.mark.parametrize("case", [c for c in cases() if c.dense], ids=str)
def test_dense_linears_equal_the_runtimes(tmp_path: Path, case: Case) -> None:
    out = packed.tensors(convert(case, tmp_path))
    for tensor, value in case.wanted.items():
        parts = [out[f"{module}.{tensor}"] for module in modules(case)]
        if "global" in tensor:  # one for all linears; SGLang's has a dimension
            assert all(same(part, value.reshape(())) for part in parts), tensor
        else:
            assert same(torch.cat(parts, -1), value), tensor


@pytest.mark.parametrize("case", [c for c in cases() if not c.dense], ids=str)
def test_experts_equal_the_runtimes(tmp_path: Path, case: Case) -> None:
    target = convert(case, tmp_path)
    out = packed.tensors(target)
    lifts = {s["name"].rpartition(".")[2]: s["lifts"] for s in stacks(target)}
    for tensor, value in case.wanted.items():
        if "scale" in tensor and lifts[tensor.partition("_")[0]] == "per expert":
            assert "flush" in case.name  # vLLM's one lift flushes more: see the next test
            continue
        assert same(out[f"{EXPERTS}.{tensor}"], value), tensor


@pytest.mark.parametrize("case", [c for c in cases("moe") if "flush" in c.name], ids=str)
def test_one_lift_for_all_experts_equals_vllm(case: Case) -> None:
    layout, dtype, given = case.layout, DTYPES[case.dtype], case.given
    assert layout.factor
    for stack in ("w13", "w2"):
        scales, g = given[f"{stack}_weight_scale"], given[f"{stack}_weight_scale_2"]
        lift = layout.scales.lift(float(scales.float().max()), dtype)
        stored = torch.stack([layout.scales.pack(of_one, lift) for of_one in scales])
        factors = layout.factor.pack(g, torch.full_like(g, lift), dtype)
        assert same(stored, case.wanted[f"{stack}_weight_scale"])
        assert same(factors, case.wanted[f"{stack}_weight_scale_2"])


@pytest.mark.parametrize(
    "case", [c for c in cases() if c.dense and rows(c) != rows(c, apart=True)], ids=str
)
def test_members_that_are_padded_apart_hold_what_the_runtimes_hold(
    tmp_path: Path, case: Case
) -> None:
    layout, wanted = case.layout, case.wanted
    target = convert(case, tmp_path, apart=True)
    out, lift = packed.tensors(target), float(stacks(target)[0]["lift"])
    assert layout.bias
    unpack = {
        "weight": layout.codes.unpack,
        "weight_scale": lambda stored: layout.scales.unpack(stored, lift, stored.shape[::-1]),
        "bias": layout.bias.unpack,
    }
    sizes = rows(case, apart=True)
    for tensor in unpack.keys() & wanted.keys():
        members = [unpack[tensor](out[f"{m}.{tensor}"]) for m in modules(case, apart=True)]
        held = torch.cat([member[:n] for member, n in zip(members, sizes, strict=True)])
        assert same(held, unpack[tensor](wanted[tensor])[: sum(sizes)]), tensor


@pytest.mark.parametrize("file", KINDS)
def test_a_golden_file_says_where_it_is_from_and_all_of_it_is_compared(file: str) -> None:
    with safe_open(FOLDER / f"{file}.safetensors", "pt") as opened:
        history = json.loads(opened.metadata()["provenance"])
    kinds = {kind for of in KINDS[file].values() for kind in of.split()}
    assert kinds == history["functions"].keys() == {key.split(".")[0] for key in load(file)}
    for name in KINDS[file]:
        layout = catalog.variant(*name.split())
        assert layout.release in history[layout.runtime]
        assert history["sha256"][layout.release]
    assert "bit-equal in 12 of 12 cases" in history["repack"]


def test_every_layout_has_golden_words() -> None:
    variants = {f"{v.name} {v.variant}" for v in marlin.LAYOUTS}
    assert {name for kinds in KINDS.values() for name in kinds} == variants
