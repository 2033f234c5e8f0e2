"""Changes of encoding: what is exact stays exact, what is not is refused or counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build import edit
from tests.convert import run
from tests.packed import tensors
from tests.rewriting import kind  # noqa: F401 (a fixture)
from transcode import change, quantise
from transcode.checkpoint import Reader, reader
from transcode.encode import e2m1
from transcode.module import Module
from transcode.pack import raw_bytes
from transcode.quant import E2M1, Encoding, QuantTensor, unpack_nibbles
from transcode.recode import Recoded, source_of, virtual
from transcode.requantise import meaning
from transcode.unpacked import opened

DATA = Path(__file__).parent / "data"
MX, GPT, CAST = "ct_mxfp4_qwen3moe", "hf_mxfp4_gptoss", "pair_cast_mxfp4_to_nvfp4_gptoss"
NV, V4 = "modelopt_nvfp4_qwen3moe", "deepgemm_fp4fp8_dsv4"


def values(folder: Path) -> dict[str, Tensor]:
    """Every quantised matrix as it is meant, float32."""
    _, found = opened(folder)
    with reader() as read:
        return {
            name: meaning(source_of(module, read))
            for name, module in found.modules.items()
            if module.encoding is not Encoding.UNQUANTISED
        }


def convert(source: Path, target: Path, to: str, *options: str) -> dict[str, Any]:
    """Convert and verify; both must exit 0. The Report."""
    ran = run("convert", "--to", to, *options, source, target)
    assert ran.code == 0, ran.err
    proved = run("verify", source, target)
    assert proved.code == 0, proved.out + proved.err
    done: dict[str, Any] = json.loads((target / "transcode_report.json").read_text())
    return done


EXACT = [
    (MX, "deepseek-fp8", "fp8-block"),
    (MX, "modelopt-nvfp4", "nvfp4"),
    (MX, "compressed-tensors-nvfp4a16", "nvfp4"),
    (MX, "compressed-tensors-mxfp8", "mxfp8"),
    (MX, "marlin-nvfp4", "nvfp4"),
    (GPT, "marlin-fp8", "fp8-block"),
    (V4, "deepseek-v4-fp8", "fp8-block"),
    (CAST, "gpt-oss", "mxfp4"),
]


@pytest.mark.parametrize(("source", "to", "encoding"), EXACT, ids=lambda v: str(v))
def test_an_exact_change_keeps_every_value(
    tmp_path: Path, source: str, to: str, encoding: str
) -> None:
    done = convert(DATA / source, tmp_path / "dst", to)
    assert [entry["to"] for entry in done["recoded"]] == [encoding]
    assert sum(entry["changed"] for entry in done["recoded"]) == 0
    before, after = values(DATA / source), values(tmp_path / "dst")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_modelopts_own_cast_has_the_same_scales_and_codes_but_for_minus_zero(
    tmp_path: Path,
) -> None:
    convert(DATA / GPT, tmp_path / "dst", "modelopt-nvfp4", "--fused")
    ours, theirs = tensors(tmp_path / "dst"), tensors(DATA / CAST)
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        found = ours[name]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        if name.endswith("_input_scale"):
            assert float(found) == 1.0  # theirs is calibrated
        elif wanted.dtype is torch.uint8:
            a, b = unpack_nibbles(found.flatten()), unpack_nibbles(wanted.flatten())
            assert torch.equal(torch.where(a == 8, 0, a), b)
        else:
            assert torch.equal(raw_bytes(found), raw_bytes(wanted)), name


@pytest.mark.parametrize("to", ["compressed-tensors-mxfp4", "modelopt-fp8-block"])
def test_a_change_that_costs_needs_lossy_and_is_counted(tmp_path: Path, to: str) -> None:
    ran = run("convert", "--to", to, DATA / NV, tmp_path / "dst")
    assert ran.code == 4
    assert "--lossy allows it" in ran.err
    assert not (tmp_path / "dst.partial").exists()
    assert run("convert", "--to", to, "--lossy", "--exact", DATA / NV, tmp_path / "dst").code == 4
    done = convert(DATA / NV, tmp_path / "dst", to, "--lossy")
    [entry] = done["recoded"]
    assert entry["changed"]
    before, after = values(DATA / NV), values(tmp_path / "dst")
    errors = {
        n: float((after[n] - before[n]).double().norm() / before[n].double().norm()) for n in before
    }
    assert max(errors.values()) == pytest.approx(entry["error_at_most"], rel=1e-6)
    assert (
        max(errors.values()) < {"compressed-tensors-mxfp4": 0.16, "modelopt-fp8-block": 0.032}[to]
    )


def test_an_input_scale_is_made_up_or_left_out(tmp_path: Path) -> None:
    convert(DATA / MX, tmp_path / "one", "modelopt-nvfp4")
    convert(DATA / MX, tmp_path / "own", "modelopt-nvfp4", "--input-scale", "0.5")
    scales = [v for n, v in tensors(tmp_path / "own").items() if n.endswith("input_scale")]
    assert scales
    assert all(float(value) == 0.5 for value in scales)
    convert(DATA / MX, tmp_path / "none", "compressed-tensors-nvfp4a16", "--input-scale", "none")
    assert not any("input" in n and "scale" in n for n in tensors(tmp_path / "none"))
    for wrong in ("0", "-1", "inf", "x", "1e-50", "1e39"):
        ran = run("convert", "--to", "modelopt-nvfp4", "--input-scale", wrong, DATA / MX, tmp_path)
        assert ran.code == 2


def test_v4_says_that_its_experts_are_fp8(tmp_path: Path) -> None:
    convert(DATA / V4, tmp_path / "dst", "deepseek-v4-fp8")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["expert_dtype"] == "fp8"
    scales = {v.dtype for n, v in tensors(tmp_path / "dst").items() if n.endswith(".scale")}
    assert scales == {torch.float8_e8m0fnu}


def test_a_spread_that_is_too_wide_changes_the_smallest_blocks_only(tmp_path: Path) -> None:
    def spread(t: dict[str, Tensor]) -> dict[str, Tensor]:
        name = next(n for n in t if n.endswith("experts.1.up_proj.weight_scale"))
        scales = t[name].clone()
        scales[0, 0] = int(scales.view(torch.uint8).max()) - 18
        return t | {name: scales}

    shutil.copytree(DATA / MX, tmp_path / "src")
    edit(tmp_path / "src", spread)
    ran = run("convert", "--to", "modelopt-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 4
    assert "changes 1 of" in ran.err
    done = convert(tmp_path / "src", tmp_path / "dst", "modelopt-nvfp4", "--lossy")
    assert [e["changed"] for e in done["recoded"]] == [1]


def matrix(spread: int) -> QuantTensor:
    draw = torch.Generator().manual_seed(spread)
    codes = torch.randint(0, 256, (200, 256), dtype=torch.uint8, generator=draw)
    scales = 120 + torch.randint(0, spread + 1, (200, 16), generator=draw)
    scales[0, :2] = torch.tensor([120, 120 + spread])
    return QuantTensor(Encoding.MXFP4, codes, scales.to(torch.uint8))


@pytest.mark.parametrize("spread", [0, 6, 14, 17])
def test_spreads_up_to_fourteen_and_seventeen_are_exact(spread: int) -> None:
    source = matrix(spread)
    cast = change.mxfp4_to_nvfp4(source, change.top(source.scales))
    assert torch.equal(cast.codes, source.codes)
    assert torch.equal(cast.dequantize(), source.dequantize())
    back = quantise.mxfp4(cast.dequantize(), "mse")
    assert torch.equal(back.dequantize(), source.dequantize())
    tiled = change.mxfp4_to_fp8(source, (128, 128))
    assert torch.equal(tiled.dequantize(), source.dequantize()) == (spread <= 14)


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    step = torch.arange(-9 * 64, 9 * 64 + 1).float() / 64
    points = torch.cat((step, torch.tensor([-0.0])))[: len(step) // 2 * 2]
    codes = unpack_nibbles(e2m1(points))
    levels = torch.tensor(E2M1, dtype=torch.float64)
    apart = (points.abs().double()[:, None] - levels).abs()
    even = torch.where(apart == apart.amin(-1, keepdim=True), torch.arange(8) % 2, 9).argmin(-1)
    assert torch.equal((codes & 7).long(), even)
    assert torch.equal(codes >= 8, torch.signbit(points))


def test_a_module_that_is_read_twice_is_made_once(tmp_path: Path) -> None:
    made = list[str]()
    kept = change.mxfp4_to_mxfp8

    def counting(source: QuantTensor) -> QuantTensor:
        made.append("x")
        return kept(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change, "mxfp4_to_mxfp8", counting)
        module = _virtual(DATA / MX)
        with reader() as read:
            _both(module, read)
    assert made == ["x"]


def _both(module: Module, read: Reader) -> None:
    read.tensor(module.codes)
    read.tensor(module.scales)


def _virtual(folder: Path) -> Module:
    _, found = opened(folder)
    module = next(m for m in found.modules.values() if m.encoding is Encoding.MXFP4)
    return virtual(Recoded(module, Encoding.MXFP8, (module,)), "F32", None)


def test_tiles_whose_scales_are_powers_of_two_mean_what_is_stored(
    kind: Callable[[str], tuple[Path, Any]],  # noqa: F811
    tmp_path: Path,
) -> None:
    source = kind("v4-nvfp4")[0]
    done = convert(source, tmp_path / "dst", "deepseek-v4-fp8", "--lossy")
    before, after = values(source), values(tmp_path / "dst")
    errors = {n: float((after[n] - w).norm() / w.norm()) for n, w in before.items() if w.any()}
    assert max(errors.values()) <= 2**-4  # of each value that is normal in E4M3
    worst = max(entry["error_at_most"] for entry in done["recoded"])
    assert max(errors.values()) == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_global_scale_that_is_no_number_is_refused(tmp_path: Path, wrong: float) -> None:
    shutil.copytree(DATA / NV, tmp_path / "src")
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale_2"
    edit(tmp_path / "src", lambda t: t | ({name: torch.tensor(wrong)} if name in t else {}))
    ran = run("convert", "--to", "deepseek-fp8", "--lossy", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert name in ran.err


def test_small_exponents_come_back_from_a_cast() -> None:
    source = replace(matrix(6), scales=matrix(6).scales - 100)
    cast = change.mxfp4_to_nvfp4(source, change.top(source.scales))
    assert torch.equal(quantise.mxfp4(cast.dequantize(), "mse").dequantize(), source.dequantize())
