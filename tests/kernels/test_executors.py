"""The executors against the definition, `Tiling.apply` and `undo`, and against compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from transcode.errors import LayoutError
from transcode.kernels import _execute, _gather, _tiles
from transcode.kernels._digits import orders, plan
from transcode.quant import unpack_nibbles
from transcode.tiling import Tiling

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "marlin_repack.safetensors")
MARLIN = {
    "repack4.a80": "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g",
    "repack8.a80": "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w h e g",
    "repack4.a81": "nt w:4 c:8, kt g:2 q:4 e:4 -> kt, nt c q w e g",
    "repack8.a81": "nt w:4 c:8, kt g:2 q:4 e:4 -> kt, nt c q w g e",
}
TILINGS = [  # every order of a kernel first; what is left of an axis is odd where it can be
    *((pattern, (192, 160)) for pattern in MARLIN.values()),
    ("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt nt c q w e h g", (64, 16)),
    ("nt a:2 b:2 d:2 i:8, g -> g nt i a d b", (192, 10)),
    ("nt a:4 i:4 b:2 -> nt i a b", (160,)),
    ("rt a:4 r:32, ct c:4 -> rt ct r a c", (384, 20)),
    ("h:2 b m:8, k -> b h m k", (48, 90)),
    ("h:2 B j:4 t:2 m:8, kp b:4 -> kp B t h m j b", (384, 12)),
    ("B a:4 r:32, kp b:4 -> kp B r a b", (384, 12)),
    ("h:2 b u:8 p:2, k -> b p h u k", (96, 30)),
    ("b x:8 y:4, k -> b y x k", (96, 14)),
    ("m, kb b:128 -> kb m b", (7, 384)),
    ("E, nt a:4 i:4 b:2 -> E, nt i a b", (3, 96)),  # experts are one more axis
    ("m, k -> k, m", (128, 64)),
    ("m, k -> m, k", (3, 8)),  # as it is
    ("m a:2, k b:6 -> k a, m b", (8, 24)),  # six is no power of two
]
ODD = [  # and those whose rows can be odd, which nibbles cannot be
    ("nt a:2 b:2 d:2 i:8, g -> g nt i a d b", (192, 7)),
    ("h:2 b m:8, k -> b h m k", (48, 45)),
    ("h:2 b u:8 p:2, k -> b p h u k", (96, 45)),
    ("b x:8 y:4, k -> b y x k", (96, 7)),
    ("m, k:5 j:3 -> j, k m", (7, 15)),
    ("m, k -> k, m", (1, 1)),
]
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


@pytest.fixture(params=["_tiles", "_gather"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """The device of each executor in turn, which is made to run there."""
    module = {"_tiles": _tiles, "_gather": _gather}[request.param]
    monkeypatch.setattr(_execute, "executor", lambda device: module)
    return "cpu" if module is _tiles else device


def draw(shape: tuple[int, ...], bits: int) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape) + bits)
    octets = (*shape[:-1], shape[-1] * bits // 8)
    raw = torch.randint(256, octets, dtype=torch.uint8, generator=random)
    return raw if bits == 4 else raw.view(INTEGERS[bits])


def reference(tiling: Tiling, source: Tensor, bits: int) -> Tensor:
    if bits != 4:
        return tiling.apply(source)
    codes = tiling.apply(unpack_nibbles(source))
    eight = codes.reshape(*codes.shape[:-1], -1, 8).to(torch.int32)
    shift = 4 * torch.arange(8, dtype=torch.int32)
    return (eight << shift).sum(-1, dtype=torch.int32)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize(("pattern", "shape"), TILINGS)
def test_every_tiling_equals_its_definition(
    pattern: str, shape: tuple[int, ...], bits: int, place: str
) -> None:
    tiling, source = Tiling(pattern), draw(shape, bits)
    stored = _execute.apply(tiling, source.to(place), bits)
    want = reference(tiling, source, bits)
    assert stored.dtype == want.dtype
    assert torch.equal(stored.cpu(), want)
    assert torch.equal(_execute.undo(tiling, stored, shape, bits).cpu(), source)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize(("pattern", "shape"), ODD)
def test_odd_sizes_equal_the_definition(
    pattern: str, shape: tuple[int, ...], bits: int, place: str
) -> None:
    test_every_tiling_equals_its_definition(pattern, shape, bits, place)


@pytest.mark.parametrize("size", ["64x128", "128x128", "192x320"])
@pytest.mark.parametrize("kind", MARLIN)
def test_words_equal_the_compiled_repack(kind: str, size: str, place: str) -> None:
    name, activations = kind.split(".")
    source, words = (GOLDEN[f"{name}.{size}.{activations}.{side}"] for side in ("in", "out"))
    tiling, bits = Tiling(MARLIN[kind]), int(name.removeprefix("repack"))
    stored = _execute.apply(tiling, source.to(place), bits)
    assert torch.equal(stored.view(torch.int32).cpu().reshape(words.shape), words)
    n, k = map(int, size.split("x"))
    assert torch.equal(_execute.undo(tiling, stored, (n, k), bits).cpu(), source)


@pytest.mark.parametrize(("pattern", "shape"), [*TILINGS, *ODD])
def test_a_table_replaces_every_byte(pattern: str, shape: tuple[int, ...], place: str) -> None:
    tiling, source = Tiling(pattern), draw(shape, 8)
    table = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    stored = _execute.apply(tiling, source.to(place), 8, table.to(place))
    assert torch.equal(stored.cpu(), tiling.apply(table[source.int()]))
    inverse = table.argsort().to(torch.uint8).to(place)
    assert torch.equal(_execute.undo(tiling, stored, source.shape, 8, inverse).cpu(), source)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_the_dtype_is_kept_and_nan_too(dtype: torch.dtype, place: str) -> None:
    tiling, source = Tiling("nt a:4 i:4 b:2 -> nt i a b"), draw((96,), dtype.itemsize * 8)
    integers = source.dtype
    stored = _execute.apply(tiling, source.view(dtype).to(place), dtype.itemsize * 8)
    assert stored.dtype == dtype
    assert torch.equal(stored.view(integers).cpu(), tiling.apply(source))


def test_views_with_gaps_or_off_the_words_are_read_right(place: str) -> None:
    tiling, source = Tiling("rt a:4 r:32, ct c:4 -> rt ct r a c"), draw((4, 128, 9), 8)
    there = source.to(place)
    cuts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[2, :, 1:],
        lambda t: t.view(-1)[3:1027].view(128, 8),
    ]
    for cut in cuts:
        assert torch.equal(_execute.apply(tiling, cut(there), 8).cpu(), tiling.apply(cut(source)))


def test_many_tiles_are_shared_among_threads(place: str) -> None:
    shape = (1024, 2048)
    for kind in ("repack4.a80", "repack8.a81"):
        tiling, bits = Tiling(MARLIN[kind]), int(kind[6])
        source = draw(shape, bits)
        stored = _execute.apply(tiling, source.to(place), bits)
        assert torch.equal(stored.cpu(), reference(tiling, source, bits))
        assert torch.equal(_execute.undo(tiling, stored, shape, bits).cpu(), source)


def test_tiles_with_short_runs_follow_on_one_another() -> None:
    source, stored = orders(Tiling("nt a:2 b:2 d:2 i:8, g -> g nt i a d b"), (1 << 13, 180))
    _, read, _ = plan(source, stored, 8, 32, 12).outer[-1]
    _, _, written = plan(stored, source, 8, 32, 12).outer[-1]
    assert (read, written) == (1, 1)


def test_nothing_is_moved_for_an_empty_tensor(place: str) -> None:
    tiling = Tiling(MARLIN["repack4.a80"])
    empty = torch.empty(0, 32, dtype=torch.uint8, device=place)
    stored = _execute.apply(tiling, empty, 4)
    assert stored.shape == (4, 0)
    assert _execute.undo(tiling, stored, (0, 64), 4).shape == (0, 32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants 40 GB of a GPU")
@pytest.mark.parametrize("pattern", ["m, k -> k, m", "h:2 b m:8, k -> b h m k"])
def test_words_beyond_32_bits_are_found(pattern: str) -> None:
    tiling, shape = Tiling(pattern), (1 << 16, (1 << 15) + 32)
    source = torch.randint(2**31, shape, dtype=torch.int32, device="cuda")
    stored = _execute.apply(tiling, source, 32)
    assert torch.equal(stored, tiling.apply(source))
    assert torch.equal(_execute.undo(tiling, stored, shape, 32), source)


def test_each_device_has_its_executor() -> None:
    assert _execute.executor(torch.device("cpu")) is _tiles
    assert _execute.executor(torch.device("cuda", 1)) is _gather
    with pytest.raises(LayoutError, match="on meta"):
        _execute.executor(torch.device("meta"))


@pytest.mark.parametrize(
    ("pattern", "source", "bits", "message"),
    [
        ("m, k -> k, m", torch.zeros(8, 8, dtype=torch.uint8), 2, "2 bits, wanted 4, 8"),
        ("m, k -> k, m", torch.zeros(8, 8, dtype=torch.int32), 4, "int32 cannot hold"),
        ("m, k -> k, m", torch.zeros(8, 8, dtype=torch.int32), 8, "int32 cannot hold"),
        ("m, k -> k, m", torch.zeros(4, 8, dtype=torch.uint8), 4, "4 nibbles, wanted a multiple"),
        ("m a:5, k -> k m a", torch.zeros(5, 8, dtype=torch.uint8), 4, "even factor last"),
        ("m a:5, k -> k m a", torch.zeros(6, 8, dtype=torch.uint8), 8, "6 is no multiple of 5"),
    ],
)
def test_what_does_not_fit_is_an_error(
    pattern: str, source: Tensor, bits: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        _execute.apply(Tiling(pattern), source, bits)


def test_a_wrong_table_or_shape_is_an_error() -> None:
    tiling, source = Tiling("m, k -> k, m"), torch.zeros(8, 8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"table of \(255,\) torch.uint8"):
        _execute.apply(tiling, source, 8, torch.zeros(255, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="for 4 bits"):
        _execute.apply(tiling, source, 4, torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(LayoutError, match=r"\(8, 8\) stored, wanted 128 of 8 bits"):
        _execute.undo(tiling, source, (8, 16), 8)
