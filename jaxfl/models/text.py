"""Text models: an embedding of tokens, and a classifier that reads it with LSTMs in both directions.

The embedding's gradients come in factored form.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxfl.core import check, one_kernel
from jaxfl.core.check import ArgumentError
from jaxfl.core.tree import root
from jaxfl.core.types import FactoredLayer
from jaxfl.models import layers
from jaxfl.models.classification import Model, sequential
from jaxfl.models.kernels import position_sums
from jaxfl.models.layers import Layer
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.normalization import at_least_float32

# Initial values of Keras: uniform in (-0.05, 0.05).
_EMBEDDING_BOUND = 0.05


def embedding(vocabulary: int, features: int) -> Layer:
    """Look up a row of a table for every token: (b, t) int32 -> (b, t, features) float32.

    Parameters: {"table": (vocabulary, features)}, uniform in (-0.05, 0.05) at the start, as in Keras.

    A sample's gradient is zero except in the rows of its tokens: such a row is the sum of the errors at the token's
    positions. The norm is computed from these sums, (b, t, features) numbers, and never from (b, vocabulary, features).

    Args:
        vocabulary: number of tokens; they run from 0.
        features: numbers in the row of a token.

    Guarantees:
        - its factored form agrees with per-sample gradients, also where tokens repeat.
        - no norm is below the gradient's where its terms cancel.
        - norms and weighted sums hold no array of b times the table.

    Edge cases:
        A token outside the vocabulary gives NaN, so that the loss shows it.

    Examples:
        >>> layer = embedding(5, 2)
        >>> params = {"table": jnp.arange(10.0).reshape(5, 2)}
        >>> layer.apply(params, jnp.array([[4, 0, 4]])).tolist()
        [[[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]]
        >>> errors = jnp.ones((1, 3, 2))
        >>> layer.factored("text", True).squared_norm(jnp.array([[4, 0, 4]]), errors).round(4).tolist()  # 2 (2^2 + 1^2)
        [10.0]
    """
    check.at_least(1, vocabulary=vocabulary, features=features)

    def init(key):
        low, high, shape = -_EMBEDDING_BOUND, _EMBEDDING_BOUND, (vocabulary, features)
        return {"table": jax.random.uniform(one_kernel(key), shape, jnp.float32, low, high)}

    def apply(params, tokens):
        if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim != 2:
            found = f"got {tokens.dtype} of shape {tokens.shape}"
            raise ArgumentError("inputs", "must be integer tokens (b, t)", found, "Pass int32 tokens.")
        # Indices below zero are refused, too, rather than counted from the end.
        table = at_least_float32(params["table"])  # because the gradient to a row sums over all places of its token
        rows = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(params["table"].dtype)

    def add_up(tokens, errors):
        """(t,) tokens, (t, features) errors -> sums over equal tokens, (vocabulary, features)."""
        table = jnp.zeros((vocabulary, features), errors.dtype)
        return table.at[tokens].add(errors, mode="drop", wrap_negative_indices=False)

    def norms_of(norm_of_row, is_squared):
        """The norm of the table's gradient from the norms of its rows."""

        def of_group(tokens, errors):
            # Entry (p, q) is 1 where p is the first position of the token at q, so that each sum appears once.
            equal = tokens[:, :, None] == tokens[:, None, :]
            is_first = jnp.argmax(equal, axis=2) == jnp.arange(tokens.shape[1])[None, :]
            members = jnp.where(equal & is_first[:, :, None], 1.0, 0.0).astype(errors.dtype)
            sums = norm_of_row(jnp.einsum("bpq,bqf->bpf", members, errors, precision="highest"))
            terms = jnp.einsum("bpq,bq->bp", members, norm_of_row(errors), precision="highest")
            rounded_up = sums + position_sums.summation_error(terms, members.sum(axis=2))
            return jnp.sum(rounded_up**2 if is_squared else rounded_up, axis=1)

        def norm(tokens, errors):
            length = tokens.shape[1]
            return position_sums.in_groups(of_group, tokens, errors, 4 * length * (2 * length + features))

        return norm

    def weighted_sum(tokens, errors, weight):
        products = errors * weight[:, None, None]
        return {"table": add_up(tokens.reshape(-1), products.reshape(-1, features))}

    factored = functools.partial(
        FactoredLayer,
        is_outer_product=False,
        squared_norm=norms_of(lambda values: root(jnp.sum(values**2, axis=-1)), True),
        absolute_norm=norms_of(lambda values: jnp.abs(values).sum(axis=-1), False),
        weighted_sum=weighted_sum,
        per_sample=lambda tokens, errors: {"table": jax.vmap(add_up)(tokens, errors)},
    )
    return Layer(init=init, apply=apply, factored=factored)


def bilstm_classifier(
    vocabulary: int = 10_000,
    length: int = 256,
    *,
    embedding_features: int = 256,
    units: int = 256,
    num_outputs: int = 1,
    dropout: float = 0.3,
    frozen_words: int = 0,
) -> Model:
    """Embedding, LSTMs in both directions, dense layer on their last states: EmbracingFL's model of film reviews.

    Layers with parameters, in order: "embedding", "lstm", "dense". Dropout follows the first two.

    Args:
        vocabulary: number of tokens; they run from 0.
        length: tokens of a sample, padding included. Padding is not masked, as in the paper's Keras layers.
        embedding_features: numbers in the row of a token.
        units: size of each direction's hidden state.
        num_outputs: 1 for a single logit, with `jaxfl.models.binary_classification`; or the number of classes, with
            `jaxfl.models.classification`.
        dropout: rate in [0, 1); 0 leaves dropout out, so that the task has per-sample gradients, as privacy needs.
        frozen_words: number of words that each direction reads first, without gradient (`frozen_steps` of
            `bidirectional_lstm`): 128 for the paper's weak clients. The parameters are the same.

    Returns:
        A model of int32 tokens (b, length).

    Raises:
        ArgumentError: a number out of range.

    Guarantees:
        - 3,611,137 parameters by default.

    Examples:
        >>> params = jax.eval_shape(bilstm_classifier().init, jax.random.key(0))
        >>> {name: sum(leaf.size for leaf in jax.tree.leaves(layer)) for name, layer in params.items()}
        {'dense': 513, 'embedding': 2560000, 'lstm': 1050624}

    References:
        Lee, Zhang, Prakash, Niu, Avestimehr: "Embracing Federated Learning", section 6.2 and Table 1. "The output of
        each recurrence is followed by dropout" is read as dropout of the last states, which is all that a dense layer
        of 513 parameters takes.
    """
    check.at_least(1, length=length, num_outputs=num_outputs)
    if not 0 <= frozen_words < length:
        requirement = f"must be at least 0 and below the {length} words"
        raise ArgumentError("frozen_words", requirement, f"got {frozen_words}", "Freeze fewer words.")
    parts = [
        ("tokens", layers.reshape((length,))),
        ("embedding", embedding(vocabulary, embedding_features)),
        ("dropout_1", layers.dropout(dropout)),
        ("lstm", bidirectional_lstm(embedding_features, units, frozen_steps=frozen_words)),
        ("dropout_2", layers.dropout(dropout)),
        ("dense", layers.dense(2 * units, num_outputs)),
    ]
    return sequential([(name, layer) for name, layer in parts if dropout > 0 or "dropout" not in name])
