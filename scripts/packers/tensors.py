"""Tensors by name: compared by their bytes, and as the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by name."""


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(raw(left), raw(right))


def module(parameters: Tensors, **attributes: object) -> Any:
    """A module with copies of the tensors as its parameters, and attributes."""
    layer = torch.nn.Module()
    for name, tensor in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def held(layer: Any, names: Iterable[str]) -> Tensors:
    """The parameters of these names that a module has."""
    return {name: getattr(layer, name).data for name in names if hasattr(layer, name)}
