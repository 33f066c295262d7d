"""Settings and numbers of the paper's tables, for comparison with ours.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training". Accuracies are (mean, deviation) in per cent.
"""

from __future__ import annotations

NUM_CLIENTS = 128

Accuracy = tuple[float, float]


def _by_case(text: str) -> dict[int, float]:
    return dict(enumerate(map(float, text.split()), start=1))


def _accuracies(means: str, deviations: str) -> dict[int, Accuracy]:
    return {case: (mean, _by_case(deviations)[case]) for case, mean in _by_case(means).items()}


# Strong, moderate and weak clients of the ten cases of Tables 3 to 7.
CASES: dict[int, tuple[int, int, int]] = {
    **{1: (128, 0, 0), 2: (64, 64, 0), 3: (32, 96, 0), 4: (16, 112, 0), 5: (64, 0, 64), 6: (32, 0, 96)},
    **{7: (16, 0, 112), 8: (32, 32, 64), 9: (16, 32, 80), 10: (16, 16, 96)},
}
# Tables 3 to 5: data set -> case -> average capacity of the clients.
CAPACITY: dict[str, dict[int, float]] = {
    "cifar10": _by_case("1.00 0.71 0.57 0.49 0.58 0.37 0.27 0.44 0.33 0.30"),
    "femnist": _by_case("1.00 0.99 0.99 0.99 0.51 0.27 0.14 0.51 0.39 0.26"),
    "imdb": _by_case("1.00 0.74 0.61 0.55 0.68 0.51 0.43 0.55 0.46 0.45"),
}
# Tables 3 to 6: data set -> method -> case -> accuracy. Case 1 has no narrow clients, and one number for both methods.
ACCURACY: dict[str, dict[str, dict[int, Accuracy]]] = {
    "cifar10": {
        "embracing": _accuracies(
            "80.45 80.20 79.78 79.72 80.08 78.91 76.98 80.33 79.63 77.63", "0.2 0.2 0.4 0.4 0.4 0.5 1.6 0.6 0.1 0.2"
        ),
        "width_reduction": _accuracies(
            "80.45 76.77 67.92 59.03 72.97 69.70 54.53 67.93 59.59 58.17", "0.2 1.3 2.1 0.8 2.5 2.1 2.9 1.5 0.8 2.2"
        ),
    },
    "femnist": {
        "embracing": _accuracies(
            "81.27 81.80 81.55 80.44 80.80 80.78 79.63 81.29 81.18 81.17", "0.6 0.5 0.5 0.7 0.7 0.5 0.3 0.4 0.3 0.4"
        )
    },
    "imdb": {
        "embracing": _accuracies(
            "82.15 82.21 82.09 82.55 80.38 77.09 74.89 79.09 79.41 77.32", "0.3 0.3 0.5 0.3 0.2 0.8 0.4 0.4 0.3 0.4"
        )
    },
}
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
# Table 9: method -> accuracy with static and global batch normalization, 16 strong and 112 weak clients, all active.
BATCH_NORM: dict[str, tuple[Accuracy, Accuracy]] = {
    "width_reduction": ((64.01, 2.9), (19.21, 1.5)),
    "embracing": ((74.49, 1.1), (77.34, 1.6)),
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
