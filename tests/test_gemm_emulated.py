"""`verify --kernel` without a GPU: packed bytes read where each kernel looks for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert import run

DATA = Path(__file__).parent / "data"
MOE, BLOCKS = "modelopt_nvfp4_qwen3moe", "hf_fp8ops_qwen3moe"
ROWS = [
    (MOE, ("cutlass-nvfp4", "--for", "flashinfer")),
    (MOE, ("trtllm-nvfp4",)),
    (MOE, ("megamoe-nvfp4",)),
    (MOE, ("megamoe-nvfp4", "--variant", "sgl")),
    ("hf_mxfp4_gptoss", ("cutlass-mxfp4",)),
    ("deepgemm_fp4fp8_dsv4", ("megamoe-mxfp4",)),
    ("modelopt_mxfp8_qwen3moe", ("cutlass-mxfp8",)),
    ("modelopt_fp8_llama", ("cutlass-fp8",)),
    ("ct_fp8dynamic_qwen3moe", ("cutlass-fp8",)),
    (BLOCKS, ("cutlass-fp8", "--for", "flashinfer")),
    (BLOCKS, ("deepgemm-fp8",)),
    (BLOCKS, ("deepgemm-fp8", "--variant", "sm100", "--lossy")),
    (BLOCKS, ("megamoe-fp8-sm90",)),
]


def words(value: object) -> str:
    return "-".join(value) if isinstance(value, tuple) else str(value)


def packed(name: str, layout: tuple[str, ...], folder: Path) -> Path:
    ran = run("convert", "--to", *layout, DATA / name, folder / "dst")
    assert ran.code == 0, ran.err
    return folder / "dst"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may run the kernel itself")
@pytest.mark.parametrize(("name", "layout"), ROWS, ids=words)
def test_every_layout_is_read_as_its_kernel_reads_it(
    tmp_path: Path, name: str, layout: tuple[str, ...]
) -> None:
    target = packed(name, layout, tmp_path)
    ran = run("verify", "--kernel", "--json", DATA / name, target)
    assert ran.code == 0, ran.out
    kernel = json.loads(ran.out)["kernel"]
    assert kernel["kernel"]["ops"] == {"emulation": "by members"}
    assert "no kernel was run" in kernel["notes"][0]
    errors = [e for one in (*kernel["dense"], *kernel["moe"]) for e in one["errors"].values()]
    assert errors
    assert max(errors) < 1e-6
    assert kernel["control"] > 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may run the kernel itself")
@pytest.mark.parametrize("leaf", ["w13_weight", "w13_weight_scale"])
def test_rows_that_lie_elsewhere_are_found(tmp_path: Path, leaf: str) -> None:
    target = packed(MOE, ("megamoe-nvfp4", "--variant", "sgl"), tmp_path)
    for path in sorted(target.glob("experts-*.safetensors")):
        tensors = load_file(path)
        for name in [n for n in tensors if n.endswith(leaf)]:
            axis = 1 if leaf == "w13_weight" else 2
            tensors[name] = tensors[name].roll(8, axis)
        save_file(tensors, path, {"transcode.layout": "megamoe-nvfp4 1 (sgl)", "format": "pt"})
    ran = run("verify", "--kernel", DATA / MOE, target)
    assert ran.code == 3
    assert "relative error" in ran.out
