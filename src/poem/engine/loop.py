"""The one loop: a batch from the first look to the answer.

Every method runs through `Turn.run`. Masks keep the batch whole and updates are predicated on the device, so a round
reads from the device once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from poem.engine import input_checks as checks
from poem.engine.accounting import Batchwise, FirstLast
from poem.engine.looking import Looking
from poem.engine.network import Network
from poem.engine.state import State, put
from poem.parts.base import Batch, Lesson, Look
from poem.recipes.recipe import Recipe

FEW = 2.5  # the way back for all costs as much as forward and back for this part of them


@dataclass
class Taught:
    """One update: the look and the set it was drawn from, its loss and gradients, and whether it was made."""

    look: Look
    mask: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    made: Tensor


@dataclass
class Turn:
    """One batch in hand."""

    recipe: Recipe
    network: Network
    state: State
    batch: Batch
    entry: Batchwise
    lr: float
    learn: bool  # False: predict only
    seen: Tensor = field(init=False)  # what is looked at: the images, or views of them
    first: Look = field(init=False)
    last: Look = field(init=False)
    teaching: int | None = None  # how many teach in this round, where the host knows
    plain: Look | None = None  # the images themselves, where views teach and an early look answers
    target: Tensor | None = None
    sets: list[Tensor] = field(default_factory=list)
    lessons: list[Taught] = field(default_factory=list)
    look: Looking = field(init=False)  # called: one look, counted

    def __post_init__(self) -> None:
        self.look = Looking(self.recipe, self.network, self.state, self.batch, self.entry.costs)

    def run(self) -> Tensor:
        """Look, choose, update, look again while the set changes; then remember, walk back and answer (B, C)."""
        for flags in self.rounds():
            self.teaching = worthwhile(flags, self.batch.images, first=not self.lessons)
            if not self.teaching:
                break
        answer = self.finish()
        self.forget()
        return answer

    def rounds(self) -> Iterator[Tensor]:
        """All looks and updates. Pauses before each update with flags on the device; going on makes the update."""
        recipe, which, images = self.recipe, self.recipe.readout.look, self.batch.images
        updates = recipe.explore.updates if self.learn and recipe.learns else 0
        self.seen = recipe.views(images, self.batch.rng) if recipe.views and updates else images
        self.network.early.hold(images if updates else None)
        self.first = self.last = self.look(self.seen, grad=updates > 0)
        if recipe.teacher and (updates or which == "teacher"):
            self.target = self.look.teacher()
        if updates:
            self.sets.append(self.choose(self.last))
        for done in range(1, updates + 1):
            yield self.flags()
            if self.seen is not images and (which == "before-last" or (which == "first" and done == 1)):
                self.plain = self.look(round=done - 1, grad=False)
            self.lessons.append(self.update(self.last, self.sets[-1]))
            more = done < updates
            if not more and which != "last":
                break
            self.last = self.look(self.seen if more else images, round=done, grad=more)
            if more or not recipe.select.passes:  # after the last update the set is only news, and worth no pass
                self.sets.append(self.choose(self.last) if recipe.explore.reselect else self.sets[0])

    def finish(self) -> Tensor:
        """Remember, walk back, enter the batch in the books, and answer (B, C)."""
        which, lessons = self.recipe.readout.look, self.lessons
        answers = {"before-last": lessons[-1].look if lessons else self.last, "last": self.last}
        answer = self.plain or answers.get(which, self.first)
        if which == "teacher" and self.target is not None:
            answer = Look(self.target, (self.target,), self.batch, self.first.ask)
        elif answer.shown is not self.batch.images:  # it saw views: the image itself is yet to be answered
            answer = self.last = self.look(round=len(lessons), grad=False)
        if self.learn:
            if self.recipe.step.coasts and self.sets and not lessons:
                self.coast(~self.sets[0].any())
            self.remember()
        self.enter()
        logits = self.recipe.readout.correct(answer).detach()
        self.entry.odd = self.odd(logits)
        return logits

    def odd(self, logits: Tensor) -> Tensor:
        """How many answers are not finite, and how many updates were made with a gradient of zeros."""
        finite = logits.amax(1).isfinite()  # NaN spreads; -inf for one class is an answer
        idle = [t.made & ~torch.stack([g.any() for g in t.gradients.values()]).any() for t in self.lessons]
        return torch.stack([(~finite).sum(), torch.stack(idle).sum() if idle else torch.zeros_like(finite[0]).long()])

    def forget(self) -> None:
        """Let go of the looks. They know each other, and would keep all activations until the garbage is collected."""
        self.lessons.clear()
        self.plain = None
        del self.first, self.last

    def fork(self) -> Turn:
        """The turn as it stands, with looks and books of its own: finishing it leaves this one as it is."""
        looks = {id(look): _copied(look) for look in (self.first, self.last, *(each.look for each in self.lessons))}
        twin = replace(
            self, entry=Batchwise(replace(self.entry.costs)), sets=list(self.sets),
            lessons=[replace(each, look=looks[id(each.look)]) for each in self.lessons],
        )  # fmt: skip
        twin.seen, twin.first, twin.last = self.seen, looks[id(self.first)], looks[id(self.last)]
        return twin

    def choose(self, look: Look, among: Tensor | None = None) -> Tensor:
        """Who teaches, of everyone or of those given."""
        everyone = torch.ones(len(look.logits), dtype=torch.bool, device=look.logits.device)
        question = everyone if among is None else among
        mask = self.recipe.select(look, question, self.state.memory)
        if self.state.calls == 0:
            checks.selection(mask, question, self.recipe.select)
        return mask & question

    def flags(self) -> Tensor:
        """What the one read of a round asks: how many teach; is the input finite, or has the set changed?"""
        flags = [self.sets[-1].sum()]
        if len(self.sets) == 1:
            flags.append(self.batch.images.isfinite().all())
        elif self.recipe.explore.reselect:
            flags.append((self.sets[-1] != self.sets[-2]).any())
        return torch.stack(flags)

    def update(self, look: Look, chosen: Tensor) -> Taught:
        """One step for the recipe's own group and, from the same graph, one for the branch."""
        step, state = self.recipe.step, self.state
        taught = self.teach(look, chosen, final=not step.climbs)
        if step.climbs:
            climbed = state.moving["theta"] + step.climb(taught.gradients["theta"])
            risen = self.look(round=look.round, theta=climbed, needed=chosen.sum())
            ready, taught = taught.made, self.teach(risen, self.choose(risen, chosen), final=True)
            taught.made = taught.made & ready
            if step.coasts:
                self.coast(ready & ~taught.mask.any())
        for key, gradient in taught.gradients.items():
            change, memory = (step if key == "theta" else step.plain)(gradient, self.lr, state.steps[key])
            put(state.moving, {key: state.moving[key] + change}, taught.made)
            put(state.steps[key], memory, taught.made)
        self.entry.costs.rounds += 1
        self.entry.costs.updates = self.entry.costs.updates + taught.made.long()
        self.entry.costs.taught = self.entry.costs.taught + taught.mask.sum() * taught.made
        return taught

    def coast(self, nobody: Tensor) -> None:
        """Where nobody teaches, a step with a zero gradient for the recipe's own group: the momentum moves it."""
        theta, steps = self.state.moving["theta"], self.state.steps["theta"]
        change, memory = self.recipe.step(torch.zeros_like(theta), self.lr, steps)
        put(self.state.moving, {"theta": theta + change}, nobody)
        put(steps, memory, nobody)

    def teach(self, look: Look, mask: Tensor, *, final: bool) -> Taught:
        """Loss and gradients of a set. They may be used if somebody teaches and every number is finite."""
        recipe, source = self.recipe, self.state.source["theta"]
        near, chosen, weights = self.nearer(look, mask, recipe.weigh(look, mask, self.state.memory).detach())
        theta = near.theta
        assert theta is not None
        loss = recipe.minimise(Lesson(near, chosen, weights, theta, source, self.state.fisher, self.target))
        gradients: dict[str, Tensor] = {}
        if recipe.branch is not None and near.zeta is not None and final:
            # First, and as far as the split: the longer way back may then let go of what each layer saved.
            own = recipe.branch.teach(Lesson(near, chosen, torch.ones_like(weights), theta, source))
            ask = partial(_gradient, own, near.zeta, keep=True)
            gradients["branch"] = self.network.branch_gradient(self.batch.images, ask)
        gradients["theta"] = _gradient(loss, theta)
        sound = [mask.any(), loss.isfinite(), *(gradient.isfinite().all() for gradient in gradients.values())]
        costs = self.entry.costs
        costs.backwards = costs.backwards + mask.sum()
        costs.backwards_computed += len(chosen)
        return Taught(look, mask, loss.detach(), gradients, torch.stack(sound).all())

    def nearer(self, look: Look, mask: Tensor, weights: Tensor) -> tuple[Look, Tensor, Tensor]:
        """The look, who teaches and how much; where they are few, a look at them alone, if that is less work.

        One more forward and the way back for some of the batch, against the way back for all of it. Only where samples
        do not meet, in the network or in the objective, which is tried the first time. Not on a GPU, where a recording
        keeps the batch whole and the plain loop must agree with it.
        """
        recipe, images = self.recipe, self.batch.images
        apart = recipe.apart and look.shown is images and not images.is_cuda and self.network.apart(recipe.statistics)
        if not (apart and self.teaching and FEW * self.teaching <= len(images)):
            return look, mask, weights
        rows = mask.long().argsort(descending=True, stable=True)[: self.teaching]
        near = self.look(images[rows], round=look.round, theta=look.theta, needed=torch.zeros_like(rows[0]))
        if self.network.alone is None:
            far = (near.logits - look.logits[rows]).detach().abs().max()
            self.network.alone = bool(far <= 1e-3 * (1 + look.logits.detach().abs().max()))
        return (near, mask[rows], weights[rows]) if self.network.alone else (look, mask, weights)

    def remember(self) -> None:
        """Once per batch: what parts remember, then the teacher follows, then we walk back."""
        recipe, state, first, last, lessons = self.recipe, self.state, self.first, self.last, self.lessons
        finite = last.logits.isfinite().all()
        sound = torch.stack([taught.made for taught in lessons]).any() if lessons else finite
        known = dict(state.memory)
        for look, mask, made in [(t.look, t.mask, t.made) for t in lessons] or [(first, m, finite) for m in self.sets]:
            new = {**recipe.select.remember(look, mask, known), **recipe.weigh.remember(look, mask, known)}
            put(state.memory, new, made)  # the last update that was made has the last word
        losses, done = [taught.loss for taught in lessons], [taught.made for taught in lessons]
        put(state.memory, recipe.recover.remember(losses, done, known), sound)
        put(state.memory, last.record, sound & finite)
        for key in state.source if recipe.learns else ():
            if recipe.teacher is not None:
                put(state.teacher, {key: recipe.teacher.follow(state.teacher[key], state.moving[key])}, sound)
            put(state.moving, {key: recipe.recover.pull(state.moving[key], state.source[key], state.rng)}, sound)
        fires = recipe.recover.fires(state.memory)
        if fires is not None:
            state.restart(fires)
            self.entry.reset_flag = fires

    def enter(self) -> None:
        """The batch in the books; many views of one image count as that image."""
        rows, entry, first, lessons = len(self.batch.images), self.entry, self.first, self.lessons
        chosen = self.sets or [torch.zeros(rows, dtype=torch.bool, device=first.logits.device)]
        chosen = [each if len(each) == rows else each.any().expand(rows) for each in chosen]
        entry.selected = chosen[0]
        entry.newly_reliable = torch.stack(chosen).any(0) & ~chosen[0]
        entry.no_longer_reliable = chosen[0] & ~chosen[-1]
        before, logits = first.entropy.detach(), first.logits.detach()
        if len(before) != rows:
            before, logits = before.mean().expand(rows), first.log_probs.detach().mean(0, keepdim=True)
        after = self.last.entropy.detach()
        entry.entropy = FirstLast(before, after if len(after) == rows else after.mean().expand(rows))
        entry.first_logits = logits
        entry.loss_value = lessons[-1].loss if lessons else None
        entry.made = [taught.made for taught in lessons]
        entry.some = [taught.mask.any() for taught in lessons]
        entry.nothing = bool(self.sets) and not lessons


def worthwhile(flags: Tensor, images: Tensor, *, first: bool) -> int:
    """The one read of a round: how many teach, 0 if the set stands still. Images that are not finite are an error."""
    some, *other = flags.tolist()
    if first and not other[0]:
        checks.finite(images)
    return int(some) if all(other) else 0


def _copied(look: Look) -> Look:
    """The look with what it knows so far; what it computes from now on stays its own."""
    twin = copy.copy(look)
    twin.cache = dict(look.cache)
    return twin


def _gradient(loss: Tensor, tensor: Tensor, *, keep: bool = False) -> Tensor:
    """The loss's gradient for this tensor alone; zeros where it has none."""
    return torch.autograd.grad(loss, tensor, retain_graph=keep, materialize_grads=True)[0]
