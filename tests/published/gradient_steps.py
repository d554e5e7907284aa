"""Published methods as their authors write them: plain loops in torch over a copy of the model,
with torch.optim.

No loss, weighting, rule or statistic of driftfilter is used here; only draws of random numbers are
shared.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Optimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Augment: TypeAlias = Callable[[Tensor, int], Tensor]  # images and step -> images


class Step(NamedTuple):
    """What a method has after a batch."""

    parameters: Tensor  # [d]
    probabilities: Tensor  # [n, k]
    kept: int = -1  # samples that counted
    covariance: Tensor | None = None  # [d, d]
    note: str = ""  # the branch that was taken


def network(classes: int = 4, seed: int = 0) -> nn.Sequential:
    """A small convolutional network in float64 with running statistics that are not those of any
    batch.
    """
    torch.manual_seed(seed)
    first, second, head = nn.BatchNorm2d(5), nn.BatchNorm2d(6), nn.Linear(6, classes)
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 5, 3, padding=1, bias=False),
        norm1=first,
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(5, 6, 3, padding=1, stride=2, bias=False),
        layer4=second,
        relu2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=head,
    )
    model = nn.Sequential(layers).double()
    with torch.no_grad():
        head.weight.normal_(0, 3.0)
        for norm in (first, second):
            norm.weight.uniform_(0.6, 1.4)
            norm.bias.normal_(0, 0.4)
    model.train()
    for _ in range(8):
        model(torch.rand(32, 3, 6, 6, dtype=torch.float64))
    with torch.no_grad():  # every class is the answer for some images
        head.bias.zero_()
        head.bias.sub_(model(torch.cat(stream(seed=9))).mean(0))
    return model.eval()


def stream(steps: int = 3, samples: int = 12, seed: int = 1) -> list[Tensor]:
    """Batches of images in [0, 1]: shades of different contrast, so that some are easy and some are
    not.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(steps):
        images = torch.rand(samples, 3, 6, 6, generator=generator, dtype=torch.float64)
        shade = torch.rand(samples, 3, 1, 1, generator=generator, dtype=torch.float64)
        amount = torch.linspace(0.05, 1.0, samples, dtype=torch.float64).view(-1, 1, 1, 1)
        batches.append((1 - amount) * shade + amount * images * (0.7 + 0.1 * step))
    return batches


# What loops share ---------------------------------------------------------------------------------


def by_batch(model: nn.Module) -> nn.Module:
    """A copy that normalises by the batch it sees."""
    copy = deepcopy(model).eval()
    for layer in copy.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return copy


def norms(model: nn.Module, frozen: tuple[str, ...] = ()) -> list[nn.Parameter]:
    """Scale and shift of the batch norms, which alone are trained; layers whose name has a frozen
    word stay.
    """
    model.requires_grad_(False)
    found: list[nn.Parameter] = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and not any(word in name for word in frozen):
            found += [layer.weight, layer.bias]
    for parameter in found:
        parameter.requires_grad_()
    return found


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).clone()


def assign(parameters: list[nn.Parameter], values: Tensor) -> None:
    with torch.no_grad():
        pieces = values.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))


def entropies(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def adam(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.Adam(parameters, lr)


def momentum(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr, momentum=0.9)


def nesterov(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)


def minimise(rule: torch.optim.Optimizer, loss: Tensor) -> None:
    rule.zero_grad()
    loss.backward()
    rule.step()


# Losses of whole batches, logits [n, k] -> [] -----------------------------------------------------


def tent_loss(logits: Tensor) -> Tensor:
    return entropies(logits).mean()


def pl_loss(threshold: float) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        confident, labels = logits.softmax(1).max(1)
        return functional.cross_entropy(
            logits[confident > threshold], labels[confident > threshold]
        )

    return loss


def rpl_loss(q: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: (
        (1 - logits.softmax(1).gather(1, logits.argmax(1, keepdim=True)) ** q) / q
    ).mean()


def conjugate_loss(epsilon: float) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        total = torch.zeros((), dtype=logits.dtype)
        for row in logits:
            p = row.softmax(0)
            metric = (
                torch.eye(len(p), dtype=p.dtype)
                + epsilon * torch.diag(p)
                - epsilon * torch.outer(p, p)
            )
            y = torch.linalg.inv(metric) @ p
            total = total + row.logsumexp(0) - y @ row + epsilon * (y @ (1 - p))
        return total / len(logits)

    return loss


def im_loss(logits: Tensor) -> Tensor:
    mean = logits.softmax(1).mean(0)
    return entropies(logits).mean() + (mean * mean.log()).sum()


def slr_each(logits: Tensor, ceiling: float = 0.99) -> Tensor:
    p = logits.softmax(1).clamp(max=ceiling)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(1)


def descend(
    model: nn.Module,
    batches: list[Tensor],
    loss: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    after: bool = False,
) -> Iterator[Step]:
    """TENT's loop: one step of an optimiser on the norm parameters; ``after``: predict with the new
    ones.
    """
    model = by_batch(model)
    parameters = norms(model)
    rule = optimizer(parameters)
    for batch in batches:
        logits = model(batch)
        minimise(rule, loss(logits))
        yield Step(flat(parameters), (model(batch) if after else logits).detach().softmax(1))


# EATA ---------------------------------------------------------------------------------------------


def eata_fisher(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Mean over batches of the squared gradient of the mean cross-entropy to the most likely class
    [d].
    """
    model = by_batch(model)
    parameters = norms(model)
    squares = []
    for batch in batches:
        logits = model(batch)
        loss = functional.cross_entropy(logits, logits.argmax(1))
        squares.append(flat(torch.autograd.grad(loss, parameters)) ** 2)
    return torch.stack(squares).mean(0)


def eata_loop(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    margin: float,
    similarity: float,
    fisher: Tensor | None = None,
    alpha: float = 0.0,
    every: int = 0,
) -> Iterator[Step]:
    """ETA; EATA with a Fisher; RDumb, which starts again after ``every`` steps."""
    model = by_batch(model)
    parameters = norms(model)
    source, rule, running = flat(parameters), adam(lr)(parameters), None
    for step, batch in enumerate(batches, 1):
        logits = model(batch)
        limit = margin * math.log(logits.shape[1])
        chosen = logits[entropies(logits) < limit]
        if running is not None:
            chosen = chosen[
                functional.cosine_similarity(running[None], chosen.softmax(1)).abs() < similarity
            ]
        if len(chosen):
            mean = chosen.softmax(1).mean(0).detach()
            running = mean if running is None else 0.9 * running + 0.1 * mean
            loss = (entropies(chosen) * torch.exp(limit - entropies(chosen).detach())).mean()
            if fisher is not None:
                here = torch.cat([parameter.flatten() for parameter in parameters])
                loss = loss + alpha * (fisher * (here - source) ** 2).sum()
            minimise(rule, loss)
        if every and step % every == 0:
            assign(parameters, source)
            rule, running = adam(lr)(parameters), None
        yield Step(flat(parameters), logits.detach().softmax(1), len(chosen))


# SAR ----------------------------------------------------------------------------------------------


def sar_loop(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    margin: float,
    radius: float,
    threshold: float,
) -> Iterator[Step]:
    model = by_batch(model)
    parameters = norms(model, ("layer4",))
    source, rule, running = flat(parameters), momentum(lr)(parameters), None
    for batch in batches:
        logits = model(batch)
        limit = margin * math.log(logits.shape[1])
        first = entropies(logits) < limit
        here = flat(parameters)
        gradient = flat(torch.autograd.grad(entropies(logits)[first].mean(), parameters))
        assign(parameters, here + radius * gradient / gradient.norm())
        second = entropies(model(batch))[first]
        kept = second < limit
        loss = second[kept].mean()
        rule.zero_grad()
        loss.backward()
        assign(parameters, here)
        rule.param_groups[0]["lr"] = lr * min(
            1.0, len(batch) / 32
        )  # the authors': (lr / 64) · n · 2 below 32 samples
        rule.step()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        note = f"{running}"
        if running < threshold:  # the momentum goes on: it is the inner optimiser's own
            assign(parameters, source)
            running, note = None, "reset"
        yield Step(
            flat(parameters),
            logits.detach().softmax(1),
            int(kept.sum()) - int(first.sum()),
            note=note,
        )


# ROID, CMF, SLWI and SSA --------------------------------------------------------------------------


def _scaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def roid_loop(
    model: nn.Module,
    batches: list[Tensor],
    optimizer: Optimizer,
    augment: Augment,
    after: Callable[[Tensor, Tensor, Tensor], Tensor],
    size: int = 0,
) -> Iterator[Step]:
    """ROID's loss, of which only the samples kept are augmented; ``after``: what becomes of the
    parameters, from those before a step, those after it and the source's. ``size`` of a batch as
    configured, if it is not that of the batches.
    """
    model = by_batch(model)
    parameters = norms(model)
    source, rule = flat(parameters), optimizer(parameters)
    running = None
    for step, batch in enumerate(batches):
        before, logits = flat(parameters), model(batch)
        n, k = logits.shape
        with torch.no_grad():
            p = logits.softmax(1)
            running = torch.full_like(p[0], 1 / k) if running is None else running
            diversity = _scaled(1 - functional.cosine_similarity(running[None], p, dim=1))
            kept = diversity >= diversity.mean()
            weights = torch.exp(diversity * _scaled(-entropies(logits)) * 3)[kept]
            running = 0.9 * running + 0.1 * p.mean(0)
            smooth = max(1 / n, 1 / k) / p.mean(0).max()
            corrected = (logits * (p.mean(0) + smooth) / (1 + smooth * k)).softmax(1)
        clean, view = logits[kept], model(augment(batch[kept], step))
        there = -(clean.softmax(1) * view.log_softmax(1)).sum(1)
        back = -(view.softmax(1) * clean.log_softmax(1)).sum(1)
        loss = ((slr_each(clean) + (there + back) / 2) * weights).sum() / (size or n)
        minimise(rule, loss)
        assign(parameters, after(before, flat(parameters), source))
        yield Step(flat(parameters), corrected, int(kept.sum()))


def ensemble(rho: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """ROID's average with the source."""
    return lambda before, proposed, source: rho * proposed + (1 - rho) * source


class MomentumFilter:
    """CMF: one number for the variance of all weights."""

    def __init__(self, rho: float, process: float) -> None:
        self.rho, self.process, self.variance = rho, process, 0.0
        self.hidden: Tensor | None = None

    def __call__(self, before: Tensor, proposed: Tensor, source: Tensor) -> Tensor:
        q = self.process * len(proposed) / 38400
        hidden = source if self.hidden is None else self.hidden
        hidden = self.rho * hidden + (1 - self.rho) * source
        self.variance = self.rho**2 * self.variance + q
        share = max((1 - q) / (self.variance + 1 - q), 0.89)
        share = share if share < 0.9999 else 1.0
        self.hidden, self.variance = share * hidden + (1 - share) * proposed, share * self.variance
        return self.rho * proposed + (1 - self.rho) * self.hidden


class LatentFilter:
    """SLWI, in the words of its state-space model: N(φ; μ, P) before, θ observed with variance r;
    ``surprises`` notes which steps were cut.
    """

    def __init__(self, rho: float, process: float, gain: float, limit: float, cut: float) -> None:
        self.rho, self.process, self.gain, self.limit, self.cut = rho, process, gain, limit, cut
        self.hidden: Tensor | None = None
        self.variance, self.fits, self.surprises = 0.0, list[float](), list[bool]()

    def __call__(self, before: Tensor, proposed: Tensor, source: Tensor) -> Tensor:
        q = self.process * len(proposed) / 38400
        hidden = source if self.hidden is None else self.hidden
        mean, variance = (
            self.rho * hidden + (1 - self.rho) * source,
            self.rho**2 * self.variance + q,
        )
        predictive = torch.distributions.Normal(mean, math.sqrt(variance + 1 - q))
        constant = predictive.log_prob(mean).sum().item()
        self.fits.append(predictive.log_prob(proposed).sum().item() - constant)
        changes = [new - old for old, new in zip(self.fits, self.fits[1:], strict=False)]
        earlier = changes[:-1]
        usual = math.sqrt(sum(change**2 for change in earlier) / max(len(earlier), 1))
        self.surprises.append(bool(earlier) and abs(changes[-1]) > self.limit * usual)
        seen = before + (proposed - before) / self.cut if self.surprises[-1] else proposed
        precision = 1 / variance + 1 / (1 - q)
        self.hidden = (mean / variance + seen / (1 - q)) / precision
        self.variance = 1 / precision
        return mean + self.gain * (seen - mean)


class SteadyFilter:
    """SSA: moves of the mean weight in a list; ``sizes`` notes by what steps were multiplied."""

    def __init__(
        self, variance: float, moves: int, rho: float, retention: float, pull: float
    ) -> None:
        self.variance, self.window = variance, moves
        self.rho, self.retention, self.pull = rho, retention, pull
        self.hidden: Tensor | None = None
        self.moves, self.sizes, self.steady = list[float](), list[float](), False

    def __call__(self, before: Tensor, proposed: Tensor, source: Tensor) -> Tensor:
        move, size = (before - proposed).mean().item(), 1.0
        if len(self.moves) > self.window:
            known = [*self.moves[-self.window :], move]
            center = sum(known) / len(known)
            spread = sum((each - center) ** 2 for each in known) / len(known)
            proposal = math.sqrt(self.variance / spread)
            self.steady = self.steady or proposal < math.sqrt(2)
            size = proposal if self.steady else 1.0
        self.moves.append(size * move)
        self.sizes.append(size)
        taken = (1 - size) * before + size * proposed
        hidden = source if self.hidden is None else self.hidden
        hidden = self.rho * hidden + (1 - self.rho) * source
        self.hidden = self.retention * hidden + (1 - self.retention) * taken
        return (1 - self.pull) * taken + self.pull * self.hidden


# CoTTA and PETAL ----------------------------------------------------------------------------------


def cotta_loop(
    model: nn.Module,
    batches: list[Tensor],
    lr: float,
    slowness: float,
    confidence: float,
    views: Callable[[Tensor, int], list[Tensor]],
    restore: Callable[[Tensor, int], Tensor],
    pull: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Step]:
    """``restore``: which parameters go back, from the gradient and the step; ``pull``: the gradient
    of PETAL's regulariser.
    """
    student, teacher, anchor = by_batch(model), by_batch(model), by_batch(model)
    parameters = list(student.parameters())
    source, rule = flat(parameters), adam(lr)(parameters)
    for step, batch in enumerate(batches):
        with torch.no_grad():
            sure = anchor(batch).softmax(1).max(1)[0].mean() >= confidence
            target = (
                teacher(batch)
                if sure
                else torch.stack([teacher(view) for view in views(batch, step)]).mean(0)
            )
        loss = -(target.softmax(1) * student(batch).log_softmax(1)).sum(1).mean()
        rule.zero_grad()
        loss.backward()
        if pull is not None:
            gradients = pull(flat(parameters)).split(
                [parameter.numel() for parameter in parameters]
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient.view_as(parameter)
        whole = flat(parameter.grad for parameter in parameters if parameter.grad is not None)
        rule.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), parameters, strict=True):
                slow.copy_(slowness * slow + (1 - slowness) * fast)
        mask = restore(whole, step)
        assign(parameters, torch.where(mask, source, flat(parameters)))
        yield Step(
            flat(parameters),
            target.softmax(1),
            int(mask.sum()),
            note="clean" if sure else "augmented",
        )


# MEMO and LoRA-TTT --------------------------------------------------------------------------------


class Blended(nn.Module):
    """Batch normalisation by the moments of a mixture of source and batch, which it may carry on in
    the source's place.
    """

    def __init__(self, layer: nn.BatchNorm2d, share: Callable[[int], float], carry: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.source = (layer.running_mean.clone(), layer.running_var.clone())
        self.share, self.carry = share, carry

    def forward(self, images: Tensor) -> Tensor:
        mean, variance = self.source
        share = self.share(len(images))
        own, spread = images.mean((0, 2, 3)), images.var((0, 2, 3), unbiased=False)
        blend = (1 - share) * variance + share * spread + share * (1 - share) * (own - mean) ** 2
        center = (1 - share) * mean + share * own
        self.source = (center.detach(), blend.detach()) if self.carry else self.source
        scaled = (images - center.view(-1, 1, 1)) / (blend + self.eps).sqrt().view(-1, 1, 1)
        return scaled * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def blended(model: nn.Module, share: Callable[[int], float], carry: bool = False) -> nn.Module:
    copy = deepcopy(model).eval()
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            setattr(copy, name, Blended(layer, share, carry))
    return copy


def counted(model: nn.Module) -> nn.Module:
    """The source counts as 16 samples."""
    return blended(model, lambda samples: samples / (16 + samples))


def marginal_entropy(views: list[Tensor]) -> Tensor:
    mean = torch.stack([logits.softmax(1) for logits in views]).mean(0)
    return -(mean * mean.log()).sum()


def memo_loop(
    model: nn.Module, samples: list[Tensor], lr: float, views: Callable[[Tensor, int], list[Tensor]]
) -> Iterator[Step]:
    """Each sample [1, ...] is an episode; views are normalised one by one."""
    for step, sample in enumerate(samples):
        own = counted(model)
        parameters = list(own.parameters())
        loss = marginal_entropy([own(view) for view in views(sample, step)])
        minimise(torch.optim.SGD(parameters, lr), loss)
        yield Step(flat(parameters), own(sample).detach().softmax(1))


def lora_loop(
    model: nn.Module,
    samples: list[Tensor],
    lr: float,
    factors: dict[str, Tensor],
    views: Callable[[Tensor, int], list[Tensor]],
) -> Iterator[Step]:
    """W + B A for every weight named, A from ``factors`` and B = 0 anew for every sample."""
    own = counted(model).requires_grad_(False)
    for step, sample in enumerate(samples):
        pieces = [
            piece.requires_grad_()
            for name, a in factors.items()
            for piece in (a.clone(), a.new_zeros(len(own.get_parameter(name)), len(a)))
        ]

        def weights(pieces: list[Tensor] = pieces) -> dict[str, Tensor]:
            pairs = zip(factors, pieces[::2], pieces[1::2], strict=True)
            return {
                name: own.get_parameter(name) + (b @ a).view_as(own.get_parameter(name))
                for name, a, b in pairs
            }

        logits = [
            torch.func.functional_call(own, weights(), (view,)) for view in views(sample, step)
        ]
        minimise(torch.optim.SGD(pieces, lr), marginal_entropy(logits))
        yield Step(
            flat(pieces), torch.func.functional_call(own, weights(), (sample,)).detach().softmax(1)
        )
