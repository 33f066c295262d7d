"""The rounds of `peers` in PyTorch, as its users write them.

| row | how |
|---|---|
| loop | a Python loop over nodes, each step `cross_entropy`, `backward`, `torch.optim.SGD` |
| stacked | all nodes' MLPs in one batched product a layer (`baddbmm`), by hand |
| vmap_compiled | all nodes' MLPs at once by `torch.func`: `vmap(grad)` and the step in `torch.compile`, as for speed |
| vmap_grad | DP-SGD in a loop over clients, a sample's gradient by `torch.func`: `vmap(grad)` |
| ghost | DP-SGD in a loop over clients, norms from layer inputs and errors, one backward pass, by hand |

Convolutions run channels last, and one with strides pads both sides alike, where jaxfl's pads the far side only.
Batches are drawn by `torch.randint`, the cheapest way there is, with repetition.
"""

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments.bench.setting import KEY, Setting
from jaxfl.core import FederatedData, Purpose, PyTree, purpose_key
from jaxfl.models import Model

Tensor = Any  # torch.Tensor
Tensors = dict[str, Tensor]  # by name
Step = Callable[[Tensor, Tensor], Any]  # of inputs and labels
Pool = tuple[Tensor, Tensor]  # inputs and labels of all nodes


class Rival(NamedTuple):
    """One row of PyTorch, which keeps its parameters."""

    one_round: Callable[[Tensor], None]  # positions in the pool, (active, steps, batch) int64; trains for one round
    result: Callable[[], Tensors]  # parameters, named as by `as_torch`; (n, ...) for push-sum


def calls(setting: Setting, data: FederatedData) -> dict[str, tuple[Callable[[], float], int]]:
    """Row -> (function that runs rounds and returns their seconds, number of rounds), run once to warm up."""
    if setting.method not in ("fed_avg", "dp_sgd", "push_sum"):
        return {}
    params = jax.jit(setting.network.model.init)(purpose_key(KEY, Purpose.INIT))
    generator = torch.Generator().manual_seed(0)
    shape = (setting.active(), setting.num_local_steps, setting.batch_size)

    def draw():
        nodes = torch.randperm(setting.num_nodes, generator=generator)[: setting.active()]
        return nodes[:, None, None] * setting.samples + torch.randint(setting.samples, shape, generator=generator)

    rows = {}
    for name, rival in rivals(setting, params, data).items():
        rounds = 1 if name == "vmap_grad" else setting.rounds  # which takes far longer
        rival.one_round(draw())

        def call(one_round=rival.one_round, rounds=rounds):
            start = time.perf_counter()
            for _ in range(rounds):
                one_round(draw())
            return time.perf_counter() - start

        rows[name] = (call, rounds)
    return rows


def rivals(setting: Setting, params: PyTree, data: FederatedData) -> dict[str, Rival]:
    """The workload's rows, which start from `params`, one node's."""
    inputs = torch.from_numpy(np.array(data.inputs))
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2)  # in memory as it was: channels last
    pool = (inputs, torch.from_numpy(np.array(data.labels)).long())
    start, model = as_torch(params), setting.network.model
    rows: dict[str, Callable[..., Rival]]
    if setting.method == "push_sum":
        rows = {"loop": push_sum_loop, "stacked": push_sum_stacked, "vmap_compiled": by_vmap_compiled}
    elif setting.method == "dp_sgd":
        kinds = {"vmap_grad": by_vmap, "ghost": by_ghost_norms}
        rows = {name: partial(client_loop, partial(dp_sgd, clipped)) for name, clipped in kinds.items()}
    else:
        rows = {"loop": partial(client_loop, sgd)}
        if all(name.startswith("dense") for name in start):
            rows |= {"stacked": fed_avg_stacked, "vmap_compiled": by_vmap_compiled}
    return {name: row(setting, pool, model, start) for name, row in rows.items()}


def as_torch(params: PyTree) -> Tensors:
    """One node's parameters by PyTorch's names and axes: "dense_1.weight" is the transposed kernel."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        *layer, kind = (entry.key for entry in path)
        values = np.array(leaf)
        if kind == "kernel":
            values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
        tensors[".".join([*layer, "bias" if kind == "bias" else "weight"])] = torch.from_numpy(values)
    return tensors


class Flatten(nn.Module):
    """Channels innermost, as jaxfl's images have them; channels last, this moves nothing. Flat samples stay."""

    def forward(self, images):
        return images if images.ndim == 2 else images.permute(0, 2, 3, 1).flatten(1)


def conv_norm(channels: int, features: int, window: int, stride: int = 1) -> tuple[Any, Any]:
    """A convolution without biases, and the normalization of its outputs."""
    conv = nn.Conv2d(channels, features, window, stride, padding=window // 2, bias=False)
    return conv, nn.BatchNorm2d(features)


class Block(nn.Module):
    """The basic block of residual networks; one with more channels than before halves the images."""

    def __init__(self, channels: int, features: int, projects: bool):
        super().__init__()
        stride = 2 if features > channels else 1
        self.conv_1, self.norm_1 = conv_norm(channels, features, 3, stride)
        self.conv_2, self.norm_2 = conv_norm(features, features, 3)
        if projects:
            self.conv_shortcut, self.norm_shortcut = conv_norm(channels, features, 1, stride)
        self.projects = projects

    def forward(self, images):
        hidden = self.norm_2(self.conv_2(self.norm_1(self.conv_1(images)).relu()))
        if self.projects:
            images = self.norm_shortcut(self.conv_shortcut(images))
        return (hidden + images).relu()


def network(model: Model, start: Tensors) -> Any:
    """The model in PyTorch from these parameters, which must be all that it has; layers have jaxfl's names."""

    def sizes(name):
        features, channels, *window = start[f"{name}.weight"].shape
        return channels, features, *window[:1]

    makers = {
        "conv": lambda name: nn.Conv2d(*sizes(name), padding="same"),
        "dense": lambda name: nn.Linear(*sizes(name)),
        "relu": lambda name: nn.ReLU(),
        "pool": lambda name: nn.MaxPool2d(2),
        "flatten": lambda name: Flatten(),
        "mean": lambda name: nn.Sequential(nn.AdaptiveAvgPool2d(1), Flatten()),
        "stem": lambda name: nn.Sequential(
            OrderedDict(zip(("conv", "norm", "relu"), (*conv_norm(*sizes(f"{name}.conv")), nn.ReLU()), strict=True))
        ),
        "block": lambda name: Block(*sizes(f"{name}.conv_1")[:2], f"{name}.conv_shortcut.weight" in start),
    }
    kinds = [(name, name.partition("_")[0]) for name, _ in model.layers]
    module = nn.Sequential(OrderedDict((name, makers[kind](name)) for name, kind in kinds if kind in makers))
    shapes = {name: values.shape for name, values in module.named_parameters()}
    assert shapes == {name: values.shape for name, values in start.items()}, "another network than jaxfl's"
    module.load_state_dict(start, strict=False)  # running statistics stay as they are
    return module.to(memory_format=torch.channels_last)


def _parameters(module: Any) -> Tensors:
    return {name: values.detach() for name, values in module.named_parameters()}


def client_loop(trainer: Callable[..., Step], setting: Setting, pool: Pool, model: Model, start: Tensors) -> Rival:
    """One client after the other trains the server's model; then the mean of their models."""
    (inputs, labels), server, local = pool, network(model, start), network(model, start)
    train = trainer(setting, local)

    def one_round(samples):
        mean = {}
        for client in samples:
            local.load_state_dict(server.state_dict())
            for batch in client:
                train(inputs[batch], labels[batch])
            for name, values in local.state_dict().items():
                if values.is_floating_point():
                    mean[name] = mean.get(name, 0) + values / len(samples)
        server.load_state_dict(mean, strict=False)

    return Rival(one_round, lambda: _parameters(server))


def sgd(setting: Setting, module: Any) -> Step:
    """A step of SGD, as users write it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=setting.step_size)

    def train(inputs, labels):
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()

    return train


def dp_sgd(clipped: Callable[[Any, float], Step], setting: Setting, module: Any) -> Step:
    """A step of DP-SGD."""
    mean_gradient = clipped(module, setting.clip_norm)

    @torch.no_grad()
    def train(inputs, labels):
        gradient = mean_gradient(inputs, labels)
        for name, values in module.named_parameters():
            noisy = gradient[name] + setting.noise_std * torch.randn_like(values)
            values.sub_(noisy, alpha=setting.step_size)

    return train


def by_vmap(module: Any, clip_norm: float) -> Step:
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


def by_ghost_norms(module: Any, clip_norm: float) -> Step:
    """The same from layer inputs and errors, without a dense layer's gradients of single samples.

    A convolution's are formed, by one batched product over patches, and weighted: far smaller than the dense layers'.
    """
    module.requires_grad_(False)
    passed: dict[str, tuple[Tensor, Tensor]] = {}
    kept = {name: one for name, one in module.named_modules() if isinstance(one, (nn.Linear, nn.Conv2d))}

    def record(name, layer, inputs, outputs):
        # Parameters need no gradient, so that the first output is a leaf, and the graph starts there.
        passed[name] = (inputs[0].detach(), outputs if outputs.requires_grad else outputs.requires_grad_())

    for name, layer in kept.items():
        layer.register_forward_hook(partial(record, name))

    def mean_gradient(inputs, labels):
        with torch.enable_grad():
            loss = functional.cross_entropy(module(inputs), labels, reduction="sum")
        errors = torch.autograd.grad(loss, [passed[name][1] for name in kept])
        squared, combine = torch.zeros(len(labels)), {}  # weights of samples -> the layer's kernel and bias
        for (name, layer), error in zip(kept.items(), errors, strict=True):
            values = passed[name][0]
            if isinstance(layer, nn.Conv2d):
                rows = functional.unfold(values, layer.kernel_size, padding=layer.kernel_size[0] // 2)
                positions = error.flatten(2)
                each = torch.bmm(positions, rows.transpose(1, 2)), positions.sum(dim=2)
                squared += sum(one.flatten(1).square().sum(dim=1) for one in each)
                combine[name] = lambda weights, each=each: [torch.tensordot(weights, one, dims=1) for one in each]
            else:
                squared += (values.square().sum(dim=1) + 1.0) * error.square().sum(dim=1)
                combine[name] = lambda weights, values=values, error=error: (
                    (error * weights[:, None]).T @ values,
                    weights @ error,
                )
        weights, gradient = (clip_norm / squared.sqrt()).clamp(max=1.0) / len(labels), {}
        for name, layer in kept.items():
            kernel, bias = combine[name](weights)
            gradient |= {f"{name}.weight": kernel.reshape(layer.weight.shape), f"{name}.bias": bias}
        return gradient

    return mean_gradient


def _shifts(num_nodes: int) -> Iterator[int]:
    """Distances over which the exponential graph sends, one per round."""
    return itertools.cycle(2**power for power in range(math.floor(math.log2(num_nodes - 1)) + 1))


def _mix(values: Tensor, shift: int) -> None:
    """Mix in place over the exponential graph, rows (n, ...)."""
    values.add_(values.roll(shift, 0)).mul_(0.5)


def push_sum_loop(setting: Setting, pool: Pool, model: Model, start: Tensors) -> Rival:
    """Push-sum, one node after the other."""
    (inputs, labels), n, module = pool, setting.num_nodes, network(model, start)
    params = [[values.detach().clone() for values in module.parameters()] for _ in range(n)]
    weights, shifts = [1.0] * n, _shifts(n)

    def one_round(samples):
        nonlocal params, weights
        sent, shift = [], next(shifts)
        for sums, weight, batch in zip(params, weights, samples[:, 0], strict=True):
            with torch.no_grad():
                for used, values in zip(module.parameters(), sums, strict=True):
                    torch.div(values, weight, out=used)
            module.zero_grad()
            functional.cross_entropy(module(inputs[batch]), labels[batch]).backward()
            pairs = zip(sums, module.parameters(), strict=True)
            sent.append([values.sub_(used.grad, alpha=setting.step_size) for values, used in pairs])
        pairs = [zip(sent[i], sent[i - shift], strict=True) for i in range(n)]
        params = [[0.5 * (kept + other) for kept, other in pair] for pair in pairs]
        weights = [0.5 * (weights[i] + weights[i - shift]) for i in range(n)]

    names = list(_parameters(module))
    return Rival(one_round, lambda: {name: torch.stack([sums[i] for sums in params]) for i, name in enumerate(names)})


def _stacked_gradient(params: list[Tensor], inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all nodes' mean losses to kernels (n, in, out) and biases (n, 1, out); labels are (n, b)."""
    leaves = [values.detach().requires_grad_() for values in params]
    hidden = torch.baddbmm(leaves[1], inputs, leaves[0]).relu()
    logits = torch.baddbmm(leaves[3], hidden, leaves[2])
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return torch.autograd.grad(loss / labels.shape[1], leaves)


def _stack(start: Tensors, num_nodes: int) -> list[Tensor]:
    """The same parameters at every node, as `_stacked_gradient` takes them."""
    layers = [(start[f"dense_{number}.weight"].T, start[f"dense_{number}.bias"][None]) for number in (1, 2)]
    one = itertools.chain(*layers)
    return [values.expand(num_nodes, *values.shape).contiguous() for values in one]


def _unstack(params: list[Tensor]) -> Tensors:
    """Stacked parameters by their names."""
    names = [f"dense_{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
    values = [leaf.transpose(1, 2) if leaf.shape[1] > 1 else leaf[:, 0] for leaf in params]
    return dict(zip(names, values, strict=True))


def fed_avg_stacked(setting: Setting, pool: Pool, model: Model, start: Tensors) -> Rival:
    """Federated averaging, all active clients at once."""
    (inputs, labels), k = pool, setting.active()
    server = _stack(start, 1)

    def one_round(samples):
        nonlocal server
        params = [values.repeat(k, 1, 1) for values in server]
        for batch in samples.unbind(1):
            for values, slope in zip(params, _stacked_gradient(params, inputs[batch], labels[batch]), strict=True):
                values.sub_(slope, alpha=setting.step_size)
        server = [values.mean(dim=0, keepdim=True) for values in params]

    return Rival(one_round, lambda: {name: values[0] for name, values in _unstack(server).items()})


def push_sum_stacked(setting: Setting, pool: Pool, model: Model, start: Tensors) -> Rival:
    """Push-sum, all nodes at once."""
    (inputs, labels), n = pool, setting.num_nodes
    params, weights, shifts = _stack(start, n), torch.ones(n, 1, 1), _shifts(n)

    def one_round(samples):
        batch, shift = samples[:, 0], next(shifts)
        debiased = [values / weights for values in params]
        for values, slope in zip(params, _stacked_gradient(debiased, inputs[batch], labels[batch]), strict=True):
            _mix(values.sub_(slope, alpha=setting.step_size), shift)
        _mix(weights, shift)

    return Rival(one_round, lambda: _unstack(params))


def by_vmap_compiled(setting: Setting, pool: Pool, model: Model, start: Tensors) -> Rival:
    """Federated averaging, or push-sum, all nodes at once by `vmap`; a step is one compiled call."""
    (inputs, labels), k, module = pool, setting.active(), network(model, start)
    params = {name: values.repeat(k, *[1] * values.ndim) for name, values in start.items()}
    weights, shifts, mixes = torch.ones(k), _shifts(k), setting.method == "push_sum"

    def loss(params, inputs, labels):
        return functional.cross_entropy(torch.func.functional_call(module, params, (inputs,)), labels)

    def step(params, weight, inputs, labels):
        slopes = torch.func.grad(loss)({name: values / weight for name, values in params.items()}, inputs, labels)
        return {name: values - setting.step_size * slopes[name] for name, values in params.items()}

    compiled = torch.compile(torch.func.vmap(step))

    def one_round(samples):
        nonlocal params
        for batch in samples.unbind(1):
            params = compiled(params, weights, inputs[batch], labels[batch])
        if mixes:
            shift = next(shifts)
            for values in (*params.values(), weights):
                _mix(values, shift)
        else:
            params = {name: values.mean(dim=0).expand_as(values) for name, values in params.items()}

    return Rival(one_round, lambda: params if mixes else {name: values[0] for name, values in params.items()})
