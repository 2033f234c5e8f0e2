"""Every failure is exit 1 and one clear line (what, found, wanted) and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import packed
from tests.build import Spec, build, edit, edit_config
from tests.convert import Ran, pack, run
from transcode import destination
from transcode.checkpoint import Reader
from transcode.files import PLAN
from transcode.header import TensorInfo

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]
SPEC = Spec(hidden=64, intermediate=64, experts=3, layers=1, heads=2, kv_heads=1, shards=2)
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
EXPERTS = "model.layers.0.mlp.experts"
QKVO = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ModelOpt checkpoint of two shards."""
    folder = tmp_path_factory.mktemp("built")
    build(folder, SPEC)
    return folder


@pytest.fixture
def src(built: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    shutil.copytree(built, tmp_path / "src")
    return tmp_path / "src"


def convert(source: Path, *options: str, to: str = "dst") -> Ran:
    return run("convert", "--to", "marlin-nvfp4", *options, source, source.parent / to)


def one_line(ran: Ran, *words: str) -> None:
    """Exit 1 and one line that holds the words."""
    assert ran.code == 1, ran.err
    assert ran.err.startswith("transcode: ")
    assert len(ran.err.splitlines()) == 1, ran.err
    for word in words:
        assert word in ran.err


def refused(source: Path, *words: str) -> None:
    """The one line, and nothing new beside the source."""
    before = sorted(p.name for p in source.parent.iterdir())
    one_line(convert(source), *words)
    assert sorted(p.name for p in source.parent.iterdir()) == before


def taken(source: Path) -> Path:
    """Converted and proved: the oddity says nothing about the weights."""
    return pack(source, source.parent / "dst")


def put(path: Path, value: object) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value))


# Shards.


def test_a_shard_that_the_index_names_is_missing(src: Path) -> None:
    (src / SECOND).unlink()
    refused(src, f"{SECOND} is missing", "the index names it")


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_shard(src: Path, kept: int) -> None:
    (src / SECOND).write_bytes((src / SECOND).read_bytes()[:kept])
    refused(src, f"{SECOND}: ", {0: "too short", 7: "too short"}.get(kept, "truncated"))


def test_a_shard_longer_than_its_header_says(src: Path) -> None:
    with (src / SECOND).open("ab") as file:
        file.write(b"\0")
    refused(src, f"{SECOND}: longer than its header says", "wanted")


def test_a_header_longer_than_the_limit_in_a_file_that_is_longer_still(src: Path) -> None:
    with (src / SECOND).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(100_001_000)
    refused(src, SECOND, "header of 100000001 bytes", "the limit is 100000000")


def test_a_header_of_many_huge_sizes_is_refused_at_once(src: Path) -> None:
    entry = {"dtype": "U8", "shape": [1 << 61] * 30_000, "data_offsets": [0, 8]}
    sidecar(src, {"a": entry})
    refused(src, "extra.safetensors: a: shape")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_a_shard_that_is_no_file(src: Path, make: Callable[[Path], None]) -> None:
    make(src / "extra.safetensors")
    refused(src, "extra.safetensors is no file")


def test_a_link_that_leads_round_in_a_circle(src: Path) -> None:
    (src / "a").symlink_to("b")
    (src / "b").symlink_to("a")
    report = json.loads((taken(src) / "transcode_report.json").read_text())
    assert {entry["name"] for entry in report["left_out"]} == {"a", "b"}
    (src / SECOND).unlink()
    (src / SECOND).symlink_to(SECOND)
    one_line(convert(src, to="again"), SECOND)
    (src.parent / "c").symlink_to("c")
    one_line(run("convert", "--to", "marlin-nvfp4", src.parent / "c", src.parent / "d"), "c")
    one_line(convert(src, to="c"), "c")


def sidecar(folder: Path, header: object, data: bytes = b"12345678") -> None:
    """`extra.safetensors`, which is read because all its names are new."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "extra.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def entry(begin: Any, end: Any, shape: Any = (4,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[object, str]] = {
    "offsets that overlap": (
        {"a": entry(0, 4), "b": entry(2, 6)}, "b overlaps the tensor before it (byte",
    ),
    "offsets with a gap": (
        {"a": entry(0, 4), "b": entry(5, 9)}, "b leaves a gap before it (byte",
    ),
    "offsets beyond the end": ({"a": entry(0, 40, [40])}, "truncated: "),
    "offsets that begin late": ({"a": entry(4, 8)}, "a leaves a gap"),
    "offsets in the wrong order": ({"a": entry(8, 4)}, "data_offsets is [8, 4]"),
    "offsets below zero": ({"a": entry(-4, 0)}, "data_offsets is [-4, 0]"),
    "offsets that are huge": ({"a": entry(0, 1 << 70)}, "data_offsets is [0, 11805"),
    "offsets with a fraction": ({"a": entry(0, 8.0, [8])}, "data_offsets is [0, 8.0]"),
    "offsets that are words": ({"a": entry("0", "8", [8])}, "data_offsets is ['0', '8']"),
    "three offsets": (
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}}, "[0, 4, 8], wanted [begin",
    ),
    "offsets that are no list": (
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": 8}}, "data_offsets is 8",
    ),
    "a size that does not match": ({"a": entry(0, 8, [3], "F16")}, "8 bytes, wanted 6 for F16 [3]"),
    "half a byte": ({"a": entry(0, 8, [3, 5], "F4")}, "a: F4 [3, 5] is no whole number of bytes"),
    "a shape below zero": ({"a": entry(0, 8, [-8])}, "shape is [-8], wanted a list of natural"),
    "a shape that is true": ({"a": entry(0, 8, [True, 8])}, "shape is [True, 8]"),
    "a shape that is no list": ({"a": entry(0, 8, 8)}, "shape is 8"),
    "a shape too large to count": (
        {"a": entry(0, 0, [1 << 61, 1 << 61, 0])}, "a: shape [2305843009213693952, ",
    ),
    "a dtype that is unknown": ({"a": entry(0, 8, [8], "U7")}, "unknown dtype 'U7'"),
    "a dtype that is no word": ({"a": entry(0, 8, [8], ["U8"])}, "unknown dtype ['U8']"),
    "an entry without offsets": (
        {"a": {"dtype": "U8", "shape": [8]}}, "a: the header wants dtype, shape and data_offsets",
    ),
    "an entry that is a list": ({"a": [0, 8]}, "a: the header wants dtype, shape and data_offsets"),
    "an entry that is null": ({"a": None}, "a: the header wants dtype, shape and data_offsets"),
    "a tensor twice": (
        b'{"a":%b,"a":%b}' % (2 * (b'{"dtype":"U8","shape":[8],"data_offsets":[0,8]}',)),
        "header: 'a' stands twice",
    ),
    "a key of an entry twice": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]}}', "'dtype' stands",
    ),
    "metadata that is a list": ({"__metadata__": [], "a": entry(0, 8, [8])}, "__metadata__ is no"),
    "metadata with a number": (
        {"__metadata__": {"x": 1}, "a": entry(0, 8, [8])}, "__metadata__: 'x' is 1, wanted text",
    ),
    "a header that is a list": ([], "the header is no JSON object"),
    "a header that is no JSON": (b"{", "the header is no JSON: "),
    "a header that is no text": (b'{"\xff":1}', "the header is no JSON: "),
    "a header that is empty": (b"", "the header is no JSON: "),
    "a header nested without end": (b'{"a":' + b"[" * 100_000, "the header is no JSON: "),
    "a number of ten thousand digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}',
        "the header is no JSON: ",
    ),
    "half a surrogate pair": (
        b'{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', r"'\ud800' is no Unicode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_is_refused_that_has(src: Path, what: str) -> None:
    header, words = HEADERS[what]
    sidecar(src, header)
    refused(src, "transcode: extra.safetensors: ", words)


def test_an_empty_shard_is_left_out(src: Path) -> None:
    sidecar(src, {}, b"")
    report = json.loads((taken(src) / "transcode_report.json").read_text())
    assert report["left_out"] == [{"name": "extra.safetensors", "reason": "holds no tensors"}]


NAMES = [
    "", " ", ".", "a..b", "../../outside", "/etc/x", "weight", ".weight", "a\nb", "tab\t\x1b[2J",
    "x\0y", "\u0663.weight", "\u2028", "model.layers." + "9" * 5000 + ".x", "n" * 50_000,
    "model.layers.0.mlp.experts.\u0660.extra", "\U0001f600.bias", "__metadata", "%s{0}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_tensor_with_an_odd_name_is_carried(src: Path, name: str) -> None:
    sidecar(src, {name: entry(0, 8, [8])}, b"12345678")
    if name.endswith("weight") and len(name) > 7:
        return refused(src, "has no scale")
    assert packed.tensors(taken(src))[name].tolist() == list(b"12345678")
    assert run("inspect", src).code == 0
    return None


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_fault_of_a_tensor_with_an_odd_name_is_one_line(src: Path, name: str) -> None:
    sidecar(src, {name: entry(0, 8, [7])}, b"12345678")
    refused(src, "8 bytes, wanted 7")
    assert not any(ord(c) < 32 for c in convert(src).err.strip())


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_packed", "qweight"])
def test_a_scale_or_codes_without_a_module(src: Path, leaf: str) -> None:
    sidecar(src, {leaf: entry(0, 8, [8])})
    refused(src, f"{leaf} U8 [8]: belongs to no module")


# The index.

INDEXES: dict[str, tuple[object, str]] = {
    "a list": ([], "no JSON object, but list"),
    "no JSON": ("{", "no JSON"),
    "empty": ("", "no JSON"),
    "without a map": ({}, "weight_map is NoneType, wanted an object"),
    "a list as its map": ({"weight_map": []}, "weight_map is list, wanted an object"),
    "a number as a file": ({"weight_map": {"x": 7}}, "x is said to lie in 7"),
    "a file with a zero byte": ({"weight_map": {"x": "a\0.safetensors"}}, "is missing"),
    "a file with a very long name": ({"weight_map": {"x": "a" * 5000 + ".safetensors"}}, "aaa"),
    "a file that is a folder": ({"weight_map": {"x": "dir.safetensors"}}, "dir.safetensors is mis"),
    "the config as a shard": (
        {"weight_map": {"x": "config.json"}}, "x is said to lie in 'config.json', wanted *.safetens"
    ),
    "weights of another form": (
        {"weight_map": {"x": "pytorch_model.bin"}}, "pytorch_model.bin', wanted *.safetensors",
    ),
    "half a surrogate pair": (r'{"weight_map": {"\ud800": "x.safetensors"}}', "no Unicode"),
    "nested without end": ("[" * 100_000, "no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_is_refused_that_is(src: Path, what: str) -> None:
    (src / "dir.safetensors").mkdir()
    value, words = INDEXES[what]
    put(src / INDEX, value)
    refused(src, words)


def test_an_index_that_is_a_folder_or_leads_nowhere(src: Path) -> None:
    (src / INDEX).unlink()
    (src / INDEX).symlink_to("blobs/missing")
    refused(src, f"{INDEX}: No such file")
    (src / INDEX).unlink()
    (src / INDEX).mkdir()
    refused(src, f"{INDEX}: Is a directory")


@pytest.mark.parametrize("metadata", [None, [], 7, {"total_size": "many"}, {"total_size": [1]}])
def test_metadata_of_the_index_is_not_believed(src: Path, metadata: object) -> None:
    entries = json.loads((src / INDEX).read_text())
    put(src / INDEX, entries | {"metadata": metadata})
    taken(src)


# The config.


@pytest.mark.parametrize("text", ["[]", "null", "7", '"x"', "{", "", "\ufeff{}", "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_a_config_that_is_no_object(src: Path, file: str, text: str) -> None:
    put(src / file, text)
    refused(src, f"{file}: ", "no JSON")


def test_a_config_that_is_a_folder_or_leads_nowhere(src: Path) -> None:
    for file, words in (("hf_quant_config.json", "No such file"), ("config.json", "is missing")):
        (src / file).unlink()
        (src / file).symlink_to("blobs/missing")
        refused(src, file, words)
        (src / file).unlink()
        (src / file).mkdir()
        refused(src, file)
        (src / file).rmdir()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (json.loads("[" * 500 + "]" * 500), "nested more than 100 deep"),
        (json.loads('{"x":' * 500 + "7" + "}" * 500), "nested more than 100 deep"),
        ("\ud800", "is no Unicode"),
        ({"\udfff": 1}, "is no Unicode"),
    ],
)
def test_a_config_that_cannot_be_written_again(src: Path, value: object, words: str) -> None:
    edit_config(src, lambda config: config | {"x": value})
    refused(src, "config.json: ", words)


ODD: tuple[Any, ...] = (
    None, [], {}, "", "x", 7, -1, 0, True, 1.5, [[]], {"": None}, {"g": {"weights": []}},
    {"g": {"weights": {"num_bits": 4}}},
)  # fmt: skip
KEYS = (
    "model_type", "dtype", "torch_dtype", "hidden_act", "num_attention_heads",
    "num_key_value_heads", "quantization_config", "compression_config", "vision_config",
    "swiglu_limit", "architectures",
)  # fmt: skip
QUANTIZATION = (
    "quant_method", "quant_algo", "moe_quant_algo", "config_groups", "quantized_layers", "ignore",
    "producer", "quantization", "kv_cache_scheme", "kv_cache_quant_algo", "format",
)  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_configs_of_other_types_do_not_stop_a_conversion(src: Path, value: object) -> None:
    edit(src, lambda t: t | {f"{EXPERTS}.0.up_proj.weight_scale_2": torch.tensor(0.5)})
    config = json.loads((src / "config.json").read_text())
    every = dict.fromkeys(KEYS, value)
    quantization = config["quantization_config"] | dict.fromkeys(QUANTIZATION, value)
    changes: tuple[dict[str, Any], ...] = (
        every, {"text_config": value}, {"text_config": every}, {"quantization_config": quantization}
    )  # fmt: skip
    for change in changes:
        put(src / "config.json", config | change)
        shutil.rmtree(taken(src))
        assert run("inspect", src).code == 0


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1" + "0" * 99]
)
def test_a_config_with_odd_numbers_is_carried(src: Path, number: str) -> None:
    text = (src / "config.json").read_text().strip()
    put(src / "config.json", f'{text[:-1]}, "time_step_limit": [0.0, {number}], "x": {number}}}')
    config = json.loads((taken(src) / "config.json").read_text())
    assert str(config["x"]) == str(json.loads(number))


@pytest.mark.parametrize("pattern", ["(", "(" * 5000, "a{99999999999}", "[", "(?P<1>)", "\\", None])
def test_a_pattern_that_is_none_is_not_matched(tmp_path: Path, pattern: object) -> None:
    build(tmp_path / "src", replace(SPEC, dialect="compressed-tensors", attention="mxfp4"))
    target = pattern if pattern is None else f"re:{pattern}"

    def change(config: dict[str, Any]) -> dict[str, Any]:
        for group in config["quantization_config"]["config_groups"].values():
            group["targets"] = [target]
        return config

    edit_config(tmp_path / "src", change)
    taken(tmp_path / "src")


METHODS = {
    "gptq": "repack GPTQ themselves", "awq": "repack AWQ themselves",
    "bitsandbytes": "the unquantised checkpoint", "gguf": "llama.cpp",
    "hqq": "the unquantised checkpoint", "auto-round": "compressed-tensors or GPTQ",
    "torchao": "the unquantised checkpoint", "aqlm": "the unquantised checkpoint",
    "exl3": "ExLlama", "intel/auto-round": "or GPTQ",
    "bitnet": "the unquantised checkpoint", "eetq": "the unquantised checkpoint",
    "brand-new": "no nvfp4 module", "fp8": "no nvfp4 module",
    "quark": "no nvfp4 module", "mxfp4": "no nvfp4 module",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_read_is_named_with_what_to_use(tmp_path: Path, method: str) -> None:
    build(tmp_path / "src", replace(SPEC, attention="fp8", gate_up="bf16", down="bf16"))
    edit_config(tmp_path / "src", lambda c: c | {"quantization_config": {"quant_method": method}})
    refused(tmp_path / "src", repr(method), METHODS[method])
    if METHODS[method] != "no nvfp4 module":
        ran = run("convert", "--to", "canonical", tmp_path / "src", tmp_path / "dst")
        one_line(ran, repr(method), METHODS[method])


@pytest.mark.parametrize(
    "leaf", ["qweight", "weight_zero_point", "weight_g_idx", "pre_quant_scale"]
)
def test_leaves_of_other_methods_are_named(src: Path, leaf: str) -> None:
    edit(src, lambda t: t | {f"{OUT}.{leaf}": torch.zeros(4, dtype=torch.int32)})
    refused(src, f"{OUT}: {leaf}")


@pytest.mark.parametrize(
    ("file", "words"),
    [("model-q4.gguf", "llama.cpp"), ("pytorch_model.bin", "safetensors"), ("x.pt", "safetensors")],
)
def test_weights_of_another_form_are_named(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / "src").mkdir()
    put(tmp_path / "src" / file, "x")
    put(tmp_path / "src" / "config.json", {})
    refused(tmp_path / "src", "no checkpoint", file, words)


# Tensors that do not fit each other.


UP, OUT = f"{EXPERTS}.1.up_proj", f"{QKVO}.o_proj"


def without(*leaves: str) -> Change:
    """Remove leaves of o_proj."""
    return lambda t: [t.pop(f"{OUT}.{leaf}") for leaf in leaves]


def changed(leaf: str, change: Callable[[Tensor], Tensor], module: str = OUT) -> Change:
    name = f"{module}.{leaf}"
    return lambda t: t.update({name: change(t[name]).contiguous()})


def added(leaf: str, value: Tensor, module: str = OUT) -> Change:
    return lambda t: t.update({f"{module}.{leaf}": value})


def byte(raw: int) -> Tensor:
    return torch.tensor(raw, dtype=torch.uint8).view(torch.float8_e4m3fn)


def one_scale(raw: int) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        scales[1, 2] = byte(raw)
        return scales

    return change


SECOND_EXPERT = {
    f"{EXPERTS}.1.{p}_proj.{leaf}"
    for p in ("gate", "up", "down")
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale")
}
UNFIT: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a scale without a weight": (without("weight"), (f"{OUT}: weight_scale without a weight",)),
    "a weight without a scale": (
        without("weight_scale"), (f"{OUT}: weight_scale is missing beside weight",),
    ),
    "a weight without a global scale": (
        without("weight_scale_2"), (f"{OUT}: weight_scale_2 is missing beside weight",),
    ),
    "a weight without any scale": (
        without("weight_scale", "weight_scale_2"), (f"{OUT}.weight U8 [64, 32] has no sca",),
    ),
    "too few block scales": (
        changed("weight_scale", lambda s: s[:, :-1]),
        (f"{OUT}: weight_scale is [64, 3], wanted [64, 4] (K = 64, one scale per 16)",),
    ),
    "scales of too few rows": (
        changed("weight_scale", lambda s: s[:-1]), (f"{OUT}: ", "is [63, 4], wanted [64, 4]"),
    ),
    "turned scales": (
        changed("weight_scale", lambda s: s.T), (f"{OUT}: ", "is [4, 64], wanted [64, 4]"),
    ),
    "scales in one row": (
        changed("weight_scale", lambda s: s.flatten()), (f"{OUT}: ", "is [256], wanted [64, 4]"),
    ),
    "groups of 8": (
        changed("weight_scale", lambda s: s.repeat_interleave(2, 1)),
        (f"{OUT}: ", "is [64, 8], wanted [64, 4] (K = 64, one scale per 16)"),
    ),
    "groups of 64": (
        changed("weight_scale", lambda s: s[:, :1]), (f"{OUT}: ", "is [64, 1], wanted [64, 4]"),
    ),
    "groups that do not fill K": (
        changed("weight", lambda c: c[:, :-1]), (f"{OUT}: ", "K = 62, one scale per 16"),
    ),
    "scales of another dtype": (
        changed("weight_scale", lambda s: s.bfloat16()),
        (f"{OUT}.weight_scale BF16 [64, 4]: wanted F8_E4M3",),
    ),
    "a global scale for each row": (
        changed("weight_scale_2", lambda g: g.expand(64)),
        (f"{OUT}.weight_scale_2 F32 [64]: wanted one F32",),
    ),
    "a global scale without a value": (
        changed("weight_scale_2", lambda g: g[None][:0]), (f"{OUT}.weight_scale_2 F32 [0]: ",),
    ),
    "a global scale of another dtype": (
        changed("weight_scale_2", lambda g: g.bfloat16()), ("BF16 []: wanted one F32",),
    ),
    "an input scale of another dtype": (
        changed("input_scale", lambda g: g.double()), (f"{OUT}.input_scale F64 []: wanted one",),
    ),
    "codes without a shape": (
        changed("weight", lambda c: c[0, 0]), (f"{OUT}.weight U8 []: wanted a matrix",),
    ),
    "codes in one row": (
        changed("weight", lambda c: c.flatten()), (f"{OUT}.weight U8 [2048]: wanted a matrix",),
    ),
    "codes of three axes": (
        changed("weight", lambda c: c[None]),
        (f"{OUT}.weight U8 [1, 64, 32]: stacked quantised experts of a kind that is not known",),
    ),
    "codes without rows": (
        lambda t: (
            changed("weight", lambda c: c[:0])(t),
            changed("weight_scale", lambda c: c[:0])(t),
        ),
        (f"{OUT}.weight U8 [0, 32]: has no elements",),
    ),
    "codes without columns": (
        lambda t: (
            changed("weight", lambda c: c[:, :0])(t),
            changed("weight_scale", lambda c: c[:, :0])(t),
        ),
        (f"{OUT}.weight U8 [64, 0]: has no elements",),
    ),
    "a negative block scale": (
        changed("weight_scale", one_scale(0x81), UP),
        (f"{UP}: weight_scale is negative in row 1, block 2",),
    ),
    "both weight and weight_packed": (
        lambda t: t.update({f"{OUT}.weight_packed": t[f"{OUT}.weight"].clone()}),
        (f"{OUT}: has both weight and weight_packed",),
    ),
    "a bias of another length": (
        added("bias", torch.ones(63)), (f"{OUT}.bias F32 [63]: wanted [64]",),
    ),
    "a bias that is too large": (
        added("bias", torch.full((64,), 3.4e38).double() * 1e10),
        (f"{OUT}.bias F64 [64]: has values that bfloat16 cannot hold",),
    ),
    "a bias in a dtype that nothing computes with": (
        added("bias", torch.ones(64, dtype=torch.uint16)),
        (f"{OUT}.bias U16 [64]: ",),
    ),
    "a bias of an empty shape": (
        added("bias", torch.ones(0, 4)), (f"{OUT}.bias F32 [0, 4]: wanted [64]",),
    ),
    "a bias of one expert": (
        added("bias", torch.ones(64), UP), ("has no bias", f"{UP} has one"),
    ),
    "an expert missing in the middle": (
        lambda t: [t.pop(name) for name in SECOND_EXPERT],
        (f"{EXPERTS}: expert 1 is missing; there are 2",),
    ),
    "an expert missing at the end": (
        lambda t: [t.pop(n.replace("experts.1", "experts.2")) for n in SECOND_EXPERT],
        (f"{EXPERTS}: expert 2 is missing; there are 2",),
    ),
    "the first expert missing": (
        lambda t: [t.pop(n.replace("experts.1", "experts.0")) for n in SECOND_EXPERT],
        (f"{EXPERTS}: expert 0 is missing",),
    ),
    "an expert far away": (
        lambda t: t.update(
            {n.replace("experts.1", "experts.999999999"): t[n].clone() for n in SECOND_EXPERT}
        ),
        (f"{EXPERTS}: expert 3 is missing",),
    ),
    "an expert without up": (
        lambda t: [t.pop(n) for n in SECOND_EXPERT if ".up_" in n],
        (f"{EXPERTS}.1: experts 0 and 1 differ in up",),
    ),
    "experts without down": (
        lambda t: [t.pop(n) for n in list(t) if "experts" in n and ".down_" in n],
        (f"{EXPERTS}.0: has gate, up, wanted (gate,) up and down",),
    ),
    "an expert in BF16": (
        lambda t: (
            [t.pop(n) for n in SECOND_EXPERT if ".up_" in n],
            t.update({f"{UP}.weight": torch.ones(64, 64, dtype=torch.bfloat16)}),
        ),
        (f"{UP} is unquantised, expert 0's is nvfp4",),
    ),
    "an expert in groups of 32": (
        changed("weight_scale", lambda s: s[:, ::2], UP),
        (f"{UP} is nvfp4-32, expert 0's is nvfp4",),
    ),
    "gates in FP8": (
        lambda t: [to_fp8(t, f"{EXPERTS}.{e}.gate_proj") for e in range(3)],
        (f"{EXPERTS}: gate is fp8-tensor [64, 64], wanted up's nvfp4 [64, 64]",),
    ),
    "an expert of another size": (
        lambda t: [
            changed(leaf, lambda x: x[:48], UP)(t) for leaf in ("weight", "weight_scale")
        ],
        (f"{UP} is [48, 64], expert 0's is [64, 64]",),
    ),
    "down of another size than up": (
        lambda t: [
            changed(leaf, lambda x: x[:, : len(x[0]) // 2], f"{EXPERTS}.{e}.down_proj")(t)
            for e in range(3)
            for leaf in ("weight", "weight_scale")
        ],
        (f"{EXPERTS}: up is [64, 64], down [64, 32], wanted the transpose",),
    ),
    "a projection that nobody knows": (
        lambda t: [
            t.update({n.replace("up_proj", "side_proj"): t[n].clone()})
            for n in list(t)
            if ".up_proj." in n
        ],
        ("side_proj: an expert's projection that is not known here",),
    ),
    "an expert under two numbers": (
        lambda t: t.update(
            {n.replace("experts.1.", "experts.01."): t[n].clone() for n in SECOND_EXPERT}
        ),
        (f"{EXPERTS}.01.", f"{EXPERTS}.1."),
    ),
    "an expert under a number in other digits": (
        lambda t: t.update(
            {n.replace("experts.1.", "experts.\u0661."): t[n].clone() for n in SECOND_EXPERT}
        ),
        (f"{EXPERTS}.\u0661.",),
    ),
    "an expert under two orders": (
        lambda t: t.update(
            {n.replace("1.up_", "up_").replace("proj", "proj.1"): t[n].clone()
             for n in SECOND_EXPERT if ".up_" in n}
        ),
        (f"{EXPERTS}.up_proj.1", f"{EXPERTS}.1.up_proj"),
    ),
    "q and k of different K": (
        lambda t: [
            changed(leaf, lambda x: x[:, : len(x[0]) // 2], f"{QKVO}.k_proj")(t)
            for leaf in ("weight", "weight_scale")
        ],
        (f"{QKVO}.k_proj has K = 32, {QKVO}.q_proj has 64",),
    ),
    "an FP8 weight without a scale": (
        lambda t: (to_fp8(t, OUT), t.pop(f"{OUT}.weight_scale")),
        (f"{OUT}.weight F8_E4M3 [64, 64] has no scale",),
    ),
    "an FP8 weight with scales of no block": (
        lambda t: (to_fp8(t, OUT), t.update({f"{OUT}.weight_scale": torch.ones(3, 7, 2)})),
        (f"{OUT}: ", "weight_scale F32 [3, 7, 2]", "[64, 64]"),
    ),
    "a BF16 weight with a scale": (
        lambda t: t.update({"lm_head.weight_scale": torch.tensor(1.0)}),
        ("lm_head.weight BF16 [272, 64] is not quantised, but has a lm_head.weight_scale F32 []",),
    ),
    "a name that the output needs": (
        lambda t: t.update({f"{EXPERTS}.w13_weight": torch.ones(1)}),
        (f"{EXPERTS}.w13_weight would be written twice: the source has it already",),
    ),
    "a linear with the name of packed experts": (
        lambda t: t.update(
            {n.replace("self_attn.o_proj", "mlp.experts.w13"): t[n].clone() for n in list(t)}
        ),
        (f"{EXPERTS}.w13",),
    ),
    "a factor that is too large": (
        added("weight_scale_2", torch.tensor(1e30)), (OUT, "global scale 1e+30"),
    ),
}  # fmt: skip


def to_fp8(t: Tensors, module: str) -> Tensors:
    t[f"{module}.weight"] = torch.ones(64, 64).to(torch.float8_e4m3fn)
    t[f"{module}.weight_scale"] = torch.tensor(1.0)
    t.pop(f"{module}.weight_scale_2")
    return t


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_are_refused_that_have(src: Path, what: str) -> None:
    change, words = UNFIT[what]

    def apply(t: Tensors) -> Tensors:
        t = {name: value.clone() for name, value in t.items()}
        change(t)
        return t

    edit(src, apply)
    refused(src, *words)
    assert run("inspect", src).code == 0


def test_a_hidden_size_that_the_kernel_cannot_tile_even_padded(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(SPEC, hidden=96, attention="bf16"))
    refused(tmp_path / "src", EXPERTS, "hidden size 96 of an MoE layer, wanted a multiple of 64")


def test_blocks_of_32_become_blocks_of_16_without_loss(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(SPEC, attention="bf16"))

    def halve(t: Tensors) -> Tensors:
        return {n: x[:, ::2] if n.endswith("weight_scale") else x for n, x in t.items()}

    edit(tmp_path / "src", halve)
    ran = run("convert", "--to", "marlin-nvfp4", tmp_path / "src", tmp_path / "dst")
    assert ran.code == 0, ran.err
    assert run("verify", tmp_path / "src", tmp_path / "dst").code == 0
    [entry] = json.loads((tmp_path / "dst" / "transcode_report.json").read_text())["recoded"]
    assert (entry["from"], entry["to"], entry["changed"]) == ("nvfp4-32", "nvfp4", 0)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_global_scale_of_zero_never_becomes_infinite(tmp_path: Path, dialect: Any) -> None:
    """As a factor (ModelOpt 0, compressed-tensors +inf) in all members of a group and in some."""
    build(tmp_path / "src", replace(SPEC, dialect=dialect, expert_biases=True))
    name, zero = (
        ("weight_scale_2", 0.0) if dialect == "modelopt" else ("weight_global_scale", 1e999)
    )

    def damage(t: Tensors) -> Tensors:
        dead = [f"{QKVO}.{x}_proj" for x in "qkvo"] + [f"{EXPERTS}.{x}" for x in ("0.up_proj", UP)]
        dead += [f"{EXPERTS}.1.gate_proj", UP, f"{EXPERTS}.2.down_proj"]
        return {n: torch.full_like(x, zero) if n in {f"{m}.{name}" for m in dead} else x
                for n, x in t.items()}  # fmt: skip

    edit(tmp_path / "src", damage)
    target = taken(tmp_path / "src")
    for key, value in packed.tensors(target).items():
        if "source_global_scale" not in key and value.is_floating_point() and "weight_s" in key:
            assert torch.isfinite(value.float()).all(), key
    found = packed.weights(target)
    assert not torch.count_nonzero(found[f"{QKVO}.k_proj"])
    assert not torch.count_nonzero(found[UP])
    assert torch.count_nonzero(found[f"{EXPERTS}.2.up_proj"])
    assert "Infinity" not in (target / "transcode_report.json").read_text()


def test_a_factor_that_float16_cannot_hold_is_named(src: Path) -> None:
    edit(src, lambda t: t | {f"{OUT}.weight_scale_2": torch.tensor(1e-44)})
    one_line(convert(src, "--dtype", "float16"), OUT, "global scale 9.8", "for float16")
    taken(src)


def test_a_divisor_of_zero_is_an_error(tmp_path: Path) -> None:
    build(tmp_path / "src", replace(SPEC, dialect="compressed-tensors"))
    name = f"{QKVO}.o_proj.weight_global_scale"
    edit(tmp_path / "src", lambda t: t | {name: torch.zeros(1)})
    refused(tmp_path / "src", f"{name} is 0, a factor of inf")


# Rights, room, places.


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder of a user whom the file system refuses what root may do."""
    root = Path(tempfile.mkdtemp())
    mine = os.geteuid() == 0
    try:
        if mine:
            os.chown(root, 65534, 65534)
            os.seteuid(65534)
        yield root
    finally:
        if mine:
            os.seteuid(0)
        for path in [root, *root.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "place", [SECOND, INDEX, "config.json", "hf_quant_config.json", "tokenizer.json", "sub", "."]
)
def test_what_may_not_be_read_is_named(built: Path, place: str) -> None:
    taken_once = tempfile.mkdtemp()
    pack(built, Path(taken_once) / "dst")  # everything is imported now
    shutil.rmtree(taken_once)
    files = {p.name: p.read_bytes() for p in built.iterdir()}
    with nobody() as root:
        src = root / "src"
        (src / "sub").mkdir(parents=True)
        put(src / "sub" / "x", "x")
        for name, data in files.items():
            (src / name).write_bytes(data)
        (src / place).chmod(0)
        ran = convert(src)
        one_line(ran, "src" if place == "." else place, "Permission denied")
        assert not (root / "dst").exists()


@pytest.mark.parametrize("place", ["dst", "."])
def test_a_place_that_may_not_be_written_is_named(built: Path, place: str) -> None:
    files = {p.name: p.read_bytes() for p in built.iterdir()}
    with nobody() as root:
        (root / "src").mkdir()
        for name, data in files.items():
            (root / "src" / name).write_bytes(data)
        (root / place).mkdir(exist_ok=True)
        (root / place).chmod(0o500)
        ran = convert(root / "src", to="dst" if place == "." else "dst/new")
        one_line(ran, str(root), "Permission denied")


def test_a_destination_whose_parent_is_a_file(src: Path) -> None:
    one_line(convert(src, to="src/config.json/dst"), "choose another place")
    put(src.parent / "file", "x")
    one_line(convert(src, to="file/dst"), "Not a directory")
    one_line(convert(src, to="file"), "file exists and is no folder")


def test_a_destination_with_a_name_that_no_disk_takes(src: Path) -> None:
    one_line(convert(src, to="n" * 300), "File name too long")


@pytest.mark.parametrize("name", ["dst.partial", "dst.old", "dst.partial/src"])
def test_a_source_where_the_work_would_lie(src: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    shutil.move(src, source)
    before = sorted(p.name for p in source.iterdir())
    for options in ((), ("--overwrite",)):
        ran = run("convert", "--to", "marlin-nvfp4", *options, source, tmp_path / "dst")
        one_line(ran, name, "choose another")
        assert "remove" not in ran.err
    assert sorted(p.name for p in source.iterdir()) == before


def test_work_is_not_written_through_a_link(src: Path) -> None:
    (src.parent / "elsewhere").mkdir()
    (src.parent / "dst.partial").symlink_to("elsewhere")
    one_line(convert(src), "dst.partial", "link")
    assert not any((src.parent / "elsewhere").iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\0", '{"transcode": 7}'])
def test_a_spoilt_plan_of_an_earlier_run_is_one_line(src: Path, text: str) -> None:
    (src.parent / "dst.partial").mkdir()
    put(src.parent / "dst.partial" / PLAN, text)
    one_line(convert(src), "dst.partial")


def test_files_of_the_source_with_the_names_of_unfinished_work_stay_behind(src: Path) -> None:
    names = [PLAN, "config.json.unfinished", "transcode_report.json.unfinished",
             "model-00001-of-00001.safetensors.unfinished"]  # fmt: skip
    for name in names:
        put(src / name, "x")
    target = taken(src)
    assert not set(names) & {p.name for p in target.iterdir()}
    report = json.loads((target / "transcode_report.json").read_text())
    assert set(names) <= {entry["name"] for entry in report["left_out"]}


def test_folders_without_end_are_refused(src: Path) -> None:
    (src / "/".join("d" * 110)).mkdir(parents=True)
    refused(src, "folders nested more than 100 deep")


def test_links_to_folders_do_not_multiply(src: Path) -> None:
    """Two in each of thirty folders: a billion ways to the last one."""
    for i in range(30):
        (src / f"d{i}").mkdir()
        for name in ("a", "b") if i < 29 else ():
            (src / f"d{i}" / name).symlink_to(f"../d{i + 1}")
    put(src / "d29" / "x", "x")
    target = taken(src)
    assert (target / "d29" / "x").is_file()
    assert (target / "d28" / "b" / "x").is_file()
    report = json.loads((target / "transcode_report.json").read_text())
    assert "d0/a/a/" in {entry["name"] for entry in report["left_out"]}


def test_a_file_whose_name_is_no_text_is_left_out_and_named(src: Path) -> None:
    (src / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    report = json.loads((taken(src) / "transcode_report.json").read_text())
    assert [entry["name"] for entry in report["left_out"]] == ["caf\\xe9.txt"]


def test_a_source_whose_name_is_no_text(src: Path) -> None:
    source = src.with_name(os.fsdecode(b"caf\xe9"))
    src.rename(source)
    one_line(convert(source, to=os.fsdecode(b"out\xe9")), "no Unicode text")
    pack(source, source.with_name("dst"))
    assert run("inspect", source).code == 0


LIMITED = """
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop()),) * 2)
from transcode.cli import main
main()
"""


@pytest.mark.parametrize("limit", [1, 3000, 40_000])
def test_a_limit_on_the_size_of_files_stops_it_in_one_line(src: Path, limit: int) -> None:
    args = ["convert", "--to", "marlin-nvfp4", str(src), str(src.parent / "dst"), str(limit)]
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, *args], capture_output=True, text=True, check=False
    )
    one_line(Ran(ran.returncode, ran.stdout, ran.stderr), "dst.partial/", "File too large")
    assert not (src.parent / "dst").exists()
    taken(src)


@pytest.mark.parametrize("size", ["64k", "128k"])
def test_a_disk_that_becomes_full_stops_it_in_one_line(src: Path, size: str) -> None:
    """For real: a small tmpfs, and the free space overstated, as by another writer's work."""
    disk = src.parent / "disk"
    disk.mkdir()
    code = (
        "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(9**9, 0, 9**9);"
        "from transcode.cli import main; main()"
    )
    inner = (
        'mount -t tmpfs -o size="$1" none "$2" || exit 77;'
        '"$3" -c "$4" convert --to marlin-nvfp4 "$5" "$2/dst"; code=$?; ls "$2"; exit $code'
    )
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inner, "sh", size, disk, sys.executable, code, src],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    if ran.returncode == 77 or "unshare" in ran.stderr:
        pytest.skip("no private mounts here")
    one_line(Ran(ran.returncode, ran.stdout, ran.stderr), "dst.partial/", "No space left on device")
    assert ran.stdout.split() == ["dst.partial"]


@pytest.mark.parametrize("call", [0, 1, 5, 11, 29])
def test_a_full_disk_at_any_write_keeps_what_is_finished(
    src: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.pwrite, [call]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return real(fd, data, at)

    def copy_file_range(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.pwrite", pwrite)
    monkeypatch.setattr("os.copy_file_range", copy_file_range)
    ran = convert(src)
    if ran.code:
        one_line(ran, "dst.partial/", "No space left on device")
        assert not (src.parent / "dst").exists()
        monkeypatch.undo()
        taken(src)
    assert not (src.parent / "dst.partial").exists()


# Interruptions, and sources that change.

STOP = """
import os, signal, sys
from pathlib import Path
from transcode import convert, destination
how, where = sys.argv.pop(), sys.argv.pop()
def stop(*_, **__):
    os.kill(os.getpid(), getattr(signal, how))
if where == "first pass":
    convert.decide = stop
elif where == "shard":
    real = convert.write_at
    convert.write_at = lambda fd, data, at: (real(fd, data[:9], at), stop())
else:
    real = Path.rename if where.startswith("rename") else Path.unlink
    wanted = where.partition(" ")[2]
    def call(self, *rest, **more):
        if wanted in self.name:
            stop()
        return real(self, *rest, **more)
    setattr(Path, real.__name__, call)
from transcode.cli import main
main()
"""
WINDOWS = ("first pass", "shard", f"rename {PLAN}", "rename experts-", "rename config",
           "rename transcode_report", "unlink " + PLAN, "rename dst.partial")  # fmt: skip


@pytest.mark.parametrize(
    ("where", "how", "code"),
    [*((where, "SIGKILL", -signal.SIGKILL) for where in WINDOWS),
     *((where, "SIGINT", 130) for where in WINDOWS[:2])],
)  # fmt: skip
def test_a_run_stopped_anywhere_goes_on_when_it_is_asked_again(
    src: Path, where: str, how: str, code: int
) -> None:
    args = ["convert", "--to", "marlin-nvfp4", str(src), str(src.parent / "dst")]
    ran = subprocess.run(
        [sys.executable, "-c", STOP, *args, where, how], capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stderr
    if how == "SIGINT":
        assert ran.stderr == (
            "transcode: interrupted; the same command goes on where this one stopped\n"
        )
    if not (src.parent / "dst").exists():
        taken(src)
    assert run("verify", src, src.parent / "dst").code == 0
    assert sorted(p.name for p in src.parent.iterdir()) == ["dst", "src"]


def test_a_source_that_shrinks_while_it_is_read(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reader.file

    def file(self: Reader, info: TensorInfo) -> int:
        if info.file.name == SECOND:
            os.truncate(info.file, info.start)
        return real(self, info)

    monkeypatch.setattr(Reader, "file", file)
    one_line(convert(src), f"{SECOND}: ends inside", "did it change?")
    assert not (src.parent / "dst").exists()


def test_a_source_that_goes_away_while_it_is_read(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reader.file

    def file(self: Reader, info: TensorInfo) -> int:
        if info.file not in self.files:
            info.file.unlink(missing_ok=True)
        return real(self, info)

    monkeypatch.setattr(Reader, "file", file)
    refused(src, "safetensors: No such file")


def test_a_source_that_is_replaced_while_it_is_read(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file of the same size and time under the same name."""
    real = destination.copy_companions

    def meddle(*args: Any) -> list[str]:
        path = src / SECOND
        shutil.copy2(path, src.parent / "other")
        (src.parent / "other").replace(path)
        return real(*args)

    monkeypatch.setattr("transcode.convert.copy_companions", meddle)
    one_line(convert(src), f"{SECOND} changed while it was being read")
    assert not (src.parent / "dst").exists()


def test_an_error_of_the_disk_names_the_file(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", preadv)
    refused(src, ".safetensors: Input/output error")


# What `verify` reads.


@pytest.fixture(scope="module")
def pair(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built, pack(built, tmp_path_factory.mktemp("pair") / "dst")


DESTINATIONS: dict[str, tuple[str, object]] = {
    "metadata that is null": (INDEX, {"metadata": None}),
    "metadata that is a list": ("transcode.index.json", {"metadata": [1]}),
    "a map that is a list": (INDEX, {"weight_map": []}),
    "files that are lists": (INDEX, {"weight_map": {"lm_head.weight": []}}),
    "a config that is a list": ("config.json", []),
    "a quantization config that is a word": ("config.json", {"quantization_config": "transcode"}),
    "a layout that is a list": ("config.json", {"quantization_config": {"layout": []}}),
    "an unknown layout": ("config.json", {"quantization_config": {"layout": "x"}}),
    "a huge tp": (
        "config.json", {"quantization_config": {"options": {"unify": "fold", "exact": False,
                                                            "tp": 10**40}}},
    ),
    "a report that is a list": ("transcode_report.json", []),
}  # fmt: skip


@pytest.mark.parametrize("what", DESTINATIONS)
def test_verify_finds_a_destination_that_has(
    pair: tuple[Path, Path], tmp_path: Path, what: str
) -> None:
    shutil.copytree(pair[1], tmp_path / "dst")
    file, change = DESTINATIONS[what]
    value = json.loads((tmp_path / "dst" / file).read_text())
    put(tmp_path / "dst" / file, merged(value, change))
    ran = run("verify", pair[0], tmp_path / "dst")
    if ran.code != 3:
        one_line(ran)


def merged(value: Any, change: Any) -> Any:
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {k: merged(value.get(k), v) for k, v in change.items()}
    return change


def test_verify_does_not_wait_for_a_pipe(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(pair[1], tmp_path / "dst")
    os.mkfifo(tmp_path / "dst" / "x.safetensors")
    assert run("verify", pair[0], tmp_path / "dst").code == 3


@pytest.mark.parametrize("key", ["transcode_dtype", "tie_word_embeddings"])
def test_verify_tells_null_from_nothing_and_true_from_one(
    tmp_path: Path, pair: tuple[Path, Path], key: str
) -> None:
    shutil.copytree(pair[1], tmp_path / "dst")
    edit_config(tmp_path / "dst", lambda c: c | {key: 0 if key in c else None})
    ran = run("verify", pair[0], tmp_path / "dst")
    assert ran.code == 3
    assert f"config.json: {key} differs" in ran.out


@pytest.mark.parametrize(("old", "new"), [("pt", "tf"), ("marlin-nvfp4 1", "marlin-nvfp4 2")])
def test_verify_reads_the_metadata_of_shards(
    tmp_path: Path, pair: tuple[Path, Path], old: str, new: str
) -> None:
    shutil.copytree(pair[1], tmp_path / "dst")
    shard = next((tmp_path / "dst").glob("experts-*"))
    data = shard.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode(), 1)
    shard.write_bytes(data)
    ran = run("verify", pair[0], tmp_path / "dst")
    assert ran.code == 3
    assert f"{shard.name}: its metadata is" in ran.out
