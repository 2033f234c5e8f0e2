"""What is packed on a GPU is byte for byte what is packed on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.build import Spec, build
from tests.convert import run
from tests.layout_sources import FP8, MX, MXFP8, small, source
from tests.producers import Kind

SPECS = (
    Spec(hidden=192, intermediate=320, experts=3),
    Spec(hidden=256, intermediate=96, gate_up_ratio=1.37, qkv_ratio=3.0),
    Spec(model_type="nemotron_h", hidden=192, intermediate=320),
    Spec(model_type="llama", experts=0, biases=True, hidden=192, intermediate=320),
    Spec(tiny_scales=True, expert_biases=True),
)


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.model_type)
def test_gpu_and_cpu_pack_the_same_bytes(tmp_path: Path, spec: Spec, dtype: str) -> None:
    build(tmp_path / "src", spec)
    for device in ("cpu", "cuda"):
        args = ("--to", "marlin-nvfp4", "--device", device, "--dtype", dtype)
        ran = run("convert", *args, tmp_path / "src", tmp_path / device)
        assert ran.code == 0, ran.err
    assert content(tmp_path / "cpu") == content(tmp_path / "cuda")
    verified = run("verify", "--device", "cuda", tmp_path / "src", tmp_path / "cpu")
    assert verified.code == 0, verified.out


WIDE = Spec(hidden=256, intermediate=128, experts=3)
OSS, BLOCKS = small("gptoss-mxfp4"), small("modelopt-fp8-block")
ROWS: tuple[tuple[Spec | Kind, tuple[str, ...]], ...] = (
    (SPECS[0], ("marlin-nvfp4", "--for", "sglang")),
    (OSS, ("marlin-mxfp4",)),
    (OSS, ("marlin-mxfp4", "--for", "sglang")),
    (MX, ("marlin-mxfp4", "--activations", "fp8")),
    (FP8, ("marlin-fp8",)),
    (FP8, ("marlin-fp8", "--dtype", "float16")),
    (BLOCKS, ("marlin-fp8",)),
    (MXFP8, ("marlin-mxfp8",)),
    (SPECS[0], ("cutlass-nvfp4",)),
    (SPECS[0], ("trtllm-nvfp4",)),
    (OSS, ("trtllm-mxfp4",)),
    (WIDE, ("megamoe-nvfp4",)),
    (WIDE, ("megamoe-nvfp4", "--variant", "sgl")),
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("spec", "words"), ROWS, ids=lambda x: "-".join(x) if type(x) is tuple else ""
)
def test_gpu_and_cpu_pack_the_same_bytes_of_every_row(
    tmp_path: Path, spec: Spec | Kind, words: tuple[str, ...]
) -> None:
    src = source(tmp_path / "src", spec)
    for device in ("cpu", "cuda"):
        ran = run("convert", "--to", *words, "--device", device, src, tmp_path / device)
        assert ran.code == 0, ran.err
    assert content(tmp_path / "cpu") == content(tmp_path / "cuda")
    assert run("verify", "--device", "cuda", src, tmp_path / "cpu").code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    build(tmp_path / "src", SPECS[0])
    args = ("convert", "--to", "marlin-nvfp4", "--device", "cuda")
    ran = run(*args, tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "no GPU that torch can use" in ran.err


DATA = Path(__file__).parent / "data"
CHANGES = (
    ("modelopt_nvfp4_qwen3moe", ("modelopt-fp8-block", "--lossy")),
    ("modelopt_nvfp4_qwen3moe", ("compressed-tensors-mxfp4", "--lossy")),
    ("hf_fp8ops_qwen3moe", ("compressed-tensors-nvfp4", "--lossy")),
    ("hf_fp8ops_qwen3moe", ("deepseek-fp8-ue8m0", "--lossy")),
    ("ct_fp8dynamic_qwen3moe", ("marlin-mxfp4", "--lossy")),
    ("hf_mxfp4_gptoss", ("modelopt-nvfp4",)),
    ("deepgemm_fp4fp8_dsv4", ("deepseek-v4-fp8",)),
    ("bf16", ("modelopt-nvfp4", "--lossy")),
    ("bf16", ("compressed-tensors-nvfp4", "--lossy", "--scale-search", "max")),
    ("bf16", ("compressed-tensors-fp8", "--lossy")),
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("source", "words"), CHANGES, ids=lambda x: "-".join(x) if type(x) is tuple else x
)
def test_encodings_change_to_the_same_bytes(
    tmp_path: Path, source: str, words: tuple[str, ...]
) -> None:
    folder = DATA / source
    if source == "bf16":
        folder = tmp_path / "bf16"
        assert run("convert", "--to", "bf16", DATA / "modelopt_nvfp4_qwen3moe", folder).code == 0
    for device in ("cpu", "cuda"):
        ran = run("convert", "--to", *words, "--device", device, folder, tmp_path / device)
        assert ran.code == 0, ran.err
    assert content(tmp_path / "cpu") == content(tmp_path / "cuda")
