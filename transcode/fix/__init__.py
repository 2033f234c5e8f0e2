"""`check --fix`: a checkpoint written anew in its own form, with what can be mended mended.

Configs, lists and the index of a rewriting are made from the tensors that are there, input scales
are filled in, and scalars that runtimes join are unified: that mends most of what `check` finds.
What the readers would refuse is mended before, by one small function each: `mend(checkpoint)` gives
the checkpoint as it should be, and what was done. No code changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transcode import rewrite
from transcode.check import Finding, concerning, examine
from transcode.checkpoint import Checkpoint
from transcode.config import activation_dtype
from transcode.convert import convert
from transcode.destination import guard
from transcode.errors import FormatError
from transcode.fix import exponents, index, kv, names, orphans
from transcode.fix.own import own_form
from transcode.fix.table import MENDS, REFUSED
from transcode.module import Recognised
from transcode.recognise import recognise, require_known
from transcode.report import record
from transcode.stacks import Options

STEPS = (index.mend, names.mend, orphans.mend, exponents.mend, kv.mend)
"""In this order: the index before what it names, names before modules are known by them."""


@dataclass(frozen=True)
class Fixed:
    """What came of it.

    mended: findings of SRC that DST has not.  steps: what was done before the rewriting.
    remaining: the findings of DST, or of SRC where nothing was `written`.
    """

    mended: tuple[Finding, ...]
    steps: tuple[str, ...]
    remaining: tuple[Finding, ...]
    written: bool

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What was mended, as the Report has it."""
        found = [f.as_dict() | {"how": MENDS[f.code]} for f in self.mended]
        return [*found, *({"how": step} for step in self.steps)]


def fix(src: Path, dst: Path, runtime: str | None, *, overwrite: bool) -> Fixed:
    """Write DST and check it; nothing is written where nothing can be mended.

    Raises CheckpointError for a corrupt shard or a tensor that is missing, FormatError for what
    would be served wrong and cannot be mended.
    """
    guard(src, dst, overwrite=overwrite)
    opened = Checkpoint.open(src)
    before = examine(src, None, codes=True)
    _refuse(before)
    if not any(f.code in MENDS and f.level != "NOTE" for f in before):
        return Fixed((), (), tuple(concerning(before, runtime)), written=False)
    checkpoint, recognised, steps = mended(opened)
    form = own_form(checkpoint, recognised.modules)
    options = Options(None, activation_dtype(checkpoint), "fold", form=form)
    plan = rewrite.make(checkpoint, recognised.modules, options)
    convert(src, dst, checkpoint, plan, torch.device("cpu"), overwrite=overwrite)
    after = examine(dst, None, codes=True)
    remaining = tuple(concerning(after, runtime))
    done = Fixed(tuple(_gone(before, after)), steps, remaining, written=True)
    record(dst, "mended", done.entries)
    return done


def mended(checkpoint: Checkpoint) -> tuple[Checkpoint, Recognised, tuple[str, ...]]:
    """The checkpoint as the readers can take it, its modules, and what was done for that.

    Raises FormatError or CheckpointError for what cannot be mended.
    """
    done = list[str]()
    for mend in STEPS:
        checkpoint, steps = mend(checkpoint)
        done += steps
    recognised = recognise(checkpoint)
    checkpoint.require_sound()
    require_known(checkpoint, recognised)
    return checkpoint, recognised, tuple(done)


def told(done: Fixed, dst: Path) -> str:
    """What was mended, one line each, for a terminal."""
    lines = [f"MENDED {f.where}: {f.message}: {MENDS[f.code]}" for f in done.mended]
    lines += [f"MENDED {step}" for step in done.steps]
    return "\n".join(lines) if done.written else f"nothing to mend; {dst} is not written"


def _refuse(findings: Sequence[Finding]) -> None:
    """Raise FormatError for what would go along and be served wrong."""
    for finding in findings:
        if finding.code in REFUSED and finding.level in ("WRONG", "FAILS"):
            raise FormatError(f"{finding.where}: {finding.message}; {REFUSED[finding.code]}")


def _gone(before: Sequence[Finding], after: Sequence[Finding]) -> Iterator[Finding]:
    """The findings that are there no more."""
    left = {(f.level, f.code) for f in after}
    return (f for f in before if f.code in MENDS and (f.level, f.code) not in left)
