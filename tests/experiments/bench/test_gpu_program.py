"""The reader of compiled programs, the rows of `bench gpu_program`, and limits on what a round does on a GPU."""

import importlib.metadata
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import gpu_program, scale, suites
from experiments.bench.compiled_program import Counts, count, num_bytes, read_program
from experiments.bench.setting import KEY, Network, Setting, perceptron, random_data
from experiments.bench.timing import Measurement, Report
from jaxfl.core.platform import tracing_for
from jaxfl.models import cnn, dzofl_cnn, resnet20
from jaxfl.training.chunks import check_start
from jaxfl.training.compilation_cache import compilation_cache

# What a round may do at most in the program compiled for an H200 without one, by row; what is wanted is in the suite.
LIMITS = {
    "privsgp_vr": {"kernels": 66, "host_waits": 0.06, "large_copies": 0},
}

PIECES = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%double (a: f32[100]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  ROOT %twice = f32[100]{0} add(%a, %a)
}

%compare (k: s32[]) -> pred[] {
  %k = s32[] parameter(0)
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%k, %most), direction=LT
}

%body (held: (s32[], f32[100])) -> (s32[], f32[100]) {
  %held = (s32[], f32[100]{0}) parameter(0)
  %first = s32[] get-tuple-element(%held), index=0
  %second = f32[100]{0} get-tuple-element(%held), index=1
  %kernel.1 = f32[100]{0} fusion(%second), kind=kLoop, calls=%double
  %kernel.2 = f32[100]{0} fusion(%kernel.1), kind=kLoop, calls=%double
  ROOT %both = (s32[], f32[100]{0}) tuple(%first, %kernel.2)
}

%condition (held: (s32[], f32[100])) -> pred[] {
  %held = (s32[], f32[100]{0}) parameter(0)
  %first = s32[] get-tuple-element(%held), index=0
  ROOT %go = pred[] fusion(%first), kind=kLoop, calls=%compare
}

%cheap (only: f32[100]) -> f32[100] {
  ROOT %only = f32[100]{0} parameter(0)
}

%dear (only: f32[100]) -> f32[100] {
  %only = f32[100]{0} parameter(0)
  ROOT %kernel.3 = f32[100]{0} fusion(%only), kind=kLoop, calls=%double
}
"""
LOOP = "%loop = (s32[], /*index=1*/f32[100]{0}) while(%pair), condition=%condition, body=%body"


def counts(*lines, pieces="", **options):
    """Counts of a program with these instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: f32[100]) -> f32[100] {{\n  %p = f32[100]{{0}} parameter(0)\n{body}\n}}\n"
    program = read_program(f"HloModule test, is_scheduled=true\n{PIECES}{pieces}\n{entry}")
    return count(program, **{"open_trips": 5, "large_bytes": 400, **options})


def test_a_loop_of_a_known_length_makes_its_kernels_as_often_as_it_runs_and_no_host_wait():
    known = LOOP + ', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'
    assert counts(known) == Counts(kernels=6, bytes_moved=6 * 800)
    nested = f"""
%outer (held: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %pair = (s32[], f32[100]{{0}}) parameter(0)
  ROOT {known}
}}
"""
    twice = known.replace("%body", "%outer").replace('"3"', '"2"')
    assert counts(twice, pieces=nested) == Counts(kernels=12, bytes_moved=12 * 800)


def test_a_loop_of_another_length_waits_once_more_than_it_runs():
    """Its condition is a kernel, too; inside of another, such a loop runs once."""
    assert counts(LOOP) == Counts(kernels=5 * 2 + 6, host_waits=6, bytes_moved=10 * 800 + 6 * 5)
    nested = f"""
%outer (held: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %pair = (s32[], f32[100]{{0}}) parameter(0)
  ROOT {LOOP}
}}
"""
    inside = counts(LOOP.replace("%body", "%outer"), pieces=nested)
    assert (inside.kernels, inside.host_waits) == (5 * (2 + 2) + 6, 5 * 2 + 6)


def test_a_whole_chunk_counts_once_and_the_rounds_of_a_part_of_one_not_at_all():
    """Two loops that ask; one of them holds five rounds, as many as a chunk has."""
    rounds = LOOP + ', backend_config={"known_trip_count":{"n":"5"}}'
    whole = f"""
%whole (held: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %pair = (s32[], f32[100]{{0}}) parameter(0)
  ROOT {rounds}
}}
"""
    lines = [LOOP.replace("%body", "%whole"), LOOP.replace("%loop", "%rest")]
    both = counts(*lines, pieces=whole)
    assert (both.kernels, both.host_waits) == (5 * 2 + 2 + 1, 2 + 1)
    assert counts(*lines, pieces=whole.replace('"5"', '"4"')).kernels > both.kernels


BRANCHES = ["branch_computations={%cheap, %dear, %cheap}", "true_computation=%dear, false_computation=%cheap"]


def in_loop(line):
    """A program that runs an instruction three times, and the computation that it needs."""
    known = LOOP.replace("%body", "%outer") + ', backend_config={"known_trip_count":{"n":"3"}}'
    return (
        known,
        f"""
%outer (held: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %p = f32[100]{{0}} parameter(0)
  ROOT {line}
}}
""",
    )


@pytest.mark.parametrize("branches", BRANCHES)
def test_of_branches_in_a_loop_the_most_expensive_one_counts_and_one_host_wait(branches):
    known, outer = in_loop(f"%chosen = f32[100]{{0}} conditional(%p, %p, %p, %p), {branches}")
    assert counts(known, pieces=outer) == Counts(kernels=3, host_waits=3, bytes_moved=3 * 800)
    assert counts(known, pieces=outer, of_branches=min) == Counts(host_waits=3)


def test_of_branches_outside_of_loops_the_one_with_the_fewest_host_waits_counts_and_one_host_wait():
    """A chunk of rounds that runs its full length without looking, or else as many as it is told."""
    known = LOOP + ', backend_config={"known_trip_count":{"n":"5"}}'
    both = "".join(
        f"\n%{name} (pair: (s32[], f32[100])) -> (s32[], f32[100]) {{\n  %pair = (s32[], f32[100]{{0}}) parameter(0)\n"
        f"  ROOT {line}\n}}\n"
        for name, line in (("full", known), ("rest", LOOP))
    )
    line = "%chosen = (s32[], f32[100]{0}) conditional(%p, %p, %p), branch_computations={%rest, %full}"
    assert counts(line, pieces=both) == Counts(kernels=10, host_waits=1, bytes_moved=10 * 800)


IN_PLACE = """
%fused (table: f32[1000,10], rows: f32[2,10], places: s32[2]) -> (f32[1000,10], f32[3,10]) {
  %table = f32[1000,10]{1,0} parameter(0)
  %rows = f32[2,10]{1,0} parameter(1)
  %places = s32[2]{0} parameter(2)
  %old = f32[3,10]{1,0} gather(%table, %places), slice_sizes={1,10}
  %new = f32[1000,10]{1,0} UPDATE
  ROOT %both = (f32[1000,10]{1,0}, f32[3,10]{1,0}) tuple(%new, %old)
}
"""


@pytest.mark.parametrize(
    "update",
    [
        "scatter(%table, %places, %rows), to_apply=%add",
        "dynamic-update-slice(%table, %rows, %places, %places)",
    ],
)
def test_an_array_that_is_updated_in_place_counts_by_its_updates_one_that_is_sliced_by_its_slices(update):
    """Read: three rows, the updates, the places. Written: the updates and the three rows; else all of the table."""
    line = "%kernel = (f32[1000,10]{1,0}, f32[3,10]{1,0}) fusion(%t, %r, %i), kind=kLoop, calls=%fused"
    where = ["%t = f32[1000,10]{1,0} parameter(1)", "%r = f32[2,10]{1,0} parameter(2)", "%i = s32[2]{0} parameter(3)"]
    in_place = counts(*where, line, pieces=IN_PLACE.replace("UPDATE", update))
    assert in_place.bytes_moved == (120 + 80 + 8) + (80 + 120)
    whole = counts(*where, line, pieces=IN_PLACE.replace("UPDATE", "add(%table, %table)"))
    assert whole.bytes_moved == (40_000 + 8) + (40_000 + 120)


def test_library_calls_copies_and_calls_into_python():
    gemm = '%g = (f32[100]{0}, s8[4194304]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm"'
    triton = '%t = f32[100]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton"'
    python = '%c = f32[100]{0} custom-call(%p), custom_call_target="xla_ffi_python_gpu_callback"'
    copies = [
        "%copy.1 = f32[100]{0} copy(%p)",
        "%start = (f32[100]{0}, f32[100]{0}, u32[]) copy-start(%p)",
        "%copy.2 = f32[100]{0} copy-done(%start)",
        "%copy.3 = f32[100]{0} fusion(%p), kind=kLoop, calls=%wrapped_copy",
    ]
    wrapped = """
%wrapped_copy (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  ROOT %copied = f32[100]{0} copy(%p)
}
"""
    assert counts(gemm) == Counts(kernels=1, bytes_moved=1200, library_calls=1)
    assert counts(triton) == Counts(kernels=1, bytes_moved=800)
    assert counts(python) == Counts(kernels=1, host_waits=1, bytes_moved=800)
    assert counts(*copies, pieces=wrapped) == Counts(kernels=3, bytes_moved=2400, large_copies=3)
    assert counts(*copies, pieces=wrapped, large_bytes=401).large_copies == 0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("bf16[3,5]{1,0}", 30), ("pred[7]{0:S(5)}", 7), ("(s32[], (f8e4m3fn[4]{0}, c64[2]{0}))", 24), ("token[]", 0)],
)
def test_bytes_of_shapes(shape, expected):
    assert num_bytes(shape) == expected


@pytest.mark.parametrize(("is_traced", "waits"), [(False, 0), (True, 8)])
def test_loops_of_a_program_that_jax_compiled(is_traced, waits):
    """Whether the loop's length is known is what the compiler says."""

    def run(x, length):
        return jax.lax.fori_loop(0, length if is_traced else 7, lambda _, y: jnp.sin(y @ x), x)

    compiled = jax.jit(run).lower(jnp.ones((8, 8)), jnp.int32(7)).compile()
    read = count(read_program(compiled.as_text() or ""), open_trips=7, large_bytes=32)
    assert read.host_waits == waits
    assert read.kernels >= 7


MLP = perceptron(12, 4, 3)
RESNET = Network(resnet20((8, 8, 3), 3, widths=(4, 6, 8), blocks=(1, 1, 1)), "ResNet-20", (8, 8, 3), 3)
SMALL = Setting(MLP, 4, batch_size=2, samples=6, rounds=3)
CLASSES = SMALL._replace(network=RESNET, num_nodes=6, num_active=3, num_local_steps=2)
TINY = {
    "privsgp_vr": SMALL,
    "privsgp": SMALL,
    "resnet20_float32": SMALL._replace(network=RESNET),
    "resnet20_bfloat16": SMALL._replace(network=RESNET),
    "embracing_uniform": CLASSES,
    "embracing_stratified": CLASSES,
    "tracking": SMALL._replace(num_nodes=5),
    "ali_dpfl": SMALL._replace(network=Network(cnn((8, 8, 1), channels=(2, 3), window=3, hidden=4), "CNN", (8, 8, 1))),
    "dzofl": SMALL._replace(network=Network(dzofl_cnn((8, 8, 1), channels=(2, 3), window=3), "CNN", (8, 8, 1), 2)),
}


def test_every_row_has_a_setting():
    assert set(TINY) == set(gpu_program.ROWS) == set(gpu_program.SETTINGS)


@pytest.mark.slow
def test_rows_are_what_they_are_named_after():
    built = {}
    with tracing_for("gpu"):
        for row, setting in TINY.items():
            algorithm, data = gpu_program.ROWS[row](setting), random_data(setting)
            state = check_start(algorithm, KEY, data)
            built[row] = state, jax.jit(algorithm.round).trace(KEY, state, data)
            assert jax.tree.structure(built[row][1].out_info[0]) == jax.tree.structure(state)
    assert built["privsgp_vr"][0].gradient.table.shape[:2] == (4, 6)
    assert built["privsgp"][0].gradient is None
    traced = {row: str(of.jaxpr) for row, (_, of) in built.items()}
    assert "bf16" in traced["resnet20_bfloat16"]
    assert "bf16" not in traced["resnet20_float32"]


@pytest.mark.slow
def test_clients_of_the_layerwise_rows_are_a_third_of_each_class():
    uniform, stratified = (gpu_program.layerwise(CLASSES, stratified=each) for each in (False, True))
    data = random_data(CLASSES)
    for algorithm, classes in ((uniform, None), (stratified, [0, 1, 2])):
        state = check_start(algorithm, KEY, data)
        draws = jax.jit(algorithm.draw)(KEY, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state), data)
        assert draws.active.shape == (3,)
        if classes:
            assert (np.asarray(draws.active) // 2).tolist() == classes


def test_numbers_of_a_chunk_are_given_for_a_round():
    report = Report("gpu_program/", "")
    most, least = Counts(200, 5, 3 * 10**9, 20, 10), Counts(100, 5, 2 * 10**9, 0, 0)
    chunk = gpu_program.Chunk(most, least, 10**9, 2 * 10**9, 7.0)
    gpu_program.numbers_of(report, "privsgp", SMALL._replace(rounds=10), chunk)
    values = {name.removeprefix("gpu_program/"): (one.value, one.spread) for name, one in report.measurements.items()}
    assert values == {
        "privsgp_kernels": (20.0, (10.0, 20.0)),
        "privsgp_host_waits": (0.5, (0.5, 0.5)),
        "privsgp_bytes": (0.3, (0.2, 0.3)),
        "privsgp_library_calls": (2.0, (0.0, 2.0)),
        "privsgp_large_copies": (1.0, (0.0, 1.0)),
        "privsgp_temporaries": (1.0, (1.0, 1.0)),
        "privsgp_arguments": (2.0, (2.0, 2.0)),
        "compile_privsgp": (7.0, (7.0, 7.0)),
    }
    assert all("for an H200 without one" in one.against for one in report.measurements.values())


def test_the_suite_compares_uniform_with_stratified_sampling(monkeypatch):
    made = {"embracing_uniform": (600, 200), "embracing_stratified": (400, 400)}

    def chunk(row, _):
        most, least = made.get(row, (100, 100))
        return gpu_program.Chunk(Counts(kernels=most), Counts(kernels=least), 0, 0, 0.0)

    monkeypatch.setattr(gpu_program, "compile_chunk", chunk)
    report = gpu_program.suite()
    ratio = report["gpu_program/embracing_uniform_vs_stratified"]
    assert (ratio.value, ratio.spread) == (1.5, (0.5, 1.5))
    assert set(gpu_program.AT_MOST) <= set(report)


def test_a_suite_says_what_it_is_missing(monkeypatch):
    versions = dict.fromkeys(("jaxlib", *gpu_program.PLUGIN, *gpu_program.COMPILER), "0.11.2")

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert gpu_program.missing() is None
    versions["jaxlib"] = "0.11.3"
    assert gpu_program.missing() == "jax-cuda13-plugin is of version 0.11.2, which jaxlib 0.11.3 does not load."
    del versions["nvidia-nvvm"]
    assert (gpu_program.missing() or "").startswith("nvidia-nvvm is not installed; on Python 3.12 or later, ")


def test_a_suite_that_misses_something_is_skipped_with_its_reason(tmp_path, monkeypatch, capsys):
    """Alone, when nothing is written, and among others."""
    monkeypatch.setattr(gpu_program, "missing", lambda: "no wheels.")
    monkeypatch.setattr(gpu_program, "compile_chunk", lambda *_: pytest.fail("it runs"))
    suites.run("gpu_program", tmp_path / "numbers.json")
    assert capsys.readouterr().out == "Suite gpu_program is skipped: no wheels.\n"
    assert not (tmp_path / "numbers.json").exists()
    monkeypatch.setattr(suites, "SUITES", {name: "" for name in ("gpu_program", "scale")})
    monkeypatch.setattr(scale, "suite", lambda: {"scale/time_n4": Measurement(2.0, "x", (2.0, 2.0), "y")})
    monkeypatch.setattr(scale, "plot", lambda *_: None)
    monkeypatch.setattr(scale, "AT_MOST", {"scale/time_n4": 1.5}, raising=False)
    suites.run("all", tmp_path / "numbers.json")
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert set(written) == {"scale/time_n4", "environment"}
    assert written["scale/time_n4"]["at_most"] == 1.5
    printed = capsys.readouterr().out
    assert "no wheels." in printed
    assert "≤ 1.5" in printed


@pytest.fixture
def compiler():
    """As `bench` compiles: optimized, and nothing from a cache."""
    if reason := gpu_program.missing():
        pytest.skip(reason)
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    with compilation_cache("off"):
        yield
    jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.parametrize("row", LIMITS)
def test_a_round_keeps_its_limits(row, compiler):
    setting = gpu_program.SETTINGS[row]
    chunk = gpu_program.compile_chunk(row, setting)
    a_round = {name: value / setting.rounds for name, value in chunk.counts._asdict().items()}
    assert {name: a_round[name] for name, most in LIMITS[row].items() if a_round[name] > most} == {}


@pytest.mark.slow
def test_every_row_compiles_and_has_the_published_numbers(compiler):
    report = gpu_program.suite(TINY)
    published = json.loads((suites.Path(suites.__file__).parents[1] / "results/bench/gpu_program.json").read_text())
    assert set(published) == {*report, "environment"}
    assert report["gpu_program/privsgp_vr_arguments"].value > report["gpu_program/privsgp_arguments"].value
    assert min(report[f"gpu_program/{row}_kernels"].value for row in TINY) > 10
