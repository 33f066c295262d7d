"""Cost of a private local iteration against a plain one, of more steps in a round, and of estimates.

Ten clients, batch 75, the CNN of `jaxfl.models.cnn` and one of a third of its work. Rows take turns in one process:

| row | a round |
|---|---|
| plain, private | federated averaging of three local iterations, by SGD or by DP-SGD; the same uniform batches |
| tau2, tau10 | DP-SGD with Poisson batches, of 2 or 10 local iterations where 100 are allowed, a traced number |
| tau1 | the same of 1 local iteration |
| published, noisy | ALI-DPFL of 1 local iteration, and its constants on 75 samples a client, without noise or with |
"""

import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import CNN, dp_sgd
from experiments.bench.setting import Network, Setting, clients, random_data, training
from experiments.bench.timing import Measurement, Report
from jaxfl import gradients, privacy
from jaxfl.algorithms import ali_dpfl, fed_avg, private_constants, published_constants
from jaxfl.core import Algorithm
from jaxfl.models import cnn

SMALL_CNN = Network(cnn(channels=(16, 32), hidden=32), "CNN (16, 32), 5x5, 32")
SETTINGS = {
    name: Setting(network, 10, batch_size=75, num_local_steps=3, repeats=5, method="dp_sgd")
    for name, network in {"cnn": CNN, "small_cnn": SMALL_CNN}.items()
}
MOST_STEPS, ROUNDS = 100, 10**6
WANTED = {
    f"dp_clients/{name}_{ratio}": most
    for name in SETTINGS
    for ratio, most in (("private_vs_plain", 1.35), ("tau2_vs_tau10", 0.3))
}


def averaged(setting: Setting, **options) -> Algorithm:
    """Federated averaging of all clients."""
    return fed_avg(setting.task(), clients=clients(setting, **options), num_active=setting.num_nodes)


def adaptive(setting: Setting, is_private: bool) -> Algorithm:
    """ALI-DPFL with as many rounds as iterations, and so one step in each."""
    constants = published_constants(setting.batch_size)
    if is_private:
        private = {"clip_norm": setting.clip_norm, "loss_bound": 1.0, "noise_multiplier": 5.0}
        constants = private_constants(setting.batch_size, **private)
    budget = {"max_rounds": ROUNDS, "max_iterations": ROUNDS, "step_size": setting.step_size}
    steps = clients(setting._replace(num_local_steps=MOST_STEPS), **_poisson(setting))
    return ali_dpfl(setting.task(), clients=steps, constants=constants, **budget)


def _poisson(setting: Setting) -> dict:
    noise = privacy.gaussian(setting.noise_std)
    return {"sampler": gradients.poisson, "clip_norm": setting.clip_norm, "noise": noise}


def algorithms(setting: Setting) -> dict[str, Algorithm]:
    """The rows."""
    most, poisson = setting._replace(num_local_steps=MOST_STEPS), _poisson(setting)
    return {
        "plain": averaged(setting, sampler=gradients.uniform, weighting="uniform"),
        "private": averaged(setting, **dp_sgd(setting)),
        **{f"tau{tau}": averaged(most, num_steps=jnp.int32(tau), **poisson) for tau in (1, 2, 10)},
        "published": adaptive(setting, False),
        "noisy": adaptive(setting, True),
    }


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About ten minutes on two cores."""
    report = Report("dp_clients/", "")
    for name, setting in settings.items():
        data = random_data(setting, np.float32)
        rows = {row: training(algorithm, data, setting.rounds)[0] for row, algorithm in algorithms(setting).items()}
        steps, one = f"{setting.num_local_steps} local iterations", "1 local iteration with"
        ratios = {
            "private_vs_plain": ("private", "plain", f"{steps}, by DP-SGD over plain"),
            "tau2_vs_tau10": ("tau2", "tau10", f"2 over 10 of at most {MOST_STEPS} local iterations"),
            "published_constants": ("published", "tau1", f"{one} estimates of constants over 1 without"),
            "noisy_constants": ("noisy", "tau1", f"{one} private estimates of constants over 1 without"),
        }
        by_name = {f"{name}_{label}": ratio for label, ratio in ratios.items()}
        text = f"{setting.layers()}, node_loop {setting.task().node_loop}"
        report.on(text).compare(rows, setting.repeats, setting.rounds, by_name, f"{name}_")
    return report.measurements
