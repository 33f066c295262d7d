"""A command that two processes run together: who writes and tells, and what is refused."""

import re
import signal
import time

import pytest
from processes import at_once, free_port
from run_files import begun, run_bytes

from jaxfl.frame.partners import GONE, HEARTBEAT_SECONDS
from jaxfl.training import read_results, read_run

pytestmark = pytest.mark.slow
RUN = "-m experiments.privsgp_vr --method PrivSGP-VR --hidden 8 --evaluate-every 2".split()
RUN += "--batch-size 2 --seeds 0 1 --noise-std 0.1 --compilation-cache off --quiet".split()
EIGHT = ["--nodes", "8", "--iterations", "6"]


def both(out, *options, of_second=(), meanwhile=None):
    """Exit codes and texts of two processes with two devices each; the second has options of its own."""
    place = ["--distributed", "--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--out", out]
    more = ((), of_second)
    commands = [[*RUN, *place, *options, *more[index], "--process-id", index] for index in (0, 1)]
    return at_once(commands, meanwhile=meanwhile, seconds=600)


def without_libraries(text):
    """Less what XLA logs, and what the library of collectives prints, in whatever pieces it comes."""
    text = re.sub(r"^[IWE]\d{4} .*$", "", text, flags=re.M)
    words = r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d"
    return re.sub(words, "", text).strip()


def test_process_0_alone_writes_and_tells_and_the_run_goes_on_nowhere_twice(tmp_path):
    ends = both(tmp_path / "run", *EIGHT)
    assert [code for code, _ in ends] == [0, 0], ends
    assert "their nodes over 4 devices" in begun(tmp_path / "run")["strategy"]
    assert "Run: " in ends[0][1]
    assert without_libraries(ends[1][1]) == ""
    lines = [(line["seed"], line["round"]) for line in read_run(tmp_path / "run").read_metrics()]
    assert lines == [(seed, number) for number in (0, 2, 4, 6) for seed in (0, 1)]
    assert [row["status"] for row in read_results(tmp_path / "run")] == ["finished"] * 2
    assert (tmp_path / "run" / "plots" / "training.png").exists()
    before = run_bytes(tmp_path / "run")
    assert [code for code, _ in both(tmp_path / "run", *EIGHT, "--resume", "--shard", "lanes")] == [0, 0]
    assert run_bytes(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("options", "of_second", "teller", "sentence"),
    [
        (
            ["--nodes", "6", "--iterations", "6"],
            (),
            0,
            "error: --devices: must divide the number of nodes; got 4 devices for 6 nodes.",
        ),
        (
            [*EIGHT, "--devices", "2"],
            (),
            0,
            "error: --devices: must be those of all processes; got 2, but 2 processes have 4.",
        ),
        (EIGHT, ["--step-size", "0.25"], 1, "error: --step-size: must be the same in every process;"),
        (EIGHT, ["--data-dir", "nowhere", "--dataset", "mnist"], 1, "error: --data-dir: "),
    ],
)
def test_what_is_refused_is_told_once_and_leaves_nothing(tmp_path, options, of_second, teller, sentence):
    ends = both(tmp_path / "run", *options, of_second=of_second)
    assert [code for code, _ in ends] == [2, 2], ends
    message = [[line for line in text.splitlines() if "error: " in line] for _, text in ends]
    assert message[1 - teller] == []
    assert len(message[teller]) == 1
    assert message[teller][0].startswith(sentence)
    assert not (tmp_path / "run").exists()


LONG = ["--nodes", "8", "--iterations", "40", "--checkpoint-every", "2"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The bytes of a run of two processes that live."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert [code for code, _ in both(out, *LONG)] == [0, 0]
    return run_bytes(out)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_whose_partner_is_killed_ends_in_a_sentence_and_both_resume(killed, uninterrupted, tmp_path):
    died = []

    def kill(processes):
        while len(run_bytes(tmp_path / "run").splitlines()) < 6 and all(one.poll() is None for one in processes):
            time.sleep(0.1)
        processes[killed].kill()
        processes[1 - killed].wait(HEARTBEAT_SECONDS + 30)
        died.append(processes[1 - killed].returncode)

    ends = both(tmp_path / "run", *LONG, meanwhile=kill)
    assert ends[killed][0] == -signal.SIGKILL
    assert died[0] > 0
    message = without_libraries(ends[1 - killed][1]).splitlines()
    described = message.index(next(line for line in message if line.startswith(GONE)))  # by process 0, before it trains
    assert message[described:] == message[-1:], message
    assert killed or not described, message
    assert re.fullmatch(rf"{GONE}.*; the same commands with --resume go on from the last checkpoint", message[-1])
    assert not re.search(r"stack trace|^ *@ +0x|^[EF]\d{4} ", ends[1 - killed][1], flags=re.M)
    assert run_bytes(tmp_path / "run") != uninterrupted
    assert [code for code, _ in both(tmp_path / "run", *LONG, "--resume")] == [0, 0]
    assert run_bytes(tmp_path / "run") == uninterrupted
