"""No quantisation: every weight decoded to float32 and rounded to the nearest BF16.

`<module>.weight` BF16 [N, K]; per expert, or stacked as the family's own BF16 repositories have it
(names.py). What MXFP4, MXFP8 and FP8 with scales that are powers of two mean is exact in BF16; the
product of an E4M3 or E2M1 code and another scale is rounded by at most 2^-8 relative.
"""

from __future__ import annotations

from transcode.producer import SGLANG, VLLM, Configs, Producer, Target, Told


def _describe(told: Told) -> Configs:
    return Configs(None, dtype="bfloat16")


PRODUCERS = (
    Producer(
        name="bf16",
        formats=(),
        claims=lambda config: False,
        describe=_describe,
        targets=(Target("bf16", "dequantised", loads_in=(VLLM, SGLANG)),),
    ),
)
