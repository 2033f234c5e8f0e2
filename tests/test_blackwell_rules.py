"""What layouts for CUTLASS, TensorRT-LLM and DeepGEMM keep, write beside weights, and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import blackwell_decode, packed
from tests.build import Spec, build, edit
from tests.convert import run
from tests.producers import KINDS, WHOLE
from tests.rewriting import convert, load_json, meaning, proved, refused, same_bytes
from transcode.catalog import layouts

DATA = Path(__file__).parent / "data"
MOE, OSS, BLOCKS = "modelopt_nvfp4_qwen3moe", "hf_mxfp4_gptoss", "hf_fp8ops_qwen3moe"
EXPERTS = "model.layers.0.mlp.experts"
WIDE = Spec(hidden=256, intermediate=128, experts=3, layers=1)
FOUR = [("cutlass-nvfp4",), ("cutlass-nvfp4", "--for", "flashinfer"), ("trtllm-nvfp4",),
        ("megamoe-nvfp4",), ("megamoe-nvfp4", "--variant", "sgl")]  # fmt: skip
BOTH = (FOUR[2], FOUR[4])
"""Their kernels take gate's and up's factor apart."""


def words(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def taken_for_raw(folder: Path) -> list[str]:
    """By the rules of SGLang 0.5.23's probe and vLLM 0.33.0's loader (scripts/stock_loaders.py):
    the stock index alone says which files are opened, and experts are those with a number."""
    places: dict[str, str] = load_json(folder / "model.safetensors.index.json")["weight_map"]
    found = list[str]()
    for file in sorted(set(places.values())):
        with safe_open(folder / file, "pt") as opened:
            found += opened.keys()
    one = re.compile(r"experts\.\d+\.(w[123]|gate_proj|up_proj|down_proj)\.weight(_packed)?$")
    return [name for name in found if one.search(name) or ".experts.w" in name]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *((n, BLOCKS) for n in ("cutlass-fp8", "deepgemm-fp8", "megamoe-fp8-sm90")),
        *((n, "deepgemm_fp4fp8_dsv4") for n in layouts() if n.endswith("mxfp4")),
        *((n, MOE) for n in layouts() if n.endswith("nvfp4")),
        ("cutlass-mxfp8", "modelopt_mxfp8_qwen3moe"),
    ],
)
def test_no_stock_loader_takes_packed_experts_for_raw_ones(
    tmp_path: Path, name: str, source: str
) -> None:
    target = convert(name, DATA / source, tmp_path / "dst")
    assert taken_for_raw(target) == []
    assert any("experts.w13_weight" in tensor for tensor in packed.tensors(target))


def test_the_same_rules_find_raw_experts() -> None:
    found = taken_for_raw(DATA / "ct_nvfp4_qwen3moe_sharded")
    assert any(name.endswith("experts.0.gate_proj.weight_packed") for name in found)


@pytest.mark.parametrize("layout", FOUR, ids=words)
def test_gate_and_up_that_differ_are_kept_apart_or_folded(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    build(tmp_path / "src", replace(WIDE, gate_up_ratio=(4.0, 1.37, 1.0)))
    target = proved(layout[0], tmp_path / "src", tmp_path / "dst", *layout[1:])
    found, wanted = blackwell_decode.weights(target), meaning(tmp_path / "src").weights
    factors = packed.tensors(target)[f"{EXPERTS}.w13_weight_scale_2"]
    down = f"{EXPERTS}.0.down_proj"
    if layout in BOTH:
        assert factors.shape == (3, 2)
        assert all(torch.equal(weight, wanted[m]) for m, weight in found.items())
        return
    assert factors.shape == (3,)
    assert torch.allclose(found[down], wanted[down] * 4, rtol=1e-6)  # up's factor moved into it
    up = f"{EXPERTS}.0.up_proj"
    assert torch.allclose(found[up] * 4, wanted[up], rtol=1e-6)


def test_a_fold_may_be_asked_for_where_both_could_be_kept(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(WIDE, gate_up_ratio=4.0))
    target = proved("trtllm-nvfp4", tmp_path / "src", tmp_path / "dst", "--unify", "fold")
    factors = packed.tensors(target)[f"{EXPERTS}.w13_weight_scale_2"]
    assert torch.equal(factors[:, 0], factors[:, 1])


@pytest.mark.parametrize("layout", FOUR, ids=words)
def test_input_scales_are_written_as_the_kernel_takes_them(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    build(tmp_path / "src", WIDE)
    given = meaning(tmp_path / "src").inputs
    target = proved(layout[0], tmp_path / "src", tmp_path / "dst", *layout[1:])
    out = packed.tensors(target)
    for stack, parts in (("w13", ("gate", "up")), ("w2", ("down",))):
        own = torch.stack(
            [
                torch.stack([given[f"{EXPERTS}.{e}.{part}_proj"] for part in parts]).max()
                for e in range(3)
            ]
        )
        one = layout[0].startswith("trtllm") or "flashinfer" in layout
        assert torch.equal(
            out[f"{EXPERTS}.{stack}_input_scale"], own.max().expand(3) if one else own
        )


def test_a_source_without_input_scales_gets_one_that_is_said(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(WIDE, w4a16=True))
    ran = run("convert", "--to", "cutlass-nvfp4", tmp_path / "src", tmp_path / "one")
    assert ran.code == 0
    assert "have no input scale" in ran.err
    assert "1 is written" in ran.err
    assert packed.tensors(tmp_path / "one")[f"{EXPERTS}.w13_input_scale"].tolist() == [1.0] * 3
    target = proved("cutlass-nvfp4", tmp_path / "src", tmp_path / "two", "--input-scale", "0.25")
    assert packed.tensors(target)[f"{EXPERTS}.w2_input_scale"].tolist() == [0.25] * 3
    assert "16-bit ones" in refused(
        "cutlass-nvfp4", tmp_path / "src", tmp_path / "three", "--input-scale", "none"
    )


def test_input_scales_that_some_experts_lack_or_that_are_no_numbers_are_refused(
    tmp_path: Path,
) -> None:
    build(tmp_path / "src", WIDE)
    name = f"{EXPERTS}.1.up_proj.input_scale"
    edit(tmp_path / "src", lambda t: {n: v for n, v in t.items() if n != name})
    error = refused("cutlass-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert f"{EXPERTS}.1.up_proj has no input scale" in error
    assert "check --fix" in error
    build(tmp_path / "zero", WIDE)
    edit(tmp_path / "zero", lambda t: t | {name: torch.tensor(0.0)})
    assert "is a factor of 0" in refused("trtllm-nvfp4", tmp_path / "zero", tmp_path / "dst")


def test_single_linears_stay_as_the_source_has_them_where_only_experts_are_packed(
    tmp_path: Path,
) -> None:
    build(tmp_path / "src", WIDE)
    target = proved("trtllm-nvfp4", tmp_path / "src", tmp_path / "dst")
    before, after = packed.tensors(tmp_path / "src"), packed.tensors(target)
    leaf = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[leaf], after[leaf])
    (carried,) = packed.config(target)["carried"]
    assert carried["encoding"] == "nvfp4-unpacked"
    assert "model.layers.0.self_attn.q_proj" in carried["modules"]
    build(tmp_path / "dense", Spec(model_type="llama", experts=0))
    assert "packs experts only" in refused("megamoe-nvfp4", tmp_path / "dense", tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"hidden": 192}, (), "wants multiples of 256 and 128"),
        ({"intermediate": 96}, (), "wants multiples of 256 and 128"),
        ({"gated": False, "model_type": "nemotron_h"}, (), "not gated"),
        ({}, ("--tp", "2"), "shared out whole"),
        ({"expert_biases": True}, (), "has no bias"),
    ],
)
def test_megamoe_refuses_what_its_kernel_does_not_take(
    tmp_path: Path, change: dict[str, object], options: tuple[str, ...], said: str
) -> None:
    build(tmp_path / "src", replace(WIDE, **change))  # type: ignore[arg-type]
    assert said in refused("megamoe-nvfp4", tmp_path / "src", tmp_path / "dst", *options)


def test_nvfp4_for_megamoes_mxfp4_kernel_is_an_exact_undo_or_refused(tmp_path: Path) -> None:
    error = refused("megamoe-mxfp4", DATA / MOE, tmp_path / "dst", code=4)
    assert "an E8M0 scale for 32 columns, NVFP4 has an E4M3 scale for 16" in error
    assert "--to megamoe-nvfp4" in error
    build(tmp_path / "src", replace(WIDE, gate_up="mxfp4", down="mxfp4"))
    cast = convert("modelopt-nvfp4", tmp_path / "src", tmp_path / "cast")
    undone = proved("megamoe-mxfp4", cast, tmp_path / "undone")
    straight = convert("megamoe-mxfp4", tmp_path / "src", tmp_path / "straight")
    theirs = packed.tensors(straight)
    for name, value in packed.tensors(undone).items():
        if name.endswith(("w13_weight", "w2_weight")):
            assert torch.equal(value, theirs[name])
    wanted = blackwell_decode.weights(straight)
    found = blackwell_decode.weights(undone)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_float_scales_become_powers_of_two_with_their_codes_or_not_at_all(tmp_path: Path) -> None:
    sm100 = ("--variant", "sm100")
    assert "--lossy allows it" in refused(
        "deepgemm-fp8", DATA / BLOCKS, tmp_path / "dst", *sm100, code=4
    )
    target = proved("deepgemm-fp8", DATA / BLOCKS, tmp_path / "dst", *sm100, "--lossy")
    form = convert("deepseek-fp8-ue8m0", DATA / BLOCKS, tmp_path / "form", "--lossy")
    found, wanted = blackwell_decode.weights(target), meaning(form).weights
    assert found
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())


def test_experts_with_two_scales_where_the_kernel_takes_one_are_refused(tmp_path: Path) -> None:
    KINDS["modelopt-fp8"](tmp_path / "src")
    assert "the kernel takes one for both" in refused(
        "cutlass-fp8", tmp_path / "src", tmp_path / "dst"
    )
    one = convert("modelopt-fp8", tmp_path / "src", tmp_path / "one", "--unify", "fold")
    target = proved("cutlass-fp8", one, tmp_path / "packed")
    out = packed.tensors(target)
    assert out[f"{EXPERTS}.w13_weight_scale"].shape == (3,)
    assert out[f"{EXPERTS}.w13_input_scale"].shape == (3,)


@pytest.mark.parametrize(
    ("layout", "served"),
    [("cutlass-nvfp4", [1, 2]), ("trtllm-nvfp4", [1, 2, 4]), ("megamoe-nvfp4", [1])],
)
def test_ranks_share_whole_tiles(tmp_path: Path, layout: str, served: list[int]) -> None:
    build(tmp_path / "src", replace(WIDE, intermediate=256, attention="bf16"))
    target = convert(layout, tmp_path / "src", tmp_path / "dst")
    assert packed.config(target)["tp"] == served


def test_what_a_runtime_works_out_is_written_if_the_runtime_is_named(tmp_path: Path) -> None:
    build(tmp_path / "src", WIDE)
    plain = packed.tensors(proved("cutlass-nvfp4", tmp_path / "src", tmp_path / "plain"))
    target = proved("cutlass-nvfp4", tmp_path / "src", tmp_path / "dst", "--for", "vllm")
    out = packed.tensors(target)
    linear = "model.layers.0.self_attn.o_proj"
    more = {"a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas", "alpha", "input_global_scale_inv"}
    assert {name.rpartition(".")[2] for name in out.keys() - plain.keys()} == more
    g, a = (out[f"{linear}.{leaf}_global_scale"] for leaf in ("weight", "input"))
    assert torch.equal(out[f"{linear}.alpha"], g * a)
    assert torch.equal(out[f"{linear}.input_global_scale_inv"], 1 / a)
    same_bytes(
        packed.tensors(convert("modelopt", target, tmp_path / "back")),
        packed.tensors(tmp_path / "src"),
    )


def test_the_config_names_variant_and_consumer(tmp_path: Path) -> None:
    build(tmp_path / "src", WIDE)
    target = convert("megamoe-nvfp4", tmp_path / "src", tmp_path / "dst", "--variant", "sgl")
    config = packed.config(target)
    told = (config["layout"], config["variant"], config["consumer"], config["w13_order"])
    assert told == (
        "megamoe-nvfp4", "sgl", {"runtime": "sglang", "version": "0.5.23"}, "gate_up"
    )  # fmt: skip
    assert json.loads((target / "transcode_report.json").read_text())["layout"]


def test_tiles_that_deepgemm_does_not_read_are_refused(tmp_path: Path) -> None:
    kind = replace(KINDS["fp8-deepseek"], spec=replace(WHOLE, intermediate=320))
    kind(tmp_path / "src")
    assert "wants multiples of 128" in refused("deepgemm-fp8", tmp_path / "src", tmp_path / "dst")
