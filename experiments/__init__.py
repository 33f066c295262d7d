"""Experiments. In the wheel this package is `jaxfl.experiments`, and `jaxfl NAME` runs one of them.

`python -m experiments.NAME` imports this package before anything heavy. From then on an interrupt ends the process
with exit code 130 and one sentence, until the command line catches it. A program that imports this package
keeps its own signals.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxfl.frame import Experiment


def leave(signum: int, frame: FrameType | None) -> None:
    """End at once: an exception could get lost in a module that is half imported."""
    os.write(2, b"interrupted: nothing was begun\n")
    os._exit(130)


leave.__dict__["until_caught"] = True  # `jaxfl.frame.main` catches interrupts itself
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Python looks for NAME
    signal.signal(signal.SIGINT, leave)


class _Experiments(Mapping[str, "Experiment"]):
    """Name -> experiment: every package below this one whose __init__.py has an EXPERIMENT, imported when needed."""

    def __iter__(self) -> Iterator[str]:
        names = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
        return iter([name for name in names if hasattr(importlib.import_module(f"{__name__}.{name}"), "EXPERIMENT")])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Experiment:
        if name not in iter(self):
            raise KeyError(name)
        return importlib.import_module(f"{__name__}.{name}").EXPERIMENT


EXPERIMENTS: Mapping[str, Experiment] = _Experiments()
