"""Which modules change their encoding: from headers, the target and the user's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transcode.catalog import layouts_for
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.fused import unquantised
from transcode.groups import group
from transcode.inputs import input_scales
from transcode.module import Module
from transcode.names import address
from transcode.producer import E8M0, Form
from transcode.quant import Encoding
from transcode.recipe import ENCODINGS, REDUCED
from transcode.recode import EXACT, Recoded, stored_dtype, virtual
from transcode.recognise import quantization
from transcode.sayable import adapted
from transcode.stacking import fusion_of
from transcode.stacks import GROUPS, Options, experts_of, siblings

BITS = {Encoding.UNQUANTISED: 16, Encoding.NVFP4: 4, Encoding.NVFP4_32: 4, Encoding.MXFP4: 4}
"""Of a value; 8 in the others."""

Rows = list[tuple[Module, ...]]


def recoded(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> dict[str, Module]:
    """All modules, those that change their encoding as if the source had them so.

    FormatError where an encoding cannot become what is wanted, or runtimes join two that differ.
    """
    every = {**apart(checkpoint, modules), **modules}
    wanted = _wanted(checkpoint, modules, options)
    turned = {name: e for name, m in every.items() if (e := wanted(m)) is not None}
    found = {name: m for name, m in every.items() if name in modules or name in turned}
    recipe, form = options.recipe, options.form
    if not turned:
        return dict(modules)
    rows = rows_of(checkpoint, found, form)
    shared = {m.name: row for row in rows for m in row}
    layers = _rows(checkpoint, found, layers=True)
    _require_alike(joined(checkpoint, found), turned)
    inputs = dict(
        input_scales(rows if recipe.inputs.per_expert else layers, turned, form, recipe.inputs)
        if form
        else ()
    )
    scales = stored_dtype(modules)
    powers = _powers(checkpoint, options) or scales in E8M0
    for name, encoding in turned.items():
        _require_blocks(every[name], encoding)
        one = Recoded(every[name], encoding, shared[name], powers, recipe.search)
        found[name] = virtual(one, scales, inputs.get(name))
    return found


def apart(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> dict[str, Module]:
    """Experts that the source keeps stacked and not quantised, one by one."""
    config = checkpoint.text_config
    hidden = config.get("hidden_size")
    apart = unquantised(
        checkpoint.tensors, str(config.get("model_type")), hidden if isinstance(hidden, int) else 0
    )
    return {
        name: Module(name, Encoding.UNQUANTISED, leaves["weight"].shape, leaves, None)
        for name, leaves in apart.items()
        if name not in modules
    }


def _wanted(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> Callable[[Module], Encoding | None]:
    """A function from a module to what it becomes, None if it stays: by the first rule that means
    it, else by the target."""
    layers = checkpoint.text_config.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else 0
    by_target = _by_target(checkpoint, modules, options, count)

    def of(module: Module) -> Encoding | None:
        if module.encoding is Encoding.INT4 or len(module.shape) != 2:
            return None
        rule = options.recipe.rule(module.name, count)
        encoding = (rule.encoding or module.encoding) if rule else by_target(module)
        if rule and options.kernel and encoding not in (module.encoding, *options.kernel.encodings):
            raise FormatError(f"--rule {rule}: {options.kernel.name} does not pack {encoding}")
        if encoding is not module.encoding:
            return encoding
        return encoding if _to_powers(module, options) else None

    return of


def _to_powers(module: Module, options: Options) -> bool:
    """Whether its scales have to become powers of two, and may not be."""
    return (
        _asked(options)
        and module.encoding is Encoding.FP8_BLOCK
        and module.scales.dtype not in E8M0
    )


def _by_target(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options, layers: int
) -> Callable[[Module], Encoding]:
    """What the target alone makes of a module.

    A target that names encodings gets modules as they are if any is in one of them, or it takes all
    (`Target.whole`) the others too. Where bits are taken away, it is routed experts and dense MLPs
    that change; what is not quantised changes only where nothing is.
    """
    form, kernel = options.form, options.kernel
    wanted = form.target.encodings if form else kernel.encodings if kernel else ()

    def said(module: Module) -> bool:
        return (adapted(module, form) if form else module).encoding in wanted

    quantised = [m for m in modules.values() if m.encoding is not Encoding.UNQUANTISED]
    whole = form is not None and form.target.whole
    as_it_is = not wanted or (any(map(said, quantised)) and not whole)

    def of(module: Module) -> Encoding:
        plain = module.encoding is Encoding.UNQUANTISED
        if as_it_is or said(module) or (plain and quantised):
            return module.encoding
        if (kernel or plain) and address(module.name).table:
            return module.encoding
        if plain and group(module.name, layers) not in REDUCED:
            return module.encoding
        encoding = _target(module, wanted, checkpoint, options)
        fewer = BITS.get(encoding, 8) < BITS.get(module.encoding, 8)
        return module.encoding if fewer and group(module.name, layers) not in REDUCED else encoding

    return of


def _target(
    module: Module, wanted: tuple[Encoding, ...], checkpoint: Checkpoint, options: Options
) -> Encoding:
    """The encoding of those wanted that a module becomes, an exact one if there is any."""
    exact = EXACT.get(module.encoding, ())
    if fitting := [e for e in (*exact, *ENCODINGS) if e in wanted]:
        return fitting[0]
    name = options.form.target.name if options.form else options.layout.name
    method = quantization(checkpoint)[0].get("quant_method")
    said = f" (quant_method {method!r})" if method else ""
    raise FormatError(
        f"{module.name} is {module.encoding}{said}, which does not become {' or '.join(wanted)} "
        f"here, as {name} has it{layouts_for([module.encoding])}"
    )


def _powers(checkpoint: Checkpoint, options: Options) -> bool:
    """Whether scales of FP8 tiles have to be powers of two."""
    return _asked(options) or quantization(checkpoint)[0].get("scale_fmt") == "ue8m0"


def _asked(options: Options) -> bool:
    """Whether the target wants powers of two."""
    form, kernel = options.form, options.kernel
    return (form is not None and form.target.powers) or (
        kernel is not None and kernel.scales.of == "powers"
    )


def rows_of(checkpoint: Checkpoint, modules: Mapping[str, Module], form: Form | None) -> Rows:
    """All modules in rows that have one scale where they are joined: those of a layer's experts
    if the target has one for all of them."""
    stacked = fusion_of(checkpoint, form) if form else None
    return _rows(checkpoint, modules, layers=stacked is not None and stacked.one_scalar)


def _rows(checkpoint: Checkpoint, modules: Mapping[str, Module], *, layers: bool) -> Rows:
    """All modules in rows that see one input and have one scale: an expert's gate and up, its down,
    those of all experts of a layer (`layers`), or linears that runtimes join."""
    rows = Rows()
    for experts in experts_of(modules).values():
        for parts in (("gate", "up"), ("down",)):
            each = [tuple(e[p] for p in parts if p in e) for e in experts.values()]
            rows += [tuple(m for row in each for m in row)] if layers else each
    rows += [tuple(row) for row in siblings(checkpoint, modules, lambda m: True)]
    inside = {m.name for row in rows for m in row}
    return [row for row in rows if row] + [(m,) for n, m in modules.items() if n not in inside]


def joined(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Rows:
    """What runtimes join, so that it must be in one encoding: rows, and a layer's experts."""
    layers = [
        tuple(m for parts in experts.values() for m in parts.values())
        for experts in experts_of(modules).values()
    ]
    return [*_rows(checkpoint, modules, layers=True), *layers]


def _require_alike(rows: Rows, turned: Mapping[str, Encoding]) -> None:
    """Raise FormatError if what runtimes join ends in two encodings, by this change."""
    for row in rows:
        first = next((m for m in row if m.name in turned), None)
        for other in row if first else ():
            assert first is not None
            mine, its = turned[first.name], turned.get(other.name, other.encoding)
            if its is not mine:
                raise FormatError(
                    f"{first.name} becomes {mine}, {other.name} is {its}: runtimes join them, so "
                    "they must end in one encoding"
                )
            if mine is Encoding.NVFP4 and first.encoding is not other.encoding:
                raise FormatError(
                    f"{first.name} is {first.encoding}, {other.name} is {other.encoding}: no one "
                    "global scale can be found for both"
                )


def _require_blocks(module: Module, encoding: Encoding) -> None:
    """Raise FormatError where rows are no whole blocks."""
    columns = GROUPS.get(encoding, 1)
    if module.shape[1] % columns:
        raise FormatError(
            f"{module.name} has K = {module.shape[1]}, {encoding} wants a multiple of {columns}; "
            f"--rule '{module.name}=keep' leaves it"
        )
