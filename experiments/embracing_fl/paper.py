"""Settings of the paper's tables, and its counts and seconds for comparison with ours.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training".
"""

from __future__ import annotations

NUM_CLIENTS = 128

# Strong, moderate and weak clients of the ten cases of Tables 3 to 7.
CASES: dict[int, tuple[int, int, int]] = {
    **{1: (128, 0, 0), 2: (64, 64, 0), 3: (32, 96, 0), 4: (16, 112, 0), 5: (64, 0, 64), 6: (32, 0, 96)},
    **{7: (16, 0, 112), 8: (32, 32, 64), 9: (16, 32, 80), 10: (16, 16, 96)},
}
# Table 2: weak clients beside 16 strong ones.
ADDED_WEAK = (0, 16, 32, 64, 112)
# Table 7: case -> target accuracy.
TARGETS: dict[int, float] = {1: 0.8, 2: 0.76, 3: 0.67, 4: 0.59, 5: 0.72, 6: 0.69, 7: 0.54}
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
