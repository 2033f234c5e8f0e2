"""Benchmarks. Every one looks at the results before it times anything; ratios are of one run.

    python scripts/bench.py kernels [--device cpu|cuda] [--mib N] [--only NAME] [--vllm-lib FILE]

`kernels`: how fast the executors move bytes, beside a plain copy and beside the torch definition.
Nothing has to be installed; without that, e.g. on a GPU machine, run it as
`PYTHONPATH=. python scripts/bench.py kernels`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from transcode.kernels import _execute
from transcode.kernels._digits import orders, plan
from transcode.quant import pack_nibbles, unpack_nibbles
from transcode.tiling import Tiling

ROUNDS = 7
ROWS = 512
"""Rows are a multiple of this, which every order can cut."""

INTEGERS = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
"""The dtype of a source whose elements have so many bits."""

Run = Callable[[], object]

Repack = Callable[[Tensor, int, int, int, bool], Tensor]
"""Of words, k, n, bits, is_a_8bit."""


@dataclass(frozen=True)
class Case:
    """An order to run; `columns` elements of the source's last axis, None for a source of one."""

    name: str
    pattern: str
    bits: int
    columns: int | None
    table: bool = False


CASES = (
    Case("marlin w4 a16", "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g", 4, 8192),
    Case("marlin w8 a16", "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w h e g", 8, 8192),
    Case("marlin w4 a8", "nt w:4 c:8, kt g:2 q:4 e:4 -> kt, nt c q w e g", 4, 8192),
    Case("marlin w8 a8", "nt w:4 c:8, kt g:2 q:4 e:4 -> kt, nt c q w g e", 8, 8192),
    Case("marlin scales", "nt a:2 b:2 d:2 i:8, g -> g, nt i a d b", 8, 512),
    Case("marlin scales, table", "nt a:2 b:2 d:2 i:8, g -> g, nt i a d b", 8, 512, table=True),
    Case("marlin w4 a16, K 2880", "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g", 4, 2880),
    Case("marlin scales, K 2880", "nt a:2 b:2 d:2 i:8, g -> g, nt i a d b", 8, 180),
    Case("marlin bias, 16 bit", "nt a:4 i:4 b:2 -> nt i a b", 16, None),
    Case("marlin bias, 32 bit", "nt a:4 i:4 b:2 -> nt i a b", 32, None),
    Case("cutlass scales", "rt a:4 r:32, ct c:4 -> rt ct r a c", 8, 512),
    Case("megamoe rows", "h:2 b m:8, k -> b h m k", 8, 4096),
    Case("megamoe L1 scales", "h:2 B j:4 t:2 m:8, kp b:4 -> kp B t h m j b", 8, 512),
    Case("megamoe L2 scales", "B a:4 r:32, kp b:4 -> kp B r a b", 8, 512),
    Case("trtllm shuffle", "b x:8 y:4, k -> b y x k", 8, 4096),
    Case("megamoe sgl rows", "h:2 b u:8 p:2, k -> b p h u, k", 8, 4096),
    Case("megamoe sgl L1 scales", "h:2 B j:4 u:8 p:2, kp b:4 -> kp, B p h u j b", 8, 512),
    Case("trtllm gated rows", "h:2 b x:8 t:2, k -> b t h x, k", 8, 4096),
    Case("trtllm scales", "rt a:4 x:8 y:4, ct c:4 -> rt ct y x a c", 8, 512),
    Case("trtllm gated scales", "h:2 rt a:4 x:8 t:2, ct c:4 -> rt ct t h x a c", 8, 512),
    Case("deepgemm words", "r, kp b:4 -> kp, r b", 8, 512),
    Case("flashinfer block-major", "m, kb b:128 -> kb m b", 8, 4096),
)


def drawn(case: Case, size: int, device: str) -> Tensor:
    """A source of about so many bytes, at random; nibbles as `[..., K/2]` uint8.

    What a table is for are block scales, so these are most of them within an octave.
    """
    row = 1 if case.columns is None else case.columns * case.bits // 8
    octets = max(size // row // ROWS, 1) * ROWS * row
    if case.table:
        raw = (torch.randn(octets, device=device) * 4 + 100).to(torch.uint8)
    else:
        raw = torch.randint(256, (octets,), dtype=torch.uint8, device=device)
    return raw.view(INTEGERS[case.bits]) if row == 1 else raw.view(-1, row)


def defined(tiling: Tiling, source: Tensor, bits: int, table: Tensor | None) -> Tensor:
    """What `_execute.apply` does, in plain torch."""
    if bits == 4:
        return pack_nibbles(tiling.apply(unpack_nibbles(source))).view(torch.int32)
    return tiling.apply(source if table is None else table[source.int()])


def kernels(device: str, size: int, only: str, library: Path | None) -> Iterator[str]:
    """Lines of a table for sources of `size` bytes; its figures are GB/s, read plus written."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"CPU, {torch.get_num_threads()} threads"
    repack = None if library is None else loaded(library)
    yield f"{where}, torch {torch.__version__}, sources of {size >> 20} MiB"
    yield "GB/s read + written; 'into' writes to memory that was written before"
    heads = ("copy", "apply", "undo", "torch", "copy into", "into")
    ratios = ("apply/copy", "into/copy", "/torch")
    vllm = ("vllm", "+transp.", "apply/", "/+tr.") if repack else ()
    yield " " * 22 + "".join(f"{head:>11}" for head in (*heads, *ratios, *vllm))
    for case in CASES:
        if only not in case.name:
            continue
        source = drawn(case, size, device)
        nbytes, runs = source.nbytes, checked(case, source, repack)
        times = seconds(list(runs.values()), device)
        speed = {name: 2 * nbytes / time / 1e9 for name, time in zip(runs, times, strict=True)}
        found = [speed["apply"] / speed["copy"], speed["into"] / speed["copy into"]]
        found.append(speed["apply"] / speed["torch"])
        shown = [f"{speed[head]:11.1f}" for head in heads] + [f"{ratio:11.2f}" for ratio in found]
        if "vllm" in speed:
            shown += [f"{speed[head]:11.1f}" for head in vllm[:2]]
            shown += [f"{speed['apply'] / speed[head]:11.2f}" for head in vllm[:2]]
        yield f"{case.name:22}" + "".join(shown)


def checked(case: Case, source: Tensor, repack: Repack | None) -> dict[str, Run]:
    """What to time, after a look at what it gives; SystemExit where that is wrong."""
    tiling, bits = Tiling(case.pattern), case.bits
    shape = (*source.shape[:-1], source.shape[-1] * 2) if bits == 4 else tuple(source.shape)
    table = inverse = None
    if case.table:
        table = torch.randperm(256, device=source.device).to(torch.uint8)
        inverse = table.argsort().to(torch.uint8)

    stored = _execute.apply(tiling, source, bits, table)
    if not torch.equal(stored, defined(tiling, source, bits, table)):
        raise SystemExit(f"{case.name}: not what Tiling.apply gives")
    if not torch.equal(_execute.undo(tiling, stored, shape, bits, inverse), source):
        raise SystemExit(f"{case.name}: does not come back")

    run = _execute.executor(source.device)
    moves = plan(*orders(tiling, shape), bits, run.WORD, run.TILE)
    words = source.view(-1).view(_execute.WORDS[moves.word])
    used = torch.zeros_like(words)
    run.move(moves, words, used, table)
    if not torch.equal(used.view(stored.dtype), stored.view(-1)):
        raise SystemExit(f"{case.name}: another result in memory that was written before")
    runs: dict[str, Run] = {
        "copy": source.clone,
        "apply": lambda: _execute.apply(tiling, source, bits, table),
        "undo": lambda: _execute.undo(tiling, stored, shape, bits, inverse),
        "torch": lambda: defined(tiling, source, bits, table),
        "copy into": lambda: used.copy_(words),
        "into": lambda: run.move(moves, words, used, table),
    }
    if repack is not None and "marlin w" in case.name:
        runs |= repacked(case, source, stored, repack)
    return runs


def repacked(case: Case, source: Tensor, stored: Tensor, repack: Repack) -> dict[str, Run]:
    """vLLM's CUDA repack alone, and with the transpose to its `[K/8, N]` that it needs first."""
    words = source.view(torch.int32)
    upright = words.T.contiguous()
    n, k = len(source), words.shape[1] * 32 // case.bits
    eight = case.name.endswith("a8")

    def run(given: Tensor) -> Tensor:
        return repack(given, k, n, case.bits, eight)

    if not torch.equal(run(upright).view(-1), stored.view(torch.int32).view(-1)):
        raise SystemExit(f"{case.name}: not the words of vLLM's repack")
    return {"vllm": lambda: run(upright), "+transp.": lambda: run(words.T.contiguous())}


def loaded(library: Path) -> Repack:
    """The op of vLLM's `_C_stable_libtorch.abi3.so`."""
    torch.ops.load_library(library.resolve())  # type: ignore[no-untyped-call]
    op = torch.ops._C.gptq_marlin_repack.default
    names = [argument.name for argument in op._schema.arguments]
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    ordered = [none] if "perm" in names else []  # gone in vLLM 0.33.0

    def repack(words: Tensor, k: int, n: int, bits: int, eight: bool) -> Tensor:
        packed: Tensor = op(words, *ordered, k, n, bits, eight)
        return packed

    return repack


def seconds(runs: Sequence[Run], device: str) -> list[float]:
    """The median time of each run. On the CPU they take turns, in an order that changes: other
    work comes and goes, and how fast new memory is given depends on what was freed before."""
    if device == "cuda":
        from triton.testing import do_bench

        return [do_bench(run, warmup=20, rep=100, return_mode="median") / 1e3 for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    turns, order = list(zip(runs, times, strict=True)), Random(0)
    for _ in range(1 + ROUNDS):
        order.shuffle(turns)
        for run, found in turns:
            start = perf_counter()
            run()
            found.append(perf_counter() - start)
    return [median(found[1:]) for found in times]


def main() -> None:
    """Parse the command line and print the benchmark's lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_subparsers(dest="benchmark", required=True)
    one = which.add_parser("kernels", help="the executors of Tilings, beside a copy")
    one.add_argument("--device", choices=("cpu", "cuda"), help="a GPU's where there is one")
    one.add_argument("--mib", type=int, help="MiB of a source: 64 on the CPU, 1024 on a GPU")
    one.add_argument("--only", default="", help="cases that have this in their name")
    one.add_argument("--vllm-lib", type=Path, metavar="FILE", help="beside this library's repack")
    given = parser.parse_args()
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = (given.mib or {"cpu": 64, "cuda": 1024}[device]) << 20
    for line in kernels(device, size, given.only, given.vllm_lib):
        print(line, flush=True)


if __name__ == "__main__":
    main()
