"""Which modules become what: by the target, by rules, by names; from BF16 and FP8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.build import edit
from tests.convert import run
from tests.packed import tensors
from tests.test_recode import DATA, GPT, MX, NV, V4, convert, values
from transcode.groups import group
from transcode.quant import Encoding
from transcode.recipe import Rule
from transcode.unpacked import opened

FP8, LLAMA = "modelopt_fp8_llama", "modelopt_nvfp4_llama"

NAMES = [
    ("model.layers.0.mlp.experts.3.up_proj", "experts"),
    ("model.layers.0.mlp.experts.gate_proj.3", "experts"),
    ("layers.2.ffn.experts.3.w1", "experts"),
    ("model.layers.0.mlp.shared_expert.up_proj", "shared_experts"),
    ("layers.2.ffn.shared_experts.w1", "shared_experts"),
    ("model.layers.0.self_attn.q_proj", "attention"),
    ("model.layers.0.linear_attn.in_proj_qkvz", "attention"),
    ("layers.1.attn.wq_a", "attention"),
    ("model.layers.0.mlp.gate_proj", "mlp"),
    ("model.layers.0.mlp.gate_up_proj", "mlp"),
    ("lm_head", "lm_head"),
    ("head", "lm_head"),
    ("model.embed_tokens", "embeddings"),
    ("mtp.0.self_attn.q_proj", "mtp"),
    ("model.layers.4.mlp.experts.0.up_proj", "mtp"),
    ("model.visual.blocks.0.attn.qkv", "vision"),
    ("vision_model.encoder.layers.0.mlp.fc1", "vision"),
    ("multi_modal_projector.linear_1", "vision"),
    ("model.layers.0.mlp.gate", ""),
    ("model.layers.0.mlp.shared_expert_gate", ""),
    ("model.layers.0.block_sparse_moe.gate", ""),
    ("model.layers.0.self_attn.indexer.wq_b", ""),
    ("model.layers.0.linear_attn.conv1d", ""),
    ("model.layers.0.linear_attn.in_proj_ba", ""),
    ("model.layers.0.self_attn.kv_b_proj", ""),
]


@pytest.mark.parametrize(("name", "wanted"), NAMES)
def test_names_tell_the_group(name: str, wanted: str) -> None:
    assert group(name, 4) == wanted


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of tests/data, decoded to BF16."""
    place = tmp_path_factory.mktemp("plain")

    def made(name: str, *options: str) -> Path:
        target = place / "-".join((name, *options))
        if not target.exists():
            assert run("convert", "--to", "bf16", *options, DATA / name, target).code == 0
        return target

    return made


def encodings(folder: Path) -> dict[str, str]:
    """Every matrix's encoding."""
    found = opened(folder)[1].modules
    return {n: str(m.encoding) for n, m in found.items() if len(m.shape) == 2}


def kinds(folder: Path) -> dict[str, set[str]]:
    """The encodings of each group."""
    found: dict[str, set[str]] = {}
    for name, encoding in encodings(folder).items():
        found.setdefault(group(name, 2), set()).add(encoding)
    return found


def test_from_bf16_experts_and_dense_mlps_alone_are_quantised(plain: Any, tmp_path: Path) -> None:
    source = plain(NV)
    assert run("convert", "--to", "modelopt-nvfp4", source, tmp_path / "dst").code == 4
    done = convert(source, tmp_path / "dst", "modelopt-nvfp4", "--lossy")
    assert done["recoded"][0]["error_at_most"] < 0.1
    found = kinds(tmp_path / "dst")
    assert found.pop("experts") == {"nvfp4"}
    assert set().union(*found.values()) == {"unquantised"}
    ignore = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert "lm_head" in ignore["quantization_config"]["ignore"]
    before, after = tensors(source), values(tmp_path / "dst")
    for name, value in after.items():
        wanted = before[f"{name}.weight"].float()
        assert float((value - wanted).norm() / wanted.norm()) < 0.1


def test_experts_that_are_stacked_in_bf16_are_quantised_one_by_one(
    plain: Any, tmp_path: Path
) -> None:
    """gpt-oss: rows alternate, transposed, with biases; MXFP4 comes back exactly."""
    source = plain(GPT, "--fused")
    done = convert(source, tmp_path / "dst", "gpt-oss")
    assert done["recoded"][0]["changed"] == 0
    before, after = values(DATA / GPT), values(tmp_path / "dst")
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    biases = {n: v for n, v in tensors(DATA / GPT).items() if n.endswith("_bias")}
    written = tensors(tmp_path / "dst")
    assert biases
    assert all(torch.equal(written[n], biases[n]) for n in biases)


TARGETS = [
    ("compressed-tensors-nvfp4", 0.1),
    ("compressed-tensors-mxfp4", 0.16),
    ("modelopt-mxfp8", 0.04),
    ("deepseek-fp8", 0.04),
    ("modelopt-fp8-channel", 0.04),
    ("marlin-nvfp4", 0.1),
    ("marlin-fp8", 0.04),
]


@pytest.mark.parametrize(("to", "most"), TARGETS)
def test_fp8_becomes_any_other_encoding(tmp_path: Path, to: str, most: float) -> None:
    done = convert(DATA / FP8, tmp_path / "dst", to, "--lossy",
                   *["--drop-kv-scales"] * (not to.startswith("marlin")))  # fmt: skip
    if to == "marlin-fp8":
        assert not done["recoded"]  # FP8 per tensor is packed as it is
        return
    [entry] = done["recoded"]
    assert entry["from"] == "fp8-tensor"
    assert 0 < entry["error_at_most"] < most
    if "4" in to.rpartition("-")[2][:5]:
        if not to.startswith("marlin"):
            assert kinds(tmp_path / "dst")["attention"] == {"fp8-tensor"}
        assert entry["modules"] == 6  # the MLPs of two layers


def test_one_line_for_nvfp4_experts_and_fp8_attention(plain: Any, tmp_path: Path) -> None:
    convert(plain(NV), tmp_path / "dst", "modelopt-nvfp4", "--lossy",
            "--rule", "attention=fp8-channel")  # fmt: skip
    found = kinds(tmp_path / "dst")
    assert found["experts"] == {"nvfp4"}
    assert found["attention"] == {"fp8-channel"}
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    told = {name: entry["quant_algo"] for name, entry in config["quantized_layers"].items()}
    assert told["model.layers.0.self_attn.q_proj"] == "FP8_PER_CHANNEL_PER_TOKEN"


def test_the_first_rule_wins_and_a_file_comes_after(plain: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('rules = ["attention=fp8-channel", "experts=nvfp4"]\n')
    done = convert(plain(NV), tmp_path / "dst", "modelopt", "--lossy", "--recipe", str(recipe),
                   "--rule", "model.layers.1.self_attn.*=keep")  # fmt: skip
    found = encodings(tmp_path / "dst")
    assert found["model.layers.0.self_attn.o_proj"] == "fp8-channel"
    assert found["model.layers.1.self_attn.o_proj"] == "unquantised"
    assert done["options"]["encodings"]["rules"] == [
        "model.layers.1.self_attn.*=keep", "attention=fp8-channel", "experts=nvfp4",
    ]  # fmt: skip


def test_a_glob_takes_no_router_and_no_embedding_unless_it_names_it(
    plain: Any, tmp_path: Path
) -> None:
    convert(plain(NV), tmp_path / "dst", "modelopt", "--lossy", "--rule", "model.*=fp8-channel")
    found = encodings(tmp_path / "dst")
    assert found["model.layers.0.mlp.gate"] == "unquantised"
    assert found["model.embed_tokens"] == "unquantised"
    assert found["model.layers.0.self_attn.q_proj"] == "fp8-channel"
    convert(plain(NV), tmp_path / "gate", "modelopt", "--lossy", "--rule", "*.gate=fp8-channel")
    assert encodings(tmp_path / "gate")["model.layers.0.mlp.gate"] == "fp8-channel"


def test_what_runtimes_join_must_end_in_one_encoding(plain: Any, tmp_path: Path) -> None:
    for rule, other in (
        ("model.layers.0.self_attn.q_proj=nvfp4", "k_proj"),
        ("model.layers.0.mlp.experts.1.*=nvfp4", "experts.0."),
        ("*.down_proj=fp8-block", "gate_proj"),
    ):
        ran = run(
            "convert", "--to", "modelopt", "--lossy", "--rule", rule, plain(NV), tmp_path / "d"
        )
        assert ran.code == 1
        assert "runtimes join them" in ran.err
        assert other in ran.err


@pytest.mark.parametrize(
    "rule", ["experts", "experts=", "=nvfp4", "experts=int4", "experts=fp8", "\udcff=nvfp4"]
)
def test_what_is_no_rule_is_said(plain: Any, tmp_path: Path, rule: str) -> None:
    ran = run("convert", "--to", "modelopt", "--rule", rule, plain(NV), tmp_path / "dst")
    assert ran.code == 1
    assert "is no rule such as 'experts=nvfp4'" in ran.err


def test_rows_that_are_no_whole_blocks_are_refused_by_name(plain: Any, tmp_path: Path) -> None:
    shutil.copytree(plain(LLAMA), tmp_path / "src")
    name = "model.layers.1.mlp.down_proj.weight"
    edit(tmp_path / "src", lambda t: t | ({name: t[name][:, :-8]} if name in t else {}))
    ran = run("convert", "--to", "modelopt-nvfp4", "--lossy", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 1
    assert "wants a multiple of 16; --rule 'model.layers.1.mlp.down_proj=keep'" in ran.err


def test_float_scales_become_powers_of_two_with_their_codes(tmp_path: Path) -> None:
    source = DATA / "modelopt_fp8block_qwen3moe"
    assert run("convert", "--to", "deepseek-fp8-ue8m0", source, tmp_path / "dst").code == 4
    done = convert(source, tmp_path / "dst", "deepseek-fp8-ue8m0", "--lossy")
    [entry] = done["recoded"]
    assert entry["error_at_most"] < 0.04
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0"
    scales = [v for n, v in tensors(tmp_path / "dst").items() if n.endswith("weight_scale_inv")]
    assert scales
    assert all((torch.frexp(s.float())[0] == 0.5).all() for s in scales)
    again = convert(tmp_path / "dst", tmp_path / "again", "deepseek-fp8-ue8m0")
    assert sum(e["changed"] for e in again["recoded"]) == 0
    first, second = tensors(tmp_path / "dst"), tensors(tmp_path / "again")
    assert all(torch.equal(first[n].view(torch.uint8), v.view(torch.uint8))
               for n, v in second.items())  # fmt: skip


def test_v4_experts_become_nvfp4_beside_fp8_attention_and_come_back(tmp_path: Path) -> None:
    done = convert(DATA / V4, tmp_path / "nv", "deepseek-v4-nvfp4")
    assert [(e["from"], e["to"], e["changed"]) for e in done["recoded"]] == [("mxfp4", "nvfp4", 0)]
    convert(tmp_path / "nv", tmp_path / "back", "deepseek-v4", "--rule", "experts=mxfp4")
    before, after = values(DATA / V4), values(tmp_path / "back")
    assert all(torch.equal(before[n], after[n]) for n in before)


def inputs(folder: Path) -> dict[str, Tensor]:
    """The input scales by module."""
    found = tensors(folder)
    end = ".input_scale"
    return {n.removesuffix(end): v for n, v in found.items() if n.endswith(end)}


def test_an_fp8_input_scale_becomes_nvfp4s(tmp_path: Path) -> None:
    convert(DATA / FP8, tmp_path / "dst", "modelopt-nvfp4", "--lossy")
    before, after = inputs(DATA / FP8), inputs(tmp_path / "dst")
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        gate, up = before[f"{layer}.gate_proj"], before[f"{layer}.up_proj"]
        wanted = torch.maximum(gate, up) / 6
        assert after[f"{layer}.gate_proj"] == after[f"{layer}.up_proj"]
        assert torch.allclose(after[f"{layer}.gate_proj"], wanted)
    attention = "model.layers.0.self_attn.q_proj"
    assert torch.equal(after[attention], before[attention])


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_input_scales_from_a_file(tmp_path: Path, kind: str) -> None:
    names = [n for n, e in encodings(DATA / MX).items() if e == "mxfp4"]
    own = {name: 0.01 * (i + 1) for i, name in enumerate(sorted(names))}
    path = tmp_path / f"scales.{kind}"
    if kind == "json":
        path.write_text(json.dumps(own))
    else:
        save_file({f"{n}.input_scale": torch.tensor(v) for n, v in own.items()}, path)
    convert(DATA / MX, tmp_path / "dst", "modelopt-nvfp4", "--input-scale", str(path))
    convert(DATA / MX, tmp_path / "each", "modelopt-nvfp4", "--input-scale", str(path),
            "--input-scale-per-expert")  # fmt: skip
    one, each = inputs(tmp_path / "dst"), inputs(tmp_path / "each")
    experts = [n for n in one if ".0.mlp.experts." in n and "down_proj" not in n]
    largest = max(own[n] for n in experts)
    assert all(float(one[n]) == pytest.approx(largest) for n in experts)
    first = "model.layers.0.mlp.experts.1"
    pair = max(own[f"{first}.gate_proj"], own[f"{first}.up_proj"])
    assert float(each[f"{first}.up_proj"]) == pytest.approx(pair)
    assert float(each[f"{first}.gate_proj"]) == pytest.approx(pair)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"a": -1}', '{"a": "x"}', "{", '{"a": 1e300}', "", "[" * 10**5, '{"a": NaN}',
     '{"\\ud800": 1}', '{"a": 1, "a": 2}', '{"a": true}'],
)  # fmt: skip
def test_a_file_without_input_scales_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)
    ran = run("convert", "--to", "modelopt-nvfp4", "--input-scale", path, DATA / MX, tmp_path / "d")
    assert ran.code == 1
    assert str(path) in ran.err


def test_fp8_per_tensor_takes_a_scale_only_if_one_is_given(plain: Any, tmp_path: Path) -> None:
    ran = run("convert", "--to", "modelopt-fp8", "--lossy", plain(NV), tmp_path / "dst")
    assert ran.code == 1
    assert "--input-scale" in ran.err
    convert(plain(NV), tmp_path / "dst", "modelopt-fp8", "--lossy", "--input-scale", "0.05")
    given = inputs(tmp_path / "dst").values()
    assert given
    assert all(float(v) == pytest.approx(0.05) for v in given)
    scales = {n: v for n, v in tensors(tmp_path / "dst").items() if n.endswith("weight_scale")}
    pair = [scales[f"model.layers.0.mlp.experts.0.{p}_proj.weight_scale"] for p in ("gate", "up")]
    assert torch.equal(*pair)  # one, as runtimes need


def eights(folder: Path) -> dict[str, Tensor]:
    """FP8 matrices of one scale as they are meant."""
    found = {n for n, e in encodings(folder).items() if e == str(Encoding.FP8_TENSOR)}
    return {n: v for n, v in values(folder).items() if n in found}


def test_fp8_scales_that_differ_become_one(tmp_path: Path) -> None:
    def differ(t: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {n: v * 3 for n, v in t.items() if n.endswith("up_proj.weight_scale")}
        changed |= {n: v * 4 for n, v in t.items() if n.endswith("k_proj.weight_scale")}
        return t | changed

    shutil.copytree(DATA / FP8, tmp_path / "src")
    edit(tmp_path / "src", differ)
    for how in ("fold", "rescale"):
        done = convert(tmp_path / "src", tmp_path / how, "modelopt-fp8", "--unify", how)
        before, after = eights(tmp_path / "src"), eights(tmp_path / how)
        stored = tensors(tmp_path / how)
        for layer in ("model.layers.0", "model.layers.1"):
            for part in ("self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                         "mlp.gate_proj mlp.up_proj"):  # fmt: skip
                scales = {float(stored[f"{layer}.{n}.weight_scale"]) for n in part.split()}
                assert len(scales) == 1
            gate, up, down = (f"{layer}.mlp.{n}_proj" for n in ("gate", "up", "down"))
            if how == "fold":
                assert torch.equal(before[gate], after[gate])
                product = torch.einsum("di,ij->dij", before[down], before[up])
                again = torch.einsum("di,ij->dij", after[down], after[up])
                assert torch.allclose(product, again, rtol=1e-6, atol=0)
            for name in (f"{layer}.self_attn.{n}_proj" for n in "qkv"):
                assert float((after[name] - before[name]).norm() / before[name].norm()) < 0.04
        assert {d["how"] for d in done["unified"]} >= {how}
    ran = run("convert", "--to", "modelopt-fp8", "--unify", "rescale", "--exact",
              tmp_path / "src", tmp_path / "exact")  # fmt: skip
    assert ran.code == 4


@pytest.mark.parametrize(
    ("rule", "name", "meant"),
    [
        ("mtp=nvfp4", "mtp.layers.0.mlp.experts.0.up_proj", True),
        ("mtp=nvfp4", "mtp.layers.0.mlp.gate", False),
        ("mtp.*=nvfp4", "mtp.layers.0.mlp.gate", False),
        ("mtp=nvfp4", "mtp.embed_tokens", False),
        ("mtp.*.gate=nvfp4", "mtp.layers.0.mlp.gate", True),
        ("vision=fp8-channel", "model.visual.blocks.0.attn.qkv", True),
        ("vision=fp8-channel", "model.visual.pos_embed", False),
        ("vision=fp8-channel", "vision_model.patch_embedding.linear", False),
        ("*.patch_embedding.linear=fp8-channel", "vision_model.patch_embedding.linear", True),
        ("mtp=nvfp4", "mtp.layers.0.mlp.router.classifier", False),
        ("mtp=nvfp4", "mtp.layers.0.mlp.moe_gate", False),
        ("mtp=nvfp4", "model.layers.4.eh_proj", False),
        ("mtp=nvfp4", "model.layers.4.shared_head.head", True),
        ("attention=nvfp4", "encoder.layers.0.self_attn.relative_attention_bias", False),
        ("embeddings=fp8-channel", "model.embed_tokens", True),
        ("mlp=nvfp4", "model.layers.0.mlp.gate_and_up_proj", True),
        ("attention=nvfp4", "transformer.h.0.attn.c_proj", True),
        ("shared_experts=nvfp4", "model.layers.4.share_expert.up_proj", False),
        ("shared_experts=nvfp4", "model.layers.3.share_expert.up_proj", True),
        ("attention=nvfp4", "backbone.layers.3.mixer.q_proj", True),
        ("shared_experts=nvfp4", "model.layers.0.mlp.shared_mlp.up_proj", True),
        ("mlp=nvfp4", "transformer.h.0.mlp.c_proj", True),
    ],
)
def test_a_group_means_linears_only(rule: str, name: str, meant: bool) -> None:
    assert Rule.parse(rule).matches(name, group(name, 4)) is meant


def test_what_is_asked_for_no_module_is_said(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text('{"modle.*": 0.5, "model.layers.0.*": 0.5}')
    asked = ("--rule", "expertz.*=nvfp4", "--input-scale", str(tmp_path / "inputs.json"))
    done = convert(plain(NV), tmp_path / "dst", "modelopt-nvfp4", "--lossy", *asked)
    assert "--rule expertz.*=nvfp4: there is no such module" in done["notes"]
    assert "--input-scale: modle.* is no module here" in done["notes"]
    assert not any("model.layers.0.*" in note for note in done["notes"])


def test_what_is_asked_for_nothing_that_can_change_is_said_on_stderr_too(
    plain: Any, tmp_path: Path
) -> None:
    def said(source: Path, *asked: str) -> str:
        ran = run("convert", "--to", "compressed-tensors", *asked, source, tmp_path / "dst")
        assert ran.code == 0, ran.err
        shutil.rmtree(tmp_path / "dst", ignore_errors=True)
        return ran.err

    source = DATA / NV
    assert "no module of * takes one" in said(source, "--input-scale", "0.5")
    (tmp_path / "one.json").write_text('{"*.0.up_proj": 0.5}')
    given = ("--input-scale", str(tmp_path / "one.json"))
    assert "no module of *.0.up_proj takes one" in said(source, *given)
    turned = ("--lossy", "--rule", "attention=fp8-tensor")
    assert "takes one" not in said(source, "--input-scale", "0.5", *turned)
    norm = said(source, "--rule", "model.norm=fp8-channel")
    assert "--rule model.norm=fp8-channel: it means nothing whose encoding can change" in norm
    assert "no such module" in said(source, "--rule", "atention=nvfp4", "--dry-run")


@pytest.mark.parametrize("value", [torch.tensor([]), torch.tensor(1), torch.tensor([1.0, 2.0])])
def test_input_scales_that_are_no_single_floats_are_refused(
    plain: Any, tmp_path: Path, value: Tensor
) -> None:
    save_file({"model.layers.0.input_scale": value}, tmp_path / "odd.safetensors")
    ran = run("convert", "--to", "modelopt-nvfp4", "--lossy", "--input-scale",
              tmp_path / "odd.safetensors", plain(NV), tmp_path / "dst")  # fmt: skip
    assert ran.code == 1
    assert "wanted one float" in ran.err


def test_what_is_no_file_and_no_recipe_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("rules=" + "[" * 3000 + "]" * 3000)
    for asked, code in (("--input-scale", "a" * 5000), 2), (("--recipe", "deep.toml"), 1):
        given = str(tmp_path / asked[1]) if asked[1].endswith(".toml") else asked[1]
        ran = run("convert", "--to", "modelopt", asked[0], given, DATA / NV, tmp_path / "dst")
        assert ran.code == code
