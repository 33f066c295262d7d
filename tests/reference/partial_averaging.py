"""Partial model synchronization ("Embracing Federated Learning", section 3.2) as loops over nodes and elements.

Of the two-layer network of `reference.network`, float64; local steps are those of `reference.fed_avg`.
"""

import numpy as np
from reference.fed_avg import client_update


def partial_averaging(models, samples, rounds, is_synchronized, *, step_size, weighting="uniform", **local):
    """Runs the rounds.

    Args:
        models: every node's first parameters, float64.
        samples: each node's (input, label) pairs.
        rounds: for each round, for each node, the batches of its steps: positions in its samples.
        is_synchronized: (layer, part, position of an element) -> whether it is averaged.
        step_size: of the round.
        weighting: "uniform" or "data", by the nodes' numbers of samples.
        local: other options of `client_update`.

    Returns:
        (models after all rounds, every node's mean loss of each round (rounds, n)).
    """
    weights = [1 if weighting == "uniform" else len(own) for own in samples]
    losses = np.zeros((len(rounds), len(models)))
    for number, batches in enumerate(rounds):
        trained = []
        for node, model in enumerate(models):
            model, steps = client_update(model, samples[node], batches[node], step_size=step_size(number), **local)
            trained.append(model)
            losses[number, node] = np.mean(steps)
        for name, layer in trained[0].items():
            for part, leaf in layer.items():
                for position in np.ndindex(leaf.shape):
                    if is_synchronized(name, part, position):
                        values = [model[name][part][position] for model in trained]
                        mean = np.average(values, weights=weights)
                        for model in trained:
                            model[name][part][position] = mean
        models = trained
    return models, losses
