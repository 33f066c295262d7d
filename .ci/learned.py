"""Whether a run learned, which its exit code does not tell: `python .ci/learned.py RUN [LEAST ACCURACY]`."""

import json
import sys
from pathlib import Path

# Least mean test accuracy of each case of a default command: below what it reaches by three of its spreads over seeds,
# or by 5 %, and far above chance.
LEAST = {
    # reach 0.765 +- 0.023, 0.770 +- 0.061, 0.763 +- 0.043; chance 0.1
    "ali_dpfl": {"ALI-DPFL, private": 0.69, "ALI-DPFL, as_published": 0.58, "DPFL, τ = 10": 0.63},
    "dp_gradient_tracking": {"DP-GT, S1": 0.42, "DP-GT, S2": 0.58},  # reach 0.594 +- 0.058, 0.677 +- 0.032; chance 0.1
    "dzofl": {"DZOFL": 0.92, "FedAvg": 0.95},  # reach 0.972, 1.000; chance 0.5
    # reach 0.894 +- 0.028, 0.870 +- 0.061, 0.818 +- 0.060; chance 0.1
    "embracing_fl": {"case 9 embracing": 0.81, "case 9 width_reduction": 0.68, "2 strong fed_avg": 0.63},
    "privsgp_vr": {"PrivSGP": 0.85, "PrivSGP-VR": 0.84},  # reach 0.911 +- 0.018, 0.902 +- 0.020; chance 0.1
}

run, *least = sys.argv[1:]
summary = json.loads((Path(run) / "summary.json").read_text())
wanted = dict.fromkeys(summary["cases"], float(least[0])) if least else LEAST[summary["experiment"]]
found = {name: row.get("test_accuracy", {}).get("mean") for name, row in summary["cases"].items()}
print(f"{run}: test accuracy {found}, wanted {wanted}")
missing = set(wanted) - set(found)
if missing or summary["status"] not in ("finished", "budget_spent"):
    raise SystemExit(f"{run}: {summary['status']}, without {sorted(missing) or 'nothing'}")
for name, value in wanted.items():
    if not (found[name] or 0) >= value:  # NaN, too
        raise SystemExit(f"{run}: {name} learned nothing: test accuracy {found[name]}, at least {value} is wanted")
