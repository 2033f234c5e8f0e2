"""An emulation of vLLM's two Marlin ops, in float64 on the CPU, with the schemas of two wheels.

It decodes by `marlin_decode`, which knows nothing of `transcode.kernels`; the arguments' names,
order and types are checked too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import marlin_decode
from transcode.gemm.ops import Ops

BITS = {562949953487106: 4, 2814749767172868: 8}
"""By the type ids of float4_e2m1f and float8_e4m3fn."""

DEEP = {getattr(torch, name): deep for name, deep in marlin_decode.DEEP.items()}
E2M1 = marlin_decode.E2M1.double()

HEAD = (
    "Tensor{w} a, Tensor? c_or_none, Tensor{w} b_q_weight, Tensor? b_bias_or_none, "
    "Tensor{w} b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, "
)
ORDER = "Tensor? g_idx_or_none, Tensor? perm_or_none, "
FLAGS = "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float"
SORTED = (
    "Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, "
    "Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, "
    "int size_m, int size_n, int size_k, "
)
TILES = ", int thread_k, int thread_n, int blocks_per_sm"
WIDE = "Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "


def schemas(release: str) -> tuple[str, str]:
    """The two schemas as they stand in a wheel's libraries."""
    old = release == "0.25.1"
    dense = HEAD.format(w="") + (ORDER if old else "") + WIDE + ("bool is_k_full, " if old else "")
    moe = HEAD.format(w="!") + (ORDER if old else "") + "Tensor! workspace, " + SORTED
    moe += "bool is_full_k, " if old else ""
    return (
        f"marlin_gemm({dense}{FLAGS}) -> Tensor",
        f"moe_wna16_marlin_gemm({moe}{FLAGS}{TILES}) -> Tensor",
    )


def nvfp4(words: Tensor, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """In bfloat16 a byte without its first bit comes out 2^-112 too small."""
    byte = marlin_decode.in_order(stored.view(torch.uint8), marlin_decode.ORDER)
    value = marlin_decode.scales(stored, 1 / 128).double() * 2.0 ** -DEEP[dtype]
    if dtype is torch.bfloat16:
        value = torch.where(byte < 128, value * 2.0**-112, value)
    return E2M1[marlin_decode.codes(words)] * value.repeat_interleave(16, -1)


def mx(words: Tensor, stored: Tensor, bits: int) -> Tensor:
    """Byte 0 is zero, 255 is infinite."""
    byte = marlin_decode.in_order(stored.view(torch.uint8), marlin_decode.ORDER)
    scale = torch.where(byte == 0, 0, torch.exp2(byte.double() - 127)).repeat_interleave(32, -1)
    scale[scale == 2.0**128] = torch.inf
    codes = e4m3(words) if bits == 8 else E2M1[marlin_decode.codes(words)]
    return codes * scale


def fp8(words: Tensor, stored: Tensor) -> Tensor:
    """Scales of blocks are multiplied with the codes in their dtype, those of rows later."""
    own = marlin_decode.PLAIN
    plain = (
        marlin_decode.bias(stored.T) if len(stored) == 1 else marlin_decode.in_order(stored, own)
    )
    codes = e4m3(words) / marlin_decode.LIFT8[str(stored.dtype)[6:]]
    product = codes * plain.double().repeat_interleave(codes.shape[1] // len(stored), -1)
    return product if len(stored) == 1 else product.to(stored.dtype).double()


def e4m3(words: Tensor) -> Tensor:
    """NaN is taken for 480."""
    byte = marlin_decode.codes8(words)
    value = marlin_decode.e4m3(words).double()
    return torch.where(byte & 127 == 127, torch.where(byte > 127, -480.0, 480.0), value)


def gemm(
    x: Tensor, words: Tensor, scales: Tensor, factor: Tensor | None, bias: Tensor | None, *,
    bits: int,
) -> Tensor:  # fmt: skip
    """Float64 `[M, N]`, which the kernel rounds in the end."""
    if scales.dtype is torch.float8_e4m3fn:
        weight = nvfp4(words, scales, x.dtype)
    elif scales.dtype is torch.float8_e8m0fnu:
        weight = mx(words, scales, bits)
    else:
        weight = fp8(words, scales)
    out: Tensor = x.double() @ weight.T * (1.0 if factor is None else factor.double())
    return out if bias is None else out + marlin_decode.bias(bias).double()


def named(schema: str, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((a.name for a in torch._C.parse_schema(schema).arguments), args, strict=True))


def ordinary(given: dict[str, Any]) -> bool:
    """What the kernel takes: alignment, types, a factor or none, flags as vLLM sets them."""
    n, k = given["size_n"], given["size_k"]
    a, order = given["a"], [given.get("g_idx_or_none"), given.get("perm_or_none")]
    bits, scales = BITS[given["b_type_id"]], given["b_scales"]
    return (
        ((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0))
        and a.shape == (given["size_m"], k)
        and a.is_contiguous()
        and given["b_q_weight"].shape[-2:] == (k // 16, n * bits // 2)
        and kind_of_scales(given, bits)
        and scales.shape[-1] == n
        and not given["workspace"].any()
        and all(t is None for t in (given["a_scales"], given["b_zeros_or_none"], *order))
        and given.get("is_k_full", True)
        and given.get("is_full_k", True)
        and (given["use_atomic_add"], given["use_fp32_reduce"], given["is_zp_float"])
        == (False, True, False)
    )


def kind_of_scales(given: dict[str, Any], bits: int) -> bool:
    """Which kernels there are: a global scale for E4M3 scales alone, E8M0 in bfloat16 alone."""
    scales, factor, k = given["b_scales"], given["global_scale"], given["size_k"]
    own = given["a"].dtype
    bias = given["b_bias_or_none"]
    if bias is not None and bias.dtype is not own:
        return False
    if scales.dtype is torch.float8_e4m3fn:
        return bits == 4 and factor.dtype is torch.float32 and scales.shape[-2] == k // 16
    if factor is not None:
        return False
    if scales.dtype is torch.float8_e8m0fnu:
        return own is torch.bfloat16 and scales.shape[-2] == k // 32
    return bits == 8 and scales.dtype is own and scales.shape[-2] in (1, k // 128)


def marlin_gemm(schema: str, *args: Any) -> Tensor:
    given = named(schema, args)
    assert ordinary(given)
    a, factor = given["a"], given["global_scale"]
    operands = ("b_q_weight", "b_scales", "global_scale", "b_bias_or_none")
    assert factor is None or factor.shape == ()
    bits = BITS[given["b_type_id"]]
    out: Tensor = gemm(a, *(given[o] for o in operands), bits=bits).to(a.dtype)
    return out


def moe_gemm(schema: str, *args: Any) -> Tensor:
    given = named(schema, args)
    assert ordinary(given)
    a, block, top_k = given["a"], 8, given["top_k"]
    out: Tensor = given["c_or_none"].clone()
    order, weights = given["sorted_token_ids"].long(), given["topk_weights"].flatten().double()
    assert (given["moe_block_size"], len(order)) == (block, int(given["num_tokens_past_padded"]))
    assert given["topk_weights"].dtype is torch.float32
    assert len(out) == len(a) * top_k == len(weights)
    for at, e in enumerate(given["expert_ids"].tolist()):
        pairs = order[at * block : (at + 1) * block]
        pairs = pairs[pairs < len(out)]
        words, scales = given["b_q_weight"][e], given["b_scales"][e]
        factor, own = (
            None if given[o] is None else given[o][e] for o in ("global_scale", "b_bias_or_none")
        )
        bits = BITS[given["b_type_id"]]
        rows = gemm(a[pairs // top_k], words, scales, factor, own, bits=bits)
        if given["mul_topk_weights"]:
            rows *= weights[pairs, None]
            if own is not None and factor is not None:  # the kernel multiplies it with both
                plain = marlin_decode.bias(own).double()
                rows += (plain * (factor.double() - 1)) * weights[pairs, None]
        out[pairs] = rows.to(a.dtype)
    return out


def ops_of(release: str) -> Ops:
    space = f"transcode_{release.replace('.', '_')}"
    dense, moe = schemas(release)
    library = torch.library.Library(space, "DEF")  # type: ignore[no-untyped-call]
    KEPT.append(library)
    library.define(dense)  # type: ignore[no-untyped-call]
    library.define(moe)  # type: ignore[no-untyped-call]
    library.impl("marlin_gemm", lambda *args: marlin_gemm(dense, *args), "CPU")  # type: ignore[no-untyped-call]
    library.impl("moe_wna16_marlin_gemm", lambda *args: moe_gemm(moe, *args), "CPU")  # type: ignore[no-untyped-call]
    found = getattr(torch.ops, space)
    return Ops(
        found.marlin_gemm.default,
        found.moe_wna16_marlin_gemm.default,
        ("emulation",),
        torch.device("cpu"),
    )


KEPT: list[torch.library.Library] = []
OPS = {release: ops_of(release) for release in ("0.25.1", "0.33.0")}


Pair = tuple[Path, Path]


def change(target: Path, name: str, change_: Callable[[Tensor], Tensor]) -> None:
    """Alter one tensor of a destination."""
    for path in target.glob("*.safetensors"):
        tensors = {key: value.clone() for key, value in load_file(path).items()}
        if name in tensors:
            tensors[name] = change_(tensors[name])
            save_file(tensors, path, metadata={"format": "pt"})
            return
    raise KeyError(name)
