"""There and back again: every lossless pair, read with an independent hand (tests/rewriting.py)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import packed
from tests.build import Spec, Tensors, build, edit, edit_config
from tests.convert import pack, run
from tests.producers import KINDS, Built
from tests.rewriting import (
    ULP,
    Meaning,
    close,
    convert,
    copied,
    differing,
    kind,
    load_json,
    meaning,
    one_thread,
    proved,
    raw,
    refused,
    report,
    same_bytes,
)

__all__ = ["kind", "one_thread"]

HERE = Path(__file__).parent
DATA = HERE / "data"
Made = Callable[[str], tuple[Path, Built]]

HOLDS = {
    "modelopt-nvfp4*": "nvfp4", "modelopt-mixed": "nvfp4 tensor", "modelopt-w4a8": "nvfp4-32",
    "modelopt-fp8": "tensor", "modelopt-fp8-channel": "channel", "modelopt-fp8-block*": "block",
    "modelopt-mxfp8": "mxfp8", "modelopt-mxfp4": "mxfp4",
    "ct-nvfp4*": "nvfp4", "ct-mxfp4": "mxfp4", "ct-mxfp8": "mxfp8", "ct-fp8": "tensor",
    "ct-fp8-channel*": "channel", "ct-fp8-naive": "channel+none", "ct-fp8-block": "block",
    "ct-mixed": "nvfp4 channel", "ct-int4-nvfp4": "nvfp4 int4",
    "fp8-mxfp8*": "mxfp8", "fp8-tensor": "tensor", "fp8-fbgemm": "channel", "fp8-*": "block",
    "v4-base": "block", "v4-nvfp4": "nvfp4 block mxfp4", "v4-*": "mxfp4 block",
    "gptoss-mxfp4": "mxfp4", "quark-mxfp4-fp8*": "mxfp4+input", "quark-mxfp4*": "mxfp4",
    "quark-fp8": "tensor", "quark-fp8-ptpc": "channel", "quark-fp8-block": "block",
    "quark-nvfp4": "nvfp4",
}  # fmt: skip
"""What each kind holds, the first pattern that fits."""

ALL = "nvfp4 nvfp4-32 mxfp4 mxfp4+input mxfp8 tensor channel block"
SAYS = {
    "canonical": f"{ALL} channel+none",
    "modelopt": ALL,
    "compressed-tensors": "nvfp4 nvfp4-32 mxfp4 mxfp8 tensor channel channel+none block",
    "compressed-tensors-nvfp4a16": "nvfp4 nvfp4-32 mxfp4 mxfp8 tensor channel block",
    "quark": "mxfp4 mxfp4+input tensor channel channel+none block",
    "deepseek-fp8": "block",
    "deepseek-v4": "mxfp4 block nvfp4",
    "gpt-oss": "mxfp4",
}
"""What a target can say of weights."""

ONLY = {"deepseek-v4": "v4-*", "gpt-oss": "gptoss-mxfp4"}
BACK = {
    "modelopt-*": "modelopt", "ct-*": "compressed-tensors", "v4-*": "deepseek-v4",
    "gptoss-*": "gpt-oss", "quark-*": "quark",
}  # fmt: skip
READ_ONLY = ("fp8-mxfp8", "fp8-mxfp8-vendor", "fp8-tensor", "fp8-fbgemm", "quark-nvfp4",
             "quark-mxfp4-fp8-gptoss")  # fmt: skip
FUSED = ("modelopt-nvfp4-llama4", "modelopt-nvfp4-gptoss")
SOUND = [name for name, k in KINDS.items() if not k.refused]


def first(table: dict[str, str], name: str) -> str:
    return next((v for pattern, v in table.items() if fnmatchcase(name, pattern)), "")


def sayable(name: str, target: str) -> bool:
    holds = first(HOLDS, name).split()
    assert holds, name
    if "int4" in holds:
        return target.startswith("compressed-tensors")
    if not fnmatchcase(name, ONLY.get(target, "*")) or (target == "quark" and "gptoss" in name):
        return False
    if target.endswith("nvfp4a16") and not {"nvfp4", "nvfp4-32"} & {*holds}:
        return False
    return {*holds} <= {*SAYS[target].split()}


PAIRS = [(name, target) for name in SOUND for target in SAYS if sayable(name, target)]


def compressed(name: str) -> bool:
    """Whether its truth is that of a divisor."""
    return name.startswith("ct-") and "nvfp4" in first(HOLDS, name)


def standard(name: str, made: Built) -> Built:
    """The truth by the names that are written: the expert's number before the projection."""
    if name != "modelopt-nvfp4-turned":
        return made

    def turned(tensors: Tensors) -> Tensors:
        found = {}
        for old, value in tensors.items():
            head, experts, tail = old.partition(".experts.")
            proj, _, number = tail.partition(".")
            new = f"{head}{experts}{number}.{proj}" if number.isdigit() else old
            found[new] = value
        return found

    return replace(made, truth=turned(made.truth), inputs=turned(made.inputs))


@pytest.mark.parametrize("name", SOUND)
def test_the_decoder_reads_every_source_as_its_truth(kind: Made, name: str) -> None:
    path, made = kind(name)
    found = meaning(path)
    if name == "modelopt-nvfp4-turned":
        return  # only its standard order is read here
    assert differing(found.weights, quantised(made), 0) == []
    assert differing(found.inputs, made.inputs, 0) == []
    assert differing(found.biases, made.biases, 0) == []


def quantised(made: Built) -> Tensors:
    """The truth of all but INT4, which is carried."""
    return {n: t for n, t in made.truth.items() if f"{n}.weight_shape" not in made.tensors}


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_there_and_back_everything_is_as_it_was(
    kind: Made, tmp_path: Path, name: str, target: str
) -> None:
    source, made = kind(name)
    there = proved(target, source, tmp_path / "there")
    means(name, target, source, standard(name, made), meaning(there))
    if name in READ_ONLY:
        return
    back = convert(
        first(BACK, name) or "deepseek-fp8", there, tmp_path / "back",
        *["--fused"] * (name in FUSED),
    )  # fmt: skip
    same_bytes(packed.tensors(back), expected(name, target, packed.tensors(source)))


def means(name: str, target: str, source: Path, made: Built, found: Meaning) -> None:
    """Weights are the oracle's, input scales, biases and KV scales too; the rest is carried."""
    ct = target.startswith("compressed-tensors")
    rel = ULP if "nvfp4" in first(HOLDS, name) and compressed(name) != ct else 0
    assert differing(found.weights, quantised(made), rel) == []
    wanted = made.inputs
    if target.endswith("nvfp4a16"):
        wanted = {m: t for m, t in wanted.items() if m not in nvfp4_modules(made)}
    if name == "modelopt-w4a8" and ct:
        wanted = {}
    assert differing(found.inputs, wanted, rel) == []
    assert differing(found.biases, made.biases, 0) == []
    scales = {re.sub(r"\.([kv])_proj\.\1$", r".\1", n): t for n, t in made.kv.items()}
    assert differing({n: t.float().reshape(()) for n, t in found.kv.items()}, scales, 0) == []
    same_bytes(found.rest, meaning(source).rest if name != "modelopt-nvfp4-turned" else made.rest)


def nvfp4_modules(made: Built) -> set[str]:
    names = {n.rpartition(".")[0] for n in made.tensors if "weight_scale_2" in n or "global" in n}
    return {m for m in made.truth if m in names or ".experts." in m}


def expected(name: str, target: str, source: Tensors) -> Tensors:
    """The source's tensors but for what is told to be another way."""
    found = dict(source)
    if target.endswith("nvfp4a16"):  # input scales are left out on purpose
        found = {n: t for n, t in found.items() if "input" not in n or t.dtype != torch.float32}
        for n, t in source.items():  # those of FP8 stay
            module = n.removesuffix(".input_scale")
            weight = source.get(f"{module}.weight")
            if module != n and weight is not None and weight.dtype == torch.float8_e4m3fn:
                found[n] = t
    if name == "modelopt-nvfp4-turned":
        found = {turn_back(n): t for n, t in found.items()}
    if name == "fp8-deepseek-1d":  # one row of blocks comes back 2-D
        found = {n: t[None] if is_row(n, t) else t for n, t in found.items()}
    if name == "ct-fp8":  # the older spelling of KV scales
        found = {kv_now(n): t.reshape(-1) if kv_now(n) != n else t for n, t in found.items()}
    if name == "modelopt-w4a8" and target.startswith("compressed-tensors"):
        for n in [n for n in found if n.endswith(".weight_scale")]:
            found[n] = found[n].view(torch.uint8).repeat_interleave(2, 1).view(found[n].dtype)
        found = {n: t for n, t in found.items() if not n.endswith(".input_scale")}
    return found


def turn_back(name: str) -> str:
    head, experts, tail = name.partition(".experts.")
    proj, _, rest = tail.partition(".")
    number, _, leaf = rest.partition(".")
    return f"{head}{experts}{number}.{proj}.{leaf}" if number.isdigit() else name


def is_row(name: str, value: Tensor) -> bool:
    return name.endswith("weight_scale_inv") and value.dim() == 1


def kv_now(name: str) -> str:
    for letter in "kv":
        name = name.replace(f".{letter}_proj.output_scale", f".{letter}_scale")
    return name


@pytest.mark.parametrize("target", SAYS)
def test_what_a_target_has_no_word_for_is_refused(kind: Made, tmp_path: Path, target: str) -> None:
    """One kind of each encoding that it cannot say, or that is of another model type."""
    seen = set[str]()
    for name in SOUND:
        what = first(HOLDS, name)
        if sayable(name, target) or what in seen or "gptoss" in name:
            continue
        seen.add(what)
        ran = run("convert", "--to", target, kind(name)[0], tmp_path / "dst")
        if ran.code == 0:
            assert "became" in ran.err
            shutil.rmtree(tmp_path / "dst")
            continue
        assert (ran.code, len(ran.err.splitlines())) in ((1, 1), (4, 1))
        error = ran.err
        says = (
            "has no word", "wants", "is for model_type", "has no place for it", "does not become",
            "--lossy", "--drop-kv-scales",
        )  # fmt: skip
        assert any(word in error for word in says), error
    assert seen


# BF16.


@pytest.mark.parametrize("name", [n for n in SOUND if "int4" not in n])
def test_bf16_is_the_nearest_to_the_oracle(kind: Made, tmp_path: Path, name: str) -> None:
    source, made = kind(name)
    made = standard(name, made)
    drop = ["--drop-kv-scales"] * bool(made.kv)
    out = packed.tensors(convert("bf16", source, tmp_path / "dst", *drop))
    for module, truth in made.truth.items():
        weight = out.pop(f"{module}.weight")
        assert weight.dtype == torch.bfloat16
        rel = 2e-7 if compressed(name) else 0.0
        ends = torch.stack([truth * (1 - rel), truth * (1 + rel)]).to(torch.bfloat16)
        low, high = ends.amin(0), ends.amax(0)
        assert ((low <= weight) & (weight <= high)).all(), module
        assert torch.equal(weight.signbit(), truth.signbit()), module
        if f"{module}.bias" in out:
            assert raw(out.pop(f"{module}.bias")) == raw(made.biases[module])
    rest = meaning(source).rest if name != "modelopt-nvfp4-turned" else made.rest
    same_bytes(out, rest)
    config = load_json(tmp_path / "dst" / "config.json")
    assert "quantization_config" not in json.dumps(config)
    assert not (tmp_path / "dst" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "fp8-deepseek-e8m0", "gptoss-mxfp4"])
def test_bf16_is_verified_and_says_what_it_rounded(kind: Made, tmp_path: Path, name: str) -> None:
    out = proved("bf16", kind(name)[0], tmp_path / "dst")
    said = report(out)["proved"]["weights"]
    assert ("exact" in said) == (name != "modelopt-nvfp4"), said
    ran = run("convert", "--to", "bf16", "--exact", kind(name)[0], tmp_path / "exact")
    assert ran.code == (4 if name == "modelopt-nvfp4" else 0), ran.err


# Real checkpoints.

GOLDEN = json.loads((HERE / "golden" / "oracle_rewriting.json").read_text())
"""As golden/oracle.json, for folders that hold no NVFP4 one by one; stacked experts by expert."""

ORACLE = json.loads((HERE / "golden" / "oracle.json").read_text()) | GOLDEN
REAL = sorted(ORACLE)
DIALECT = {
    "ct_*": "modelopt", "deepgemm*": "compressed-tensors", "hf_fp8ops*": "modelopt",
    "modelopt_*": "compressed-tensors", "hf_mxfp4*": "modelopt", "pair*": "compressed-tensors",
    "quark*": "compressed-tensors",
}  # fmt: skip
OWN = {
    "ct_*": "compressed-tensors", "deepgemm*": "deepseek-v4", "hf_fp8ops*": "deepseek-fp8",
    "modelopt_*": "modelopt", "hf_mxfp4*": "gpt-oss", "pair*": "modelopt", "quark*": "quark",
}  # fmt: skip


def test_every_real_checkpoint_is_here() -> None:
    assert sorted(p.name for p in DATA.iterdir()) == REAL
    assert len(REAL) == 18


def sha256(value: Tensor) -> str:
    """Of the float32 bytes with -0 as +0, as tests/test_oracle.py has it."""
    return hashlib.sha256((value + 0.0).contiguous().numpy().tobytes()).hexdigest()


def invalid(name: str, module: str) -> bool:
    """What ModelOpt writes for a matrix of zeros; its own decoder makes NaN of it."""
    return name.endswith("zeros") and module == "model.layers.0.mlp.experts.1.down_proj"


@pytest.mark.parametrize("name", REAL)
def test_real_ones_decode_to_the_oracle_in_every_form(tmp_path: Path, name: str) -> None:
    found = meaning(DATA / name)
    wanted = {m: d for m, d in ORACLE[name]["sha256"].items() if not invalid(name, m)}
    assert {m: sha256(found.weights[m]) for m in wanted} == wanted
    for target in ("canonical", first(DIALECT, name)):
        out = meaning(proved(target, DATA / name, tmp_path / target))
        ct = target.startswith("compressed") != name.startswith("ct_") and "nvfp4" in name
        assert differing(out.weights, found.weights, ULP if ct else 0) == []
        assert differing(out.biases, found.biases, 0) == []
        same_bytes(out.rest, found.rest)


@pytest.mark.parametrize("name", REAL)
def test_real_ones_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    fused = ["--fused"] * (name.startswith("pair") or "llama4" in name)
    source = packed.tensors(DATA / name)
    zero = "model.layers.0.mlp.experts.1.down_proj"
    for target in ("canonical", first(DIALECT, name)):
        there = convert(target, DATA / name, tmp_path / "there")
        back = packed.tensors(convert(first(OWN, name), there, tmp_path / "back", *fused))
        leaves = ("weight_scale", *["weight_scale_2"] * (target != "canonical"))
        for leaf in leaves if name.endswith("zeros") else ():  # NaN is not written again
            assert back[f"{zero}.{leaf}"].float().isfinite().all()
            back[f"{zero}.{leaf}"] = source[f"{zero}.{leaf}"]
        same_bytes(back, source)


@pytest.mark.parametrize("name", REAL)
def test_real_ones_are_exact_in_bf16(tmp_path: Path, name: str) -> None:
    out = packed.tensors(convert("bf16", DATA / name, tmp_path / "dst"))
    for module, truth in meaning(DATA / name).weights.items():
        weight = out[f"{module}.weight"]
        if "nvfp4" in name and name.startswith("ct_"):
            assert close(weight.float(), truth, 2**-8)
        else:
            assert torch.equal(weight, truth.to(torch.bfloat16)), module


@pytest.mark.parametrize("name", ["modelopt_nvfp4_llama4", "pair_cast_mxfp4_to_nvfp4_gptoss"])
def test_real_stacked_ones_are_packed_for_marlin(tmp_path: Path, name: str) -> None:
    found = packed.weights(pack(DATA / name, tmp_path / "dst"))
    wanted = meaning(DATA / name).weights
    assert wanted.keys() == found.keys()
    for module, weight in found.items():
        assert torch.equal(weight, wanted[module]), module


# Bytes.


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("ct-mxfp4", ["canonical", "modelopt", "quark"]),
        ("ct-mxfp8", ["canonical", "modelopt"]),
        ("quark-mxfp4", ["canonical", "compressed-tensors", "modelopt"]),
        ("gptoss-mxfp4", ["canonical", "compressed-tensors", "modelopt"]),
        ("v4-hub", ["canonical", "deepseek-v4"]),
        ("fp8-deepseek-e8m0", ["canonical", "deepseek-fp8", "quark"]),
    ],
)
def test_all_bytes_of_e8m0_scales_and_of_codes_survive(
    kind: Made, tmp_path: Path, name: str, targets: list[str]
) -> None:
    """NaN among them: 255 as E8M0, 0x7F and 0xFF as E4M3; codes of -0."""
    source = copied(kind(name)[0], tmp_path / "src")
    ramp = Ramp(256)
    edit(source, lambda t: {n: ramp(v) if scaled(n, v) else v for n, v in t.items()})
    for target in targets:
        there = proved(target, source, tmp_path / "there")
        assert e8m0_bytes(there) == set(range(256))
        back = convert(first(BACK, name) or "deepseek-fp8", there, tmp_path / "back")
        same_bytes(packed.tensors(back), packed.tensors(source))


def scaled(name: str, value: Tensor) -> bool:
    return value.element_size() == 1 and value.numel() > 1 and "tid2eid" not in name


class Ramp:
    """Bytes below a limit one after the other, going on from tensor to tensor."""

    def __init__(self, limit: int) -> None:
        self.limit, self.at = limit, 0

    def __call__(self, value: Tensor) -> Tensor:
        numbers = torch.arange(self.at, self.at + value.numel()) % self.limit
        self.at += value.numel()
        return numbers.to(torch.uint8).reshape(value.shape).view(value.dtype)


def e8m0_bytes(folder: Path) -> set[int]:
    found = [v for n, v in packed.tensors(folder).items() if "scale" in n and v.element_size() == 1]
    return set(torch.cat([v.contiguous().view(torch.uint8).flatten() for v in found]).tolist())


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
def test_e8m0_as_float32_is_exact(kind: Made, tmp_path: Path, target: str) -> None:
    """All 255 powers of two, 2^-127 among them, as floats; and back."""
    source = copied(kind("fp8-deepseek-e8m0")[0], tmp_path / "src")
    ramp = Ramp(255)
    edit(source, lambda t: {n: ramp(v) if "scale_inv" in n else v for n, v in t.items()})
    assert e8m0_bytes(source) == set(range(255))
    there = proved(target, source, tmp_path / "there")
    ours, theirs = packed.tensors(there), packed.tensors(source)
    for name, bytes_ in theirs.items():
        if "scale_inv" in name:
            scale = ours[name.replace("scale_inv", "scale")]
            powers = torch.exp2(bytes_.view(torch.uint8).double() - 127)
            assert scale.is_floating_point()
            assert torch.equal(scale.reshape(powers.shape).double(), powers), name
    back = convert("deepseek-fp8", there, tmp_path / "back")
    same_bytes(packed.tensors(back), packed.tensors(source))


def test_a_scale_of_nan_is_nan_in_bf16(kind: Made, tmp_path: Path) -> None:
    source = copied(kind("ct-mxfp4")[0], tmp_path / "src")
    ramp = Ramp(256)
    edit(source, lambda t: {n: ramp(v) if n.endswith("weight_scale") else v for n, v in t.items()})
    out = packed.tensors(proved("bf16", source, tmp_path / "dst"))
    wanted = meaning(source).weights
    assert any(t.isnan().any() for t in wanted.values())
    for module, weight in wanted.items():
        ours = out[f"{module}.weight"]
        assert torch.equal(ours.nan_to_num(1), weight.to(torch.bfloat16).nan_to_num(1)), module
        assert torch.equal(ours.isnan(), weight.isnan()), module


def test_codes_of_minus_zero_are_kept(kind: Made, tmp_path: Path) -> None:
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")
    edit(source, lambda t: {n: minus(v) if v.dtype == torch.uint8 else v for n, v in t.items()})
    for target in ("canonical", "compressed-tensors"):
        there = proved(target, source, tmp_path / target)
        for module, weight in meaning(there).weights.items():
            assert (weight == 0).all(), module
            assert weight.signbit().all(), module
    out = packed.tensors(convert("bf16", source, tmp_path / "bf16"))
    assert out["model.layers.0.mlp.experts.0.up_proj.weight"].signbit().all()


def minus(value: Tensor) -> Tensor:
    return torch.full_like(value, 0x88)


# Values that mean nothing.

ZERO = "model.layers.0.mlp.experts.1.down_proj"


def test_a_zero_matrix_with_nan_scales_is_zero_in_every_form(tmp_path: Path) -> None:
    source = DATA / "modelopt_nvfp4_qwen3moe_zeros"
    ct = packed.tensors(proved("compressed-tensors", source, tmp_path / "ct"))
    assert torch.isfinite(ct[f"{ZERO}.weight_global_scale"]).all()
    assert (ct[f"{ZERO}.weight_global_scale"] > 0).all()
    assert not ct[f"{ZERO}.weight_scale"].view(torch.uint8).any()
    assert raw(ct[f"{ZERO}.weight_packed"]) == raw(packed.tensors(source)[f"{ZERO}.weight"])
    bf16 = packed.tensors(proved("bf16", source, tmp_path / "bf16"))
    assert not torch.count_nonzero(bf16[f"{ZERO}.weight"])
    canonical = meaning(proved("canonical", source, tmp_path / "canonical"))
    for found in (meaning(tmp_path / "ct"), canonical):
        assert not torch.count_nonzero(found.weights[ZERO])
        assert all(torch.isfinite(w).all() for w in found.weights.values())
    assert report(tmp_path / "ct")["zero_matrices"] == [ZERO]


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name].clone())}


def nan_at(row: int, block: int) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value.view(torch.uint8)[row, block] = 0x7F
        return value

    return change


UP = "model.layers.0.mlp.experts.2.up_proj"


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4"])
@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "bf16"])
def test_a_nan_scale_over_codes_is_refused_by_place(
    kind: Made, tmp_path: Path, name: str, target: str
) -> None:
    source = copied(kind(name)[0], tmp_path / "src")
    edit(source, put(f"{UP}.weight_scale", nan_at(7, 3)))
    error = refused(target, source, tmp_path / "dst")
    assert UP in error
    assert "row 7, block 3" in error


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "bf16"])
def test_a_nan_scale_over_zeros_is_zero(kind: Made, tmp_path: Path, target: str) -> None:
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")

    def blank(value: Tensor) -> Tensor:
        value[7, 24:32] = 0x80
        return value

    edit(source, put(f"{UP}.weight_scale", nan_at(7, 3)))
    edit(source, put(f"{UP}.weight", blank))
    out = proved(target, source, tmp_path / "dst")
    tensors = packed.tensors(out)
    if target == "bf16":
        weight = tensors[f"{UP}.weight"]
    else:
        assert not tensors[f"{UP}.weight_scale"].float().isnan().any()
        weight = meaning(out).weights[UP]
    assert torch.isfinite(weight).all()
    assert not weight[7, 48:64].any()
    assert target == "bf16" or any("NaN" in note for note in report(out)["notes"])


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "leaf"), [
    ("modelopt-nvfp4", "weight_scale_2"), ("ct-nvfp4", "weight_global_scale"),
])  # fmt: skip
def test_a_global_scale_that_is_no_number_is_refused(
    kind: Made, tmp_path: Path, name: str, leaf: str, value: float
) -> None:
    source = copied(kind(name)[0], tmp_path / "src")
    edit(source, put(f"{UP}.{leaf}", lambda t: torch.full_like(t, value)))
    if leaf == "weight_global_scale" and value == float("inf"):  # a factor of 0
        found = meaning(proved("modelopt", source, tmp_path / "dst"))
        assert not torch.count_nonzero(found.weights[UP])
        return
    for target in ("modelopt", "compressed-tensors", "bf16", "canonical"):
        assert f"{UP}.{leaf}" in refused(target, source, tmp_path / "dst")


def test_a_divisor_of_zero_is_refused(kind: Made, tmp_path: Path) -> None:
    source = copied(kind("ct-nvfp4")[0], tmp_path / "src")
    edit(source, put(f"{UP}.weight_global_scale", torch.zeros_like))
    for target in ("modelopt", "compressed-tensors", "bf16"):
        assert f"{UP}.weight_global_scale" in refused(target, source, tmp_path / "dst")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0, None])
@pytest.mark.parametrize(("name", "target", "leaf"), [
    ("modelopt-nvfp4", "compressed-tensors", "input_scale"),
    ("modelopt-nvfp4", "modelopt", "input_scale"),
    ("ct-nvfp4", "modelopt", "input_global_scale"),
])  # fmt: skip
def test_an_input_scale_that_is_none_is_refused_or_filled_with_the_largest(
    kind: Made, tmp_path: Path, name: str, target: str, leaf: str, value: float | None
) -> None:
    source = copied(kind(name)[0], tmp_path / "src")
    edit(source, put(f"{UP.replace('.2.', '.1.')}.{leaf}", lambda t: t * 3))  # none are alike
    if value is None:
        edit(source, lambda t: {n: v for n, v in t.items() if n != f"{UP}.{leaf}"})
    else:
        edit(source, put(f"{UP}.{leaf}", lambda t: torch.full_like(t, value)))
    error = refused(target, source, tmp_path / "dst")
    assert UP in error
    assert "--fill-input-scale" in error
    out = meaning(proved(target, source, tmp_path / "dst", "--fill-input-scale"))
    others = [out.inputs[UP.replace(".2.", f".{e}.")] for e in (0, 1)]
    assert close(out.inputs[UP], torch.stack(others).max(), 1.2e-7)
    assert list(report(tmp_path / "dst")["filled_input_scales"]) == [UP]
    assert any("filled in" in note for note in report(tmp_path / "dst")["notes"])
    if target == "compressed-tensors":
        a16 = proved("compressed-tensors-nvfp4a16", source, tmp_path / "a16")
        assert not meaning(a16).inputs


def test_an_input_scale_without_a_valid_neighbour_cannot_be_filled(
    kind: Made, tmp_path: Path
) -> None:
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")
    for e in range(3):
        edit(source, put(f"model.layers.0.mlp.experts.{e}.up_proj.input_scale", torch.zeros_like))
    error = refused("compressed-tensors", source, tmp_path / "dst", "--fill-input-scale")
    assert "no valid input scale" in error


def test_the_canonical_form_keeps_whatever_the_scalars_are(kind: Made, tmp_path: Path) -> None:
    """An input scale that is missing, 0 or NaN comes back as it was."""
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")
    edit(source, put(f"{UP}.input_scale", torch.zeros_like))
    edit(source, put(f"{UP.replace('.2.', '.1.')}.input_scale", lambda t: t * torch.nan))
    there = proved("canonical", source, tmp_path / "there")
    tensor = packed.tensors(there)["model.layers.0.mlp.experts.w13_input_scale"]
    assert tensor[2, 1] == 0
    assert tensor[1, 1].isnan()


# Global scales that differ inside a group.

MOE = Spec(hidden=192, intermediate=160, experts=3, layers=1)
GLOBAL = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}
MLP = "model.layers.0.mlp.experts.{}"


def output(weights: Tensors, mlp: str, x: Tensor) -> Tensor:
    """`down(silu(gate x) * up x)` in float64."""
    gate, up, down = (weights[f"{mlp}.{p}_proj"].double() for p in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


DIALECTS = [(a, b) for a in GLOBAL for b in GLOBAL]


@pytest.mark.parametrize(("dialect", "target"), DIALECTS)
def test_by_default_both_scalars_are_kept_with_a_warning(
    tmp_path: Path, dialect: Any, target: str
) -> None:
    truth = build(tmp_path / "src", replace(MOE, dialect=dialect, gate_up_ratio=1.37))
    out = proved(target, tmp_path / "src", tmp_path / "dst")
    rel = 0 if dialect == target else ULP
    assert differing(meaning(out).weights, truth, rel) == []
    (note,) = [n for n in report(out)["notes"] if "differ" in n]
    assert "1.37" in note
    assert "--unify" in note
    assert {d["how"] for d in report(out)["unified"]} == {"keep"}
    back = convert(dialect, out, tmp_path / "back")
    same_bytes(packed.tensors(back), packed.tensors(tmp_path / "src"))


@pytest.mark.parametrize("ratio", [1.37, 4.0])
@pytest.mark.parametrize(("dialect", "target"), DIALECTS)
def test_folded_scalars_are_bit_equal_and_the_layer_computes_the_same(
    tmp_path: Path, dialect: Any, target: str, ratio: float
) -> None:
    truth = build(tmp_path / "src", replace(MOE, dialect=dialect, gate_up_ratio=ratio))
    out = proved(target, tmp_path / "src", tmp_path / "dst", "--unify", "fold")
    assert {d["how"] for d in report(out)["unified"]} == {"fold"}
    tensors, found = packed.tensors(out), meaning(out)
    x = torch.randn(8, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for e in range(3):
        gate, up = (tensors[f"{MLP.format(e)}.{p}_proj.{GLOBAL[target]}"] for p in ("gate", "up"))
        assert raw(gate) == raw(up)
        want, ours = output(truth, MLP.format(e), x), output(found.weights, MLP.format(e), x)
        assert (ours - want).norm() <= 1e-6 * want.norm()
        down = f"{MLP.format(e)}.down_proj"
        before = meaning(tmp_path / "src").inputs[down]
        assert close(found.inputs[down], before / ratio, 1e-6)
    codes = "weight_packed" if target == "compressed-tensors" else "weight"
    own = "weight_packed" if dialect == "compressed-tensors" else "weight"
    source = packed.tensors(tmp_path / "src")
    for module in truth:
        assert raw(tensors[f"{module}.{codes}"]) == raw(source[f"{module}.{own}"])
        assert raw(tensors[f"{module}.weight_scale"]) == raw(source[f"{module}.weight_scale"])


@pytest.mark.parametrize(("dialect", "target"), DIALECTS)
def test_rescaled_scalars_are_bit_equal_and_weights_within_the_bound(
    tmp_path: Path, dialect: Any, target: str
) -> None:
    spec = replace(MOE, dialect=dialect, gate_up_ratio=1.37, qkv_ratio=(1.7, 0.6))
    truth = build(tmp_path / "src", spec)
    out = proved(target, tmp_path / "src", tmp_path / "dst", "--unify", "rescale")
    tensors, found = packed.tensors(out), meaning(out)
    groups = [[f"{MLP.format(e)}.{p}_proj" for p in ("gate", "up")] for e in range(3)]
    groups.append([f"model.layers.0.self_attn.{p}_proj" for p in "qkv"])
    for group in groups:
        assert len({raw(tensors[f"{m}.{GLOBAL[target]}"]) for m in group}) == 1
        for module in group:
            bound = truth[module].abs() / 17 + truth[module].abs().max() * 2**-12
            assert ((found.weights[module] - truth[module]).abs() <= bound * (1 + 1e-6)).all()
    for module in truth.keys() - {m for group in groups for m in group}:
        assert close(found.weights[module], truth[module], ULP)


@pytest.mark.parametrize("how", ["fold", "rescale"])
@pytest.mark.parametrize(("dialect", "target"), DIALECTS)
def test_exact_refuses_to_round_again(tmp_path: Path, dialect: Any, target: str, how: str) -> None:
    spec = replace(MOE, dialect=dialect, gate_up_ratio=1.37, qkv_ratio=1.5)
    build(tmp_path / "src", spec)
    options = ("--unify", how, "--exact")
    error = refused(target, tmp_path / "src", tmp_path / "dst", *options, code=4)
    assert "not exact" in error


def test_exact_refuses_a_reciprocal_that_does_not_come_back(kind: Made, tmp_path: Path) -> None:
    source = kind("modelopt-nvfp4")[0]
    assert "reciprocal" in refused(
        "compressed-tensors", source, tmp_path / "dst", "--exact", code=4
    )
    proved("modelopt", source, tmp_path / "same", "--exact")
    proved("canonical", source, tmp_path / "canonical", "--exact")


# Stacked experts.


def test_llama4_goes_apart_and_together_again(kind: Made, tmp_path: Path) -> None:
    source, made = kind("modelopt-nvfp4-llama4")
    apart = packed.tensors(proved("modelopt", source, tmp_path / "apart"))
    assert not [n for n in apart if "gate_up_proj" in n]
    assert apart["model.layers.1.feed_forward.experts.2.gate_proj.weight"].shape == (160, 96)
    back = proved("modelopt", tmp_path / "apart", tmp_path / "back", "--fused")
    same_bytes(packed.tensors(back), made.tensors)


FUSABLE = ("modelopt-nvfp4-llama4", "modelopt-nvfp4-gptoss")


@pytest.mark.parametrize("name", FUSABLE)
def test_one_scalar_for_all_experts_is_refused_where_theirs_differ(
    kind: Made, tmp_path: Path, name: str
) -> None:
    source, _ = kind(name)
    apart = convert("modelopt", source, tmp_path / "apart")
    root = "model.layers.0.mlp.experts" if "gptoss" in name else (
        "model.layers.0.feed_forward.experts")  # fmt: skip
    one = f"{root}.1.up_proj"
    edit(apart, put(f"{one}.weight_scale_2", lambda t: t * 1.5))
    edit(apart, put(f"{one}.input_scale", lambda t: t * 2))
    truth = meaning(apart).weights
    error = refused("modelopt", apart, tmp_path / "dst", "--fused", code=4)
    assert "-fold" in error
    assert "--unify rescale" in error
    out = proved("modelopt", apart, tmp_path / "dst", "--fused", "--unify", "rescale")
    found = meaning(out)
    scalar = packed.tensors(out)[f"{root}.gate_up_proj_weight_scale_2"]
    assert scalar.shape == ()
    for module, weight in found.weights.items():
        bound = truth[module].abs() / 17 + truth[module].abs().max() * 2**-12
        assert ((weight - truth[module]).abs() <= bound).all(), module
    assert close(found.weights[one], truth[one], 0)
    assert found.inputs[f"{root}.0.gate_proj"] == meaning(apart).inputs[one]


@pytest.mark.parametrize(
    ("name", "model_type", "transposed", "turns"),
    [
        ("modelopt-nvfp4-llama4", "llama4_text", True, False),
        ("gptoss-mxfp4", "gpt_oss", True, True),
        ("ct-mixed", "qwen3_5_moe_text", False, False),
    ],
)
def test_bf16_experts_are_stacked_as_the_family_has_it(
    kind: Made, tmp_path: Path, name: str, model_type: str, transposed: bool, turns: bool
) -> None:
    source, made = kind(name)
    config = load_json(source / "config.json")
    assert config.get("text_config", config)["model_type"] == model_type
    out = packed.tensors(proved("bf16", source, tmp_path / "dst", "--fused"))
    single = packed.tensors(convert("bf16", source, tmp_path / "single"))
    containers = {m.partition(".experts.")[0] for m in made.truth if ".experts." in m}
    assert containers
    for at in containers:
        both, down = out[f"{at}.experts.gate_up_proj"], out[f"{at}.experts.down_proj"]
        assert both.shape == ((3, 192, 320) if transposed else (3, 320, 192))
        assert down.shape == ((3, 160, 192) if transposed else (3, 192, 160))
        both, down = (t.transpose(1, 2) if transposed else t for t in (both, down))
        for e in range(3):
            gate, up = (both[e, i::2] if turns else both[e, 160 * i :][:160] for i in (0, 1))
            for value, leaf in ((gate, "gate_proj"), (up, "up_proj"), (down[e], "down_proj")):
                assert torch.equal(value, single[f"{at}.experts.{e}.{leaf}.weight"])
        if made.biases:
            assert raw(out[f"{at}.experts.gate_up_proj_bias"]) == raw(
                made.tensors[f"{at}.experts.gate_up_proj_bias"]
            )
    assert not [n for n in out if ".experts.0." in n]


@pytest.mark.parametrize(
    ("name", "target"),
    [("modelopt-nvfp4", "bf16"), ("ct-nvfp4", "compressed-tensors"), ("modelopt-mxfp4", "quark"),
     ("fp8-deepseek", "deepseek-fp8"), ("v4-hub", "deepseek-v4")],
)  # fmt: skip
def test_what_nobody_stacks_is_not_stacked(
    kind: Made, tmp_path: Path, name: str, target: str
) -> None:
    assert "--fused" in refused(target, kind(name)[0], tmp_path / "dst", "--fused")


def test_modelopt_stacks_no_mxfp4(kind: Made, tmp_path: Path) -> None:
    error = refused("modelopt", kind("gptoss-mxfp4")[0], tmp_path / "dst", "--fused")
    assert "stacks no experts in mxfp4" in error


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {n: v for n, v in t.items() if ".experts.2." not in n or "down" not in n},
        lambda t: {n.replace("experts.2.", "experts.3."): v for n, v in t.items()},
        lambda t: {n: narrow(n, v) for n, v in t.items()},
    ],
    ids=["missing", "gap", "shape"],
)
@pytest.mark.parametrize("target", ["canonical"])
def test_experts_that_differ_are_not_stacked(
    kind: Made, tmp_path: Path, target: str, change: Callable[[Tensors], Tensors]
) -> None:
    source = copied(kind("modelopt-nvfp4")[0], tmp_path / "src")
    edit(source, change)
    refused(target, source, tmp_path / "dst")


def narrow(name: str, value: Tensor) -> Tensor:
    """Expert 1's gate and up with half the rows."""
    one = ".experts.1." in name and ("gate" in name or "up" in name) and value.dim() == 2
    return value[:80].clone() if one else value


# What cannot be said.


@pytest.mark.parametrize(("target", "name"), [
    ("gpt-oss", "ct-mxfp4"), ("gpt-oss", "v4-hub"), ("deepseek-v4", "fp8-deepseek"),
    ("deepseek-v4", "ct-mxfp4"), ("deepseek-v4-nvfp4", "modelopt-nvfp4"),
])  # fmt: skip
def test_other_model_types_are_refused(kind: Made, tmp_path: Path, target: str, name: str) -> None:
    assert "is for model_type" in refused(target, kind(name)[0], tmp_path / "dst")


@pytest.mark.parametrize("target", ["canonical", "compressed-tensors", "modelopt", "bf16"])
def test_a_scale_of_the_activations_cannot_be_carried(
    kind: Made, tmp_path: Path, target: str
) -> None:
    error = refused(target, kind("modelopt-nvfp4-awq")[0], tmp_path / "dst")
    assert "pre_quant_scale" in error


def test_int4_is_carried_by_compressed_tensors_only(kind: Made, tmp_path: Path) -> None:
    source, made = kind("ct-int4-nvfp4")
    out = packed.tensors(proved("compressed-tensors", source, tmp_path / "dst"))
    same_bytes(out, made.tensors)
    for target in ("canonical", "modelopt", "bf16"):
        assert "int4" in refused(target, source, tmp_path / f"{target}.dst")


def test_an_input_scale_of_mxfp4_has_no_place_in_compressed_tensors(
    kind: Made, tmp_path: Path
) -> None:
    error = refused("compressed-tensors", kind("quark-mxfp4-fp8")[0], tmp_path / "dst")
    assert "input_scale" in error
    assert "no place" in error


@pytest.mark.parametrize("leaf", ["activation_scale", "input_scale"])
def test_static_scales_of_fp8_blocks_are_kept_or_refused(
    kind: Made, tmp_path: Path, leaf: str
) -> None:
    """DeepSeek's `activation_scheme: static`: what is written says so, or nothing is."""
    source = copied(kind("fp8-deepseek")[0], tmp_path / "src")
    modules = kind("fp8-deepseek")[1].truth
    edit(source, lambda t: t | {f"{m}.{leaf}": torch.tensor(0.5) for m in modules})
    said = packed.config(source) | {"activation_scheme": "static"}
    edit_config(source, lambda config: config | {"quantization_config": said})
    for target in ("canonical", "compressed-tensors", "modelopt", "deepseek-fp8", "quark"):
        out = tmp_path / target
        ran = run("convert", "--to", target, source, out)
        if ran.code:
            assert ran.code == 1
            assert len(ran.err.strip().splitlines()) == 1
            assert leaf in ran.err
            continue
        found = meaning(out).inputs
        assert found.keys() == modules.keys()
        assert {float(v) for v in found.values()} == {0.5}
        said = packed.config(out)
        said.pop("source", None)
        assert "static" in str(said)
        assert "dynamic" not in str(said)
    assert not [n for n in packed.tensors(proved("bf16", source, tmp_path / "b")) if leaf in n]


def test_static_activations_are_not_called_dynamic(kind: Made, tmp_path: Path) -> None:
    """FP8 per channel with one static scale for the activations, as llm-compressor can write."""
    source = copied(kind("ct-fp8-channel")[0], tmp_path / "src")
    modules = kind("ct-fp8-channel")[1].truth

    def static(config: dict[str, Any]) -> dict[str, Any]:
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"] = group["weights"] | {"strategy": "tensor"}
        return config

    edit(source, lambda t: t | {f"{m}.input_scale": torch.ones(1) for m in modules})
    edit_config(source, static)
    for target in ("compressed-tensors", "modelopt", "canonical", "quark"):
        out = tmp_path / target
        ran = run("convert", "--to", target, source, out)
        if ran.code:
            assert ran.code == 1
            assert "input_scale" in ran.err
            continue
        assert meaning(out).inputs.keys() == modules.keys()
        said = json.dumps(packed.config(out))
        assert '"dynamic": true' not in said
        assert target != "canonical" or '"activations": "static"' in said


def test_one_expert_is_a_stack_too(tmp_path: Path) -> None:
    """A scalar for all experts is not a list of one."""
    for name in FUSABLE:
        one = KINDS[name]
        made = replace(one, spec=replace(one.spec, experts=1))(tmp_path / name)
        out = meaning(proved("canonical", tmp_path / name, tmp_path / f"{name}.dst"))
        assert differing(out.weights, made.truth, 0) == []
        back = convert("modelopt", tmp_path / f"{name}.dst", tmp_path / f"{name}.back", "--fused")
        same_bytes(packed.tensors(back), made.tensors)


def test_nothing_quantised_is_nothing_to_rewrite(kind: Made, tmp_path: Path) -> None:
    plain = convert("bf16", kind("ct-mxfp4")[0], tmp_path / "plain")
    for target in ("modelopt", "canonical", "bf16"):
        assert "nothing" in refused(target, plain, tmp_path / "dst")


# Proof.


def converted(kind: Made, tmp_path: Path) -> tuple[Path, Path]:
    source = kind("modelopt-nvfp4")[0]
    return source, proved("modelopt", source, tmp_path / "dst")


def differences(source: Path, target: Path) -> str:
    ran = run("verify", source, target)
    assert ran.code == 3, ran.out + ran.err
    return ran.out


@pytest.mark.parametrize("target", ["compressed-tensors", "canonical", "bf16"])
def test_verify_finds_one_changed_byte_in_every_tensor(
    kind: Made, tmp_path: Path, target: str
) -> None:
    source = kind("modelopt-nvfp4")[0]
    out = proved(target, source, tmp_path / "dst")
    before = packed.tensors(out)

    def flip(value: Tensor) -> Tensor:
        flat = value.contiguous().flatten().clone()
        flat.view(torch.uint8)[-1] ^= 1
        return flat.reshape(value.shape)

    edit(out, lambda t: {n: flip(v) for n, v in t.items()})
    found = differences(source, out)
    assert [n for n in before if not any(n in line for line in found.splitlines())] == []


def test_verify_finds_a_missing_and_an_extra_tensor(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    edit(out, lambda t: {n: v for n, v in t.items() if n != f"{UP}.weight_scale_2"})
    assert f"{UP}.weight_scale_2: missing" in differences(source, out)
    edit(out, lambda t: t | {f"{UP}.extra": torch.zeros(3)})
    assert f"{UP}.extra: not wanted" in differences(source, out)


@pytest.mark.parametrize("key", ["quant_algo", "ignore", "config_groups", "quant_method"])
def test_verify_finds_a_changed_config_entry(kind: Made, tmp_path: Path, key: str) -> None:
    source, out = converted(kind, tmp_path)
    entry = load_json(out / "config.json")["quantization_config"] | {key: "another"}
    edit_config(out, lambda config: config | {"quantization_config": entry})
    assert "config.json" in differences(source, out)


def test_verify_finds_a_changed_key_beside_the_quantization(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    edit_config(out, lambda config: config | {"rms_norm_eps": 1e-5})
    assert "config.json" in differences(source, out)


def test_verify_misses_a_second_config(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    (out / "hf_quant_config.json").unlink()
    assert "hf_quant_config.json" in differences(source, out)


def test_verify_finds_a_changed_second_config(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    edit_config(out, lambda c: c | {"producer": {}}, "hf_quant_config.json")
    assert "hf_quant_config.json" in differences(source, out)


def test_verify_finds_a_second_config_that_nobody_wrote(kind: Made, tmp_path: Path) -> None:
    source = kind("modelopt-nvfp4")[0]
    out = proved("compressed-tensors", source, tmp_path / "dst")
    (out / "hf_quant_config.json").write_bytes((source / "hf_quant_config.json").read_bytes())
    assert "hf_quant_config.json" in differences(source, out)


@pytest.mark.parametrize("key", ["status", "format", "proved", "notes", "origin", "unified"])
def test_verify_finds_a_report_that_says_something_else(
    kind: Made, tmp_path: Path, key: str
) -> None:
    source, out = converted(kind, tmp_path)
    edit_config(out, lambda done: done | {key: "another"}, "transcode_report.json")
    ran = run("verify", source, out)
    assert ran.code in (1, 3), ran.out
    assert "transcode_report.json" in ran.out + ran.err or "Report" in ran.out + ran.err


def test_verify_finds_a_stale_index(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    edit_config(out, lambda index: index | {"weight_map": {}}, "model.safetensors.index.json")
    assert "index" in differences(source, out)


def test_an_origin_that_lies_is_not_believed(kind: Made, tmp_path: Path) -> None:
    """Reciprocals that do not agree with what is stored, dtypes that would not be exact."""
    source, made = kind("modelopt-nvfp4")
    there = convert("compressed-tensors", source, tmp_path / "there")
    origin = report(there)["origin"]
    assert origin["reciprocals"]
    lies = dict.fromkeys(origin["reciprocals"], "3f800000")  # 1.0
    edit_config(
        there,
        lambda done: done | {"origin": {"dtypes": {"nvfp4 scales": "BF16"}, "reciprocals": lies}},
        "transcode_report.json",
    )
    back = proved("modelopt", there, tmp_path / "back")
    found = meaning(back)
    assert differing(found.weights, made.truth, 2 * ULP) == []
    assert packed.tensors(back)[f"{UP}.weight_scale"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("lie", [
    None, [], 7, {"dtypes": [], "reciprocals": "x"}, {"reciprocals": {"a": None, "b": "zz"}},
    {"dtypes": {"fp8-channel scales": 3}}, {"dtypes": {"fp8-channel scales": "F16"}},
])  # fmt: skip
def test_an_origin_that_is_rubbish_is_passed_over(kind: Made, tmp_path: Path, lie: Any) -> None:
    """F16 for scales that are not exact in it is an error or unused, never a rounding."""
    source, made = kind("ct-fp8-channel")
    there = convert("modelopt", source, tmp_path / "there")
    edit_config(there, lambda done: done | {"origin": lie}, "transcode_report.json")
    ran = run("convert", "--to", "compressed-tensors", there, tmp_path / "back")
    if ran.code:
        assert ran.code == 1
        assert len(ran.err.strip().splitlines()) == 1
        return
    assert differing(meaning(tmp_path / "back").weights, made.truth, 0) == []


def test_a_report_of_something_else_is_no_report(kind: Made, tmp_path: Path) -> None:
    source, out = converted(kind, tmp_path)
    (out / "transcode_report.json").write_text("{}")
    ran = run("verify", source, out)
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 1
