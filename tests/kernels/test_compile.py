"""Every Triton kernel compiles for every GPU we name; no GPU is needed, and no interpreter helps.

The interpreter accepts kernels that do not compile, and with it switched on nothing can compile, so
the test runs this file as a program of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = [  # with the bytes that a thread reads and writes at a time
    ("nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt nt c q w e h g", (256, 448), 4, 16),
    ("nt w:4 c:8, kt g:2 q:4 e:4 -> kt nt c q w g e", (256, 448), 8, 16),
    ("nt a:2 b:2 d:2 i:8, g -> g nt i a d b", (192, 64), 8, 16),
    ("nt a:2 b:2 d:2 i:8, g -> g nt i a d b", (192, 10), 8, 2),
    ("nt a:4 i:4 b:2 -> nt i a b", (1 << 12,), 16, 16),
    ("nt a:4 i:4 b:2 -> nt i a b", (160,), 16, 4),
    ("m, kb b:128 -> kb m b", (8, 384), 32, 16),
    ("b x:8 y:4, k -> b y x k", (96, 7), 8, 1),
]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(capability)]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    wanted = [f"move_tile {width} {width}" for *_, width in CASES for _ in ("apply", "undo")]
    assert run.stdout.splitlines() == wanted


def compile_all(capability: int) -> None:
    """Compile the kernel for each case, both ways; print its name and the bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from transcode.kernels import _gather
    from transcode.kernels._digits import orders, plan
    from transcode.tiling import Tiling

    kernels = {n for n, f in vars(_gather).items() if isinstance(f, triton.JITFunction)}
    if kernels != {"move_tile", "_places"}:  # the second is a part of the first
        raise SystemExit(f"compile all of {kernels}")
    for pattern, shape, bits, _ in CASES:
        source, stored = orders(Tiling(pattern), shape)
        for way in ((source, stored), (stored, source)):
            moves = plan(*way, bits, _gather.WORD, _gather.TILE)
            constants = dict(_gather.constants(moves))
            words = f"*u{moves.word}"
            signature = {
                "source": words,
                "out": words,
                "table": "*u8" if bits == 8 else "constexpr",
            }
            if bits != 8:
                constants["table"] = None
            compiled = triton.compile(
                ASTSource(
                    fn=_gather.move_tile,
                    signature=signature | dict.fromkeys(constants, "constexpr"),
                    constexprs=constants,
                    attrs={(i,): [["tt.divisibility", 16]] for i in range(2)},
                ),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": _gather.WARPS},
            )
            assert compiled.asm["cubin"]
            ptx = compiled.asm["ptx"]
            print(compiled.metadata.name, *(widest(ptx, access) for access in ("ld", "st")))


def widest(ptx: str, access: str) -> int:
    """The bytes of the widest access to global memory, `ld` or `st`."""
    found = re.findall(rf"\b{access}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(times or 1) * int(bits) // 8 for times, bits in found)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
