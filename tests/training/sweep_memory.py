"""Twelve lanes of 20 MB each: the most memory that training them takes, beside the preflight's prediction.

Prints bytes as JSON: "taken", above what the process holds before, and "predicted". python sweep_memory.py OUT
"""

import json
import sys
import threading
import time

import psutil
from toy_problem import TASK, toy_algorithm, toy_case, train_toy

from jaxfl.training import passes


def main(out):
    """Train small lanes, which leaves compiled code and buffers behind, and then large ones."""
    predictions, peaks, process = [], [], psutil.Process()

    def watch():
        while True:
            peaks.append(process.memory_info().rss)
            time.sleep(0.001)

    def noted(all_peaks, text=passes.peak_text):
        predictions.extend(peak.total for peak in all_peaks.values())
        return text(all_peaks)

    passes.peak_text = noted
    small, large = (toy_case(toy_algorithm(TASK, table_width=n), seeds=tuple(range(12))) for n in (2, 250_000))
    train_toy(f"{out}/warm", {"A": small})
    predictions.clear()
    before = process.memory_info().rss
    threading.Thread(target=watch, daemon=True).start()
    train_toy(f"{out}/large", {"A": large})
    print(json.dumps({"taken": max(peaks) - before, "predicted": max(predictions)}))


if __name__ == "__main__":
    main(sys.argv[1])
