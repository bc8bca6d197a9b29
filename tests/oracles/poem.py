"""POEM (Yi et al., 2025): explore reliable samples by selecting again after an update, and learn in a branch too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from oracles.common import (
    Outcome,
    averaged,
    below,
    branch_norms,
    confidence_weight,
    cosine,
    deep_part,
    drop_of,
    entropy,
    mixed,
    norms_below_top,
    put_back,
    sgd,
    shallow_part,
    shuffled,
    step,
    values,
    with_batch_statistics,
)


def poem(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Algorithm 1: select, update the shallow norm layers and the branch, run again, until the set stands still."""
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    theta, zeta = norms_below_top(main), branch_norms(side)
    theta_sgd, zeta_sgd = sgd(theta, lr), sgd(zeta, lr)
    for x in batches:
        features = shallow_part(main, x)
        branch_logits = deep_part(side, features)
        scores = mixed(deep_part(main, features), branch_logits)  # Eq. 5
        chosen = below(scores, 0.4)  # Eq. 2
        outcome = Outcome(scores, chosen)
        for _ in range(2):
            if not chosen.any():
                break
            theta_loss = entropy(scores)[chosen].mean()  # Eq. 3
            zeta_loss = cross_entropy(branch_logits[chosen], scores.argmax(1)[chosen])  # Eq. 6
            theta_gradients = torch.autograd.grad(theta_loss, theta, retain_graph=True)
            zeta_gradients = torch.autograd.grad(zeta_loss, zeta)
            step(theta_sgd, theta_gradients)
            step(zeta_sgd, zeta_gradients)
            outcome.updates.append(chosen)
            features = shallow_part(main, x)
            branch_logits = deep_part(side, features)
            scores = mixed(deep_part(main, features), branch_logits)
            previous, chosen = chosen, below(scores, 0.4)
            if torch.equal(chosen, previous):
                break
        outcome.answer = scores.detach()
        yield outcome


def poem_official(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    plpd: float = 0.2,
    redundancy: float | None = 0.2,
    loss_floor: float | None = 0.2,
    first_margin: float = 0.4,
) -> Iterator[Outcome]:
    """POEM as its authors run it, repaired: the mean of logits, PLPD and redundancy tests, DeYO's weights at first.

    Without a redundancy there is no such test, and without a loss floor no way back.
    """
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    theta, zeta = norms_below_top(main), branch_norms(side)
    origin = values([*theta, *zeta])
    theta_sgd, zeta_sgd = sgd(theta, lr), sgd(zeta, lr)
    average: Tensor | None = None
    loss_average: Tensor | None = None

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        features = shallow_part(main, x)
        branch_logits = deep_part(side, features)
        return 0.5 * deep_part(main, features) + 0.5 * branch_logits, branch_logits

    def select(logits: Tensor, destroyed: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        """Low entropy, high PLPD, unlike the average prediction; and the PLPD."""
        reliable = below(logits, margin)
        drop = torch.full((len(logits),), -2.0, dtype=logits.dtype)
        if reliable.any():
            with torch.no_grad():
                drop[reliable] = drop_of(logits[reliable].softmax(1), forward(destroyed[reliable])[0].softmax(1))
        chosen = reliable & (drop > plpd)
        if average is not None and redundancy is not None:
            chosen = chosen & (cosine(average, logits.softmax(1).detach()).abs() < redundancy)
        return chosen, drop

    for x in batches:
        destroyed = shuffled(x, rng)
        logits, branch_logits = forward(x)
        chosen, drop = select(logits, destroyed, first_margin)
        outcome = Outcome(logits, chosen)
        first_loss: Tensor | None = None
        seen: Tensor | None = None
        for _ in range(2):
            if not chosen.any():
                break
            kept = entropy(logits)[chosen]
            if first_loss is None:
                weight = confidence_weight(kept, logits.shape[1]) + drop[chosen].exp()
                theta_loss = (weight * kept).mean()
                first_loss = theta_loss.detach()
            else:
                theta_loss = kept.mean()
            zeta_loss = cross_entropy(branch_logits[chosen], logits.argmax(1)[chosen])
            theta_gradients = torch.autograd.grad(theta_loss, theta, retain_graph=True)
            zeta_gradients = torch.autograd.grad(zeta_loss, zeta)
            step(theta_sgd, theta_gradients)
            step(zeta_sgd, zeta_gradients)
            seen = logits.softmax(1)[chosen].mean(0).detach()
            outcome.updates.append(chosen)
            logits, branch_logits = forward(x)
            previous, (chosen, drop) = chosen, select(logits, destroyed, 0.4)
            if torch.equal(chosen, previous):
                break
        outcome.answer = logits.detach()
        if seen is not None:
            average = averaged(average, seen)
        if first_loss is not None:
            loss_average = averaged(loss_average, first_loss)
        if loss_average is not None and loss_floor is not None and loss_average < loss_floor:
            put_back([*theta, *zeta], origin)
            theta_sgd, zeta_sgd = sgd(theta, lr), sgd(zeta, lr)
            average, loss_average, outcome.reset = None, None, True
        yield outcome


def poem_official_v2(
    net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, plpd: float = 0.2
) -> Iterator[Outcome]:
    """The authors' second form: a wider margin for the first selection, no redundancy test and no way back."""
    yield from poem_official(
        net, batches, lr=lr, rng=rng, plpd=plpd, redundancy=None, loss_floor=None, first_margin=0.5
    )
