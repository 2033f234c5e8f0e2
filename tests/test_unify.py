"""Gate and up that disagree: folded, the layer computes the same; rescaled, within the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import packed
from tests.build import Spec, build, edit, edit_config
from tests.convert import pack, run

RATIOS = (1.37, 2.0, 10.0, (1.37, 0.25, 7.0, 1.0))
MOE = Spec(hidden=192, intermediate=320, experts=4)


def output(weights: dict[str, Tensor], mlp: str, x: Tensor) -> Tensor:
    """`down(silu(gate x) * up x)` in float64."""
    gate, up, down = (weights[f"{mlp}.{p}_proj"].double() for p in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def report(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "transcode_report.json").read_text())
    return found


def hows(target: Path) -> set[str]:
    return {d["how"] for stack in report(target)["stacks"] for d in stack["unified"]}


def foreign(target: Path, truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Packed weights, and down projections that were carried: FP8 by their stored scales."""
    out, found = packed.tensors(target), packed.weights(target)
    for name in truth.keys() - found.keys():
        if f"{name}.weight_scale" in out or f"{name}.weight_scale_inv" in out:
            scale = out.get(f"{name}.weight_scale", out.get(f"{name}.weight_scale_inv"))
            value = out[f"{name}.weight"]
            assert scale is not None
            if value.dtype != torch.float8_e4m3fn:
                continue
            if (scale.dim() == 2 and scale.shape[1] > 1) or scale.shape[:1] != value.shape[:1]:
                if scale.dim() == 2:
                    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                    scale = scale[: value.shape[0], : value.shape[1]]
            elif scale.dim() == 1 and len(scale) > 1:
                scale = scale[:, None]
            found[name] = value.float() * scale.float()
    return found


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_folded_layer_computes_the_same(tmp_path: Path, ratio: Any, dialect: Any) -> None:
    spec = replace(MOE, dialect=dialect, gate_up_ratio=ratio)
    truth = build(tmp_path / "src", spec)
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {"fold"}
    found = packed.weights(target)
    x = torch.randn(8, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layer in range(spec.layers):
        for e in range(4):
            mlp = f"model.layers.{layer}.mlp.experts.{e}"
            want, ours = output(truth, mlp, x), output(found, mlp, x)
            assert (ours - want).norm() <= 1e-6 * want.norm()
            assert torch.equal(found[f"{mlp}.gate_proj"], truth[f"{mlp}.gate_proj"]) or (
                dialect == "compressed-tensors"
            )


@pytest.mark.parametrize("ratio", [1.37, 10.0])
def test_a_folded_dense_mlp_computes_the_same(tmp_path: Path, ratio: float) -> None:
    spec = Spec(model_type="llama", experts=0, hidden=192, intermediate=320, gate_up_ratio=ratio)
    truth = build(tmp_path / "src", spec)
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {"fold"}
    found = packed.weights(target)
    x = torch.randn(8, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mlp in ("model.layers.0.mlp", "model.layers.1.mlp"):
        want = output(truth, mlp, x)
        assert (output(found, mlp, x) - want).norm() <= 1e-6 * want.norm()


def test_a_folded_layer_differs_from_what_a_runtime_would_serve(tmp_path: Path) -> None:
    """The control: gate's factor for both halves without a fold is far off."""
    truth = build(tmp_path / "src", replace(MOE, gate_up_ratio=1.37))
    found = packed.weights(pack(tmp_path / "src", tmp_path / "dst"))
    mlp = "model.layers.0.mlp.experts.0"
    unfolded = found | {f"{mlp}.down_proj": truth[f"{mlp}.down_proj"]}
    x = torch.ones(1, 192, dtype=torch.float64)
    want = output(truth, mlp, x)
    assert (output(unfolded, mlp, x) - want).norm() > 0.2 * want.norm()


@pytest.mark.parametrize("down", ["fp8", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("ratio", [1.37, 2.0])
def test_a_foreign_down_takes_the_factor(tmp_path: Path, down: Any, ratio: float) -> None:
    truth = build(tmp_path / "src", replace(MOE, down=down, gate_up_ratio=ratio))
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {"fold"}
    found = foreign(target, truth)
    x = torch.randn(8, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for e in range(4):
        mlp = f"model.layers.1.mlp.experts.{e}"
        want = output(truth, mlp, x)
        assert (output(found, mlp, x) - want).norm() <= 1e-6 * want.norm()
    before, after = packed.tensors(tmp_path / "src"), packed.tensors(target)
    for name in (n for n in before if "down_proj.input_scale" in n):
        assert torch.equal(after[name], (before[name].double() / ratio_of(before, name)).float())


def ratio_of(source: dict[str, Tensor], name: str) -> float:
    stem = name.rpartition(".down_proj")[0]
    up, gate = (source[f"{stem}.{p}_proj.weight_scale_2"].double() for p in ("up", "gate"))
    return float(up / gate)


@pytest.mark.parametrize(("ratio", "how"), [(2.0, "fold"), (1.37, "rescale")])
def test_an_e8m0_down_takes_a_power_of_two_only(tmp_path: Path, ratio: float, how: str) -> None:
    build(tmp_path / "src", replace(MOE, down="mxfp4", gate_up_ratio=ratio))
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {how}
    name = "model.layers.0.mlp.experts.0.down_proj.weight_scale"
    before, after = packed.tensors(tmp_path / "src")[name], packed.tensors(target)[name]
    step = 1 if how == "fold" else 0
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8) + step)


def test_an_unquantised_down_cannot_take_it(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(MOE, down="bf16", gate_up_ratio=1.37))
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {"rescale"}
    assert "no scale" in report(target)["stacks"][0]["unified"][0]["why"]


def change(key: str, value: Any) -> Any:
    return lambda config: config | {key: value}


@pytest.mark.parametrize(
    ("key", "value", "how"),
    [
        ("model_type", "gpt_oss", "rescale"),
        ("model_type", "somebody_elses", "rescale"),
        ("hidden_act", "relu2", "rescale"),
        ("hidden_act", "gelu_pytorch_tanh", "fold"),
        ("swiglu_limit", 7.0, "rescale"),
        ("swiglu_limit", None, "fold"),
        ("expert_swiglu_limits", [0.0, 7.0], "both"),
        ("swiglu_limit_shared", 7.0, "fold"),
        ("use_situ", True, "rescale"),
        ("ffn_clamp_value", 5.0, "rescale"),
    ],
)
def test_fold_only_where_it_is_valid(tmp_path: Path, key: str, value: Any, how: str) -> None:
    build(tmp_path / "src", replace(MOE, gate_up_ratio=1.37))
    edit_config(tmp_path / "src", change(key, value))
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == ({"fold", "rescale"} if how == "both" else {how})


@pytest.mark.parametrize(("ratio", "how"), [(4.0, "fold"), (1.37, "rescale")])
def test_an_up_bias_takes_a_power_of_two_only(tmp_path: Path, ratio: float, how: str) -> None:
    spec = replace(MOE, expert_biases=True, gate_up_ratio=ratio)
    build(tmp_path / "src", spec)
    target = pack(tmp_path / "src", tmp_path / "dst")
    assert hows(target) == {how}
    from tests.marlin_decode import bias

    before, after = packed.tensors(tmp_path / "src"), packed.tensors(target)
    mlp = "model.layers.0.mlp.experts"
    both = bias(after[f"{mlp}.w13_bias"][1])
    want = before[f"{mlp}.1.up_proj.bias"] / (ratio if how == "fold" else 1)
    assert torch.equal(both[:320], before[f"{mlp}.1.gate_proj.bias"])
    assert torch.equal(both[384 : 384 + 320], want)
    assert torch.equal(bias(after[f"{mlp}.w2_bias"][1]), before[f"{mlp}.1.down_proj.bias"])


@pytest.mark.parametrize("options", [("--unify", "rescale"), ()])
@pytest.mark.parametrize("ratio", [1.37, 10.0])
def test_rescaled_blocks_stay_within_the_bound(
    tmp_path: Path, ratio: float, options: tuple[str, ...]
) -> None:
    """By 1/17 where the new scale is normal, by half a subnormal step (2^-10) where it is not; what
    Marlin cannot hold after that is zero, and counted."""
    spec = replace(MOE, gate_up_ratio=ratio, qkv_ratio=ratio)
    truth = build(tmp_path / "src", spec)
    target = pack(tmp_path / "src", tmp_path / "dst", *options)
    found, source = packed.weights(target), packed.tensors(tmp_path / "src")
    stacks = {s["name"]: s for s in report(target)["stacks"]}
    for stack in stacks.values():
        for d in stack["unified"]:
            assert d["how"] == ("rescale" if options or "attn" in stack["name"] else "fold")
    moved = [m for m in found if "q_proj" in m or (options and "gate_proj" in m)]
    assert moved
    gone = 0
    for m in moved:
        error = (found[m] - truth[m]).abs().double()
        g = float(source[f"{m}.weight_scale_2"]) * ratio
        zero = (found[m].reshape(len(found[m]), -1, 16) == 0).all(-1).repeat_interleave(16, 1)
        within = error <= truth[m].abs() / 17 * (1 + 1e-6) + 6 * g * 2.0**-10
        assert (within | zero).all()
        assert error.max() > 0
        gone += int((zero & ~within).reshape(-1, 16).any(-1).sum())
    for stack in stacks.values():
        assert bool(stack["rounded_by_at_most"]) == any(
            d["how"] == "rescale" for d in stack["unified"]
        )
        assert stack["rounded_by_at_most"] <= 1 / 17
    assert gone <= sum(s["flushed"]["count"] + s["fallen_to_zero"] for s in stacks.values())
    exact = [m for m in found if "k_proj" in m or (options and "up_proj" in m)]
    for m in exact:
        assert torch.equal(found[m], truth[m])


@pytest.mark.parametrize("members", ["q_proj", "gate_proj"])
def test_all_members_carry_one_global_scale(tmp_path: Path, members: str) -> None:
    spec = Spec(model_type="llama", experts=0, gate_up_ratio=3.0, qkv_ratio=1.7)
    build(tmp_path / "src", spec)
    out = packed.tensors(pack(tmp_path / "src", tmp_path / "dst"))
    joined = {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}[members]
    for name in (n for n in out if n.endswith(f"{members}.weight_global_scale")):
        for other in joined:
            assert torch.equal(out[name], out[name.replace(members, other)])


def test_none_refuses_and_writes_nothing(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(MOE, gate_up_ratio=1.37))
    ran = run(
        "convert", "--to", "marlin-nvfp4", "--unify", "none", tmp_path / "src", tmp_path / "dst"
    )
    assert ran.code == 4
    assert "differ 1.37-fold" in ran.err
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_exact_allows_a_fold_and_refuses_to_round(tmp_path: Path) -> None:
    build(tmp_path / "a", replace(MOE, gate_up_ratio=1.37))
    pack(tmp_path / "a", tmp_path / "b", "--exact")
    build(tmp_path / "c", replace(MOE, qkv_ratio=1.37))
    ran = run("convert", "--to", "marlin-nvfp4", "--exact", tmp_path / "c", tmp_path / "d")
    assert ran.code == 4
    assert "not exact" in ran.err


def test_exact_refuses_to_flush(tmp_path: Path) -> None:
    build(tmp_path / "a", replace(MOE, tiny_scales=True))
    ran = run("convert", "--to", "marlin-nvfp4", "--exact", tmp_path / "a", tmp_path / "b")
    assert ran.code == 4
    assert "too small" in ran.err


def scaled(folder: Path, leaf: str, factor: float, where: str = "experts") -> None:
    """Multiply the global scales of all projections of this name."""

    def change(t: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in t:
            if where in name and name.endswith(leaf):
                t[name] = (t[name].double() * factor).float()
        return t

    edit(folder, change)


@pytest.mark.parametrize(
    ("up", "down"), [(1e-23, 1e-23), (1e-20, 1e-15), (1e-36, 1.0), (1e30, 1e6), (1e-34, 1e4)]
)
def test_a_fold_that_would_leave_the_normal_range_falls_back(
    tmp_path: Path, up: float, down: float
) -> None:
    build(tmp_path / "src", replace(MOE, layers=1))
    scaled(tmp_path / "src", "up_proj.weight_scale_2", up)
    scaled(tmp_path / "src", "down_proj.weight_scale_2", down)
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    if ran.code:  # the source's own scale is out of the kernel's range
        assert "no finite normal float32" in ran.err
        return
    found, source = packed.weights(tmp_path / "dst"), packed.tensors(tmp_path / "src")
    mlp = "model.layers.0.mlp.experts.0"
    if "fold" in hows(tmp_path / "dst"):
        g = float(source[f"{mlp}.up_proj.weight_scale_2"].double() * 1.0)
        ratio = g / float(source[f"{mlp}.gate_proj.weight_scale_2"])
        want = float(source[f"{mlp}.down_proj.weight_scale_2"].double()) * ratio
        assert want >= torch.finfo(torch.float32).tiny
    assert torch.count_nonzero(found[f"{mlp}.down_proj"])


def test_a_foreign_scale_that_would_lose_bits_is_not_folded_into(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(MOE, layers=1, down="fp8"))
    scaled(tmp_path / "src", "up_proj.weight_scale_2", 1e-7)
    scaled(tmp_path / "src", "down_proj.weight_scale", 1e-33)
    assert hows(pack(tmp_path / "src", tmp_path / "dst")) == {"rescale"}


def test_every_named_activation_must_be_known(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(MOE, gate_up_ratio=1.37))
    edit_config(tmp_path / "src", change("hidden_activation", "swigluoai"))
    assert hows(pack(tmp_path / "src", tmp_path / "dst")) == {"rescale"}


def test_any_limit_of_a_list_counts_for_an_mtp_layer(tmp_path: Path) -> None:
    spec = replace(MOE, layers=2, mtp_layers=1, mtp="nvfp4", gate_up_ratio=1.37)
    build(tmp_path / "src", spec)
    edit_config(tmp_path / "src", change("swiglu_limits", [0.0, 0.0, 7.0]))
    target = pack(tmp_path / "src", tmp_path / "dst")
    by_layer = {
        s["name"]: {d["how"] for d in s["unified"]}
        for s in report(target)["stacks"]
        if s["unified"]
    }
    assert by_layer["model.layers.0.mlp.experts.w13"] == {"fold"}
    assert by_layer["mtp.layers.0.mlp.experts.w13"] == {"rescale"}


@pytest.mark.parametrize(("ratio", "how"), [(15.0, "fold"), (1 / 15, "fold"), (20.0, "rescale")])
def test_a_fold_stays_within_the_reach_of_float16(tmp_path: Path, ratio: float, how: str) -> None:
    build(tmp_path / "src", replace(MOE, layers=1, gate_up_ratio=ratio))
    target = pack(tmp_path / "src", tmp_path / "dst", "--dtype", "float16")
    assert hows(target) == {how}
