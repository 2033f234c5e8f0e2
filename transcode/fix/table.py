"""What becomes of `check`'s findings: how they are mended, or why they are refused."""

from __future__ import annotations

INDEX = "the index is written anew from what the shards hold"
LISTS = "the configs are written anew from the tensors"
SCALARS = "one global scale a group: folded into down, else block scales rounded again"
INPUTS = "the largest valid one of the layer's, or 16 bit activations where there is none"
BYTES = "the exponents stand as bytes again"

MENDS = {
    # the index
    "ghosts": INDEX, "strays": INDEX, "moved": INDEX, "total-size": INDEX,
    "shard-not-indexed": INDEX, "loose-weights": INDEX,
    # scalars
    "expert-scales": SCALARS, "group-scales": SCALARS, "group-scales-close": SCALARS,
    "zero-member": "the member's block scales are zero, its global scale is the group's",
    "zero-matrix-nan": "block scales of a matrix of zeros are 0",
    "block-scale-nan": "NaN over zeros is 0",
    "input-scale-missing": INPUTS, "input-scale-invalid": INPUTS, "input-scale-unwanted": LISTS,
    # names and leaves
    "expert-names": "the expert's number stands before the projection",
    "scale-without-codes": "the scale of an unquantised weight is left out",
    "scale-without-weight": "the scale of a head that is tied is left out",
    # exponents
    "e8m0-value-cast": BYTES, "e8m0-as-float": BYTES,
    "e8m0-dtype": "the exponents' bytes stand in the producer's dtype",
    # configs
    "ignored-quantised": LISTS, "unlisted": LISTS, "partly-listed": LISTS, "other-bits": LISTS,
    "config-disagrees": LISTS, "quant-method-null": LISTS, "quant-method-missing": LISTS,
    "nested-fields": LISTS, "nested-algorithm": LISTS, "producer-missing": LISTS,
    "algorithm-missing": LISTS, "algorithm-case": LISTS, "algorithm-unknown": LISTS,
    "layers-missing": LISTS, "hf-quant-config-only": LISTS, "hf-quant-config-stale": LISTS,
    "expert-dtype": LISTS,
    "kv-scheme-missing": "the KV cache is FP8, as its scales are meant",
    "kv-spelling": "KV scales are spelt as the producer spells them",
}  # fmt: skip
"""By the finding's code."""

ORIGINAL = "take the tensor from the original (transcode compose)"

REFUSED = {
    "scale-invalid": ORIGINAL,
    "code-nan": ORIGINAL,
    "exponents-lost": "quantise it again",
    "global-scale-invalid": ORIGINAL,
    "block-scale-negative": ORIGINAL,
    "experts-missing": ORIGINAL,
    "experts-surplus": "the config or the tensors are another model's",
    "expert-order": "not mended by guess",
    "expert-shapes": "not mended by guess",
    "mixed-group": "transcode convert --to bf16 brings a group into one encoding",
}
"""What would go along and be served wrong, and what to do instead."""
