"""The paper's own filters and the filters of prototypes, in dense algebra: plain loops as in
published.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from published.gradient_steps import Step, assign, by_batch, entropies, flat, im_loss, norms

# The paper's own ----------------------------------------------------------------------------------


def individually(model: nn.Module, batch: Tensor, own: dict[str, Tensor]) -> Tensor:
    """Logits of ``network`` by batch statistics, every sample using parameters of its own [n,
    ...].
    """
    for name, layer in model.named_children():
        weight, bias = own.get(f"{name}.weight"), own.get(f"{name}.bias")
        if weight is None:
            batch = layer(batch)
        elif isinstance(layer, nn.Conv2d):
            columns = functional.unfold(batch, 3, padding=1, stride=layer.stride)
            size = (batch.shape[2] - 1) // layer.stride[0] + 1
            batch = (weight.flatten(2) @ columns).unflatten(2, (size, size))
        elif isinstance(layer, nn.BatchNorm2d) and bias is not None:
            variance, mean = torch.var_mean(batch, (0, 2, 3), correction=0, keepdim=True)
            batch = (batch - mean) / (variance + layer.eps).sqrt() * weight[
                :, :, None, None
            ] + bias[:, :, None, None]
        elif bias is not None:
            batch = (weight @ batch.unsqueeze(2)).squeeze(2) + bias
    return batch


def usage_rows(
    model: nn.Module, names: list[str], batch: Tensor, cotangents: Callable[[Tensor], Tensor]
) -> Tensor:
    """Row i: the part of the batch's gradient that enters through sample i's own use of the
    parameters [n, d].
    """
    known = dict(model.named_parameters())
    own = {
        name: known[name].detach().expand(len(batch), *known[name].shape).clone().requires_grad_()
        for name in known
    }
    logits = individually(model, batch, own)
    gradients = torch.autograd.grad(
        logits, [own[name] for name in names], cotangents(logits.detach())
    )
    return torch.cat([gradient.flatten(1) for gradient in gradients], 1)


def gauss_newton_diagonal(model: nn.Module, names: list[str], batches: Iterable[Tensor]) -> Tensor:
    """Diagonal of I + the sum over samples of J' (diag p - p p') J [d], as rows of use, batch by
    batch.
    """
    total = torch.ones(
        sum(dict(model.named_parameters())[name].numel() for name in names), dtype=torch.float64
    )
    for batch in batches:
        for column in range(model(batch).shape[1]):

            def root(logits: Tensor, column: int = column) -> Tensor:
                p = logits.softmax(1)
                return (functional.one_hot(torch.tensor(column), p.shape[1]) - p) * p[
                    :, column, None
                ].sqrt()

            total += (usage_rows(model, names, batch, root) ** 2).sum(0)
    return total


def norm_names(model: nn.Module) -> list[str]:
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    return [f"{name}.{piece}" for name in layers for piece in ("weight", "bias")]


def im_cotangents(logits: Tensor) -> Tensor:
    """n times the gradient of the information maximisation loss in the logits."""
    leaf = logits.clone().requires_grad_()
    return len(leaf) * torch.autograd.grad(im_loss(leaf), leaf)[0]


def paper_loop(
    model: nn.Module,
    batches: list[Tensor],
    beta: float,
    variance: float,
    diagonal: bool,
    draws: Callable[[int], Tensor] | None = None,
) -> Iterator[Step]:
    """S = (I / v + F'F)^-1, m - S g; F of centred rows; both averaged over draws around the mean
    where there are any.
    """
    model = by_batch(model)
    parameters, names = norms(model), norm_names(model)
    for step, batch in enumerate(batches):
        here = flat(parameters)
        gradient, curvature = (
            torch.zeros_like(here),
            torch.zeros(len(here), len(here), dtype=here.dtype),
        )
        points = here[None] if draws is None else here + draws(step)
        for point in points:
            assign(parameters, point)
            rows = usage_rows(model, names, batch, im_cotangents)
            factor = math.sqrt(beta / len(batch)) * (rows - rows.mean(0))
            gradient += beta * rows.mean(0) / len(points)
            curvature += factor.T @ factor / len(points)
        curvature = torch.diag(curvature.diagonal()) if diagonal else curvature
        covariance = torch.linalg.inv(torch.eye(len(here), dtype=here.dtype) / variance + curvature)
        assign(parameters, here - covariance @ gradient)
        yield Step(flat(parameters), model(batch).detach().softmax(1), covariance=covariance)


def _clipped(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    positive: Tensor = (vectors * values.clamp(min=0)) @ vectors.mT
    return positive


def _head_curvature(logits: Tensor, features: Tensor, beta: float) -> Tensor:
    """Sum over samples of beta times the clipped block of the batch loss's Hessian, on the features
    [d, d].
    """
    n, k = logits.shape
    hessian = torch.autograd.functional.hessian(im_loss, logits)
    total = torch.zeros(k * features.shape[1], k * features.shape[1], dtype=logits.dtype)
    for i in range(n):
        total += torch.kron(
            beta * _clipped(hessian[i, :, i]), torch.outer(features[i], features[i])
        )
    return total


def head_loop(
    model: nn.Module,
    batches: list[Tensor],
    beta: float,
    variance: float,
    rho: float,
    around: Callable[[Tensor, int], Tensor] | None,
    predictive: Callable[[Tensor, int], Tensor],
) -> Iterator[Step]:
    """A filter on the head: mean reversion with stationary noise, then a Newton step; ``around``
    and ``predictive`` draw.
    """
    body, weight, bias = _body_and_head(by_batch(model))
    source = torch.cat((bias[:, None], weight), 1).flatten()
    wide = variance * torch.eye(len(source), dtype=source.dtype)
    mean, covariance = source, wide
    for step, batch in enumerate(batches):
        features = torch.cat(
            (torch.ones(len(batch), 1, dtype=batch.dtype), body(batch).detach()), 1
        )
        mean = rho * mean + (1 - rho) * source
        covariance = rho**2 * covariance + (1 - rho**2) * wide
        points = mean[None] if around is None else mean + around(covariance, step)
        gradient, curvature = torch.zeros_like(mean), torch.zeros_like(covariance)
        for point in points:
            logits = features @ point.view(-1, features.shape[1]).T
            gradient += (
                beta * (im_cotangents(logits).T @ features / len(batch)).flatten() / len(points)
            )
            curvature += _head_curvature(logits, features, beta) / len(points)
        covariance = torch.linalg.inv(torch.linalg.inv(covariance) + curvature)
        mean = mean - covariance @ gradient
        thetas = (mean + predictive(covariance, step)).unflatten(1, (-1, features.shape[1]))
        yield Step(mean, (features @ thetas.mT).softmax(-1).mean(0), covariance=covariance)


# Prototypes ---------------------------------------------------------------------------------------


def _body_and_head(model: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    body = deepcopy(model).eval()
    head = body.get_submodule("head")
    assert isinstance(head, nn.Linear)
    setattr(body, "head", nn.Identity())  # noqa: B010
    return body, head.weight.detach(), head.bias.detach()


@torch.no_grad()
def t3a_loop(model: nn.Module, batches: list[Tensor], capacity: int) -> Iterator[Step]:
    """Parameters: the sums of each class's supports; ``kept``: how many supports there are. Rows of
    the head are filed as features are: by what the head calls them.
    """
    body, weight, bias = _body_and_head(model)
    supports, labels, uncertain = (
        weight.clone(),
        (weight @ weight.T + bias).argmax(1),
        entropies(weight @ weight.T + bias),
    )
    rows = torch.ones(len(weight), dtype=torch.bool)
    for batch in batches:
        features = body(batch)
        logits = features @ weight.T + bias
        supports = torch.cat((supports, features))
        rows = torch.cat((rows, torch.zeros(len(features), dtype=torch.bool)))
        labels = torch.cat((labels, logits.argmax(1)))
        uncertain = torch.cat((uncertain, entropies(logits)))
        lists = []
        for label in range(len(weight)):
            own = (labels == label).nonzero()[:, 0]
            lists.append(own[uncertain[own].argsort()][: capacity or None])
        chosen = torch.cat(lists)
        supports, labels, uncertain, rows = (
            supports[chosen],
            labels[chosen],
            uncertain[chosen],
            rows[chosen],
        )
        sums = functional.one_hot(labels, len(weight)).double().T @ functional.normalize(
            supports, dim=1
        )
        probabilities = (features @ functional.normalize(sums, dim=1).T).softmax(1)
        yield Step(sums.flatten(), probabilities, len(supports), note=f"{int(rows.sum())} rows")


@torch.no_grad()
def stad_loop(
    model: nn.Module,
    batches: list[Tensor],
    kappa: float,
    variance: float,
    drift: float,
    iterations: int,
) -> Iterator[Step]:
    """Gaussian prototypes: EM for the shares, the conjugate update, a random walk between
    batches.
    """
    body, weight, bias = _body_and_head(model)
    center = body(batches[0]).mean(0)
    # Prototypes W / kappa + v whose logits are the source head's: |W|^2 / 2 kappa + W (v + center)
    # + b the same for all.
    uneven = (weight**2).sum(1) / (2 * kappa) + weight @ center + bias
    shift = torch.linalg.lstsq(
        weight - weight.mean(0), uneven.mean() - uneven, driver="gelsd"
    ).solution
    means, spread = (
        weight / kappa + shift,
        torch.full((len(weight), 1), variance, dtype=weight.dtype),
    )
    for batch in batches:
        features = body(batch) - center
        before, wide = means, spread + drift
        means, spread = before, wide
        for _ in range(iterations):
            distances = ((features[:, None] - means) ** 2).sum(2) + features.shape[1] * spread[:, 0]
            shares = (-kappa / 2 * distances).softmax(1)
            spread = 1 / (1 / wide + kappa * shares.sum(0)[:, None])
            means = spread * (before / wide + kappa * shares.T @ features)
        scores = -kappa / 2 * ((features[:, None] - means) ** 2).sum(2)
        covariance = torch.diag(spread.expand_as(means).flatten())
        yield Step(means.flatten(), scores.softmax(1), covariance=covariance)


@torch.no_grad()
def stad_vmf_loop(
    model: nn.Module,
    batches: list[Tensor],
    kappa: float,
    transition: float,
    strength: float,
    iterations: int,
    ratio: Callable[[Tensor], Tensor],
) -> Iterator[Step]:
    """``ratio`` is A_D: the length of the mean direction at a concentration."""
    body, weight, _ = _body_and_head(model)
    center = body(batches[0]).mean(0)
    vectors = strength * functional.normalize(weight, dim=1)

    def expected(vectors: Tensor) -> Tensor:
        return ratio(vectors.norm(dim=1, keepdim=True)) * functional.normalize(vectors, dim=1)

    for batch in batches:
        directions = functional.normalize(body(batch) - center, dim=1)
        before = transition * expected(vectors)
        vectors = before
        for _ in range(iterations):
            shares = (kappa * directions @ expected(vectors).T).softmax(1)
            vectors = before + kappa * shares.T @ directions
        yield Step(vectors.flatten(), (kappa * directions @ expected(vectors).T).softmax(1))
