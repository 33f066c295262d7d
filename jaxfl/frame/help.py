"""Text of --help, by tyro: every option with its text and the value that it would have, in groups by record."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Collection
from typing import Annotated, Any, get_type_hints

import tyro

from jaxfl.core.vocabulary import flag, names
from jaxfl.frame.experiment import Request
from jaxfl.frame.options import text_of, varies_by_words

# Options that --help shows, beside all options of a user's own records; --help-all shows the others, too.
_USUAL = frozenset(
    """preset grid seeds baselines dataset data_dir label_column site_column id_column nodes partition alpha case model
    hidden graph links trust rank_by success method scheme iterations rounds num_rounds local_steps step_size batch_size
    clip_norm constants kappa participation_rate noise_std noise_multiplier noise_gain noise_error
    target_epsilon node_epsilons dp_delta bound rounds_error sampling_error clipping canaries layers seed
    evaluate_every x out resume quiet track devices launcher""".split()
)
_OURS = "jaxfl", "experiments"


def print_help(request: Request, of_frame: Any, last: Collection[str], *, all_options: bool) -> None:
    """Print the options with their values, and the options that vary.

    Args:
        request: the request that the arguments beside --help make.
        of_frame: the record of the options that every experiment has.
        last: the options of jobs and machines, which stand in a group of their own at the end.
        all_options: print all; otherwise the usual ones.
    """
    groups: dict[str, Any] = {}
    further, experiment = 0, request.experiment
    absent = ["baselines"] * (not experiment.baselines) + ["preset"] * (not experiment.presets)
    varied = {name: tuple(part[name]) for part in request.grid for name in part}
    texts = {"jobs_and_devices": "Processes and devices that compute, and the compiled programs that are kept."}
    for name, record in {**vars(request.config), "every_experiment": of_frame}.items():
        kinds, of_fields = get_type_hints(type(record)), _texts(type(record))
        texts[name] = " ".join(str(type(record).__doc__).split())
        is_ours = type(record).__module__.partition(".")[0] in _OURS
        for field in dataclasses.fields(record):
            if field.name in absent:
                continue
            if is_ours and not all_options and field.name not in _USUAL:
                further += 1
                continue
            kind, value, also = kinds[field.name], getattr(record, field.name), names(flag(field.name))[1:]
            if len(varied.get(field.name, ())) > 1 and varies_by_words(kind):
                kind, value = tuple[kind, ...], varied[field.name]
            text = of_fields.get(field.name, "") + (f" Also {', '.join(also)}." if also else "")
            kind = Annotated[kind, tyro.conf.arg(help=text)]
            group = groups.setdefault("jobs_and_devices" if field.name in last else name, [])
            group.append((field.name, kind, dataclasses.field(default=value)))
    if "jobs_and_devices" in groups:
        groups["jobs_and_devices"] = groups.pop("jobs_and_devices")
    records = [
        (name, dataclasses.make_dataclass(name, fields, namespace={"__doc__": texts[name]}))
        for name, fields in groups.items()
    ]
    axes = [" ".join(f"{name}={','.join(map(text_of, part[name]))}" for name in part) for part in request.grid]
    presets = " --list-presets shows the figures and tables of the paper." if experiment.presets else ""
    others = f"\n\n--help-all shows {further} further options.{presets}" if further else ""
    comparison = f"\n\nwould compare: {', each with '.join(axes)}" if axes else ""
    with contextlib.suppress(SystemExit):
        tyro.cli(
            dataclasses.make_dataclass("Options", records),
            prog=experiment.command,
            description=experiment.description + comparison + others,
            args=["--help"],
            config=(tyro.conf.OmitArgPrefixes,),
        )


@functools.cache
def _texts(record_type: type) -> dict[str, str]:
    """Field -> the string below it, of a record and what it inherits from; Python itself forgets these strings."""
    texts: dict[str, str] = {}
    for parent in reversed(record_type.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(field.target, ast.Name):
                assert isinstance(after.value, ast.Constant)
                texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts
