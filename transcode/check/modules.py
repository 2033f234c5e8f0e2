"""What the tensors' names, dtypes and shapes tell: orphans, holes, mixed groups, foreign encodings.

Neither runtime checks that every weight of a quantised model was loaded (vLLM's
model_loader/default_loader.py does so for unquantised ones only): what is missing stays
uninitialised memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from transcode.catalog import producers
from transcode.check.declared import Declared
from transcode.check.findings import Finding, listed, many
from transcode.check.units import Unit, draft, units
from transcode.checkpoint import Checkpoint
from transcode.header import TensorInfo
from transcode.module import Module, Problem, Recognised
from transcode.names import address, family, natural
from transcode.quant import Encoding
from transcode.recognise import INSTEAD, LEAVES, REFUSED, SCALES, one_by_one
from transcode.sniff import BLOCK_SCALES, CODES
from transcode.stacks import COUNTS, experts_of

MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
PLAIN = ("F64", "F32", "BF16", "F16")
_TURNED = re.compile(r".+\.experts\.[a-z]\w*\.\d+")
UNCHECKED = "no runtime checks that all of a quantised model was loaded: it stays uninitialised"


def foreign(declared: Declared, recognised: Recognised) -> bool:
    """Whether the config's method is none that `convert` reads, so that little is judged."""
    nvfp4 = any(m.encoding is Encoding.NVFP4 for m in recognised.modules.values())
    if declared.method in INSTEAD:
        return bool(recognised.problems) or not nvfp4
    known = judged(declared) or any(p.claims(declared.raw) for p in producers())
    return not (known or nvfp4)


def judged(declared: Declared) -> bool:
    """Whether it is known here how the runtimes read such a config."""
    return declared.modelopt or declared.compressed or declared.method in ("fp8", "")


def of_modules(
    checkpoint: Checkpoint, declared: Declared, recognised: Recognised
) -> Iterator[Finding]:
    """All findings of this file."""
    modules = recognised.modules
    unread = list[str]()
    if not foreign(declared, recognised):
        yield from _problems(checkpoint, declared, recognised.problems, unread)
        yield from _holes(checkpoint, recognised)
    yield from _silent(checkpoint, declared, recognised, unread)
    yield from _refused(checkpoint, modules)
    yield from _mixed(checkpoint, modules)
    yield from _mtp(checkpoint)


def _problems(
    checkpoint: Checkpoint, declared: Declared, problems: Sequence[Problem], unread: list[str]
) -> Iterator[Finding]:
    """What cannot be one module; encodings that are only not read here go to `unread`."""
    wrong = {p.where: p.message for p in problems}
    parts: dict[str, dict[str, TensorInfo]] = {where: {} for where in wrong}
    tensors, odd = one_by_one(checkpoint)
    lone = {str(t) for n, t in tensors.items() if n.endswith("_blocks") and t.dtype == "U8"}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in parts and leaf in LEAVES:
            parts[module][leaf] = info
    found: dict[tuple[str, str, str], list[str]] = {}
    for where, leaves in parts.items():
        if where in odd:
            kind = "FAILS", "malformed", "a loader expects stacked experts of one shape, each once"
            found.setdefault(kind, []).append(where)
        elif where in lone:
            found.setdefault(("WRONG", "scale-missing", UNCHECKED), []).append(where)
        elif kind_ := _kind(leaves):
            found.setdefault(kind_, []).append(where)
        else:
            unread.append(f"{where}: {wrong[where]}")
    for (level, code, what), places in found.items():
        first = min(places, key=natural)
        yield Finding(
            level, code, first,
            f"{wrong[first]}; {many(len(places), 'module')} in all: {what}",
            ("vllm",) if code == "pre-quant-scale" else ("vllm", "sglang"),
        )  # fmt: skip


def _kind(leaves: Mapping[str, TensorInfo]) -> tuple[str, str, str] | None:
    """(level, code, consequence) of leaves that do not fit together, None if merely not read."""
    weight = next((leaves[leaf] for leaf in CODES if leaf in leaves), None)
    if not leaves or (weight and len(weight.shape) > 2):
        return None
    if refused := [leaf for leaf in leaves if leaf in REFUSED]:
        if "pre_quant_scale" in refused and "weight_scale_2" in leaves:
            what = "vLLM has no place for it (NVFP4_AWQ is not among its algorithms)"
            return "FAILS", "pre-quant-scale", what
        return None
    if weight is None:
        return "WRONG", "scale-without-weight", f"the weight is missing; {UNCHECKED}"
    scaled = [leaf for leaf in (*BLOCK_SCALES, *SCALES) if leaf in leaves]
    if weight.dtype in PLAIN:
        what = "an unquantised weight has another shape or meaning than the scale promises"
        return "FAILS", "scale-without-codes", what
    partner = "weight_global_scale" if "weight_packed" in leaves else "weight_scale_2"
    block = leaves.get("weight_scale")
    halved = (block is None) if partner in scaled else (block and block.dtype == "F8_E4M3")
    if not scaled or (weight.dtype == "U8" and halved):
        what = (
            f"{UNCHECKED} (vLLM 0.33 refuses a dense ModelOpt layer without block scales, "
            "SGLang nothing)"
        )
        return "WRONG", "scale-missing", what
    if not _known(weight, leaves[scaled[0]], partner in scaled):
        return None
    return "FAILS", "malformed", "a loader expects the shapes and dtypes of the encoding"


def _known(weight: TensorInfo, scale: TensorInfo, partner: bool) -> bool:
    """Whether codes with such a scale may be an encoding that is read, and not INT8 or the like."""
    powers = scale.dtype in ("U8", "F8_E8M0")
    if weight.dtype == "U8":
        return partner or powers or scale.dtype == "F8_E4M3"
    return weight.dtype == "F8_E4M3" or (weight.dtype == "I8" and powers)


def _silent(
    checkpoint: Checkpoint, declared: Declared, recognised: Recognised, unread: Sequence[str]
) -> Iterator[Finding]:
    """NOTEs on what `convert` does not read, and on what is read but not judged here."""
    counts = Counter(str(m.encoding) for m in recognised.modules.values())
    counts.pop(str(Encoding.UNQUANTISED), None)
    packable = counts[str(Encoding.NVFP4)]
    kinds = ", ".join(f"{count} {encoding}" for encoding, count in sorted(counts.items()))
    found = f"; found {kinds}" if kinds else ""
    apart = foreign(declared, recognised)
    if apart:
        why = INSTEAD.get(declared.method, "another producer's")
        unread = [f"quant_method {declared.method!r}: {why}"]
    if unread:
        tail = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        yield Finding(
            "NOTE", "not-read", checkpoint.path.name,
            f"transcode convert does not read it: {unread[0]}{tail}{found}",
        )  # fmt: skip
    if apart or (recognised.problems and not counts):
        return
    if packable and not judged(declared):
        why = f"not judged yet: how the runtimes read quant_method {declared.method!r}{found}"
    elif not packable:
        what = "of values other than NVFP4's, only scales that are no numbers are found"
        why = f"not judged yet: {what}{found or '; nothing is quantised'}"
    else:
        return
    yield Finding("NOTE", "not-judged", checkpoint.path.name, why)


def _refused(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Encodings that a runtime refuses, and names that it does not know."""
    wide = [m.name for m in modules.values() if m.encoding is Encoding.NVFP4_32]
    if wide:
        yield Finding(
            "FAILS", "w4a8", min(wide, key=natural),
            f"{many(len(wide), 'module')} in blocks of 32 (ModelOpt's W4A8_NVFP4_FP8), an "
            "algorithm that neither runtime lists; transcode convert --to modelopt-nvfp4 or "
            "compressed-tensors-nvfp4 writes every scale twice, with 16 bit activations",
        )  # fmt: skip
    fused = [
        name
        for name, info in checkpoint.tensors.items()
        if name.endswith("proj_weight_scale") and info.dtype == "F8_E4M3" and len(info.shape) == 3
    ]
    if fused and str(checkpoint.text_config.get("model_type")).startswith("llama4"):
        yield Finding(
            "FAILS", "fused-scales", fused[0],
            f"{many(len(fused), 'fused block scale')}; SGLang's Llama-4 loader takes scalars only "
            "(sgl-project/sglang#35032: `expand(...): the number of sizes provided (2) must be "
            "greater or equal`)",
            ("sglang",),
        )  # fmt: skip
    turned = [name for name in modules if _TURNED.fullmatch(name)]
    if turned:
        yield Finding(
            "FAILS", "expert-names", turned[0],
            f"{many(len(turned), 'module')} with the expert's number after the projection "
            "(ModelOpt 0.43); vLLM's loader does not know the name (vllm-project/vllm#40885); "
            "transcode convert reads both orders and writes the other",
            ("vllm",),
        )  # fmt: skip


def _holes(checkpoint: Checkpoint, recognised: Recognised) -> Iterator[Finding]:
    """Experts and projections that are missing, and more experts than the config counts."""
    config = checkpoint.text_config
    places = [address(problem.where) for problem in recognised.problems]
    broken = {(where.parent, where.expert) for where in places}
    wanted = next((config[key] for key in COUNTS if isinstance(config.get(key), int)), 0)
    missing, surplus = list[str](), list[str]()
    for container, experts in experts_of(recognised.modules).items():
        members = [m for parts in experts.values() for m in parts.values()]
        if all(m.encoding is Encoding.UNQUANTISED for m in members):
            continue
        parts = {key for found in experts.values() for key in found}
        span = min(max(wanted, max(experts) + 1), wanted + 2 * len(experts))
        for e in range(span):
            if (container, e) in broken:
                continue
            if e not in experts:
                missing.append(f"{container}.{e}")
            elif lacks := sorted(parts - set(experts[e])):
                missing.append(f"{container}.{e} ({', '.join(lacks)})")
        if wanted and max(experts) >= wanted:
            surplus.append(container)
    if missing:
        yield Finding(
            "WRONG", "experts-missing", missing[0],
            f"{many(len(missing), 'expert')} missing or incomplete: {listed(missing)}; {UNCHECKED}",
        )  # fmt: skip
    if surplus:
        yield Finding(
            "FAILS", "experts-surplus", surplus[0],
            f"{many(len(surplus), 'layer')} with more experts than the config's {wanted}: a loader "
            "has no place for them",
        )  # fmt: skip


def _mixed(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Layers that a runtime builds as one, of modules in different encodings."""
    known = family(checkpoint.text_config.get("model_type")).model_types
    found: dict[bool, list[Unit]] = {}
    for unit in units(checkpoint, modules):
        if len({m.encoding for m in unit.modules}) > 1:
            found.setdefault(unit.experts, []).append(unit)
    for experts, places in found.items():
        first = min(places, key=lambda unit: natural(unit.name))
        kinds = ", ".join(
            f"{address(m.name).leaf} {m.encoding}"
            for m in {m.encoding: m for m in reversed(first.modules)}.values()
        )
        yield Finding(
            "FAILS" if experts or known else "WEAK", "mixed-group", first.name,
            f"{kinds}; {many(len(places), 'layer')} of this kind: vLLM and SGLang build it as one "
            "layer with one quantisation",
        )  # fmt: skip


def _mtp(checkpoint: Checkpoint) -> Iterator[Finding]:
    """MTP layers that the config declares and the tensors lack, and the reverse."""
    config = checkpoint.text_config
    declared = {k: config[k] for k in MTP_KEYS if isinstance(config.get(k), int) and config[k] > 0}
    present = next((name for name in checkpoint.tensors if draft(name, checkpoint)), "")
    if declared and not present:
        key, count = next(iter(declared.items()))
        yield Finding(
            "WEAK", "mtp-missing", "config.json",
            f"{key} is {count}, but there are no such tensors (older exports drop them): "
            "speculative decoding with them is not to be had; transcode compose takes them from a "
            "repository that has them",
        )  # fmt: skip
    if present and not declared:
        yield Finding(
            "NOTE", "mtp-undeclared", present,
            f"MTP tensors, but none of {listed(MTP_KEYS)} in the config",
        )  # fmt: skip
