"""Several processes that train one run: two on the loopback, each with two devices of a CPU."""

import json
import signal

import pytest
from processes import TESTS, at_once, free_port
from run_files import run_bytes

from jaxfl.training.processes import any_process, fetched, is_first, least, of_another_process, on_all, on_first

TWO = 2


def trained(out, killed_after=0, num_processes=TWO):
    """Output and exit code of processes that together have four devices."""
    port, script = free_port(), TESTS / "two_processes.py"
    commands = [(script, port, num_processes, index, out, killed_after) for index in range(num_processes)]
    return at_once(commands, num_devices=4 // num_processes)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, what each of the two printed)."""
    out = tmp_path_factory.mktemp("runs")
    ends = trained(out)
    assert [code for code, _ in ends] == [0, 0], ends
    return out, [json.loads(text.splitlines()[-1]) for _, text in ends]


def test_a_lone_process_is_the_first_and_decides_by_itself():
    def fails():
        raise OSError("its own")

    assert is_first()
    assert on_first(lambda: 3)() == on_all(lambda: 3)() == 3
    assert (any_process(True), any_process(False), least(2.5)) == (True, False, 2.5)
    value = object()
    assert fetched([value])[0] is value
    for way in (on_first, on_all):
        with pytest.raises(OSError, match="its own") as caught:
            way(fails)()
        assert not of_another_process(caught.value)


@pytest.mark.slow
def test_every_process_gets_what_process_0_got_or_its_exception(ran):
    message = [each["exchanged"] for each in ran[1]]
    assert [each.pop("first") for each in message] == [[True, True], [True, False]]
    for index, each in enumerate(message):
        assert each["value"] == {"index": 0, "nothing": None}
        assert each["nothing"] is None
        assert each["nested"] == 0
        assert each["large"]
        assert each["refused"] == ["ArgumentError", "out: must be there; it is not. Make it.", index != 0]
        assert each["missing"][0] == "FileNotFoundError"
        assert each["missing"][1].endswith("No such file or directory: '/no such file'")
        assert [each[name][2] for name in ("unsent", "no JSON", "missing")] == [index != 0] * 3
    assert message[1]["unsent"][:2] == ["RuntimeError", "Unsent: ab"]
    assert message[1]["no JSON"][0] == "RuntimeError"


@pytest.mark.slow
def test_what_fails_on_one_process_fails_on_all(ran):
    message = [each["exchanged"] for each in ran[1]]
    assert [each["own"] for each in message] == [0, 1]
    assert [each["on the second"][0] for each in message] == ["ArgumentError"] * TWO
    assert [each["on the second"][2] for each in message] == [True, False], "the second tells of it"
    assert [each["on both"] for each in message] == [["OSError", "of 0", False], ["OSError", "of 0", True]]
    assert [each["any"] for each in message] == [[True, False]] * TWO
    assert [each["least"] for each in message] == [4.0] * TWO


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(ran, tmp_path):
    """Random numbers bit for bit, so that counts are the same, and measurements to 1e-5."""
    ((code, text),) = trained(tmp_path, num_processes=1)
    assert code == 0
    alone = json.loads(text.splitlines()[-1])
    for shard in ("nodes", "lanes"):
        for mine, other in zip(ran[1][0][shard], alone[shard], strict=True):
            assert mine == {
                name: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
                for name, value in other.items()
            }
    assert "without a placement" not in alone
    assert ran[1][1]["without a placement"].startswith("placement: must say what several processes share; push_sum")


@pytest.mark.slow
def test_process_0_alone_writes_and_all_know_the_lines(ran):
    assert ran[1][0]["nodes"] == ran[1][1]["nodes"]
    for shard in ("nodes", "lanes"):
        lines = run_bytes(ran[0] / shard).decode().splitlines()
        assert list(map(json.loads, lines)) == ran[1][0][shard], "each line once"
        config = json.loads((ran[0] / shard / "config.json").read_text())
        assert config["environment"]["num_processes"] == TWO


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(ran, tmp_path):
    """In the second run before it has a checkpoint; tests/experiments/test_distributed.py kills behind one."""
    assert {code for code, _ in trained(tmp_path, killed_after=5)} == {-signal.SIGKILL}
    assert [code for code, _ in trained(tmp_path)] == [0] * TWO
    for shard in ("nodes", "lanes"):
        assert run_bytes(tmp_path / shard) == run_bytes(ran[0] / shard)
