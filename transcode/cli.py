"""The command line: arguments in, one call, a message out. Heavy imports stand inside commands.

Exit codes: 0 done and proved; 1 cannot; 2 usage; 3 a difference, or WRONG or FAILS; 4 refused
because it would lose something; 130 interrupted. Results go to stdout, progress and warnings to
stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from transcode import __version__
from transcode.compose_command import take
from transcode.errors import TranscodeError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Size(click.ParamType[int]):
    """A size such as 5GB or 500MB, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size; a usage error if it is none."""
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("B")
        number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "")
        try:
            size = int(float(number) * UNITS[unit])
        except (ValueError, OverflowError):
            size = 0
        if size < 1:
            self.fail(f"{value!r} is no size such as 5GB", param, ctx)
        return size


class Scale(click.ParamType[float | Path | str]):
    """A positive number, a file, or `none`."""

    name = "number|file|none"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | Path | str:
        """Parse it; a usage error if it is none of them."""
        from transcode.recipe import valid

        if value == "none":
            return "none"
        try:
            number = float(value)
        except ValueError:
            with suppress(OSError, ValueError):  # a name that no disk takes
                if Path(value).is_file():
                    return Path(value)
            number = 0.0
        if not valid(number):
            self.fail(f"{value!r} is no positive number that float32 holds, no file and not none",
                      param, ctx)  # fmt: skip
        return number


@contextmanager
def reporting(as_json: bool, interrupted: str = "interrupted") -> Iterator[None]:
    """Turn every error that is a user's into one line and an exit code."""
    try:
        yield
    except TranscodeError as error:
        _fail(str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        _fail(interrupted, 130, as_json)
    except OSError as error:
        _fail(f"{error.filename or 'I/O'}: {error.strerror or error}", 1, as_json)


def clean(line: str) -> str:
    """A line without control characters and what no terminal can print."""
    plain = line.encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() else " " for c in plain)


def say(text: str) -> None:
    """Print a result, line by line as `clean` has it."""
    click.echo("\n".join(map(clean, text.splitlines())))


def one_line(message: str) -> str:
    """A message on one line, one space between words."""
    return " ".join(clean(message).split())


def _fail(message: str, code: int, as_json: bool) -> None:
    click.echo(f"transcode: {one_line(message)}", err=True)
    if as_json:
        click.echo(json.dumps({"error": message, "exit_code": code}, indent=2))
    sys.exit(code)


SRC = click.argument("src", type=click.Path(path_type=Path))
DST = click.argument("dst", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
DEVICE = click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Where weights are packed.",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="transcode")
def main() -> None:
    """Rewrite quantised LLM checkpoints, offline and proved: as other producers' or for kernels."""


@main.command()
@click.option(
    "--to", "target", required=True, metavar="TARGET",
    help="A kernel's layout or another form: see `transcode layouts`, `transcode formats`.",
)  # fmt: skip
@SRC
@DST
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="The activations' dtype.  [default: the config's]",
)
@DEVICE
@click.option(
    "--unify",
    type=click.Choice(["fold", "rescale", "none"]),
    help="What to do where a fusion group's global scales differ.  [default: fold for a layout; "
    "none, which keeps them, for a form]",
)
@click.option("--exact", is_flag=True, help="Refuse (exit 4) to round or flush any scale.")
@click.option("--lossy", is_flag=True, help="Allow a change of encoding to change values.")
@click.option(
    "--input-scale",
    type=Scale(),
    help="Form: the activations' scale of what becomes NVFP4 or FP8: a number, a FILE with "
    "`<module>.input_scale` (safetensors) or {module or glob: number} (JSON), or `none` for 16-bit "
    "activations.  [default: what the source has, else 1.0 for NVFP4]",
)
@click.option(
    "--input-scale-per-expert",
    is_flag=True,
    help="Form: keep each expert's, instead of the largest of a layer's projection.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="GLOB=ENCODING|keep",
    help="What modules become; first match wins.  GLOB may be a group: experts, shared_experts, "
    "attention, mlp, lm_head, embeddings, mtp, vision.",
)
@click.option(
    "--recipe",
    "recipe_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='A TOML file with rules = ["experts=nvfp4", ...], after those of --rule.',
)
@click.option(
    "--scale-search",
    type=click.Choice(["mse", "max"]),
    default="mse",
    show_default=True,
    help="How block scales are chosen where values are rounded to 4 bits.",
)
@click.option(
    "--tp",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Pad experts so that this many ranks, and its divisors, get whole tiles.",
)
@click.option("--fused", is_flag=True, help="Form: stack the experts, as the family has it.")
@click.option("--drop-kv-scales", is_flag=True, help="Form: leave out the KV cache's scales.")
@click.option(
    "--fill-input-scale",
    is_flag=True,
    help="Form: give experts without a valid input scale the largest of their layer's.",
)
@click.option(
    "--pad-for-tp",
    type=click.IntRange(2, 64),
    help="Form: pad experts by zeros, and change the config's size, so that N ranks share them.",
)
@click.option(
    "--for",
    "runtime",
    type=click.Choice(["vllm", "sglang", "flashinfer"]),
    help="Layout: this runtime's variant, with the scalars that it works out.  Form: refuse what "
    "this runtime does not load.",
)
@click.option(
    "--activations",
    type=click.Choice(["16-bit", "fp8", "fp4"]),
    help="Layout: the activations that the kernel takes.  [default: the layout's first]",
)
@click.option(
    "--variant", help="Layout: one of its variants, by the name that `transcode layouts` gives."
)
@click.option("--dry-run", is_flag=True, help="Print the plan, made from headers; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST once the new one is complete.")
@click.option(
    "--shard-size", type=Size(), default="5GB", show_default=True, help="The largest file."
)
@JSON
def convert(
    target: str,
    src: Path,
    dst: Path,
    dtype: str | None,
    device: str,
    unify: str | None,
    exact: bool,
    lossy: bool,
    input_scale: float | Path | str | None,
    input_scale_per_expert: bool,
    rules: tuple[str, ...],
    recipe_file: Path | None,
    scale_search: str,
    tp: int,
    fused: bool,
    drop_kv_scales: bool,
    fill_input_scale: bool,
    pad_for_tp: int | None,
    runtime: str | None,
    activations: str | None,
    variant: str | None,
    dry_run: bool,
    overwrite: bool,
    shard_size: int,
    as_json: bool,
) -> None:
    """Rewrite SRC as another producer's, or pack it for a kernel."""
    with reporting(as_json, "interrupted; the same command goes on where this one stopped"):
        from transcode import catalog, recipe
        from transcode import convert as line
        from transcode.destination import guard
        from transcode.dryrun import describe, outline
        from transcode.loads import require_loads
        from transcode.producer import Form
        from transcode.report import table, unused
        from transcode.rewrite_report import form_table

        layouts, forms = catalog.layouts(), catalog.targets()
        if target not in layouts and target not in forms:
            known = ", ".join([*layouts, *forms])
            if any(f.name == target for p in catalog.producers() for f in p.formats):
                raise click.BadParameter(f"{target!r} is only read", param_hint="--to")
            raise click.BadParameter(f"no {target!r}; there are {known}", param_hint="--to")
        form = None
        if target in forms:
            form = Form(
                *forms[target], fused, drop_kv_scales, fill_input_scale, pad_for_tp=pad_for_tp or 1
            )
            if dtype or tp > 1 or activations or variant:
                raise click.UsageError(
                    "--dtype, --tp, --activations and --variant are for kernels' layouts"
                )
            if runtime == "flashinfer":
                raise click.UsageError("--for flashinfer is for kernels' layouts")
        elif pad_for_tp:
            raise click.UsageError("--pad-for-tp is for forms; layouts have --tp")
        elif fused or drop_kv_scales or fill_input_scale:
            raise click.UsageError("--fused, --drop-kv-scales and --fill-input-scale are for forms")
        layout = None if form else catalog.layout(target, runtime, activations, variant)
        given = recipe.InputScales.given(input_scale, per_expert=input_scale_per_expert)
        asked = recipe.EncodingRecipe(
            recipe.rules_of(rules, recipe_file), scale_search, lossy, given
        )
        scalars = layout is not None and runtime is not None and bool(layout.scalars)
        ask = line.Ask(layout, dtype, unify or "", exact, tp, shard_size, form, asked, scalars)
        guard(src, dst, overwrite=overwrite)
        checkpoint, plan = line.prepare(src, ask)
        if form:
            model_type = checkpoint.text_config.get("model_type")
            require_loads(form, plan.modules, plan.groups, model_type, runtime)
        if dry_run:
            for note in unused(checkpoint, plan):
                click.echo(f"transcode: {one_line(note)}", err=True)
            say(json.dumps(outline(plan), indent=2) if as_json else describe(plan))
            return
        done = line.convert(
            src, dst, checkpoint, plan, line.device_for(device), overwrite=overwrite
        )
        for note in done["notes"]:
            click.echo(f"transcode: {one_line(note)}", err=True)
        show = form_table if form else table
        say(json.dumps(done, indent=2) if as_json else show(done))


@main.command()
@DST
@click.option(
    "--base",
    required=True,
    type=click.Path(path_type=Path),
    help="What DST is, but for what is taken.",
)
@take(required=True)
@click.option("--to", "target", metavar="TARGET", help="Another form.  [default: the base's own]")
@click.option("--lossy", is_flag=True, help="Allow a change of encoding to change values.")
@click.option("--dry-run", is_flag=True, help="Print the plan, made from headers; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST once the new one is complete.")
@click.option(
    "--shard-size", type=Size(), default="5GB", show_default=True, help="The largest file."
)
@JSON
def compose(
    dst: Path,
    base: Path,
    takes: tuple[tuple[str, Path], ...],
    target: str | None,
    lossy: bool,
    dry_run: bool,
    overwrite: bool,
    shard_size: int,
    as_json: bool,
) -> None:
    """Put DST together from a base and tensors of others: MTP added back, a draft swapped in."""
    with reporting(as_json, "interrupted; the same command goes on where this one stopped"):
        from transcode.compose_command import compose as put_together

        done, text = put_together(
            dst, base, takes, target, shard_size, lossy=lossy, overwrite=overwrite,
            dry_run=dry_run,
        )  # fmt: skip
        for note in done.get("notes", ()):
            click.echo(f"transcode: {one_line(note)}", err=True)
        say(json.dumps(done, indent=2) if as_json else text)


@main.command()
@SRC
@DST
@DEVICE
@click.option(
    "--kernel",
    is_flag=True,
    help="Run the runtime's own GEMM on DST too; the evidence goes into its Report.",
)
@click.option(
    "--vllm-lib",
    "libraries",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="vLLM's compiled file; once for each.  [default: the installed vLLM's]",
)
@click.option("--all", "everything", is_flag=True, help="Run every layer and expert, not a sample.")
@take(required=False)
@JSON
def verify(
    src: Path,
    dst: Path,
    device: str,
    kernel: bool,
    libraries: tuple[Path, ...],
    everything: bool,
    takes: tuple[tuple[str, Path], ...],
    as_json: bool,
) -> None:
    """Prove DST against SRC, reading both from disk."""
    with reporting(as_json):
        from transcode.convert import device_for
        from transcode.report import notes_of
        from transcode.verify import verify as differences

        found = list(differences(src, dst, device_for(device), takes))
        result: dict[str, Any] = {"equal": not found, "differences": found}
        equal = "\n".join(found) or f"{dst} is what convert makes of {src}: every tensor proved"
        for note in [] if found else notes_of(dst):
            click.echo(f"transcode: {one_line(note)}", err=True)
        if kernel:
            from transcode.gemm import kernel_check, table
            from transcode.unpacked import require_packed

            require_packed(dst)
            from transcode.report import record

            if not as_json:
                say(equal)
            result["kernel"] = kernel_check(src, dst, libraries, everything)
            record(dst, "kernel", result["kernel"])
            equal = table(result["kernel"])
        say(json.dumps(result, indent=2) if as_json else equal)
        if found or (kernel and not result["kernel"]["passed"]):
            sys.exit(3)


@main.command()
@SRC
@click.option("--for", "runtime", type=click.Choice(["vllm", "sglang"]), help="Judge for one only.")
@click.option("--codes", is_flag=True, help="Read FP8 codes too (all of the file), for NaN.")
@click.option(
    "--fix",
    "target",
    type=click.Path(path_type=Path),
    metavar="DST",
    help="Write to DST what can be mended without changing a code, and check that.",
)
@click.option("--overwrite", is_flag=True, help="Replace DST once the new one is complete.")
@JSON
def check(
    src: Path,
    runtime: str | None,
    codes: bool,
    target: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Say whether SRC loads, where, and what would be silently wrong."""
    if overwrite and target is None:
        raise click.UsageError("--overwrite is for --fix")
    with reporting(as_json):
        from transcode.check import LEVELS, examine, verdict

        more: dict[str, Any] = {}
        if target is None:
            findings = examine(src, runtime, codes=codes)
        else:
            from transcode.fix import fix, told

            done = fix(src, target, runtime, overwrite=overwrite)
            findings, more = list(done.remaining), {"mended": done.entries}
            if not as_json:
                say(told(done, target))
            src = target if done.written else src
        if as_json:
            click.echo(json.dumps({**more, "findings": [f.as_dict() for f in findings]}, indent=2))
        else:
            for finding in findings:
                click.echo(clean(str(finding)))
            counts = ", ".join(f"{sum(f.level == n for f in findings)} {n}" for n in LEVELS)
            click.echo(one_line(f"{src}: {counts}; {verdict(findings, runtime)}"))
        if any(f.level in ("WRONG", "FAILS") for f in findings):
            sys.exit(3)


@main.command()
@SRC
@JSON
def inspect(src: Path, as_json: bool) -> None:
    """Say what is in SRC: encodings by module group, sizes, oddities."""
    with reporting(as_json):
        from transcode.inspect import inspect as look
        from transcode.inspect import table

        seen = look(src)
        say(json.dumps(seen, indent=2) if as_json else table(seen))


@main.command()
def formats() -> None:
    """List the forms that are read and written."""
    from transcode.catalog import producers, targets

    written = set()
    for name, (producer, target) in targets().items():
        how = "read, write" if producer.formats else "write"
        loads = ", ".join(
            f"{e.runtime} {e.version} {'+'.join(e.kinds)}" + f" ({e.note})" * bool(e.note)
            for e in target.loads_in
        )
        told = "as its encodings do" if not target.encodings and not loads else loads
        told = "no runtime" if name == "canonical" or not told else told
        click.echo(f"{name:28} {how:11} {target.title}; loads in: {told}")
        written |= {f"{producer.name}-{e}" for e in target.encodings}
    for producer in producers():
        for format_ in producer.formats:
            if format_.read_only:
                click.echo(f"{format_.name:28} read        (not written)")


@main.group(invoke_without_command=True)
@click.pass_context
def layouts(context: click.Context) -> None:
    """List what can be packed, and what loads it: one line each."""
    from transcode.catalog import layouts as known

    if context.invoked_subcommand is None:
        for name, variants in known().items():
            for layout in variants:
                asked = _asked(layout, variants)
                title = f"{layout.title} ({', '.join(layout.dtypes)}), as {layout.runtime} packs"
                encodings = ", ".join(layout.encodings)
                click.echo(f"{name + asked:35} from {encodings}: {title}")


def _asked(layout: Any, variants: tuple[Any, ...]) -> str:
    """What tells a layout from the others of its name."""
    if layout is variants[0]:
        return ""
    if layout.runtime != variants[0].runtime:
        return f" --for {layout.runtime}"
    if layout.activations != variants[0].activations:
        return f" --activations {layout.activations}"
    return f" --variant {layout.variant}"


@layouts.command()
@click.argument("name")
@click.option("--variant", help="One of its variants.  [default: the first]")
@click.option("--svg", type=click.Path(path_type=Path), help="Write a drawing to this file too.")
def show(name: str, variant: str | None, svg: Path | None) -> None:
    """Draw which element of the source lands where in the first tile of a layout."""
    with reporting(False):
        from transcode import show as drawing

        click.echo(drawing.text(name, variant))
        if svg:
            svg.write_text(drawing.svg(name, variant), encoding="utf-8")
