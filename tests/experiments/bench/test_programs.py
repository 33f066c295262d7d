"""Counts of compiled programs: the rules on a program of a few lines, and what rounds may cost on an H200 and a TPU."""

import json
import os
import subprocess
import sys

import pytest

from experiments.bench import programs, suites
from jaxfl.core import ArgumentError

PROGRAM = """\
HloModule chunk

%fused (table: f32[100,4], row: f32[1,4], at: s32[]) -> f32[100,4] {
  %table = f32[100,4]{1,0} parameter(0)
  %row = f32[1,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[100,4]{1,0} dynamic-update-slice(%table, %row, %at, %zero)
}

%step (held: (s32[], f32[8])) -> (s32[], f32[8]) {
  %held = (s32[], f32[8]{0}) parameter(0)
  %index = s32[] get-tuple-element(%held), index=0
  %vector = f32[8]{0} get-tuple-element(%held), index=1
  %product = f32[8]{0} custom-call(%vector), custom_call_target="__cublas$gemm"
  ROOT %next = (s32[], f32[8]{0}) tuple(%index, %product)
}

%goes_on (held: (s32[], f32[8])) -> pred[] {
  %held.1 = (s32[], f32[8]{0}) parameter(0)
  %index.1 = s32[] get-tuple-element(%held.1), index=0
  ROOT %less = pred[] compare(%index.1, %index.1), direction=LT
}

%below_three (held: (s32[], f32[8])) -> pred[] {
  %held.2 = (s32[], f32[8]{0}) parameter(0)
  %end.1 = s32[] constant(3)
  %index.2 = s32[] get-tuple-element(%held.2), index=0
  ROOT %less.1 = pred[] compare(%index.2, %end.1), direction=LT
}

%round (carry: (s32[])) -> (s32[]) {
  %carry = (s32[], f32[8]{0}, f32[100,4]{1,0}, f32[1,4]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%carry), index=0
  %v = f32[8]{0} get-tuple-element(%carry), index=1
  %t = f32[100,4]{1,0} get-tuple-element(%carry), index=2
  %r = f32[1,4]{1,0} get-tuple-element(%carry), index=3
  %copied = f32[8]{0} copy(%v)
  %inner = (s32[], f32[8]{0}) tuple(%k, %copied)
  %three = (s32[], f32[8]{0}) while(%inner), condition=%below_three, body=%step
  %some = (s32[], f32[8]{0}) while(%three), condition=%goes_on, body=%step
  %chosen = (s32[], f32[8]{0}) conditional(%k, %some, %some), branch_computations={%step, %step}
  %v.1 = f32[8]{0} get-tuple-element(%chosen), index=1
  %t.1 = f32[100,4]{1,0} fusion(%t, %r, %k), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[8]{0}, f32[100,4]{1,0}, f32[1,4]{1,0}) tuple(%k, %v.1, %t.1, %r)
}

ENTRY %main (start: (s32[])) -> (s32[]) {
  %start = (s32[]) parameter(0)
  ROOT %end = (s32[]) while(%start), condition=%goes_on, body=%round, backend_config={"known_trip_count":{"n":"50"}}
}
"""


def test_a_round_is_counted_by_its_kernels():
    counts = programs.count_round(programs.read_program(PROGRAM), 50)
    # A copy, a loop of three products, a step of a loop without a known length, a branch, an update of a row. 64 bytes
    # each for the copy and five products; the row of 16 is read and written, with the four of its place.
    assert counts == {"kernels": 7, "calls": 5, "copies": 1, "loops": 1, "branches": 1, "bytes": 6 * 64 + 2 * 16 + 4}


def test_a_machine_without_the_compilers_is_told_so(monkeypatch):
    monkeypatch.setattr(programs, "missing", lambda: "libtpu is not installed")
    with pytest.raises(ArgumentError, match=r"^suite: .*libtpu"):
        suites.run("programs")


@pytest.mark.slow
def test_rounds_cost_at_most_what_is_wanted(tmp_path):
    """In a process of its own, without the settings by which tests compile."""
    if programs.missing():
        pytest.skip("needs the compilers of an H200 and a TPU v5e")
    settings = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "experiments.bench", "programs", "--json", str(tmp_path / "counts.json")]
    subprocess.run(command, env=environment, check=True, timeout=3000, capture_output=True)
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert {name: counts[name]["value"] for name, most in programs.WANTED.items() if counts[name]["value"] > most} == {}
