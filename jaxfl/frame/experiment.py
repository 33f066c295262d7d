"""Definition of an experiment, and the way from its options to the rows of a comparison.

Layers of options: base, data set, preset, command line, grid; others may follow, but the seed (`Experiment.derived`).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core import Algorithm, ArgumentError, Array
from jaxfl.data.columns import is_file, refuse_other_file
from jaxfl.frame.choose import counted, existing, idle_options, refuse_idle
from jaxfl.frame.grid import Axis, Grid, configs, refuse_many, seeds_apart, without
from jaxfl.frame.options import ABSENT, flat, is_argument, options, override, refuse_out_of_range, text_of
from jaxfl.frame.own_files import fitted, of_own_file, of_sites
from jaxfl.frame.records import with_held_out
from jaxfl.frame.selecting import Search
from jaxfl.training import Case, RunDirectory, Stop
from jaxfl.training.case import Number
from jaxfl.training.clock import Clock
from jaxfl.training.run_directory import slug

BASELINES = ("alone", "pooled", "curator", "without_noise")
UNVARIED = ("seed",)  # options that differ between the lanes of a row, not between rows
_SAME_NUMBERS = (*UNVARIED, "node_loop")  # options that decide how a configuration is computed, not what it is


class Overlay(NamedTuple):
    """Changes of options, and axes of a grid; those of a data set, for instance."""

    changes: Mapping[str, Any] = {}
    grid: Grid = ()


class Preset(NamedTuple):
    """A figure, a table or a setting of the paper: changes, a grid and its pictures."""

    description: str
    cost: str  # measured time and the machine it was measured on
    changes: Mapping[str, Any] = {}
    grid: Grid = ()
    pictures: Callable[[Finished], Sequence[Path]] | None = None  # in place of the experiment's


class Row(NamedTuple):
    """Row of a comparison: a configuration, run with several seeds."""

    config: Any  # with the first seed
    seeds: tuple[int, ...]
    settings: dict[str, Any]  # the options that vary, as far as they count here; "baseline" of a baseline

    @property
    def baseline(self) -> str:
        """The member of `BASELINES` that the row is; empty for a row that is compared."""
        return self.settings.get("baseline", "")

    def samples_per_node(self) -> list[int]:
        """Samples of every node, over all seeds."""
        data_of = self.config.clients.data(self.config.data)
        return np.concatenate([np.asarray(data_of(seed).sizes) for seed in self.seeds]).tolist()


class Prepared(NamedTuple):
    """Cases and facts that an experiment makes from its rows."""

    cases: Mapping[str, Case]  # in the order of the rows
    description: Sequence[str]  # what is about to run
    saved: Mapping[str, Any] = {}  # facts for config.json besides the options
    context: Any = None  # for `finish`


class Finished(NamedTuple):
    """A run that has ended, for pictures and closing words."""

    run: RunDirectory
    summary: dict[str, Any]
    rows: Mapping[str, Row]
    context: Any


class Experiment(NamedTuple):
    """An experiment, described by data from which the frame runs it.

    Attributes:
        name: of its command and of its folder in runs/.
        description: one sentence.
        base: the base configuration.
        prepare: rows -> cases; says what is wrong with them before any work. None where `run` takes its place.
        grid: the axes that the base compares.
        datasets: data set -> its overlay; "other" for data sets that are not listed. A user's own file has none.
        presets: name -> preset.
        derived: option -> (flat options, names that were given) -> its value if not given, in this order.
        rivals: pairs of groups of options that exclude each other; a later overlay drops the other group.
        labels: option -> format of its value in the name of a row; the first option always stands there.
        name_of: (flat options, names that vary) -> name, in place of labels.
        aliases: argument of the library -> the option that it comes from.
        finish: adds to the summary, and draws pictures besides the curves and the grid.
        tell: prints the results, and draws, in place of the frame's tables and pictures; not of a private selection.
        columns: metrics of the closing table, or patterns of their names, svcca_*.
        baselines: one of `BASELINES` -> a function from a row to the options that make the baseline of it, or to None
            where it has none. alone: each site by itself, with its noise and its accountant; pooled: all samples in one
            place, without noise; curator: the same at the row's epsilon; without_noise: the row without its noise.
        run: (request) -> exit code, for an experiment that trains by itself.
    """

    name: str
    description: str
    base: Any
    prepare: Callable[[Mapping[str, Row]], Prepared] | None = None
    grid: Grid = ()
    datasets: Mapping[str, Overlay] = {}
    presets: Mapping[str, Preset] = {}
    derived: Mapping[str, Callable[[Mapping[str, Any], Collection[str]], Any]] = {}
    rivals: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    labels: Mapping[str, str] = {}
    name_of: Callable[[Mapping[str, Any], Collection[str]], str] | None = None
    aliases: Mapping[str, str] = {}
    finish: Callable[[Finished], Sequence[Path]] | None = None
    tell: Callable[[Request, Finished], Sequence[Path]] | None = None
    columns: Sequence[str] = ("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model", "train_loss")
    baselines: Mapping[str, Callable[[Row], Mapping[str, Any] | None]] = {}
    run: Callable[[Request], int] | None = None

    @property
    def command(self) -> str:
        """The command line that starts it; a user's own experiment has that of the running program."""
        package = (self.prepare or self.run).__module__.partition(".")[0]
        if package in ("experiments", "jaxfl"):  # of a checkout, of the wheel
            return f"python -m experiments.{self.name}" if package == "experiments" else f"jaxfl {self.name}"
        program = sys.modules["__main__"]
        if program.__spec__ is None:
            return shlex.join(["python", sys.argv[0]])
        return f"python -m {program.__spec__.name.removesuffix('.__main__')}"


class Request(NamedTuple):
    """Request of a command line, or of a call from Python."""

    experiment: Experiment
    preset: str | None
    rows: Mapping[str, Row]
    grid: Grid  # all axes, of defaults, data set, preset and command line
    stop: Stop | None = None  # through which a signal asks to stop
    changes: Mapping[str, Any] = {}  # as given, without what varies
    cache: str = "default"  # value of --compilation-cache, for jobs
    search: Search | None = None  # a private selection
    clock: Clock | None = None  # of the command
    arguments: Sequence[str] | None = None  # of the command

    @property
    def config(self) -> Any:
        """The first row's: what does not vary is the same in all."""
        return next(iter(self.rows.values())).config


def request(
    experiment: Experiment,
    changes: Mapping[str, Any],
    grid: Grid = (),
    preset: str | None = None,
    baselines: Sequence[str] = (),
    *,
    numbered: bool = False,
) -> Request:
    """The rows that options and axes, as given explicitly, ask for over a preset and the defaults.

    With `numbered` their names end with a number, so that values that read alike in six digits are told apart.
    Configurations that differ only in options that do not count there are one row; those whose `exists` is False are
    left out where others exist. Rows of baselines come last.

    Raises:
        ArgumentError: an option that is unknown, unused, repeated or out of range, two rows of one name, or a baseline
            that the experiment does not have.

    Guarantees:
        - an option that counts at no configuration is refused.
        - a later overlay takes precedence over an earlier one.
    """
    axes, config_of = _overlays(experiment, changes, grid, preset)
    refuse_many(math.prod(len(next(iter(part.values()))) for part in axes))
    table, apart = options(type(experiment.base)), seeds_apart(axes)
    points = [config_of(values) for values, _ in apart]
    points, apart = existing(points, apart)
    for seed in dict.fromkeys(seed for _, seeds in apart for seed in seeds):
        refuse_out_of_range("seed", seed, table["seed"])
    flats = [flat(config) for config in points]
    idle = [idle_options(config, values) for config, values in zip(points, flats, strict=True)]
    for name in dict.fromkeys([*changes, *(name for part in grid for name in part)]):
        if all(name in names for names in idle):
            refuse_idle(points[0], name, flats[0])
    results = [name for name, option in table.items() if option.saved and name not in UNVARIED]
    rows: dict[Any, tuple[Any, dict[int, None]]] = {}
    for config, values, (_, seeds) in zip(points, flats, apart, strict=True):
        key = tuple(counted(config, values, results).items())
        rows.setdefault(key, (config, {}))[1].update(dict.fromkeys(seeds or [values.get("seed", 0)]))
    varying = _varying(axes, [dict(key) for key in rows])
    result: dict[str, Row] = {}
    slugs: dict[str, dict[str, Any]] = {}  # name of a folder -> settings of its row
    for key, (config, seeds) in rows.items():
        settings = {name: value for name, value in dict(key).items() if name in varying}
        name = _name(experiment, dict(key), varying) + (f", run {len(result) + 1}" if numbered else "")
        other = slugs.setdefault(slug(name), settings)
        if other is not settings:
            differing = (option for option in varying if other.get(option) != settings.get(option))
            clash = next(differing, next(option for part in axes for option in part))
            values = f"got {text_of(other.get(clash))} and {text_of(settings.get(clash))}"
            requirement = "must differ in six digits, and by more than a sign"
            raise ArgumentError(clash, requirement, values, "Compare values further apart.")
        result[name] = Row(config, tuple(seeds), settings)
    for label in dict.fromkeys(baselines):
        result |= _baselines(experiment, label, result, results)
    return Request(experiment, preset, result, axes, changes=changes)


def _baselines(experiment: Experiment, label: str, rows: Mapping[str, Row], results: Sequence[str]) -> dict[str, Row]:
    """The baselines of one kind. A baseline that several rows share is one row, with the settings they agree in."""
    if label not in experiment.baselines:
        requirement = f"must be {' or '.join(experiment.baselines) or 'left out'} in {experiment.name}"
        raise ArgumentError("baselines", requirement, f"got {label}, which does not exist here", "Leave it out.")

    def key_of(config: Any) -> Any:
        return tuple(counted(config, flat(config), results).items())

    own = [row for row in rows.values() if not row.baseline]
    compared = {key_of(row.config) for row in own}
    sources: dict[Any, list[tuple[Any, Row]]] = {}  # the options that count -> the baseline, and a row that it is of
    made = [(override(row.config, new), row) for row in own if (new := experiment.baselines[label](row)) is not None]
    for config, row in made:
        if key_of(config) not in compared:
            sources.setdefault(key_of(config), []).append((config, row))
    if not sources:
        reasons = f"{label} is among the rows, or exists for none of them", "Leave it out."
        mute = "the rows have no noise", "Pass --target-epsilon, or leave it out."
        reasons = mute if made and label == "without_noise" else reasons
        raise ArgumentError("baselines", "must be further rows", *reasons)
    result = {}
    for pairs in sources.values():
        (config, first), settings = pairs[0], [row.settings for _, row in pairs]
        every = {name: value for each in reversed(settings) for name, value in each.items()}
        shared = {name: value for name, value in every.items() if all(s.get(name, value) == value for s in settings)}
        values = {name: value for name, value in flat(first.config).items() if name in shared or name not in every}
        whose = f"{_name(experiment, values, list(shared))}, " if shared else ""
        seeds = tuple(dict.fromkeys(seed for _, row in pairs for seed in row.seeds))
        result[whose + label] = Row(config, seeds, {**shared, "baseline": label})
    return result


def _overlays(
    experiment: Experiment, changes: Mapping[str, Any], grid: Grid, preset: str | None
) -> tuple[list[Axis], Callable[[Mapping[str, Any]], Any]]:
    """All axes, and the function from a configuration's values on them to the configuration."""
    of_preset = experiment.presets[preset] if preset is not None else Overlay()
    explicit = {*changes, *(name for part in grid for name in part)}
    for name in changes:
        if any(name in part for part in grid):
            found = f"got {text_of(changes[name])} beside several values"
            raise ArgumentError(name, "must be given once", found, "Remove one of them.")
    for left, right in experiment.rivals:
        if set(left) & explicit and set(right) & explicit:
            name, other = sorted(set(left) & explicit)[0], sorted(set(right) & explicit)[0]
            found = f"got --{other.replace('_', '-')} beside it"
            raise ArgumentError(name, "excludes the other", found, "Leave one of the two out.")

    def of_dataset(dataset: str | None) -> Overlay:
        refuse_other_file(dataset or "")
        listed = experiment.datasets.get(dataset or "", experiment.datasets.get("other", Overlay()))
        return Overlay() if is_file(dataset or "") else listed

    table = options(type(experiment.base))
    first = {**flat(experiment.base), **of_preset.changes, **changes, **next(configs(grid))}
    axes: list[Axis] = []
    below: list[Overlay] = []
    for overlay in (Overlay({}, experiment.grid), of_dataset(first.get("dataset")), of_preset, Overlay(changes, grid)):
        names = {*overlay.changes, *(name for part in overlay.grid for name in part)}
        names |= _rivals(experiment, names)
        axes = [*overlay.grid, *without(axes, names)]  # what is compared by default varies fastest
        below = [Overlay({n: v for n, v in other.changes.items() if n not in names}) for other in below]
        below.append(Overlay(overlay.changes))

    def config_of(values: Mapping[str, Any]) -> Any:
        _, _, preset_overlay, command_overlay = below
        given = {**preset_overlay.changes, **command_overlay.changes, **values}
        layer = {**of_dataset({**first, **values}.get("dataset")).changes, **given}
        for name in _rivals(experiment, given):
            layer.pop(name, None)
        layer |= of_sites(override(experiment.base, layer), given)
        names = frozenset(layer)
        config = fitted(override(experiment.base, layer), names)
        for name, value in layer.items():
            refuse_out_of_range(name, value, table[name])
        for name, rule in experiment.derived.items():
            if name not in names:
                config = fitted(override(config, {name: rule(flat(config), names)}), names)
        return config

    return axes, config_of


def _rivals(experiment: Experiment, names: Collection[str]) -> set[str]:
    """The options that these ones exclude."""
    both_ways = [*experiment.rivals, *((right, left) for left, right in experiment.rivals)]
    return {name for group, other in both_ways if {*group} & {*names} for name in other}


def _varying(axes: Grid, keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of the axes that take several values among the rows where they count."""
    names = dict.fromkeys(name for part in axes for name in part if name not in UNVARIED)
    return [name for name in names if len({key[name] for key in keys if name in key}) > 1]


def _name(experiment: Experiment, values: Mapping[str, Any], varying: Collection[str]) -> str:
    """A row's name: the options that tell it apart."""
    if experiment.name_of is not None:
        return experiment.name_of(values, varying)
    names = [name for number, name in enumerate(experiment.labels) if number == 0 or name in varying]
    names += [name for name in varying if name not in experiment.labels]
    labels = {name: experiment.labels.get(name, name.replace("_", " ") + " {}") for name in names if name in values}
    return ", ".join(label.format(text_of(values[name]) or "none") for name, label in labels.items()) or experiment.name


def programs(
    rows: Mapping[str, Row], algorithm: Callable[[Any], Algorithm]
) -> dict[str, tuple[Callable[[Mapping[str, Array]], Algorithm], dict[str, Number]]]:
    """Make each row's function that builds its algorithm under trace, and the numbers that it takes.

    Rows that differ only in traced options share one function, and with it one compiled program. A number that all
    rows share is a constant of the program, and so is a value that switches a part off (0, None, infinity).

    Args:
        rows: with everything settled that the algorithm needs.
        algorithm: a configuration, whose traced options may be arrays, to the algorithm.

    Returns:
        Name of a row -> (numbers -> algorithm, numbers).
    """
    groups: dict[Any, dict[str, dict[str, Any]]] = {}  # what is compiled -> row -> its numbers
    for name, row in rows.items():
        table, everything = options(type(row.config)), flat(row.config)
        in_program = [option for option, facts in table.items() if facts.in_program and option not in UNVARIED]
        values = counted(row.config, everything, in_program)
        numbers = {option: value for option, value in values.items() if is_argument(table[option], value, everything)}
        constants = tuple((option, value) for option, value in values.items() if option not in numbers)
        groups.setdefault((constants, tuple(numbers)), {})[name] = numbers
    results = {}
    for numbers in groups.values():
        first = next(iter(numbers))
        differing = [option for option in numbers[first] if len({each[option] for each in numbers.values()}) > 1]

        def build(values: Mapping[str, Array], config: Any = rows[first].config) -> Algorithm:
            return algorithm(override(config, values))

        for name, each in numbers.items():
            results[name] = build, {option: jax.tree.map(float, each[option]) for option in differing}
    return {name: results[name] for name in rows}


def cases_of(
    rows: Mapping[str, Row], algorithm: Callable[[Any], Algorithm], of_row: Callable[[str, Row], Mapping[str, Any]]
) -> dict[str, Case]:
    """The cases of rows whose configurations have `data`, `run` and a method `task`.

    Args:
        rows, algorithm: as `programs` takes them.
        of_row: name and row -> further fields of its `Case`, data and num_rounds at least.
    """
    cases = {}
    for name, (build, numbers) in programs(rows, algorithm).items():
        config, seeds, settings = rows[name]
        fields: dict[str, Any] = {"algorithm": build, "numbers": numbers, "seeds": seeds, "settings": settings}
        fields |= {"task": config.task(), "test": config.data.test_set(), "evaluate_every": config.run.evaluate_every}
        fields |= {"identity": identity(config), **of_row(name, rows[name])}
        fields |= of_own_file(config, fields.get("privacy"))
        fields["measures"] = with_held_out(config, fields.get("measures", {}))
        cases[name] = Case(**fields)
    return cases


def identity(config: Any) -> dict[str, Any]:
    """Values that tell a settled configuration from all others on the same data, as `Case.identity` takes them."""
    table = options(type(config))
    names = [name for name, option in table.items() if option.in_program and name not in _SAME_NUMBERS]
    values = counted(config, flat(config), names)
    as_before = {name: table[name].old_key_values.get(value, value) for name, value in values.items()}
    return {name: value for name, value in as_before.items() if value is not ABSENT}


def few(texts: Sequence[str], most: int = 12) -> list[str]:
    """Lines to print: the first ones, and the number of further ones."""
    return [*texts[:most], *([f"... and {len(texts) - most} more"] if len(texts) > most else [])]
