"""The memory preflight: what is predicted, and that what cannot fit is refused before anything is trained."""

import io
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest
import rich.console
from processes import interrupted, printed
from run_files import content, run_bytes
from toy_problem import TASK, toy_algorithm, toy_case, toy_task, train_toy

from jaxfl.core import ArgumentError
from jaxfl.gradients import memory
from jaxfl.training import loop, read_run, restore_state
from jaxfl.training.peak_memory import CHECKPOINT_SHARE, PeakMemory, peak_text, predicted_peak, require_memory
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


SAVING = """
import sys, threading, time
from pathlib import Path
import numpy as np, psutil
from jaxfl.training.checkpoint import Checkpoints

number, size = int(sys.argv[1]), 200_000_000
state = {f"{i}": np.random.default_rng(i).random(size // 4 // number, dtype=np.float32) for i in range(number)}
checkpoints, process, peaks = Checkpoints(Path(sys.argv[2]), 1), psutil.Process(), [0]

def watch():
    while True:
        peaks.append(process.memory_info().rss)
        time.sleep(0.001)

checkpoints.save(1, {"warm": np.ones(9)})
checkpoints.wait()
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
for round_index in (2, 3, 4):
    checkpoints.save(round_index, state)
checkpoints.wait()
print((max(peaks) - before) / size)
"""


@pytest.mark.parametrize("num_leaves", [1, 8])
@pytest.mark.quick_cases(1)
def test_a_checkpoint_takes_no_more_memory_than_is_counted(num_leaves, tmp_path):
    """The third one, too: what the first one took is given back."""
    command = [sys.executable, "-c", SAVING, str(num_leaves), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert 0.5 < float(done.stdout) <= CHECKPOINT_SHARE


@pytest.mark.slow
def test_a_sweep_takes_no_more_memory_than_is_predicted(tmp_path):
    """Nor far less: lanes fill what is free by that number."""
    measured = printed("training/sweep_memory.py", tmp_path, num_devices=1)
    assert 0.5 < measured["taken"] / measured["predicted"] < 1.0


class TestPrediction:
    def test_a_state_that_is_updated_in_place_counts_once(self, init, accelerator):
        in_place = compiled(lambda state: state + 1, STATE, donated=0)
        peak = predicted_peak(INPUTS, STATE, init, [in_place])
        assert (peak.inputs, peak.state) == (300_000, MEGABYTE)
        assert peak.working < 1000
        assert peak.total == sum(peak)
        copied = predicted_peak(INPUTS, STATE, init, [in_place, compiled(lambda state: state + 1, STATE)])
        assert copied.working == pytest.approx(MEGABYTE, abs=1000)

    def test_devices_that_share_a_state_hold_it_once(self, init, accelerator):
        in_place = compiled(lambda state: state + 1, STATE, donated=0)
        whole = predicted_peak(INPUTS, STATE, init, [in_place], num_copies=2)
        shared = predicted_peak(INPUTS, STATE, init, [in_place], num_copies=2, divided=True)
        assert (whole.inputs, whole.state) == (600_000, 2 * MEGABYTE)
        assert (shared.inputs, shared.state) == (600_000, MEGABYTE)

    def test_on_a_cpu_writing_a_checkpoint_counts(self, init, monkeypatch):
        small = compiled(lambda state: state[0], STATE)
        for platform, expected in (("cpu", CHECKPOINT_SHARE * MEGABYTE), ("gpu", 4000)):
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

    @pytest.mark.parametrize(("resident", "held", "total"), [(0, "1.0", "2.5"), (3, "3.0", "4.5")])
    def test_the_line_names_the_largest_case_and_what_is_held(self, resident, held, total, monkeypatch):
        """Inputs on an accelerator; on a CPU the process, which has them."""
        monkeypatch.setattr(memory, "available_bytes", lambda: 7 * MEGABYTE)
        monkeypatch.setattr(memory, "resident_bytes", lambda: resident * MEGABYTE)
        small, large = PeakMemory(MEGABYTE, MEGABYTE, 0), PeakMemory(MEGABYTE, MEGABYTE, MEGABYTE // 2)
        line = f"predicted peak memory {total} MB: {held} MB held, 1.5 MB more of 7.0 MB free"
        assert peak_text({"A": large}) == line
        assert peak_text({"A": small, "B": large}) == f"{line} (B)"

    @pytest.mark.parametrize(("node_loop", "named"), [("vmap", True), ("chunk:2", True), ("map", False)])
    def test_the_refusal_names_what_there_is_to_choose(self, monkeypatch, node_loop, named):
        monkeypatch.setattr(memory, "available_bytes", lambda: 2 * MEGABYTE)
        task = toy_task(node_loop)
        require_memory("A", PeakMemory(9 * MEGABYTE, MEGABYTE, MEGABYTE), STATE, task)  # the inputs are there already
        with pytest.raises(ArgumentError) as caught:
            require_memory("A", PeakMemory(0, MEGABYTE, MEGABYTE + 1), {"small": None, "rows": (STATE,)}, task)
        error = caught.value
        assert (error.argument, error.requirement) == ("cases", "must fit in memory")
        assert (
            error.found
            == "A (1.0 MB of state, most in rows.0; 1.0 MB to compute and save it) needs 2.0 MB and 2.0 MB are free"
        )
        assert ('node_loop "map" or "chunk:k"' in error.remedy) == named
        for remedy in ("smaller batch", "fewer nodes", "factored or bfloat16 gradient table"):
            assert remedy in error.remedy


class TestTraining:
    def test_a_case_that_does_not_fit_is_refused_before_any_is_trained(self, tmp_path, monkeypatch):
        algorithms = {"Small": toy_algorithm(TASK), "Large": toy_algorithm(TASK, table_width=100_000)}
        cases = {name: toy_case(algorithm) for name, algorithm in algorithms.items()}
        monkeypatch.setattr(memory, "available_bytes", lambda: MEGABYTE)
        monkeypatch.setattr(loop, "Lockstep", lambda *arguments, **options: pytest.fail("nothing is trained"))
        with pytest.raises(ArgumentError, match=r"^cases: .*; Large \(8\.0 MB of state, most in table; .* Take node_"):
            train_toy(tmp_path / "run", cases)
        assert not (tmp_path / "run").exists(), "the same --out can be used again"

    def test_a_resumed_run_that_no_longer_fits_loses_nothing(self, tmp_path, monkeypatch):
        cases = {"A": toy_case(seeds=(0,))}
        with interrupted(3), pytest.raises(KeyboardInterrupt):
            train_toy(tmp_path, cases)
        before = content(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 100)
            with pytest.raises(ArgumentError, match=r"^cases: must fit in memory; A .* 100 B are free"):
                train_toy(tmp_path, cases, resume=True)
        assert content(tmp_path) == before

    def test_lanes_that_do_not_fit_together_run_in_passes_of_one_program(self, tmp_path, monkeypatch):
        # A state is 400 kB; with what writing a checkpoint takes, two fit at once.
        made = toy_case(toy_algorithm(TASK, table_width=5000), num_rounds=5)
        cases = {name: made._replace(seeds=seeds) for name, seeds in (("A", (0, 1)), ("B", (2, 3, 4)))}
        train_toy(tmp_path / "together", cases)
        monkeypatch.setattr(memory, "available_bytes", lambda: (1 + CHECKPOINT_SHARE) * MEGABYTE)
        train_toy(tmp_path / "passes", cases)
        passes = read_run(tmp_path / "passes").passes
        assert [len(one.lanes) for one in passes] == [2, 2, 1]
        together, passes = (run_bytes(tmp_path / out).decode() for out in ("together", "passes"))
        assert sorted(together.splitlines()) == sorted(passes.splitlines())
        for name, seed in (("A", 1), ("B", 4)):
            states = [
                restore_state(read_run(tmp_path / out), name, cases[name], seed) for out in ("together", "passes")
            ]
            chex.assert_trees_all_equal(*states)

    def test_the_prediction_is_announced_unless_quiet(self, monkeypatch, tmp_path):
        shown = io.StringIO()
        console = rich.console.Console(file=shown, width=200)
        monkeypatch.setattr(
            loop, "ProgressReport", lambda total, quiet: ProgressReport(total, quiet=quiet, console=console)
        )
        cases = {"A": toy_case(num_rounds=5)}
        train_toy(tmp_path / "quiet", cases)
        assert shown.getvalue() == ""
        summary = train_toy(tmp_path / "shown", cases, quiet=False)
        lines = shown.getvalue().splitlines()
        assert lines[0].startswith("predicted peak memory ")
        assert lines[1] == "2 runs of A share one program, computed one after the other"
        assert summary["seconds"]["compile"] > 0
