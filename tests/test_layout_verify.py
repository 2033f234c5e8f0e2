"""`verify` names what differs in a folder of any layout; a config that lies is not believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.build import Spec, edit_config
from tests.convert import run
from tests.layout_sources import FP8, MOE, MX, MXFP8, small, source
from tests.producers import Kind
from tests.rewriting import one_thread, proved

__all__ = ["one_thread"]

OSS = small("gptoss-mxfp4")
CASES: dict[str, tuple[Spec | Kind, tuple[str, ...]]] = {
    "nvfp4 for sglang": (MOE, ("marlin-nvfp4", "--for", "sglang")),
    "mxfp4 dense": (small("modelopt-mxfp4"), ("marlin-mxfp4",)),
    "mxfp4 interleaved, biases": (OSS, ("marlin-mxfp4",)),
    "mxfp4 for sglang, biases": (OSS, ("marlin-mxfp4", "--for", "sglang")),
    "mxfp4 for fp8 activations": (MX, ("marlin-mxfp4", "--activations", "fp8")),
    "fp8 of tensors and rows": (FP8, ("marlin-fp8",)),
    "fp8 of blocks, float16": (
        small("modelopt-fp8-block"), ("marlin-fp8", "--dtype", "float16")),
    "mxfp8": (MXFP8, ("marlin-mxfp8",)),
}  # fmt: skip

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A source and what is packed of it, made once."""

    @cache
    def made(case: str) -> Pair:
        root = tmp_path_factory.mktemp("pair")
        spec, (layout, *options) = CASES[case]
        src = source(root / "src", spec)
        return src, proved(layout, src, root / "dst", *options)

    return made


def spans(folder: Path) -> Iterator[tuple[Path, str, int, int]]:
    """Every tensor of every shard: its file, name, first byte and size."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield path, name, 8 + size + begin, end - begin


def kinds(folder: Path) -> dict[str, tuple[Path, str, int, int]]:
    """One tensor of each kind of leaf, of experts and of single linears."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stems = []
    for name, size in config["sizes"].items():
        at = name.rpartition(".")[0]
        stems += [f"{name}_"] if size["experts"] else [f"{at}.{m}." for m in size["members"]]
    found = {}
    for span in spans(folder):
        if stem := next((s for s in stems if span[1].startswith(s)), None):
            found[
                ("w13_" * ("w13" in stem) or "experts_" * ("w2" in stem)) + span[1][len(stem) :]
            ] = span
    return found


LEAVES = {
    "nvfp4 for sglang": "weight weight_scale weight_global_scale source_global_scale "
    "source_input_scale w13_weight_scale_2 w13_source_global_scale",
    "mxfp4 dense": "weight weight_scale w13_weight w13_weight_scale",
    "mxfp4 interleaved, biases": "w13_weight w13_weight_scale w13_bias experts_bias",
    "mxfp4 for sglang, biases": "w13_weight w13_weight_scale w13_bias experts_bias",
    "mxfp4 for fp8 activations": "w13_weight w13_weight_scale experts_weight",
    "fp8 of tensors and rows": "weight weight_scale source_weight_scale source_input_scale "
    "w13_weight w13_weight_scale w13_source_weight_scale experts_source_weight_scale",
    "fp8 of blocks, float16": "weight_scale source_weight_scale w13_source_weight_scale",
    "mxfp8": "weight weight_scale w13_weight w13_weight_scale experts_weight",
}
"""Leaves that each case must have, of all that are altered."""


@pytest.mark.parametrize("case", CASES)
def test_one_changed_byte_in_any_kind_of_tensor_is_found(
    pair: Callable[[str], Pair], tmp_path: Path, case: str
) -> None:
    src, made = pair(case)
    target = Path(shutil.copytree(made, tmp_path / "dst"))
    found = kinds(target)
    assert {*LEAVES[case].split()} <= found.keys()
    for path, name, begin, size in found.values():
        place = begin + size // 3
        content = bytearray(path.read_bytes())
        content[place] ^= 0x11
        path.write_bytes(content)
        ran = run("verify", src, target)
        assert ran.code == 3, name
        assert name in ran.out
        assert len(ran.out.strip().splitlines()) == 1, ran.out
        content[place] ^= 0x11
        path.write_bytes(content)
    assert run("verify", src, target).code == 0


def altered(made: Path, into: Path, changes: dict[str, Any]) -> Path:
    """A copy whose quantization config says something else."""
    shutil.copytree(made, into)
    edit_config(into, lambda c: c | {"quantization_config": c["quantization_config"] | changes})
    return into


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"variant": "sglang-a8"}, 1, "no layout 'marlin-mxfp4' in variant 'sglang-a8'"),
        ({"variant": None}, 1, "no layout 'marlin-mxfp4' in variant None"),
        ({"variant": "sglang"}, 3, "differ"),
        ({"layout": "marlin-mxfp8"}, 3, "differ"),
        ({"layout_version": 2}, 1, "layout version 2, wanted 1"),
        ({"activation_dtype": "float16"}, 1, "activation_dtype 'float16'"),
        ({"activations": "fp8"}, 3, "activations differs"),
        ({"w13_order": "gate_up"}, 3, "w13_order differs"),
        ({"consumer": {"runtime": "sglang", "version": "0.5.23"}}, 3, "consumer differs"),
    ],
)
def test_a_config_of_another_variant_is_refused_or_differs(
    pair: Callable[[str], Pair], tmp_path: Path, changes: dict[str, Any], code: int, words: str
) -> None:
    src, made = pair("mxfp4 interleaved, biases")
    target = altered(made, tmp_path / "dst", changes)
    ran = run("verify", src, target)
    assert ran.code == code, ran.out + ran.err
    assert words in ran.out + ran.err


@pytest.mark.parametrize("word", ["sglang-a8", None, "sglang", "vllm-a8"])
def test_a_folder_of_another_variant_than_its_config_says_is_no_source(
    pair: Callable[[str], Pair], tmp_path: Path, word: str | None
) -> None:
    made = pair("mxfp4 interleaved, biases")[1]
    target = altered(made, tmp_path / "dst", {"variant": word})
    ran = run("convert", "--to", "canonical", target, tmp_path / "back")
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 1
    assert "variant" in ran.err


def test_shards_say_their_layout_only_where_they_hold_packed_weights(
    pair: Callable[[str], Pair],
) -> None:
    for case, (_, (layout, *_options)) in CASES.items():
        for path in pair(case)[1].glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                metadata, names = file.metadata(), set(file.keys())
            said = metadata.pop("transcode.layout", "")
            assert bool(said) == any("weight_scale" in name for name in names)
            assert said.startswith(f"{layout} 1" * bool(said))
            assert metadata == {"format": "pt"}
            assert path.name.startswith(("experts-00001-of-", "model-00001-of-"))
            assert ("experts" in path.name) == any(".w13_" in name for name in names)
