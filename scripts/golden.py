"""Remake tests/golden/*_marlin*.safetensors: Marlin's bytes, in the runtimes' own words.

The preparation of weights is plain PyTorch but for one CUDA operator, so it can be driven on the
CPU straight from a wheel. Nothing of vLLM or SGLang is installed or copied. Of their modules the
few that do the work are executed as they lie in the wheel, every other import gets an empty
stand-in, and the operator, `gptq_marlin_repack`, is replaced by vLLM's own Python definition of the
same order (`marlin_weights` and `get_weight_perm`), after that has been compared with words which
the compiled operator produced.

Run it from the root of the repository, in an environment of its own, not in the project's:

    pip install torch==2.13.0 numpy safetensors
    pip download --no-deps vllm==0.25.1
    pip download --no-deps vllm==0.33.0
    pip download --no-deps sglang==0.5.23
    python -m scripts.golden --vllm-wheel vllm-0.25.1-*.whl --vllm-wheel vllm-0.33.0-*.whl \
        --sglang-wheel sglang-0.5.23-*.whl --repack-words tests/golden/marlin_repack.safetensors

With several wheels of vLLM all of them have to give the same bytes; without one of SGLang its file
stays as it is.

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
    sglang,
    sglang_marlin,
    vllm,
    vllm_fp8,
    vllm_mxfp4,
    vllm_mxfp8,
    vllm_nvfp4,
)
from scripts.packers.repack import check_repack

OUT = Path(__file__).parents[1] / "tests/golden"
OF_VLLM = (vllm_nvfp4.FILE, vllm_mxfp4.FILE, vllm_mxfp8.FILE, vllm_fp8.FILE)


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
    parser.add_argument("--sglang-wheel", type=Path, help="likewise of SGLang")
    parser.add_argument(
        "--repack-words",
        type=Path,
        required=True,
        help="safetensors file with words of the compiled gptq_marlin_repack",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Make the golden files."""
    args = arguments()
    versions = [vllm.load(path) for path in args.vllm_wheel]
    for version in versions:
        checked = check_repack(version, args.repack_words)
        print(f"{version}: stand-in for gptq_marlin_repack {checked}")
    args.out.mkdir(parents=True, exist_ok=True)
    stand_in = (
        f"the CUDA op gptq_marlin_repack was replaced by {vllm.ORDER}.marlin_weights "
        f"with get_weight_perm, {checked}"
    )
    for file in OF_VLLM:
        print(file.write(args.out, versions, stand_in))
    if args.sglang_wheel:
        version = sglang.load(args.sglang_wheel, versions[0].repack)
        stand_in = f"{stand_in}; from {versions[0]}, for SGLang has no such definition"
        print(sglang_marlin.FILE.write(args.out, [version], stand_in))


if __name__ == "__main__":
    main()
