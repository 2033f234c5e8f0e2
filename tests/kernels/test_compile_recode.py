"""Every variant of the kernels that change encodings compiles for every GPU we name.

As in test_compile.py, the test runs this file as a program of its own, without the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {"bf16": "i32", "fp16": "i32", "nvfp4": "u8", "mxfp4": "u8", "mxfp8": "i16", "fp8": "i16"}
SIZES = ("pieces", "columns", "tall", "wide", "stride", "high", "broad", "across")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(capability)]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(VARIANTS)


VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("largest_of", kind, {}) for kind in KINDS),
    ("to_eight", "nvfp4", {"NATIVE": True}),
    ("to_eight", "bf16", {"NATIVE": False}),
    ("to_eight", "fp8", {"NATIVE": True}),
    ("to_nvfp4", "bf16", {"SEARCH": True, "BELOW": 13, "ABOVE": 9}),
    ("to_nvfp4", "mxfp8", {"SEARCH": False, "BELOW": 0, "ABOVE": 0}),
    ("to_mx", "nvfp4", {"EIGHT": False, "SEARCH": True, "NATIVE": False}),
    ("to_mx", "fp16", {"EIGHT": True, "SEARCH": False, "NATIVE": True}),
    ("to_mx", "mxfp4", {"EIGHT": False, "SEARCH": False, "NATIVE": False}),
)
"""Kernels, sources and constants: every way of a kernel, and every source."""


def compile_all(capability: int) -> None:
    """Compile all variants; print a line for each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from transcode.kernels import _recode

    for name, kind, constants in VARIANTS:
        kernel = getattr(_recode, name)
        given = {**constants, "KIND": kind, "P": _recode.PIECES}
        if "NATIVE" in given:
            given["NATIVE"] = given["NATIVE"] and capability >= 89
        types = {"words": f"*{KINDS[kind]}", "factor": "*fp32", "mine": "*fp32", "out": "*fp32"}
        types |= dict.fromkeys(SIZES, "i32") | {"bytes_": "*u8", "codes": "*u8"}
        types["scales"] = "*fp32" if kind in ("fp8", "bf16", "fp16") else "*u8"
        if name == "to_eight" or given.get("EIGHT"):
            types["codes"] = "*i16"
        signature = {n: "constexpr" if n in given else types[n] for n in kernel.arg_names}
        compiled = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=given),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": _recode.WARPS, "enable_fp_fusion": False},
        )
        assert compiled.asm["cubin"]
        if "fma.rn.f32" in compiled.asm["ptx"]:
            raise SystemExit(f"{name} {kind}: a product and a sum were contracted")
        print(name, kind)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
