"""Public names that are imported on first use: `import jaxfl` takes what is used of it, and accounting no JAX."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def import_on_use(package: str, homes: Mapping[str, str], subpackages: str = "") -> None:
    """Let a package import names when they are first asked for; its `TYPE_CHECKING` imports tell type checkers of them.

    A name may be that of a module of the package, too (`jaxfl.privacy.statements`, a function beside a module): the
    package keeps the name's value then, whenever the module is imported.

    Args:
        package: name of the package, from its __init__.py.
        homes: module -> names that it defines, apart by blanks.
        subpackages: names of packages in it, apart by blanks.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}
    inside = set(subpackages.split())
    letters = {one.replace("_", ""): one for one in sorted({*home, *inside}, reverse=True)}

    class OnUse(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in inside:
                return import_module(f"{package}.{name}")
            if name not in home:
                near = difflib.get_close_matches(name.replace("_", "").lower(), letters, 1, 0.8)
                hint = (
                    f"Did you mean {letters[near[0]]}?" if near else "docs/coming_from.md has other libraries' names."
                )
                raise AttributeError(f"module {package!r} has no attribute {name!r}. {hint}")
            value = getattr(import_module(home[name]), name)
            super().__setattr__(name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            # An import binds a module to its package.
            if not (name in home and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home, *inside})

    sys.modules[package].__class__ = OnUse
