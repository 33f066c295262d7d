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

from jaxfl.frame.experiment import Request
from jaxfl.frame.options import text_of


def print_help(request: Request, of_frame: Any, last: Collection[str]) -> None:
    """Print the options with their values, and the options that vary.

    Args:
        asked: the request that the arguments beside --help make.
        of_frame: the record of the options that every experiment has.
        last: the options of jobs and machines, which stand in a group of their own at the end.
    """
    groups: dict[str, Any] = {}
    texts = {"jobs_and_devices": "Processes and devices that compute, and the compiled programs that are kept."}
    for name, record in {**vars(request.config), "every_experiment": of_frame}.items():
        kinds, of_fields = get_type_hints(type(record)), _texts(type(record))
        texts[name] = " ".join(str(type(record).__doc__).split())
        for field in dataclasses.fields(record):
            kind = Annotated[kinds[field.name], tyro.conf.arg(help=of_fields.get(field.name, ""))]
            group = groups.setdefault("jobs_and_devices" if field.name in last else name, [])
            group.append((field.name, kind, dataclasses.field(default=getattr(record, field.name))))
    groups["jobs_and_devices"] = groups.pop("jobs_and_devices")
    records = [
        (name, dataclasses.make_dataclass(name, fields, namespace={"__doc__": texts[name]}))
        for name, fields in groups.items()
    ]
    axes = [" ".join(f"{name}={','.join(map(text_of, part[name]))}" for name in part) for part in request.grid]
    comparison = f"\n\nwould compare: {', each with '.join(axes)}" if axes else ""
    with contextlib.suppress(SystemExit):
        tyro.cli(
            dataclasses.make_dataclass("Options", records),
            prog=request.experiment.command,
            description=request.experiment.description + comparison,
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
