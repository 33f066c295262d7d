"""Child process of test_resume.py: trains the toy problem, and kills itself after a while if asked.

python run_until_killed.py OUT SECONDS      SECONDS after training began; "never" to let it finish
"""

import os
import signal
import sys
import threading

from toy_problem import train_toy

SETTINGS = {"num_rounds": 120, "evaluate_every": 5, "checkpoint_every": 2, "seeds": (0, 1)}

if __name__ == "__main__":
    out, seconds = sys.argv[1:]
    if seconds != "never":
        timer = threading.Timer(float(seconds), lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    train_toy(out, resume=True, **SETTINGS)
