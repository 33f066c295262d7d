"""One vocabulary of all commands: words for the same option, words of other libraries, and the nearest known word.

`jaxfl epsilon`, `jaxfl plan`, `jaxfl data`, `jaxfl report` and every experiment look here for a word that they do not
have: each takes the words of all others. Nothing is imported that takes time.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable

SAME = (  # names of one option; a command that has one of them takes them all
    ("nodes", "sites", "clients", "num_clients", "num_nodes"),
    ("batch_size", "batch"),
    ("iterations", "rounds", "num_rounds"),
    ("target_epsilon", "target", "epsilon"),
    ("dp_delta", "delta"),
    ("neighboring_relation", "relation"),
    ("num_active", "active"),
)
_SAME_CHOICES = (("DP-GT", "gradient-tracking"),)
_NOISE = "noise_multiplier", "noise_std", "noise_gain", "target_epsilon"
_POINTERS = {  # a word that is not taken -> options that it may stand for; the first that there is
    **dict.fromkeys((*_NOISE[:3], "sigma"), _NOISE),
    "eps": ("target_epsilon",),
    "budget": ("target_epsilon",),
    "lr": ("step_size",),
    "learning_rate": ("step_size",),
    "epochs": ("local_steps", "iterations"),
    "local_epochs": ("local_steps",),
    "steps": ("iterations",),
    **dict.fromkeys(("num_steps", "num_local_steps", "local_iterations"), ("local_steps", "iterations")),
    **dict.fromkeys(("batch_size", "batch"), ("sampling_rate",)),
    "sampling_rate": ("batch_size",),
    "target_delta": ("dp_delta",),
    "samples": ("num_train",),
    "agents": ("nodes",),
    "workers": ("nodes",),
    **dict.fromkeys(("fraction", "participation_rate"), ("participation_rate", "num_active", "sampling_rate")),
    **dict.fromkeys(("fraction_fit", "clients_per_round"), ("num_active",)),
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip"), ("clip_norm",)),
    "data": ("dataset",),
    **dict.fromkeys(("output", "output_dir"), ("out",)),
    "gpu": ("gpus", "devices"),
    "wandb": ("track",),
    "tensorboard": ("track",),
    "logger": ("track",),
    "topology": ("graph",),
    **dict.fromkeys(("algorithm", "strategy"), ("method",)),
}
_CLOSE = 0.8  # share of common letters, above which one word is another one misspelt


def spelled(name: str, known: Collection[str]) -> str | None:
    """The name that a command has for an option, by whichever command's name it is called; None where it has none.

    Examples:
        >>> spelled("sites", ["nodes", "rounds"]), spelled("iterations", ["nodes", "rounds"]), spelled("x", ["nodes"])
        ('nodes', 'rounds', None)
    """
    if name in known:
        return name
    return next((one for group in SAME if name in group for one in group if one in known), None)


def chosen(word: str, known: Iterable[str]) -> str | None:
    """The choice with the letters and digits of a word, whatever their case, or of another name of it; None without.

    Examples:
        >>> chosen("privsgp-vr", ["PrivSGP", "PrivSGP-VR"]), chosen("gradient-tracking", ["DP-GT"]), chosen("x", ["y"])
        ('PrivSGP-VR', 'DP-GT', None)
    """
    names = [word, *(one for group in _SAME_CHOICES if letters(word) in map(letters, group) for one in group)]
    alike = [one for one in known if letters(one) in map(letters, names)]
    return word if word in alike else alike[0] if len(alike) == 1 else None


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word, or another taken name of it, that an unknown word most likely stands for; None without.

    A word of the vocabulary stands for what it means, and never for a word that is spelt alike.

    Examples:
        >>> options = "node_epsilons", "target_epsilon", "table", "label_column", "iterations", "step_size"
        >>> [nearest(word, options) for word in ("epsilons", "label", "itertions", "lr", "sites")]
        ['epsilon', 'label_column', 'iterations', 'step_size', None]
    """
    if word in _POINTERS or any(word in group for group in SAME):
        meant = (spelled(one, known) for one in (word, *_POINTERS.get(word, ())))
        return next(filter(None, meant), None)
    also = [one for group in SAME if any(name in known for name in group) for one in group]
    of_letters = {letters(one): one for one in (*also, *known)}
    plain, parts = letters(word), {*_parts(word)}
    holding = [letters(one) for one in of_letters.values() if parts and parts <= {*_parts(one)}]
    for words, least in ((of_letters, _CLOSE), (holding, 0.0), (of_letters, 0.6)):
        if near := difflib.get_close_matches(plain, words, n=1, cutoff=least):
            return of_letters[near[0]]
    return None


def hint(word: str, known: Collection[str], shown: Callable[[str], str] = str) -> str:
    """The sentence that names the nearest known word, with a space behind it; empty without one.

    Examples:
        >>> hint("itertions", ["iterations"], flag)
        'Did you mean --iterations? '
    """
    near = nearest(word, known)
    unit = "It has another unit (docs/epsilon.md). " if word in _NOISE and near in _NOISE[:-1] else ""
    return "" if near is None else f"Did you mean {shown(near)}? {unit}"


def by_spaces(words: Iterable[str]) -> str:
    """The remedy for values that commas part; empty where no word has a comma.

    Examples:
        >>> by_spaces(["1,3,8"])
        'Separate values by spaces: 1 3 8.'
    """
    text = " ".join(words)
    return f"Separate values by spaces: {' '.join(text.replace(',', ' ').split())}." if "," in text else ""


def flag(name: str) -> str:
    """Flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"


def names(option: str) -> list[str]:
    """The flags of an option by each command's name for it, its own first.

    Examples:
        >>> names("--batch")
        ['--batch', '--batch-size']
    """
    own = option.removeprefix("--").replace("-", "_")
    group = next((group for group in SAME if own in group), (own,))
    return [option, *(flag(one) for one in group if one != own)]


def typed(option: str, words: Iterable[str]) -> str:
    """The flag of an option as the words of a command line name it; its own where they do not.

    Examples:
        >>> typed("--target-epsilon", ["--sites", "3", "--epsilon=-1"])
        '--epsilon'
    """
    given = {word.partition("=")[0] for word in words}
    return next((name for name in names(option) if name in given), option)


def letters(value: object) -> str:
    """Letters and digits of a name, in lower case: CIFAR-10 is cifar10."""
    return "".join(filter(str.isalnum, str(value).lower()))


def _parts(word: str) -> list[str]:
    """Words of a name, in the singular."""
    return [part.removesuffix("s") for part in word.lower().replace("-", "_").strip("_").split("_")]
