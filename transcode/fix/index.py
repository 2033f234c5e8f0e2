"""Tensors that the index names and no shard holds, where nothing is missing for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transcode.check.units import draft
from transcode.checkpoint import Checkpoint
from transcode.errors import CheckpointError
from transcode.files import INDEX
from transcode.fix.orphans import INPUTS, tied_head
from transcode.recognise import QUANTISED, SCALES
from transcode.sniff import BLOCK_SCALES


def mend(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Without ghosts; the index of a rewriting has what is written. CheckpointError for a ghost
    that the model needs."""
    ghosts = checkpoint.ghosts
    done = [f"{len(ghosts)} entries left out of the index, {ghosts[0]} first"] if ghosts else []
    if needed := [*_needed(checkpoint)]:
        raise CheckpointError(
            f"{needed[0]} stands in {INDEX}, but in no shard ({len(needed)} tensors of this kind): "
            "take it from the original (transcode compose)"
        )
    return replace(checkpoint, ghosts=(), strays=()), done


def _needed(checkpoint: Checkpoint) -> Iterator[str]:
    """Ghosts that something lacks: all but input scales, which are made up, scales of what is not
    quantised, a tied head, and an MTP that is not there at all."""
    drafted = any(draft(name, checkpoint) for name in checkpoint.tensors)
    for name in checkpoint.ghosts:
        module, _, leaf = name.rpartition(".")
        weight = checkpoint.tensors.get(f"{module}.weight")
        plain = weight is not None and weight.dtype not in QUANTISED
        stray = leaf in INPUTS or (plain and leaf in (*SCALES, *BLOCK_SCALES))
        dropped = draft(name, checkpoint) and not drafted
        if not (stray or dropped or tied_head(checkpoint, module)):
            yield name
