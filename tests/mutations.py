"""Small faults put into a copy of the code one at a time, and whether the tests beside each notice.

    python tests/mutations.py                 # all rows, some 10 s each on one core
    python tests/mutations.py graphs channel  # rows whose file's path has one of these words
    python tests/mutations.py --check         # only that every text is found exactly once, as the gate does

A row that survives says which test is missing. Results: docs/decisions/tests.md.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("jaxfl", "experiments", "tests", "docs", "pyproject.toml", "README.md")
FAILED, PASSED = 1, 0  # exit statuses of pytest; any other says that the row itself is wrong

# Arguments of pytest in brackets, and below them what they are for: file: its text => what replaces it.
ROWS = r"""
[tests/training/test_secrecy.py]
jaxfl/core/keys.py: key.shared if purpose in SHARED else key.own => key.shared
[tests/core/test_tree.py]
jaxfl/core/tree.py: jnp.full(len(leaf), 1.0 / num_nodes => jnp.full(len(leaf), 1.0 / (num_nodes - 1)
[tests/core/test_core.py]
jaxfl/core/keys.py: fold_in(key, int(purpose)), round_index => key, round_index
jaxfl/core/check.py: np.isfinite(x) & (x > 0) => np.isfinite(x) & (x >= 0)
jaxfl/core/tasks.py: jnp.where(labels < 0, logits.shape[-1], labels) => labels
[tests/core/test_threefry.py]
jaxfl/core/threefry.py: np.uint32(group + 1) => np.uint32(group)
[tests/core/test_normals.py]
jaxfl/core/normals.py: np.int32(126) - => np.int32(125) -
jaxfl/core/normals.py: (low << np.uint32(2)) | np.uint32(2) => low << np.uint32(2)
jaxfl/core/normals.py: _SPACE = 1 => _SPACE = 0
[tests/graphs/test_topologies.py]
jaxfl/graphs/weights.py: np.maximum(count[receiver], count[sender]) => count[receiver]
jaxfl/graphs/weights.py: 1 / count[sender] => 1 / count[receiver]
jaxfl/graphs/topologies.py: range((num_nodes - 1).bit_length()) => range(num_nodes.bit_length())
jaxfl/graphs/random_graphs.py: other + (other >= receiver) => other + (other > receiver)
[tests/graphs/test_mixing.py]
jaxfl/graphs/graph.py: (entries.row - entries.col) % num_nodes => (entries.col - entries.row) % num_nodes
jaxfl/graphs/mixing.py: (nodes[:, None, None] - offsets) => (nodes[:, None, None] + offsets)
jaxfl/graphs/mixing.py: leaf.astype(matrix.dtype), axes=1 => leaf.astype(matrix.dtype), axes=(0, 0)
[tests/graphs/test_lossy_mixing.py]
jaxfl/graphs/lossy_mixing.py: jnp.where(arrivals, 0, weights).sum => jnp.where(arrivals, weights, 0).sum
jaxfl/graphs/lossy_mixing.py: if kept_by == "sender": => if kept_by == "receiver":
[tests/graphs/test_sharded_mixing.py -m 'slow or not slow']
jaxfl/graphs/sharded_mixing.py: (device, (device + step) % num_devices) => (device, (device - step) % num_devices)
jaxfl/graphs/neighbor_lists.py: counts[0] = 0 => counts[-1] = 0
[tests/graphs/test_spectral.py]
jaxfl/graphs/spectral.py: product * root[None, :] / root[:, None] => product * root[:, None] / root[None, :]
[tests/graphs/test_graph_validation.py]
jaxfl/graphs/validation.py: (False, adjacency.T) => (False, adjacency)
[tests/graphs/test_tracking_conditions.py]
jaxfl/graphs/tracking_conditions.py: q1 = rate_1 / (norm_2 * smoothness) => q1 = rate_1 / (norm_1 * smoothness)
jaxfl/graphs/tracking_conditions.py: gamma + 2 * beta - 2 * eta => gamma + beta - 2 * eta
[tests/graphs/test_graph_files.py]
jaxfl/graphs/files.py: if size != array.offset + array.nbytes: => if False:
[tests/gradients/test_per_example.py]
jaxfl/gradients/per_example.py: above = norms > clip_norm => above = norms > 2 * clip_norm
[tests/algorithms/test_references.py -m 'slow or not slow' -k 'push_sum and dense and poisson']
jaxfl/gradients/saga.py: mask.astype(dtype) / scheme.batch_size => mask.astype(dtype) / mask.sum().astype(dtype).clip(1)
[tests/algorithms/test_references.py -m 'slow or not slow' -k 'push_sum and factored and fixed']
jaxfl/gradients/saga.py: scale(scheme.batch_size / counts.astype(dtype) => scale(1 / counts.astype(dtype)
[tests/gradients/test_samplers.py]
jaxfl/gradients/samplers.py: geometric.astype(jnp.int32) + 1) - 1 => geometric.astype(jnp.int32) + 1)
[tests/gradients/test_zero_order_estimates.py]
jaxfl/gradients/zero_order.py: (size(node_params) / (2 * num_directions)) => (size(node_params) / num_directions)
[tests/privacy/test_mechanisms.py]
jaxfl/privacy/mechanisms.py: _of_jax(jax.random.laplace), laplace => _of_jax(jax.random.normal), laplace
[tests/privacy/gossip/test_sensitivity.py]
jaxfl/privacy/gossip/proven.py: abs(share - 1 / release.num_entries) => share
[tests/privacy/test_selection.py]
jaxfl/privacy/selection.py: dp_delta / selected.mean_runs => dp_delta
jaxfl/privacy/selection.py: max(first, second) => min(first, second)
jaxfl/privacy/selection.py: "logarithmic": 1} => "logarithmic": 0}
[tests/privacy/test_totals.py]
jaxfl/privacy/totals.py: max(rates), min(noises) => min(rates), min(noises)
[tests/privacy/gossip/test_waking.py]
jaxfl/privacy/dominating_pairs.py: probabilities[-losses.lowest] += 1 - chance => probabilities[0] += 1 - chance
[tests/privacy/gossip/test_fixed_batches.py]
jaxfl/privacy/dominating_pairs.py: base = far - near => base = 0.9 * far
jaxfl/privacy/dominating_pairs.py: joined((up, down), (without, with_sample)) => joined((up, down), (down, up))
[tests/privacy/tracking/test_joint_bound.py]
jaxfl/privacy/tracking/joint_bound.py: np.ceil(prices / step) => np.floor(prices / step)
jaxfl/privacy/tracking/joint_bound.py: drawn = rate * chances => drawn = 0.9 * rate * chances
[tests/privacy/test_small_delta.py tests/privacy/tracking/test_laplace_at_delta.py]
jaxfl/privacy/concentrated.py: np.log(dp_delta * alpha) / excess => np.log(dp_delta) / excess
[tests/privacy/gossip/test_published.py]
jaxfl/privacy/gossip/compared.py: dp_delta / (num_rounds * sampling_rate) => dp_delta / num_rounds
[tests/privacy/tracking/test_tracking_sensitivity.py]
jaxfl/privacy/tracking/sensitivities.py: state = 1 - schedule.state_mixing => state = 1 + schedule.state_mixing
[tests/privacy/test_grid_noise.py]
jaxfl/privacy/grid_noise.py: jnp.where(negative == 1, -place, place) => place
[tests/privacy/test_shared.py]
jaxfl/privacy/shared.py: np.setdiff1d(np.arange(len(own)), colluders) for => np.arange(len(own)) for
jaxfl/privacy/shared.py: honest, squares = n - colluding, np.square(ratios) => honest, squares = n, np.square(ratios)
jaxfl/privacy/shared.py: - np.sort(entering)[len(own) - colluding :].sum() => - 0.0
jaxfl/privacy/shared_ratio.py: (1 + np.square(ratios) * of.shared / of.nodes) => (1 + ratios * of.shared / of.nodes)
jaxfl/privacy/shared_ratio.py: matrices[(k * num_mixings + m) % graph.period] => matrices[(k + m) % graph.period]
[tests/privacy/test_shared_gaussian.py -k 'calibration or effective_noise']
jaxfl/privacy/shared.py: return float((own / worth.noise).max()), => return float((own / worth.noise).min()),
jaxfl/privacy/shared_noise.py: np.diag(squares.sum(axis=1)) - squares => np.diag(squares.sum(axis=1)) + squares
jaxfl/privacy/shared_noise.py: vectors * np.sqrt(np.maximum(values, 0)) => vectors * np.maximum(values, 0)
jaxfl/privacy/shared_noise.py: share, _normal(key, params, Purpose.SHARED_NOISE) => share, params
jaxfl/privacy/shared_noise.py: "shared_gaussian", noise_std, draw => "shared_gaussian", factor * noise_std, draw
jaxfl/privacy/shared_grid_noise.py: signs[chunk, second, place] = 1, -1 => signs[chunk, second, place] = 1, 1
jaxfl/privacy/shared_grid_noise.py: grid_bits + round(math.log2(ratio)) => grid_bits - round(math.log2(ratio))
[tests/algorithms/clients/test_shared_noise.py]
jaxfl/algorithms/clients/shared_noise.py: round_index, apart=True => 0, apart=True
jaxfl/algorithms/clients/shared_noise.py: * np.sign(partners - own) => * np.sign(partners + 1)
jaxfl/algorithms/clients/shared_noise.py: = np.minimum(own, partners) * k + np.maximum(own, => = own * k + (
jaxfl/algorithms/clients/shared_noise.py: gaussian(jnp.float32(noise.parts[0][0]) * => gaussian(
jaxfl/algorithms/clients/shared_noise.py: if k != len(shared): => if False:
jaxfl/privacy/shared_noise.py: (num_clients - colluding) ** -0.5 => num_clients**-0.5
jaxfl/algorithms/clients/private_updates.py: np.linalg.norm(of_sum.parts[0]) => np.mean(of_sum.parts[0])
jaxfl/algorithms/exchange.py: round_index == 0, jnp.array(secrets => round_index >= 0, jnp.array(secrets
[tests/algorithms/test_mixings.py]
jaxfl/algorithms/exchange.py: places = round_index * num_mixings + jnp.arange => places = round_index + jnp.arange
jaxfl/algorithms/exchange.py: (first, others) = round_index * num_mixings, => (first, others) = round_index,
jaxfl/algorithms/exchange.py: one + more.sum(axis=0, dtype=one.dtype), numbers => one, numbers
jaxfl/algorithms/exchange.py: place = num_rounds * num_mixings => place = num_rounds
jaxfl/algorithms/exchange.py: jnp.where(is_first, jnp.float32(more[name]), 0) => jnp.float32(more[name])
[tests/algorithms/clients/test_shared_noise.py -k keys_of_pairs]
jaxfl/algorithms/exchange.py: jnp.float32) * _BITS_OF_A_KEY, 0) => jnp.float32) * 0, 0)
[tests/channel/test_quantize.py]
jaxfl/channel/quantize.py: (uniform < multiple - below) => (uniform > multiple - below)
jaxfl/channel/quantize.py: bias = 2 ** (exponent_bits - 1) - 1 => bias = 2 ** (exponent_bits - 1)
[tests/channel/test_links.py jaxfl/channel/links.py]
jaxfl/channel/links.py: num_nodes, shape[1:]).T => num_nodes, shape[1:])
jaxfl/channel/links.py: (success < recovery) & (lag % 2 == 1) => (success < recovery) & (lag % 2 == 0)
jaxfl/channel/links.py: is_known | (number < low) | (number >= high) => is_known | (number < low) | (number >= low)
[tests/algorithms/test_robust_neighbors.py -k lines]
jaxfl/algorithms/robust_neighbors.py: sent[senders] - own[None], 0) => own[None] - sent[senders], 0)
jaxfl/algorithms/robust_neighbors.py: jnp.append(present, True) => jnp.append(present, False)
jaxfl/algorithms/robust_neighbors.py: jnp.minimum(1, radius / => jnp.minimum(1e9, radius /
[tests/algorithms/test_robust_neighbors.py -k 'cannot or mean']
jaxfl/algorithms/robust_neighbors.py: & is_finite[senders] => & is_finite[nodes]
[tests/channel/test_wireless.py]
jaxfl/channel/wireless.py: (radius_m * jnp.sqrt(share)) => (radius_m * share)
[tests/channel/test_ledger.py]
jaxfl/channel/ledger.py: + 2 * work.backward.operations => + work.backward.operations
[tests/channel/test_energy.py]
jaxfl/channel/ledger.py: + 3 * counts.activations * high => + 2 * counts.activations * high
[tests/channel/test_cost.py]
jaxfl/channel/cost.py: kernel.size // kernel.shape[params => kernel.size * kernel.shape[params
[tests/models/test_flax.py]
jaxfl/models/lstm.py: sigmoid(f) * cell + jax.nn.sigmoid(i) => sigmoid(i) * cell + jax.nn.sigmoid(f)
[tests/models/test_normalization.py]
jaxfl/models/normalization.py: - 0.5 * factor * inverse * scale_error => - factor * inverse * scale_error
[tests/models/test_scaler.py]
jaxfl/models/composite.py: inputs / ratio), {} => inputs * ratio), {}
[tests/data/test_partition.py]
jaxfl/data/partition.py: (scaled_log - scaled_log.max()) / alpha => (scaled_log - scaled_log.max()) * alpha
jaxfl/data/partition.py: spawn_key=(int(stream), => spawn_key=(0,
[tests/data/test_pool.py]
jaxfl/data/pool.py: row[: len(part)] = part => row[-len(part) :] = part
jaxfl/data/pool.py: if count.max() > 1: => if count.max() > 2:
[tests/data/test_sources.py]
jaxfl/data/sources.py: [::_TEST_STRIDE] => [1::_TEST_STRIDE]
[tests/data/test_cifar.py]
jaxfl/data/cifar.py: .transpose(0, 2, 3, 1) => .transpose(0, 3, 2, 1)
jaxfl/data/cifar.py: .hexdigest() != _PICKLED[path.name] => .hexdigest() == ""
[tests/data/test_imdb.py]
jaxfl/data/imdb.py: for word in text.split())][-length:] => for word in text.split())][:length]
jaxfl/data/imdb.py: if member.size > _MAX_REVIEW: => if False:
[tests/algorithms/test_references.py -k push_sum]
jaxfl/algorithms/push_sum.py: scale(1.0 / state.push_sum_weight, => scale(state.push_sum_weight,
[tests/algorithms/test_references.py -k d_psgd]
jaxfl/algorithms/d_psgd.py: step(mixture, direction) => step(state.params, direction)
[tests/algorithms/test_over_graphs.py -k 'invariant and d2']
jaxfl/algorithms/gossip_rule.py: around_zero = _less_mean(messages) => around_zero = messages
[tests/algorithms/test_over_graphs.py -k 'papers_lines and (qg or extra or diging)']
jaxfl/algorithms/momentum_gossip.py: mu * q + (1 - mu) => mu * q + (1 - beta)
jaxfl/algorithms/exact_diffusion.py: s + 0.5 * d => s + d
[tests/algorithms/test_over_graphs.py -k 'papers_lines and k_gt']
jaxfl/algorithms/k_gt.py: scale(jnp.float32(1 / num_local_steps), total) => total
jaxfl/algorithms/gossip_rule.py: return (descend(x, gamma, along), jax => return (x, jax
[tests/algorithms/test_over_graphs.py -k 'papers_lines and (qg or extra or diging)']
jaxfl/algorithms/tracking_over_graphs.py: y + (new - old) => y + new
[tests/graphs/test_base_graph.py]
jaxfl/graphs/base_graph.py: own / (len(part) * (own + len(later))) => own / (own + len(later))
[tests/channel/test_compress.py]
jaxfl/channel/compress.py: jnp.abs(flat) => flat
[tests/algorithms/clients/test_feedback.py -k 'papers_lines or mean_of_what']
jaxfl/algorithms/clients/feedback.py: scale(1 - beta, changes) => changes
jaxfl/algorithms/clients/feedback.py: jax.tree.map(jnp.add, kept, sent) => jax.tree.map(jnp.add, changes, sent)
jaxfl/algorithms/clients/uplink.py: lambda d, q: d + share * q => lambda d, q: d + q
[tests/algorithms/test_server_methods.py -m 'slow or not slow' -k 'papers_lines and (apfl or q_fed or per_fed)']
jaxfl/algorithms/apfl.py: scale(a, of_mixed.gradient) => of_mixed.gradient
jaxfl/algorithms/q_fed_avg.py: fairness * (at.shares => (at.shares
jaxfl/algorithms/per_fed_avg.py: (outer.gradient,) => (inner,)
[tests/algorithms/test_references.py -k a_dp2]
jaxfl/algorithms/a_dp2_sgd.py: mean = 0.5 * (old[0] + old[1]) => mean = old[0]
[tests/algorithms/test_over_links.py]
jaxfl/channel/links.py: t + (one - rounded) => t + (rounded - one)
[tests/algorithms/clients/test_client_selection.py -k "proportion or largest or counted"]
jaxfl/algorithms/clients/selection.py: top_k(losses, => top_k(-losses,
jaxfl/algorithms/clients/selection.py: data.sizes if self.is_by_size else None => None
jaxfl/algorithms/clients/selection.py: forward_evaluations + asked * data.sizes => forward_evaluations + asked
[tests/training/test_optimality.py -k "definition or regret"]
jaxfl/training/optimality.py: (losses[0] - losses[1])) => losses[0])
jaxfl/training/optimality.py: np.diff(at, prepend=0) * of_seed => of_seed
[tests/algorithms/clients/test_private_updates.py]
jaxfl/algorithms/clients/uplink.py: lambda _: float(num_expected) => lambda _: float(num_expected + 1)
[tests/algorithms/test_gradient_tracking.py]
jaxfl/algorithms/gradient_tracking.py: y + beta * change + (new - old) => y + beta * change + (old - new)
[tests/test_keys_of_a_round.py tests/test_contract.py -k gradient_tracking]
jaxfl/algorithms/gradient_tracking.py: purpose_key(key, Purpose.NOISE, k + 1) => purpose_key(key, Purpose.NOISE, 1)
[tests/algorithms/test_dzofl.py]
jaxfl/algorithms/dzofl.py: arrivals * (n / jnp.maximum => arrivals * (1 / jnp.maximum
[tests/algorithms/test_ali_dpfl.py]
jaxfl/algorithms/ali_dpfl.py: step_size**2 * beta * t, gap => step_size * beta * t, gap
[tests/algorithms/test_output_perturbation.py]
jaxfl/algorithms/output_perturbation.py: shares.sum(axis=1, keepdims=True) => shares.sum(axis=0, keepdims=True)
[tests/training/test_checkpoint.py]
jaxfl/training/checkpoint.py: if value != found => if False
jaxfl/training/checkpoint.py: max_to_keep=keep => max_to_keep=None
[tests/training/test_pass_directory.py]
jaxfl/training/pass_directory.py: _mark_of(self._blocks(size)).checksum != checksum => False
[tests/training/test_resume.py]
jaxfl/training/lockstep.py: self._directory.keep_lines(content["metrics"]) => pass
jaxfl/training/lane_record.py: self.totals, self.last_line => _, self.last_line
[tests/training/test_lane_record.py]
jaxfl/training/lockstep.py: self._most - since) => self._most)
[tests/training/test_passes.py]
jaxfl/training/passes.py: v.budgets for v in cases => False for v in cases
[tests/training/test_evaluation.py]
jaxfl/training/measures.py: jnp.where(batch.counts, value, 0) => value
jaxfl/training/measures.py: values.max(axis=-1) if larger_is_worse => values.min(axis=-1) if larger_is_worse
[tests/training/test_stationarity.py]
jaxfl/training/measures.py: jnp.sum(leaf.mean(axis=0) ** 2) => jnp.sum((leaf**2).mean(axis=0))
[tests/frame/test_frame_request.py]
jaxfl/frame/grid.py: itertools.product(*rows) => zip(*rows)
[tests/training/test_printed.py]
jaxfl/analysis/cases.py: = winner["privacy"] + cases[winner["case"]]["privacy"] => = cases[winner["case"]]["privacy"]
jaxfl/analysis/report.py: if any(row[name] for row in one.sites)] => if one.sites[0][name]]
jaxfl/analysis/report.py: epsilon = rounded_up(max(epsilons), 4) => epsilon = rounded_up(min(epsilons), 4)
jaxfl/analysis/report.py: _mean([row[name] for row in own]) => _mean([row[name] for row in own[:1]])
jaxfl/analysis/cases.py: {k: v for k, v in changes.get(name, {}).items() if k != "seeds"} => {}
jaxfl/analysis/report.py: own = [(one, [t for t => own = [(alike[0], [t for t
jaxfl/training/sites.py: parts if len(parts) == len(seeds) else parts[:1] => parts[:1]
jaxfl/training/sites.py: noise[node % len(noise)] if noise => noise[0] if noise
jaxfl/training/sites.py: own[node % len(own)] if len(own) in (1, count) => own[0] if len(own) in (1, count)
jaxfl/training/sites.py: rounded_up(max(epsilons), 4) => rounded_up(min(epsilons), 4)
jaxfl/training/lockstep.py: if ending and self._final is not None: => if self._final is None:
jaxfl/training/final_params.py: "round": round_index => "round": 0
jaxfl/training/summary.py: last.get((case, seed)) if record.get("status") in WHOLE else None => last.get((case, seed))
jaxfl/training/summary.py: record["status"], record["until"]] => record["status"], line.get("round")]
jaxfl/training/summary.py: known.std(ddof=1) => known.std(ddof=0)
jaxfl/training/summary.py: = float(np.median(own)) => = float(np.mean(own))
jaxfl/training/summary.py: "rounds": max(rounds), => "rounds": min(rounds),
jaxfl/frame/run.py: if name in request.rows and not request.rows[name].baseline] => if name in request.rows]
jaxfl/frame/run.py: in (own | row.settings).items() => in row.settings.items()
jaxfl/frame/run.py: if any("seed" in part for part in request.grid): => if row.seeds == (0,):
jaxfl/frame/run.py: best = compared[0] => best = compared[-1]
jaxfl/frame/run.py: Best of {len(compared)} => Best of {len(request.rows)}
jaxfl/frame/run.py: rounds = max(entry["rounds_per_seed"]) => rounds = min(entry["rounds_per_seed"])
jaxfl/frame/selecting.py: privacy = _paid(search, cases[name], row["privacy"]) => privacy = list(row["privacy"])
jaxfl/privacy/statements.py: digits, decimal.ROUND_CEILING) => digits, decimal.ROUND_FLOOR)
[tests/analysis/test_report.py]
jaxfl/analysis/cases.py: for one in shown if not is_baseline(one)} => for one in shown}
jaxfl/analysis/report.py: if s["dp_epsilon"] is not None and t not in common] => if t not in common]
[tests/analysis/test_plots.py tests/analysis/test_final_plot.py]
jaxfl/analysis/final_plot.py: if row["status"] == "diverged"} => if False}
jaxfl/analysis/plots.py: values.mean(axis=1), values.min(axis=1), => values.mean(axis=1), values.mean(axis=1),
[tests/training/test_sites.py]
jaxfl/training/sites.py: len(own & other.case.settings.items()) => 0
jaxfl/training/sites.py: sign = -1 if larger_is_worse(metrics[0]) else 1 => sign = 1
[tests/training/test_final_params.py]
jaxfl/training/final_params.py: if name not in arrays or _form(arrays[name]) != form: => if name not in arrays:
jaxfl/training/final_params.py: != (case, seed): => is None:
jaxfl/training/final_params.py: header.keys() <= _EARLIER => "checksum" not in header
jaxfl/training/final_params.py: sorted(map(str, _paths(tree))) != sorted(map(str, paths.values())) => False
jaxfl/training/final_params.py: if isinstance(row, bool) or not => if not
[tests/training/test_sweep.py -k column]
jaxfl/training/summary.py: f"option_{name}" if name in ("case", "seed", *ending) else name => name
[tests/training/test_pass_directory.py]
jaxfl/training/pass_directory.py: os.fsync(file.fileno()) => pass
jaxfl/core/lines.py: if line["round"] <= rounds.get(lane, -1): => if False:
[tests/training/test_secrecy.py]
jaxfl/training/publish.py: sums |= _node_by_node(cases, of_nodes, relation) => pass
jaxfl/training/publish.py: np.sum([np.max( => np.sum([np.min(
jaxfl/training/publish.py: if not case.final_params_are_private: => if False:
jaxfl/training/publish.py: = ("finished", "budget_spent") => = ("finished", "budget_spent", "stopped_early")
jaxfl/training/publish.py: st_mode & 0o077: => st_mode & 0o007:
jaxfl/core/keys.py: sort_keys=True, default=_plain => default=_plain
jaxfl/core/keys.py: text += data if isinstance(data, str) => text += "" if isinstance(data, str)
[tests/experiments/test_private_selection.py -k winner_has]
jaxfl/training/publish.py: called = {winner: "selected"} => called = {winner: winner}
[tests/experiments/test_private_selection.py -k 'covers or refusals or number_of or fresh or alike']
jaxfl/frame/selecting.py: if not case.final_params_are_private: => if False:
jaxfl/frame/selecting.py: if len(stated) > 1: => if False:
jaxfl/frame/selecting.py: np.random.default_rng((self.entropy, _OF_COUNT)) => np.random.default_rng((self.entropy, 0))
jaxfl/frame/selecting.py: table, digits=17) => table, digits=6)
jaxfl/frame/experiment.py: if other is not settings: => if False:
[tests/training/test_compilation_cache.py]
jaxfl/training/compilation_cache.py: owner.st_mode & 0o022 => owner.st_mode & 0o002
jaxfl/training/compilation_cache.py: _set(before) => pass
jaxfl/training/compilation_cache.py: zlib.crc32(chr(10).join(processors).encode()) => 0
[tests/frame]
jaxfl/frame/options.py: elif option.traced and math.isfinite(number): => elif False:
jaxfl/frame/experiment.py: dict.fromkeys(seeds or [values => dict.fromkeys(seeds[:1] or [values
jaxfl/frame/choose.py: return options[self.option] in self.values => return True
jaxfl/frame/choose.py: if arguments[key] is None and default is _REQUIRED: => if False:
jaxfl/frame/grid.py: np.random.default_rng((seed, number)) => np.random.default_rng(seed)
jaxfl/frame/grid.py: if len(row) < len(pairs): => if False:
[tests/experiments/test_bad_inputs.py]
jaxfl/frame/options.py: if not 0 <= number < 2**32: => if not 0 <= number < 2**33:
jaxfl/frame/grid.py: low < high and (scale == "" or low > 0) => low < high
jaxfl/frame/experiment.py: if set(left) & explicit and set(right) & explicit: => if False:
[tests/experiments/test_baselines.py -k 'rows or pooled']
jaxfl/frame/experiment.py: all(s.get(name, value) == value for s in settings) => True
[tests/experiments/test_own_data.py -k follows_the_sizes]
jaxfl/frame/own_files.py: max(1, min(values["batch_size"], most)) => values["batch_size"]
[tests/experiments/test_launcher.py -k secret_key]
jaxfl/frame/run.py: key=secret_key(records) if has_secret else None, => key=None,
[tests/graphs/test_graph_files.py tests/data/test_tables.py]
jaxfl/graphs/files.py: for sender, receiver in edges) => for receiver, sender in edges)
jaxfl/graphs/files.py: "metropolis" if both_ways else "uniform", names=order => "uniform", names=order
jaxfl/graphs/files.py: order = tables.in_order(named => order = sorted(named
[tests/data/test_tables.py tests/core/test_rulebook.py]
jaxfl/data/tables.py: held_names(ids.names, share)[ids.numbers] => held_names(ids.names, share)[ids.numbers - 1]
jaxfl/core/tables.py: _DIGITS = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})") => _DIGITS = re.compile(r"[+-]?[0-9]{1,18}")
jaxfl/core/tables.py: sorted(distinct, key=int) if => sorted(distinct) if
jaxfl/core/tables.py: for one in name.casefold() if => for one in name if
jaxfl/data/tables.py: return tuple(numbers[name] for name in names) => return tuple(numbers.values())
[tests/data/test_partition.py tests/experiments/test_one_record.py]
jaxfl/data/held_out.py: & (numbers < numbers.max()) => & (numbers <= numbers.max())
[tests/channel/test_ledger.py]
jaxfl/channel/ledger.py: simulated_seconds.max(axis=-1) + => simulated_seconds.mean(axis=-1) +
jaxfl/channel/ledger.py: lib.maximum(bits / bits_per_second, book.slot_seconds) => bits / bits_per_second
jaxfl/channel/ledger.py: watts = 1e-3 * 10 ** (transmit_dbm / 10) => watts = 10 ** (transmit_dbm / 10)
[tests/privacy/test_audit_noise.py]
jaxfl/privacy/audit_noise.py: np.sqrt(counts[: len(leaf)][sent]) => counts[: len(leaf)][sent]
jaxfl/privacy/audit_noise.py: not lower <= 1 <= upper, smallest => not lower <= 1, smallest
jaxfl/privacy/audit_noise.py: added / visit, rate * (1 - rate) => added / visit, rate
[tests/privacy/test_statements.py]
jaxfl/privacy/statements.py: dp_delta * num_records < 1: => dp_delta * num_records < 100:
jaxfl/privacy/statements.py: prefix = _ASKED if stated.get("asked") else "" => prefix = ""
"""


class Row(NamedTuple):
    file: str
    text: str
    replacement: str
    tests: str  # arguments of pytest


def read_rows() -> list[Row]:
    """The table; it ends the script where texts are not found exactly once, and names them all."""
    rows, tests, lost = [], "", []
    for line in ROWS.strip().splitlines():
        if line.startswith("["):
            tests = line.strip("[]")
            continue
        file, _, change = line.partition(": ")
        text, _, replacement = change.partition(" => ")
        if (count := (ROOT / file).read_text().count(text)) != 1:
            lost.append(f"{file} has {text!r} {count} times")
        rows.append(Row(file, text, replacement, tests))
    if lost:
        sys.exit("\n".join(lost))
    return rows


def copy(folder: Path) -> None:
    """The files of the checkout that tests need, in a folder of their own."""
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "results")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)


def outcome(folder: Path, row: Row) -> str:
    """Run the tests of one fault: "caught", "survived", or how pytest ended otherwise."""
    path = folder / row.file
    whole = path.read_text()
    path.write_text(whole.replace(row.text, row.replacement))
    command = f"{sys.executable} -m pytest -q -x -n 0 -m 'not slow' -p no:cacheprovider {row.tests}"
    environment = os.environ | {"PYTHONPATH": str(folder), "JAXFL_TESTS_CACHE": str(folder / "programs")}
    ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    path.write_text(whole)
    names = {FAILED: "caught", PASSED: "survived"}
    return names.get(ran.returncode) or f"pytest ended with {ran.returncode}: {(ran.stdout or ran.stderr)[-300:]}"


def main(words: list[str]) -> int:
    rows, results, rooms = read_rows(), [], {}
    if words == ["--check"]:
        return 0
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        for row in rows:
            if not words or any(word in row.file for word in words):
                results.append(outcome(Path(name), row))
                print(f"{results[-1]:9} {row.file}: {row.text} => {row.replacement}", flush=True)
                rooms.setdefault(row.file.split("/")[1], []).append(results[-1] == "caught")
    print(", ".join(f"{room} {sum(caught)} of {len(caught)}" for room, caught in sorted(rooms.items())))
    caught = results.count("caught")
    print(f"{caught} of {len(results)} caught")
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
