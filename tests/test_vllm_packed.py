"""What the plug-in refuses before a weight is read, and which layer is which module."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import Spec, build
from tests.convert import run
from tests.packed import config, tensors
from transcode.errors import TranscodeError
from transcode.kernels import marlin
from transcode.vllm.folder import Folder
from transcode.vllm.modules import How, Modules
from transcode.vllm.packed import LAYOUTS, Packed, Stack, parse, require_part, tiles

DATA = Path(__file__).parent / "data"
SOURCES = {
    "nvfp4": ("modelopt_nvfp4_qwen3moe", "marlin-nvfp4"),
    "gptoss": ("hf_mxfp4_gptoss", "marlin-mxfp4"),
    "mixed": ("modelopt_mixed_fp8attn_nvfp4exp_qwen3moe", "marlin-nvfp4"),
    "mxfp8": ("modelopt_mxfp8_qwen3moe", "marlin-mxfp8"),
    "block": ("modelopt_fp8block_qwen3moe", "marlin-fp8"),
    "channel": ("ct_fp8dynamic_qwen3moe", "marlin-fp8"),
}
QKV = ("q_proj", "k_proj", "v_proj")
Place = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A packed folder, made once."""
    made = dict[str, Path]()

    def place(name: str) -> Path:
        if name not in made:
            source, layout = SOURCES[name]
            made[name] = tmp_path_factory.mktemp(name) / "packed"
            ran = run("convert", "--to", layout, DATA / source, made[name])
            assert ran.code == 0, ran.err
        return made[name]

    return place


@pytest.mark.parametrize("name", SOURCES)
def test_a_packed_folder_is_opened_and_every_tensor_is_as_wanted(folder: Place, name: str) -> None:
    path = folder(name)
    packed = parse(config(path))
    fused = {n for n in tensors(path) if n.rpartition(".")[2].startswith(("w13_", "w2_"))}
    assert set(Folder.open(path, packed).experts) == fused
    turns = {s.interleaved for s in packed.stacks.values() if s.name.endswith(".w13")}
    assert turns == {name == "gptoss"}


def test_layouts_are_those_that_are_packed_for_vllm() -> None:
    for name, kind in LAYOUTS.items():
        layout = next(x for x in marlin.LAYOUTS if (x.name, x.variant) == (name, "vllm"))
        assert kind.bits == layout.codes.bits
        assert kind.scale == layout.scales.dtype
        assert kind.factor == bool(layout.factor)
        assert not kind.group or layout.groups == (kind.group,)
    assert all(
        tiles(n, k) == marlin.serves(n, k) for n in range(0, 513, 32) for k in range(0, 513, 32)
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "cutlass-nvfp4"}, "layout 'cutlass-nvfp4', wanted one of marlin-nvfp4"),
    "version": ({"layout_version": 2}, "marlin-nvfp4 version 2, wanted 1"),
    "sglang": ({"variant": "sglang"}, "in variant 'sglang' with 16-bit activations, wanted 'vllm'"),
    "a8": ({"variant": "vllm-a8", "activations": "fp8"}, "variant 'vllm-a8' with fp8 activations"),
    "dtype": ({"activation_dtype": "float32"}, "'float32' activations, wanted bfloat16 or float16"),
    "sizes": ({"sizes": None}, "the config of a packed folder is not ours"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_vllm_cannot_serve_is_refused_in_one_line(folder: Place, what: str) -> None:
    change, message = REFUSED[what]
    with pytest.raises(TranscodeError, match=message) as caught:
        parse(config(folder("nvfp4")) | change)
    assert "\n" not in str(caught.value)


def _without_tensor(path: Path) -> None:
    index = path / "transcode.index.json"
    found = json.loads(index.read_text())
    del found["weight_map"]["model.layers.0.mlp.experts.w2_weight_scale_2"]
    index.write_text(json.dumps(found))


def _truncated(path: Path) -> None:
    file = next(path.glob("experts-*"))
    file.write_bytes(file.read_bytes()[:-100])


def _other_shape(path: Path) -> None:
    found = json.loads((path / "config.json").read_text())
    found["quantization_config"]["sizes"]["model.layers.1.mlp.experts.w13"]["padded_n"] = [64, 64]
    (path / "config.json").write_text(json.dumps(found))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no experts": (lambda p: next(p.glob("experts-*")).unlink(), "experts-00001-of-00001"),
    "no index": (lambda p: (p / "transcode.index.json").unlink(), "transcode.index.json: No such"),
    "no dense": (lambda p: next(p.glob("model-*")).unlink(), "model-00001-of-00001"),
    "tensor": (_without_tensor, "experts.w2_weight_scale_2 is missing, wanted F32"),
    "truncated": (_truncated, "experts-00001-of-00001.safetensors: truncated"),
    "shape": (_other_shape, "w13_weight I32 .*, wanted I32"),
    "folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(
    folder: Place, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(folder("nvfp4"), path)
    do, message = BROKEN[what]
    do(path)
    found = config(path if what == "shape" else folder("nvfp4"))
    with pytest.raises(TranscodeError, match=message) as caught:
        Folder.open(path, parse(found))
    assert "\n" not in str(caught.value)


def test_layers_are_found_under_the_names_that_vllm_gives_them(folder: Place) -> None:
    packed = parse(config(folder("nvfp4")))
    modules, joined = Modules(packed), {"qkv_proj": QKV}
    at = "model.layers.0."
    how, stack = modules.linear(f"{at}self_attn.qkv_proj", joined)
    assert (how, stack and stack.members) == (How.PACKED, QKV)
    assert modules.linear(f"{at}self_attn.qkv_proj", {}) == (how, stack)
    assert modules.linear(f"{at}mlp.gate", joined) == (How.PLAIN, None)
    assert modules.linear("lm_head", joined) == (How.PLAIN, None)
    for name in (f"{at}mlp.experts", f"{at}mlp.experts.routed_experts"):
        assert modules.experts(name) == (How.PACKED, f"{at}mlp.experts")
    for _ in range(2):  # vLLM may apply a mapper more than once
        modules.rename(lambda name: name.replace("model.", "language_model.model.", 1))
    assert modules.linear("language_model.model.layers.0.self_attn.qkv_proj", joined)[1] == stack
    assert modules.experts("language_model.model.layers.0.mlp.experts")[0] is How.PACKED


def test_names_that_a_mapper_drops_stay_known(folder: Place) -> None:
    modules = Modules(parse(config(folder("nvfp4"))))
    modules.rename(lambda name: None)
    assert all(isinstance(name, str) for name in modules.known)
    assert modules.linear("model.layers.0.self_attn.o_proj", {})[0] is How.PACKED


def test_what_is_not_packed_is_left_to_vllms_own_methods(folder: Place) -> None:
    packed = parse(config(folder("mixed")))
    modules = Modules(packed)
    how, stack = modules.linear("model.layers.0.self_attn.qkv_proj", {"qkv_proj": QKV})
    assert (how, stack) == (How.CARRIED, None)
    dense_only = replace(packed, stacks={}, carried=("model.layers.0.mlp.experts.3.up_proj",))
    assert Modules(dense_only).experts("model.layers.0.mlp.experts")[0] is How.CARRIED
    bare = replace(packed, stacks={}, carried=())
    assert Modules(bare).experts("model.layers.9.mlp.experts")[0] is How.PLAIN


def test_experts_of_which_nothing_is_said_are_refused(folder: Place) -> None:
    modules = Modules(parse(config(folder("nvfp4"))))
    with pytest.raises(TranscodeError, match=r"layers\.9\.mlp\.experts: the folder's config"):
        modules.experts("model.layers.9.mlp.experts")


def test_members_that_are_stored_in_different_ways_are_refused(folder: Place) -> None:
    packed = parse(config(folder("mixed")))
    carried = tuple(name for name in packed.carried if not name.endswith("v_proj"))
    with_one = replace(packed, carried=carried, plain=("model.layers.0.self_attn.v_proj",))
    with pytest.raises(TranscodeError, match="joins what is stored in different ways"):
        Modules(with_one).linear("model.layers.0.self_attn.qkv_proj", {"qkv_proj": QKV})


def test_members_that_were_packed_apart_are_refused(folder: Place) -> None:
    found = copy.deepcopy(config(folder("nvfp4")))
    stem = "model.layers.0.self_attn."
    whole = found["sizes"].pop(f"{stem}q_proj+k_proj+v_proj")
    for i, leaf in enumerate(QKV):
        one = {"members": [leaf], "n": [whole["n"][i]], "padded_n": [whole["padded_n"][i]]}
        found["sizes"][stem + leaf] = whole | one
    with pytest.raises(TranscodeError, match="were not packed together"):
        Modules(parse(found)).linear(f"{stem}qkv_proj", {"qkv_proj": QKV})


def _stack(n: tuple[int, ...], k: int, scales: int, **more: Any) -> Stack:
    members = tuple("abc"[: len(n)])
    whole = Stack("x.a", None, members, n, k, n, k, scales, False, False)
    return replace(whole, **more)


PARTS = {
    "whole": (_stack((256, 128), 256, 16), (256, 128), 256, True),
    "half of the rows": (_stack((256, 128), 256, 16), (128, 64), 256, True),
    "rows of half a tile": (_stack((256, 64), 256, 16), (128, 32), 256, False),
    "half of the columns": (_stack((256,), 256, 16), (256,), 128, True),
    "half a scale": (_stack((256,), 128, 1), (256,), 64, True),
    "no thread tile": (_stack((192,), 256, 16), (192,), 64, False),
    "a padded one": (_stack((256, 100), 256, 16, padded_n=(256, 128)), (256, 100), 256, True),
    "three quarters of a tile each": (_stack((192, 192), 256, 16), (96, 96), 256, False),
    "rows of a padded one": (_stack((256,), 256, 16, padded_n=(320,)), (128,), 256, False),
    "half a padded one": (_stack((256, 100), 256, 16, padded_n=(256, 128)), (128, 50), 256, False),
}


@pytest.mark.parametrize("what", PARTS)
def test_a_rank_gets_whole_tiles_or_a_clear_word(folder: Place, what: str) -> None:
    packed: Packed = parse(config(folder("nvfp4")))
    stack, rows, columns, fits = PARTS[what]
    if fits:
        require_part(packed, stack, rows, columns)
        return
    with pytest.raises(TranscodeError, match=r"no whole tiles; .*degrees \[1, 2\]"):
        require_part(packed, stack, rows, columns)


def test_a_lone_block_of_fp8_is_refused_since_its_scales_have_another_order(folder: Place) -> None:
    packed = parse(config(folder("block")))
    with pytest.raises(TranscodeError, match="no whole tiles"):
        require_part(packed, _stack((256,), 256, 2), (256,), 128)
    layout = marlin.LAYOUTS[-2]
    scales = torch.arange(256, dtype=torch.bfloat16).reshape(128, 2) / 512
    alone, cut = (
        layout.scales.pack(scales[:, :1].contiguous(), 1.0),
        layout.scales.pack(scales, 1.0),
    )
    assert not torch.equal(alone, cut[:1])


@pytest.mark.parametrize(
    ("runtime", "message", "last"),
    [
        ("vllm", "vLLM serves it with the plug-in", "vllm loads it with the plug-in"),
        ("sglang", "no runtime loads it yet", "no runtime loads it yet"),
    ],
)
def test_check_says_what_the_plug_in_serves(
    tmp_path: Path, runtime: str, message: str, last: str
) -> None:
    build(tmp_path / "source", Spec())
    packed = tmp_path / "packed"
    words = ("convert", "--to", "marlin-nvfp4", "--for", runtime)
    assert run(*words, tmp_path / "source", packed).code == 0
    ran = run("check", packed)
    assert ran.code == 0
    assert message in ran.out
    assert ran.out.rstrip().endswith(last)
