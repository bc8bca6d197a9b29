"""The one loop: a batch from the first look to the answer.

Every method runs through `Turn.run`. Masks keep the batch whole and updates are predicated on the device, so a round
reads from the device once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poem import _checks as checks
from poem.ledger import Batchwise, FirstLast
from poem.network import Network
from poem.parts.base import Batch, Lesson, Look
from poem.recipes import Recipe
from poem.state import State, put


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

    def run(self) -> Tensor:
        """Look, choose, update, look again while the set changes; then remember, walk back and answer (B, C)."""
        recipe, which = self.recipe, self.recipe.readout.look
        updates = recipe.explore.updates if self.learn and recipe.learns else 0
        images = self.batch.images
        seen = recipe.views(images, self.batch.rng) if recipe.views and updates else images
        first = look = self.look(seen, grad=updates > 0)
        target = self.target() if recipe.teacher and (updates or which == "teacher") else None
        sets = [self.choose(look)] if updates else []
        lessons: list[Taught] = []
        plain: Look | None = None
        for done in range(1, updates + 1):
            if not self.worthwhile(sets):
                break
            if seen is not images and (which == "before-last" or (which == "first" and done == 1)):
                plain = self.look(round=done - 1, grad=False)
            lessons.append(self.update(look, sets[-1], target))
            more = done < updates
            if not more and which != "last":
                break
            look = self.look(seen if more else images, round=done, grad=more)
            if more or not recipe.select.passes:  # after the last update the set is only news, and worth no pass
                sets.append(self.choose(look) if recipe.explore.reselect else sets[0])
        answers = {"first": first, "before-last": lessons[-1].look if lessons else look, "last": look}
        answer = plain or answers.get(which, first)
        if which == "teacher" and target is not None:
            answer = Look(target, (target,), self.batch, first.ask)
        elif answer.shown is not images:  # it saw views: the image itself is yet to be answered
            answer = look = self.look(round=len(lessons), grad=False)
        if self.learn:
            self.remember(first, look, sets, lessons)
        self.enter(first, look, sets, lessons)
        return recipe.readout.correct(answer).detach()

    def look(
        self,
        images: Tensor | None = None,
        *,
        round: int = 0,
        grad: bool = True,
        theta: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> Look:
        """One pass with the present weights, or with those given; counted as needed for everyone, or for some."""
        weights = (self.state.moving["theta"] if theta is None else theta).detach().requires_grad_(grad)
        zeta = self.state.moving["branch"].detach().requires_grad_(grad) if "branch" in self.state.moving else None

        def ask(images: Tensor, *, among: Tensor | None = None, grad: bool = False) -> Tensor:
            self.count(images, None if among is None else among.sum())
            with torch.set_grad_enabled(grad):
                return self.predict(images, weights, zeta, among)[0]

        shown = self.batch.images if images is None else images
        self.count(shown, needed)
        with torch.set_grad_enabled(grad):
            logits, heads, run = self.predict(shown, weights, zeta, None)
        look = Look(logits, heads, self.batch, ask, round, shown, run.features, weights, zeta, run.record)
        self.state.begin(look)
        return look

    def choose(self, look: Look, among: Tensor | None = None) -> Tensor:
        """Who teaches, of everyone or of those given."""
        everyone = torch.ones(len(look.logits), dtype=torch.bool, device=look.logits.device)
        question = everyone if among is None else among
        mask = self.recipe.select(look, question, self.state.memory)
        if self.state.calls == 0:
            checks.selection(mask, question, self.recipe.select)
        return mask & question

    def worthwhile(self, sets: list[Tensor]) -> bool:
        """The one read of a round: does anybody teach, is the input finite, has the set changed?"""
        flags = [sets[-1].any()]
        if len(sets) == 1:
            flags.append(self.batch.images.isfinite().all())
        elif self.recipe.explore.reselect:
            flags.append((sets[-1] != sets[-2]).any())
        some, *other = torch.stack(flags).tolist()
        if len(sets) == 1 and not other[0]:
            checks.finite(self.batch.images)
        return bool(some and all(other))

    def update(self, look: Look, chosen: Tensor, target: Tensor | None) -> Taught:
        """One step for the recipe's own group and, from the same graph, one for the branch."""
        step, state = self.recipe.step, self.state
        taught = self.teach(look, chosen, target, final=not step.climbs)
        if step.climbs:
            climbed = state.moving["theta"] + step.climb(taught.gradients["theta"])
            risen = self.look(round=look.round, theta=climbed, needed=chosen.sum())
            ready, taught = taught.made, self.teach(risen, self.choose(risen, chosen), target, final=True)
            taught.made = taught.made & ready
        for key, gradient in taught.gradients.items():
            change, memory = (step if key == "theta" else step.plain)(gradient, self.lr, state.steps[key])
            put(state.moving, {key: state.moving[key] + change}, taught.made)
            put(state.steps[key], memory, taught.made)
        self.entry.costs.rounds += 1
        self.entry.costs.updates = self.entry.costs.updates + taught.made.long()
        self.entry.costs.taught = self.entry.costs.taught + taught.mask.sum() * taught.made
        return taught

    def teach(self, look: Look, mask: Tensor, target: Tensor | None, *, final: bool) -> Taught:
        """Loss and gradients of a set. They may be used if somebody teaches and every number is finite."""
        recipe, theta = self.recipe, look.theta
        assert theta is not None
        weights = recipe.weigh(look, mask, self.state.memory).detach()
        lesson = Lesson(look, mask, weights, theta, self.state.source["theta"], self.state.fisher, target)
        loss = recipe.minimise(lesson)
        branch = recipe.branch if final else None
        gradients = {"theta": _gradient(loss, theta, keep=branch is not None)}
        if branch is not None and look.zeta is not None:
            equal = Lesson(look, mask, torch.ones_like(weights), theta, self.state.source["theta"])
            gradients["branch"] = _gradient(branch.teach(equal), look.zeta)
        sound = [mask.any(), loss.isfinite(), *(gradient.isfinite().all() for gradient in gradients.values())]
        costs = self.entry.costs
        costs.backwards = costs.backwards + mask.sum()
        costs.backwards_computed += len(mask)
        return Taught(look, mask, loss.detach(), gradients, torch.stack(sound).all())

    def remember(self, first: Look, last: Look, sets: list[Tensor], lessons: list[Taught]) -> None:
        """Once per batch: what parts remember, then the teacher follows, then we walk back."""
        recipe, state = self.recipe, self.state
        finite = last.logits.isfinite().all()
        sound = torch.stack([taught.made for taught in lessons]).any() if lessons else finite
        known = dict(state.memory)
        for look, mask, made in [(t.look, t.mask, t.made) for t in lessons] or [(first, each, finite) for each in sets]:
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

    def target(self) -> Tensor:
        """What the teacher says of this batch."""
        assert self.recipe.teacher is not None

        def says(weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
            def predict(images: Tensor) -> Tensor:
                self.count(images, None)
                with torch.no_grad():
                    return self.predict(images, weights["theta"], weights.get("branch"), None)[0]

            return predict

        return self.recipe.teacher.target(self.batch, says(self.state.teacher), says(self.state.source))

    def predict(
        self, images: Tensor, theta: Tensor, zeta: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """The logits that answer, each head's, and what the pass recorded."""
        moving = theta if theta.numel() else None
        heads, run = self.network.heads(images, moving, zeta, self.recipe.statistics, self.state.memory, mask)
        branch = self.recipe.branch
        return branch.together(*heads) if branch is not None and len(heads) == 2 else heads[0], heads, run

    def count(self, images: Tensor, needed: Tensor | None) -> None:
        """Rows that a pass computes, and those that it was needed for."""
        twice = self.network.branch is not None and self.network.doubles is False
        self.entry.costs.forwards_computed += (2 if twice else 1) * len(images)
        self.entry.costs.forwards = self.entry.costs.forwards + (len(images) if needed is None else needed)

    def enter(self, first: Look, last: Look, sets: list[Tensor], lessons: list[Taught]) -> None:
        """The batch in the books; many views of one image count as that image."""
        rows, entry = len(self.batch.images), self.entry
        chosen = sets or [torch.zeros(rows, dtype=torch.bool, device=first.logits.device)]
        chosen = [each if len(each) == rows else each.any().expand(rows) for each in chosen]
        entry.selected = chosen[0]
        entry.newly_reliable = torch.stack(chosen).any(0) & ~chosen[0]
        entry.no_longer_reliable = chosen[0] & ~chosen[-1]
        before, logits = first.entropy.detach(), first.logits.detach()
        if len(before) != rows:
            before, logits = before.mean().expand(rows), first.log_probs.detach().mean(0, keepdim=True)
        after = last.entropy.detach()
        entry.entropy = FirstLast(before, after if len(after) == rows else after.mean().expand(rows))
        entry.first_logits = logits
        entry.loss_value = lessons[-1].loss if lessons else None
        entry.made = [taught.made for taught in lessons]
        entry.some = [taught.mask.any() for taught in lessons]
        entry.nothing = bool(sets) and not lessons


def _gradient(loss: Tensor, tensor: Tensor, *, keep: bool = False) -> Tensor:
    """The loss's gradient for this tensor alone; zeros where it has none."""
    return torch.autograd.grad(loss, tensor, retain_graph=keep, materialize_grads=True)[0]
