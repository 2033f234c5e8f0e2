"""vLLM's own Marlin GEMMs, called from its compiled libraries; vLLM itself is never imported.

The libraries need nothing but the torch that they were built for (vllm-project/vllm:
csrc/libtorch_stable/torch_bindings.cpp and moe/torch_bindings.cpp). Releases differ in the ops'
arguments; the op's own schema says which these are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transcode.errors import TranscodeError

DENSE_FILE, MOE_FILE = "_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"
DENSE, MOE = "_C::marlin_gemm", "_moe_C::moe_wna16_marlin_gemm"

HEAD = "a c_or_none b_q_weight b_bias_or_none b_scales a_scales global_scale b_zeros_or_none"
ORDER = "g_idx_or_none perm_or_none"
SORTED = (
    "sorted_token_ids expert_ids num_tokens_past_padded topk_weights moe_block_size top_k "
    "mul_topk_weights"
)
SIZES, FLAGS = "b_type_id size_m size_n size_k", "use_atomic_add use_fp32_reduce is_zp_float"
TILES = "thread_k thread_n blocks_per_sm"

SIGNATURES = {
    DENSE: {
        f"{HEAD} {ORDER} workspace {SIZES} is_k_full {FLAGS}": "0.25.1",
        f"{HEAD} workspace {SIZES} {FLAGS}": "0.33.0",
    },
    MOE: {
        f"{HEAD} {ORDER} workspace {SORTED} {SIZES} is_full_k {FLAGS} {TILES}": "0.25.1",
        f"{HEAD} workspace {SORTED} {SIZES} {FLAGS} {TILES}": "0.33.0",
    },
}
"""The arguments' names in the schemas, and the vLLM release that they were read in."""

SAME: dict[str, Any] = {
    **dict.fromkeys(("c_or_none", "a_scales", "b_zeros_or_none", *ORDER.split())),
    **dict.fromkeys(("is_k_full", "is_full_k", "use_fp32_reduce"), True),
    **dict.fromkeys(("use_atomic_add", "is_zp_float"), False),
    **dict.fromkeys(TILES.split(), -1),
}
"""What vLLM passes in every call with these weights and 16-bit activations."""

TYPES = {4: 562949953487106, 8: 2814749767172868}
"""float4_e2m1f and float8_e4m3fn, by bits (vllm/scalar_type.py)."""

BLOCK = 8
"""Pairs of a token and an expert that the MoE kernel takes at a time."""


@dataclass(frozen=True)
class Packed:
    """A matrix as it is stored, or one for each expert along a first axis E.

    weight: int32 `[K/16, N * bits / 2]`.
    scales: `[G, N]`, float8_e4m3fn (S0E5M3 bytes), float8_e8m0fnu or the activation dtype.
    factor: float32 `[]`, or `[E]`; None where there is no global scale.
    bias: `[N]` in the activation dtype, or None.
    """

    weight: Tensor
    scales: Tensor
    factor: Tensor | None
    bias: Tensor | None
    bits: int

    @property
    def n(self) -> int:
        """Rows of the matrix, with padding: the output's columns."""
        return self.weight.shape[-1] * 2 // self.bits

    @property
    def k(self) -> int:
        """Columns of the matrix, with padding."""
        return self.weight.shape[-2] * 16


@dataclass(frozen=True)
class Routing:
    """Which experts every token goes to: `[M, top_k]` int64, and their float32 weights."""

    experts: Tensor
    weights: Tensor

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.experts.shape[1]

    def pairs(self, expert: int) -> Tensor:
        """The pairs `token * top_k + slot` of an expert, rising."""
        return (self.experts.flatten() == expert).nonzero().flatten()

    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs by expert, each expert's padded to whole blocks with M * top_k; every block's
        expert; and the number of pairs with that padding. All int32, as the kernel takes them."""
        lists, owners = list[Tensor](), list[int]()
        for expert in range(int(self.experts.max()) + 1):
            pairs = self.pairs(expert)
            room = -len(pairs) % BLOCK
            lists.append(torch.nn.functional.pad(pairs, (0, room), value=self.experts.numel()))
            owners += [expert] * (len(lists[-1]) // BLOCK)
        order = torch.cat(lists).int()
        return order, torch.tensor(owners, dtype=torch.int32), torch.tensor([len(order)]).int()


@dataclass(frozen=True)
class Ops:
    """The two ops, None for one that was not found; `libraries` are file names."""

    dense: Any
    moe: Any
    libraries: tuple[str, ...]
    device: torch.device

    def gemm(self, x: Tensor, b: Packed) -> Tensor:
        """`x @ W.T + bias` for `x` [M, K]; `[M, N]`."""
        return self._call(DENSE, self.dense, _operands(x, b, len(x)))

    def moe_gemm(self, x: Tensor, b: Packed, to: Routing, *, second: bool, weigh: bool) -> Tensor:
        """`[M * top_k, N]`, one row for each pair; `x` has a row for each token.

        second: `x` has a row for each pair, as in an MoE layer's second GEMM.
        weigh: multiply each row by its pair's weight.
        """
        order, owners, count = to.blocks()
        pairs = to.experts.numel()
        given = _operands(x, b, pairs if second else len(to.experts))
        given |= {
            # Rows that nobody writes stay NaN.
            "c_or_none": torch.full((pairs, b.n), torch.nan, dtype=x.dtype, device=x.device),
            "sorted_token_ids": order.to(x.device),
            "expert_ids": owners.to(x.device),
            "num_tokens_past_padded": count.to(x.device),
            "topk_weights": to.weights.to(x.device),
            "moe_block_size": BLOCK,
            "top_k": 1 if second else to.top_k,
            "mul_topk_weights": weigh,
        }
        return self._call(MOE, self.moe, given)

    def _call(self, name: str, op: Any, given: dict[str, Any]) -> Tensor:
        if op is None:
            raise TranscodeError(f"none of {', '.join(self.libraries)} has {name}")
        values = SAME | {"workspace": self._workspace()} | given
        try:
            result: Tensor = op(*(values[argument.name] for argument in op._schema.arguments))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise TranscodeError(f"{name} does not run on {self.gpu}: {first}") from error
        return result

    def _workspace(self) -> Tensor:
        """The kernels' locks: zeros, and left as zeros."""
        count = 1
        if self.device.type == "cuda":
            count = torch.cuda.get_device_properties(self.device).multi_processor_count
        return torch.zeros(4 * count, dtype=torch.int32, device=self.device)

    @property
    def gpu(self) -> str:
        """The name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"

    def evidence(self) -> dict[str, Any]:
        """What ran: each op with its signature, the files it came from, the GPU, torch."""
        ops = {DENSE: self.dense, MOE: self.moe}
        return {
            "ops": {name: signature(name, op) for name, op in ops.items() if op is not None},
            "libraries": list(self.libraries),
            "gpu": self.gpu,
            "torch": torch.__version__,
        }


def _operands(x: Tensor, b: Packed, m: int) -> dict[str, Any]:
    return {
        "a": x,
        "b_q_weight": b.weight,
        "b_bias_or_none": b.bias,
        "b_scales": b.scales,
        "global_scale": b.factor,
        "b_type_id": TYPES[b.bits],
        "size_m": m,
        "size_n": b.n,
        "size_k": b.k,
    }


def signature(name: str, op: Any) -> str:
    """The vLLM release whose arguments an op takes; TranscodeError if none is known."""
    found = " ".join(argument.name for argument in op._schema.arguments)
    if found not in SIGNATURES[name]:
        known = ", ".join(SIGNATURES[name].values())
        raise TranscodeError(f"{name} takes ({found}); known are those of vLLM {known}")
    return SIGNATURES[name][found]


def find() -> list[Path]:
    """The two libraries of an installed vLLM, which is looked for and not imported."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    places = [Path(folder) / file for folder in folders or () for file in (DENSE_FILE, MOE_FILE)]
    found = [path for path in places if path.is_file()]
    if not found:
        why = f"the vLLM in {places[0].parent} has neither" if places else "vLLM is not installed"
        raise TranscodeError(f"no kernel: {why}; name {DENSE_FILE} and {MOE_FILE} with --vllm-lib")
    return found


def load(libraries: Sequence[Path], dtype: str) -> Ops:
    """Load the files, or an installed vLLM's; TranscodeError says why no kernel can be used."""
    if not torch.cuda.is_available():
        raise TranscodeError("no kernel: vLLM's GEMMs need a GPU, and torch sees none here")
    major, minor = torch.cuda.get_device_capability()
    wanted = (8, 0) if dtype == "bfloat16" else (7, 5)
    if (major, minor) < wanted:
        raise TranscodeError(
            f"no kernel for {dtype} on a GPU of compute capability {major}.{minor}"
        )
    paths = [path.resolve() for path in libraries or find()]
    there = _loaded(DENSE) is not None or _loaded(MOE) is not None
    for path in paths:
        if str(path) in torch.ops.loaded_libraries:
            continue
        if not path.is_file():
            raise TranscodeError(f"{path}: no such file")
        if there:  # a second registration of an op ends the process
            raise TranscodeError(f"{path}: another vLLM's ops are loaded in this process already")
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise TranscodeError(f"{path}: cannot be loaded: {error}") from error
    ops = Ops(_loaded(DENSE), _loaded(MOE), tuple(p.name for p in paths), torch.device("cuda"))
    if not ops.evidence()["ops"]:
        raise TranscodeError(f"none of {', '.join(ops.libraries)} has {DENSE} or {MOE}")
    return ops


def _loaded(name: str) -> Any:
    space, _, op = name.partition("::")
    found = getattr(getattr(torch.ops, space), op, None)
    return None if found is None else found.default
