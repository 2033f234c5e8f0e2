"""Remake tests/golden/vllm_marlin_nvfp4.safetensors: Marlin's NVFP4 bytes, in vLLM's own words.

vLLM's weight preparation is plain PyTorch but for one CUDA operator, so it can be driven on the CPU
straight from a wheel. Nothing of vLLM is installed or copied. Of its modules the few named in
`DRIVEN` are executed as they lie in the wheel, every other `vllm.*` import gets an empty stand-in,
and the operator, `gptq_marlin_repack`, is replaced by vLLM's own Python definition of the same
order (`marlin_weights` and `get_weight_perm`), after that has been compared with words which the
compiled operator produced.

Run it in an environment of its own, not in the project's:

    pip install torch==2.13.0 numpy safetensors
    pip download --no-deps vllm==0.25.1
    pip download --no-deps vllm==0.33.0
    python scripts/golden.py --vllm-wheel vllm-0.25.1-*.whl --vllm-wheel vllm-0.33.0-*.whl \
        --repack-words marlin_repack.safetensors

With several wheels all of them have to give the same bytes.

Keys of the file: `{kind}.{dtype}.{case}.{in|out}.{tensor}`

- kind: `dense`, `moe` (the pure function) or `moe_inplace` (the variant that permutes biases).
- dtype: `bf16` or `fp16`, the dtype of the activations; `any` for a tensor which is the same for
  both, stored once. A case is the union of its `any` tensors and those of one dtype.
- in: ModelOpt's convention. Weights are uint8 with the even column in the low nibble, block scales
  float8_e4m3fn in row order, `*_scale_2` the float32 factor. `members` holds the row counts of the
  projections that were joined.
- out: what the runtime would hold, under the names of its parameters.

The file's metadata has one key, `provenance`: JSON that says how its bytes were made. A second run
gives the same file, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by name."""

OUT = Path(__file__).parents[1] / "tests/golden/vllm_marlin_nvfp4.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROUP = 16


# --- vLLM's files, without vLLM ------------------------------------------------------------------

UTILS = "vllm.model_executor.layers.quantization.utils"
PREPARATION = f"{UTILS}.marlin_utils_fp4"
ORDER = f"{UTILS}.marlin_utils_test"
DRIVEN = (
    PREPARATION,
    ORDER,
    f"{UTILS}.marlin_utils",
    f"{UTILS}.quant_utils",
    "vllm.model_executor.utils",
    "vllm.scalar_type",
    "vllm.utils.math_utils",
)


@dataclass(frozen=True)
class Wheel:
    """The files of a vLLM wheel, packed or unpacked."""

    root: Path | zipfile.Path

    @classmethod
    def open(cls, path: Path) -> Wheel:
        """Open a `.whl` file or the folder that one was unpacked into."""
        return cls(path if path.is_dir() else zipfile.Path(path))

    @property
    def version(self) -> str:
        """The version in the name of the wheel's dist-info folder."""
        names = [entry.name for entry in self.root.iterdir()]
        (info,) = (name for name in names if name.endswith(".dist-info"))
        return info.removeprefix("vllm-").removesuffix(".dist-info")

    def source(self, module: str) -> str:
        """The source text of a module."""
        return (self.root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")

    def digest(self, module: str) -> str:
        """The SHA-256 of a module's source text."""
        return hashlib.sha256(self.source(module).encode()).hexdigest()


class StandIn(ModuleType):
    """A module that is not executed: any name asked of it is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        """Make up the attribute; the import system's own names stay absent."""
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class WheelImporter(MetaPathFinder, Loader):
    """Imports the `DRIVEN` modules from a wheel and a stand-in for every other part of vLLM."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Claim everything that belongs to vLLM."""
        if name.partition(".")[0] != "vllm":
            return None
        return ModuleSpec(name, self, is_package=name not in DRIVEN)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """An ordinary module for a driven one, a stand-in for the others."""
        return None if spec.name in DRIVEN else StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run a driven module's source text as it lies in the wheel."""
        name = module.__name__
        if name in DRIVEN:
            exec(compile(self.wheel.source(name), name, "exec"), module.__dict__)


@contextmanager
def importing(wheel: Wheel) -> Iterator[None]:
    """Let `import vllm...` mean this wheel, and forget it afterwards."""
    importer = WheelImporter(wheel)
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


@dataclass(frozen=True)
class Vllm:
    """One version of vLLM, as far as this script needs it."""

    wheel: Wheel
    fp4: Any  # marlin_utils_fp4, whose functions give the answers
    repack: Callable[..., Tensor]  # in place of the CUDA operator


def load(path: Path) -> Vllm:
    """Import the preparation code of a wheel and put the stand-in for the operator in place."""
    wheel = Wheel.open(path)
    with importing(wheel):
        # What the driven code really uses of the modules that are not executed.
        ops: Any = import_module("vllm._custom_ops")
        envs: Any = import_module("vllm.envs")
        platforms: Any = import_module("vllm.platforms")
        units: Any = import_module("vllm.utils.platform_utils")
        envs.VLLM_MARLIN_INPUT_DTYPE = None
        platforms.current_platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)
        units.num_compute_units = lambda _device: 1
        ops.gptq_marlin_repack = partial(repack, import_module(ORDER))
        return Vllm(wheel, import_module(PREPARATION), ops.gptq_marlin_repack)


# --- the one CUDA operator -----------------------------------------------------------------------


def repack(
    order: Any,
    b_q_weight: Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
    perm: Tensor | None = None,
) -> Tensor:
    """Do what `gptq_marlin_repack` does, by vLLM's Python definition of the order.

    The input is int32 [K * bits / 32, N], the smallest k in the lowest bits. `perm`, which older
    versions pass, has to be empty: it is act-order's.
    """
    if perm is not None and perm.numel():
        raise ValueError("act-order is out of scope")
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes = (b_q_weight[:, None, :] >> shifts[None, :, None]) & (2**num_bits - 1)
    places = order.get_weight_perm(num_bits, is_a_8bit)
    packed: Tensor = order.marlin_weights(
        codes.reshape(size_k, size_n), size_k, size_n, num_bits, places, is_a_8bit
    )
    return packed


def check_repack(vllm: Vllm, words: Path) -> str:
    """Compare the stand-in with words of the compiled operator; say what was compared.

    Keys of the file of words: `repack{bits}.{N}x{K}.a8{0|1}.{in|out}`.
    """
    with safe_open(words, "pt") as file:
        keys = sorted(file.keys())
        cases = [key.removesuffix(".in") for key in keys if key.endswith(".in")]
        for case in cases:
            kind, shape, activations = case.split(".")
            n, k = map(int, shape.split("x"))
            weight = file.get_tensor(f"{case}.in").view(torch.int32).T.contiguous()
            bits = int(kind.removeprefix("repack"))
            packed = vllm.repack(weight, k, n, bits, is_a_8bit=activations == "a81")
            if not same(packed, file.get_tensor(f"{case}.out")):
                raise SystemExit(f"vLLM {vllm.wheel.version}: the stand-in differs at {case}")
        made_by = file.metadata()["made_by"]
    return f"bit-equal in {len(cases)} of {len(cases)} cases to the words of: {made_by}"


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(raw(left), raw(right))


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# --- the cases -----------------------------------------------------------------------------------

# Codes of float8_e4m3fn. 1 to 7 are its subnormals.
LEAST_NORMAL, ONE_EIGHTH, MAX_16, MAX_128, MAX_224, MAX_448 = 0x08, 0x20, 0x58, 0x70, 0x76, 0x7E
MAX_1_75, MAX_SUBNORMAL_3, FEW_NORMALS = 0x3E, 0x03, 0x0F


@dataclass(frozen=True)
class Scales:
    """Random block scales: e4m3 codes from `low` to `high`, and one that is `top`."""

    low: int
    high: int
    top: int

    def draw(self, random: torch.Generator, shape: Sequence[int]) -> Tensor:
        """Draw a tensor of them, in float8_e4m3fn."""
        codes = torch.randint(self.low, self.high + 1, tuple(shape), generator=random)
        place = torch.randint(codes.numel(), (1,), generator=random)
        codes.view(-1)[place] = self.top
        return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def up_to(top: int, low: int = LEAST_NORMAL) -> Scales:
    """Scales spread over all codes from `low` to `top`."""
    return Scales(low, top, top)


@dataclass(frozen=True)
class Dense:
    """A linear layer, perhaps of several projections joined along N."""

    name: str
    n: int
    k: int
    scales: Scales
    factor: float = 0.0123
    bias: bool = False
    members: tuple[int, ...] = ()

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors."""
        random = generator(self.name)
        tensors = {
            "weight": draw_bytes(random, self.n, self.k // 2),
            "weight_scale": self.scales.draw(random, (self.n, self.k // GROUP)),
            "weight_scale_2": torch.tensor(self.factor),
        }
        if self.bias:
            tensors["bias"] = draw_bias(random, dtype, self.n)
        if self.members:
            tensors["members"] = torch.tensor(self.members)
        return tensors


@dataclass(frozen=True)
class Moe:
    """The experts of one layer; `w13` and `w2` hold the block scales of each expert."""

    name: str
    hidden: int
    inter: int
    w13: tuple[Scales, ...]
    w2: tuple[Scales, ...]
    gated: bool = True
    bias: bool = False

    def draw(self, dtype: torch.dtype) -> Tensors:
        """The checkpoint's tensors, stacked over the experts as the runtime loads them."""
        random = generator(self.name)
        rows = self.inter * (2 if self.gated else 1)
        tensors = {
            **self._weights("w13", random, self.w13, rows, self.hidden),
            **self._weights("w2", random, self.w2, self.hidden, self.inter),
        }
        if self.bias:
            tensors["w13_bias"] = draw_bias(random, dtype, len(self.w13), rows)
            tensors["w2_bias"] = draw_bias(random, dtype, len(self.w2), self.hidden)
        return tensors

    @staticmethod
    def _weights(
        name: str, random: torch.Generator, scales: tuple[Scales, ...], n: int, k: int
    ) -> Tensors:
        experts = len(scales)
        return {
            f"{name}_weight": draw_bytes(random, experts, n, k // 2),
            f"{name}_weight_scale": torch.stack([s.draw(random, (n, k // GROUP)) for s in scales]),
            f"{name}_weight_scale_2": torch.rand(experts, generator=random) * 0.02 + 0.001,
        }


def generator(name: str) -> torch.Generator:
    """A generator whose seed depends on the name of the case alone."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def draw_bytes(random: torch.Generator, *shape: int) -> Tensor:
    """Random pairs of FP4 codes; all sixteen occur."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=random)


def draw_bias(random: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """A random bias in the dtype of the activations."""
    return torch.randn(shape, generator=random).to(dtype)


DENSE = (
    Dense("128x128", 128, 128, up_to(MAX_448, low=ONE_EIGHTH)),
    Dense("192x320", 192, 320, up_to(MAX_448)),  # padded to 192x384
    Dense("72x112", 72, 112, up_to(MAX_128)),  # padded to 128x128
    Dense("bias-64x128", 64, 128, up_to(MAX_448), bias=True),
    Dense("bias-72x112", 72, 112, up_to(MAX_128), bias=True),
    # How far vLLM lifts small scales for bf16, and which scales it flushes.
    Dense("max1_75-64x128", 64, 128, up_to(MAX_1_75, low=0)),
    Dense("max224-64x128", 64, 128, up_to(MAX_224, low=0)),
    Dense("subnormal-64x128", 64, 128, up_to(MAX_SUBNORMAL_3, low=0)),
    Dense("flush-64x128", 64, 128, Scales(0, FEW_NORMALS, MAX_448)),
    Dense("zero-64x128", 64, 128, up_to(0, low=0)),
    # Joined projections, where the choice between the two ways of padding shows.
    Dense("joined-256x256", 256, 256, up_to(MAX_448), members=(128, 64, 64)),
    Dense("joined-192x64", 192, 64, up_to(MAX_448), members=(96, 96)),  # to 256x64
    Dense("joined-192x192", 192, 192, up_to(MAX_448), members=(64, 64, 64)),  # a tie: to 192x256
)

MOE = (
    Moe(
        "gated-h128-i64-e3",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_16), up_to(MAX_1_75), up_to(LEAST_NORMAL + 8)),
        w2=(up_to(MAX_1_75), up_to(MAX_224), up_to(MAX_16)),
    ),
    Moe(  # padded to I = 128
        "gated-h192-i96-e2",
        hidden=192,
        inter=96,
        w13=(up_to(MAX_448), up_to(MAX_128)),
        w2=(up_to(MAX_16), up_to(MAX_128)),
    ),
    Moe(  # padded to I = 128
        "gated-h256-i96-e2",
        hidden=256,
        inter=96,
        w13=(up_to(MAX_128), up_to(MAX_224)),
        w2=(up_to(MAX_448), up_to(MAX_16)),
    ),
    Moe(  # padded to I = 128
        "ungated-h128-i96-e2",
        hidden=128,
        inter=96,
        w13=(up_to(MAX_1_75), up_to(MAX_16)),
        w2=(up_to(MAX_224), up_to(MAX_1_75)),
        gated=False,
    ),
    Moe(  # one expert's scales keep the others' from being lifted
        "flush-h128-i64-e2",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_448), up_to(FEW_NORMALS, low=0)),
        w2=(up_to(FEW_NORMALS, low=0), up_to(MAX_224)),
    ),
)

MOE_INPLACE = (
    Moe(
        "bias-h128-i64-e2",
        hidden=128,
        inter=64,
        w13=(up_to(MAX_16), up_to(MAX_448)),
        w2=(up_to(MAX_128), up_to(MAX_1_75)),
        bias=True,
    ),
)


# --- the answers ---------------------------------------------------------------------------------


def prepare_dense(vllm: Vllm, case: Dense, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_fp4_layer_for_marlin`, vLLM's preparation of a linear layer."""
    runtime = {"weight_scale_2": "weight_global_scale"}
    parameters = {runtime.get(name, name): given[name] for name in given if name != "members"}
    layer = module(parameters)
    layer.output_size_per_partition = case.n
    layer.input_size_per_partition = case.k
    layer.params_dtype = dtype
    vllm.fp4.prepare_fp4_layer_for_marlin(layer)
    return {name: getattr(layer, name).data for name in parameters}


MOE_TENSORS = ("weight", "weight_scale", "weight_scale_2")


def prepare_moe(vllm: Vllm, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_nvfp4_moe_layer_for_marlin`, vLLM's preparation of ModelOpt's experts."""
    layer = SimpleNamespace(
        num_experts=len(case.w13),
        hidden_size=case.hidden,
        intermediate_size_per_partition=case.inter,
        params_dtype=dtype,
    )
    names = [f"{matrix}_{tensor}" for matrix in ("w13", "w2") for tensor in MOE_TENSORS]
    tensors = (given[name].clone() for name in names)
    packed = vllm.fp4.prepare_nvfp4_moe_layer_for_marlin(layer, *tensors, is_act_and_mul=case.gated)
    return dict(zip(names, packed, strict=True))


def prepare_moe_inplace(vllm: Vllm, case: Moe, given: Tensors, dtype: torch.dtype) -> Tensors:
    """Drive `prepare_moe_fp4_layer_for_marlin`, which neither pads nor leaves out the biases."""
    layer = module(given)
    layer.params_dtype = dtype
    layer.moe_config = SimpleNamespace(
        num_experts=len(case.w13),
        num_local_experts=len(case.w13),
        hidden_dim=case.hidden,
        intermediate_size_per_partition=case.inter,
    )
    vllm.fp4.prepare_moe_fp4_layer_for_marlin(layer)
    return {name: getattr(layer, name).data for name in given}


def module(parameters: Tensors) -> Any:
    """A module with copies of the tensors as its parameters."""
    layer = torch.nn.Module()
    for name, tensor in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


KINDS: dict[str, tuple[Callable[[Vllm, Any, Tensors, torch.dtype], Tensors], Sequence[Any]]] = {
    "dense": (prepare_dense, DENSE),
    "moe": (prepare_moe, MOE),
    "moe_inplace": (prepare_moe_inplace, MOE_INPLACE),
}


def answers(vllm: Vllm) -> Tensors:
    """Every tensor of the golden file, by its key."""
    found: Tensors = {}
    for kind, (prepare, cases) in KINDS.items():
        for case in cases:
            both = {name: run(vllm, prepare, case, dtype) for name, dtype in DTYPES.items()}
            for tensor, dtype, value in shared(both):
                found[f"{kind}.{dtype}.{case.name}.{tensor}"] = value
    return found


def run(
    vllm: Vllm,
    prepare: Callable[[Vllm, Any, Tensors, torch.dtype], Tensors],
    case: Dense | Moe,
    dtype: torch.dtype,
) -> Tensors:
    """What goes into and comes out of one case."""
    given = case.draw(dtype)
    made = prepare(vllm, case, given, dtype)
    return {
        **{f"in.{name}": tensor for name, tensor in given.items()},
        **{f"out.{name}": tensor.contiguous() for name, tensor in made.items()},
    }


def shared(both: dict[str, Tensors]) -> Iterator[tuple[str, str, Tensor]]:
    """Name, dtype and value of every tensor; `any` stands for the dtypes when they agree."""
    first, *others = both.values()
    for name, value in first.items():
        if all(same(value, other[name]) for other in others):
            yield name, "any", value
        else:
            yield from ((name, dtype, tensors[name]) for dtype, tensors in both.items())


def require_equal(vllm: Vllm, found: Tensors, expected: Tensors) -> None:
    """Stop unless this version of vLLM gave the expected bytes."""
    if found.keys() != expected.keys():
        raise SystemExit(f"vLLM {vllm.wheel.version} shares other tensors among the dtypes")
    if wrong := [key for key in expected if not same(expected[key], found[key])]:
        raise SystemExit(f"vLLM {vllm.wheel.version} gives other bytes: {', '.join(wrong)}")


def provenance(versions: Sequence[Vllm], checked: str) -> dict[str, object]:
    """Where the bytes come from, in words."""
    return {
        "made_by": "scripts/golden.py, on the CPU, from the Python files of vLLM's wheels",
        "vllm": [vllm.wheel.version for vllm in versions],
        "agreement": "all these versions gave the same bytes",
        "torch": torch.__version__,
        "functions": {
            "dense": f"{PREPARATION}.prepare_fp4_layer_for_marlin",
            "moe": f"{PREPARATION}.prepare_nvfp4_moe_layer_for_marlin",
            "moe_inplace": f"{PREPARATION}.prepare_moe_fp4_layer_for_marlin",
        },
        "repack": f"the CUDA op gptq_marlin_repack was replaced by {ORDER}.marlin_weights "
        f"with get_weight_perm, {checked}",
        "keys": "{dense|moe|moe_inplace}.{bf16|fp16|any}.{case}.{in|out}.{tensor}; "
        "any: the same for both dtypes, stored once",
        "in": "ModelOpt: weight uint8, even column in the low nibble; weight_scale float8_e4m3fn, "
        "row order; weight_scale_2 a float32 factor; members: rows of the joined projections",
        "sha256": {
            vllm.wheel.version: {module: vllm.wheel.digest(module) for module in DRIVEN}
            for vllm in versions
        },
    }


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
    parser.add_argument(
        "--repack-words",
        type=Path,
        required=True,
        help="safetensors file with words of the compiled gptq_marlin_repack",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Make the golden file."""
    args = arguments()
    versions = [load(path) for path in args.vllm_wheel]
    for vllm in versions:
        checked = check_repack(vllm, args.repack_words)
        print(f"vLLM {vllm.wheel.version}: stand-in for gptq_marlin_repack {checked}")
    tensors = answers(versions[0])
    for vllm in versions[1:]:
        require_equal(vllm, answers(vllm), tensors)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # One key only: safetensors writes several in an order of its own, anew each time.
    history = provenance(versions, checked)
    save_file(tensors, args.out, {"provenance": json.dumps(history, indent=1)})
    print(f"{args.out}: {len(tensors)} tensors, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
