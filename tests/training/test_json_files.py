"""Indented JSON by the encoder in C."""

import json

import pytest

from jaxfl.training.json_files import write_json

VALUES = {
    "empty": [{}, [], "", None, [[]], {"a": {}}],
    "numbers": [1, -2.5, 1e-300, True, None, 2**70, 0.1],
    "texts, with: separators": ["a, b", 'a": "b', "\n  ", "ε", "\U0001f600"],
    "nested": {"a": {"b": [1, [2, {"c": 3}], "d"]}, "e": (4, 5), "f": [{"g": 0.5, "h": None}, {"i": [6]}]},
    "plain": {"x": 1, "y": "z"},
}


@pytest.mark.parametrize("content", [VALUES, {}, {"only": 1}, {"cases": {"a": {"mean": 0.5, "per_seed": [0.5, None]}}}])
def test_a_file_has_the_bytes_that_python_writes(tmp_path, content):
    write_json(tmp_path / "a.json", content)
    assert (tmp_path / "a.json").read_text() == json.dumps(content, indent=2, allow_nan=False) + "\n"


@pytest.mark.parametrize("content", [{"a": float("nan")}, {"a": [1.0, {"b": float("inf")}]}])
def test_numbers_that_json_does_not_have_are_refused(tmp_path, content):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", content)
    assert not (tmp_path / "a.json").exists()
