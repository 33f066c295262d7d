"""A parser for commands without JAX: it takes other commands' words, and says one sentence about a wrong one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from jaxfl.core.vocabulary import chosen, flag, hint


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
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")

    def flags(self) -> list[str]:
        """All options, for a shell's completion."""
        return [*self._option_string_actions]

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
        return super().parse_args(args, namespace)


def one_of(known: Collection[str], otherwise: str = "Choose one of these.") -> Callable[[str], str]:
    """The type of an option that takes one of these choices, in any case.

    Args:
        known: the choices.
        otherwise: the remedy for a word that is none of them.

    Examples:
        >>> one_of(["PrivSGP"])("privsgp")
        'PrivSGP'
    """

    def choice(word: str) -> str:
        found = chosen(word, known)
        if found is None:
            listed, near = ", ".join(known), hint(word, known)
            raise argparse.ArgumentTypeError(f"must be one of {listed}; got {word!r}. {near}{otherwise}")
        return found

    return choice
