"""Scales and codes at the edge of what a layout holds: stored, or refused before any output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import packed
from tests.build import Spec, Tensors, edit
from tests.convert import run
from tests.layout_sources import EXPERTS, FP8, MOE, MX, MXFP8, UP, Q, at, put, source
from tests.producers import Kind
from tests.rewriting import convert, one_thread, proved, refused, report

__all__ = ["one_thread"]


@pytest.mark.parametrize("name", [f"{Q}.weight_scale", f"{UP}.weight_scale"])
@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (256.0, "bfloat16", "has no finite bfloat16"),
        (255.9, "bfloat16", "has no finite bfloat16"),  # it is 256 once rounded
        (256.0, "float16", "has no finite float16"),
        (1e6, "float16", "has no finite float16"),
        (float("nan"), "bfloat16", "has nan, wanted finite scales >= 0"),
        (float("inf"), "bfloat16", "has inf, wanted finite scales >= 0"),
        (-0.5, "float16", "has -0.5, wanted finite scales >= 0"),
    ],
)
def test_a_scale_of_fp8_that_cannot_be_stored_is_refused(
    tmp_path: Path, name: str, value: float, dtype: str, words: str
) -> None:
    src = source(tmp_path / "src", FP8, **{at(name): put(value)})
    error = refused("marlin-fp8", src, tmp_path / "dst", "--dtype", dtype)
    assert name in error
    assert words in error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_largest_scale_of_fp8_is_stored(tmp_path: Path, dtype: str) -> None:
    src = source(tmp_path / "src", FP8, **{at(f"{UP}.weight_scale"): put(255.0)})
    found = packed.weights(proved("marlin-fp8", src, tmp_path / "dst", "--dtype", dtype))
    codes = packed.tensors(src)[f"{UP}.weight"].float()
    row = len(codes) // 2
    assert torch.equal(found[UP][row], codes[row] * 255)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(
    ("layout", "spec", "name"),
    [
        ("marlin-fp8", FP8, f"{Q}.weight"),
        ("marlin-fp8", FP8, f"{UP}.weight"),
        ("marlin-mxfp8", MXFP8, f"{UP}.weight"),
    ],
    ids=["fp8", "fp8 experts", "mxfp8"],
)
def test_codes_that_are_nan_are_refused(
    tmp_path: Path, layout: str, spec: Spec | Kind, name: str, code: int
) -> None:
    src = source(tmp_path / "src", spec, **{at(name): put(code)})
    assert f"{name} F8_E4M3" in refused(layout, src, tmp_path / "dst")


@pytest.mark.parametrize(("layout", "spec"), [("marlin-mxfp4", MX), ("marlin-mxfp8", MXFP8)])
def test_a_nan_scale_is_refused_over_codes_and_zero_over_zeros(
    tmp_path: Path, layout: str, spec: Spec | Kind
) -> None:
    scale = {at(f"{UP}.weight_scale"): put(255)}
    error = refused(layout, source(tmp_path / "src", spec, **scale), tmp_path / "dst")
    assert f"{UP}: weight_scale is NaN in row" in error
    assert "over codes that are not zero" in error

    def signed_zeros(t: Tensor) -> Tensor:
        return torch.full_like(t.view(torch.uint8), 0x88 if layout == "marlin-mxfp4" else 0x80)

    zeros = {at(f"{UP}.weight"): lambda t: signed_zeros(t).view(t.dtype)}
    src = source(tmp_path / "zeros", spec, **scale, **zeros)
    target = proved(layout, src, tmp_path / "packed")
    stacks = {s["name"]: s["nan_over_zeros"] for s in report(target)["stacks"]}
    assert stacks[f"{EXPERTS}.w13"] == sum(stacks.values()) == 1
    back = packed.tensors(convert("modelopt", target, tmp_path / "back"))
    want = packed.tensors(src)[f"{UP}.weight_scale"]
    assert torch.equal(back[f"{UP}.weight_scale"], torch.where(want == 255, 0, want))
    assert run("convert", "--to", layout, "--exact", src, tmp_path / "exact").code == 0


def test_fp8_activations_have_room_for_bytes_up_to_249(tmp_path: Path) -> None:
    options = ("--activations", "fp8")
    name = f"{UP}.weight_scale"
    src = source(tmp_path / "src", MX, **{at(name): put(250)})
    error = refused("marlin-mxfp4", src, tmp_path / "dst", *options)
    assert f"{UP}: block scale 2^123 is too large for marlin-mxfp4" in error
    proved("marlin-mxfp4", src, tmp_path / "sixteen")
    src = source(tmp_path / "fits", MX, **{at(name): put(249)})
    target = proved("marlin-mxfp4", src, tmp_path / "packed", *options)
    assert packed.tensors(target)[f"{EXPERTS}.w13_weight_scale"].max() == 255


def test_exact_refuses_scales_that_round(tmp_path: Path) -> None:
    src = source(tmp_path / "src", FP8)
    error = refused("marlin-fp8", src, tmp_path / "dst", "--exact", code=4)
    assert ".weight_scale" in error
    assert "not exact in bfloat16" in error

    def power(tensors: Tensors) -> Tensors:
        return {
            n: torch.exp2(t.log2().round()) if n.endswith("weight_scale") else t
            for n, t in tensors.items()
        }

    edit(src, power)
    target = proved("marlin-fp8", src, tmp_path / "packed", "--exact")
    assert {s["rounded_scales"] for s in report(target)["stacks"]} == {0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_refuses_sglangs_global_scales_that_round(tmp_path: Path, dtype: str) -> None:
    options = ("--for", "sglang", "--exact", "--dtype", dtype)
    src = source(tmp_path / "src", MOE)
    error = refused("marlin-nvfp4", src, tmp_path / "dst", *options, code=4)
    assert f"{EXPERTS}.w13: its global scales are not exact in {dtype}" in error

    def power(tensors: Tensors) -> Tensors:
        return {n: t * 0 + 2.0**-9 if n.endswith("scale_2") else t for n, t in tensors.items()}

    edit(src, power)
    proved("marlin-nvfp4", src, tmp_path / "packed", *options)


def test_a_global_scale_that_is_zero_in_float16_is_refused(tmp_path: Path) -> None:
    tiny = {at(f"{EXPERTS}.0.down_proj.weight_scale_2"): lambda t: t * 0 + 1e-9}
    src = source(tmp_path / "src", MOE, **tiny)
    options = ("--for", "sglang", "--dtype", "float16")
    error = refused("marlin-nvfp4", src, tmp_path / "dst", *options)
    assert f"{EXPERTS}.w2: global scale 1e-09 has no finite normal float16" in error
