"""The audit on the command line: its table, its files, its exit codes, and one sentence for a bad option."""

import json

import numpy as np
import pytest

from experiments import audit
from jaxfl.privacy.audit import AuditResult

pytest.importorskip("jax_privacy.auditing")
SMALL = ["--methods", "PrivSGP", "--samples", "20", "--canaries", "1500", "--iterations", "3"]


@pytest.mark.parametrize(
    ("mistake", "code", "verdict"),
    [([], 0, "not refuted"), (["--noise-error", "8"], 1, "VIOLATED"), (["--no-clipping"], 1, "VIOLATED")],
)
def test_exit_code_table_and_files_say_whether_the_claim_is_violated(mistake, code, verdict, tmp_path, capsys):
    out = tmp_path / "run"
    assert audit.main([*SMALL, *mistake, "--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "add or remove one sample" in printed
    assert ("Run with a mistake" in printed) == bool(mistake)
    summary = json.loads((out / "summary.json").read_text())
    row = summary["variants"]["PrivSGP"]
    (claim,) = row["privacy"]
    assert claim["bound"] == "proven"
    assert claim["neighboring_relation"] == "add_or_remove_one"
    assert row["audit"]["neighboring_relation"] == "zero_out"
    assert 0.9 < claim["dp_epsilon"] <= 1.0
    assert row["audit"]["violated"] == (row["audit"]["dp_epsilon_lower_bound"] > claim["dp_epsilon"]) == bool(code)
    assert row["noise_std_used"] == row["noise_std_claimed"] / (8 if "--noise-error" in mistake else 1)
    assert (row["clip_norm_used"] is None) == ("--no-clipping" in mistake)
    assert (out / "plots" / "scores.png").stat().st_size > 10_000


def test_the_methods_share_the_significance_and_claims_are_rounded_up(tmp_path, monkeypatch, capsys):
    shares = []

    def attack(learner, released, data, canaries, key, num_rounds, dp_delta, *, significance):
        shares.append(significance)
        scores = np.arange(float(len(canaries.nodes)))
        return AuditResult(0.9999, dp_delta, significance, "zero_out", 150, 80, 675.0, scores)

    monkeypatch.setattr(audit, "audit", attack)
    arguments = [
        "--methods",
        "PrivSGP",
        "DP2-SGD",
        *SMALL[2:],
        "--significance",
        "0.08",
        "--out",
        str(tmp_path / "run"),
    ]
    audit.main([*arguments, "--target-epsilon", "0.99995"])
    assert shares == [0.04, 0.04]
    printed = capsys.readouterr().out
    assert "all lower bounds hold with confidence 92%" in printed
    assert "ε = 1," in printed, "0.9999 is no upper bound of what is claimed"
    assert "0.999" in printed, "and a lower bound is rounded down"
    assert "1.00" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "4"], "error: --nodes: must be odd and at least 3; got 4. Pass e.g. 5."),
        (["--canaries", "1001"], "error: --canaries: must be a multiple of the 5 nodes"),
        (["--samples", "400"], "error: --samples: must be there in the data set; 5 nodes with 400 need 2,000 of 1,437"),
        (["--sampling-rate", "1"], "error: --sampling-rate: must lie strictly between 0 and 1; got 1.0"),
        (["--significance", "0"], "error: --significance: must lie strictly between 0 and 1; got 0.0"),
        (["--noise-error", "0"], "error: --noise-error: must be positive and finite; got 0.0"),
        (["--canary-strength", "0.5"], "error: --canary-strength: must be at least 1; got 0.5"),
        (["--methods", "PrivSGP", "PrivSGP"], "error: --methods: must be distinct"),
        (["--seed", "-1"], "error: --seed: must lie in [0, 2^32); got -1"),
    ],
)
def test_a_bad_option_is_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert audit.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is written"
