"""The rounds of `bench_peers` in PyTorch, as its users write them.

| row | how |
|---|---|
| loop | a Python loop over nodes, each step `cross_entropy`, `backward`, `torch.optim.SGD` |
| stacked | all nodes' MLPs in one batched product a layer (`baddbmm`), by hand |
| vmap_grad | DP-SGD in a loop over clients, a sample's gradient by `torch.func`: `vmap(grad)` |
| ghost | DP-SGD in a loop over clients, norms from layer inputs and errors, one backward pass, by hand |

Convolutions run channels last. Batches are drawn by `torch.randint`, the cheapest way there is, with repetition.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments.bench_peers import Setting, Workload
from experiments.bench_round import KEY
from jaxfl.core import FederatedData, Purpose, PyTree, purpose_key

Tensor = Any  # torch.Tensor
Pool = tuple[Tensor, Tensor]  # inputs and labels of all nodes


class Rival(NamedTuple):
    """One row of PyTorch, which keeps its parameters."""

    one_round: Callable[[Tensor], None]  # positions in the pool, (active, steps, batch) int64; trains for one round
    result: Callable[[], dict[str, Tensor]]  # parameters, named as by `as_torch`; (n, ...) for push-sum


def calls(setting: Setting, workload: Workload, data: FederatedData) -> dict[str, tuple[Callable[[], float], int]]:
    """Row -> (function that runs rounds and returns their seconds, number of rounds), run once to warm up."""
    params = jax.jit(workload.model.init)(purpose_key(KEY, Purpose.INIT))
    generator = torch.Generator().manual_seed(0)
    shape = (workload.num_active, workload.num_local_steps, workload.batch_size)

    def draw():
        nodes = torch.randperm(workload.num_nodes, generator=generator)[: workload.num_active]
        return nodes[:, None, None] * setting.samples + torch.randint(setting.samples, shape, generator=generator)

    found = {}
    for name, rival in rivals(setting, workload, params, data).items():
        rounds = 1 if name == "vmap_grad" else workload.rounds  # which takes far longer
        rival.one_round(draw())

        def call(one_round=rival.one_round, rounds=rounds):
            start = time.perf_counter()
            for _ in range(rounds):
                one_round(draw())
            return time.perf_counter() - start

        found[name] = (call, rounds)
    return found


def rivals(setting: Setting, workload: Workload, params: PyTree, data: FederatedData) -> dict[str, Rival]:
    """The workload's rows, which start from `params`, one node's."""
    inputs = torch.from_numpy(np.array(data.inputs))
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2)  # in memory as it was: channels last
    pool = (inputs, torch.from_numpy(np.array(data.labels)).long())
    start = as_torch(params)

    def make():
        return _load(network(setting, workload), start)

    if workload.method == "dp_fed_avg":
        return {
            "vmap_grad": dp_loop(setting, pool, make, by_vmap),
            "ghost": dp_loop(setting, pool, make, by_ghost_norms),
        }
    if workload.method == "push_sum":
        return {
            "loop": push_sum_loop(setting, workload, pool, make),
            "stacked": push_sum_stacked(setting, workload, pool, start),
        }
    loop = fed_avg_loop(setting, pool, make)
    if workload.network == "mlp":
        return {"loop": loop, "stacked": fed_avg_stacked(setting, workload, pool, start)}
    return {"loop": loop}


def as_torch(params: PyTree) -> dict[str, Tensor]:
    """One node's parameters by PyTorch's names and axes: "dense_1.weight" is the transposed kernel."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *layer, kind = (entry.key for entry in path)
        values = np.array(leaf)
        if kind == "kernel":
            values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
        found[".".join([*layer, "bias" if kind == "bias" else "weight"])] = torch.from_numpy(values)
    return found


def _load(module: Any, start: dict[str, Tensor]) -> Any:
    """The module with these parameters; they must be all of its parameters, in the same shapes."""
    shapes = {name: values.shape for name, values in module.named_parameters()}
    assert shapes == {name: values.shape for name, values in start.items()}, "another network than jaxfl's"
    module.load_state_dict(start, strict=False)  # running statistics stay as they are
    return module.to(memory_format=torch.channels_last)


class Flatten(nn.Module):
    """Channels innermost, as jaxfl's images have them; channels last, this moves nothing."""

    def forward(self, images):
        return images.permute(0, 2, 3, 1).flatten(1)


class Block(nn.Module):
    """The basic block of residual networks."""

    def __init__(self, in_channels: int, features: int, stride: int):
        super().__init__()
        self.conv_1 = nn.Conv2d(in_channels, features, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(features)
        self.conv_2 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(features)
        self.projects = stride > 1 or in_channels != features
        if self.projects:
            self.conv_shortcut = nn.Conv2d(in_channels, features, 1, stride, bias=False)
            self.norm_shortcut = nn.BatchNorm2d(features)

    def forward(self, images):
        hidden = self.norm_1(self.conv_1(images)).relu()
        hidden = self.norm_2(self.conv_2(hidden))
        if self.projects:
            images = self.norm_shortcut(self.conv_shortcut(images))
        return (hidden + images).relu()


class Stem(nn.Module):
    """The first convolution of residual networks."""

    def __init__(self, in_channels: int, features: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, features, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(features)

    def forward(self, images):
        return self.norm(self.conv(images)).relu()


def network(setting: Setting, workload: Workload) -> Any:
    """The workload's network; its layers have jaxfl's names."""
    classes, layers = setting.num_classes, {}
    if workload.network == "mlp":
        hidden = setting.push_sum_hidden if workload.method == "push_sum" else setting.mlp_hidden
        layers |= {
            "dense_1": nn.Linear(math.prod(setting.image_shape), hidden),
            "relu_1": nn.ReLU(),
            "dense_2": nn.Linear(hidden, classes),
        }
    elif workload.network == "cnn":
        (height, width, channels), (first, second) = setting.image_shape, setting.channels
        layers |= {
            "conv_1": nn.Conv2d(channels, first, setting.window, padding="same"),
            "relu_1": nn.ReLU(),
            "pool_1": nn.MaxPool2d(2),
            "conv_2": nn.Conv2d(first, second, setting.window, padding="same"),
            "relu_2": nn.ReLU(),
            "pool_2": nn.MaxPool2d(2),
            "flatten": Flatten(),
            "dense_1": nn.Linear((height // 4) * (width // 4) * second, setting.hidden),
            "relu_3": nn.ReLU(),
            "dense_2": nn.Linear(setting.hidden, classes),
        }
    else:
        previous = setting.resnet_widths[0]
        layers["stem"] = Stem(setting.resnet_shape[2], previous)
        for stage, (features, count) in enumerate(zip(setting.resnet_widths, setting.resnet_blocks, strict=True), 1):
            for position in range(1, count + 1):
                stride = 2 if stage > 1 and position == 1 else 1
                layers[f"block_{stage}_{position}"] = Block(previous, features, stride)
                previous = features
        layers |= {"mean": nn.AdaptiveAvgPool2d(1), "flatten": Flatten(), "dense": nn.Linear(previous, classes)}
    return nn.Sequential(OrderedDict(layers))


def _parameters(module: Any) -> dict[str, Tensor]:
    return {name: values.detach() for name, values in module.named_parameters()}


def fed_avg_loop(setting: Setting, pool: Pool, make: Callable[[], Any]) -> Rival:
    """Federated averaging, one client after the other."""
    (inputs, labels), server, local = pool, make(), make()

    def one_round(samples):
        mean = {}
        for client in samples:
            local.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=setting.step_size)
            for batch in client:
                optimizer.zero_grad()
                functional.cross_entropy(local(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            for name, values in local.state_dict().items():
                if values.is_floating_point():
                    mean[name] = mean.get(name, 0) + values / len(samples)
        server.load_state_dict(mean, strict=False)

    return Rival(one_round, lambda: _parameters(server))


def dp_loop(setting: Setting, pool: Pool, make: Callable[[], Any], clipped: Callable) -> Rival:
    """DP-SGD, one client after the other, and the mean of their models."""
    (inputs, labels), server, local = pool, make(), make()
    mean_gradient = clipped(local, setting.clip_norm)

    @torch.no_grad()
    def one_round(samples):
        mean = {}
        for client in samples:
            local.load_state_dict(server.state_dict())
            for batch in client:
                gradient = mean_gradient(inputs[batch], labels[batch])
                for name, values in local.named_parameters():
                    noisy = gradient[name] + setting.noise_std * torch.randn_like(values)
                    values.sub_(noisy, alpha=setting.step_size)
            for name, values in local.state_dict().items():
                mean[name] = mean.get(name, 0) + values / len(samples)
        server.load_state_dict(mean)

    return Rival(one_round, lambda: _parameters(server))


def by_vmap(module: Any, clip_norm: float) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """(inputs, labels) -> mean of the clipped gradients, by every sample's gradient."""

    def loss(params, sample, label):
        return functional.cross_entropy(torch.func.functional_call(module, params, sample[None]), label[None])

    each_gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def mean_gradient(inputs, labels):
        each = each_gradient(_parameters(module), inputs, labels)
        squared = torch.stack([values.flatten(1).square().sum(dim=1) for values in each.values()]).sum(dim=0)
        weights = (clip_norm / squared.sqrt()).clamp(max=1.0) / len(labels)
        return {name: torch.tensordot(weights, values, dims=1) for name, values in each.items()}

    return mean_gradient


def by_ghost_norms(module: Any, clip_norm: float) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """The same from layer inputs and errors, without a dense layer's gradients of single samples.

    A convolution's are formed, by one batched product over patches, and weighted: far smaller than the dense layers'.
    """
    module.requires_grad_(False)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    kept = {name: one for name, one in module.named_modules() if isinstance(one, (nn.Linear, nn.Conv2d))}

    def record(name):
        def hook(layer, inputs, outputs):
            # Parameters need no gradient, so that the first output is a leaf, and the graph starts there.
            seen[name] = (inputs[0].detach(), outputs if outputs.requires_grad else outputs.requires_grad_())

        return hook

    for name, layer in kept.items():
        layer.register_forward_hook(record(name))

    def mean_gradient(inputs, labels):
        with torch.enable_grad():
            loss = functional.cross_entropy(module(inputs), labels, reduction="sum")
        errors = torch.autograd.grad(loss, [seen[name][1] for name in kept])
        squared, each = torch.zeros(len(labels)), {}
        for (name, layer), error in zip(kept.items(), errors, strict=True):
            values = seen[name][0]
            if isinstance(layer, nn.Conv2d):
                rows = functional.unfold(values, layer.kernel_size, padding=layer.kernel_size[0] // 2)
                positions = error.flatten(2)
                each[name] = torch.bmm(positions, rows.transpose(1, 2)), positions.sum(dim=2)
                squared += sum(one.flatten(1).square().sum(dim=1) for one in each[name])
            else:
                squared += (values.square().sum(dim=1) + 1.0) * error.square().sum(dim=1)
        weights = (clip_norm / squared.sqrt()).clamp(max=1.0) / len(labels)
        gradient = {}
        for (name, layer), error in zip(kept.items(), errors, strict=True):
            if name in each:
                kernel, bias = (torch.tensordot(weights, one, dims=1) for one in each[name])
            else:
                weighted = error * weights[:, None]
                kernel, bias = weighted.T @ seen[name][0], weighted.sum(dim=0)
            gradient |= {f"{name}.weight": kernel.reshape(layer.weight.shape), f"{name}.bias": bias}
        return gradient

    return mean_gradient


def _shift(num_nodes: int, round_index: int) -> int:
    """How far the exponential graph sends in a round."""
    return 2 ** (round_index % (math.floor(math.log2(num_nodes - 1)) + 1))


def push_sum_loop(setting: Setting, workload: Workload, pool: Pool, make: Callable[[], Any]) -> Rival:
    """Push-sum, one node after the other."""
    (inputs, labels), n, module, round_index = pool, workload.num_nodes, make(), 0
    params = [[values.detach().clone() for values in module.parameters()] for _ in range(n)]
    weights = [1.0] * n

    def one_round(samples):
        nonlocal params, weights, round_index
        sent = []
        for own, weight, batch in zip(params, weights, samples[:, 0], strict=True):
            with torch.no_grad():
                for used, values in zip(module.parameters(), own, strict=True):
                    torch.div(values, weight, out=used)
            module.zero_grad()
            functional.cross_entropy(module(inputs[batch]), labels[batch]).backward()
            pairs = zip(own, module.parameters(), strict=True)
            sent.append([values.sub_(used.grad, alpha=setting.step_size) for values, used in pairs])
        shift = _shift(n, round_index)
        params = [
            [0.5 * (kept + other) for kept, other in zip(sent[i], sent[i - shift], strict=True)] for i in range(n)
        ]
        weights = [0.5 * (weights[i] + weights[i - shift]) for i in range(n)]
        round_index += 1

    names = list(_parameters(module))
    return Rival(one_round, lambda: {name: torch.stack([own[i] for own in params]) for i, name in enumerate(names)})


def _stacked_gradient(params: list[Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all nodes' mean losses.

    Args:
        params: kernels (n, in, out) and biases (n, 1, out) of two dense layers.
        inputs: (n, b, features).
        labels: (n, b).
    """
    leaves = [values.detach().requires_grad_() for values in params]
    hidden = torch.baddbmm(leaves[1], inputs, leaves[0]).relu()
    logits = torch.baddbmm(leaves[3], hidden, leaves[2])
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return torch.autograd.grad(loss / labels.shape[1], leaves)


def _stack(start: dict[str, Tensor], num_nodes: int) -> list[Tensor]:
    """The same parameters at every node, as `_stacked_gradient` takes them."""
    one = []
    for layer in ("dense_1", "dense_2"):
        one += [start[f"{layer}.weight"].T, start[f"{layer}.bias"][None]]
    return [values.expand(num_nodes, *values.shape).contiguous() for values in one]


def _unstack(params: list[Tensor]) -> dict[str, Tensor]:
    """Stacked parameters by their names."""
    found = {}
    for layer, kernel, bias in zip(("dense_1", "dense_2"), params[::2], params[1::2], strict=True):
        found |= {f"{layer}.weight": kernel.transpose(1, 2), f"{layer}.bias": bias[:, 0]}
    return found


def fed_avg_stacked(setting: Setting, workload: Workload, pool: Pool, start: dict[str, Tensor]) -> Rival:
    """Federated averaging, all active clients at once."""
    (inputs, labels), k = pool, workload.num_active
    server = _stack(start, 1)

    def one_round(samples):
        nonlocal server
        params = [values.repeat(k, 1, 1) for values in server]
        for batch in samples.unbind(1):
            for values, slope in zip(params, _stacked_gradient(params, inputs[batch], labels[batch]), strict=True):
                values.sub_(slope, alpha=setting.step_size)
        server = [values.mean(dim=0, keepdim=True) for values in params]

    return Rival(one_round, lambda: {name: values[0] for name, values in _unstack(server).items()})


def push_sum_stacked(setting: Setting, workload: Workload, pool: Pool, start: dict[str, Tensor]) -> Rival:
    """Push-sum, all nodes at once."""
    (inputs, labels), n, round_index = pool, workload.num_nodes, 0
    params, weights = _stack(start, n), torch.ones(n, 1, 1)

    def mix(values, shift):
        return values.add_(values.roll(shift, 0)).mul_(0.5)

    def one_round(samples):
        nonlocal round_index
        batch, shift = samples[:, 0], _shift(n, round_index)
        debiased = [values / weights for values in params]
        for values, slope in zip(params, _stacked_gradient(debiased, inputs[batch], labels[batch]), strict=True):
            mix(values.sub_(slope, alpha=setting.step_size), shift)
        mix(weights, shift)
        round_index += 1

    return Rival(one_round, lambda: _unstack(params))
