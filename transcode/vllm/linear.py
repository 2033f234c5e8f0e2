"""Packed linears: parameters that vLLM's own shard arithmetic narrows, and the Marlin GEMM."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.utils import (
    marlin_utils,
    marlin_utils_fp4,
    marlin_utils_fp8,
)

from transcode.errors import LayoutError
from transcode.vllm.folder import Folder, row
from transcode.vllm.packed import Packed, Stack, require_part

DTYPES = {
    "I32": torch.int32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8,
}  # fmt: skip
KEPT = ("source_global_scale", "source_input_scale", "source_weight_scale")
"""Leaves that stand in the folder for the way back: a model's loader must find a place for them."""


class PackedLinear(LinearMethodBase):
    """One packed matrix, of one linear or of several that vLLM joins.

    rows, stored: out features of each member on this rank, and as they lie in the parameters.
    """

    def __init__(self, packed: Packed, stack: Stack, folder: Folder) -> None:
        self.packed, self.stack, self.folder = packed, stack, folder
        self.rows = self.stored = stack.n
        self.k = stack.k

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters of this rank's part: weight, weight_scale, weight_global_scale for NVFP4.

        LayoutError if the part is no whole tiles.
        """
        stack, kind, k = self.stack, self.packed.kind, input_size_per_partition
        parts = tuple(output_partition_sizes)
        self.rows = self.stored = parts if len(stack.n) > 1 else (sum(parts),)
        self.k = k
        require_part(self.packed, stack, self.rows, k)
        loader = extra_weight_attrs["weight_loader"]
        load = load_factor = getattr(layer, "weight_loader_v2", loader)
        if stack.padded:
            if stack.biased:
                raise LayoutError(f"{stack.name} is padded and has a bias, which vLLM cuts off")
            if len(stack.n) not in (1, len(parts)):
                raise LayoutError(f"{stack.name} is padded, and vLLM cuts it in {len(parts)}")
            self.stored, k = stack.padded_n, stack.padded_k
            load, load_factor = partial(_load_padded, self.stored), _load_factor
        n, cut = sum(self.stored), stack.scales > 1
        weight = parameter.PackedvLLMParameter(
            data=torch.empty(k // 16, n * kind.bits // 2, dtype=torch.int32),
            input_dim=0,
            output_dim=1,
            packed_dim=1,
            packed_factor=32 // kind.bits,
            marlin_tile_size=16,
            weight_loader=partial(self._load, "weight", load),
        )
        scales = stack.scales * k // stack.padded_k if cut else 1
        dtype = DTYPES[kind.scale] if kind.scale else params_dtype
        scale = {
            "data": torch.empty(scales, n, dtype=dtype),
            "output_dim": 1,
            "weight_loader": partial(self._load, "weight_scale", load),
        }
        found = {
            "weight": weight,
            "weight_scale": parameter.GroupQuantScaleParameter(input_dim=0, **scale)
            if cut
            else parameter.ChannelQuantScaleParameter(**scale),
        }
        if kind.factor:
            factors = torch.full((len(parts),), torch.nan, dtype=torch.float32)
            found["weight_global_scale"] = parameter.PerTensorScaleParameter(
                data=factors, weight_loader=load_factor
            )
        for name, value in (found | {leaf: _unused() for leaf in KEPT}).items():
            layer.register_parameter(name, value)

    def _load(self, leaf: str, load: Any, param: Any, loaded: Tensor, *shard: Any) -> None:
        """Load a member's tensor, unless the model's own loader changed it on the way.

        Llama-4's reorders rows of q and k, which in packed words is garbage: some rows tell.
        LayoutError then.
        """
        names = (f"{self.stack.parent}.{m}.{leaf}".lstrip(".") for m in self.stack.members)
        some = sorted({0, min(1, len(loaded) - 1), len(loaded) // 2, len(loaded) - 1})
        given = [loaded[i].cpu().contiguous().view(torch.uint8).numpy().tobytes() for i in some]
        infos = [i for n in names if (i := self.folder.dense[n]).shape == loaded.shape]
        if not any([row(info, i) for i in some] == given for info in infos):
            raise LayoutError(
                f"{self.stack.name}: vLLM's loader of this model reorders rows of {leaf}, which "
                "packed words do not bear"
            )
        load(param, loaded, *shard)

    def process_weights_after_loading(self, layer: Any) -> None:
        """No tensor changes, but a bias that vLLM adds itself; LayoutError for factors apart."""
        for leaf in KEPT:
            delattr(layer, leaf)
        scale = layer.weight_scale.data
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        final = {"weight": layer.weight.data, "weight_scale": scale}
        if self.packed.kind.factor:
            factors = layer.weight_global_scale.data
            if not bool((factors == factors[0]).all()):
                told = ", ".join(map(str, factors.tolist()))
                raise LayoutError(f"{self.stack.name}: global scales {told}, wanted one value")
            final["weight_global_scale"] = factors[0].clone()
        for name, value in final.items():
            delattr(layer, name)
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
        shared = hasattr(marlin_utils, "get_marlin_workspace")  # vLLM 0.33 has one for each stream
        layer.workspace = None if shared else marlin_utils.marlin_make_workspace_new(scale.device)
        bias = getattr(layer, "bias", None)
        if bias is not None and getattr(layer, "skip_bias_add", False):
            bias.data = natural_bias(bias.data)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [..., K]` times the packed matrix, plus the bias in the kernel's order."""
        given = (x, layer.weight, layer.weight_scale)
        sizes = (layer.workspace, sum(self.stored), self.k, bias)
        out: Tensor
        if self.packed.kind.bits == 4:
            factor = layer.weight_global_scale if self.packed.kind.factor else None
            out = marlin_utils_fp4.apply_fp4_marlin_linear(*given, factor, *sizes)
        elif self.packed.kind.group:
            out = marlin_utils_fp8.apply_mxfp8_marlin_linear(*given, *sizes)
        else:
            out = marlin_utils_fp8.apply_fp8_marlin_linear(*given, *sizes)
        if self.stored == self.rows:
            return out
        begins = accumulate((0, *self.stored[:-1]))
        members = zip(begins, self.rows, strict=True)
        return torch.cat([out[..., begin : begin + n] for begin, n in members], -1)


def natural_bias(stored: Tensor) -> Tensor:
    """A bias `[..., N]` in the order of its rows again (see kernels/marlin.py, BIAS)."""
    blocks = stored.reshape(-1, 4, 4, 2).transpose(1, 2)
    return blocks.reshape(stored.shape).contiguous()


def _unused() -> nn.Parameter:
    """An empty parameter that takes whatever is loaded into it, and forgets it."""
    kept = nn.Parameter(torch.empty(0), requires_grad=False)
    kept.weight_loader = lambda *_, **__: None  # type: ignore[attr-defined]
    return kept


def _member(shard: object) -> int:
    """A member's number from vLLM's shard id."""
    return "qkv".index(shard) if isinstance(shard, str) else shard if isinstance(shard, int) else 0


def _load_padded(stored: tuple[int, ...], param: Any, loaded: Tensor, shard: object = None) -> None:
    """A member's padded columns, all of them: a padded matrix is not cut."""
    width = param.data.shape[1] // sum(stored)
    at, size = sum(stored[: _member(shard)]) * width, stored[_member(shard)] * width
    param.data[:, at : at + size].copy_(loaded)


def _load_factor(param: Any, loaded: Tensor, shard: object = None) -> None:
    """A member's factor; every member's where they are one matrix of the folder."""
    param.data[slice(None) if shard is None else _member(shard)] = loaded.reshape(())
