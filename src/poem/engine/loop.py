"""The one loop: a batch from its first forward pass to the answer.

Every method runs through `BatchLoop`. Its three stages, `first`, `update` and `finish`, are called by `run` and, to be
captured as CUDA graphs, by `accelerate/capture.py`. Masks keep the batch whole and updates are predicated on the
device, so that the host reads from the device once per update.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from poem.engine import input_checks as checks
from poem.engine.accounting import BatchRecord, Costs, FirstLast
from poem.engine.network import Network
from poem.engine.norm_layers import ForwardContext
from poem.engine.state import State, update_where
from poem.parts.base import Batch, Memory, Outcome, Outputs, Part, Selected, Update, entropy, inside
from poem.parts.views import View, Views
from poem.recipes.recipe import Recipe


@dataclass(frozen=True)
class BatchProgress:
    """All that is known of the batch in hand; each stage returns a new one."""

    view: View  # what updates learn from: the batch's images, or others
    first: Outputs
    last: Outputs
    target: Tensor | None = None  # the teacher's logits for what is learnt from
    teacher_answer: Tensor | None = None  # and for the batch
    teacher_record: Memory = field(default_factory=dict)  # statistics of its own to remember
    told: Memory = field(default_factory=dict)  # what the teacher tells beside the target
    teacher_memory: Memory = field(default_factory=dict)  # and new values of the part's memory
    record: Memory = field(default_factory=dict)  # the network's, of the last pass that recorded any
    plain: Outputs | None = None  # the batch's own images, where others are learnt from and an early pass answers
    selections: tuple[Tensor, ...] = ()
    updates: tuple[Update, ...] = ()
    flags: Tensor | None = None  # what the host reads before the next update; None: there is no further one


@dataclass
class BatchLoop:
    """The loop for one batch: recipe, network and state, and the counts of its forward and backward passes."""

    recipe: Recipe
    network: Network
    state: State
    batch: Batch
    lr: float
    learn: bool  # False: predict only
    costs: Costs = field(default_factory=Costs)
    teacher_features: Tensor | None = None  # of the pass that the teacher made last
    rows_read: int | None = None  # selected samples of the update to come, where the host has read the flags

    def run(self) -> tuple[Tensor, BatchRecord]:
        """Update while samples are selected and the selection changes; returns the answer (B, C) and the record."""
        progress = self.first()
        while progress.flags is not None:
            self.rows_read = read_flags(progress.flags, self.batch.images, first=not progress.updates)
            if not self.rows_read:
                break
            progress = self.update(progress)
        return self.finish(progress)

    def first(self) -> BatchProgress:
        """Stage 1: the first forward pass, the teacher's target and the first selection."""
        recipe, images, updates = self.recipe, self.batch.images, self._updates
        self.network.acceleration.hold(images if updates else None)
        wants_teacher = recipe.teacher is not None and (updates > 0 or recipe.readout.which == "teacher")
        if isinstance(recipe.views, Views) and updates:
            answer = self.teacher_answer() if wants_teacher else None
            view, outputs = self._view(recipe.views, answer)
        else:
            augment = None if isinstance(recipe.views, Views) else recipe.views
            view = View(augment(images, self.batch.rng) if augment is not None and updates else images)
            outputs = self.forward(view.images, grad=updates > 0)
            answer = self.teacher_answer() if wants_teacher else None
        progress = BatchProgress(view, outputs, outputs, answer, answer, record=outputs.record)
        if view.teacher_images is not None and wants_teacher:
            progress = self._with_target(progress, view.teacher_images)
        if not updates or view.images is None:
            return progress
        return self._flagged(replace(progress, selections=(self.select(outputs),)))

    def _with_target(self, progress: BatchProgress, images: Tensor) -> BatchProgress:
        """With the teacher's target for these images, and what it tells beside it."""
        teacher, state = self.recipe.teacher, self.state
        assert teacher is not None
        target, record = self._predict_teacher(images, training=True)
        seen = Outputs(target, (target,), self.batch, features=self.teacher_features)
        told, memory = teacher.watch(seen, state.memory_of("teacher"))
        if teacher.asks_source:
            own = inside(state.memory, "initial")
            told["source"], new, _ = self._predict_with(images, state.source, own, training=True)
            record |= {f"initial.{key}": value for key, value in new.items()}
        return replace(progress, target=target, teacher_record=record, told=told, teacher_memory=memory)

    def _view(self, views: Views, answer: Tensor | None) -> tuple[View, Outputs]:
        """What a part of the recipe chooses to learn from, and its outputs; the teacher's where it chooses nothing."""
        outputs = (
            self.forward(grad=False)
            if answer is None
            else Outputs(answer, (answer,), self.batch, features=self.teacher_features)
        )
        self.state.begin(outputs)
        view = views(self.batch, outputs.logits, self.state.memory_of("views"))
        return view, outputs if view.images is None else self.forward(view.images)

    def update(self, progress: BatchProgress) -> BatchProgress:
        """Stage 2: one update and, where a later update or the answer needs it, the forward pass after it."""
        which, images, done = self.recipe.readout.which, self.batch.images, len(progress.updates) + 1
        learnt = progress.view.images
        if learnt is not images and (which == "before-last" or (which == "first" and done == 1)):
            progress = replace(progress, plain=self.forward(round=done - 1, grad=False))
        made = self._apply_update(progress)
        progress = replace(progress, updates=(*progress.updates, made), flags=None)
        more = done < self._updates
        if not more and which != "last":
            return progress
        outputs = self.forward(learnt if more else images, round=done, grad=more)
        progress = replace(progress, last=outputs, record=outputs.record or progress.record)
        if more or not self.recipe.select_runs_network:  # after the last update it is only counted: worth no pass
            again = self.select(outputs) if self.recipe.explore.reselect else progress.selections[0]
            progress = replace(progress, selections=(*progress.selections, again))
        return self._flagged(progress) if more else progress

    def finish(self, progress: BatchProgress) -> tuple[Tensor, BatchRecord]:
        """Stage 3: remember, recover, record the batch, and answer (B, C). `progress` is left as it is."""
        progress = _with_own_caches(progress)
        which, updates, record = self.recipe.readout.which, progress.updates, BatchRecord()
        passes = {"before-last": updates[-1].outputs if updates else progress.last, "last": progress.last}
        answer = progress.plain or passes.get(which, progress.first)
        if which == "teacher" and progress.teacher_answer is not None:
            logits = progress.teacher_answer
            answer = Outputs(logits, (logits,), self.batch, progress.first.forward)
        elif answer.images is not self.batch.images:  # it saw other images: the batch itself has no answer yet
            answer = self.forward(round=len(updates), grad=False)
            progress = replace(progress, last=answer, record=answer.record or progress.record)
        correct = self.recipe.readout.correct
        logits = correct(answer, self.state.memory_of("readout.correct")).detach()
        if self.learn:
            if self.recipe.step.steps_when_empty and progress.selections and not updates:
                self._step_with_zeros(~progress.selections[0].any())
            self._remember(progress, answer, record)
        self._fill(record, progress)
        record.anomalies = _anomalies(logits, updates)
        record.costs = replace(self.costs)
        return logits, record

    # Forward passes ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        images: Tensor | None = None,
        *,
        round: int = 0,
        grad: bool = True,
        theta: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> Outputs:
        """One counted forward pass with the present tensors, or another theta; by default all rows are needed."""
        shown, moving = self.batch.images if images is None else images, self.state.moving
        weights = (moving["theta"] if theta is None else theta).detach().requires_grad_(grad)
        branch = moving["branch"].detach().requires_grad_(grad) if "branch" in moving else None

        def again(
            images: Tensor,
            *,
            among: Tensor | None = None,
            grad: bool = False,
            features: bool = False,
            keep: Tensor | None = None,
        ) -> Tensor:
            rows = None if among is None else among.sum()
            self._count_forward(images, rows)
            if grad:
                self._count_backward(len(images) if rows is None else rows, len(images))
            with torch.set_grad_enabled(grad):
                logits, _, run = self._predict(images, weights, branch, self.state.memory, among, keep=keep)
            if not features:
                return logits
            if run.features is None:
                raise RuntimeError("this pass has no features; does the part say that it needs features?")
            return run.features

        self._count_forward(shown, needed)
        with torch.set_grad_enabled(grad):
            rows = self._rows({"theta": weights, "branch": branch}, len(shown)) if grad else {}
            if rows:
                self.network.check_rows(shown, rows)
            given = rows.get("theta", weights), rows.get("branch", branch)
            logits, heads, run = self._predict(shown, *given, self.state.memory, None, training=grad)
        outputs = Outputs(
            logits, heads, self.batch, again, round, shown, run.features, weights, branch, rows, run.record,
            self.network.classify, run.source, self.network.normalisation(shown), self.network.attention(run),
            self.state.family,
        )  # fmt: skip
        self.state.begin(outputs)
        return outputs

    def _rows(self, tensors: Mapping[str, Tensor | None], count: int) -> Memory:
        """A row of each vector (P,) for each sample, (B, P), where the step asks for each sample's gradient."""
        if not self.recipe.step.per_sample:
            return {}
        return {key: tensor.expand(count, -1) for key, tensor in tensors.items() if tensor is not None}

    def teacher_answer(self) -> Tensor:
        """The teacher's logits for this batch."""
        assert self.recipe.teacher is not None

        def source(images: Tensor) -> Tensor:
            return self._predict_with(images, self.state.source, self.state.memory, training=False)[0]

        def teacher(images: Tensor) -> Tensor:
            return self._predict_teacher(images, training=False)[0]

        return self.recipe.teacher.target(self.batch, teacher, source)

    def _predict_teacher(self, images: Tensor, *, training: bool) -> tuple[Tensor, Memory]:
        """Logits with the teacher's tensors and, where it keeps them, its own statistics; and these to remember."""
        assert self.recipe.teacher is not None
        state, own = self.state, self.recipe.teacher.own_statistics
        memory = inside(state.memory, "teacher") if own else state.memory
        logits, record, self.teacher_features = self._predict_with(images, state.teacher, memory, training=training)
        return logits, {f"teacher.{key}": value for key, value in record.items()} if own and training else {}

    def _predict_with(
        self, images: Tensor, tensors: Memory, memory: Memory, *, training: bool
    ) -> tuple[Tensor, Memory, Tensor | None]:
        """Logits without a gradient from other tensors than the adapted ones, statistics to remember, and features."""
        self._count_forward(images, None)
        with torch.no_grad():
            theta, branch = tensors["theta"], tensors.get("branch")
            logits, _, run = self._predict(images, theta, branch, memory, None, training=training)
        return logits, run.record, run.features

    def _predict(
        self,
        images: Tensor,
        theta: Tensor,
        branch: Tensor | None,
        memory: Memory,
        mask: Tensor | None,
        *,
        training: bool = False,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], ForwardContext]:
        """The logits that answer, each head's, and what the pass recorded."""
        adapted = theta if theta.numel() else None
        statistics = self.recipe.statistics
        heads, run = self.network.heads(images, adapted, branch, statistics, memory, mask, training=training, keep=keep)
        both = self.recipe.branch if len(heads) == 2 else None
        return heads[0] if both is None else both.together(*heads), heads, run

    def _count_forward(self, images: Tensor, needed: Tensor | None) -> None:
        """Rows of a forward pass: computed, and needed by the method."""
        twice = self.network.branch is not None and self.network.doubles is False
        copies = self.network.copies(self.recipe.statistics)
        self.costs.forwards_computed += (2 if twice else 1) * copies * len(images)
        self.costs.forwards = self.costs.forwards + copies * (len(images) if needed is None else needed)

    def _count_backward(self, needed: Tensor | int, computed: int) -> None:
        """Rows of a backward pass: needed by the method, and computed."""
        copies = self.network.copies(self.recipe.statistics)
        self.costs.backwards = self.costs.backwards + copies * needed
        self.costs.backwards_computed += copies * computed

    # Selection --------------------------------------------------------------------------------------------------------

    @property
    def _updates(self) -> int:
        """Updates that this batch may have."""
        return self.recipe.explore.updates if self.learn and self.recipe.learns else 0

    def select(self, outputs: Outputs, among: Tensor | None = None) -> Tensor:
        """Which samples are selected (B,), of all or of those given."""
        everyone = torch.ones(len(outputs.logits), dtype=torch.bool, device=outputs.logits.device)
        candidates = everyone if among is None else among
        mask = self.recipe.select(outputs, candidates, self.state.memory_of("select"))
        if self.state.calls == 0:
            checks.selection(mask, candidates, self.recipe.select)
        return mask & candidates

    def _flagged(self, progress: BatchProgress) -> BatchProgress:
        """With the flags that the host reads: how many are selected; are the images finite, has the set changed?"""
        now = progress.selections[-1]
        flags = [now.sum()]
        if len(progress.selections) == 1:
            flags.append(self.batch.images.isfinite().all())
        elif self.recipe.explore.reselect:
            flags.append((now != progress.selections[-2]).any())
        return replace(progress, flags=torch.stack(flags))

    # The update -------------------------------------------------------------------------------------------------------

    def _apply_update(self, progress: BatchProgress) -> Update:
        """One step for theta and, from the same graph, one for the branch and for tensors that parts bring."""
        step, state, outputs, mask = self.recipe.step, self.state, progress.last, progress.selections[-1]
        update = self._loss_and_gradients(progress, outputs, mask, final=not step.perturbs)
        if step.perturbs:
            theta = state.moving["theta"] + step.perturbation(update.gradients["theta"])
            there = self.forward(progress.view.images, round=outputs.round, theta=theta, needed=mask.sum())
            ready, second = update.applied, self.select(there, mask)
            update = self._loss_and_gradients(progress, there, second, final=True)
            update.applied = update.applied & ready
            if step.steps_when_empty:
                self._step_with_zeros(ready & ~second.any())
        for key, gradient in update.gradients.items():
            rate = self.lr * state.lr_factors.get(key, 1.0)
            change, memory = step.for_group(key)(gradient, rate, state.steps[key])
            moved = state.constrained(key, state.moving[key] + change)
            update_where(state.moving, {key: moved}, update.applied)
            update_where(state.steps[key], {**memory, **update.step_memory.get(key, {})}, update.applied)
        self.costs.rounds += 1
        self.costs.updates = self.costs.updates + update.applied.long()
        self.costs.taught = self.costs.taught + update.mask.sum() * update.applied
        return update

    def _loss_and_gradients(self, progress: BatchProgress, outputs: Outputs, mask: Tensor, *, final: bool) -> Update:
        """Loss and gradients of the selected samples; to be applied if there is one and every number is finite."""
        recipe, state = self.recipe, self.state
        weights = recipe.weigh(outputs, mask, state.memory_of("weigh")).detach()
        if progress.view.weights is not None:
            weights = weights * progress.view.weights
        near, chosen, weights = self.network.acceleration.selected_rows(self, outputs, mask, weights)
        theta, source, rows = near.theta, state.source["theta"], near.sample_rows
        assert theta is not None
        if rows:  # terms of theta alone belong to no sample
            theta = theta.detach().requires_grad_()
        trained = {key: state.moving[key].detach().requires_grad_() for key in state.trained}
        selected = Selected(
            near, chosen, weights, theta, source, progress.target,
            state.memory_of("minimise"), inside(trained, "minimise"), progress.told, self.network.theta.sizes,
        )  # fmt: skip
        loss, taught = recipe.minimise(selected), recipe.minimise.taught(selected)
        mask = taught if near is outputs else mask  # rows alone: the loss is of all that are selected
        gradients: dict[str, Tensor] = {}
        if recipe.branch is not None and near.branch is not None and final:
            # First, and as far as the split: the longer backward may then free what each layer saved.
            unweighted = replace(
                selected, weights=torch.ones_like(weights), memory=state.memory_of("branch.teach"),
                trained=inside(trained, "branch.teach"),
            )  # fmt: skip
            ask = partial(_gradient, recipe.branch.teach(unweighted), rows.get("branch", near.branch), keep=True)
            gradients["branch"] = self.network.branch_gradient(self.batch.images, ask)
        gradients |= _gradients(loss, {"theta": theta, **trained, **({"rows": rows["theta"]} if rows else {})})
        step_memory: dict[str, Memory] = {}
        if rows:
            alone = gradients["theta"]
            gradients["theta"] = gradients.pop("rows")
            for key in (key for key in rows if key in gradients):
                gradients[key], step_memory[key] = recipe.step.join(gradients[key], chosen, state.steps[key])
            gradients["theta"] = gradients["theta"] + alone
        sound = [mask.any(), loss.isfinite(), *(gradient.isfinite().all() for gradient in gradients.values())]
        self._count_backward(mask.sum(), len(chosen))
        return Update(outputs, mask, loss.detach(), gradients, torch.stack(sound).all(), step_memory)

    def _step_with_zeros(self, allowed: Tensor) -> None:
        """A step for theta with a zero gradient, where `allowed`: the momentum still acts."""
        theta, steps = self.state.moving["theta"], self.state.steps["theta"]
        change, memory = self.recipe.step(torch.zeros_like(theta), self.lr, steps)
        update_where(self.state.moving, {"theta": theta + change}, allowed)
        update_where(steps, memory, allowed)

    # The end of a batch -----------------------------------------------------------------------------------------------

    def _remember(self, progress: BatchProgress, answer: Outputs, record: BatchRecord) -> None:
        """Once per batch: the parts' memory, then the teacher follows, then the recovery."""
        recipe, state, updates = self.recipe, self.state, progress.updates
        finite = progress.last.logits.isfinite().all()
        sound = torch.stack([update.applied for update in updates]).any() if updates else finite
        outcome = Outcome(
            progress.first, progress.last, list(updates), list(progress.selections), progress.target, answer
        )
        before = dict(state.memory)
        for place, part in recipe.places:
            if type(part).remember is Part.remember:
                continue
            new = part.remember(outcome, {**inside(state.prepared, place), **inside(before, place)})
            update_where(state.memory, {f"{place}.{name}": value for name, value in new.items()}, sound)
        targets = [each.isfinite().all() for each in (progress.target, progress.teacher_answer) if each is not None]
        all_finite = torch.stack([finite, *targets]).all()
        update_where(state.memory, {f"views.{name}": value for name, value in progress.view.memory.items()}, all_finite)
        update_where(state.memory, progress.record, sound & finite)
        update_where(state.memory, progress.teacher_record, sound & all_finite)
        told = {f"teacher.{name}": value for name, value in progress.teacher_memory.items()}
        update_where(state.memory, told, sound & all_finite)
        for key in [key for key in ("theta", "branch") if key in state.source] if recipe.learns else ():
            if recipe.teacher is not None and progress.view.images is not None:
                followed = recipe.teacher.follow_told(state.teacher[key], state.moving[key], progress.told)
                update_where(state.teacher, {key: followed}, sound)
            own = f"recover.{key}"
            pulled, kept = recipe.recover.pulled(state.moving[key], state.source[key], state.memory_of(own), state.rng)
            update_where(state.moving, {key: pulled}, sound)
            update_where(state.memory, {f"{own}.{name}": value for name, value in kept.items()}, sound)
        resets = recipe.recover.resets(state.memory_of("recover"))
        if resets is not None:
            state.restart(resets)
            record.reset_flag = resets

    def _fill(self, record: BatchRecord, progress: BatchProgress) -> None:
        """Record selections, entropies and updates; other images that were learnt from count as the batch."""
        rows, first, updates, images = len(self.batch.images), progress.first, progress.updates, self.batch.images
        other = progress.view.images is not None and progress.view.images is not images
        masks = list(progress.selections) or [torch.zeros(rows, dtype=torch.bool, device=first.logits.device)]
        masks = [mask.any().expand(rows) for mask in masks] if other and progress.selections else masks
        record.selected = masks[0]
        record.newly_reliable = torch.stack(masks).any(0) & ~masks[0]
        record.no_longer_reliable = masks[0] & ~masks[-1]
        before, logits, after = first.entropy.detach(), first.logits.detach(), progress.last.entropy.detach()
        if other and progress.teacher_answer is not None:
            logits = progress.teacher_answer
            before = entropy(logits.log_softmax(1))
        elif other:
            before, logits = before.mean().expand(rows), first.log_probs.detach().mean(0, keepdim=True)
        if other and progress.last.images is not images:
            after = before if progress.teacher_answer is not None else after.mean().expand(rows)
        record.entropy = FirstLast(before, after)
        record.first_logits = logits
        record.source_logits = first.source.detach() if first.source is not None and not self.recipe.learns else None
        record.loss_value = updates[-1].loss if updates else None
        record.gradient_value = updates[-1].gradients["theta"].norm() if updates else None
        record.applied = [update.applied for update in updates]
        record.any_selected = [update.mask.any() for update in updates]
        record.none_selected = bool(progress.selections) and not updates
        record.not_due = progress.view.images is None


def read_flags(flags: Tensor, images: Tensor, *, first: bool) -> int:
    """The one read before an update: how many samples are selected, 0 if the set is the same as before.

    Images that are not finite are an error.
    """
    selected, *other = flags.tolist()
    if first and not other[0]:
        checks.finite(images)
    return int(selected) if all(other) else 0


def _with_own_caches(progress: BatchProgress) -> BatchProgress:
    """The same outputs, whose cached values from now on stay here: a captured finish must not feed a later update."""
    passes = (progress.first, progress.last, progress.plain, *(update.outputs for update in progress.updates))
    copies = {id(outputs): copy.copy(outputs) for outputs in passes if outputs is not None}
    for outputs in copies.values():
        outputs.cache = dict(outputs.cache)
    updates = tuple(replace(update, outputs=copies[id(update.outputs)]) for update in progress.updates)
    return replace(
        progress, first=copies[id(progress.first)], last=copies[id(progress.last)],
        plain=copies.get(id(progress.plain)), updates=updates,
    )  # fmt: skip


def _anomalies(logits: Tensor, updates: tuple[Update, ...]) -> Tensor:
    """How many answers are not finite, and how many applied updates had a gradient of zeros."""
    finite = logits.amax(1).isfinite()  # NaN spreads; -inf for one class is an answer
    idle = [each.applied & ~torch.stack([g.any() for g in each.gradients.values()]).any() for each in updates]
    return torch.stack([(~finite).sum(), torch.stack(idle).sum() if idle else torch.zeros_like(finite[0]).long()])


def _gradient(loss: Tensor, tensor: Tensor, *, keep: bool = False) -> Tensor:
    """The loss's gradient for this tensor alone; zeros where it has none."""
    return torch.autograd.grad(loss, tensor, retain_graph=keep, materialize_grads=True)[0]


def _gradients(loss: Tensor, tensors: Memory) -> Memory:
    """The loss's gradient for each tensor; zeros where it has none."""
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True), strict=True))
