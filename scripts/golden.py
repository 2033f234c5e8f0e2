"""Remake tests/golden/*.safetensors: the kernels' bytes, in the runtimes' own words.

The preparation of weights is plain PyTorch but for a few CUDA operators, so it can be driven on the
CPU straight from a wheel. Nothing of the runtimes is installed or copied. Of their modules the few
that do the work are executed as they lie in the wheel, every other import gets an empty stand-in.
The operators are replaced by definitions in Python that the runtimes themselves bring:

- Marlin's `gptq_marlin_repack` by vLLM's definition of the same order (`marlin_weights` and
  `get_weight_perm`), after that has been compared with words which the compiled operator produced;
- FlashInfer's `block_scale_interleave` and DeepGEMM's packing of scales by their own packages'
  (scripts/packers/flashinfer.py, deep_gemm.py).

Run it from the root of the repository, in an environment of its own, not in the project's:

    pip install torch==2.13.0 numpy safetensors
    pip download --no-deps vllm==0.25.1
    pip download --no-deps vllm==0.33.0
    pip download --no-deps sglang==0.5.23
    pip download --no-deps flashinfer-python==0.7.4
    pip download --no-deps sgl-deep-gemm==0.2.5
    python -m scripts.golden --vllm-wheel vllm-0.25.1-*.whl --vllm-wheel vllm-0.33.0-*.whl \
        --sglang-wheel sglang-0.5.23-*.whl --flashinfer-wheel flashinfer_python-0.7.4-*.whl \
        --deep-gemm-wheel sgl_deep_gemm-0.2.5-*.whl \
        --repack-words tests/golden/marlin_repack.safetensors

With several wheels of vLLM all of them have to give the same bytes, but for what only the latest
can do.

Keys of the files: `{kind}.{dtype}.{case}.{in|out}.{tensor}`

- kind: `dense`, `moe` and others; the cases of one kind went through the same functions.
- dtype: `bf16` or `fp16`, the dtype of the activations; `any` for a tensor which is the same for
  both, stored once. A case is the union of its `any` tensors and those of one dtype.
- in: the checkpoint's convention. Codes of 4 bits are uint8 with the even column in the low nibble,
  scales are in row order, E8M0 is uint8. `members` holds the row counts of the projections that
  were joined.
- out: what the runtime would hold, under the names of its parameters; E8M0 is uint8 here, too.

The files' metadata have one key, `provenance`: JSON that says how the bytes were made. A second run
gives the same files, bit for bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.packers import (
    deep_gemm,
    deepgemm_fp8,
    flashinfer,
    flashinfer_rows,
    megamoe,
    sglang,
    sglang_blackwell,
    sglang_marlin,
    sglang_trtllm,
    ue8m0,
    vllm,
    vllm_blackwell,
    vllm_cutlass_fp8,
    vllm_cutlass_mx,
    vllm_cutlass_nvfp4,
    vllm_fp8,
    vllm_mxfp4,
    vllm_mxfp8,
    vllm_nvfp4,
    vllm_trtllm,
)
from scripts.packers.repack import check_repack

OUT = Path(__file__).parents[1] / "tests/golden"
MARLIN = (vllm_nvfp4.FILE, vllm_mxfp4.FILE, vllm_mxfp8.FILE, vllm_fp8.FILE)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--vllm-wheel",
        type=Path,
        action="append",
        required=True,
        help="a wheel of vLLM, or the folder it was unpacked into; may be given several times",
    )
    for name, package in (
        ("sglang", "SGLang"),
        ("flashinfer", "FlashInfer"),
        ("deep-gemm", "sgl-deep-gemm"),
    ):
        parser.add_argument(
            f"--{name}-wheel", type=Path, required=True, help=f"likewise of {package}"
        )
    parser.add_argument(
        "--repack-words",
        type=Path,
        required=True,
        help="safetensors file with words of the compiled gptq_marlin_repack",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write (%(default)s)")
    return parser.parse_args()


def marlin(args: argparse.Namespace) -> None:
    """Make the files for Marlin."""
    versions = [vllm.load(path) for path in args.vllm_wheel]
    for version in versions:
        checked = check_repack(version, args.repack_words)
        print(f"{version}: stand-in for gptq_marlin_repack {checked}")
    stand_in = (
        f"the CUDA op gptq_marlin_repack was replaced by {vllm.ORDER}.marlin_weights "
        f"with get_weight_perm, {checked}"
    )
    for file in MARLIN:
        print(file.write(args.out, versions, stand_in))
    version = sglang.load(args.sglang_wheel, versions[0].repack)
    stand_in = f"{stand_in}; from {versions[0]}, for SGLang has no such definition"
    print(sglang_marlin.FILE.write(args.out, [version], stand_in))


def others(args: argparse.Namespace) -> None:
    """Make the files for CUTLASS, FlashInfer and DeepGEMM."""
    permutations = flashinfer.load(args.flashinfer_wheel)
    packing = deep_gemm.load(args.deep_gemm_wheel)
    of_vllm = [vllm_blackwell.load(path, permutations) for path in args.vllm_wheel]
    of_sglang = sglang_blackwell.load(args.sglang_wheel, packing, permutations)
    for file, runtimes in (
        (ue8m0.FILE, [*of_vllm, of_sglang]),
        (vllm_cutlass_nvfp4.FILE, of_vllm),
        (vllm_cutlass_mx.FILE, of_vllm),
        (vllm_cutlass_fp8.FILE, of_vllm),
        (vllm_trtllm.FILE, of_vllm),
        (sglang_trtllm.FILE, [of_sglang]),
        (flashinfer_rows.FILE, [permutations]),
        (megamoe.FILE, [*of_vllm, of_sglang]),
        (deepgemm_fp8.FILE, [of_sglang]),
    ):
        print(file.write(args.out, runtimes))


def main() -> None:
    """Make the golden files."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    marlin(args)
    others(args)


if __name__ == "__main__":
    main()
