"""`transcode compose`, and the option that says what is taken. Heavy imports stand inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def taken(
    context: click.Context, parameter: click.Parameter, value: tuple[tuple[str, str, str], ...]
) -> tuple[tuple[str, Path], ...]:
    """Globs and folders; a usage error without the word between them."""
    for glob, word, other in value:
        if word.lower() != "from":
            raise click.BadParameter(f"wanted GLOB from OTHER, not {glob!r} {word!r} {other!r}")
    return tuple((glob, Path(other)) for glob, _, other in value)


def take(*, required: bool) -> Callable[[Command], Command]:
    """The option `--take GLOB from OTHER`, which may be repeated."""
    return click.option(
        "--take", "takes", nargs=3, type=str, multiple=True, required=required, callback=taken,
        metavar="GLOB from OTHER",
        help="Tensors of OTHER whose names match, in place of the base's.",
    )  # fmt: skip


def compose(
    dst: Path,
    base: Path,
    takes: tuple[tuple[str, Path], ...],
    target: str | None,
    shard_size: int,
    *,
    lossy: bool,
    overwrite: bool,
    dry_run: bool,
) -> tuple[dict[str, Any], str]:
    """Write DST: its Report, or the plan (`dry_run`), and the same for a terminal."""
    import torch

    from transcode import catalog
    from transcode import convert as line
    from transcode.compose import composed, form_of
    from transcode.destination import guard
    from transcode.dryrun import describe, outline
    from transcode.producer import Form
    from transcode.recipe import EncodingRecipe
    from transcode.rewrite_report import form_table

    forms = catalog.targets()
    if target is not None and target not in forms:
        known = ", ".join(forms)
        raise click.BadParameter(f"no form {target!r}; there are {known}", param_hint="--to")
    for source in (base, *(other for _, other in takes)):
        guard(source, dst, overwrite=overwrite)
    checkpoint, recognised = composed(base, takes)
    form = Form(*forms[target]) if target else form_of(checkpoint, recognised.modules)
    recipe = EncodingRecipe(lossy=lossy)
    ask = line.Ask(None, form=form, shard_size=shard_size, recipe=recipe)
    options = ask.options(checkpoint)
    plan = line.plan_of(checkpoint, recognised, options)
    if dry_run:
        return outline(plan), describe(plan)
    device = torch.device("cpu")
    done = line.convert(base, dst, checkpoint, plan, device, overwrite=overwrite)
    counts = [
        f"taken: {t['glob']}: {t['tensors']} tensors, {t['replaced']} of them in place of the "
        f"base's, {t['dropped']} others of the base left out"
        for t in done["taken"]
    ]
    return done, "\n".join([*counts, form_table(done)])
