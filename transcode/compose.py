"""A checkpoint put together from several: tensors of others, by glob, in place of the base's.

`composed` gives one checkpoint with all modules, each recognised by its own config; the rest is the
straight line of a rewriting, which renames what another producer wrote and makes configs and lists
from what is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transcode.activations import activations
from transcode.catalog import targets
from transcode.checkpoint import Borrowed, Checkpoint
from transcode.chosen import joined
from transcode.errors import FormatError
from transcode.fix.own import own_form
from transcode.groups import group
from transcode.module import Module, Recognised
from transcode.plan import consumed
from transcode.producer import Form
from transcode.quant import Encoding
from transcode.recognise import quantization, recognise, require_known
from transcode.unpacked import packed_config

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
"""Config keys that say how many layers predict further tokens."""

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Takes = Sequence[tuple[str, Path]]
"""`(GLOB, OTHER)`."""


def composed(base: Path, takes: Takes) -> tuple[Checkpoint, Recognised]:
    """The base with what is taken in place of its own.

    Raises FormatError for a glob that takes nothing, or half a module, or what does not fit.
    """
    checkpoint, recognised = _plainly(base)
    tensors, modules = dict(checkpoint.tensors), dict(recognised.modules)
    config, taken, mine = checkpoint.config, list[Borrowed](), dict[str, str]()
    for glob, path in takes:
        other, found = _plainly(path)
        names = {name for name in other.tensors if fnmatchcase(name, glob)}
        if not names:
            raise FormatError(f"--take {glob}: {path} has no tensor of such a name")
        if twice := next((name for name in names if name in mine), ""):
            raise FormatError(f"{twice} is taken twice, by {mine[twice]} and by {glob}")
        mine |= dict.fromkeys(names, glob)
        gone = {name for name in checkpoint.tensors if fnmatchcase(name, glob)}
        lost = _whole(recognised.modules, gone)
        new = _whole(found.modules, names)
        _require_fit(checkpoint, recognised.modules, other, new, names)
        _require_heads(checkpoint, other, lost, names)
        _require_one_kind_of_scales(checkpoint, recognised.modules, other, new)
        modules = {n: m for n, m in modules.items() if n not in lost}
        if beside := min(modules.keys() & new.keys(), default=""):
            raise FormatError(f"{beside} is taken, and the base keeps its own beside: widen GLOB")
        modules |= new
        tensors = {n: t for n, t in tensors.items() if n not in gone}
        tensors |= {name: other.tensors[name] for name in names}
        config = _counted(config, checkpoint, other, names)
        shards = tuple(s for s in other.shards if names & {*s.header.tensors})
        word = activations(other)
        words = {n: word(m) for n, m in new.items() if m.format is not None}
        counts = len(names), len(gone & names), len(gone - names)
        taken.append(Borrowed(glob, *counts, shards, words))
        for row in joined(checkpoint, modules):
            kinds = {m.encoding for m in row}
            if len(kinds) > 1 and any(m.name in new for m in row):
                raise FormatError(
                    f"{row[0].name} and what runtimes join with it would be {' and '.join(kinds)}: "
                    "they must be in one encoding"
                )
    made = replace(checkpoint, config=config, tensors=tensors, taken=tuple(taken))
    return made, Recognised(modules, ())


def form_of(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Form:
    """The form that its own quantised modules have; else the one that most of those that were taken
    have; the plain one if none is quantised."""
    quantised = {n: m for n, m in modules.items() if m.format is not None}
    if not quantised:
        return Form(*targets()["bf16"])
    taken = {name for one in checkpoint.taken for name in one.activations}
    own = {n: m for n, m in quantised.items() if n not in taken}
    if not own:
        names = Counter(m.written.producer for m in quantised.values())
        [(most, _)] = names.most_common(1)
        own = {n: m for n, m in quantised.items() if m.written.producer == most}
    return replace(own_form(checkpoint, own), fill_input=False, codes_stay=False)


def _plainly(path: Path) -> tuple[Checkpoint, Recognised]:
    """A checkpoint that is sound and not packed, and its modules."""
    checkpoint = Checkpoint.open(path)
    if packed_config(checkpoint.config) is not None:
        raise FormatError(f"{path} is packed for a kernel: convert it back to a form first")
    recognised = recognise(checkpoint)
    checkpoint.require_sound()
    require_known(checkpoint, recognised)
    return checkpoint, recognised


def _whole(modules: Mapping[str, Module], names: Collection[str]) -> dict[str, Module]:
    """The modules whose tensors are among the names; FormatError for one that is so in part."""
    found = dict[str, Module]()
    for name, module in modules.items():
        stored = {t.stored_name for t in (*consumed(module), *module.leaves.values())}
        inside = stored & {*names}
        if inside and inside != stored:
            missing = min(stored - inside)
            raise FormatError(f"{name}: a glob takes a part of it only, {missing} is not in it")
        if inside:
            found[name] = module
    return found


def _require_heads(
    base: Checkpoint, other: Checkpoint, lost: Mapping[str, Module], names: Collection[str]
) -> None:
    """Raise FormatError where a module of the model itself would be gone, or a head is taken that
    the config ties to the embeddings."""
    layers = base.text_config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else 0
    there = {name.rpartition(".")[0] for name in names}
    for name in lost:
        if name not in there and group(name, count) != "mtp":
            raise FormatError(f"{name} would be gone: the base has it, and {other.path} does not")
    tied = base.text_config.get("tie_word_embeddings", base.config.get("tie_word_embeddings"))
    if tied and (head := next((n for n in there if group(n, count) == "lm_head"), "")):
        raise FormatError(
            f"{head} is taken, and the base's config ties it to the embeddings: no runtime reads it"
        )


def _require_one_kind_of_scales(
    base: Checkpoint, own: Mapping[str, Module], other: Checkpoint, new: Mapping[str, Module]
) -> None:
    """Raise FormatError where FP8 tiles with float scales come among those that the config says
    are powers of two."""

    def tiles(modules: Mapping[str, Module]) -> list[str]:
        return [n for n, m in modules.items() if m.encoding is Encoding.FP8_BLOCK]

    powers = [quantization(one)[0].get("scale_fmt") == "ue8m0" for one in (base, other)]
    if tiles(own) and tiles(new) and powers == [True, False]:
        raise FormatError(
            f"{tiles(new)[0]} has float scales, and the base's config says scale_fmt ue8m0: "
            "`convert --to deepseek-fp8-ue8m0 --lossy` makes such of it"
        )


def _require_fit(
    base: Checkpoint,
    own: Mapping[str, Module],
    other: Checkpoint,
    new: Mapping[str, Module],
    names: Collection[str],
) -> None:
    """Raise FormatError for a shape that is not the base's own, its sibling layers', or the
    model's."""
    mine = {n: m.shape for n, m in own.items() if m.shape}
    mine |= {n: t.shape for n, t in base.tensors.items() if n.rpartition(".")[0] not in own}
    theirs = {n: m.shape for n, m in new.items() if m.shape}
    theirs |= {n: other.tensors[n].shape for n in names if n.rpartition(".")[0] not in new}
    siblings: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in mine.items():
        siblings.setdefault(_NUMBER.sub("#", name), set()).add(shape)
    hidden = base.text_config.get("hidden_size")
    for name, shape in theirs.items():
        known = {mine[name]} if name in mine else siblings.get(_NUMBER.sub("#", name), set())
        if known and shape not in known:
            wanted = " or ".join(str(list(k)) for k in sorted(known))
            raise FormatError(f"{name} is {list(shape)}, the base has {wanted} there")
        fits = not isinstance(hidden, int) or any(n % hidden == 0 for n in shape)
        if not known and name in new and len(shape) == 2 and not fits:
            raise FormatError(f"{name} is {list(shape)}, and the base's hidden_size is {hidden}")


def _counted(
    config: Mapping[str, Any], base: Checkpoint, other: Checkpoint, names: Collection[str]
) -> dict[str, Any]:
    """The config with the number of layers that predict further tokens, if such are taken: as the
    other's config has it, else the number of those that are there."""
    layers = base.text_config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else 0
    drafts = {m[0] for n in names if group(n.rpartition(".")[0], count) == "mtp"
              for m in [_NUMBER.findall(n)] if m}  # fmt: skip
    numbered = sorted({int(m[1]) for n in names if (m := _LAYER.match(n)) and int(m[1]) >= count})
    if count and numbered and numbered != list(range(count, count + len(numbered))):
        raise FormatError(
            f"layer {numbered[-1]} is taken, and the base has {count} layers: those that predict "
            f"further tokens are counted from {count} on"
        )
    if not any(group(n.rpartition(".")[0], count) == "mtp" for n in names):
        return dict(config)
    told = {k: v for k in COUNTS if isinstance(v := other.text_config.get(k), int)}
    if not told:
        told = {k: len(drafts) or 1 for k in COUNTS if k in base.text_config}
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": {**text, **told}}
    return {**config, **told}
