"""Public names that are imported on first use: `import jaxfl` takes what is used of it, and accounting no JAX."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any


def import_on_use(package: str) -> None:
    """Let a package import the names of its stub, __init__.pyi, when they are first asked for.

    The stub is the only list of them. It has a line `from MODULE import NAME as NAME` a name, which type checkers read,
    too. `__all__` and `dir` of the package are made of it.

    A name may be that of a module of the package, too (`jaxfl.privacy.statements`, a function beside a module): the
    package keeps the name's value then, whenever the module is imported.

    Args:
        package: name of the package, from its __init__.py.
    """
    module = sys.modules[package]
    home = {}
    with open(f"{module.__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", source, "import", name, "as", _]:
                    home[name] = source

    class OnUse(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if home.get(name, package) != package:
                value = getattr(import_module(home[name]), name)
                super().__setattr__(name, value)
                return value
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
            raise unknown(package, name, home)

        def __setattr__(self, name: str, value: Any) -> None:
            # An import binds a module to its package.
            if not (home.get(name, package) != package and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            values = {name for name, value in vars(self).items() if not isinstance(value, ModuleType)}
            return sorted({*home, *(name for name in values if name.startswith("__"))})

    module.__dict__["__all__"] = sorted(home)
    module.__class__ = OnUse


def unknown(package: str, name: str, names: Iterable[str]) -> AttributeError:
    """Make the error of a name that a package lacks: it points to the nearest name, or to names of other libraries."""
    import difflib  # takes longer than this package

    letters = {one.replace("_", ""): one for one in sorted(names, reverse=True)}
    near = difflib.get_close_matches(name.replace("_", "").lower(), letters, 1, 0.8)
    hint = f"Did you mean {letters[near[0]]}?" if near else "docs/coming_from.md has other libraries' names."
    return AttributeError(f"module {package!r} has no attribute {name!r}. {hint}")
