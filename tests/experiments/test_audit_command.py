"""The audit on the command line: its table, its files, its exit codes, and one sentence for a bad option."""

import json

import numpy as np
import pytest

from experiments.audit import EXPERIMENT, attack
from jaxfl.frame import main
from jaxfl.privacy import clients
from jaxfl.privacy.audit import AuditResult
from jaxfl.training.summary import read_results

pytest.importorskip("jax_privacy.auditing")
TINY = ["--samples", "20", "--canaries", "1500", "--iterations", "3"]
SMALL = [*TINY, "--method", "PrivSGP"]


NOISE = {"noise of one release", "noise of all releases"}
MISTAKES = {  # options, checks that must refuse
    "none": ([], set()),
    "noise": (["--noise-error", "1.25"], NOISE),
    "clipping": (["--no-clipping"], {"signal", "Gaussian epsilon"}),
    "rounds": (["--rounds-error", "2"], {"releases"}),
    "sampling": (["--sampling-error", "2"], NOISE),
}


@pytest.mark.parametrize(("mistake", "names"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.quick_cases(2)
def test_exit_code_table_and_files_say_whether_the_claim_is_violated(mistake, names, tmp_path, capsys):
    code, verdict = (1, "VIOLATED") if mistake else (0, "not refuted")
    out = tmp_path / "run"
    assert main(EXPERIMENT, [*SMALL, *mistake, "--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "zero out one sample" in printed
    assert ("Run with a mistake" in printed) == bool(mistake)
    row = json.loads((out / "summary.json").read_text())["cases"]["PrivSGP"]
    (claim,) = row["privacy"]
    assert claim["bound"] == "proven"
    assert claim["neighboring_relation"] == "zero_out"
    assert row["audit"]["neighboring_relation"] == "zero_out"
    assert 0.9 < claim["dp_epsilon"] <= 1.0
    assert row["audit"]["violated"] == bool(code)
    refused = {check["name"] for check in row["audit"]["checks"] if check["refuted"]}
    assert refused >= names if names else not refused
    assert "smallest" in printed
    assert ("REFUTED" in printed) == bool(mistake)
    share = {"--noise-error": 1.25, "--sampling-error": row["batch_size_used"] / row["batch_size_claimed"]}
    assert row["noise_std_used"] == pytest.approx(row["noise_std_claimed"] / share.get("".join(mistake[:1]), 1.0))
    assert (row["rounds"], row["rounds_claimed"]) == ((6 if "--rounds-error" in mistake else 3), 3)
    assert (row["clip_norm_used"] is None) == ("--no-clipping" in mistake)
    assert (out / "plots" / "scores.png").stat().st_size > 10_000
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["method"], config["samples"], config["no_clipping"]) == ("PrivSGP", 20, "--no-clipping" in mistake)
    assert not {"out", "data_dir"} & set(config)
    assert main(EXPERIMENT, [*SMALL, *mistake, "--out", str(out)]) == 2, "a run is not overwritten"


# Of methods with a server: options, words of the relation, canaries enough for a noise that is 4 times too small.
SERVED = {
    "ALI-DPFL": (["--samples", "100"], "zero out one sample"),
    "DP-FedAvg": (["--nodes", "2"], "zero out one client"),  # on no ring: their number may be even
}
SERVED_MISTAKES = {
    "none": ([], set()),
    "noise": (["--noise-error", "4"], NOISE | {"Gaussian epsilon"}),
    "clipping": (["--no-clipping"], {"signal", "Gaussian epsilon"}),
}


@pytest.mark.parametrize(
    ("mistake", "method"),
    [("none", "ALI-DPFL"), ("noise", "DP-FedAvg"), ("clipping", "ALI-DPFL"), ("none", "DP-FedAvg")],
)
@pytest.mark.quick_cases(2)
def test_methods_with_a_server_are_audited(method, mistake, tmp_path, capsys):
    """Local iterations, which messages add up, and whole clients."""
    mistake, names = SERVED_MISTAKES[mistake]
    options, relation = SERVED[method]
    out = tmp_path / "run"
    settings = ["--method", method, *options, "--canaries", "1000", "--iterations", "6", "--seed", "1"]
    assert main(EXPERIMENT, [*settings, *mistake, "--out", str(out)]) == bool(mistake)
    printed = capsys.readouterr().out
    assert ("VIOLATED" in printed) == bool(mistake)
    assert relation in printed
    row = json.loads((out / "summary.json").read_text())["cases"][method]
    (claim,) = row["privacy"]
    assert 0.99 < claim["dp_epsilon"] <= 1.0
    assert claim["neighboring_relation"] == row["audit"]["neighboring_relation"]
    checks = {check["name"]: check for check in row["audit"]["checks"]}
    refused = {name for name, check in checks.items() if check["refuted"]}
    assert refused >= names if names else not refused
    # All iterations that the budget allows are run: rounds of ALI-DPFL are fewer.
    assert checks["releases"]["measured"] == row["rounds"] == 6
    # The claim is that of the batches and rounds, and the noise that of the mistake.
    expected, entries = row["batch_size_claimed"], {"ALI-DPFL": 1100, "DP-FedAvg": 1002}[method]
    assert row["batch_size_used"] == round(0.9 * entries)
    assert expected == row["batch_size_used"]
    multiplier = row["noise_std_claimed"] * expected
    again = {
        "ALI-DPFL": lambda: clients.account(
            clients.ClientRelease("poisson", entries, expected, 1.0, multiplier, 64, 20.0, "private"),
            num_estimates=3,
            dp_delta=1e-5,
        ),
        "DP-FedAvg": lambda: clients.client_level_account(
            clients.UpdateRelease("poisson", expected / entries, 1.0, multiplier), num_clients=entries, dp_delta=1e-5
        ),
    }
    assert claim["dp_epsilon"] == pytest.approx(again[method]().epsilon(6), rel=1e-6)
    factor = 4 if "--noise-error" in mistake else 1
    noise = checks["noise of one release"]
    assert factor * noise["measured"] == pytest.approx(row["noise_std_claimed"], rel=0.1)
    if names & {"Gaussian epsilon"}:
        assert row["audit"]["dp_epsilon_lower_bound"] > claim["dp_epsilon"], "the guesses see it, too"


def test_of_a_single_client_there_is_no_number_of_nodes(capsys):
    assert main(EXPERIMENT, ["--method", "ALI-DPFL", "--nodes", "3"]) == 2
    assert "--nodes: must change something; got 3 where nothing uses it" in capsys.readouterr().err


def test_lines_and_seeds_share_the_significance_and_claims_are_rounded_up(tmp_path, monkeypatch, capsys):
    shares, keys = [], []

    def attack(learner, silent, released, data, canaries, key, num_rounds, dp_delta, *, significance, **claim):
        assert claim["neighboring_relation"] == "zero_out"
        shares.append(significance)
        keys.append(str(key))
        scores = np.arange(float(len(canaries.nodes)))
        return AuditResult(0.9999, dp_delta, significance, "zero_out", 150, 80, 675.0, scores, 2.5, ())

    monkeypatch.setattr("experiments.audit.attack.audit", attack)
    grid = ["--grid", "method=PrivSGP,DP2-SGD", "--grid", "noise_error=1,2", "--seeds", "0", "1"]
    out = tmp_path / "run"
    main(EXPERIMENT, [*TINY, *grid, "--significance", "0.08", "--target-epsilon", "0.99995", "--out", str(out)])
    assert shares == [0.01] * 8
    assert len(set(keys)) == 2
    printed = capsys.readouterr().out
    assert "all lower bounds hold with confidence 92%" in printed
    assert "ε = 1," in printed, "0.9999 is no upper bound of what is claimed"
    assert "0.999" in printed, "and a lower bound is rounded down"
    assert "1.00" not in printed
    assert printed.count("2.5") >= 8, "the smallest error that the guesses see"
    rows = read_results(out)
    assert [(row["method"], row["noise_error"], row["seed"]) for row in rows] == [
        (method, error, seed) for method in ("PrivSGP", "DP2-SGD") for error in (1, 2) for seed in (0, 1)
    ]
    assert all(row["dp_epsilon_lower_bound"] == 0.9999 > row["proven_dp_epsilon"] - 0.001 for row in rows)
    cases = json.loads((out / "summary.json").read_text())["cases"]
    assert list(cases) == [row["case"] for row in rows]
    assert "DP2-SGD, noise error 2, seed 1" in cases


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_audit_that_was_stopped_leaves_nothing(error, tmp_path, monkeypatch, capsys):
    def stop(*args):
        raise error

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(attack, "measured", stop)
        assert main(EXPERIMENT, [*SMALL, "--out", str(out)]) in (1, 130)
    assert "--resume" not in capsys.readouterr().err
    assert not out.exists()


def test_a_directory_with_an_audit_is_refused_without_advice_to_resume(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(EXPERIMENT, [*SMALL, "--out", str(tmp_path)]) == 2
    said = "error: --out: must not hold a run yet; {} holds one. Name another directory.\n"
    assert capsys.readouterr().err == said.format(tmp_path)
