"""vLLM's plug-in: serves folders that `transcode convert --to marlin-...` packed.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). Nothing
else of transcode imports this package, and nothing here imports vLLM before that call.
"""

from __future__ import annotations


def register() -> None:
    """Make `quant_method: transcode` known to vLLM; calling it again changes nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from transcode.vllm.config import TranscodeConfig

    register_quantization_config("transcode")(TranscodeConfig)
