"""What changes of encoding cost, and how that is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from transcode.catalog import layouts_for
from transcode.checkpoint import Reader
from transcode.errors import LossError
from transcode.module import Module
from transcode.producer import Role
from transcode.quant import Encoding
from transcode.recode import EXACT, Part, Recoded
from transcode.requantise import meaning
from transcode.stacks import GROUPS, Options
from transcode.widen import Wider


@dataclass(frozen=True)
class Loss:
    """What changed in a module: how many blocks of its source encoding, of how many; and the
    relative Frobenius error."""

    changed: int
    blocks: int
    error: float


def parts(modules: Mapping[str, Module]) -> Iterator[tuple[str, Recoded]]:
    """The modules whose encoding changes."""
    for name, module in modules.items():
        if not module.was:
            continue
        made = module.codes.made
        made = made.of.made if isinstance(made, Wider) else made
        if isinstance(made, Part):
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
        certain = one.module.encoding is Encoding.UNQUANTISED and not options.recipe.lossy
        if certain and found[name].changed:
            break  # more of it tells no more
    lost = [name for name, loss in found.items() if loss.changed]
    if lost and (options.exact or not options.recipe.lossy):
        worst = max(lost, key=lambda name: found[name].error)
        source, target = changing[worst].module.encoding, changing[worst].encoding
        blocks = sum(found[name].changed for name in lost)
        every = sum(loss.blocks for loss in found.values())
        said = "--exact refuses that" if options.recipe.lossy else "--lossy allows it"
        raise LossError(
            f"{source} to {target} changes {blocks} of {every} blocks in {len(lost)} matrices, by "
            f"{found[worst].error:.2%} of the norm in {worst}; {said}"
            f"{_instead(changing[worst].module.encoding, options)}"
            f"{_lossless(changing[worst].module.encoding)}"
        )
    return found


def _instead(encoding: Encoding, options: Options) -> str:
    """Why the layout's kernel does not read the encoding, and what to do."""
    said = options.kernel.instead.get(encoding) if options.kernel else None
    return f"; {said}" if said else ""


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
    dropped = [
        name
        for name in losses
        if (was := modules[name].was) and Role.INPUT in {*was.parts} - {*modules[name].parts}
    ]
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
    if encoding is Encoding.UNQUANTISED:
        return ""
    kept = f"; a form for {encoding} keeps all" + layouts_for([encoding])
    return kept + f" ({exact} may, where the scales allow it)" * bool(exact)


def measured(one: Recoded, read: Reader) -> Loss:
    """Compare a module in its new encoding with the source, value by value."""
    of, new = one.both(read)
    source, made = meaning(of), new.dequantize()
    columns = GROUPS.get(one.module.encoding, source.shape[1])
    changed = (source != made).reshape(source.shape[0], -1, columns).any(-1)
    apart = (source - made).cpu()  # summed up there whatever the device, to the same last bit
    error, norm = float(apart.double().norm()), float(source.cpu().double().norm())
    return Loss(int(changed.sum()), changed.numel(), error / norm if norm else 0.0)
