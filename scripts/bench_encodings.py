"""How fast encodings change, by kernels and by the definition in torch: GB/s of the source's bytes.

    python scripts/bench_encodings.py [--device cpu|cuda] [--mib N] [--only WORDS] [--threads N]

Every result is compared with the definition's before it is timed. What is timed has the source and
the result in memory: the largest value, the scales, the codes; of FP8 tiles, whether powers of two
are exact too. Seven rounds, the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from transcode import change, quantise
from transcode.encode import tiles
from transcode.quant import Encoding, QuantTensor
from transcode.requantise import largest, mxfp4_to_fp8, requantised

BLOCK = (128, 128)
PAIRS = (
    ("bf16", Encoding.NVFP4, "mse"), ("bf16", Encoding.NVFP4, "max"),
    ("bf16", Encoding.MXFP4, "mse"), ("bf16", Encoding.FP8_BLOCK, ""),
    ("fp8-block", Encoding.NVFP4, "mse"),
    ("fp8-block", Encoding.MXFP4, "mse"), ("nvfp4", Encoding.MXFP4, "mse"),
    ("nvfp4", Encoding.FP8_BLOCK, ""), ("nvfp4", Encoding.FP8_CHANNEL, ""),
    ("mxfp4", Encoding.NVFP4, "cast"), ("mxfp4", Encoding.FP8_BLOCK, "cast"),
    ("mxfp4", Encoding.FP8_CHANNEL, ""),
)  # fmt: skip


def drawn(kind: str, elements: int, device: str) -> QuantTensor | Tensor:
    """Normal weights in an encoding, `[N, 4096]`."""
    rows = max(128, elements // 4096 // 128 * 128)
    value = torch.randn(rows, 4096, device=device) * 0.02
    match kind:
        case "bf16":
            return value.bfloat16()
        case "fp8-block":
            scale = quantise.fp8_scale(tiles(value.abs(), BLOCK).amax((-1, -2)))
            return quantise.tiled(value, scale, BLOCK)
        case "nvfp4":
            return quantise.nvfp4(value, quantise.nvfp4_factor(value.abs().max()), "max")
    return quantise.mxfp4(value, "max")


def defined(of: QuantTensor | Tensor, to: Encoding, search: str) -> QuantTensor:
    """By quantise.py, or change.py."""
    if search == "cast":
        assert isinstance(of, QuantTensor)
        if to is Encoding.NVFP4:
            return change.mxfp4_to_nvfp4(of, change.top(of.scales))
        return change.mxfp4_to_fp8(of, BLOCK)
    value = of.float() if isinstance(of, Tensor) else of.dequantize()
    match to:
        case Encoding.NVFP4:
            return quantise.nvfp4(value, quantise.nvfp4_factor(value.abs().max()), search)
        case Encoding.MXFP4:
            return quantise.mxfp4(value, search)
        case Encoding.FP8_BLOCK:
            return quantise.fp8_tiles(value, BLOCK, powers=False)
    return quantise.fp8_rows(value)


def by_kernels(of: QuantTensor | Tensor, to: Encoding, search: str) -> QuantTensor:
    """By the kernels of the source's device."""
    if search == "cast":
        assert isinstance(of, QuantTensor)
        return defined(of, to, search) if to is Encoding.NVFP4 else mxfp4_to_fp8(of, BLOCK)
    factor = quantise.nvfp4_factor(largest(of)) if to is Encoding.NVFP4 else None
    return requantised(of, to, search=search, factor=factor, block=BLOCK)


def nbytes(of: QuantTensor | Tensor) -> int:
    """The source's bytes."""
    return of.nbytes if isinstance(of, Tensor) else of.codes.nbytes + of.scales.nbytes


def timed(run: Callable[[], object], device: str) -> float:
    """The median of seven rounds, in seconds."""
    times = []
    for _ in range(8):
        start = perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times[1:])


def lines(device: str, size: int, only: str) -> Iterator[str]:
    """A table; SystemExit where a kernel's bytes are not the definition's."""
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    yield f"{where}, torch {torch.__version__}, about {size >> 20} MiB of source; GB/s of source"
    yield f"{'':34}{'kernels':>10}{'torch':>10}{'ratio':>8}"
    for kind, to, search in PAIRS:
        name = f"{kind} -> {to} {search}"
        if only not in name:
            continue
        width = {"bf16": 2.0, "fp8-block": 1.0}.get(kind, 0.5)
        small, of = (drawn(kind, int(n / width), device) for n in (min(size, 1 << 22), size))
        made, wanted = by_kernels(small, to, search), defined(small, to, search)
        for mine, theirs in ((made.codes, wanted.codes), (made.scales, wanted.scales)):
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                raise SystemExit(f"{name}: not the definition's bytes")
        fast = timed(lambda of=of, to=to, s=search: by_kernels(of, to, s), device)  # type: ignore[misc]
        slow = timed(lambda of=small, to=to, s=search: defined(of, to, s), device)  # type: ignore[misc]
        speed, plain = nbytes(of) / fast / 1e9, nbytes(small) / slow / 1e9
        yield f"{name:34}{speed:10.2f}{plain:10.2f}{speed / plain:8.1f}"


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--mib", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for line in lines(device, (given.mib or {"cpu": 16, "cuda": 1024}[device]) << 20, given.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
