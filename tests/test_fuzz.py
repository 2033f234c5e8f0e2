"""Damaged checkpoints: one line and exit 1 or 4, or a right answer; never anything else.

Bytes are flipped, cut and doubled, JSON values exchanged, tensors renamed, retyped and dropped. A
right answer is one that `verify` proves; of packed weights, an independent decoder reads it as the
source too.
`scripts/soak` runs ten times the count with new draws each time.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tests import packed
from tests.build import GRID, Spec, build
from tests.convert import Ran, pack, run
from tests.producers import KINDS
from transcode.errors import CheckpointError
from transcode.header import read_header

SOAK = settings.get_current_profile_name() == "soak"
SMALL = Spec(hidden=64, intermediate=64, experts=2, layers=1, heads=2, kv_heads=1, shards=2)
SPECS = {
    "modelopt": replace(SMALL, gate_up_ratio=2.0, biases=True, kv_scales=True),
    "ct": replace(SMALL, dialect="compressed-tensors", qkv_ratio=1.5),
    "mixed": replace(
        SMALL, model_type="deepseek_v3", attention="fp8", shared_experts=1,
        mtp_layers=1, tiny_scales=True,
    ),
    "dense": replace(
        SMALL, experts=0, model_type="llama", attention="fp8_block", gate_up_ratio=3.0
    ),
}  # fmt: skip
BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BOOL": 8, "BF16": 16, "F16": 16, "I16": 16,
        "F32": 32, "I32": 32, "U32": 32, "F64": 64, "I64": 64}  # fmt: skip
LEAVES = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale",
          "input_scale", "input_global_scale", "bias", "scale", "weight_scale_inv")  # fmt: skip


def fuzz(count: int) -> settings:
    """So many examples, the same each time; in a soak ten times as many, and others each time."""
    return settings(
        max_examples=count * 10 if SOAK else count, derandomize=not SOAK, deadline=None,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


class Hang(BaseException):
    """An example took too long; no `except Exception` takes it for something else."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(_: int, frame: FrameType | None) -> None:
        raise Hang(frame)

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


# What can happen to a file.

NUMBERS = (-1, 0, 1, 2, 7, 16, 32, 63, 64, 128, 1 << 31, 1 << 53, (1 << 62) - 1, 1 << 63, 10**30)
WORDS = ("", "U8", "F32", "NVFP4", "weight", "model.safetensors", "../x.safetensors", "\ud800", "/",
         "\0", "experts.1.", "nvfp4-pack-quantized", "gptq", "float16", "re:(", "none")  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS)
    | st.floats() | st.text(max_size=4)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=4,
)
PLACE = st.integers(0, 1 << 20)


@dataclass(frozen=True)
class Bytes:
    """Flip bits of, cut, double or insert bytes at a place (modulo the length)."""

    how: str
    at: int
    count: int

    def apply(self, data: bytes) -> bytes:
        at = self.at % max(len(data), 1)
        if self.how == "flip":
            return data[:at] + bytes(b ^ self.count for b in data[at : at + 1]) + data[at + 1 :]
        if self.how == "cut":
            return data[:at] + data[at + self.count :]
        if self.how == "end":
            return data[:at]
        return data[:at] + data[at : at + self.count] + data[at:]  # double


@dataclass(frozen=True)
class Value:
    """Exchange, remove, double or rename the value at a place of a JSON text (counted in depth)."""

    how: str
    at: int
    value: Any

    def apply(self, data: bytes) -> bytes:
        root = json.loads(data)
        places = [*_places(root)]
        holder, key = places[self.at % len(places)]
        if self.how == "exchange" or isinstance(holder, list):
            holder[key] = self.value
        elif self.how == "rename":
            holder[str(self.value)] = holder.pop(key)
        elif self.how == "nest":
            holder[key] = {key: holder[key]}
        else:
            del holder[key]
        return json.dumps(root).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(inner):
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child)


@dataclass(frozen=True)
class Entry:
    """Change one tensor of a sound shard, so that the shard stays sound."""

    how: str
    at: int
    value: Any

    def apply(self, data: bytes) -> bytes:
        tensors = [*_tensors(data)]
        name, dtype, shape, raw = tensors.pop(self.at % len(tensors))
        module = name.rpartition(".")[0]
        if self.how == "leaf":
            name = f"{module}.{LEAVES[self.at % len(LEAVES)]}"
        elif self.how == "number":
            old = [p for p in name.split(".") if p.isdigit()]
            name = name.replace(f".{old[-1]}.", f".{self.value}.") if old else name
        elif self.how == "dtype":
            fitting = [d for d in BITS if len(raw) * 8 % BITS[d] == 0]
            dtype = fitting[self.at % len(fitting)]
            shape = [*shape[:-1], -1] if shape else [-1]
            rest = prod(shape[:-1]) * BITS[dtype] // 8
            shape = [*shape[:-1], len(raw) // rest] if rest and len(raw) % rest == 0 else [0]
            raw = raw if shape != [0] else b""
        elif self.how == "shape":
            n = len(raw) * 8 // BITS[dtype]
            shape = [[n], [1, n], [n, 1], [*shape, 1], [1, *shape], shape[::-1], [2, n // 2], []][
                self.at % 8
            ]
            raw = raw[: prod(shape) * BITS[dtype] // 8]
        elif self.how == "slice" and shape:
            shape = [max(shape[0] - 1, 0), *shape[1:]]
            raw = raw[: prod(shape) * BITS[dtype] // 8]
        elif self.how == "double":
            tensors.append((f"{name}{self.value}", dtype, shape, raw))
        elif self.how == "number of bytes":
            raw = bytes([self.at % 256]) * len(raw)
        elif self.how == "float":
            special = torch.tensor([self.value if isinstance(self.value, int | float) else 0.0])
            raw = special.float().view(torch.uint8).numpy().tobytes() if len(raw) == 4 else raw
        if self.how != "drop":
            tensors.append((name, dtype, shape, raw))
        return _shard(tensors, _split(data)[0].get("__metadata__", {}))


Tensors = list[tuple[str, str, list[int], bytes]]


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    entries: dict[str, Any] = json.loads(data[8:end])
    return entries, data[end:]


def _tensors(data: bytes) -> Iterator[tuple[str, str, list[int], bytes]]:
    entries, body = _split(data)
    for name, e in sorted(entries.items()):
        if name != "__metadata__":
            yield name, e["dtype"], e["shape"], body[slice(*e["data_offsets"])]


def _shard(tensors: Tensors, metadata: Any) -> bytes:
    entries, at = dict[str, Any](), 0
    for name, dtype, shape, raw in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    kept = b"".join(raw for _, _, _, raw in tensors)
    return _framed(json.dumps(entries | {"__metadata__": metadata}).encode(), kept)


def _framed(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


Damage = Bytes | Value | Entry
BYTES = st.builds(
    Bytes, st.sampled_from(["flip", "flip", "flip", "cut", "end", "double"]), PLACE,
    st.integers(1, 255),
)  # fmt: skip
JSONS = st.builds(
    Value, st.sampled_from(["exchange", "exchange", "rename", "remove", "nest"]), PLACE, VALUES
)
ENTRIES = st.builds(
    Entry,
    st.sampled_from(["leaf", "number", "dtype", "shape", "slice", "double", "number of bytes",
                     "float", "drop"]),
    PLACE,
    st.sampled_from([0, 1, 2, 7, 99, -1, 0.0, -0.0, 1e-44, 1e30, float("nan"), float("inf")]),
)  # fmt: skip
FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "shard", "shard")


def damage(folder: Path, file: str, part: str, hurt: Damage) -> None:
    """Apply it to a file; of a shard, to its header, its data or one of its small tensors."""
    path = folder / file
    if file == "shard":
        shards = sorted(folder.glob("*.safetensors"))
        path = shards[hurt.at % len(shards)]
    if not path.exists():
        return
    data = path.read_bytes()
    try:
        path.write_bytes(_hurt(data, part, hurt, file == "shard"))
    except (ValueError, RecursionError, IndexError, KeyError, TypeError, UnicodeError):
        return  # what an earlier damage has left is no JSON


def _hurt(data: bytes, part: str, hurt: Damage, shard: bool) -> bytes:
    if not shard:
        return data if isinstance(hurt, Entry) else hurt.apply(data)
    if isinstance(hurt, Entry) or part == "file":
        return data if isinstance(hurt, Value) else hurt.apply(data)
    header, body = data[8:], b""
    end = int.from_bytes(data[:8], "little")
    header, body = header[:end], header[end:]
    if isinstance(hurt, Value) or part == "header":
        return _framed(hurt.apply(header), body)
    small = [e["data_offsets"] for e in json.loads(header).values() if "data_offsets" in e]
    small = [o for o in small if 0 < o[1] - o[0] <= 256]
    if part == "data" or not small:
        return data[: 8 + end] + hurt.apply(body)
    begin, end_ = small[hurt.at % len(small)]
    return data[: 8 + end] + body[:begin] + hurt.apply(body[begin:end_]) + body[end_:]


DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(FILES), st.sampled_from(["header", "data", "small", "file"]),
        BYTES | JSONS | ENTRIES,
    ),
    min_size=1, max_size=3,
)  # fmt: skip


# What must hold.


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`NAME/src` and `NAME/dst`, both sound."""
    found = dict[str, Path]()
    for name, spec in SPECS.items():
        found[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        build(found[name] / "src", spec)
        pack(found[name] / "src", found[name] / "dst")
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def quiet(ran: Ran, *codes: int) -> int:
    """One of the exit codes, and one line for a failure; notes of a success are lines too."""
    assert ran.code in codes, (ran.code, ran.err)
    lines = ran.err.splitlines()
    assert all(line.startswith("transcode: ") and line.isprintable() for line in lines), ran.err
    assert len(lines) == 1 or ran.code in (0, 3), ran.err
    return ran.code


def survives(src: Path) -> int:
    """Run everything on a damaged folder; the exit code of `convert`."""
    before, beside = content(src), {p.name for p in src.parent.iterdir()}
    dst = src.with_name("dst")
    seen = quiet(run("inspect", src), 0, 1)
    checked = quiet(run("check", src), 0, 1, 3)
    args = ("convert", "--to", "marlin-nvfp4", src, dst)
    code = quiet(run(*args), 0, 1, 4)
    event(f"exit {code}")
    assert seen == 0 or (code == 1 and checked != 0)
    new = {p.name for p in src.parent.iterdir()} - beside
    if code == 0:
        assert new == {"dst"}
        assert quiet(run("verify", src, dst), 0) == 0
        means_the_same(src, dst)
    else:
        assert new <= {"dst.partial"}
        assert quiet(run(*args), 0, 1, 4) == code
    assert content(src) == before
    return code


def shards_of(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor, read without transcode and without safetensors."""
    left_out: set[str] = set()
    return {
        name: (dtype, shape, raw)
        for path in sorted(folder.glob("*.safetensors"))
        if path.name not in left_out
        for name, dtype, shape, raw in _tensors(path.read_bytes())
    }


def tensor(entry: tuple[str, list[int], bytes], dtype: torch.dtype) -> Tensor:
    flat = torch.frombuffer(bytearray(entry[2]), dtype=torch.uint8).view(dtype)
    return flat.reshape(entry[1])


@dataclass(frozen=True)
class Meaning:
    """A source matrix: signed E2M1 values `[N, K]`, scales `[N, K/16]`, and the factor."""

    values: Tensor
    scales: Tensor
    factor: Tensor

    def weight(self, factor: Tensor, lost: Tensor) -> Tensor:
        scale = torch.where(lost, 0, self.scales) * factor
        return self.values * scale.repeat_interleave(16, 1)


def meaning(source: dict[str, tuple[str, list[int], bytes]], module: str) -> Meaning:
    at = f"{module}." if module else ""
    divisor = f"{at}weight_packed" in source
    codes = tensor(source[at + ("weight_packed" if divisor else "weight")], torch.uint8)
    values = GRID[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    scales = tensor(source[f"{at}weight_scale"], torch.float8_e4m3fn).float().nan_to_num(0)
    leaf = "weight_global_scale" if divisor else "weight_scale_2"
    stored = tensor(source[at + leaf], torch.float32).reshape(())
    factor = 1 / stored if divisor else stored
    return Meaning(values, scales if factor > 0 else torch.zeros_like(scales), factor.abs())


def means_the_same(src: Path, dst: Path) -> None:
    """Every packed matrix by its decoded values, every other tensor by its bytes."""
    report = json.loads((dst / "transcode_report.json").read_text())
    left_out = {entry["name"] for entry in report["left_out"]}
    source = dict[str, tuple[str, list[int], bytes]]()
    for path in sorted(src.glob("*.safetensors")):
        if path.name not in left_out:
            source |= {n: (d, s, raw) for n, d, s, raw in _tensors(path.read_bytes())}
    target, found = shards_of(dst), packed.weights(dst)
    known = {m: meaning(source, m) for m in found}
    flushed = {
        f["module"]: torch.frombuffer(bytearray(b64decode(f["at"])), dtype=torch.uint32).long()
        for stack in report["stacks"]
        for f in stack["flushed"]["scales"]
    }
    factors, folded, rounded = expected(report, known)
    for module, weight in found.items():
        m = known[module]
        lost = torch.zeros(m.scales.numel(), dtype=torch.bool)
        lost[flushed.get(module, torch.empty(0, dtype=torch.long))] = True
        lost = lost.reshape(m.scales.shape)
        factor = (factors[module].double() * folded.get(module, 1.0)).float()
        want = m.weight(factor, lost)
        off = (weight - want).abs()
        if module in rounded:  # to nearest E4M3: 1/17 of a normal scale, 2^-10 below
            largest = factors[module].double() / rounded[module]
            step = torch.maximum(m.scales * rounded[module] / 17, torch.tensor(2.0**-10)) * largest
            assert (off <= 1.001 * m.values.abs() * step.repeat_interleave(16, 1)).all(), module
        else:
            assert (off <= 3.2e-7 * want.abs()).all(), module
    consumed = {f"{m}.{leaf}".lstrip(".") for m in found for leaf in LEAVES[:8]}
    for name, entry in source.items():
        if name not in consumed and name not in report["scaled"]:
            assert target[name] == entry, name


def expected(
    report: dict[str, Any], known: dict[str, Meaning]
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """By module: the factor; what a fold multiplies it with; by what a rescale divides scales."""
    factors = {name: m.factor for name, m in known.items()}
    folded, rounded = dict[str, float](), dict[str, float]()
    for stack in report["stacks"]:
        parent = stack["name"].rpartition(".")[0]
        for decision in stack["unified"]:
            at = f"{parent}.{decision['group']}" if stack["experts"] else parent
            members = [f"{at}.{leaf}".lstrip(".") for leaf in stack["members"]]
            live = {m: float(factors[m]) for m in members if factors[m] > 0}
            if decision["how"] == "rescale":
                rounded |= {m: g / max(live.values()) for m, g in live.items()}
                rounded = {m: r for m, r in rounded.items() if r != 1}
            else:
                gate, up = live
                down = {"up_proj": "down_proj", "w3": "w2"}[up.rpartition(".")[2]]
                folded[f"{at}.{down}".lstrip(".")] = live[up] / live[gate]
                folded[up] = live[gate] / live[up]
    return factors, folded, rounded


@contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """A folder `src` of its own, to be damaged."""
    with tempfile.TemporaryDirectory() as root, within(60):
        shutil.copytree(folder, Path(root, "src"))
        yield Path(root, "src")


@fuzz(70)
@given(name=st.sampled_from(sorted(SPECS)), hurts=DAMAGES)
def test_a_damaged_source_is_refused_in_one_line_or_packed_rightly(
    pairs: dict[str, Path], name: str, hurts: list[tuple[str, str, Damage]]
) -> None:
    with copy_of(pairs[name] / "src") as src:
        for file, part, hurt in hurts:
            damage(src, file, part, hurt)
        survives(src)


@fuzz(40)
@given(name=st.sampled_from(sorted(SPECS)), hurts=st.lists(ENTRIES, min_size=1, max_size=4))
def test_a_sound_source_of_odd_tensors_is_refused_in_one_line_or_packed_rightly(
    pairs: dict[str, Path], name: str, hurts: list[Entry]
) -> None:
    with copy_of(pairs[name] / "src") as src:
        (src / "model.safetensors.index.json").unlink()  # it would tell on most of them
        for hurt in hurts:
            damage(src, "shard", "", hurt)
        survives(src)


# Other forms.

FORMS = ("modelopt", "compressed-tensors", "canonical", "bf16")
OPTIONS = st.lists(
    st.sampled_from([
        ("--unify", "fold"), ("--unify", "rescale"), ("--fill-input-scale",), ("--drop-kv-scales",),
        ("--exact",), ("--fused",),
    ]), max_size=1,
)  # fmt: skip
SOURCES: dict[str, Callable[[Path], object]] = {
    **{name: partial(build, spec=spec) for name, spec in SPECS.items()},
    "llama4": KINDS["modelopt-nvfp4-llama4"],
    "gptoss": KINDS["gptoss-mxfp4"],
    "own": lambda path: own_form(path, SPECS["ct"]),
    "own fp8": lambda path: own_form(path, replace(SPECS["mixed"], gate_up="fp8", down="fp8")),
}


def own_form(path: Path, spec: Spec) -> None:
    """A source in our canonical form."""
    build(path.with_name("first"), spec)
    made = run("convert", "--to", "canonical", path.with_name("first"), path)
    assert made.code == 0, made.err


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound folder of every name."""
    found = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) / "src" for name in SOURCES}
    for name, path in found.items():
        SOURCES[name](path)
    return found


def rewrites(src: Path, form: str, options: list[tuple[str, ...]]) -> int:
    """Rewrite a damaged folder; the exit code. What exits with 0 is proved from disk."""
    before, beside = content(src), {p.name for p in src.parent.iterdir()}
    dst, chosen = src.with_name("dst"), [word for option in options for word in option]
    checked = quiet(run("check", src), 0, 1, 3)
    code = quiet(run("convert", "--to", form, *chosen, src, dst), 0, 1, 2, 4)
    event(f"{form}: exit {code}")
    assert checked != 1 or code in (1, 2)
    new = {p.name for p in src.parent.iterdir()} - beside
    assert new == {"dst"} if code == 0 else new <= {"dst.partial"}
    assert content(src) == before
    if code == 0:
        assert quiet(run("verify", src, dst), 0) == 0
        quiet(run("inspect", dst), 0)
        quiet(run("check", dst), 0, 3)
        if form in ("modelopt", "canonical") and "--unify" not in chosen:
            stand_for_the_same(src, dst)
    return code


def stand_for_the_same(src: Path, dst: Path) -> None:
    """Both decoded: every tensor's bytes, where the source can be decoded at all.

    Input scales have no place there, but stay where the source's form of an encoding has none.
    """
    found = list[dict[str, tuple[str, list[int], bytes]]]()
    for folder in (src, dst):
        plain = folder.with_name(f"{folder.name}-bf16")
        ran = run("convert", "--to", "bf16", "--drop-kv-scales", folder, plain)
        if quiet(ran, 0, 1 if folder == src else 0):
            return
        found.append({n: t for n, t in shards_of(plain).items() if ".input_" not in n})
    assert found[0] == found[1]


@fuzz(50)
@given(
    name=st.sampled_from(sorted(SOURCES)), form=st.sampled_from(FORMS), options=OPTIONS,
    hurts=DAMAGES | st.lists(ENTRIES.map(lambda e: ("shard", "", e)), max_size=2),
)  # fmt: skip
def test_a_damaged_source_is_refused_in_one_line_or_rewritten_rightly(
    sources: dict[str, Path],
    name: str,
    form: str,
    options: list[tuple[str, ...]],
    hurts: list[tuple[str, str, Damage]],
) -> None:
    with copy_of(sources[name]) as src:
        for file, part, hurt in hurts:
            damage(src, file, part, hurt)
        rewrites(src, form, options)


TARGET = ("config.json", "transcode.index.json", "model.safetensors.index.json", "tokenizer.json",
          "shard", "shard", "shard")  # fmt: skip


@fuzz(120)
@given(
    name=st.sampled_from(sorted(SPECS)), file=st.sampled_from(TARGET),
    part=st.sampled_from(["header", "data", "small", "file"]), hurt=BYTES | JSONS | ENTRIES,
)  # fmt: skip
def test_a_damaged_destination_is_found(
    pairs: dict[str, Path], name: str, file: str, part: str, hurt: Damage
) -> None:
    with copy_of(pairs[name] / "dst") as dst:
        damage(dst, file, part, hurt)
        same = {k: told(k, v) for k, v in content(dst).items()} == {
            k: told(k, v) for k, v in content(pairs[name] / "dst").items()
        }
        ran = run("verify", pairs[name] / "src", dst)
        event(f"exit {quiet(ran, *([0] if same else [1, 3]))}")


def told(name: str, data: bytes) -> Any:
    """What a file says. These say nothing: how JSON is written (blanks, escapes, order, a key that
    comes again), the order of tensors in a file, and what an entry of a header holds beside its
    three members."""
    try:
        if name.endswith(".safetensors"):
            entries, body = _split(data)
            tensors = [*_tensors(data)]
            if sum(len(raw) for _, _, _, raw in tensors) != len(body):
                return data
            return entries.get("__metadata__"), tensors
        value = json.loads(data)
        if name.endswith(".index.json"):
            value = [value["weight_map"], value["metadata"]]
        return json.dumps(value, sort_keys=True) if name != "tokenizer.json" else data
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return data


# Headers by themselves, against safetensors' own reader.

SIZES = st.lists(st.integers(0, 4) | st.sampled_from(NUMBERS), max_size=3)
HEADER = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__", "\ud800", ""]) | st.text(max_size=3),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*BITS, "F4", "U7", "F8_E5M2", "C64"]),
            "shape": SIZES,
            "data_offsets": st.lists(st.integers(0, 12) | st.sampled_from(NUMBERS), max_size=3),
        }
    )
    | VALUES,
    max_size=3,
)


@fuzz(400)
@given(header=HEADER, fit=st.booleans(), hurts=st.lists(BYTES, max_size=1), size=st.integers(0, 16))
@example(header={}, fit=True, hurts=[], size=0)
def test_a_header_that_is_taken_is_taken_by_safetensors_too(
    header: dict[str, Any], fit: bool, hurts: list[Bytes], size: int
) -> None:
    at = 0
    for entry in header.values() if fit else ():  # the offsets that the shapes ask for
        if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
            n = entry["shape"] = [n % 5 for n in entry["shape"] if isinstance(n, int)]
            end = at + prod(n) * BITS.get(str(entry.get("dtype")), 8) // 8
            entry["data_offsets"] = [at, end]
            at = end
    data = _framed(json.dumps(header).encode(), b"x" * (at if fit else size))
    for hurt in hurts:
        data = hurt.apply(data)
    with tempfile.TemporaryDirectory() as root, within(60):
        path = Path(root, "x.safetensors")
        path.write_bytes(data)
        try:
            ours = {n: [*t.shape] for n, t in read_header(path).tensors.items()}
        except CheckpointError:
            return
        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                theirs = {n: file.get_slice(n).get_shape() for n in names}
        except SafetensorError as error:
            raise AssertionError(f"safetensors refuses it: {error}") from None
        assert ours == theirs
