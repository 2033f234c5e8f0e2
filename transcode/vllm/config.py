"""vLLM's side of a packed folder's quantization config: what each layer is served with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from transcode.errors import LayoutError
from transcode.vllm.folder import Folder
from transcode.vllm.modules import How, Modules
from transcode.vllm.packed import Packed, parse
from transcode.vllm.source import kv_scheme, source_config

logger = init_logger("vllm.transcode")


class TranscodeConfig(QuantizationConfig):
    """`quant_method: transcode`.

    folder: the files, seen to be whole.  source: vLLM's own config object of the source.
    reader: made by the first layer of experts that is loaded; left: how many still come.
    kv_cache_scheme: what vLLM's Attention takes a KV cache's dtype from.
    """

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed
        self.modules = Modules(packed)
        self.folder: Folder | None = None
        self.source: Any = None
        self.reader: Any = None
        self.left = 0
        self.kv_cache_scheme = kv_scheme(packed.kv_cache)
        if packed.kv_cache and self.kv_cache_scheme is None:
            logger.warning("KV cache as in the source (%s): use --kv-cache-dtype", packed.kv_cache)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TranscodeConfig:
        """The config of a folder that vLLM can serve; LayoutError or FormatError for any other."""
        return cls(parse(config))

    def get_name(self) -> str:
        """The method's name."""
        return "transcode"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtype that the folder is for: vLLM refuses any other `--dtype`."""
        return [getattr(torch, self.packed.dtype)]

    @classmethod
    def get_min_capability(cls) -> int:
        """That of the oldest GPU with any of the kernels; `maybe_update_config` knows more."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the config stands in config.json."""
        return []

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Look at GPU and folder before any weight is read, and make the source's config."""
        from vllm import envs
        from vllm.platforms import current_platform

        need = (7, 5) if self.packed.dtype == "float16" else (8, 0)
        if not (current_platform.is_cuda() and current_platform.has_device_capability(need)):
            raise LayoutError(
                f"{self.packed.layout} for {self.packed.dtype} wants an NVIDIA GPU of compute "
                f"capability {'.'.join(map(str, need))}, found {current_platform.device_name} "
                f"{current_platform.get_device_capability()}"
            )
        if envs.VLLM_MARLIN_INPUT_DTYPE is not None:
            raise LayoutError(
                f"{self.packed.layout} is for 16-bit activations, and VLLM_MARLIN_INPUT_DTYPE asks "
                f"for {envs.VLLM_MARLIN_INPUT_DTYPE}"
            )
        self.folder = Folder.open(Path(model_name), self.packed)
        self.source = source_config(self.packed, hf_config)
        if self.source is not None:
            self.source.maybe_update_config(model_name, hf_config=hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Learn the model's names of the modules."""
        self.modules.rename(lambda name: next(iter(hf_to_vllm_mapper.apply_list([name])), None))
        if self.source is not None:
            self.source.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        """The source's names of KV scales, which stayed as they were."""
        if self.source is None:
            return super().get_cache_scale_mapper()
        return self.source.get_cache_scale_mapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What serves a layer: our methods, the source's own, or none; LayoutError if none can."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if isinstance(layer, RoutedExperts):
            how, name = self.modules.experts(prefix)
            if how is How.PACKED:
                from transcode.vllm.experts import PackedExperts

                return PackedExperts(self, layer.moe_config, name)
            return self._source_method(layer, prefix) if how is How.CARRIED else None
        if not isinstance(layer, LinearBase | VocabParallelEmbedding):
            return self._source_method(layer, prefix)
        how, stack = self.modules.linear(prefix, self.packed_modules_mapping)
        if stack is not None:
            if not isinstance(layer, LinearBase):
                raise LayoutError(f"{prefix} is packed, and vLLM has no packed embeddings")
            from transcode.vllm.linear import PackedLinear

            assert self.folder is not None
            return PackedLinear(self.packed, stack, self.folder)
        if how is How.CARRIED:
            return self._source_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _source_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if self.source is None:
            return None
        self.source.packed_modules_mapping = self.packed_modules_mapping
        return self.source.get_quant_method(layer, prefix)
