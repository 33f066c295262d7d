"""Command lines at random: options of an experiment with values that they take, and with values that nothing takes."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable
from typing import Any, Literal

from jaxfl.frame import Experiment
from jaxfl.frame.choose import Where, conditions
from jaxfl.frame.options import alternatives, flag, options

INTEGERS = ("0", "-1", "1", "2", "3", "5", "7", "16", "64", "2147483647", "2147483648", "-2147483649", "4294967296")
INTEGERS += ("9223372036854775808", "1" + "0" * 400, "1" + "0" * 5000, "1e30", "1_0", "٣", "0x10", " 4", "+3", "-0")
NUMBERS = ("0", "-1", "1", "0.5", "0.9", "0.1", "2", "3", "1e-3", "1e-5", "-0.5", "-0.0", "1e-9", "1e-16", "1e-30")
NUMBERS += ("1e-38", "1e-46", "1e-300", "1e-320", "1e400", "1e30", "1e38", "1e39", "1e300", "-1e300", "inf", "-inf")
NUMBERS += ("nan", "1e-400", "2147483648", "9223372036854775808", "1" * 400, "0.99999999999999999", "1,5", "1e", "½")
TEXTS = ("", " ", "None", "none", "inf", "nan", "0", "true", "a=b", "a:b", "[/x]", "[bold]", "*", "naïve", "日本語")
TEXTS += ("\udce4", "a\udcff/b", "a\nb", "a\tb", "..", "../x", ".", "/", "/dev/null", "/dev/null/x", "/proc/x", "ε")
TEXTS += ("~", "~/x", "~nobody_x/y", "x" * 300, "x/" * 3000, "taken", "taken/x", "hollow", "new", "new/er", "iid")
TEXTS += ("square.npy", "text.npy", "cut.npy", "zip.npy", "none.npy", "new.csv", "grid.csv", "grid.jsonl", "many.jsonl")
TEXTS += ("digits", "mnist", "imdb")
FRAME = ("--grid-file", "--compilation-cache", "--preset", "--num-samples", "--seeds", "--sample", "--set", "--grid")


class CommandLines:
    """Command lines of one experiment.

    Args:
        experiment: whose options are drawn.
        seed: the same seed gives the same lines.
    """

    def __init__(self, experiment: Experiment, seed: int):
        self._random = random.Random(f"{experiment.name} {seed}")
        self._experiment = experiment
        self._known = options(type(experiment.base))
        self._owners = [(name, holds) for name, holds in conditions(experiment.base) if isinstance(holds, Where)]

    def next(self) -> list[str]:
        """One more."""
        draw = self._random
        words: list[str] = []
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
            words += draw.choices(self._ways(), (60, 4, 4, 3, 8, 4, 3, 2, 2, 2, 1, 1))[0]()
        return words

    def _ways(self) -> list[Callable[[], list[str]]]:
        """Ways to write an option."""
        draw = self._random
        return [
            self._option,
            lambda: [(words := self._bare())[0] + "=" + " ".join(words[1:])],
            lambda: ["--set", (words := self._bare())[0].strip("-") + "=" + " ".join(words[1:])],
            lambda: 2 * self._option(),
            self._grid,
            self._sample,
            lambda: ["--seeds", *draw.choices(INTEGERS, k=draw.choice((0, 1, 1, 2, 3)))],
            lambda: ["--preset", draw.choice((*self._experiment.presets, *TEXTS))],
            lambda: ["--grid-file", draw.choice(TEXTS)],
            lambda: [draw.choice(FRAME), *draw.choices((*TEXTS, *INTEGERS), k=draw.choice((0, 1, 1, 2)))],
            lambda: ["--compilation-cache", draw.choice((*TEXTS, "off"))],
            lambda: draw.choice((["--help"], ["--list-presets"], ["-h"], ["--"], ["-x"], ["stray"], [""], ["\udce4"])),
        ]

    def _option(self) -> list[str]:
        """An option, mostly behind the choices that it needs in order to count."""
        bare, words = self._bare(), []
        name = bare[0].partition("=")[0].strip("-").replace("-", "_")
        for option, holds in self._owners:
            if option == name and self._random.random() < 0.8:
                words += [flag(holds.option), str(self._random.choice(list(holds.values)))]
        return [*words, *bare]

    def _bare(self) -> list[str]:
        """An option and its value, seldom none."""
        name = self._random.choice(list(self._known))
        if self._known[name].kind is bool:
            return [self._random.choice((flag(name), flag(name), flag(f"no_{name}"), f"{flag(name)}=perhaps"))]
        return [flag(name), *([] if self._random.random() < 0.03 else self._value(name))]

    def _value(self, name: str) -> list[str]:
        """Words for an option, mostly of its type."""
        draw, kind = self._random, draw_kind(self._known[name].kind, self._random)
        if draw.random() < 0.05:
            return [draw.choice((*TEXTS, *INTEGERS, *NUMBERS))]
        if typing.get_origin(kind) is tuple:
            inner = draw_kind(typing.get_args(kind)[0], draw)
            return [self._word(name, inner) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
        return [self._word(name, kind)]

    def _word(self, name: str, kind: Any) -> str:
        draw = self._random
        if typing.get_origin(kind) is Literal:
            return str(draw.choice(typing.get_args(kind)))
        if kind is type(None):
            return "None"
        values = [value for _, holds in self._owners if holds.option == name for value in holds.values]
        if kind is str and values and draw.random() < 0.6:
            return draw.choice(values)
        return draw.choice({int: INTEGERS, float: NUMBERS}.get(kind, TEXTS))

    def _grid(self) -> list[str]:
        words = ["--grid"]
        for _ in range(self._random.choice((1, 1, 2))):
            name = self._random.choice(list(self._known))
            values = [" ".join(self._value(name)) for _ in range(self._random.choice((1, 2, 2, 3)))]
            words.append(f"{name}={','.join(values)}")
        return words

    def _sample(self) -> list[str]:
        draw, name = self._random, self._random.choice(list(self._known))
        ends = f"{draw.choice(NUMBERS)}:{draw.choice(NUMBERS)}"
        counts = ["--num-samples", draw.choice(INTEGERS)] if draw.random() < 0.5 else []
        return ["--sample", f"{name}={draw.choice(('', 'log:'))}{ends}", *counts]


def draw_kind(kind: Any, draw: random.Random) -> Any:
    """One of the types that an option takes."""
    return draw.choice(alternatives(kind))
