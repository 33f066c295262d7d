"""The memory preflight: what is predicted, and that what cannot fit is refused before anything is trained."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from toy_problem import toy_algorithm, toy_data, toy_task, train_toy

from jaxfl.core import ArgumentError
from jaxfl.gradients import memory
from jaxfl.training import RunDirectory, loop, read_run
from jaxfl.training.preflight import PeakMemory, peak_text, predicted_peak, require_memory
from jaxfl.training.progress import ProgressReport

MEGABYTE = 10**6
STATE = jax.ShapeDtypeStruct((250, 1000), jnp.float32)  # one megabyte
INPUTS = {"images": jax.ShapeDtypeStruct((300, 1000), jnp.uint8)}


def compiled(fn, *arguments, donated=()):
    return jax.jit(fn, donate_argnums=donated).lower(*arguments).compile()


@pytest.fixture(scope="module")
def init():
    return compiled(lambda: jnp.ones(STATE.shape, STATE.dtype))


@pytest.fixture
def accelerator(monkeypatch):
    """Programs are compiled as for this machine, and judged as if checkpoints took no memory of the device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


class TestPrediction:
    def test_a_state_that_is_updated_in_place_counts_once(self, init, accelerator):
        in_place = compiled(lambda state: state + 1, STATE, donated=0)
        peak = predicted_peak(INPUTS, STATE, init, [in_place])
        assert (peak.inputs, peak.state) == (300_000, MEGABYTE)
        assert peak.working < 1000
        assert peak.total == sum(peak)
        copied = predicted_peak(INPUTS, STATE, init, [in_place, compiled(lambda state: state + 1, STATE)])
        assert copied.working == pytest.approx(MEGABYTE, abs=1000)

    def test_on_a_cpu_writing_a_checkpoint_counts(self, init, monkeypatch):
        small = compiled(lambda state: state[0], STATE)
        for platform, expected in (("cpu", 1.25 * MEGABYTE), ("gpu", 4000)):
            monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
            assert predicted_peak(INPUTS, STATE, init, [small]).working == expected

    def test_temporaries_of_the_worst_program_count(self, init, accelerator):
        # The product of all rows with all rows exists for a moment: 4 bytes each.
        products = compiled(lambda state: jnp.sort(state @ state.T, axis=0)[0], STATE)
        small = compiled(lambda state: state[0], STATE)
        peak = predicted_peak(INPUTS, STATE, init, [small, products, small])
        assert peak.working >= 4 * 250 * 250
        assert peak.working < MEGABYTE

    def test_temporaries_of_the_first_state_count(self, accelerator):
        costly = compiled(lambda: jnp.sort(jnp.sin(jnp.arange(10.0**6, dtype=jnp.float32)))[: 250 * 1000])
        assert predicted_peak(INPUTS, STATE, costly, []).working >= 4 * MEGABYTE

    def test_the_line_names_the_largest_variant_and_counts_inputs_as_free(self, monkeypatch):
        monkeypatch.setattr(memory, "available_bytes", lambda: 7 * MEGABYTE)
        small, large = PeakMemory(MEGABYTE, MEGABYTE, 0), PeakMemory(MEGABYTE, MEGABYTE, MEGABYTE // 2)
        assert peak_text({"A": large}) == "predicted peak memory 2.5 MB of 8.0 MB free"
        assert peak_text({"A": small, "B": large}) == "predicted peak memory 2.5 MB of 8.0 MB free (B)"

    @pytest.mark.parametrize(("node_loop", "named"), [("vmap", True), ("chunk:2", True), ("map", False)])
    def test_the_refusal_names_what_there_is_to_choose(self, monkeypatch, node_loop, named):
        monkeypatch.setattr(memory, "available_bytes", lambda: 2 * MEGABYTE)
        task = toy_task(node_loop)
        require_memory("A", PeakMemory(9 * MEGABYTE, MEGABYTE, MEGABYTE), task)  # the inputs are there already
        with pytest.raises(ArgumentError) as caught:
            require_memory("A", PeakMemory(0, MEGABYTE, MEGABYTE + 1), task)
        error = caught.value
        assert (error.argument, error.requirement) == ("variants", "must fit in memory")
        assert error.found == "A (1.0 MB of state, 1.0 MB to compute and save it) needs 2.0 MB and 2.0 MB are free"
        assert ('node_loop "map" or "chunk:k"' in error.remedy) == named
        for remedy in ("smaller batch", "fewer nodes", "factored or bfloat16 gradient table"):
            assert remedy in error.remedy


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestTraining:
    def test_a_variant_that_does_not_fit_is_refused_before_any_is_trained(self, tmp_path, monkeypatch):
        task = toy_task()
        variants = {"Small": toy_algorithm(task), "Large": toy_algorithm(task, table_width=100_000)}
        monkeypatch.setattr(memory, "available_bytes", lambda: MEGABYTE)
        inits = []
        monkeypatch.setattr(loop, "run_part", lambda *arguments: inits.append(arguments))
        with pytest.raises(ArgumentError, match=r"^variants: must fit .*; Large \(8\.0 MB of state, .* Take node_"):
            train_toy(tmp_path / "run", variants=variants)
        assert not inits
        assert not (tmp_path / "run").exists(), "the same --out can be used again"

    def test_a_resumed_run_that_no_longer_fits_loses_nothing(self, tmp_path, monkeypatch):
        settings = {"variants": {"A": toy_algorithm(toy_task())}, "seeds": (0,)}
        append = RunDirectory.append_metrics

        def interrupted(self, line):
            if line["round"] == 20:
                raise KeyboardInterrupt
            append(self, line)

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "append_metrics", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_toy(tmp_path, **settings)
        before = files(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 100)
            with pytest.raises(ArgumentError, match=r"^variants: must fit in memory; A .* 100 B are free"):
                train_toy(tmp_path, resume=True, **settings)
        assert files(tmp_path) == before

    def test_a_later_seed_with_more_data_is_refused_before_its_own_work(self, tmp_path, monkeypatch):
        # The table has an entry a sample and its size depends on the seed's data: 400 kB, then 4 MB.
        settings = {"variants": {"A": toy_algorithm(toy_task(), table_width=5000)}, "num_rounds": 5}
        settings["data"] = lambda seed: toy_data(seed, num_samples=40 if seed == 0 else 400)[0]
        monkeypatch.setattr(memory, "available_bytes", lambda: 2 * MEGABYTE)
        with pytest.raises(ArgumentError, match=r"^variants: .* needs 9\.\d MB and 2\.0 MB are free"):
            train_toy(tmp_path, **settings)
        run = read_run(tmp_path)
        assert [(line["seed"], line["round"]) for line in run.read_metrics()] == [(0, 0), (0, 5)]
        assert run.finished("A", 0) is not None

    def test_the_prediction_is_announced_unless_quiet(self, monkeypatch, tmp_path):
        shown = io.StringIO()
        console = rich.console.Console(file=shown, width=200)
        monkeypatch.setattr(
            loop, "ProgressReport", lambda total, quiet: ProgressReport(total, quiet=quiet, console=console)
        )
        settings = {"variants": {"A": toy_algorithm(toy_task())}, "num_rounds": 5, "seeds": (0,)}
        train_toy(tmp_path / "quiet", **settings)
        assert shown.getvalue() == ""
        summary = train_toy(tmp_path / "shown", quiet=False, **settings)
        assert shown.getvalue().startswith("predicted peak memory ")
        assert shown.getvalue().count("predicted") == 1
        assert summary["seconds"]["compile"] > 0

    def test_compile_seconds_of_what_is_prepared_are_recorded_once(self, tmp_path):
        task = toy_task()
        variants = {"A": toy_algorithm(task), "B": toy_algorithm(task)}
        summary = train_toy(tmp_path, variants=variants, num_rounds=5)
        run = read_run(tmp_path)
        seconds = [[(run.finished(name, seed) or {})["seconds"]["compile"] for seed in (0, 1)] for name in variants]
        assert all(first > 0 and second == 0 for first, second in seconds)
        np.testing.assert_allclose(summary["seconds"]["compile"], np.sum(seconds))
