"""NVFP4 as NVIDIA ModelOpt writes it, dense and per expert.

| leaf of `<module>.` | dtype   | shape     | meaning                                              |
|---------------------|---------|-----------|------------------------------------------------------|
| `weight`            | U8      | [N, K/2]  | codes, the even column in the low nibble             |
| `weight_scale`      | F8_E4M3 | [N, K/16] | block scales, row order                              |
| `weight_scale_2`    | F32     | []        | the global scale, a factor: amax / (6 * 448)         |
| `input_scale`       | F32     | []        | the activations' scale, a factor; absent where W4A16 |

Source: NVIDIA/Model-Optimizer, modelopt/torch/export/unified_export_hf.py and quant_utils.py.
NVIDIA's DeepSeek-V4 repack uses the same leaves under `quant_method: fp8` with
`moe_quant_algo: NVFP4`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transcode.quant import Encoding
from transcode.spec import Format


def _factor(stored: Tensor) -> Tensor:
    return stored.clone()


def _claims(quantization: dict[str, Any]) -> bool:
    method = str(quantization.get("quant_method") or "").lower()
    producer = quantization.get("producer")
    named = producer.get("name") if isinstance(producer, dict) else None
    algorithms = (quantization.get("quant_algo"), quantization.get("moe_quant_algo"))
    nvfp4 = any("NVFP4" in str(name).upper() for name in algorithms)
    says = named == "modelopt" or "quantization" in quantization or nvfp4
    return method.startswith("modelopt") or (method in ("", "fp8") and says)


FORMATS = (
    Format(
        name="modelopt-nvfp4",
        encoding=Encoding.NVFP4,
        codes="weight",
        scales="weight_scale",
        global_scale="weight_scale_2",
        input_scale="input_scale",
        factor=_factor,
        claims=_claims,
        title="NVIDIA ModelOpt NVFP4, per expert and dense, W4A4 and W4A16",
    ),
)
