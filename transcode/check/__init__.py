"""Whether a checkpoint loads, where, and what would be served silently wrong.

Headers, configs, scalars and block scales are read; codes only under a scale that is zero or NaN,
unless it is asked for: FP8's may be NaN. Global and input scales are judged of NVFP4 only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transcode import catalog
from transcode.check.config import of_config
from transcode.check.declared import Declared
from transcode.check.findings import LEVELS, Finding, listed, many
from transcode.check.groups import of_groups
from transcode.check.ignore import of_ignore
from transcode.check.kv import of_kv
from transcode.check.modules import of_modules
from transcode.check.order import of_order
from transcode.check.scales import of_scales
from transcode.check.tp import of_tp
from transcode.check.units import draft, units
from transcode.check.v4 import of_v4
from transcode.check.values import Values, groups_of, of_values
from transcode.checkpoint import Checkpoint, reader
from transcode.config import METHOD
from transcode.convert import Ask, plan_for
from transcode.degrees import degrees
from transcode.errors import CheckpointError, FormatError, LayoutError
from transcode.files import INDEX, read_json, weight_map
from transcode.loads import as_it_is
from transcode.module import Module, Recognised
from transcode.names import address, natural
from transcode.plan import Plan
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recognise import recognise
from transcode.stacks import packable

__all__ = ["LEVELS", "Finding", "concerning", "examine", "verdict"]

MARLIN = "marlin-nvfp4"


def examine(src: Path, runtime: str | None, *, codes: bool = False) -> list[Finding]:
    """All findings, or those that concern one runtime, the worst level first.

    codes: whether FP8 codes are read too, which are most of the file.
    Raises CheckpointError for a folder that is no checkpoint at all.
    """
    _is_checkpoint(src)
    try:
        checkpoint = Checkpoint.open(src)
    except CheckpointError as error:
        found = [Finding("FAILS", "unsound", src.resolve().name, str(error))]
    else:
        found = [*_judge(checkpoint, codes=codes)]
    return sorted(concerning(found, runtime), key=lambda f: LEVELS.index(f.level))


def concerning(findings: Sequence[Finding], runtime: str | None) -> list[Finding]:
    """Those that concern a runtime, or all for None."""
    return [f for f in findings if runtime in (None, *f.runtimes) or not f.runtimes]


def verdict(findings: Sequence[Finding], runtime: str | None) -> str:
    """One sentence over all findings."""
    judged, levels = runtime or "vllm and sglang", {f.level for f in findings}
    if any(f.code == "packed" for f in findings):
        return (
            "no runtime loads it yet" if runtime == "sglang" else "vllm loads it with the plug-in"
        )
    if any(f.code == "packed-unserved" for f in findings):
        return "no runtime loads it yet"
    if any(f.code == "canonical" for f in findings):
        return "no runtime loads it: convert it"
    if "FAILS" in levels:
        return "does not load everywhere, see FAILS"
    if "WRONG" in levels:
        return f"loads in {judged}, but is served wrong"
    if any(f.code in ("not-read", "not-judged") for f in findings):
        return "nothing found, but not all of its encodings are judged yet"
    return f"nothing found that keeps {judged} from loading it"


def _is_checkpoint(src: Path) -> None:
    if not src.is_dir():
        raise CheckpointError(f"{src}: no such folder")
    if not any(src.glob("*.safetensors")):
        raise CheckpointError(f"{src}: no checkpoint: no *.safetensors at its top level")
    if not (src / "config.json").is_file():
        raise CheckpointError(f"{src}: no checkpoint: config.json is missing")


def _judge(checkpoint: Checkpoint, *, codes: bool) -> Iterator[Finding]:
    yield from _ghosts(checkpoint)
    declared = Declared.of(checkpoint)
    if catalog.producer("canonical").claims(declared.raw):
        yield from _canonical(checkpoint, declared)
        return
    if declared.raw.get("quant_method") == METHOD:
        yield _packed(declared)
        return
    recognised = recognise(checkpoint)
    for finding in _foreign(checkpoint, declared, recognised, codes=codes):
        yield _placed(finding, recognised.modules)


def _packed(declared: Declared) -> Finding:
    """Our own folder: what is packed for vLLM has a plug-in that serves it."""
    name, variant = declared.raw.get("layout"), declared.raw.get("variant")
    served = (
        "vLLM serves it with the plug-in that `pip install 'checkpoint-transcode[vllm]'` brings"
        if variant == "vllm"
        else "there is a plug-in for vLLM's usual variant only: no runtime loads it yet"
    )
    return Finding(
        "NOTE", "packed" if variant == "vllm" else "packed-unserved", declared.where,
        f"packed by transcode ({name}, variant {variant}): {served}",
    )  # fmt: skip


def _placed(finding: Finding, modules: Mapping[str, Module]) -> Finding:
    """With the stored tensor's name, where an expert's module is a part of stacked ones."""
    module = modules.get(finding.where)
    stored = module.parts[Role.CODES].part_of if module and Role.CODES in module.parts else ""
    return replace(finding, message=f"{finding.message}; stored in {stored}") if stored else finding


def _canonical(checkpoint: Checkpoint, declared: Declared) -> Iterator[Finding]:
    """Our own form: sound or not, and what to do with it."""
    recognised = recognise(checkpoint)
    yield from _index(checkpoint)
    yield from _left_out(checkpoint)
    if problems := recognised.problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield Finding(
            "FAILS", "unsound", problems[0].where,
            f"{problems[0].message}{more}: transcode convert refuses it", (),
        )  # fmt: skip
    counts = Counter(m.encoding for m in recognised.modules.values())
    counts.pop(Encoding.UNQUANTISED, None)
    kinds = ", ".join(f"{count} {encoding}" for encoding, count in sorted(counts.items()))
    yield Finding(
        "NOTE", "canonical", declared.where,
        f"transcode's canonical form ({kinds or 'nothing quantised'}): no runtime loads it; "
        "transcode convert writes it in a form that one loads (see transcode formats)",
    )  # fmt: skip


def _foreign(
    checkpoint: Checkpoint, declared: Declared, recognised: Recognised, *, codes: bool
) -> Iterator[Finding]:
    """All findings of a checkpoint that this program did not write."""
    yield from _index(checkpoint)
    yield from _left_out(checkpoint)
    yield from of_modules(checkpoint, declared, recognised)
    yield from of_config(checkpoint, declared, recognised)
    yield from of_ignore(checkpoint, declared, units(checkpoint, recognised.modules))
    yield from of_order(checkpoint, recognised.modules)
    yield from of_v4(checkpoint, recognised.modules)
    yield from of_tp(checkpoint, recognised.modules)
    yield from _form(checkpoint, recognised)
    plan, refusal = _plan(checkpoint)
    layout = catalog.layout(MARLIN)
    packed = {m.name: m for m in recognised.modules.values() if packable(m, layout)}
    yield from _down_bias(packed)
    with reader() as read:
        yield from of_kv(checkpoint, declared, read)
        ordered = sorted(packed.values(), key=lambda m: natural(m.name))
        values, groups = Values.read(ordered, read), groups_of(checkpoint, packed)
        yield from of_values(checkpoint, values, groups, read)
        yield from of_groups(checkpoint, declared, values, groups, plan, read)
        yield from of_scales(checkpoint, recognised.modules, read, codes=codes)
    if plan is not None:
        fit = ", ".join(map(str, degrees(plan, checkpoint.text_config)))
        yield Finding(
            "NOTE", "tensor-parallel", checkpoint.path.name,
            f"packed for {plan.options.layout.name} it could be cut for TP degrees {fit}",
            (),
        )  # fmt: skip
    elif packed and not recognised.problems:
        yield Finding(
            "NOTE", "not-packable", checkpoint.path.name,
            f"transcode convert --to {MARLIN} refuses it: {refusal}",
        )  # fmt: skip


def _form(checkpoint: Checkpoint, recognised: Recognised) -> Iterator[Finding]:
    """Runtimes that do not load this producer's form of these encodings at all."""
    known = None if recognised.problems else as_it_is(checkpoint, recognised.modules)
    for runtime in ("vllm", "sglang") if known is not None else ():
        if runtime not in {loads.runtime for loads in known or ()}:
            yield Finding(
                "FAILS", "form-not-loaded", checkpoint.path.name,
                f"{runtime} does not load its encodings in this producer's form; any `transcode "
                f"convert --for {runtime}` names the forms that it loads",
                (runtime,),
            )  # fmt: skip


def _down_bias(packed: Mapping[str, Module]) -> Iterator[Finding]:
    """Measured on an H200 with vLLM 0.25.1: `raw * w + bias * g * w` with routing weights w."""
    wheres = [(m, address(m.name)) for m in packed.values() if "bias" in m.leaves]
    biased = [m.name for m, at in wheres if at.expert is not None and at.projection == "down"]
    if biased:
        yield Finding(
            "WRONG", "expert-down-bias", biased[0],
            f"NVFP4 expert with a bias; {many(len(biased), 'matrix')} of this kind: where vLLM's "
            "Marlin MoE kernel applies the routing weights it multiplies the bias by the global "
            "scale too", ("vllm",),
        )  # fmt: skip


def _plan(checkpoint: Checkpoint) -> tuple[Plan | None, str]:
    """What `convert` would pack for Marlin, or why it would not."""
    layout = catalog.layout(MARLIN)
    try:
        return plan_for(checkpoint, Ask(layout).options(checkpoint)), ""
    except (CheckpointError, FormatError, LayoutError) as error:
        return None, str(error)


def _ghosts(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.ghosts:
        yield Finding(
            "FAILS", "ghosts", checkpoint.ghosts[0],
            f"in {INDEX}, but in no shard; {many(len(checkpoint.ghosts), 'tensor')} of this kind: "
            "transcode convert refuses; vLLM and SGLang leave such a weight uninitialised",
        )  # fmt: skip


def _index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors that the index does not name, or seeks elsewhere; a stale total."""
    index = weight_map(checkpoint.path)
    if not index:
        return
    files = set(index.values())
    skipped = [n for n in checkpoint.strays if checkpoint.tensors[n].file.name not in files]
    needed = [n for n in skipped if not draft(n, checkpoint)]
    if skipped:
        shards = sorted({checkpoint.tensors[name].file.name for name in skipped})
        what = f"needed, such as {needed[0]}" if needed else "of the MTP layers only"
        yield Finding(
            "WRONG" if needed else "WEAK", "shard-not-indexed", shards[0],
            f"not in {INDEX}: vLLM and SGLang skip its {many(len(skipped), 'tensor')} "
            f"({what}) without a word",
        )  # fmt: skip
    if strays := [name for name in checkpoint.strays if name not in set(skipped)]:
        yield Finding(
            "WEAK", "strays", strays[0],
            f"in a shard, but not in {INDEX}; {many(len(strays), 'tensor')} of this kind: vLLM and "
            "SGLang load them, a reader that goes by the index does not",
        )  # fmt: skip
    tensors = checkpoint.tensors
    if moved := [n for n, file in index.items() if n in tensors and tensors[n].file.name != file]:
        yield Finding(
            "WEAK", "moved", moved[0],
            f"not in the shard that {INDEX} says; {many(len(moved), 'tensor')} of this kind: vLLM "
            "and SGLang do not mind, a reader that goes by the index fails",
        )  # fmt: skip
    metadata = read_json(checkpoint.path / INDEX).get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in tensors.values())
    if claimed is not None and claimed != total:
        yield Finding(
            "NOTE", "total-size", INDEX, f"total_size is {claimed}, the shards hold {total} bytes"
        )


def _left_out(checkpoint: Checkpoint) -> Iterator[Finding]:
    loose = [
        entry.name
        for entry in checkpoint.left_out
        if entry.name.endswith(".safetensors") and "/" not in entry.name
    ]
    if loose and not weight_map(checkpoint.path):
        yield Finding(
            "WEAK", "loose-weights", loose[0],
            f"{many(len(loose), 'file')} beside the checkpoint, and no index: vLLM and SGLang load "
            "every *.safetensors that they find",
        )  # fmt: skip
    if entries := checkpoint.left_out:
        names = [f"{entry.name} ({entry.reason})" for entry in entries]
        yield Finding(
            "NOTE", "left-out", entries[0].name,
            f"transcode convert leaves out {many(len(entries), 'file')}: {listed(names)}",
        )  # fmt: skip
