"""Tensors to modules: what encoding each one is in, from names, dtypes and shapes alone.

A module is all tensors `<module>.<leaf>` with a leaf of LEAVES. What does not fit together is a
Problem: `convert` refuses it, `check` lists it. The config is a cross-check only (`disagreements`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from transcode.catalog import layouts_for, producer, producers
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.fused import expand
from transcode.header import BITS, TensorInfo
from transcode.module import Module, Problem, Recognised
from transcode.names import PROJECTIONS, address
from transcode.producer import FLOATS, Format, Producer, Role
from transcode.quant import Encoding
from transcode.sniff import BLOCK_SCALES, CODES, Tiles, sniff
from transcode.spec import Layout

SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv")
"""Leaves that make no sense without a weight."""

REFUSED = {
    "pre_quant_scale": "the activations must be multiplied by it (AWQ, SVDQuant)",
    "svdquant_lora_a": "a low-rank branch beside the weight (SVDQuant)",
    "weight_zero_point": "an asymmetric encoding",
    "weight_g_idx": "columns in activation order",
    "input_rotation": "the activations must be rotated",
    "prescale": "the activations must be multiplied by it (Quark)",
    "qweight": "GPTQ or AWQ",
}
"""Leaves that change what the weight means, and why no target here can say so."""

QUANTISED = ("U8", "I8", "I32", "F8_E4M3")
"""dtypes of codes."""

LEAVES = {
    *(*CODES, *BLOCK_SCALES, *SCALES, *REFUSED, "bias", "weight_shape", "activation_scale"),
    *("input_scale", "input_global_scale", "input_scale_2"),
    *("source_global_scale", "source_input_scale"),
}

INSTEAD = {
    "gptq": "vLLM and SGLang repack GPTQ themselves",
    "awq": "vLLM and SGLang repack AWQ themselves",
    "bitsandbytes": "start from the unquantised checkpoint",
    "gguf": "use llama.cpp's own tools",
    "hqq": "start from the unquantised checkpoint",
    "auto-round": "export it as compressed-tensors or GPTQ",
    "intel/auto-round": "export it as compressed-tensors or GPTQ",
    "exl2": "use ExLlama's own tools",
    "exl3": "use ExLlama's own tools",
    **dict.fromkeys(
        ("aqlm", "bitnet", "eetq", "fp_quant", "higgs", "quanto", "spqr", "vptq"),
        "start from the unquantised checkpoint",
    ),
    "torchao": "start from the unquantised checkpoint",
}
"""Methods that are not read here, and what to do instead."""


def recognise(checkpoint: Checkpoint) -> Recognised:
    """Every module of the checkpoint and every contradiction among its tensors."""
    config = quantization(checkpoint)[0]
    model_type = str(checkpoint.text_config.get("model_type"))
    tensors, wrong = one_by_one(checkpoint)
    tiles = Tiles.of(config)
    problems = [Problem(where, message) for where, message in wrong.items()]
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in LEAVES and module:
            parts.setdefault(module, {})[leaf] = info
        elif leaf in SCALES or leaf in REFUSED or leaf == "weight_packed":
            problems.append(Problem(str(info), "belongs to no module"))
        elif reason := _fused(info):
            problems.append(Problem(str(info), reason))
    modules = dict[str, Module]()
    for name, leaves in parts.items():
        try:
            module_ = _module(name, leaves, config, model_type, tiles)
        except FormatError as error:
            problems.append(Problem(name, str(error)))
        else:
            if module_:
                modules[name] = module_
    problems += [*_twins(modules), *_misordered(config)]
    return Recognised(modules, tuple(problems))


def one_by_one(checkpoint: Checkpoint) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors with stacked experts taken apart (fused.py), and why some could not be."""
    names = stacked_names(quantization(checkpoint)[0])
    model_type = str(checkpoint.text_config.get("model_type"))
    hidden = checkpoint.text_config.get("hidden_size")
    width = hidden if isinstance(hidden, int) else 0
    return expand(checkpoint.tensors, producers(), model_type, names, width)


EXPERT = ("gate", "up", "down")


def stacked_names(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The projections' leaves by container, which our canonical form keeps in its config."""
    names = config.get("experts")
    if config.get("quant_method") != "transcode" or not isinstance(names, dict):
        return {}
    return {
        container: tuple(leaves)
        for container, leaves in names.items()
        if isinstance(leaves, list)
        and all(isinstance(leaf, str) for leaf in leaves)
        and tuple(PROJECTIONS.get(leaf) for leaf in leaves) in (EXPERT, EXPERT[1:])
    }


def _misordered(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Containers of our canonical form whose projections are listed in another order."""
    names = config.get("experts") if config.get("quant_method") == "transcode" else None
    for container, leaves in names.items() if isinstance(names, dict) else ():
        if not isinstance(leaves, list):
            continue  # read as if nothing were said
        told = [PROJECTIONS.get(leaf) for leaf in leaves if isinstance(leaf, str)]
        if sorted(filter(None, told)) == sorted(EXPERT) and tuple(told) != EXPERT:
            wanted = ", ".join(EXPERT)
            yield Problem(container, f"the config lists {', '.join(leaves)}, wanted {wanted}")


def _claims(producer: Producer, config: Mapping[str, Any], model_type: str) -> bool:
    return producer.claims(config) and model_type in (producer.model_types or (model_type,))


def _twins(modules: Mapping[str, Module]) -> Iterator[Problem]:
    """Experts' projections under two names: `experts.1.`, `experts.01.`, w1 beside gate_proj."""
    seen: dict[tuple[str, int, str], str] = {}
    for name in modules:
        where = address(name)
        if where.expert is not None:
            part = where.projection or where.leaf
            first = seen.setdefault((where.parent, where.expert, part), name)
            if first != name:
                yield Problem(name, f"is {part} of expert {where.expert}, as {first} is")


def _fused(info: TensorInfo) -> str:
    if info.name.endswith("_blocks") and info.dtype == "U8":
        return "MXFP4 blocks without what belongs to them"
    if len(info.shape) == 3 and info.dtype in ("U8", "I8", "F8_E4M3"):
        return "stacked quantised experts of a kind that is not known here"
    return ""


def _module(
    name: str,
    leaves: dict[str, TensorInfo],
    config: Mapping[str, Any],
    model_type: str,
    tiles: Tiles,
) -> Module | None:
    if "qweight" in leaves:
        raise FormatError(f"qweight: {REFUSED['qweight']} is not read here")
    weight = next((leaves[leaf] for leaf in CODES if leaf in leaves), None)
    if weight is None:
        if orphans := [leaf for leaf in SCALES if leaf in leaves]:
            raise FormatError(f"{orphans[0]} without a weight")
        return None
    if "weight_packed" in leaves and "weight" in leaves:
        raise FormatError("has both weight and weight_packed")
    quantised = weight.dtype in QUANTISED
    if len(weight.shape) > 2 and quantised:
        raise FormatError(f"{weight}: stacked quantised experts of a kind that is not known here")
    if not quantised:
        if any(leaf in leaves for leaf in SCALES):
            scale = next((leaves[s] for s in BLOCK_SCALES if s in leaves), "second scale")
            raise FormatError(f"{weight} is not quantised, but has a {scale}")
        return Module(name, Encoding.UNQUANTISED, weight.shape, leaves, None)
    found = sniff(leaves, tiles.around(name))
    if Role.GLOBAL in found.parts and (refused := [leaf for leaf in leaves if leaf in REFUSED]):
        raise FormatError(f"{refused[0]} cannot be carried: {REFUSED[refused[0]]}")
    format_ = _format(found.encoding, leaves, config, model_type)
    parts = dict(found.parts)
    for role in (Role.INPUT, Role.SOURCE_GLOBAL, Role.SOURCE_INPUT):
        if format_ and (info := leaves.get(format_.leaf(role))):
            parts[role] = _single(info)
    for leaf in ("input_scale", "activation_scale"):  # whatever the encoding: FP8 blocks, static
        if info := leaves.get(leaf):
            parts.setdefault(Role.INPUT, _single(info))
    if "bias" in leaves:
        if found.shape and leaves["bias"].shape != found.shape[:1]:
            raise FormatError(f"{leaves['bias']}: wanted [{found.shape[0]}]")
        parts[Role.BIAS] = leaves["bias"]
    return Module(name, found.encoding, found.shape, leaves, format_, parts, found.block)


def _single(info: TensorInfo) -> TensorInfo:
    """A scalar in its logical shape; FormatError if it is not one number."""
    if info.dtype not in FLOATS:
        raise FormatError(f"{info}: wanted one of {', '.join(FLOATS)}")
    if info.nbytes * 8 != BITS[info.dtype]:
        raise FormatError(f"{info}: wanted one {info.dtype}")
    return replace(info, shape=())


def _format(
    encoding: Encoding,
    leaves: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    model_type: str,
) -> Format | None:
    """The format with these leaves: of the producer that the config names, else of the first."""
    fitting = [
        (_claims(producer, config, model_type), not producer.shared, format_)
        for producer in producers()
        if (format_ := producer.format(encoding))
        and all(
            leaf.name in leaves
            for role, leaf in format_.leaves.items()
            if role in (Role.CODES, Role.SCALES, Role.GLOBAL)
        )
    ]
    return max(fitting, key=lambda f: f[:2])[2] if fitting else None


def quantization(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The config that describes the quantisation, and where it stands; ({}, "") if none does."""
    places = (
        (checkpoint.config.get("quantization_config"), "config.json"),
        (checkpoint.text_config.get("quantization_config"), "config.json (text_config)"),
        (checkpoint.config.get("compression_config"), "config.json (compression_config)"),
        (checkpoint.hf_quant_config, "hf_quant_config.json"),
    )
    return next(((c, where) for c, where in places if isinstance(c, dict) and c), ({}, ""))


def require_known(checkpoint: Checkpoint, recognised: Recognised) -> None:
    """Raise FormatError for a method that is not read here, or for the first problem."""
    nvfp4 = any(m.encoding is Encoding.NVFP4 for m in recognised.modules.values())
    method = str(quantization(checkpoint)[0].get("quant_method") or "").lower()
    if method in INSTEAD and (recognised.problems or not nvfp4):
        first = f" ({recognised.problems[0].where})" if recognised.problems else ""
        raise FormatError(f"quant_method {method!r} is not read here{first}: {INSTEAD[method]}")
    for key in ("transform_config", "sparsity_config"):
        told = quantization(checkpoint)[0].get(key)
        dense = isinstance(told, dict) and told.get("format") == "dense"
        if told and not dense:
            raise FormatError(f"{key}: the weights are transformed or sparse: not read here")
    recognised.require_sound()


def require_any(checkpoint: Checkpoint, modules: Mapping[str, Module], layout: Layout) -> None:
    """Raise FormatError, naming the method and what was found, unless something can be packed."""
    found = Counter(m.encoding for m in modules.values())
    if any(found[encoding] for encoding in layout.encodings):
        return
    method = str(quantization(checkpoint)[0].get("quant_method") or "").lower()
    kinds = ", ".join(f"{count} {encoding}" for encoding, count in sorted(found.items()))
    said = f" (quant_method {method!r})" if method else ""
    raise FormatError(
        f"no {' or '.join(layout.encodings)} module in the checkpoint{said}; "
        f"found {kinds or 'no weights'}{layouts_for(found)}"
    )


def disagreements(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[str]:
    """Where the config says something else than the tensors; the tensors are believed."""
    config, where = quantization(checkpoint)
    modules = {name: m.was or m for name, m in modules.items()}
    nvfp4 = [m for m in modules.values() if m.encoding in (Encoding.NVFP4, Encoding.NVFP4_32)]
    used = {m.format.name: m.format for m in nvfp4 if m.format}
    if not config:
        if found := sorted({m.format.name for m in modules.values() if m.format}):
            yield f"no quantization config, but the tensors are {', '.join(found)}"
        return
    for name, format_ in sorted(used.items()):
        if not producer(format_.producer).claims(config):
            method = config.get("quant_method")
            yield f"{where} says quant_method {method!r}, the tensors are {name}"
    algorithm = str(config.get("quant_algo") or "").upper()
    if used and algorithm and not any(word in algorithm for word in ("NVFP4", "MIXED")):
        yield f"{where} says quant_algo {algorithm}, the tensors are {', '.join(sorted(used))}"
    ignored = config.get("ignore")
    names = [n for n in ignored if isinstance(n, str)] if isinstance(ignored, list) else []
    packed = [name for name in names if _quantised(modules.get(name))]
    if packed:
        yield f"{where} ignores {len(packed)} modules that are quantised, {packed[0]} among them"


def _quantised(module: Module | None) -> bool:
    return module is not None and module.encoding is not Encoding.UNQUANTISED
