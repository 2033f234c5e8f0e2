"""Faults planted in real checkpoints: found, then mended or refused, and never converted wrong.

What a folder means is read by tests/rewriting.py, which knows nothing of `transcode`; the judge is
the folder as it was before the fault.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.build import Json, Tensors, edit, edit_config
from tests.convert import run
from tests.producers import Built
from tests.rewriting import CODES, PACKED, copied, kind, meaning, one_by_one, one_thread, raw
from transcode.check import examine

__all__ = ["kind", "one_thread"]
DATA = Path(__file__).parent / "data"
INDEX = "model.safetensors.index.json"
MOE, LLAMA = "modelopt_nvfp4_qwen3moe", "modelopt_nvfp4_llama"
CT, SHARDED, CT_MX = "ct_nvfp4_qwen3moe", "ct_nvfp4_qwen3moe_sharded", "ct_mxfp4_qwen3moe"
V4, FP8, MXFP8 = "deepgemm_fp4fp8_dsv4", "hf_fp8ops_qwen3moe", "modelopt_mxfp8_qwen3moe"
EXPERT = "model.layers.1.mlp.experts.2."
V4_EXPERT = "model.layers.1.ffn.experts.2."
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn

Plant = Callable[[Path], None]


def each(pattern: str, change: Callable[[Tensor], Tensor | None]) -> Plant:
    """Change, or with None drop, the tensors whose whole name fits."""

    def changed(all_: Tensors) -> Tensors:
        names = [name for name in all_ if re.fullmatch(pattern, name)]
        assert names, pattern
        new = {name: change(all_.pop(name)) for name in names}
        return all_ | {name: t for name, t in new.items() if t is not None}

    return lambda folder: edit(folder, changed)


def renamed(pattern: str, new: str) -> Plant:
    def changed(all_: Tensors) -> Tensors:
        return {re.sub(pattern, new, name): t for name, t in all_.items()}

    return lambda folder: edit(folder, changed)


def added(**more: Tensor) -> Plant:
    return lambda folder: edit(
        folder, lambda all_: all_ | {name.replace("__", "."): t for name, t in more.items()}
    )


def config(**new: Any) -> Plant:
    """Set keys of config.json; None drops them."""

    def changed(found: Json) -> Json:
        return {k: v for k, v in (found | new).items() if v is not None}

    return lambda folder: edit_config(folder, changed)


def unlisted(*names: str) -> Plant:
    def changed(found: Json) -> Json:
        block = found["quantization_config"]
        kept = [entry for entry in block["ignore"] if entry not in names]
        assert kept != block["ignore"]
        return found | {"quantization_config": block | {"ignore": kept}}

    return lambda folder: edit_config(folder, changed)


def indexed(*names: str) -> Plant:
    def changed(found: Json) -> Json:
        last = max(found["weight_map"].values())
        return found | {"weight_map": found["weight_map"] | dict.fromkeys(names, last)}

    return lambda folder: edit_config(folder, changed, INDEX)


def both(*plants: Plant) -> Plant:
    def plant(folder: Path) -> None:
        for one in plants:
            one(folder)

    return plant


NOTHING = both()


def poked(value: int) -> Callable[[Tensor], Tensor]:
    """One byte of a tensor of bytes."""

    def change(t: Tensor) -> Tensor:
        t.view(torch.uint8).view(-1)[5] = value
        return t

    return change


def truncated(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])


def listed(folder: Path) -> None:
    """What makes hf_fp8ops_qwen3moe sound: its routers in the list."""
    names = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (0, 1))]
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    config(quantization_config=block | {"modules_to_not_convert": names})(folder)


def exporter(factor: float) -> Plant:
    """up's weights times `factor` by its scalar, down's divided by it: the layer stays the same."""
    return both(
        each(re.escape(EXPERT) + r"up_proj\.weight_scale_2", lambda t: t * factor),
        each(re.escape(EXPERT) + r"down_proj\.weight_scale_2", lambda t: t / factor),
        each(re.escape(EXPERT) + r"down_proj\.input_scale", lambda t: t * factor),
    )


def mtp(all_: Tensors) -> Tensors:
    layer = "model.layers.1.mlp.experts.0."
    draft = {
        f"mtp.layers.0.mlp.{leaf}.weight": torch.randn(all_[f"{layer}{leaf}.weight"].shape).to(
            torch.bfloat16
        )
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    return all_ | draft


def plain_experts(all_: Tensors) -> Tensors:
    """Layer 1's experts once more, in BF16, as those of an MTP layer."""
    kept = {n: t for n, t in all_.items() if re.fullmatch(r"model\.layers\.1.*experts.*weight", n)}
    draft = {
        name.replace("model.layers.1", "mtp.layers.0"): torch.cat((t, t), 1).float().bfloat16()
        for name, t in kept.items()
    }
    return all_ | draft


def unquantised(all_: Tensors) -> Tensors:
    """o_proj of layer 0 in BF16."""
    module = "model.layers.0.self_attn.o_proj"
    rest = {n: t for n, t in all_.items() if not n.startswith(module + ".")}
    return rest | {f"{module}.weight": torch.randn(256, 256).to(torch.bfloat16)}


def as_numbers(t: Tensor) -> Tensor:
    return t.view(torch.uint8).float()


def as_powers(t: Tensor) -> Tensor:
    return t.view(E8M0).float()


@dataclass(frozen=True)
class Fault:
    """A fault of a real checkpoint.

    kind: which of the sixteen.  found: level and code of the finding that `check` must have.
    word: what the finding must name.  refused: what `--fix` refuses with, "" where it mends, "rest"
    where there is nothing that it could do, and the finding remains.
    sound: what makes the folder sound before.  meant: what the fault adds to its meaning.
    """

    kind: str
    folder: str
    plant: Plant
    found: tuple[str, str]
    word: str
    refused: str = ""
    sound: Plant = NOTHING
    meant: bool = False


KV = {
    f"model__layers__{i}__self_attn__{x}_proj__{x}_scale": torch.tensor(0.01 * (i + 1))
    for i in (0, 1)
    for x in "kv"
}
SCALES = r".*\.experts\.\d+\.\w+\.(?:weight_)?scale"
FAULTS = [
    Fault("gate/up mismatch", MOE, exporter(4.0), ("WRONG", "expert-scales"), EXPERT[:-1]),
    Fault(
        "missing input scale", MOE,
        each(re.escape(EXPERT) + r"up_proj\.input_scale", lambda t: None),
        ("WRONG", "input-scale-missing"), EXPERT + "up_proj",
    ),
    Fault(
        "missing input scale", MOE, each(re.escape(EXPERT) + r"up_proj\.input_scale", lambda t: -t),
        ("WRONG", "input-scale-invalid"), EXPERT + "up_proj",
    ),
    Fault(
        "W4A4 label on W4A16", CT, each(r".*input_global_scale", lambda t: None),
        ("WRONG", "input-scale-missing"), "experts.0.down_proj",
    ),
    Fault(
        "W4A4 label on W4A16", LLAMA, each(r".*input_scale", lambda t: None),
        ("WRONG", "input-scale-missing"), "_proj",
    ),
    Fault(
        "NaN expert", MOE, each(re.escape(EXPERT) + r"down_proj\.weight_scale", poked(0x7F)),
        ("WRONG", "block-scale-nan"), EXPERT + "down_proj", "NaN",
    ),
    Fault(
        "NaN expert", CT_MX, each(re.escape(EXPERT) + r"down_proj\.weight_scale", poked(0xFF)),
        ("WRONG", "scale-invalid"), EXPERT + "down_proj.weight_scale", "E8M0's 255",
    ),
    Fault(
        "NaN expert", FP8, each(re.escape(EXPERT) + r"down_proj\.weight", poked(0x7F)),
        ("WRONG", "code-nan"), EXPERT + "down_proj.weight", "1 code NaN", listed,
    ),
    Fault(
        "NaN expert", FP8,
        each(re.escape(EXPERT) + r"up_proj\.weight_scale_inv", lambda t: t * torch.nan),
        ("WRONG", "scale-invalid"), EXPERT + "up_proj.weight_scale_inv", "nan", listed,
    ),
    Fault(
        "ghost scale", SHARDED, indexed("lm_head.weight_scale"), ("FAILS", "ghosts"),
        "lm_head.weight_scale",
    ),
    Fault(
        "ghost scale", SHARDED, indexed("model.layers.0.norm.weight"), ("FAILS", "ghosts"),
        "model.layers.0.norm.weight", "take it from the original",
    ),
    Fault(
        "ghost scale", MOE, added(lm_head__weight_scale=torch.ones(256, 16)),
        ("FAILS", "scale-without-codes"), "lm_head",
    ),
    Fault(
        "ghost scale", MOE,
        both(
            each(r"lm_head\.weight", lambda t: t.to(E4M3).to(torch.bfloat16)),
            added(lm_head__weight_scale=torch.ones(256, 1)),
        ),
        ("FAILS", "scale-without-codes"), "lm_head", "codes that were cast, or a weight?",
    ),
    Fault(
        "dropped MTP", MOE, config(num_nextn_predict_layers=1), ("WEAK", "mtp-missing"),
        "transcode compose", "rest",
    ),
    Fault(
        "dropped MTP", SHARDED,
        both(indexed("mtp.fc.weight", "mtp.norm.weight"), config(num_nextn_predict_layers=1)),
        ("FAILS", "ghosts"), "mtp.fc.weight",
    ),
    Fault(
        "MTP in BF16 not ignored", MOE,
        both(lambda folder: edit(folder, mtp), config(num_nextn_predict_layers=1)),
        ("WEAK", "unlisted"), "mtp.layers.0.mlp", meant=True,
    ),
    Fault(
        "KV scheme lost", LLAMA, added(**KV), ("WEAK", "kv-scheme-missing"),
        "model.layers.0.self_attn", meant=True,
    ),
    Fault(
        "w1/w3 order", "modelopt_nvfp4_llama4", renamed("gate_up_proj", "up_gate_proj"),
        ("FAILS", "expert-order"), "up_gate_proj", "not mended by guess",
    ),
    Fault(
        "w1/w3 order", V4,
        both(
            renamed(r"w2\.(\w+)$", r"w9.\1"), renamed(r"w3\.(\w+)$", r"w2.\1"),
            renamed(r"w9\.(\w+)$", r"w3.\1"),
        ),
        ("FAILS", "expert-shapes"), "model.layers.0.ffn.experts.0", "not mended by guess",
    ),
    Fault("E8M0 value-cast", V4, each(SCALES, as_numbers), ("WRONG", "e8m0-value-cast"), "scale"),
    Fault("E8M0 value-cast", CT_MX, each(SCALES, as_numbers), ("WRONG", "e8m0-value-cast"), "11"),
    Fault(
        "E8M0 value-cast", MXFP8, each(r".*weight_scale", lambda t: as_numbers(t).bfloat16()),
        ("WRONG", "e8m0-value-cast"), "weight_scale",
    ),
    Fault("E8M0 value-cast", CT_MX, each(SCALES, as_powers), ("WRONG", "e8m0-as-float"), "scale"),
    Fault(
        "E8M0 value-cast", V4, each(r".*attn\.\w+\.scale", as_numbers),
        ("WRONG", "e8m0-value-cast"), "attn",
    ),
    Fault(
        "E8M0 value-cast", CT_MX, each(SCALES, lambda t: t.view(E8M0)), ("WRONG", "e8m0-dtype"),
        "F8_E8M0",
    ),
    Fault(
        "E8M0 value-cast", CT_MX, each(SCALES, lambda t: as_powers(t).to(torch.uint8)),
        ("WRONG", "exponents-lost"), "weight_scale", "quantise it again",
    ),
    Fault(
        "E8M0 value-cast", V4, each(SCALES, lambda t: as_numbers(t).to(E8M0)),
        ("WRONG", "exponents-lost"), "scale", "quantise it again",
    ),
    *(
        Fault(
            "expert hole", folder, each(re.escape(expert) + r".*", lambda t: None),
            ("WRONG", "experts-missing"), expert[:-1], "take the tensor from the original", sound,
        )
        for folder, expert, sound in (
            (MOE, EXPERT, NOTHING), (CT_MX, EXPERT, NOTHING), (FP8, EXPERT, listed),
            (V4, V4_EXPERT, NOTHING),
        )
    ),
    *(
        Fault(
            "experts.gate_proj.X order", folder,
            renamed(r"\.experts\.(\d+)\.(\w+)\.", r".experts.\2.\1."), ("FAILS", "expert-names"),
            "proj.0", sound=sound,
        )
        for folder, sound in ((MOE, NOTHING), (CT, NOTHING), (FP8, listed))
    ),
    Fault(
        "experts.gate_proj.X order", MOE,
        renamed(r"(mtp.*)\.experts\.(\d+)\.(\w+)\.", r"\1.experts.\3.\2."),
        ("FAILS", "expert-names"), "mtp.layers.0.mlp.experts",
        sound=lambda folder: edit(folder, plain_experts),
    ),
    Fault("BF16 module not ignored", MOE, unlisted("lm_head"), ("FAILS", "unlisted"), "lm_head"),
    Fault(
        "BF16 module not ignored", CT, lambda folder: edit(folder, unquantised),
        ("FAILS", "unlisted"), "model.layers.0.self_attn.o_proj", meant=True,
    ),
    Fault(
        "BF16 module not ignored", FP8, lambda folder: edit(folder, unquantised),
        ("WRONG", "unlisted"), "model.layers.0.self_attn.o_proj", sound=listed, meant=True,
    ),
    Fault("BF16 module not ignored", FP8, NOTHING, ("WRONG", "unlisted"), "layers.0.mlp.gate"),
    Fault("expert_dtype missing", V4, config(expert_dtype=None), ("WEAK", "expert-dtype"), "fp4"),
    Fault("expert_dtype missing", V4, config(expert_dtype="fp8"), ("FAILS", "expert-dtype"), "fp8"),
    Fault("corrupt shard", SHARDED, truncated, ("FAILS", "unsound"), "-00003-of", "truncated"),
    Fault("TP misfit", FP8, NOTHING, ("WEAK", "tp-misfit"), "width 128", "rest", listed),
]  # fmt: skip
KINDS = {fault.kind for fault in FAULTS}


def named(fault: Fault) -> str:
    return f"{fault.kind}-{fault.folder}-{fault.found[1]}".replace(" ", "_").replace("/", "_")


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[Fault], tuple[Path, Path]]:
    """The folder as it was, or with what the fault adds to its meaning, and the faulty one."""

    def make(fault: Fault) -> tuple[Path, Path]:
        before, after = tmp_path / "before", tmp_path / "after"
        shutil.copytree(DATA / fault.folder, before)
        fault.sound(before)
        shutil.copytree(before, after)
        fault.plant(after)
        return after if fault.meant else before, after

    return make


def grave(folder: Path) -> set[str]:
    """Codes of what is served wrong or does not load, but for what a form cannot help."""
    found = examine(folder, None, codes=True)
    kept = ("form-not-loaded", "fused-scales")
    return {f.code for f in found if f.level in ("WRONG", "FAILS") and f.code not in kept}


def codes(folder: Path) -> Tensors:
    """Every tensor of codes, by its expert's standard name."""
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        settings = json.loads((folder / "config.json").read_text())
        for name, t in one_by_one(load_file(path), settings).items():
            if name.rpartition(".")[2] in CODES and (t.dtype in PACKED or t.dtype == E4M3):
                found[re.sub(r"\.experts\.([a-z]\w*)\.(\d+)\.", r".experts.\2.\1.", name)] = t
    return found


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(raw(ours[n]) == raw(theirs[n]) for n in ours)


def test_there_is_a_fault_of_each_of_the_sixteen_kinds() -> None:
    assert len(KINDS) == 16


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_check_finds_it_and_fix_mends_or_refuses_it(
    planted: Callable[[Fault], tuple[Path, Path]], tmp_path: Path, fault: Fault
) -> None:
    before, after = planted(fault)
    level, code = fault.found
    if before != after and fault.plant != NOTHING:
        assert fault.found not in {(f.level, f.code) for f in examine(before, None, codes=True)}
    found = run("check", "--codes", after)
    assert found.code == (3 if level in ("WRONG", "FAILS") or grave(after) else 0)
    hits = [f for f in examine(after, None, codes=True) if (f.level, f.code) == fault.found]
    assert any(fault.word in str(f) for f in hits), found.out

    into = tmp_path / "fixed"
    ran = run("check", after, "--fix", into)
    if fault.refused == "rest":
        assert (ran.code, into.exists()) == (0, False)
        assert ran.out.startswith("nothing to mend")
        assert fault.word in ran.out
    elif fault.refused:
        assert (ran.code, into.exists()) == (1, False)
        assert fault.refused in ran.err
        assert len(ran.err.strip().splitlines()) == 1
    else:
        assert not grave(into), ran.out + ran.err
        assert "MENDED" in ran.out
        left = {f.level for f in examine(into, None)}
        assert ran.code == (3 if left & {"WRONG", "FAILS"} else 0)
        assert same(codes(into), codes(before))
        now, meant = meaning(into), meaning(before)
        assert same(now.weights, meant.weights)
        assert same(now.rest, meant.rest)
        told = json.loads((into / "transcode_report.json").read_text())["mended"]
        assert code in {entry.get("code") for entry in told}
        proved = run("verify", after, into)
        assert proved.code == 0, proved.out + proved.err


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_convert_refuses_it_or_gives_what_was_meant(
    planted: Callable[[Fault], tuple[Path, Path]], tmp_path: Path, fault: Fault
) -> None:
    before, after = planted(fault)
    ran = run("convert", "--to", "canonical", after, tmp_path / "canonical")
    assert ran.code in (0, 1), ran.err
    ran = run("convert", "--to", "bf16", after, tmp_path / "bf16")
    assert ran.code in (0, 1), ran.err
    if ran.code == 1:
        assert len(ran.err.strip().splitlines()) == 1
        return
    ours = load_all(tmp_path / "bf16")
    for name, truth in meaning(before).weights.items():
        if fault.kind == "gate/up mismatch" and name.startswith(EXPERT):
            continue  # up is 4 times as large, down a quarter: the layer is the same
        if fault.kind == "NaN expert" and name in fault.word:
            assert ours[f"{name}.weight"].isnan().any()
            continue
        assert raw(ours[f"{name}.weight"]) == raw(truth.to(torch.bfloat16)), name


def load_all(folder: Path) -> Tensors:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


OWN = (
    "modelopt-nvfp4-hf-only", "modelopt-nvfp4-llama4", "modelopt-nvfp4-gptoss", "modelopt-mixed",
    "modelopt-fp8", "modelopt-mxfp8", "ct-nvfp4-kv", "ct-mixed", "ct-int4-nvfp4", "fp8-qwen",
    "fp8-deepseek-e8m0", "v4-hub", "v4-base", "v4-nvfp4", "gptoss-mxfp4", "quark-mxfp4-fp8",
)  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_fix_writes_every_producers_own_form(
    kind: Callable[[str], tuple[Path, Built]], tmp_path: Path, name: str
) -> None:
    folder, into = copied(kind(name)[0], tmp_path / "source"), tmp_path / "fixed"
    entries = {n: path.name for path in folder.glob("*.safetensors") for n in load_file(path)}
    stale = {"weight_map": entries | {"lm_head.input_scale": min(entries.values())}}
    (folder / INDEX).write_text(json.dumps(stale))
    assert "ghosts" in grave(folder)
    assert "MENDED lm_head.input_scale" in run("check", folder, "--fix", into).out
    before, after = meaning(folder), meaning(into)
    for part in ("weights", "inputs", "biases", "kv", "rest"):
        assert same(getattr(after, part), getattr(before, part)), part
    new = {f.code for f in examine(into, None)} - {f.code for f in examine(folder, None)}
    assert new <= {"tensor-parallel"}  # no degree is told of a folder that is not sound


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-fbgemm", "fp8-mxfp8", "quark-nvfp4"])
def test_fix_refuses_a_form_that_is_only_read(
    kind: Callable[[str], tuple[Path, Built]], tmp_path: Path, name: str
) -> None:
    folder, into = copied(kind(name)[0], tmp_path / "source"), tmp_path / "fixed"
    entries = {n: path.name for path in folder.glob("*.safetensors") for n in load_file(path)}
    stale = {"weight_map": entries | {"lm_head.input_scale": min(entries.values())}}
    (folder / INDEX).write_text(json.dumps(stale))
    ran = run("check", folder, "--fix", into)
    assert (ran.code, into.exists()) == (1, False)
    assert "only read here" in ran.err


def test_fix_goes_by_the_rules_of_a_destination(tmp_path: Path) -> None:
    folder, into = copied(DATA / FP8, tmp_path / "source"), tmp_path / "fixed"
    assert "choose another place" in run("check", folder, "--fix", folder).err
    assert run("check", folder, "--overwrite").code == 2
    assert run("check", folder, "--fix", into).code == 0
    assert "--overwrite replaces it" in run("check", folder, "--fix", into).err
    ran = run("check", folder, "--fix", into, "--overwrite", "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert [entry["code"] for entry in told["mended"]] == ["unlisted"]
    assert {f["code"] for f in told["findings"]} == {f.code for f in examine(into, None)}
    assert run("verify", folder, into).code == 0
    edit(into, lambda all_: all_ | {"lm_head.weight": -all_["lm_head.weight"]})
    assert run("verify", folder, into).code == 3


def test_a_list_of_projections_in_another_order_is_not_passed_over(tmp_path: Path) -> None:
    """The canonical form stacks gate, then up, and keeps their names in its config."""
    ours = tmp_path / "ours"
    assert run("convert", "--to", "canonical", DATA / V4, ours).code == 0
    assert not grave(ours)

    def swapped(found: Json) -> Json:
        block = found["quantization_config"]
        experts = {c: ["w3", "w1", "w2"] for c in block["experts"]}
        return found | {"quantization_config": block | {"experts": experts}}

    edit_config(ours, swapped)
    assert grave(ours) == {"unsound"}
    for ran in (
        run("check", ours, "--fix", tmp_path / "fixed"),
        run("convert", "--to", "deepseek-v4", ours, tmp_path / "back"),
    ):
        assert ran.code in (1, 3)
        assert "lists w3, w1, w2, wanted gate, up, down" in ran.out + ran.err
    assert not (tmp_path / "fixed").exists()


@pytest.mark.parametrize(("folder", "leaf"), [(MOE, "weight_scale_2"), (CT, "weight_global_scale")])
def test_scalars_of_q_k_and_v_become_one(tmp_path: Path, folder: str, leaf: str) -> None:
    """A block's scale is rounded again to E4M3 by half a step of 2^-3 at most: 1/17."""
    after, into = copied(DATA / folder, tmp_path / "after"), tmp_path / "fixed"
    attention = "model.layers.0.self_attn."
    each(re.escape(f"{attention}k_proj.{leaf}"), lambda t: t * 1.5)(after)
    assert grave(after) == {"group-scales"}
    ran = run("check", after, "--fix", into)
    assert ran.code == 0, ran.err
    now = load_all(into)
    assert len({float(now[f"{attention}{x}_proj.{leaf}"]) for x in "qkv"}) == 1
    assert same(codes(into), codes(after))
    ours, theirs = meaning(into).weights, meaning(after).weights
    for name, truth in theirs.items():
        bound = 1 / 17 + 1e-6 if name.startswith(attention) else 0.0
        assert ((ours[name] - truth).abs() <= bound * truth.abs()).all(), name
