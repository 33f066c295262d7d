"""A parser for commands without JAX: it takes other commands' words, and says one sentence about a wrong one."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from jaxfl.core.vocabulary import by_spaces, chosen, flag, hint, letters


class Parser(argparse.ArgumentParser):
    """Parser of one command.

    Args:
        command: its name.
        description: what it does, for --help.

    Guarantees:
        - an unknown option is refused before a missing one, with the option that it stands for.
        - an option takes the names that other commands have for it, and is taken once.
        - an error is one line, with exit code 2.
    """

    def __init__(self, command: str, description: str):
        super().__init__(prog=f"jaxfl {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """End with one sentence."""
        remedy = by_spaces(re.findall(r"invalid \w+ value: '(.*)'", message))
        self.exit(2, f"error: {message.removeprefix('argument ')}{remedy and f'. {remedy}'}\n")

    def flags(self) -> dict[str, list[str]]:
        """All options, each with the words that it chooses from, for a shell's completion."""
        actions = self._option_string_actions.items()
        return {name: [*(action.choices or getattr(action.type, "known", ()))] for name, action in actions}

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of the options, of which none is unknown."""
        known, given = [one.lstrip("-").replace("-", "_") for one in self.flags()], dict[argparse.Action, str]()
        for word in (word.partition("=")[0] for word in args if word.startswith("--")):
            if word not in self.flags():
                near = hint(word.lstrip("-").replace("-", "_"), known, flag)
                none = f"must be an option of {self.prog}; there is none of that name"
                self.error(f"{word}: {none}. {near}See {self.prog} --help.")
            option = self._option_string_actions[word]
            if option in given:
                self.error(f"{word}: must be given once; got {given[option]} as well. Leave one out.")
            given[option] = word
        positional = any(not action.option_strings for action in self._actions)
        for at, word in enumerate(args):  # argparse would name the further words only
            option = self._option_string_actions.get(word)
            rest = itertools.takewhile(lambda one: not one.startswith("--"), args[at + 1 :])
            if option is not None and option.nargs is None and not positional and len(values := [*rest]) > 1:
                several = "; jaxfl plan compares several budgets" if "--epsilon" in option.option_strings else ""
                self.error(f"{word}: must have one value; got {' '.join(values)}. Pass one{several}.")
        return super().parse_args(args, namespace)


@dataclasses.dataclass(frozen=True, eq=False)  # argparse looks types up by their hash
class OneOf:
    """The type of an option that takes one of some choices, in any case.

    Examples:
        >>> OneOf(["PrivSGP"])("privsgp")
        'PrivSGP'
    """

    known: Collection[str]  # the choices
    otherwise: str = "Choose one of these."  # the remedy for a word that is none of them
    also: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # letters of a word -> the choice of which it is short

    def __call__(self, word: str) -> str:
        """The choice that a word means."""
        meant = self.also.get(letters(word)) or chosen(word, self.known)
        if meant is None:
            listed, near = ", ".join(self.known), hint(word, self.known)
            raise argparse.ArgumentTypeError(f"must be one of {listed}; got {word!r}. {near}{self.otherwise}")
        return meant
