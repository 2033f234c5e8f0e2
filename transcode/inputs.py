"""Input scales: what a module's says, and what those that change their encoding get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transcode.checkpoint import Reader
from transcode.errors import FormatError
from transcode.module import Module
from transcode.producer import Form, Role
from transcode.quant import Encoding
from transcode.recipe import InputScales

LARGEST = {Encoding.NVFP4: 6 * 448.0, Encoding.FP8_TENSOR: 448.0}
"""What the largest activation becomes, in encodings with one input scale: codes times scales."""


def input_factor(module: Module, read: Reader) -> Tensor:
    """A module's input scale as a factor, float32 `[]`."""
    stored = read.tensor(module.parts[Role.INPUT]).float()
    return 1.0 / stored if divides(module, Role.INPUT) else stored


def divides(module: Module, role: Role) -> bool:
    """Whether its scalar is a divisor; DeepSeek's `activation_scale`, which no format lists, is
    none."""
    leaf = module.written.leaves.get(role)
    return leaf is not None and leaf.divisor


@dataclass(frozen=True)
class InputScale:
    """The largest of given numbers and of what modules had in the source's encoding.

    had: those modules, and what theirs is multiplied with: from one encoding's largest activation
    to the other's.
    """

    given: tuple[float, ...]
    had: tuple[tuple[Module, float], ...] = ()

    def make(self, read: Reader) -> Tensor:
        """`[]` float32; FormatError for a source's scale that is no positive number."""
        found = [torch.tensor(value) for value in self.given]
        for module, times in self.had:
            factor = input_factor(module, read).reshape(())
            if not 0 < factor < torch.inf:
                name = module.parts[Role.INPUT].name
                raise FormatError(f"{name} is a factor of {float(factor):g}, wanted one > 0")
            found.append((factor.double() * times).float())
        return torch.stack(found).max()


def input_scales(
    rows: Sequence[Sequence[Module]],
    turned: Mapping[str, Encoding],
    form: Form,
    asked: InputScales,
) -> Iterator[tuple[str, InputScale]]:
    """The input scale of every module that is turned into an encoding with one.

    rows: modules that see one input: the same projections of a layer's experts, or of one expert.
    A number that is given by name comes first, then what the source's encoding had, then the one
    for all, which is for NVFP4 alone: FP8's activations would mostly be lost with it.
    """
    for row in rows:
        mine = [m for m in row if (e := turned.get(m.name)) in LARGEST and e and _static(e, form)]
        named = [value for m in mine if (value := asked.by_name(m.name)) is not None]
        had = tuple(
            (m, LARGEST[m.encoding] / LARGEST[turned[m.name]])
            for m in mine
            if Role.INPUT in m.parts and m.encoding in LARGEST
        )
        if asked.every is None:
            continue
        for module in mine:
            if named or had:
                yield module.name, InputScale(tuple(named), () if named else had)
            elif turned[module.name] is Encoding.NVFP4:
                yield module.name, InputScale((asked.every,))


def _static(encoding: Encoding, form: Form) -> bool:
    """Whether the target has a place for an input scale."""
    format_ = form.producer.format(encoding)
    return format_ is not None and Role.INPUT in format_.leaves and form.quantises_inputs(encoding)
