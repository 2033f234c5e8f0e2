"""The kernel check of every row of Marlin's table, with the emulation and with vLLM's kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import marlin_decode
from tests.build import Spec, edit_config
from tests.convert import run
from tests.layout_sources import EXPERTS, FP8, MOE, MX, MXFP8, Q, small, source
from tests.marlin_ops import OPS, Pair, change
from tests.producers import KINDS, Kind
from tests.rewriting import one_thread, proved
from tests.test_gemm import usable
from transcode.checkpoint import Checkpoint
from transcode.errors import TranscodeError
from transcode.gemm import check, kernel_check
from transcode.gemm.activation import activation
from transcode.gemm.trial import ACCEPTANCE

__all__ = ["one_thread"]

HALF, SGLANG = ("--dtype", "float16"), ("--for", "sglang")
OSS, V4 = small("gptoss-mxfp4"), small("v4-hub", mtp_layers=0, shared_experts=1)
ODD = replace(OSS, spec=replace(OSS.spec, hidden=96, intermediate=160))
BLOCKS = small("modelopt-fp8-block")
RAGGED = replace(BLOCKS, spec=replace(BLOCKS.spec, intermediate=192, head_dim=56))
LLAMA8 = Spec(
    model_type="llama", hidden=192, intermediate=208, layers=1, head_dim=16, biases=True,
    expert_biases=True, attention="fp8", gate_up="fp8_channel", down="fp8_channel",
)  # fmt: skip
LIMIT = {"swiglu_limit": 0.25}

CASES: dict[str, tuple[Spec | Kind, tuple[str, ...]]] = {
    "nvfp4 for sglang": (replace(MOE, tiny_scales=True), ("marlin-nvfp4", *SGLANG)),
    "nvfp4 for sglang, float16": (MOE, ("marlin-nvfp4", *SGLANG, *HALF)),
    "mxfp4": (small("modelopt-mxfp4"), ("marlin-mxfp4",)),
    "mxfp4, dense": (KINDS["quark-mxfp4-llama"], ("marlin-mxfp4",)),
    "gpt-oss": (OSS, ("marlin-mxfp4",)),
    "gpt-oss, padded hidden": (ODD, ("marlin-mxfp4",)),
    "gpt-oss for sglang": (ODD, ("marlin-mxfp4", *SGLANG)),
    "DeepSeek-V4's experts": (V4, ("marlin-mxfp4",)),
    "DeepSeek-V4's blocks": (V4, ("marlin-fp8",)),
    "fp8 of tensors and rows": (FP8, ("marlin-fp8",)),
    "fp8 of tensors and rows, float16": (FP8, ("marlin-fp8", *HALF)),
    "fp8, not gated, biases": (
        replace(FP8, gated=False, expert_biases=True, biases=True), ("marlin-fp8",)),
    "fp8, dense, biases": (LLAMA8, ("marlin-fp8",)),
    "fp8, dense, biases, float16": (LLAMA8, ("marlin-fp8", *HALF)),
    "fp8 of blocks": (RAGGED, ("marlin-fp8",)),
    "fp8 of blocks, float16": (RAGGED, ("marlin-fp8", *HALF)),
    "mxfp8": (MXFP8, ("marlin-mxfp8",)),
    "mxfp8, dense": (KINDS["ct-mxfp8"], ("marlin-mxfp8",)),
}  # fmt: skip


def converted(place: Path, case: str) -> Pair:
    spec, (layout, *options) = CASES[case]
    src = source(place / "src", spec)
    if spec is V4:
        edit_config(src, lambda c: c | LIMIT)
    return src, proved(layout, src, place / "dst", *options)


@pytest.mark.parametrize("case", CASES)
def test_what_is_packed_gives_the_sources_products(case: str, tmp_path: Path) -> None:
    done = check(*converted(tmp_path, case), OPS["0.33.0"], False)
    assert done["failures"] == []
    assert done["passed"]
    assert done["notes"] == []
    assert done["control"] > 0.5
    half = done["activation_dtype"] == "float16"
    errors = [e for entry in (*done["dense"], *done["moe"]) for e in entry["errors"].values()]
    twice = 2 if "blocks" in case else 1  # weights are rounded too
    assert 0 < max(errors) < (2.0**-12 if half else 2.0**-9) * twice
    assert json.loads(json.dumps(done, allow_nan=False)) == done


@pytest.mark.parametrize(
    ("case", "name"),
    [("gpt-oss", "swigluoai"), ("DeepSeek-V4's experts", "silu with limit 0.25"),
     ("mxfp8", "silu")],
)  # fmt: skip
def test_the_layer_is_run_with_the_models_activation(tmp_path: Path, case: str, name: str) -> None:
    assert check(*converted(tmp_path, case), OPS["0.33.0"], False)["activation"] == name


def test_the_activations_are_those_of_the_runtimes(tmp_path: Path) -> None:
    gate, up = torch.tensor([[-9.0, 0.5, 9.0]]), torch.tensor([[-9.0, 9.0, 0.5]])
    src = source(tmp_path / "oss", OSS)
    _, act = activation(Checkpoint.open(src))
    g, u = gate.clamp(max=7), up.clamp(-7, 7)
    assert torch.equal(act([gate, up]), g * torch.sigmoid(1.702 * g) * (u + 1))
    src = source(tmp_path / "moe", MOE)
    _, act = activation(Checkpoint.open(src))
    assert torch.equal(act([gate, up]), silu(gate) * up)
    edit_config(src, lambda c: c | {"swiglu_limit": 7.0})
    _, act = activation(Checkpoint.open(src))
    assert torch.equal(act([gate, up]), silu(g) * u)


def halves(t: Tensor) -> Tensor:
    """Rows that take turns put one after another."""
    return torch.cat([t[..., ::2], t[..., 1::2]], -1).contiguous()


@pytest.mark.parametrize(
    ("case", "name", "alter"),
    [
        ("fp8 of tensors and rows", f"{Q}.weight", lambda t: t.roll(1, 1)),
        ("fp8 of tensors and rows", f"{EXPERTS}.w13_weight", lambda t: t.roll(1, 0)),
        ("fp8 of tensors and rows", f"{EXPERTS}.w2_weight_scale", lambda t: t.roll(1, 2)),
        ("fp8 of tensors and rows", f"{EXPERTS}.w2_weight_scale", lambda t: t * 1.02),
        ("fp8, dense, biases", f"{Q}.bias", marlin_decode.bias),
        ("fp8 of blocks", f"{EXPERTS}.w2_weight_scale", lambda t: t.roll(1, 1)),
        ("mxfp8", f"{EXPERTS}.w13_weight_scale", lambda t: t.roll(1, 2)),
        ("mxfp8", f"{EXPERTS}.w2_weight", lambda t: t.roll(1, 1)),
        ("gpt-oss", f"{EXPERTS}.w13_bias", lambda t: t.roll(1, 1)),
        ("gpt-oss", f"{EXPERTS}.w13_weight", halves),
        ("gpt-oss", f"{EXPERTS}.w2_weight_scale", lambda t: t.roll(1, 2)),
    ],
)
def test_an_altered_tensor_fails(
    tmp_path: Path, case: str, name: str, alter: Callable[[Tensor], Tensor]
) -> None:
    pair = converted(tmp_path, case)
    change(pair[1], name, alter)
    done = check(*pair, OPS["0.33.0"], False)
    assert not done["passed"]
    assert all(name.rpartition(".")[0] in failure for failure in done["failures"])


def test_a_control_that_changes_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = converted(tmp_path, "mxfp8")
    monkeypatch.setattr("transcode.gemm.trial.SWAPPED", {8: list(range(4))})
    failures = check(*pair, OPS["0.33.0"], False)["failures"]
    assert failures
    assert all("the check is broken" in failure for failure in failures)


def test_fp8_activations_are_refused_in_one_line(tmp_path: Path) -> None:
    src = source(tmp_path / "src", MX)
    dst = proved("marlin-mxfp4", src, tmp_path / "dst", "--activations", "fp8")
    with pytest.raises(TranscodeError, match="marlin-mxfp4 with fp8 activations: its kernel"):
        kernel_check(src, dst, [], False)
    ran = run("verify", "--kernel", src, dst)
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 1
    assert "is not run here" in ran.err


@pytest.mark.skipif(not torch.cuda.is_available() or not usable(), reason="needs a GPU and vLLM")
@pytest.mark.parametrize("case", CASES)
def test_vllms_own_kernels_agree(case: str, tmp_path: Path) -> None:
    done = kernel_check(*converted(tmp_path, case), [], True)
    assert done["failures"] == []
    assert done["control"] > ACCEPTANCE[done["activation_dtype"]].control
