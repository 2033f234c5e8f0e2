"""How fast the executors move bytes, beside a plain copy and the torch definition, in one run.

    python scripts/bench_kernels.py [MiB of the source]

Figures are GB/s, bytes read plus bytes written, the median of some runs, allocation included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from transcode.kernels import _execute
from transcode.quant import unpack_nibbles
from transcode.tiling import Tiling

CASES = {
    "marlin w4": ("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w e h g", 4),
    "marlin w8": ("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c q w h e g", 8),
    "marlin scales": ("nt a:2 b:2 d:2 i:8, g -> g, nt i a d b", 8),
    "cutlass scales": ("rt a:4 r:32, ct c:4 -> rt ct r a c", 8),
    "megamoe rows": ("h:2 b m:8, k -> b h m k", 8),
}


def seconds(run: Callable[[], object], device: str) -> float:
    """The median time of a run, after one to warm up."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=50, rep=200, return_mode="median")) / 1e3
    times = []
    for _ in range(6):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times[1:])


def defined(tiling: Tiling, source: Tensor, bits: int) -> Tensor:
    """What `_execute.apply` does, in plain torch."""
    if bits != 4:
        return tiling.apply(source)
    codes = tiling.apply(unpack_nibbles(source))
    shift = 4 * torch.arange(8, dtype=torch.int32, device=source.device)
    eight = codes.view(*codes.shape[:-1], -1, 8).to(torch.int32)
    return (eight << shift).sum(-1, dtype=torch.int32)


def figures(tiling: Tiling, source: Tensor, bits: int) -> list[float]:
    """GB/s of copy, apply, undo and the definition, after a look at the results."""
    shape = (len(source), source.shape[1] * 8 // bits)
    stored = _execute.apply(tiling, source, bits)
    if not torch.equal(stored, defined(tiling, source, bits)):
        raise SystemExit(f"{tiling.pattern}: not what Tiling.apply gives")
    if not torch.equal(_execute.undo(tiling, stored, shape, bits), source):
        raise SystemExit(f"{tiling.pattern}: does not come back")
    runs = (
        source.clone,
        lambda: _execute.apply(tiling, source, bits),
        lambda: _execute.undo(tiling, stored, shape, bits),
        lambda: defined(tiling, source, bits),
    )
    return [2 * source.nbytes / seconds(run, source.device.type) / 1e9 for run in runs]


def main() -> None:
    """Print a table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = int(sys.argv[1]) if sys.argv[1:] else 1024 if device == "cuda" else 64
    rows = 16384 if device == "cuda" else 4096
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    print(f"{where}, {size} MiB")
    print(f"{'':15}{'copy':>8}{'apply':>8}{'undo':>8}{'torch':>8}{'apply/copy':>12}{'/torch':>8}")
    for name, (pattern, bits) in CASES.items():
        source = torch.randint(256, (rows, (size << 20) // rows), dtype=torch.uint8, device=device)
        copy, apply, undo, torch_ = figures(Tiling(pattern), source, bits)
        print(
            f"{name:15}{copy:8.1f}{apply:8.1f}{undo:8.1f}{torch_:8.1f}"
            f"{apply / copy:12.2f}{apply / torch_:8.1f}"
        )


if __name__ == "__main__":
    main()
