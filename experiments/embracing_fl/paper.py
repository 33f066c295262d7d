"""What the paper reports: settings and numbers of its tables, for comparison with what is computed here.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training". Accuracies are (mean, deviation) in per cent.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_CLIENTS = 128

Accuracy = tuple[float, float]


class CaseTable(NamedTuple):
    """EmbracingFL in the ten cases on one data set."""

    title: str
    capacity: dict[int, float]  # average over clients
    accuracy: dict[int, Accuracy]


def _accuracies(text: str) -> dict[int, Accuracy]:
    """Case -> accuracy, from mean±deviation of one case after the other."""
    pairs = [tuple(map(float, pair.split("±"))) for pair in text.split()]
    return {case: (mean, deviation) for case, (mean, deviation) in enumerate(pairs, start=1)}


def _case_table(title: str, capacities: str, accuracies: str) -> CaseTable:
    return CaseTable(title, dict(enumerate(map(float, capacities.split()), start=1)), _accuracies(accuracies))


# Strong, moderate and weak clients of the ten cases of Tables 3 to 7.
CASES: dict[int, tuple[int, int, int]] = {
    **{1: (128, 0, 0), 2: (64, 64, 0), 3: (32, 96, 0), 4: (16, 112, 0), 5: (64, 0, 64), 6: (32, 0, 96)},
    **{7: (16, 0, 112), 8: (32, 32, 64), 9: (16, 32, 80), 10: (16, 16, 96)},
}
TABLES_BY_DATASET = {
    "cifar10": _case_table(
        "Table 3",
        "1.00 0.71 0.57 0.49 0.58 0.37 0.27 0.44 0.33 0.30",
        "80.45±0.2 80.20±0.2 79.78±0.4 79.72±0.6 80.08±0.4 78.91±0.5 76.98±1.6 80.33±0.6 79.63±0.1 77.63±0.2",
    ),
    "femnist": _case_table(
        "Table 4",
        "1.00 0.99 0.99 0.99 0.51 0.27 0.14 0.51 0.39 0.26",
        "81.27±0.6 81.80±0.5 81.55±0.5 80.44±0.7 80.80±0.7 80.78±0.5 79.63±0.3 81.29±0.4 81.18±0.3 81.17±0.4",
    ),
    "imdb": _case_table(
        "Table 5",
        "1.00 0.74 0.61 0.55 0.68 0.51 0.43 0.55 0.46 0.45",
        "82.15±0.3 82.21±0.3 82.09±0.5 82.55±0.3 80.38±0.2 77.09±0.8 74.89±0.4 79.09±0.4 79.41±0.3 77.32±0.4",
    ),
}
# Table 6, CIFAR-10. Case 1 has no narrow clients, and one number for both methods.
WIDTH_REDUCTION = _accuracies(
    "80.45±0.2 76.77±1.3 67.92±2.1 59.03±0.8 72.97±2.5 69.70±2.1 54.53±2.9 67.93±1.5 59.59±0.8 58.17±2.2"
)

# Table 2: weak clients beside 16 strong ones -> width reduction, EmbracingFL.
ADDED_WEAK: dict[int, tuple[Accuracy, Accuracy]] = {
    0: ((60.15, 1.5), (60.15, 1.5)),
    16: ((61.34, 2.1), (66.62, 1.1)),
    32: ((62.09, 1.5), (72.60, 1.2)),
    64: ((63.68, 3.3), (74.79, 0.8)),
    112: ((65.01, 2.9), (77.34, 1.6)),
}

# Table 7: case -> target accuracy in per cent, rounds of width reduction and of EmbracingFL until it is reached.
ROUNDS_TO_TARGET: dict[int, tuple[int, int, int]] = {
    **{1: (80, 890, 890), 2: (76, 867, 817), 3: (67, 982, 801), 4: (59, 836, 483)},
    **{5: (72, 813, 811), 6: (69, 806, 629), 7: (54, 939, 572)},
}

# Table 9: method, batch normalization -> accuracy, with 16 strong and 112 weak clients that all take part.
BATCH_NORM: dict[tuple[str, str], Accuracy] = {
    ("width_reduction", "static"): (64.01, 2.9),
    ("width_reduction", "global"): (19.21, 1.5),
    ("embracing", "static"): (74.49, 1.1),
    ("embracing", "global"): (77.34, 1.6),
}

# Table 8, milliseconds for a batch of 32: method -> forward, I/O (None where there is none), backward of each class.
TIMING: dict[str, tuple[tuple[float, float | None, float], ...]] = {
    "embracing": ((2095.4, None, 419_643.8), (2095.4, 678.4, 197_265.0), (2095.4, 1316.8, 85_448.3)),
    "width_reduction": ((2010.7, None, 421_047.5), (1431.0, None, 317_669.7), (936.7, None, 187_580.4)),
}

# Tables 1 and 10: parameters, activations and capacity of the strong, moderate and weak clients' part.
SIZES: dict[str, tuple[tuple[int, int, float], ...]] = {
    "resnet20": ((272_762, 6_947_136, 1.00), (257_994, 2_752_832, 0.42), (206_346, 917_824, 0.16)),
    "femnist_cnn": ((6_603_710, 39_742, 1.00), (6_551_614, 2_110, 0.99), (127_038, 62, 0.02)),
    "bilstm": ((3_611_137, 1_310_720, 1.00), (1_051_137, 1_310_720, 0.48), (1_051_137, 655_360, 0.35)),
    "resnet20, width reduction": ((272_762, 6_947_136, 1.00), (52_874, 3_039_552, 0.43), (10_006, 1_302_848, 0.18)),
}
