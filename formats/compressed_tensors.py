"""NVFP4 as compressed-tensors (llm-compressor) writes it, dense and per expert.

| leaf of `<module>.`   | dtype   | shape     | meaning                                   |
|-----------------------|---------|-----------|-------------------------------------------|
| `weight_packed`       | U8      | [N, K/2]  | codes, the even column in the low nibble  |
| `weight_scale`        | F8_E4M3 | [N, K/16] | block scales, row order                   |
| `weight_global_scale` | F32     | [1]       | the global scale, a DIVISOR: 2688 / amax  |
| `input_global_scale`  | F32     | [1]       | of activations, a divisor; none if W4A16  |

Source: vllm-project/compressed-tensors, src/compressed_tensors/compressors (nvfp4). The factor is
`fp32(1 / divisor)`; decoded weights differ from the producer's `scale / divisor` by at most 1.6e-7
relative, because a reciprocal is rounded. A divisor of +inf stands for a matrix of zeros.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transcode.quant import Encoding
from transcode.spec import Format


def _factor(stored: Tensor) -> Tensor:
    return 1.0 / stored


def _claims(quantization: dict[str, Any]) -> bool:
    method = quantization.get("quant_method")
    written = "nvfp4-pack-quantized" in str(quantization.get("format"))
    return method == "compressed-tensors" or (not method and written)


FORMATS = (
    Format(
        name="compressed-tensors-nvfp4",
        encoding=Encoding.NVFP4,
        codes="weight_packed",
        scales="weight_scale",
        global_scale="weight_global_scale",
        input_scale="input_global_scale",
        factor=_factor,
        claims=_claims,
        title="compressed-tensors NVFP4 (llm-compressor), per expert and dense, W4A4 and W4A16",
    ),
)
