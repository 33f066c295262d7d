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
import optax

from experiments.bench.peers import CNN, dp_sgd
from experiments.bench.setting import Network, Setting, random_data, training
from experiments.bench.timing import Measurement, Report, in_turns
from jaxfl import gradients, privacy
from jaxfl.algorithms import ali_dpfl, fed_avg, local_steps, private_constants, published_constants
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


def averaged(setting: Setting, **changes) -> Algorithm:
    """Federated averaging of all clients."""
    options = {"batch_size": setting.batch_size, "optimizer": optax.sgd(setting.step_size), **changes}
    return fed_avg(setting.task(), clients=local_steps(**options), num_active=setting.num_nodes)


def adaptive(setting: Setting, is_private: bool) -> Algorithm:
    """ALI-DPFL with as many rounds as iterations, and so one step in each."""
    batch_size, clip_norm = setting.batch_size, setting.clip_norm
    constants = published_constants(batch_size)
    if is_private:
        constants = private_constants(batch_size, clip_norm=clip_norm, loss_bound=1.0, noise_multiplier=5.0)
    clients = local_steps(
        MOST_STEPS, batch_size=batch_size, optimizer=optax.sgd(setting.step_size), **_poisson(setting)
    )
    budget = {"max_rounds": ROUNDS, "max_iterations": ROUNDS, "step_size": setting.step_size}
    return ali_dpfl(setting.task(), clients=clients, constants=constants, **budget)


def _poisson(setting: Setting) -> dict:
    noise = privacy.gaussian(setting.noise_std)
    return {"sampler": gradients.poisson, "clip_norm": setting.clip_norm, "noise": noise}


def algorithms(setting: Setting) -> dict[str, Algorithm]:
    """The rows."""
    plain = {"max_steps": setting.num_local_steps, "sampler": gradients.uniform, "weighting": "uniform"}
    poisson = {"max_steps": MOST_STEPS, **_poisson(setting)}
    return {
        "plain": averaged(setting, **plain),
        "private": averaged(setting, **{**plain, **dp_sgd(setting)}),
        **{f"tau{tau}": averaged(setting, num_steps=jnp.int32(tau), **poisson) for tau in (1, 2, 10)},
        "published": adaptive(setting, False),
        "noisy": adaptive(setting, True),
    }


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About ten minutes on two cores."""
    measurements = {}
    for name, setting in settings.items():
        measurements |= compare(name, setting)
    return measurements


def compare(name: str, setting: Setting) -> dict[str, Measurement]:
    """The rows of one network."""
    data = random_data(setting, np.float32)
    rows = {row: training(algorithm, data, setting.rounds)[0] for row, algorithm in algorithms(setting).items()}
    seconds = in_turns(rows, setting.repeats, setting.rounds)
    report = Report("dp_clients/", f"{setting.layers()}, node_loop {setting.task().node_loop}")
    steps = f"{setting.num_local_steps} local iterations"
    asked = {
        "private_vs_plain": ("private", "plain", f"{steps}, by DP-SGD over plain"),
        "tau2_vs_tau10": ("tau2", "tau10", f"2 over 10 of at most {MOST_STEPS} local iterations"),
        "published_constants": ("published", "tau1", "1 local iteration with estimates of constants over 1 without"),
        "noisy_constants": ("noisy", "tau1", "1 local iteration with private estimates of constants over 1 without"),
    }
    for label, (top, bottom, text) in asked.items():
        report.ratio(f"{name}_{label}", seconds[top], seconds[bottom], text)
    report.times({f"{name}_{row}": times for row, times in seconds.items()})
    report.compile_times({f"{name}_{row}": one for row, one in rows.items()})
    return report.measurements
