"""Definition of an experiment, and the way from its options to the lines of a comparison.

Options are laid over each other: the base point, changes of the data set, of the preset, of the command line, of the
grid. A later layer goes before an earlier one. Options that nobody gave may follow from others (`Experiment.derived`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.core import Algorithm, ArgumentError, Array
from jaxfl.frame.choose import counted, idle_options, refuse_idle
from jaxfl.frame.grid import Axis, Grid, points, refuse_many, without
from jaxfl.frame.options import UNSAID, flat, lay, options, refuse_out_of_range, text_of
from jaxfl.training import RunDirectory, Stop, Variant
from jaxfl.training.run_directory import slug

UNVARIED = ("seed",)  # what tells lanes of a line apart, and not lines
_SAME_NUMBERS = (*UNVARIED, "node_loop")  # what decides how a point is computed, and not what


class Layer(NamedTuple):
    """Changes and axes, those of a data set for instance."""

    changes: Mapping[str, Any] = {}
    grid: Grid = ()


class Preset(NamedTuple):
    """A figure, a table or a setting of the paper: changes, a grid and its pictures."""

    description: str
    cost: str  # measured time and the machine it was measured on
    changes: Mapping[str, Any] = {}
    grid: Grid = ()
    pictures: Callable[[Finished], Sequence[Path]] | None = None  # in place of the experiment's


class Line(NamedTuple):
    """One line of a comparison: a point, run with several seeds."""

    point: Any  # with the first seed
    seeds: tuple[int, ...]
    settings: dict[str, Any]  # the options that vary, as far as they count here


class Prepared(NamedTuple):
    """Variants and facts that an experiment makes from its lines."""

    variants: Mapping[str, Variant]  # in the order of the lines
    description: Sequence[str]  # what is about to run
    saved: Mapping[str, Any] = {}  # facts for config.json besides the options
    context: Any = None  # for `finish`


class Finished(NamedTuple):
    """A run that has ended, for pictures and closing words."""

    run: RunDirectory
    summary: dict[str, Any]
    lines: Mapping[str, Line]
    context: Any


class Experiment(NamedTuple):
    """An experiment: data that the frame runs.

    Attributes:
        name: of its command and of its folder in runs/.
        description: one sentence.
        base: the base point.
        prepare: lines -> variants; says what is wrong with them before any work. None where `run` takes its place.
        grid: the axes that the base compares.
        datasets: data set -> its layer; "other" for those that are not listed.
        presets: name -> preset.
        derived: option -> (flat options, names that were given) -> its value where it was not given; in this order.
        rivals: pairs of groups of options that exclude each other; a later layer drops the other group.
        labels: option -> how its value stands in the name of a line; the first one always does.
        name_of: (flat options, names that vary) -> name, in place of labels.
        aliases: argument of the library -> the option that it comes from.
        finish: what it adds to the summary, and its pictures besides those of the curves and the grid.
        columns: metrics of the closing table, or patterns of their names, svcca_*.
        run: (request) -> exit code, for an experiment that trains by itself.
    """

    name: str
    description: str
    base: Any
    prepare: Callable[[Mapping[str, Line]], Prepared] | None = None
    grid: Grid = ()
    datasets: Mapping[str, Layer] = {}
    presets: Mapping[str, Preset] = {}
    derived: Mapping[str, Callable[[Mapping[str, Any], Collection[str]], Any]] = {}
    rivals: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    labels: Mapping[str, str] = {}
    name_of: Callable[[Mapping[str, Any], Collection[str]], str] | None = None
    aliases: Mapping[str, str] = {}
    finish: Callable[[Finished], Sequence[Path]] | None = None
    columns: Sequence[str] = ("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model", "train_loss")
    run: Callable[[Request], int] | None = None


class Request(NamedTuple):
    """Request of a command line, or of a call from Python."""

    experiment: Experiment
    preset: str | None
    lines: Mapping[str, Line]
    grid: Grid  # all axes that were laid
    stop: Stop | None = None  # through which a signal asks to stop
    cache: str = "default"  # where jobs keep compiled programs, as --compilation-cache says it

    @property
    def point(self) -> Any:
        """The first line's: what does not vary is the same in all."""
        return next(iter(self.lines.values())).point


def request(experiment: Experiment, changes: Mapping[str, Any], grid: Grid = (), preset: str | None = None) -> Request:
    """The lines that options and axes, as given explicitly, ask for over a preset and the defaults.

    Points that differ in idle options alone are one line.

    Raises:
        ArgumentError: an unknown option, an idle one, one that is given and varied, a number that none of its kind
            can be, or two lines of one name.

    Guarantees:
        - an option that counts at no point is refused.
        - a later layer goes before an earlier one.
    """
    axes, point_of = _layers(experiment, changes, grid, preset)
    refuse_many(math.prod(len(next(iter(part.values()))) for part in axes))
    chosen = [point_of(values) for values in points(axes)]
    given = dict.fromkeys([*changes, *(name for part in grid for name in part)])
    flats = [flat(point) for point in chosen]
    idle = [idle_options(point, values) for point, values in zip(chosen, flats, strict=True)]
    known = options(type(experiment.base))
    for name in given:
        if all(name in names for names in idle):
            refuse_idle(chosen[0], name, flats[0])
    results = [name for name, option in known.items() if option.saved and name not in UNVARIED]
    lines: dict[Any, tuple[Any, list[int]]] = {}
    for point, values in zip(chosen, flats, strict=True):
        key = tuple(counted(point, values, results).items())
        seeds = lines.setdefault(key, (point, []))[1]
        if values.get("seed", 0) not in seeds:
            seeds.append(values.get("seed", 0))
    varied = _varied(axes, [dict(key) for key in lines])
    named: dict[str, Line] = {}
    slugs: dict[str, dict[str, Any]] = {}  # name of a folder -> settings of its line
    for key, (point, seeds) in lines.items():
        settings = {name: value for name, value in dict(key).items() if name in varied}
        name = _name(experiment, dict(key), varied)
        other = slugs.setdefault(slug(name), settings)
        if other is not settings:
            differing = (option for option in varied if other.get(option) != settings.get(option))
            clash = next(differing, next(option for part in axes for option in part))
            values = f"got {text_of(other.get(clash))} and {text_of(settings.get(clash))}"
            requirement = "must differ in six digits, and by more than a sign"
            raise ArgumentError(clash, requirement, values, "Compare values further apart.")
        named[name] = Line(point, tuple(seeds), settings)
    return Request(experiment, preset, named, axes)


def _layers(
    experiment: Experiment, changes: Mapping[str, Any], grid: Grid, preset: str | None
) -> tuple[list[Axis], Callable[[Mapping[str, Any]], Any]]:
    """All axes, and the function from a point's values on them to the point."""
    of_preset = experiment.presets[preset] if preset is not None else Layer()
    given = {*changes, *(name for part in grid for name in part)}
    for name in changes:
        if any(name in part for part in grid):
            found = f"got {text_of(changes[name])} beside --grid"
            raise ArgumentError(name, "must be given once", found, "Remove one of them.")
    for left, right in experiment.rivals:
        if set(left) & given and set(right) & given:
            name, other = sorted(set(left) & given)[0], sorted(set(right) & given)[0]
            found = f"got --{other.replace('_', '-')} beside it"
            raise ArgumentError(name, "excludes the other", found, "Leave one of the two out.")

    def of_dataset(dataset: str | None) -> Layer:
        return experiment.datasets.get(dataset or "", experiment.datasets.get("other", Layer()))

    known = options(type(experiment.base))
    first = {**flat(experiment.base), **of_preset.changes, **changes, **next(points(grid))}
    axes: list[Axis] = []
    below: list[Layer] = []
    for layer in (Layer({}, experiment.grid), of_dataset(first.get("dataset")), of_preset, Layer(changes, grid)):
        names = {*layer.changes, *(name for part in layer.grid for name in part)}
        names |= _rivals(experiment, names)
        axes = [*layer.grid, *without(axes, names)]  # what is compared by default varies fastest
        below = [Layer({n: v for n, v in other.changes.items() if n not in names}) for other in below]
        below.append(Layer(layer.changes))

    def point_of(values: Mapping[str, Any]) -> Any:
        dataset = {**first, **values}.get("dataset")
        laid = {**of_dataset(dataset).changes, **below[2].changes, **below[3].changes, **values}
        for name in _rivals(experiment, {*below[2].changes, *below[3].changes, *values}):
            laid.pop(name, None)
        told = frozenset(laid)
        point = lay(experiment.base, laid)
        for name, value in laid.items():
            refuse_out_of_range(name, value, known[name])
        for name, rule in experiment.derived.items():
            if name not in told:
                point = lay(point, {name: rule(flat(point), told)})
        return point

    return axes, point_of


def _rivals(experiment: Experiment, names: Collection[str]) -> set[str]:
    """The options that these ones exclude."""
    both_ways = [*experiment.rivals, *((right, left) for left, right in experiment.rivals)]
    return {name for group, other in both_ways if {*group} & {*names} for name in other}


def _varied(axes: Grid, keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of the axes that take several values among the lines where they count."""
    names = dict.fromkeys(name for part in axes for name in part if name not in UNVARIED)
    return [name for name in names if len({key[name] for key in keys if name in key}) > 1]


def _name(experiment: Experiment, values: Mapping[str, Any], varied: Collection[str]) -> str:
    """A line's name: what tells it apart."""
    if experiment.name_of is not None:
        return experiment.name_of(values, varied)
    shown = [name for number, name in enumerate(experiment.labels) if number == 0 or name in varied]
    shown += [name for name in varied if name not in experiment.labels]
    labels = {name: experiment.labels.get(name, name.replace("_", " ") + " {}") for name in shown if name in values}
    return ", ".join(label.format(text_of(values[name])) for name, label in labels.items()) or experiment.name


def programs(
    lines: Mapping[str, Line], algorithm: Callable[[Any], Algorithm]
) -> dict[str, tuple[Callable[[Mapping[str, Array]], Algorithm], dict[str, float]]]:
    """For each line how its algorithm is built under trace, and from which numbers.

    Lines that differ in traced options alone share one function, and with it one compiled program. A number that every
    line shares is a constant of the program, and so is one that switches a part off (0, None, infinity).

    Args:
        lines: with everything settled that the algorithm needs.
        algorithm: a point, whose traced options may be arrays, to the algorithm.

    Returns:
        Name of a line -> (numbers -> algorithm, numbers).
    """
    groups: dict[Any, dict[str, dict[str, float]]] = {}  # what is compiled -> line -> its numbers
    for name, line in lines.items():
        known = options(type(line.point))
        compiled = [option for option, facts in known.items() if facts.in_program and option not in UNVARIED]
        values = counted(line.point, flat(line.point), compiled)
        numbers = {option: value for option, value in values.items() if known[option].traced and _is_on(value)}
        constants = tuple((option, value) for option, value in values.items() if option not in numbers)
        groups.setdefault((constants, tuple(numbers)), {})[name] = numbers
    built = {}
    for numbers in groups.values():
        first = next(iter(numbers))
        differing = [option for option in numbers[first] if len({row[option] for row in numbers.values()}) > 1]

        def build(values: Mapping[str, Array], point: Any = lines[first].point) -> Algorithm:
            return algorithm(lay(point, values))

        for name, row in numbers.items():
            built[name] = build, {option: float(row[option]) for option in differing}
    return {name: built[name] for name in lines}


def variants_of(
    lines: Mapping[str, Line], algorithm: Callable[[Any], Algorithm], of_line: Callable[[str, Line], Mapping[str, Any]]
) -> dict[str, Variant]:
    """The variants of lines whose points have `data`, `run` and a method `task`.

    Args:
        lines, algorithm: as `programs` takes them.
        of_line: name and line -> further fields of its `Variant`, data and num_rounds at least.
    """
    variants = {}
    for name, (build, numbers) in programs(lines, algorithm).items():
        point, seeds, settings = lines[name]
        shared: dict[str, Any] = {"algorithm": build, "numbers": numbers, "seeds": seeds, "settings": settings}
        shared |= {"task": point.task(), "test": point.data.test_set(), "evaluate_every": point.run.evaluate_every}
        variants[name] = Variant(**shared, identity=identity(point), **of_line(name, lines[name]))
    return variants


def identity(point: Any) -> dict[str, Any]:
    """Values that tell a settled point from all others on the same data, as `Variant.identity` takes them."""
    known = options(type(point))
    names = [name for name, option in known.items() if option.in_program and name not in _SAME_NUMBERS]
    values = counted(point, flat(point), names)
    as_before = {name: known[name].before.get(value, value) for name, value in values.items()}
    return {name: value for name, value in as_before.items() if value is not UNSAID}


def few(texts: Sequence[str], most: int = 12) -> list[str]:
    """Lines to print: of many the first ones, and how many more there are."""
    return [*texts[:most], *([f"... and {len(texts) - most} more"] if len(texts) > most else [])]


def _is_on(value: Any) -> bool:
    """Whether a traced option holds a number that does not switch anything off."""
    return isinstance(value, int | float) and value != 0 and abs(value) != float("inf") and value == value
