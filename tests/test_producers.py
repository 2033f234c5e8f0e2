"""tests/producers.py keeps its word: files, headers as tabled, truth decoded a second way."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.build import Tensors
from tests.producers import BLOCKS, KINDS, SMALL, WHOLE

GATE = "model.layers.0.mlp.experts.1.gate_proj"
EXPERTS = "model.layers.0.mlp.experts"

# fmt: off
HEADERS = {  # H 192, I 160; in 128-blocks 320 and 192, ModelOpt's 384 and 256
    "modelopt-nvfp4": (GATE, ("weight U8 160,96; weight_scale F8_E4M3 160,12; weight_scale_2 F32 ; "
                             "input_scale F32 ")),
    "modelopt-w4a8": (GATE, ("weight U8 160,96; weight_scale F8_E4M3 160,6; weight_scale_2 F32 ; "
                            "input_scale F32 ")),
    "modelopt-fp8": (GATE, "weight F8_E4M3 160,192; weight_scale F32 ; input_scale F32 "),
    "modelopt-fp8-channel": (GATE, "weight F8_E4M3 160,192; weight_scale F32 160"),
    "modelopt-fp8-block": (GATE, "weight F8_E4M3 256,384; weight_scale F32 2,1,3,1"),
    "modelopt-mxfp8": (GATE, "weight F8_E4M3 160,192; weight_scale U8 160,6"),
    "modelopt-mxfp4": (GATE, "weight U8 160,96; weight_scale U8 160,6"),
    "modelopt-nvfp4-llama4": (
        "model.layers.1.feed_forward.experts", ("gate_up_proj U8 3,96,320; "
        "gate_up_proj_input_scale F32 ; gate_up_proj_weight_scale F8_E4M3 3,12,320; "
        "gate_up_proj_weight_scale_2 F32 ; "
        "down_proj U8 3,80,192; down_proj_input_scale F32 ; down_proj_weight_scale F8_E4M3 "
        "3,10,192; down_proj_weight_scale_2 F32 ")),
    "ct-nvfp4": (GATE, ("weight_packed U8 160,96; weight_scale F8_E4M3 160,12; "
                       "weight_global_scale F32 1; input_global_scale F32 1")),
    "ct-mxfp4": (GATE, "weight_packed U8 160,96; weight_scale U8 160,6"),
    "ct-fp8": (GATE, "weight F8_E4M3 160,192; weight_scale BF16 1; input_scale BF16 1"),
    "ct-fp8-channel": (GATE, "weight F8_E4M3 160,192; weight_scale BF16 160,1"),
    "ct-fp8-channel-f32": (GATE, "weight F8_E4M3 160,192; weight_scale F32 160,1"),
    "ct-fp8-block": (GATE, "weight F8_E4M3 192,320; weight_scale BF16 2,3"),
    "ct-int4-nvfp4": ("model.layers.1.self_attn.k_proj", ("weight_packed I32 64,24; weight_scale "
                      "BF16 64,6; weight_shape I64 2")),
    "fp8-deepseek": ("model.layers.2.self_attn.kv_a_proj_with_mqa",
                     "weight F8_E4M3 576,320; weight_scale_inv F32 5,3"),
    "fp8-deepseek-1d": ("model.layers.0.self_attn.q_a_proj",
                        "weight F8_E4M3 64,320; weight_scale_inv F32 3"),
    "fp8-qwen": (GATE, "weight F8_E4M3 192,320; weight_scale_inv BF16 2,3"),
    "fp8-mxfp8": (GATE, "weight F8_E4M3 160,192; weight_scale_inv U8 160,6"),
    "v4-hub": ("mtp.0.ffn.experts.2.w1", "weight I8 192,160; scale F8_E8M0 192,10"),
    "v4-base": ("layers.1.ffn.experts.2.w1", "weight F8_E4M3 192,320; scale F32 2,3"),
    "v4-nvfp4": ("layers.1.ffn.experts.2.w1", ("weight U8 192,160; weight_scale F8_E4M3 192,20; "
                                              "weight_scale_2 F32 ; input_scale F32 ")),
    "gptoss-mxfp4": (EXPERTS, ("gate_up_proj_blocks U8 3,320,6,16; gate_up_proj_scales U8 3,320,6; "
                     "gate_up_proj_bias BF16 3,320; down_proj_blocks U8 3,192,5,16; "
                     "down_proj_scales U8 3,192,5; down_proj_bias BF16 3,192")),
    "quark-mxfp4-fp8-gptoss": (f"{EXPERTS}.2.gate_up_proj", ("weight U8 320,96; weight_scale U8 "
                               "320,6; input_scale F32 ; bias BF16 320")),
    "quark-nvfp4": (GATE, ("weight U8 160,96; weight_scale F8_E4M3 160,12; weight_scale_2 F32 ; "
                          "input_scale_2 F32 ")),
}
# fmt: on


def headers(path: Path) -> Iterator[tuple[str, str, str]]:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                part = f.get_slice(name)
                yield name, part.get_dtype(), ",".join(map(str, part.get_shape()))


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_is_said(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path)
    found = [name for name, _, _ in headers(tmp_path)]
    assert sorted(found) == sorted(made.tensors)
    assert made.rest.keys() <= made.tensors.keys()
    assert made.inputs.keys() | made.biases.keys() <= made.truth.keys()
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    assert not index.exists() or sorted(json.loads(index.read_text())["weight_map"]) == sorted(
        found
    )
    assert all(t.isfinite().all() and t.dtype == torch.float32 for t in made.truth.values())
    negative_zeros = (((t == 0) & t.signbit()).any() for t in made.truth.values())
    assert kind == "ct-int4-nvfp4" or all(negative_zeros)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in config) == (kind != "modelopt-nvfp4-hf-only")


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_are_as_tabled(kind: str, tmp_path: Path) -> None:
    module, table = HEADERS[kind]
    KINDS[kind](tmp_path)
    found = {name: (d, s) for name, d, s in headers(tmp_path) if name.startswith(f"{module}.")}
    wanted = [row.split(" ") for row in table.split("; ")]
    assert found == {f"{module}.{leaf}": (dtype, shape) for leaf, dtype, shape in wanted}


def test_sizes_differ() -> None:
    for s in (SMALL, BLOCKS, WHOLE):
        sizes = [s.hidden, s.intermediate, 2 * s.intermediate, s.experts, *s.shape("V,A,C,D")]
        assert len(set(sizes)) == len(sizes)


def four(byte: int, odd: int) -> float:
    code = byte >> 4 * odd & 15
    exponent, half = code >> 1 & 3, code & 1
    size = half / 2 if exponent == 0 else (1 + half / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def eight(byte: int) -> float:
    exponent, part = byte >> 3 & 15, byte & 7
    size = math.ldexp(part, -9) if exponent == 0 else math.ldexp(8 + part, exponent - 10)
    return -size if byte & 0x80 else size


def decoded(kind: str, t: Tensors, x: int, n: int, k: int) -> tuple[str, float]:
    """A module, and its weight at [n, k] from the bits in the file."""
    raw = {name: value.view(torch.uint8) for name, value in t.items() if value.element_size() == 1}
    match kind:
        case "modelopt-nvfp4-llama4":  # transposed; gate, then up
            at = "model.layers.1.feed_forward.experts"
            code = four(int(raw[f"{at}.gate_up_proj"][x, k // 2, 160 + n]), k % 2)
            scale = eight(int(raw[f"{at}.gate_up_proj_weight_scale"][x, k // 16, 160 + n]))
            spread = torch.tensor(scale) * t[f"{at}.gate_up_proj_weight_scale_2"]
            return f"{at}.{x}.up_proj", float(code * spread)
        case "gptoss-mxfp4":  # odd rows are up's
            code = four(
                int(raw[f"{EXPERTS}.gate_up_proj_blocks"][x, 2 * n + 1, k // 32, k % 32 // 2]),
                k % 2,
            )
            byte = int(raw[f"{EXPERTS}.gate_up_proj_scales"][x, 2 * n + 1, k // 32])
            return f"{EXPERTS}.{x}.up_proj", code * 2.0 ** (byte - 127)
        case "v4-hub":
            at = f"layers.1.ffn.experts.{x}.w3"
            code = four(int(raw[f"{at}.weight"][n, k // 2]), k % 2)
            return at, code * 2.0 ** (int(raw[f"{at}.scale"][n, k // 32]) - 127)
        case _:
            at = "model.layers.2.self_attn.kv_a_proj_with_mqa"
            code = eight(int(raw[f"{at}.weight"][n + 400, k]))
            row = (n + 400) // 128
            return at, float(code * t[f"{at}.weight_scale_inv"][row, k // 128])


@pytest.mark.parametrize(
    "kind", ["modelopt-nvfp4-llama4", "gptoss-mxfp4", "v4-hub", "fp8-deepseek"]
)
def test_truth_is_what_the_bits_say(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path)
    for i in range(300):
        x, n, k = i % 3, i * 37 % 160, i * 53 % 192
        module, value = decoded(kind, made.tensors, x, n, k)
        row = n + 400 if kind == "fp8-deepseek" else n
        assert float(made.truth[module][row, k]) == value
