"""Lines found from words and from functions that are only called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts import infer_layout as script
from transcode.kernels import _execute, _marlin_scales
from transcode.tiling import Tiling

GOLDEN = Path(__file__).parent / "golden/marlin_repack.safetensors"
ORDERS = {
    "repack4.*.a80": "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g",
    "repack8.*.a80": "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w h e g",
    "repack4.*.a81": "nt w:4 c:8, kt g:2 q:4 e:4 -> kt nt c q w e g",
    "repack8.*.a81": "nt w:4 c:8, kt g:2 q:4 e:4 -> kt nt c q w g e",
}
OTHERS = {
    "marlin scales": ("nt a:2 b:2 d:2 i:8, g -> g, nt i a d b", 8),
    "cutlass scales": ("rt a:4 r:32, ct c:4 -> rt ct r a c", 8),
    "megamoe L1 rows": ("h:2 b m:8, k -> b h m, k", 4),
    "megamoe L1 scales": ("h:2 B j:4 t:2 m:8, kp b:4 -> kp B t h m j b", 8),
    "megamoe L2 scales": ("B a:4 r:32, kp b:4 -> kp B r a b", 8),
    "megamoe L2 words": ("B a:4 r:32, kp -> kp, B r a", 32),
    "megamoe rows g16": ("h:2 b u:8 p:2, k -> b p h u, k", 8),
    "trtllm rows": ("b x:8 y:4, k -> b y x, k", 4),
    "block-major K": ("m, kb b:128 -> kb, m, b", 16),
    "as it was": ("n, k -> n, k", 8),
    "transposed": ("n, k -> k, n", 32),
}
SHAPES = [(384, 256), (128, 384)]


def function(line: str, bits: int) -> script.Pack:
    return lambda source: _execute.apply(Tiling(line), source, bits)


def found(pack: script.Pack, bits: int, *shapes: tuple[int, ...]) -> str:
    """As the command finds it, with the check."""
    dtype = script.INTS[bits]
    cases = [script.asked(pack, shape, bits, dtype, (0, 1)) for shape in shapes]
    line = script.infer(cases)
    said = list(script.check(line, pack, shapes, bits, dtype))
    assert all(word.startswith("equal: ") for word in said)
    assert len(said) == len(shapes) + 3
    return line


def same(a: str, b: str, *shape: int) -> bool:
    """Whether two lines store the same, in the same shape."""
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    return torch.equal(Tiling(a).apply(index), Tiling(b).apply(index))


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(script.main, words)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ORDERS)
def test_every_marlin_order_is_read_from_the_words_of_the_compiled_repack(name: str) -> None:
    code, said = run(f"{GOLDEN}:{name}", "--bits", name[6])
    assert code == 0
    assert same(said.strip(), ORDERS[name], 320, 960)
    assert said.count(":") == ORDERS[name].count(":") - (name == "repack8.*.a80")


@pytest.mark.parametrize("name", ORDERS)
def test_every_marlin_order_is_found_by_asking(name: str) -> None:
    bits = int(name[6])
    line = found(function(ORDERS[name], bits), bits, (192, 320), (320, 96))
    assert same(line, ORDERS[name], 320, 960)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_order_is_found_by_asking(name: str) -> None:
    line, bits = OTHERS[name]
    assert same(found(function(line, bits), bits, *SHAPES), line, 640, 1152)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_an_order_of_a_vector_is_found(bits: int) -> None:
    line = "nt a:4 i:4 b:2 -> nt i a b"
    assert same(found(function(line, bits), bits, (160,), (96,)), line, 224)


def test_a_factor_without_a_size_may_be_any_of_its_axis() -> None:
    line = "a:3 b c:5, d:2 e -> c e b, d a"
    assert same(found(function(line, 8), 8, (45, 14), (60, 22)), line, 105, 26)


def test_shapes_are_parted_where_the_function_parts_them() -> None:
    code, said = run(
        "transcode.kernels.marlin:NVFP4.codes.pack", "--bits", "4", "--shapes", "192x320,128x48"
    )
    assert code == 0
    assert " -> k, n " in said
    assert said.count("equal: ") == 5


def test_an_axis_that_only_happens_to_end_with_a_factor_is_not_parted() -> None:
    """Tiles of 32 columns in rows of 16: with two tiles of rows, a row ends with a factor."""
    order = ORDERS["repack4.*.a81"]

    def pack(codes: Tensor) -> Tensor:
        return function(order, 4)(codes).view(codes.shape[1] // 8, -1)

    line = found(pack, 4, (64, 960), (96, 64))
    assert same(line, order, 320, 960)


def test_values_may_go_through_a_table(tmp_path: Path) -> None:
    (tmp_path / "packer.py").write_text(
        "from transcode.kernels import marlin\n"
        "def pack(scales): return marlin.NVFP4.scales.pack(scales, 1.0)\n"
    )
    ask = (f"{tmp_path}/packer.py:pack", "--bits", "8", "--dtype", "float8_e4m3fn")
    code, said = run(*ask, "--shapes", "384x20,128x12", "--values", "48", "56")
    assert code == 0
    assert same(said.splitlines()[0], _marlin_scales.BYTES.pattern, 192, 7)
    assert said.count("equal after a table of values: ") == 5
    code, said = run(*ask, "--shapes", "384x20,128x12")
    assert (code, said.splitlines()[-1]) == (
        1,
        "none: stored element 0 of (384, 20) is 0 and 0 of (0, 1), 0 of both mixed (see --values)",
    )


def test_what_a_function_refuses_is_said() -> None:
    def pack(codes: Tensor) -> Tensor:
        if codes.shape[0] % 128:
            raise ValueError("not so")
        return codes.T

    line = script.infer([script.asked(pack, s, 8, torch.uint8, (0, 1)) for s in SHAPES])
    said = list(script.check(line, pack, SHAPES, 8, torch.uint8))
    assert said[:2] == ["equal: 384x256", "equal: 128x384"]
    assert said[2:] == ["refused: 3x40, not so", "refused: 5x24, not so", "refused: 1x56, not so"]


def flipped(codes: Tensor) -> Tensor:
    row = torch.arange(len(codes))
    return codes[row ^ (row >> 3 & 1)]


def shifted(codes: Tensor) -> Tensor:
    return codes.roll(1, 0)


def padded(codes: Tensor) -> Tensor:
    return torch.cat([codes, codes[:1]])


def twice(codes: Tensor) -> Tensor:
    return torch.cat([codes[:1], codes[:1], codes[2:]])


def summed(codes: Tensor) -> Tensor:
    return codes + codes[:1]


def halves(codes: Tensor) -> Tensor:
    """Another order for every size: one factor does not take all that is left."""
    side = int(len(codes) ** 0.5)
    return codes.view(side, side, -1).transpose(0, 1)


@pytest.mark.parametrize(
    ("pack", "first"),
    [
        (flipped, "320 elements of (64, 40) fit, but no factor leads on to [360, 361, 362]"),
        (shifted, "0 elements of (64, 40) fit, but no factor leads on to [2520, 2521, 2522]"),
        (padded, "2600 elements stored of a source (64, 40), which has 2560"),
        (twice, "source element 40 of (64, 40) is not stored"),
        (summed, "stored element 40 of (64, 40) is 0 and 2 of (0, 1), 1 of both mixed"),
    ],
)
def test_what_is_no_tiling_is_said_to_be_none(pack: script.Pack, first: str) -> None:
    with pytest.raises(script.NoTiling, match=f"^{re.escape(first)}"):
        found(pack, 8, (64, 40), (32, 24))


def test_an_order_that_depends_on_the_size_is_none() -> None:
    with pytest.raises(script.NoTiling, match=r"what fits \(64, 40\) fits no other shape: .*16"):
        found(halves, 8, (64, 40), (16, 24))


def test_a_function_that_minds_the_values_is_caught_by_the_check() -> None:
    def clamped(codes: Tensor) -> Tensor:
        return codes.T.minimum(codes.T[:, :1] | 1)

    def by_shape(codes: Tensor) -> Tensor:
        return codes.T + (codes.T >> 7) * (len(codes) // 128)

    for pack in clamped, by_shape:
        with pytest.raises(script.NoTiling, match=r"^n, k -> k, n: \d+ of \("):
            found(pack, 8, *SHAPES)


def test_one_wrong_word_is_none(tmp_path: Path) -> None:
    words = load_file(GOLDEN)
    stored = words["repack4.192x320.a80.out"]
    stored[19, 380] ^= 1 << 9
    save_file(words, tmp_path / "words.safetensors")
    code, said = run(f"{tmp_path}/words.safetensors:repack4.*.a80", "--bits", "4")
    assert code == 1
    assert "none: " in said
    assert run(f"{tmp_path}/words.safetensors:repack8.*.a80", "--bits", "8")[0] == 0


def test_one_shape_alone_leaves_the_choice_open() -> None:
    code, said = run(f"{GOLDEN}:repack4.192x320.a80", "--bits", "4")
    assert code == 1
    assert said.startswith("none: more lines than one fit:\n")
    assert run(f"{GOLDEN}:repack5.*", "--bits", "4") == (1, "none: no words of that name\n")
