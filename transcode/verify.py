"""Prove DST against SRC, both read from disk: everything is made again from SRC and DST's options.

The Report is not believed, but compared with one made now. Packed weights are unpacked and compared
with the source's codes; what has one right answer (scales, scalars, biases, carried tensors,
configs) is compared byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from transcode.catalog import targets, variant
from transcode.checkpoint import Checkpoint, reader
from transcode.compose import Takes, composed
from transcode.config import METHOD, activation_dtype, form_configs, target_config
from transcode.convert import decide, indexes, metadata_of, plan_of
from transcode.degrees import HIGHEST
from transcode.destination import CHUNK, EXPERT_INDEX, MISLEADING
from transcode.errors import CheckpointError, FormatError
from transcode.files import INDEX, PLAN, REPORT, read_json, resolved
from transcode.fix import mended
from transcode.header import TensorInfo, read_header
from transcode.job import Job
from transcode.module import Recognised
from transcode.output import Kind, Output
from transcode.pack import members, padded_codes, pieces, raw_bytes
from transcode.packed_config import quantization_config
from transcode.plan import Plan
from transcode.producer import Form
from transcode.readback import changed
from transcode.recipe import EncodingRecipe
from transcode.recognise import recognise
from transcode.report import COMPLETE, report
from transcode.rewrite_report import rewrite_report
from transcode.rewritten import direct
from transcode.stacks import Options
from transcode.unpacked import opened

UNIFY = ("fold", "rescale", "none", "keep")


def verify(source: Path, target: Path, device: torch.device, takes: Takes = ()) -> Iterator[str]:
    """Every difference, one line each; raises what makes SRC or DST unreadable.

    takes: what `compose` took, where SRC is its base.
    """
    root = resolved(target)
    if not root.is_dir():
        raise CheckpointError(f"{target}: no such folder")
    if not (root / "config.json").is_file():
        raise CheckpointError(f"{target}: no checkpoint: config.json is missing")
    written = read_json(root / "config.json").get("quantization_config")
    checkpoint, recognised = composed(source, takes) if takes else _source(source, root)
    told = written if isinstance(written, dict) else {}
    packed = told.get("quant_method") == METHOD and told.get("layout") != "canonical"
    options = options_of(target, written) if packed else form_options(checkpoint, target)
    plan = plan_of(checkpoint, recognised, options)
    with reader(device) as read:
        job = decide(checkpoint, plan, read, device)
        found = dict[str, TensorInfo]()
        clean = True
        for difference in chain(
            _headers(root, plan, found),
            _tensors(job, found),
            _configs(checkpoint, job, root, found),
            _companions(checkpoint, job, root),
        ):
            clean = False
            yield difference
        if clean and plan.options.form:  # by the rules it is right: are the rules?
            made = Checkpoint.open(root)
            yield from changed(job, made, recognise(made))


def _source(source: Path, root: Path) -> tuple[Checkpoint, Recognised]:
    """SRC as the conversion took it: with what `check --fix` mended first, where it did."""
    done = _read(root / REPORT)
    if not isinstance(done, str) and "taken" in done:
        globs = " ".join(f"--take '{one['glob']}' from OTHER" for one in done["taken"])
        raise FormatError(f"{root} was put together by compose: verify {source} {root} {globs}")
    if isinstance(done, str) or "mended" not in done:
        return opened(source)
    checkpoint, recognised, _ = mended(Checkpoint.open(source))
    return checkpoint, recognised


def options_of(target: Path, written: Any) -> Options:
    """The options that DST was made with, as its config states them."""
    try:
        if written["quant_method"] != METHOD:
            raise FormatError(f"{target}: quant_method is not {METHOD}: not made by this program")
        made = variant(written["layout"], written["variant"])
        if written["layout_version"] != made.version:
            raise FormatError(
                f"{target}: layout version {written['layout_version']}, wanted {made.version}"
            )
        options = written["options"]
        unify, exact, tp = options["unify"], options["exact"], options["tp"]
        recipe = EncodingRecipe.of(options["encodings"])
        dtype, scalars = written["activation_dtype"], options.get("scalars", False)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{target}: its config is not this program's: {error!r}") from None
    if dtype not in made.dtypes or unify not in UNIFY:
        raise FormatError(f"{target}: activation_dtype {dtype!r}, unify {unify!r}: unknown options")
    if type(tp) is not int or not 1 <= tp <= HIGHEST or type(exact) is not bool:
        raise FormatError(f"{target}: tp {tp!r}, exact {exact!r}: unknown options")
    if type(scalars) is not bool:
        raise FormatError(f"{target}: scalars {scalars!r}: unknown options")
    return Options(made, dtype, unify, exact, tp, recipe=recipe, scalars=scalars)


def form_options(checkpoint: Checkpoint, target: Path) -> Options:
    """The options of a rewriting, as its Report states them."""
    done = read_json(target / REPORT) if (target / REPORT).is_file() else {}
    told = done.get("options")
    name = done.get("format")
    if not isinstance(name, str) or name not in targets() or not isinstance(told, dict):
        raise FormatError(f"{target}: no {REPORT} of a conversion: not written by transcode")
    keys = ("fused", "drop_kv_scales", "fill_input_scale", "exact")
    if any(type(told.get(key)) is not bool for key in keys) or told.get("unify") not in UNIFY:
        raise FormatError(f"{target}: {REPORT}: unknown options")
    recipe = EncodingRecipe.of(told.get("encodings", {}))
    fused, drop_kv, fill_input, exact = (bool(told[key]) for key in keys)
    stay, ranks = told.get("codes_stay") is True, told.get("pad_for_tp")
    if type(ranks) is not int or not 1 <= ranks <= HIGHEST:
        raise FormatError(f"{target}: {REPORT}: pad_for_tp {ranks!r}")
    form = Form(*targets()[name], fused, drop_kv, fill_input, stay, ranks)
    dtype = activation_dtype(checkpoint)
    return Options(None, dtype, told["unify"], exact, form=form, recipe=recipe)


def _headers(root: Path, plan: Plan, found: dict[str, TensorInfo]) -> Iterator[str]:
    """Read every shard's header; safetensors' own reader must take it too."""
    stacked = {output.name for output in plan.outputs() if output.stack}
    for path in sorted(root.glob("*.safetensors")):
        try:
            header = read_header(path)
            with safe_open(path, "pt") as file:
                opened = set(file.keys())
        except (CheckpointError, SafetensorError) as error:
            yield str(error) if str(error).startswith(path.name) else f"{path.name}: {error}"
            continue
        packed = any(name in stacked for name in header.tensors)
        if header.metadata != (wanted := metadata_of(packed, plan)):
            yield f"{path.name}: its metadata is {header.metadata}, wanted {wanted}"
        if opened != set(header.tensors):
            yield f"{path.name}: safetensors reads other names than the header has"
        for name, info in header.tensors.items():
            if name in found:
                yield f"{name}: stands in {found[name].file.name} and in {path.name}"
            found[name] = info


def _tensors(job: Job, found: Mapping[str, TensorInfo]) -> Iterator[str]:
    wanted = {output.name: output for output in job.plan.outputs()}
    yield from (f"{name}: missing" for name in wanted if name not in found)
    yield from (f"{name}: not wanted" for name in found if name not in wanted)
    both = [output for output in wanted.values() if output.name in found]
    for output in tqdm(both, desc="verify", unit="tensor", disable=None, leave=False):
        info = found[output.name]
        if (info.dtype, info.shape) != (output.dtype, output.shape):
            yield f"{info}: wanted {output.dtype} {list(output.shape)}"
        elif output.kind is Kind.WEIGHT:
            yield from _codes(output, info, job)
        else:
            yield from _bytes(output, info, job)


def _codes(output: Output, info: TensorInfo, job: Job) -> Iterator[str]:
    """Unpack what is stored and compare with the source's codes and zero padding."""
    stack = output.stack
    assert stack is not None
    some = members(output)
    for e, group in enumerate(stack.groups):
        stored = job.read.tensor(info.entry(e) if stack.fused else info).to(job.device)
        codes = stack.stored(job.plan.options.layout).codes.unpack(stored).cpu()
        wanted = padded_codes(job, output, e)
        for i in some:
            rows = stack.rows(i) if len(some) > 1 else slice(None)
            if not torch.equal(codes[rows], wanted[rows]):
                yield f"{output.name}: {group[i].name}'s codes differ"


def _bytes(output: Output, info: TensorInfo, job: Job) -> Iterator[str]:
    """Compare with what would be written now, piece by piece."""
    wrong = at = 0
    source = direct(output, job)
    if source is not None:
        for ours, theirs in zip(info.chunks(CHUNK), source.chunks(CHUNK), strict=True):
            wrong += int((job.read.tensor(ours) != job.read.tensor(theirs)).sum())
    else:
        for piece in map(raw_bytes, pieces(output, job)):
            wrong += int((job.read.tensor(info.span(at, len(piece))) != piece).sum())
            at += len(piece)
        wrong += abs(info.nbytes - at)
    if wrong:
        yield f"{output.name}: {wrong} of {info.nbytes} bytes differ"


def _configs(
    checkpoint: Checkpoint, job: Job, root: Path, found: Mapping[str, TensorInfo]
) -> Iterator[str]:
    if job.plan.configs:
        yield from _form_configs(checkpoint, job, root, found)
        return
    quantization = quantization_config(checkpoint, job)
    wanted = target_config(checkpoint, quantization)
    written = read_json(root / "config.json")
    mine = written.pop("quantization_config")
    theirs = wanted.pop("quantization_config")
    yield from _entries("config.json", written, wanted)
    yield from _entries("config.json: quantization_config", mine, theirs)
    for name, entries in indexes(job.plan).items():
        yield from _index(root, name, entries, found)
    yield from _report(checkpoint, job, quantization, root)


def _form_configs(
    checkpoint: Checkpoint, job: Job, root: Path, found: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Configs, index and Report of a rewriting."""
    assert job.plan.configs is not None
    for name, wanted in form_configs(checkpoint, job.plan.configs).items():
        written = _read(root / name)
        if isinstance(written, str):
            yield written
        else:
            yield from _entries(name, written, wanted)
    for name, entries in indexes(job.plan).items():
        yield from _index(root, name, entries, found)
    done = _read(root / REPORT)
    if isinstance(done, str):
        yield done
        return
    wanted = rewrite_report(checkpoint, job, [])
    for key in sorted(set(wanted) - {"versions", "options", "companions", "left_out"}):
        yield from _entries(REPORT, {key: done.get(key)}, {key: wanted[key]})


def _report(
    checkpoint: Checkpoint, job: Job, quantization: Mapping[str, Any], root: Path
) -> Iterator[str]:
    """The Report is made again too; versions and the evidence of kernels are its own."""
    done = _read(root / REPORT)
    if isinstance(done, str):
        yield done
        return
    if done.get("status") != COMPLETE:
        yield f"{REPORT}: does not say {COMPLETE!r}"
    wanted = report(checkpoint, job, quantization, [])
    proved = ("layout", "activation_dtype", "tp", "source", "stacks", "scaled", "rounded_biases")
    for key in (*proved, "recoded", "carried", "notes"):
        yield from _entries(REPORT, {key: done.get(key)}, {key: wanted[key]})


def _read(path: Path) -> dict[str, Any] | str:
    """A JSON object, or what is wrong with it."""
    try:
        return read_json(path)
    except CheckpointError as error:
        return str(error) if path.exists() else f"{path.name}: missing"


def _entries(where: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(set(found) | set(wanted)):
        ours, theirs = (
            json.dumps([key in side, side.get(key)], sort_keys=True) for side in (found, wanted)
        )
        if ours != theirs:
            yield f"{where}: {key} differs"


def _index(
    root: Path, name: str, wanted: Mapping[str, Any], found: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Every tensor where the index says, whatever the shards are called."""
    written = _read(root / name)
    if isinstance(written, str):
        yield written
        return
    places, metadata = written.get("weight_map"), written.get("metadata")
    if not isinstance(places, dict) or set(places) != set(wanted["weight_map"]):
        yield f"{name}: names other tensors than it should"
        return
    wrong = [t for t, file in places.items() if t in found and found[t].file.name != file]
    if wrong:
        yield f"{name}: {wrong[0]} lies in {found[wrong[0]].file.name}, not in {places[wrong[0]]}"
    if metadata != wanted["metadata"]:
        yield f"{name}: metadata is {metadata}, wanted {wanted['metadata']}"


def _companions(checkpoint: Checkpoint, job: Job, root: Path) -> Iterator[str]:
    """The source's other files, and nothing else beside the shards."""
    carried = [name for name in checkpoint.companions if name not in MISLEADING]
    for name in carried:
        if not (root / name).is_file():
            yield f"{name}: missing"
        elif (root / name).read_bytes() != (checkpoint.path / name).read_bytes():
            yield f"{name}: differs from the source's"
    configs = job.plan.configs
    written = form_configs(checkpoint, configs) if configs else {"config.json", EXPERT_INDEX}
    known = {*carried, *written, INDEX, REPORT, PLAN}
    for path in sorted(p for p in root.rglob("*") if not p.is_dir() or p.is_symlink()):
        name = path.relative_to(root).as_posix()
        if name not in known and not (path.parent == root and path.suffix == ".safetensors"):
            yield f"{name}: neither in SRC nor written by convert"
