"""Packed experts: a rank's part read straight from the fused tensors, and Marlin's MoE kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe import config as quant
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    NvFp4MoeBackend,
    make_nvfp4_moe_kernel,
)
from vllm.model_executor.layers.quantization.utils import quant_utils

from transcode.errors import LayoutError
from transcode.vllm.linear import DTYPES, natural_bias
from transcode.vllm.packed import require_part
from transcode.vllm.reading import CHUNK, Job, Reader
from transcode.vllm.slices import Rank, part, pieces

if TYPE_CHECKING:
    from transcode.vllm.config import TranscodeConfig

LEAVES = ("weight", "weight_scale", "weight_scale_2", "bias")
KEYS = {
    "marlin-nvfp4": quant_utils.kNvfp4Static,
    "marlin-mxfp4": quant_utils.kMxfp4Static,
    "marlin-fp8": quant_utils.kFp8StaticChannelSym,
    "marlin-mxfp8": quant_utils.kMxfp8Static,
}


class PackedExperts(FusedMoEMethodBase):
    """The experts of one layer; `name` is their container in the folder."""

    def __init__(self, config: TranscodeConfig, moe: Any, name: str) -> None:
        super().__init__(moe)
        self.config, self.name = config, name
        stacks = config.packed.stacks
        for needed in (f"{name}.w13", f"{name}.w2"):
            if needed not in stacks:
                raise LayoutError(f"{needed} is not packed, the other half of the experts is")
        self.w13, self.w2 = stacks[f"{name}.w13"], stacks[f"{name}.w2"]
        self.experts_cls = MarlinExperts
        self._require()
        config.left += 1

    def _require(self) -> None:
        """Raise LayoutError where vLLM would run something else than what is packed."""
        moe, parallel = self.moe, self.moe.moe_parallel_config
        able, why = MarlinExperts.is_supported_config(
            MarlinExperts, moe, KEYS[self.config.packed.layout], None,
            MarlinExperts.activation_format(),
        )  # fmt: skip
        if not able:
            raise LayoutError(f"{self.name}: {why}")
        if parallel.use_batched_activation_format:
            how = parallel.all2all_backend
            raise LayoutError(f"{self.name}: {how} hands on batched activations")
        if moe.num_logical_experts != self.w13.experts:
            raise LayoutError(
                f"{self.name}: {self.w13.experts} experts, wanted {moe.num_logical_experts}"
            )
        if moe.is_act_and_mul != (len(self.w13.n) == 2):
            raise LayoutError(f"{self.name}: {len(self.w13.n)} halves for {moe.activation.value}")
        if (moe.activation.value == "swigluoai") != self.w13.interleaved:
            order = "take turns" if self.w13.interleaved else "follow each other"
            wanted = f"not what {moe.activation.value} reads"
            raise LayoutError(f"{self.name}: gate's and up's rows {order}, {wanted}")
        if self.biased_factor and parallel.use_ep:
            raise LayoutError(f"{self.name}: biases of NVFP4 experts under expert parallelism")

    @property
    def biased_factor(self) -> bool:
        """Whether w2 has a bias that the kernel would multiply by the global scale as well."""
        return self.w2.biased and self.config.packed.kind.factor

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: Any,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """The padded sizes, as they lie in the folder; LayoutError if vLLM would need others."""
        tp, inner = moe_parallel_config.tp_size, self.w13.padded_n[0]
        hidden, _ = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        found = (hidden_size, intermediate_size_per_partition * tp)
        if found != (self.w13.k, self.w13.n[0]):
            raise LayoutError(f"{self.name}: {self.w13.k} x {self.w13.n[0]}, wanted {found}")
        if hidden not in (hidden_size, self.w13.padded_k):
            raise LayoutError(f"{self.name}: hidden size {self.w13.padded_k}, wanted {hidden}")
        if inner % tp:
            raise LayoutError(f"{self.name}: {inner} columns for {tp} ranks")
        rows = (inner // tp,) * len(self.w13.n)
        require_part(self.config.packed, self.w13, rows, self.w13.padded_k)
        require_part(self.config.packed, self.w2, self.w2.padded_n, rows[0])
        return self.w13.padded_k, rows[0]

    def create_weights(self, layer: Any, num_experts: int, **_: Any) -> None:
        """Nothing yet: a parameter is made when its bytes come, so that none is there twice."""
        layer.num_experts = num_experts
        layer.params_dtype = getattr(torch, self.config.packed.dtype)

    def _rank(self, layer: Any) -> Rank:
        """This rank's experts, by its slots, and which part of them."""
        physical, logical = self.moe.num_experts, self.moe.num_logical_experts
        of = EplbState.build_initial_global_physical_to_logical_map(logical, physical - logical)
        slot = layer._map_global_expert_id_to_local_expert_id
        mine = dict(sorted((slot(e), of[e]) for e in range(physical) if slot(e) >= 0))
        parallel = self.moe.moe_parallel_config
        return Rank(tuple(mine.values()), parallel.tp_size, parallel.tp_rank)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read this rank's part of the fused tensors, and set up the kernel."""
        device = torch.device(self.moe.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        if self.config.reader is None:
            self.config.reader = Reader(device)
        rank, jobs = self._rank(layer), list[Job]()
        for stack in (self.w13, self.w2):
            weight = stack.name.rpartition(".")[2]
            halves = 1 if stack.interleaved else len(stack.n)
            for leaf in LEAVES:
                self._parameter(layer, f"{weight}_{leaf}", rank, halves, device, jobs)
        self.config.reader.read(jobs)
        if self.w2.biased:
            self._bias(layer, rank)
        self.config.left -= 1
        if not self.config.left:
            self.config.reader.close()
            self.config.reader = None
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_nvfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            experts_cls=MarlinExperts,
            backend=NvFp4MoeBackend.MARLIN,
            routing_tables=layer._expert_routing_tables(),
        )
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _parameter(
        self, layer: Any, leaf: str, rank: Rank, halves: int, device: torch.device, jobs: list[Job]
    ) -> None:
        assert self.config.folder is not None
        info = self.config.folder.experts.get(f"{self.name}.{leaf}")
        if info is None:
            return
        mine = part(leaf, info.shape, rank, halves)
        data = torch.empty(mine.shape, dtype=DTYPES[info.dtype], device=device)
        flat = data.view(-1).view(torch.uint8)
        found = pieces(info.start, data.itemsize, info.shape, mine, CHUNK)
        jobs += [Job(info.file, piece, flat) for piece in found]
        if data.dtype == torch.uint8:
            data = data.view(torch.float8_e8m0fnu)
        layer.register_parameter(leaf, nn.Parameter(data, requires_grad=False))

    def _bias(self, layer: Any, rank: Rank) -> None:
        """w2's bias is added once: by the first rank, and by `apply` where the kernel cannot."""
        if rank.at:
            layer.w2_bias.data.zero_()
        elif self.biased_factor:
            layer.w2_bias.data = natural_bias(layer.w2_bias.data)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """The scales and biases as vLLM's own methods hand them to the kernel."""
        packed, moe = self.config.packed, self.moe
        given = {
            "w1_scale": layer.w13_weight_scale,
            "w2_scale": layer.w2_weight_scale,
            "w1_bias": getattr(layer, "w13_bias", None),
            "w2_bias": None if self.biased_factor else getattr(layer, "w2_bias", None),
            "gemm1_alpha": getattr(moe, "swiglu_alpha", None),
            "gemm1_beta": getattr(moe, "swiglu_beta", None),
            "gemm1_clamp_limit": getattr(moe, "swiglu_limit", None),
        }
        if packed.kind.factor:
            return quant.FusedMoEQuantConfig.make(
                weight_dtype="nvfp4",
                g1_alphas=layer.w13_weight_scale_2,
                g2_alphas=layer.w2_weight_scale_2,
                **given,
            )
        if packed.kind.bits == 4:
            return quant.mxfp4_w4a16_moe_quant_config(**given)
        columns = packed.kind.group or 128
        grouped = [1 if packed.kind.group else 128, columns] if self.w13.scales > 1 else None
        return quant.fp8_w8a16_moe_quant_config(block_shape=grouped, **given)

    @property
    def supports_eplb(self) -> bool:
        """Experts may be moved between ranks: every parameter starts with an axis of experts."""
        return True

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        """The layer's output, by the kernel that vLLM's own methods use."""
        assert self.moe_kernel is not None
        out = self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        if not self.biased_factor:
            return out
        weigh = not layer.apply_router_weight_on_input
        shares = topk_weights if weigh else torch.ones_like(topk_weights)
        chosen = shares.new_zeros(len(x), layer.global_num_experts)
        chosen.scatter_add_(1, topk_ids.long(), shares)
        return out + (chosen.to(out.dtype) @ layer.w2_bias)
