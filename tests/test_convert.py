"""Whole conversions: what is written, what is kept of a killed run, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import packed
from tests.build import Spec, build, edit
from tests.convert import pack, run
from transcode import destination
from transcode.output import OutputShard

SMALL = Spec(hidden=128, intermediate=64, experts=2, layers=1)
SPECS = {
    "padded": Spec(hidden=192, intermediate=320, experts=3),
    "padded to 128": Spec(hidden=256, intermediate=96),
    "odd H": Spec(hidden=192, intermediate=96, dialect="compressed-tensors"),
    "not gated": Spec(model_type="nemotron_h", hidden=192, intermediate=320),
    "MTP": Spec(model_type="deepseek_v3", mtp_layers=1, mtp="nvfp4", shared_experts=1),
    "MTP in BF16": Spec(model_type="deepseek_v3", mtp_layers=1),
    "shared experts": Spec(model_type="qwen3_next", shared_experts=1),
    "W4A16": Spec(model_type="mixtral", w4a16=True),
    "W4A16 CT": Spec(dialect="compressed-tensors", w4a16=True),
    "dense": Spec(model_type="llama", experts=0, biases=True, hidden=192, intermediate=320),
    "FP8 attention": Spec(attention="fp8", kv_scales=True),
    "MXFP4 attention": Spec(dialect="compressed-tensors", attention="mxfp4"),
    "INT4 attention": Spec(dialect="compressed-tensors", attention="int4"),
    "DeepSeek-V4": Spec(model_type="deepseek_v4", mtp_layers=1, shared_experts=1),
    "MiniMax": Spec(model_type="minimax_m2", attention="fp8_block"),
    "expert biases": Spec(expert_biases=True, intermediate=160),
    "tiny scales": Spec(tiny_scales=True),
}


def report(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "transcode_report.json").read_text())
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def places(flushed: dict[str, Any]) -> torch.Tensor:
    """The flat indices of flushed scales, as the Report lists them."""
    return torch.frombuffer(bytearray(b64decode(flushed["at"])), dtype=torch.uint32).long()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_checkpoint_comes_back(tmp_path: Path, name: str, dtype: str) -> None:
    truth = build(tmp_path / "src", SPECS[name])
    target = pack(tmp_path / "src", tmp_path / "dst", "--dtype", dtype)
    found, config = packed.weights(target), packed.config(target)
    others = {m for entry in config["carried"] for m in entry["modules"]}
    assert set(found) | others == set(truth)
    flushes = {
        f["module"]: f for stack in report(target)["stacks"] for f in stack["flushed"]["scales"]
    }
    assert bool(flushes) == ("tiny" in name)
    for module, weight in found.items():
        want = truth[module]
        if module in flushes:
            lost = torch.zeros(want.numel() // 16, dtype=torch.bool)
            lost[places(flushes[module])] = True
            want = torch.where(lost.reshape(len(want), -1).repeat_interleave(16, 1), 0, want)
        if SPECS[name].ct:
            assert ((weight - want).abs() <= 1.6e-7 * want.abs()).all(), module
        else:
            assert torch.equal(weight, want), module


def test_flushed_bytes_are_listed_for_the_way_back(tmp_path: Path) -> None:
    build(tmp_path / "src", SPECS["tiny scales"])
    target = pack(tmp_path / "src", tmp_path / "dst")
    source = packed.tensors(tmp_path / "src")
    for stack in report(target)["stacks"]:
        flushed = stack["flushed"]
        assert flushed["count"] == sum(f["count"] for f in flushed["scales"])
        assert 0 <= flushed["norm_share"] < 1e-3
        for f in flushed["scales"]:
            scales = source[f["module"] + ".weight_scale"].view(torch.uint8).flatten()
            assert len(places(f)) == f["count"]
            assert bytes(scales[places(f)].tolist()) == b64decode(f["bytes"])


def test_one_lift_an_expert_is_taken_where_it_flushes_less(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)

    def shrink(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Expert 1's scales times 2^-9: they would vanish under expert 0's lift."""
        name = "model.layers.0.mlp.experts.1.{}_proj.weight_scale"
        for p in ("gate", "up"):
            value = t[name.format(p)].float() * 2**-9
            t[name.format(p)] = value.to(torch.float8_e4m3fn)
        return t

    edit(tmp_path / "src", shrink)
    stack = report(pack(tmp_path / "src", tmp_path / "dst"))["stacks"][0]
    assert stack["name"].endswith("w13")
    assert stack["lifts"] == "per expert"
    assert stack["lift"][1] > stack["lift"][0]
    assert stack["flushed"]["count"] == 0


def test_zero_matrices_and_nan_over_zeros(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    mlp = "model.layers.0.mlp.experts"

    def damage(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        t[f"{mlp}.0.gate_proj.weight_scale_2"] = torch.tensor(0.0)
        t[f"{mlp}.0.gate_proj.weight_scale"].view(torch.uint8).fill_(0xFF)
        t[f"{mlp}.1.down_proj.weight_scale_2"] = torch.tensor(0.0)
        t[f"{mlp}.1.up_proj.weight"][3, :8] = 0x80
        t[f"{mlp}.1.up_proj.weight_scale"].view(torch.uint8)[3, 0] = 0x7F
        return t

    edit(tmp_path / "src", damage)
    target = pack(tmp_path / "src", tmp_path / "dst")
    found, out = packed.weights(target), packed.tensors(target)
    source = packed.tensors(tmp_path / "src")
    assert not torch.count_nonzero(found[f"{mlp}.0.gate_proj"])
    assert torch.count_nonzero(found[f"{mlp}.0.up_proj"])
    assert not torch.count_nonzero(found[f"{mlp}.1.down_proj"])
    assert not torch.count_nonzero(found[f"{mlp}.1.up_proj"][3, :16])
    assert out[f"{mlp}.w2_weight_scale_2"][1] == 0
    assert out[f"{mlp}.w13_weight_scale_2"][0] > 0
    assert out[f"{mlp}.w13_source_global_scale"][0, 0] == 0
    assert [s["nan_over_zeros"] for s in report(target)["stacks"][:2]] == [1, 0]
    from tests.marlin_decode import codes

    w13 = codes(out[f"{mlp}.w13_weight"][0])
    raw = source[f"{mlp}.0.gate_proj.weight"].int()
    assert torch.equal(w13[:64, ::2], raw & 15)


@pytest.mark.parametrize("scale", [float("nan"), -1.0, float("inf")])
def test_a_global_scale_that_means_nothing_is_an_error(tmp_path: Path, scale: float) -> None:
    build(tmp_path / "src", SMALL)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"
    edit(tmp_path / "src", lambda t: t | {name: torch.tensor(scale)})
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert name in ran.err


def test_a_nan_scale_over_codes_is_an_error_with_its_place(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    stem = "model.layers.0.self_attn.q_proj"

    def damage(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        t[f"{stem}.weight"][5, 16:24] = 0x21
        t[f"{stem}.weight_scale"].view(torch.uint8)[5, 2] = 0xFF
        return t

    edit(tmp_path / "src", damage)
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert f"{stem}: weight_scale is NaN in row 5, block 2" in ran.err


def test_an_input_scale_that_is_no_number_is_a_warning(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    stem = "model.layers.0.mlp.experts.1.up_proj"

    def damage(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        t[f"{stem}.input_scale"] = torch.tensor(0.0)
        del t["model.layers.0.mlp.experts.0.down_proj.input_scale"]
        return t

    edit(tmp_path / "src", damage)
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 0
    assert f"{stem}'s is 0" in ran.err
    assert "experts.0.down_proj among them" in ran.err
    out = packed.tensors(tmp_path / "dst")
    assert out["model.layers.0.mlp.experts.w2_source_input_scale"][0].isnan()
    assert run("verify", tmp_path / "src", tmp_path / "dst").code == 0


def test_expert_shards_stay_out_of_the_stock_index(tmp_path: Path) -> None:
    build(tmp_path / "src", SPECS["padded"])
    target = pack(tmp_path / "src", tmp_path / "dst", "--shard-size", "100KB")
    plain = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    mine = json.loads((target / "transcode.index.json").read_text())["weight_map"]
    assert all(".experts.w" in name for name in mine)
    assert not any(".experts.w" in name for name in plain)
    assert {f.partition("-")[0] for f in mine.values()} == {"experts"}
    assert {f.partition("-")[0] for f in plain.values()} == {"model"}
    files = {p.name for p in target.glob("*.safetensors")}
    assert files == set(mine.values()) | set(plain.values())
    assert len(files) > 8


def test_the_same_source_and_options_give_the_same_bytes(tmp_path: Path) -> None:
    build(tmp_path / "src", SPECS["padded"])
    for name in ("a", "b"):
        pack(tmp_path / "src", tmp_path / name)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    text = (tmp_path / "a" / "transcode_report.json").read_text()
    assert str(tmp_path) not in text


def test_a_config_names_what_a_loader_needs(tmp_path: Path) -> None:
    build(tmp_path / "src", SPECS["FP8 attention"])
    c = packed.config(pack(tmp_path / "src", tmp_path / "dst"))
    assert (c["quant_method"], c["layout"], c["layout_version"]) == ("transcode", "marlin-nvfp4", 1)
    assert c["activation_dtype"] == "bfloat16"
    assert c["w13_order"] == "gate_up"
    assert c["modules"]["nvfp4"] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert "model.layers.0.self_attn.q_proj" in c["modules"]["fp8-tensor"]
    assert c["carried"][0]["config"]["quant_algo"] == "FP8"
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} <= set(c["ignore"])
    assert c["kv_cache"]
    assert c["sizes"]["model.layers.0.mlp.experts.w13"]["padded_n"] == [128, 128]


@pytest.mark.parametrize(("tp", "size"), [(1, 128), (2, 128), (4, 256)])
def test_tp_pads_experts_to_whole_tiles(tmp_path: Path, tp: int, size: int) -> None:
    spec = replace(SPECS["padded to 128"], attention="bf16")
    truth = build(tmp_path / "src", spec)
    target = pack(tmp_path / "src", tmp_path / "dst", "--tp", str(tp))
    assert packed.tensors(target)["model.layers.0.mlp.experts.w2_weight"].shape[1] * 16 == size
    assert {1, tp} <= set(packed.config(target)["tp"])
    found = packed.weights(target)
    assert all(torch.equal(found[m], truth[m]) for m in truth)


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    args = ("convert", "--to", "marlin-nvfp4", "--dry-run", tmp_path / "src", tmp_path / "dst")
    ran = run(*args)
    assert ran.code == 0
    assert "experts-00001-of-00001.safetensors" in ran.out
    plan = json.loads(run(*args, "--json").out)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
    pack(tmp_path / "src", tmp_path / "dst")
    sizes = {s["name"]: s["bytes"] for s in plan["shards"]}
    for name, size in sizes.items():
        head = (tmp_path / "dst" / name).read_bytes()[:8]
        assert (tmp_path / "dst" / name).stat().st_size == 8 + int.from_bytes(head, "little") + size


def test_json_is_one_object_on_stdout(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    ran = run("convert", "--to", "marlin-nvfp4", "--json", tmp_path / "src", tmp_path / "dst")
    assert json.loads(ran.out) == report(tmp_path / "dst")
    again = run("convert", "--to", "marlin-nvfp4", "--json", tmp_path / "src", tmp_path / "dst")
    assert again.code == 1
    assert json.loads(again.out)["exit_code"] == 1


@pytest.mark.parametrize(
    ("src", "dst"),
    [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("link", "a"), ("a", "link/x"), ("a", "./a/../a")],
)
def test_source_and_destination_must_lie_apart(tmp_path: Path, src: str, dst: str) -> None:
    build(tmp_path / "a", SMALL)
    build(tmp_path / "a" / "b", SMALL)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = content(tmp_path / "a")
    for options in ((), ("--overwrite",)):
        ran = run("convert", "--to", "marlin-nvfp4", *options, tmp_path / src, tmp_path / dst)
        assert ran.code == 1
        assert "choose another place" in ran.err
    assert content(tmp_path / "a") == before


def test_an_existing_destination_is_replaced_only_when_asked(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    pack(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "dst" / "mark").write_text("old")
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "--overwrite" in ran.err
    assert (tmp_path / "dst" / "mark").exists()
    pack(tmp_path / "src", tmp_path / "dst", "--overwrite")
    assert not (tmp_path / "dst" / "mark").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]


def test_overwrite_does_not_remove_what_is_no_checkpoint(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    ran = run("convert", "--to", "marlin-nvfp4", "--overwrite", tmp_path / "src", tmp_path / "home")
    assert ran.code == 1
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_a_run_that_fails_keeps_the_old_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "src", SMALL)
    pack(tmp_path / "src", tmp_path / "dst")
    before = content(tmp_path / "dst")
    monkeypatch.setattr("transcode.convert.copy_companions", disk_full)
    ran = run("convert", "--to", "marlin-nvfp4", "--overwrite", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "No space left on device" in ran.err
    assert content(tmp_path / "dst") == before


def disk_full(*_: object) -> list[str]:
    raise OSError(28, "No space left on device", "dst")


KILL = """
import os, signal, sys
from transcode import convert, destination
write, left, how = destination.write_shard, [2], sys.argv.pop()
def die(place, shard, metadata, fill):
    if not left[0]:
        (place / (shard.name + ".unfinished")).write_bytes(b"half")
        os.kill(os.getpid(), getattr(signal, how))
    left[0] -= 1
    write(place, shard, metadata, fill)
convert.write_shard = die
from transcode.cli import main
main()
"""


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -signal.SIGKILL), ("SIGINT", 130)])
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, how: str, code: int) -> None:
    build(tmp_path / "src", SPECS["padded"])
    pack(tmp_path / "src", tmp_path / "whole", "--shard-size", "100KB")
    args = ["convert", "--to", "marlin-nvfp4", "--shard-size", "100KB"]
    args += [str(tmp_path / "src"), str(tmp_path / "dst")]
    ran = subprocess.run(
        [sys.executable, "-c", KILL, *args, how], capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stderr
    if how == "SIGINT":
        assert "goes on where this one stopped" in ran.stderr
    partial = tmp_path / "dst.partial"
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
    assert len(kept) == 2
    assert not (tmp_path / "dst").exists()
    written = list[str]()
    real = destination.write_shard

    def note(place: Path, shard: OutputShard, *rest: Any) -> None:
        written.append(shard.name)
        real(place, shard, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transcode.convert.write_shard", note)
        assert run(*args).code == 0
    assert not set(written) & set(kept)
    assert content(tmp_path / "dst") == content(tmp_path / "whole")


def test_another_plans_leftovers_are_refused_by_their_difference(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    pack(tmp_path / "src", tmp_path / "x", "--dtype", "float16")
    args = ("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transcode.convert.copy_companions", disk_full)
        assert run(*args).code == 1
    ran = run(*args, "--dtype", "float16")
    assert ran.code == 1
    assert "dtype was bfloat16, is float16" in ran.err
    assert run(*args).code == 0


def test_a_strangers_partial_folder_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial" / "x").write_text("mine")
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "not ours" in ran.err


def test_a_source_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    shard = tmp_path / "src" / "model.safetensors"
    real = destination.copy_companions

    def meddle(*args: Any) -> list[str]:
        os.utime(shard, ns=(1, 1))
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transcode.convert.copy_companions", meddle)
        ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "changed while it was being read" in ran.err
    assert not (tmp_path / "dst").exists()


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    usage = shutil.disk_usage(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
        ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "no space left" in ran.err


def test_usage_errors_are_exit_2(tmp_path: Path) -> None:
    assert run("convert", tmp_path, tmp_path / "x").code == 2
    size = ("--shard-size", "lots")
    assert run("convert", "--to", "marlin-nvfp4", *size, tmp_path, tmp_path / "x").code == 2
    ran = run("convert", "--to", "nothing", tmp_path, tmp_path / "x")
    assert ran.code == 2
    assert "there are cutlass-nvfp4" in ran.err
    assert "marlin-nvfp4" in ran.err
