"""What the variants of a layout are told apart by: sizes, order of rows, padding, the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests import marlin_decode, packed
from tests.build import Spec, edit
from tests.convert import run
from tests.layout_sources import EXPERTS, FP8, MOE, MX, MXFP8, UP, Q, at, put, small, source
from tests.producers import Kind
from tests.rewriting import (
    convert,
    load_json,
    meaning,
    one_thread,
    proved,
    raw,
    refused,
    report,
    same_bytes,
)

__all__ = ["one_thread"]

OSS = small("gptoss-mxfp4")
DENSE = replace(FP8, model_type="llama")
ODD = replace(OSS, spec=replace(OSS.spec, hidden=96, intermediate=160))
A8, SGLANG, HALF = ("--activations", "fp8"), ("--for", "sglang"), ("--dtype", "float16")


@pytest.mark.parametrize(
    ("spec", "words", "says"),
    [
        (MOE, ("marlin-nvfp4",), ("vllm", "vllm 0.33.0", "16-bit", "gate_up")),
        (MOE, ("marlin-nvfp4", *SGLANG), ("sglang", "sglang 0.5.23", "16-bit", "gate_up")),
        (OSS, ("marlin-mxfp4",), ("vllm", "vllm 0.33.0", "16-bit", "interleaved")),
        (OSS, ("marlin-mxfp4", *SGLANG), ("sglang", "sglang 0.5.23", "16-bit", "gate_up")),
        (OSS, ("marlin-mxfp4", *A8), ("vllm-a8", "vllm 0.33.0", "fp8", "interleaved")),
        (replace(FP8, gated=False), ("marlin-fp8",), ("vllm", "vllm 0.33.0", "16-bit", "up")),
        (DENSE, ("marlin-fp8",), ("vllm", "vllm 0.33.0", "16-bit", None)),
        (MXFP8, ("marlin-mxfp8",), ("vllm", "vllm 0.33.0", "16-bit", "gate_up")),
    ],
)  # fmt: skip
def test_the_config_says_which_variant_it_is(
    tmp_path: Path, spec: Spec | Kind, words: tuple[str, ...], says: tuple[str | None, ...]
) -> None:
    target = proved(words[0], source(tmp_path / "src", spec), tmp_path / "dst", *words[1:])
    found = packed.config(target)
    consumer = f"{found['consumer']['runtime']} {found['consumer']['version']}"
    assert (found["variant"], consumer, found["activations"], found["w13_order"]) == says
    assert (found["quant_method"], found["layout"], found["layout_version"]) == (
        "transcode", words[0], 1,
    )  # fmt: skip
    label = f"{words[0]} 1" + f" ({says[0]})" * (says[0] != "vllm")
    assert report(target)["layout"] == label
    for path in target.glob("experts*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["transcode.layout"] == label


@pytest.mark.parametrize(
    ("words", "padded", "fill"),
    [
        (("marlin-mxfp4",), ([256, 256], 256, 256, 256), 0),
        (("marlin-mxfp4", "--tp", "2"), ([256, 256], 256, 256, 256), 0),
        (("marlin-mxfp4", "--tp", "4"), ([512, 512], 256, 256, 512), 0),
        (("marlin-mxfp4", *SGLANG), ([256, 256], 256, 256, 256), 127),
        (("marlin-mxfp4", *A8), ([256, 256], 256, 256, 256), 6),
    ],
    ids=["vllm", "tp 2", "tp 4", "sglang", "a8"],
)
def test_experts_of_mxfp4_are_padded_as_the_runtimes_buffers(
    tmp_path: Path, words: tuple[str, ...], padded: tuple[list[int], int, int, int], fill: int
) -> None:
    """H 96 to 256, I 160 to 128 for each rank; scales of the padding are the runtime's own."""
    target = proved(words[0], source(tmp_path / "src", ODD), tmp_path / "dst", *words[1:])
    sizes, t = packed.config(target)["sizes"], packed.tensors(target)
    w13, w2 = sizes[f"{EXPERTS}.w13"], sizes[f"{EXPERTS}.w2"]
    assert (w13["n"], w13["k"], w2["n"], w2["k"]) == ([160, 160], 96, [96], 160)
    assert (w13["padded_n"], w13["padded_k"], w2["padded_n"][0], w2["padded_k"]) == padded
    stored = t[f"{EXPERTS}.w2_weight_scale"][0]
    plain = marlin_decode.bias(stored.T) if A8[0] in words else in_bytes(stored)
    assert {*plain[96:].flatten().tolist(), *plain[:, 5:].flatten().tolist()} == {fill}
    assert t[f"{EXPERTS}.w13_bias"].shape == (2, sum(padded[0]))


def in_bytes(stored: Tensor) -> Tensor:
    return marlin_decode.in_order(stored, marlin_decode.ORDER)


def test_gpt_oss_rows_take_turns_for_vllm_and_are_halves_for_sglang(tmp_path: Path) -> None:
    src = source(tmp_path / "src", OSS)
    wanted = meaning(src).biases
    both = [wanted[f"{EXPERTS}.1.{p}_proj"] for p in ("gate", "up")]
    for options, rows in (((), torch.stack(both, 1).flatten()), (SGLANG, torch.cat(both))):
        target = proved("marlin-mxfp4", src, tmp_path / f"dst{len(options)}", *options)
        stored = packed.tensors(target)[f"{EXPERTS}.w13_bias"][1]
        assert torch.equal(marlin_decode.bias(stored), rows)


def test_tp_pads_experts_of_fp8_to_whole_blocks_of_every_rank(tmp_path: Path) -> None:
    spec = replace(FP8, intermediate=320, gate_up="fp8_block", down="fp8_block", attention="bf16")
    src = source(tmp_path / "src", spec)
    for tp, size in (("1", 384), ("2", 512)):
        target = proved("marlin-fp8", src, tmp_path / f"tp{tp}", "--tp", tp)
        found = packed.config(target)
        assert found["sizes"][f"{EXPERTS}.w13"]["padded_n"] == [size, size]
        assert found["sizes"][f"{EXPERTS}.w2"]["padded_k"] == size
        assert found["tp"][-1] == int(tp)
        assert found["options"]["tp"] == int(tp)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_fp8_are_the_sources_rounded_and_times_a_power(
    tmp_path: Path, dtype: str
) -> None:
    src = source(tmp_path / "src", FP8, **{at(f"{UP}.weight_scale"): put(1e-7)})
    target = proved("marlin-fp8", src, tmp_path / "dst", "--dtype", dtype)
    out, given = packed.tensors(target), packed.tensors(src)
    short: torch.dtype = getattr(torch, dtype)
    lift = {"bfloat16": 2.0**120, "float16": 2.0**8}[dtype]
    stored = out[f"{EXPERTS}.w13_weight_scale"]
    assert stored.dtype is out[f"{Q}.weight_scale"].dtype is short
    up = marlin_decode.bias(stored[1].T)[128 : 128 + 96, 0]
    assert torch.equal(up, given[f"{UP}.weight_scale"].to(short) * lift)
    q = given[f"{Q}.weight_scale"].to(short) * lift
    assert torch.equal(out[f"{Q}.weight_scale"], q.expand(1, 128))
    own = out[f"{EXPERTS}.w13_source_weight_scale"][1, 1]
    assert raw(own) == raw(given[f"{UP}.weight_scale"])
    assert raw(out[f"{Q}.source_weight_scale"]) == raw(given[f"{Q}.weight_scale"])
    assert load_json(target / "config.json")["dtype"] == dtype


def test_a_scale_that_is_zero_in_float16_is_refused_but_over_zeros(tmp_path: Path) -> None:
    tiny = {at(f"{UP}.weight_scale"): put(1e-9)}
    src = source(tmp_path / "src", FP8, **tiny)
    error = refused("marlin-fp8", src, tmp_path / "dst", *HALF)
    assert f"{UP}.weight_scale F32 [96]: 1e-09 is zero in float16" in error
    nothing = {at(f"{UP}.weight"): lambda t: torch.zeros_like(t.view(torch.uint8)).view(t.dtype)}
    src = source(tmp_path / "zeros", FP8, **tiny, **nothing)
    target = proved("marlin-fp8", src, tmp_path / "packed", *HALF)
    stacks = {s["name"]: s["fallen_to_zero"] for s in report(target)["stacks"]}
    assert stacks[f"{EXPERTS}.w13"] == sum(stacks.values()) == 1
    back = run("convert", "--to", "modelopt", target, tmp_path / "back")
    assert back.code == 0
    assert "stay so" not in back.err
    same_bytes(packed.tensors(tmp_path / "back"), packed.tensors(src))


def test_sglangs_scales_are_neither_lifted_nor_flushed(tmp_path: Path) -> None:
    src = source(tmp_path / "src", replace(MOE, tiny_scales=True))
    g = packed.tensors(src)[f"{EXPERTS}.0.down_proj.weight_scale_2"]
    for dtype in ("bfloat16", "float16"):
        target = proved("marlin-nvfp4", src, tmp_path / dtype, *SGLANG, "--dtype", dtype)
        out, stacks = packed.tensors(target), report(target)["stacks"]
        assert {s["lift"] for s in stacks} == {1.0}
        scale = marlin_decode.scales(out[f"{EXPERTS}.w2_weight_scale"][0], 1.0)
        given = packed.tensors(src)[f"{EXPERTS}.0.down_proj.weight_scale"].float()
        assert torch.equal(scale[:, :6], given)
        lost = sum(s["flushed"]["count"] for s in stacks)
        assert bool(lost) == (dtype == "bfloat16")
        stored = out[f"{EXPERTS}.w2_weight_scale_2"]
        deep = marlin_decode.DEEP[dtype] - 7
        assert torch.equal(stored[0], g.to(stored.dtype) * 2.0**deep)
        assert stored.dtype is getattr(torch, dtype)


MIXED = replace(MOE, attention="fp8")


def test_what_a_layout_does_not_pack_is_carried_as_the_source_has_it(tmp_path: Path) -> None:
    src = source(tmp_path / "src", MIXED)
    given = packed.tensors(src)
    for layout, part, encoding in (
        ("marlin-nvfp4", "self_attn", "fp8-tensor"), ("marlin-fp8", "experts", "nvfp4"),
    ):  # fmt: skip
        target = proved(layout, src, tmp_path / layout)
        carried = {n: t for n, t in given.items() if part in n}
        out = packed.tensors(target)
        same_bytes({n: t for n, t in out.items() if n in carried}, carried)
        assert [c["encoding"] for c in packed.config(target)["carried"]] == [encoding]
        assert not any(part in name for name in packed.config(target)["sizes"])
        same_bytes(packed.tensors(convert("modelopt", target, tmp_path / "back")), given)


def test_packed_words_are_not_carried_into_another_layout(tmp_path: Path) -> None:
    src = source(tmp_path / "src", MIXED)
    first = proved("marlin-nvfp4", src, tmp_path / "nvfp4")
    error = refused("marlin-fp8", first, tmp_path / "fp8")
    assert f"{EXPERTS}.0.gate_proj is packed as marlin-nvfp4" in error
    again = convert("canonical", first, tmp_path / "canonical")
    target = proved("marlin-fp8", again, tmp_path / "packed")
    same_bytes(packed.tensors(convert("modelopt", target, tmp_path / "b")), packed.tensors(src))


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        (MX, ("marlin-mxfp4", *A8), ("marlin-mxfp4",)),
        (OSS, ("marlin-mxfp4",), ("marlin-mxfp4", *SGLANG)),
        (FP8, ("marlin-fp8",), ("marlin-fp8", *HALF)),
        (MOE, ("marlin-nvfp4", *SGLANG), ("marlin-nvfp4",)),
    ],
)
def test_a_packed_folder_is_packed_again_as_another_variant(
    tmp_path: Path, spec: Spec | Kind, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    src = source(tmp_path / "src", spec)
    one = proved(first[0], src, tmp_path / "one", *first[1:])
    two = proved(second[0], one, tmp_path / "two", *second[1:])
    direct = proved(second[0], src, tmp_path / "direct", *second[1:])
    same_bytes(packed.tensors(two), packed.tensors(direct))
    assert packed.config(two) == packed.config(direct)


def test_scales_of_activations_keep_their_dtype(tmp_path: Path) -> None:
    src = source(tmp_path / "src", replace(MIXED, dialect="compressed-tensors"))
    given = packed.tensors(src)
    assert given[f"{Q}.input_scale"].dtype is torch.bfloat16
    target = proved("marlin-fp8", src, tmp_path / "dst")
    assert packed.tensors(target)[f"{Q}.source_input_scale"].dtype is torch.bfloat16
    back = convert("compressed-tensors", target, tmp_path / "back")
    same_bytes(packed.tensors(back), given)


def test_experts_whose_own_scales_have_two_dtypes_are_packed(tmp_path: Path) -> None:
    src = source(tmp_path / "src", FP8)
    name = f"{UP}.weight_scale"
    edit(src, lambda tensors: tensors | {name: tensors[name].bfloat16()})
    target = proved("marlin-fp8", src, tmp_path / "dst")
    own = packed.tensors(target)[f"{EXPERTS}.w13_source_weight_scale"]
    assert own.dtype is torch.float32
    assert torch.equal(own[1, 1], packed.tensors(src)[name].float())
