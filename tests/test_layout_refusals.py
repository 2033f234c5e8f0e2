"""What no variant of a layout packs is refused in one line that names it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import packed, producers
from tests.build import Spec, Tensors, edit, edit_config
from tests.convert import run
from tests.layout_sources import EXPERTS, FP8, MOE, MX, MXFP8, UP, Q, source
from tests.producers import Kind
from tests.rewriting import one_thread, proved, refused

__all__ = ["one_thread"]


@pytest.mark.parametrize(("layout", "spec"), [("marlin-mxfp4", MX), ("marlin-mxfp8", MXFP8)])
def test_e8m0_is_for_bfloat16_only(tmp_path: Path, layout: str, spec: Spec | Kind) -> None:
    src = source(tmp_path / "src", spec)
    error = refused(layout, src, tmp_path / "dst", "--dtype", "float16")
    assert f"--dtype float16: {layout} has kernels for bfloat16" in error
    edit_config(src, lambda c: c | {"dtype": "float16"})
    config = packed.config(proved(layout, src, tmp_path / "packed"))
    assert config["activation_dtype"] == "bfloat16"


BLOCKS64 = replace(producers.FP8["f32"], block=(128, 64))
TALL64 = replace(producers.FP8["f32"], block=(64, 128))


def blocks(scheme: producers.Scheme) -> Kind:
    says = producers.DEEPSEEK | {"weight_block_size": list(scheme.block)}
    spec = replace(producers.LLAMA, hidden=128, intermediate=128, layers=1)
    config = partial(producers.fixed, made=says, listed="")
    return Kind(dict.fromkeys("ad", scheme), config, spec)


def test_blocks_of_128_columns_are_packed_however_tall_and_no_others(tmp_path: Path) -> None:
    error = refused("marlin-fp8", source(tmp_path / "a", blocks(BLOCKS64)), tmp_path / "dst")
    assert "model.layers.0.mlp.down_proj: 64 columns share a scale" in error
    assert "marlin-fp8 wants 128" in error
    made = blocks(TALL64)
    truth = made(tmp_path / "b").truth
    found = packed.weights(proved("marlin-fp8", tmp_path / "b", tmp_path / "packed"))
    close = {m: (w - truth[m]).abs() <= 2.0**-8 * truth[m].abs() for m, w in found.items()}
    assert found.keys() == truth.keys()
    assert all(bool(c.all()) for c in close.values())


@pytest.mark.parametrize("options", [("--activations", "fp8"), ("--for", "sglang")])
def test_kernels_for_experts_only_refuse_single_linears(
    tmp_path: Path, options: tuple[str, str]
) -> None:
    src = source(tmp_path / "src", replace(MX, attention="mxfp4"))
    error = refused("marlin-mxfp4", src, tmp_path / "dst", *options)
    assert "model.layers.0.self_attn.o_proj: " in error
    assert "experts only in marlin-mxfp4" in error


def test_members_of_a_group_must_be_of_one_granularity(tmp_path: Path) -> None:
    src = source(tmp_path / "src", FP8)
    k = "model.layers.0.self_attn.k_proj"

    def rows(tensors: Tensors) -> Tensors:
        count = len(tensors[f"{k}.weight"])
        return tensors | {f"{k}.weight_scale": tensors[f"{k}.weight_scale"].expand(count).clone()}

    edit(src, rows)
    error = refused("marlin-fp8", src, tmp_path / "dst")
    assert f"{k} is fp8-channel" in error
    assert f"{Q} is fp8-tensor" in error


def test_experts_must_be_of_one_granularity(tmp_path: Path) -> None:
    src = source(tmp_path / "src", FP8)
    one = {f"{UP}.weight_scale": torch.tensor(0.5)}
    edit(src, lambda tensors: tensors | one)
    assert f"{UP} is fp8-tensor" in refused("marlin-fp8", src, tmp_path / "dst")


@pytest.mark.parametrize(
    ("layout", "spec", "words"),
    [
        ("marlin-mxfp8", replace(MXFP8, spec=replace(MXFP8.spec, hidden=96)), "multiple of 64"),
        ("marlin-fp8", replace(FP8, hidden=96), "multiple of 64"),
        ("marlin-fp8", replace(FP8, hidden=192, gate_up="fp8_block", down="fp8_block"),
         "multiple of 128"),
        ("marlin-nvfp4", replace(MOE, hidden=96), "multiple of 64"),
    ],
    ids=["mxfp8", "fp8", "fp8 blocks", "nvfp4"],
)  # fmt: skip
def test_a_hidden_size_of_experts_that_does_not_fit_is_refused(
    tmp_path: Path, layout: str, spec: Spec | Kind, words: str
) -> None:
    error = refused(layout, source(tmp_path / "src", spec), tmp_path / "dst")
    hidden = spec.hidden if isinstance(spec, Spec) else spec.spec.hidden
    assert f"{EXPERTS}: hidden size {hidden} of an MoE layer" in error
    assert words in error


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        ("marlin-fp8", ("--for", "sglang"), "for vllm with 16-bit"),
        ("marlin-mxfp8", ("--for", "sglang"), "for vllm with 16-bit"),
        ("marlin-fp8", ("--activations", "fp8"), "for vllm with 16-bit"),
        ("marlin-mxfp8", ("--activations", "fp8"), "for vllm with 16-bit"),
        ("marlin-nvfp4", ("--activations", "fp8"), "for sglang with 16-bit"),
        ("marlin-mxfp4", ("--for", "sglang", "--activations", "fp8"), "for vllm with fp8"),
    ],
)
def test_a_variant_that_there_is_not_is_refused_with_those_there_are(
    tmp_path: Path, layout: str, options: tuple[str, ...], words: str
) -> None:
    src = source(tmp_path / "src", MX)
    error = refused(layout, src, tmp_path / "dst", *options)
    assert f"{layout} " in error
    assert words in error.partition("no such variant, only ")[2]


@pytest.mark.parametrize(
    ("layout", "spec", "words", "others"),
    [
        ("marlin-mxfp8", FP8, "fp8-tensor to mxfp8 changes", ["cutlass-fp8", "marlin-fp8"]),
        ("marlin-mxfp4", replace(FP8, gate_up="nvfp4"), "fp8-channel to mxfp4 changes",
         ["cutlass-fp8", "marlin-fp8"]),
        ("marlin-fp8", MXFP8, "mxfp8 to fp8-block changes", ["cutlass-mxfp8", "marlin-mxfp8"]),
    ],
    ids=["fp8", "both", "mxfp8"],
)  # fmt: skip
def test_without_the_layouts_encoding_the_layouts_that_fit_are_named(
    tmp_path: Path, layout: str, spec: Spec | Kind, words: str, others: list[str]
) -> None:
    ran = run("convert", "--to", layout, source(tmp_path / "src", spec), tmp_path / "dst")
    error = ran.err
    assert ran.code == 4
    assert words in error
    assert "--lossy allows it" in error
    assert sorted(error.strip().partition("layouts for it: ")[2].split(", ")) == others
