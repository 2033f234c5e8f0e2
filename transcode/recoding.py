"""Which modules change their encoding, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from transcode.catalog import layouts_for
from transcode.checkpoint import Checkpoint, Reader
from transcode.errors import FormatError, LossError
from transcode.module import Module
from transcode.names import address
from transcode.producer import E8M0, Role
from transcode.quant import Encoding
from transcode.recode import EXACT, LOSSY, Part, Recoded, source_of, stored_dtype, virtual
from transcode.recognise import quantization
from transcode.sayable import adapted
from transcode.stacking import fusion_of
from transcode.stacks import GROUPS, Options, experts_of, siblings


@dataclass(frozen=True)
class Loss:
    """What changed in a module: how many blocks of its source encoding, of how many; and the
    relative Frobenius error."""

    changed: int
    blocks: int
    error: float


def recoded(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> dict[str, Module]:
    """All modules, those that the target has no word for in one of its encodings.

    A target that names encodings gets modules as they are if any is in one of them, or it takes all
    (`Target.whole`) the others too. FormatError where an encoding cannot become one of them.
    """
    form, kernel = options.form, options.kernel
    wanted = form.target.encodings if form else kernel.encodings if kernel else ()
    whole = form is not None and form.target.whole
    quantised = {n: m for n, m in modules.items() if m.encoding is not Encoding.UNQUANTISED}
    said = {n: (adapted(m, form) if form else m).encoding in wanted for n, m in quantised.items()}
    if not wanted or not quantised or (any(said.values()) and not whole):
        return dict(modules)
    turned = {
        n: _target(m, wanted, checkpoint, options)
        for n, m in quantised.items()
        if not said[n] and not (kernel and address(n).table)
    }
    together = _together(checkpoint, {n: quantised[n] for n in turned}, options)
    scales = stored_dtype(modules)
    powers = scales in E8M0 or quantization(checkpoint)[0].get("scale_fmt") == "ue8m0"
    static = form is not None and form.quantises_inputs(Encoding.NVFP4)
    found = dict(modules)
    for module_name, encoding in turned.items():
        one = Recoded(quantised[module_name], encoding, together[module_name], powers)
        found[module_name] = virtual(one, scales, options.input_scale if static else None)
    return found


def _target(
    module: Module, wanted: tuple[Encoding, ...], checkpoint: Checkpoint, options: Options
) -> Encoding:
    """The encoding of those wanted that a module may become, an exact one if there is any."""
    for table in (EXACT, LOSSY):
        for encoding in wanted:
            if encoding in table.get(module.encoding, ()):
                return encoding
    name = options.form.target.name if options.form else options.layout.name
    method = quantization(checkpoint)[0].get("quant_method")
    said = f" (quant_method {method!r})" if method else ""
    raise FormatError(
        f"{module.name} is {module.encoding}{said}, which does not become {' or '.join(wanted)} "
        f"here, as {name} has it{layouts_for([module.encoding])}"
    )


def _together(
    checkpoint: Checkpoint, modules: Mapping[str, Module], options: Options
) -> dict[str, tuple[Module, ...]]:
    """By module, those that have one global scale with it in the target."""
    fusion = fusion_of(checkpoint, options.form) if options.form else None
    groups = list[tuple[Module, ...]]()
    for experts in experts_of(modules).values():
        for parts in (("gate", "up"), ("down",)):
            rows = [tuple(e[p] for p in parts if p in e) for e in experts.values()]
            one = fusion is not None and fusion.one_scalar
            groups += [tuple(m for row in rows for m in row)] if one else rows
    groups += [tuple(g) for g in siblings(checkpoint, modules, lambda m: True)]
    found = {m.name: group for group in groups for m in group}
    return {name: found.get(name, (module,)) for name, module in modules.items()}


def parts(modules: Mapping[str, Module]) -> Iterator[tuple[str, Recoded]]:
    """The modules whose encoding changes."""
    for name, module in modules.items():
        if module.was and isinstance(made := module.codes.made, Part):
            yield name, made.recoded


def judge(modules: Mapping[str, Module], options: Options, read: Reader) -> dict[str, Loss]:
    """What every change of encoding costs; LossError where that is not allowed."""
    changing = dict(parts(modules))
    found = dict[str, Loss]()
    bar = tqdm(changing.items(), desc="encodings", unit="matrix", disable=None, leave=False)
    for name, one in bar:
        if one.surely_exact(read):
            n, k = one.module.shape
            found[name] = Loss(0, n * k // GROUPS.get(one.module.encoding, k), 0.0)
        else:
            found[name] = measured(one, read)
    lost = [name for name, loss in found.items() if loss.changed]
    if lost and (options.exact or not options.lossy):
        worst = max(lost, key=lambda name: found[name].error)
        source, target = changing[worst].module.encoding, changing[worst].encoding
        blocks = sum(found[name].changed for name in lost)
        every = sum(loss.blocks for loss in found.values())
        said = "--exact refuses that" if options.lossy else "--lossy allows it"
        raise LossError(
            f"{source} to {target} changes {blocks} of {every} blocks in {len(lost)} matrices, by "
            f"{found[worst].error:.2%} of the norm in {worst}; {said}"
            f"{_lossless(changing[worst].module.encoding)}"
        )
    return found


def summary(losses: Mapping[str, Loss], modules: Mapping[str, Module]) -> list[dict[str, Any]]:
    """For a Report: each change of encoding with its counts, and the modules that it changed."""
    found: dict[tuple[str, str], dict[str, Loss]] = {}
    for name, loss in losses.items():
        was = modules[name].was
        assert was is not None
        found.setdefault((str(was.encoding), str(modules[name].encoding)), {})[name] = loss
    return [
        {
            "from": source,
            "to": target,
            "modules": len(some),
            "blocks": sum(loss.blocks for loss in some.values()),
            "changed": sum(loss.changed for loss in some.values()),
            "error_at_most": max(loss.error for loss in some.values()),
            "changed_modules": {n: asdict(loss) for n, loss in some.items() if loss.changed},
        }
        for (source, target), some in found.items()
    ]


def told(losses: Mapping[str, Loss], modules: Mapping[str, Module]) -> Iterator[str]:
    """The same as notes, and input scales that are gone."""
    dropped = [name for name in losses if (was := modules[name].was) and Role.INPUT in was.parts]
    if dropped:
        yield f"{len(dropped)} input scales of the source's encoding are left out ({dropped[0]})"
    for entry in summary(losses, modules):
        what = f"{entry['modules']} matrices: {entry['from']} became {entry['to']}"
        if not entry["changed"]:
            yield f"{what}, every value the same"
        else:
            yield (
                f"{what}, {entry['changed']} of {entry['blocks']} blocks changed, by "
                f"{entry['error_at_most']:.2%} of a matrix's norm at most (an error of weights, "
                "which says little of accuracy)"
            )


def _lossless(encoding: Encoding) -> str:
    """The way without loss, as the end of a sentence."""
    exact = ", ".join(EXACT.get(encoding, ()))
    kept = f"a form or layout for {encoding} keeps all"
    return f"; {kept}" + f" ({exact} may, where the scales allow it)" * bool(exact)


def measured(one: Recoded, read: Reader) -> Loss:
    """Compare a module in its new encoding with the source, value by value."""
    source, made = source_of(one.module, read).dequantize(), one.made(read).dequantize()
    columns = GROUPS.get(one.module.encoding, source.shape[1])
    changed = (source != made).reshape(source.shape[0], -1, columns).any(-1)
    error, norm = float((source - made).double().norm()), float(source.double().norm())
    return Loss(int(changed.sum()), changed.numel(), error / norm if norm else 0.0)
