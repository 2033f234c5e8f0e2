"""What a producer's file has to say: how each encoding lies on disk, and how its configs say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from transcode.quant import Encoding

Shape = tuple[int, ...]

FLOATS = ("F32", "BF16", "F16")
E8M0 = ("U8", "F8_E8M0")
"""safetensors' dtypes of scales that are numbers, and of those that are exponents."""


class Role(StrEnum):
    """What a tensor is to its module."""

    CODES = "codes"
    SCALES = "scales"
    GLOBAL = "global_scale"
    INPUT = "input_scale"
    BIAS = "bias"
    SOURCE_GLOBAL = "source_global_scale"  # the global scale word for word as a source had it
    SOURCE_INPUT = "source_input_scale"


@dataclass(frozen=True)
class Leaf:
    """A tensor of a module as it is stored.

    dtypes: safetensors' names; the first is written where the source's is none of them.
    stored: the stored shape of a logical one. Logical are codes `[N, K/2]` or `[N, K]`, scales
    `[N, K/16]`, `[N, K/32]`, `[]` (tensor), `[N]` (channel) or `[ceil(N/n), ceil(K/k)]` (block),
    scalars `[]`.
    divisor: whether the reciprocal of the factor is stored.
    """

    name: str
    dtypes: tuple[str, ...]
    stored: Callable[[Shape], Shape] = lambda shape: shape
    divisor: bool = False


@dataclass(frozen=True)
class Format:
    """One encoding as one producer writes it; `read_only` if we do not write it."""

    producer: str
    encoding: Encoding
    leaves: Mapping[Role, Leaf]
    read_only: bool = False

    @property
    def name(self) -> str:
        """`modelopt-nvfp4`."""
        return f"{self.producer}-{self.encoding}"

    def leaf(self, role: Role) -> str:
        """The leaf name of a role, "" where the format has none."""
        return self.leaves[role].name if role in self.leaves else ""

    def factor(self, stored: Tensor) -> Tensor:
        """Stored global or input scales, float32 of any shape, as factors."""
        return 1.0 / stored if self.leaves[Role.GLOBAL].divisor else stored.clone()


def leaf_names(formats: Iterable[Format]) -> dict[Role, str]:
    """What formats call each role, and a bias."""
    found = {role: leaf.name for f in formats for role, leaf in f.leaves.items()}
    return found | {Role.BIAS: "bias"}


@dataclass(frozen=True)
class Fusion:
    """How a producer stacks the experts of a layer: `<container>.<up><suffix>` and `.<down>...`.

    up, down: stems of the two tensors' names; up holds gate and up.
    suffixes: of each role; a role without one is not stored.
    leaves: what the roles are called where experts stand one by one.
    transposed: `[E, K, N]` instead of `[E, N, K]`, packed along K all the same (a byte holds two
    neighbours along K), block scales likewise.
    interleaved: rows alternate gate, up, gate, up; else gate's come first.
    one_scalar: one scalar `[]` for all experts and both halves; else `[E, 2]` (up) and `[E]`.
    beside: whether they lie beside the container, not in it (`block_sparse_moe.input_linear`).
    tail: axes that codes' last one is cut into, `(16,)` for gpt-oss' blocks of 16 bytes.
    """

    up: str
    down: str
    suffixes: Mapping[Role, str]
    leaves: Mapping[Role, str]
    transposed: bool = False
    interleaved: bool = False
    one_scalar: bool = False
    beside: bool = False
    tail: Shape = ()


@dataclass(frozen=True)
class Group:
    """Quantised modules that a config describes with the same words.

    activations: "none" (16 bit), "dynamic" or "static".
    block: rows and columns of a tile (FP8 block).  scales: the dtype of the stored scales.
    modules: names as in DST, in natural order.
    """

    encoding: Encoding
    activations: str
    block: tuple[int, int] | None
    scales: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """All that a quantization config has to say about DST.

    plain: full names of the linears that are not quantised; of experts none of which is, the
    container's, `x.experts`.
    tables: embeddings that are not quantised.
    containers: `...experts` whose modules are all in one group.
    experts: the leaves of (gate,) up, down of every container of quantised experts.
    powers: whether scales of FP8 tiles have become powers of two.
    kv: the KV cache's scheme, "FP8", another word of the source's, or "".
    source: the source's own config, for what is carried from producer to same producer.
    """

    model_type: str
    groups: tuple[Group, ...]
    plain: tuple[str, ...]
    tables: tuple[str, ...]
    containers: tuple[str, ...]
    experts: Mapping[str, tuple[str, ...]]
    kv: str
    source: Mapping[str, Any]
    powers: bool = False


@dataclass(frozen=True)
class Configs:
    """What is written: `quantization_config` (None: none), hf_quant_config.json, and other keys of
    config.json.

    dtype: the weights' where they are decoded.  sizes: what changes in the text config.
    """

    quantization: dict[str, Any] | None
    dtype: str = ""
    hf_quant: dict[str, Any] | None = None
    top: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Loads:
    """A runtime that loads a target: which version was read, and what of it."""

    runtime: str
    version: str
    kinds: tuple[str, ...]  # "dense", "moe"
    note: str = ""


BOTH = ("dense", "moe")
VLLM, SGLANG = Loads("vllm", "0.33.0", BOTH), Loads("sglang", "0.5.23", BOTH)
VLLM_DENSE = Loads("vllm", "0.33.0", ("dense",))
"""What was read and run (scripts/loads.py). vLLM 0.25.1 agrees."""


@dataclass(frozen=True)
class Target:
    """A word for `--to`.

    encodings: what at least one module must be in; empty for any.
    activations: whether the input scales go along.
    whole: whether all quantised modules have to be in those encodings.
    powers: whether scales of FP8 tiles have to be powers of two.
    """

    name: str
    title: str
    encodings: tuple[Encoding, ...] = ()
    activations: bool = True
    whole: bool = False
    powers: bool = False
    loads_in: tuple[Loads, ...] = ()


@dataclass(frozen=True)
class Producer:
    """Everything about one way to write checkpoints.

    claims: whether a quantization config is this producer's.
    shared: whether other producers use the same leaves, so that only the config can tell.
    fusions: by model type, "" for any other: experts stacked in one tensor.
    stackable: encodings that it stacks; empty for all.
    always_fused: whether experts are never written one by one.
    verbatim: whether it stores scalars word for word, valid or not.
    kv: names and shape of KV scales, `{0}` the attention module, `{1}` k or v; "" if it has none.
    describe: writes the configs; None for a producer that is only read.
    model_types: the only ones that it is for; empty for any.
    """

    name: str
    formats: tuple[Format, ...]
    claims: Callable[[Mapping[str, Any]], bool]
    targets: tuple[Target, ...] = ()
    describe: Callable[[Told], Configs] | None = None
    shared: bool = False
    fusions: Mapping[str, Fusion] = field(default_factory=dict)
    stackable: tuple[Encoding, ...] = ()
    always_fused: bool = False
    verbatim: bool = False
    kv: str = ""
    kv_shape: Shape = ()
    model_types: tuple[str, ...] = ()

    def format(self, encoding: Encoding) -> Format | None:
        """How it writes this encoding, if it does."""
        return next((f for f in self.formats if f.encoding is encoding), None)


@dataclass(frozen=True)
class Form:
    """What a checkpoint is rewritten as.

    fused: stack the experts, where the producer does so for the family.
    drop_kv: leave out KV scales that the target cannot say.
    fill_input: give experts without a valid input scale the largest of their layer's.
    pad_for_tp: how many ranks have to get whole tiles of every expert; 1 pads nothing.
    codes_stay: do not make FP8's scales one, which may round codes again (`check --fix`).
    """

    producer: Producer
    target: Target
    fused: bool = False
    drop_kv: bool = False
    fill_input: bool = False
    codes_stay: bool = False
    pad_for_tp: int = 1

    def asked(self) -> dict[str, bool | int]:
        """What was asked, as the Report and a plan keep it."""
        return {
            "fused": self.fused,
            "drop_kv_scales": self.drop_kv,
            "fill_input_scale": self.fill_input,
            "pad_for_tp": self.pad_for_tp,
            **({"codes_stay": True} if self.codes_stay else {}),
        }

    def quantises_inputs(self, encoding: Encoding) -> bool:
        """Whether input scales of modules in this encoding go along."""
        foreign = encoding not in self.target.encodings
        return bool(self.producer.formats) and (self.target.activations or foreign)
