"""`--unify` in every form: what an MLP computes stays, whatever is written and whatever decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.build import Spec, build, edit
from tests.convert import run
from tests.packed import tensors
from tests.producers import KINDS
from tests.rewriting import Meaning, convert, meaning, proved, report

TARGETS = ("bf16", "canonical", "modelopt", "compressed-tensors", "quark")
SAYS = {"quark": ("modelopt-fp8", "ct-fp8", "quark-fp8")}
NAMES = (
    "modelopt-w4a8",
    "modelopt-fp8",
    "ct-fp8",
    "quark-fp8",
    "fp8-tensor",
    "modelopt-nvfp4",
    "ct-nvfp4",
)
ROWS = [(n, t) for n in NAMES for t in TARGETS if n in SAYS.get(t, NAMES)]
SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale")


@pytest.mark.parametrize("how", ["fold", "rescale"])
@pytest.mark.parametrize(("name", "target"), ROWS)
def test_what_an_mlp_computes_stays(tmp_path: Path, name: str, target: str, how: str) -> None:
    KINDS[name](tmp_path / "src")
    edit(tmp_path / "src", apart)
    drop = ["--drop-kv-scales"] * (target == "bf16")
    made = convert(target, tmp_path / "src", tmp_path / "dst", "--unify", how, *drop)
    before, after = meaning(tmp_path / "src"), meaning(tmp_path / "dst")
    ups = [m for m in before.weights if m.endswith("up_proj")]
    assert ups
    for up in ups:
        theirs, ours = computed(before, up), computed(after, up)
        error = float((ours - theirs).norm() / theirs.norm())
        rounded = target == "bf16" or how == "rescale" or name == "modelopt-w4a8"  # never folded
        assert error < (0.05 if rounded else 1e-6), (up, made)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("target", ["bf16", "canonical", "modelopt", "compressed-tensors"])
def test_a_fold_of_fp8_moves_into_an_nvfp4_down(
    tmp_path: Path, dialect: Literal["modelopt", "compressed-tensors"], target: str
) -> None:
    build(tmp_path / "src", Spec(dialect=dialect, gate_up="fp8", experts=2, layers=1))
    edit(tmp_path / "src", apart)
    convert(target, tmp_path / "src", tmp_path / "dst", "--unify", "fold")
    decisions = report(tmp_path / "dst")["unified"]
    assert [d["how"] for d in decisions if "up_proj" in d["stack"]] == ["fold"] * 2
    before, after = meaning(tmp_path / "src"), meaning(tmp_path / "dst")
    for up in (m for m in before.weights if m.endswith("up_proj")):
        theirs, ours = computed(before, up), computed(after, up)
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < (0.01 if target == "bf16" else 1e-6), up


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Up's scalar 3 times as large, one expert's 4 times; BF16 ones by a power of two."""
    found = dict(tensors)
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith("up_proj") and leaf in SCALES and value.numel() == 1:
            times = 3 + module.count("experts.1")
            if value.dtype != torch.float32:  # takes a factor only if that is a power of two
                value, times = tensors[name.replace("up_proj", "gate_proj")], 4
            found[name] = (value.float() * times).to(value.dtype)
    return found


def computed(said: Meaning, up: str) -> Tensor:
    """`down(silu(gate x) * up x)` in float64 for some x."""
    gate, down = (up.replace("up_proj", f"{part}_proj") for part in ("gate", "down"))
    w = {n: weight(said, n).double() for n in (gate, up, down)}
    x = torch.randn(16, w[up].shape[1], generator=torch.Generator().manual_seed(0)).double()
    return (silu(x @ w[gate].T) * (x @ w[up].T)) @ w[down].T


def weight(said: Meaning, module: str) -> Tensor:
    return said.weights[module] if module in said.weights else said.rest[f"{module}.weight"]


@pytest.mark.parametrize("target", ["bf16", "canonical", "compressed-tensors"])
def test_a_fold_into_a_down_of_zeros_is_proved(tmp_path: Path, target: str) -> None:
    build(tmp_path / "src", Spec(experts=2, layers=1, gate_up_ratio=3.0))
    edit(tmp_path / "src", lambda tensors: {
        n: torch.zeros_like(t) if n.endswith("1.down_proj.weight_scale_2") else t
        for n, t in tensors.items()
    })  # fmt: skip
    proved(target, tmp_path / "src", tmp_path / "dst", "--unify", "fold")


@pytest.mark.parametrize("target", ["bf16", "compressed-tensors"])
@pytest.mark.parametrize(
    "broken", ["rewritten.scaled", "unify_fp8.folded", "rewritten.requantised"]
)
def test_a_wrong_rule_does_not_prove_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, broken: str
) -> None:
    spec = Spec(gate_up="fp8", experts=2, layers=1)
    spec = spec if broken == "unify_fp8.folded" else replace(spec, down="fp8")
    build(tmp_path / "src", spec)
    edit(tmp_path / "src", apart)
    how = "rescale" if broken == "rewritten.requantised" else "fold"
    monkeypatch.setattr(f"transcode.{broken}", lambda value, *more: value)
    into = ("--to", target, "--unify", how, tmp_path / "src", tmp_path / "dst")
    assert run("convert", *into).code == 3
    with monkeypatch.context() as blind:
        blind.setattr("transcode.readback.unlike", lambda job, find: iter(()))
        assert run("convert", *into).code == 0
        assert run("verify", tmp_path / "src", tmp_path / "dst").code == 0
    ran = run("verify", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 3, ran.err
    assert "_proj: " in ran.out


def test_codes_that_are_rounded_again_are_not_told_as_equal(tmp_path: Path) -> None:
    build(
        tmp_path / "src", Spec(gate_up="fp8", down="fp8", experts=2, layers=1, gate_up_ratio=99.0)
    )
    convert("modelopt", tmp_path / "src", tmp_path / "dst", "--unify", "rescale")
    done, before, after = (
        report(tmp_path / "dst"),
        *map(tensors, (tmp_path / "src", tmp_path / "dst")),
    )
    gates = [n for n in before if n.endswith("gate_proj.weight")]
    fallen = [(before[n].float() != 0) & (after[n].float() == 0) for n in gates]
    count = sum(int(f.sum()) for f in fallen)
    assert count > 0
    assert done["rescaled"]["codes_to_zero"] == count
    assert done["proved"]["codes"] == "bit-equal but for those rounded again"
