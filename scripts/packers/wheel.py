"""A runtime's Python files, executed one by one from its wheel, without the runtime."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

from torch import Tensor


@dataclass(frozen=True)
class Wheel:
    """The files of a wheel, packed or unpacked."""

    root: Path | zipfile.Path

    @classmethod
    def open(cls, path: Path) -> Wheel:
        """Open a `.whl` file or the folder that one was unpacked into."""
        return cls(path if path.is_dir() else zipfile.Path(path))

    @property
    def version(self) -> str:
        """The version in the name of the wheel's dist-info folder."""
        names = [entry.name for entry in self.root.iterdir()]
        (info,) = (name for name in names if name.endswith(".dist-info"))
        return info.removesuffix(".dist-info").partition("-")[2]

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder."""
        return (self.root / f"{module.replace('.', '/')}/__init__.py").is_file()

    def has(self, module: str) -> bool:
        """Whether it has this module."""
        path = module.replace(".", "/")
        return self.is_package(module) or (self.root / f"{path}.py").is_file()

    def source(self, module: str) -> str:
        """The source text of a module."""
        file = module.replace(".", "/") + ("/__init__" if self.is_package(module) else "")
        return (self.root / f"{file}.py").read_text(encoding="utf-8")

    def digest(self, module: str) -> str:
        """The SHA-256 of a module's source text."""
        return hashlib.sha256(self.source(module).encode()).hexdigest()


def absent(*_: object, **__: object) -> Tensor:
    """An operator that nothing stands for."""
    raise NotImplementedError


@dataclass(frozen=True)
class Runtime:
    """One version of a runtime, as far as its packers need it."""

    name: str
    wheel: Wheel
    modules: Mapping[str, Any]
    """The driven modules, and stand-ins with settings that a driven one reads."""
    repack: Callable[..., Tensor] = absent
    """What stands for Marlin's CUDA operator, where it is driven."""
    beside: tuple[Runtime, ...] = ()
    """Other packages, whose functions it calls."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Their modules, as its functions import them as they run."""

    def __str__(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.wheel.version}"

    def digests(self) -> dict[str, str]:
        """The SHA-256 of the source text of each driven module."""
        return {name: self.wheel.digest(name) for name in self.modules if self.wheel.has(name)}


class StandIn(ModuleType):
    """A module that is not executed: any name asked of it is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        """Make up the attribute; the import system's own names stay absent."""
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class WheelImporter(MetaPathFinder, Loader):
    """Imports `driven` modules from a wheel and a stand-in for every other part of its packages."""

    def __init__(self, wheel: Wheel, packages: Sequence[str], driven: Sequence[str]) -> None:
        self.wheel = wheel
        self.packages = packages
        self.driven = driven

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Claim everything that belongs to the packages."""
        if name.partition(".")[0] not in self.packages:
            return None
        driven = name in self.driven
        return ModuleSpec(name, self, is_package=not driven or self.wheel.is_package(name))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """An ordinary module for a driven one, a stand-in for the others."""
        return None if spec.name in self.driven else StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run a driven module's source text as it lies in the wheel."""
        name = module.__name__
        if name in self.driven:
            exec(compile(self.wheel.source(name), name, "exec"), module.__dict__)


@contextmanager
def importing(
    wheel: Wheel, package: str, driven: Sequence[str], absent: Sequence[str] = ()
) -> Iterator[None]:
    """Let `import package...` mean this wheel, and forget it afterwards.

    Of the packages in `absent`, which the driven modules import, there are stand-ins alone.
    """
    packages = (package, *absent)
    importer = WheelImporter(wheel, packages, driven)
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]


@contextmanager
def running(runtime: Runtime) -> Iterator[None]:
    """Let functions that import as they run find their modules, without a GPU.

    A tensor's `cuda` gives the tensor itself.
    """
    modules = {**runtime.modules, **runtime.others}
    sys.modules.update(modules)
    try:
        with patch.object(Tensor, "cuda", lambda tensor: tensor):
            yield
    finally:
        for name in modules:
            del sys.modules[name]
