"""The loop for a batch of many streams: every stream's selection, loss, update, memory and recovery are its own.

What `engine/loop.py` decides on the host for one stream (is there an update at all, has the selection changed?) is here
a tensor with an entry for each stream, and the passes are those of all. Parts are mapped over streams
(`torch.func.vmap`), so what they compute for one is what they compute alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from poem.parts.base import Batch, Memory, Outcome, Outputs, Part, Selected, Update, inside
from poem.parts.destruction import Destroy
from poem.parts.selection import Both, PLPDAbove, Select
from poem.parts.weighting import ByPLPD
from poem.recipes.recipe import Recipe
from poem.serve.stack_network import StackNetwork, in_rows
from poem.serve.stack_values import Arrays, Made, Pass, Round, chosen_rows


class StackLoop:
    """The loop of one batch of N streams.

    Args:
        recipe: Of all streams.
        network: Of all streams.
        source: The flat tensors that the model came with.
        prepared: What parts measured on source data.
        start: A fresh stream's tensors, one row.
        images: (b * N, ...), the first image of every stream first.
        arrays: What adapting has changed so far.
        learn: (N,) which streams learn.
        lr: Learning rate.
        size: The configured batch size.
        destroyed: Images whose shapes are destroyed, by the part that does it.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: StackNetwork,
        *,
        source: Memory,
        prepared: Memory,
        start: Arrays,
        images: Tensor,
        arrays: Arrays,
        learn: Tensor,
        lr: float,
        size: int,
        destroyed: Callable[[Destroy], Tensor],
    ) -> None:
        self.recipe, self.network, self._source, self._prepared, self._start = recipe, network, source, prepared, start
        self.images, self.learn, self.lr, self._size, self._destroyed = images, learn, lr, size, destroyed
        self.streams = len(learn)
        self.rows = len(images) // self.streams
        self.arrays = Arrays(dict(arrays.moving), {k: dict(v) for k, v in arrays.steps.items()}, dict(arrays.memory))
        self._counts: dict[str, Tensor] = {}

    def run(self, *, learns: bool) -> Round:
        """All updates, memory and recovery; `learns` says whether any stream may learn at all."""
        recipe, which = self.recipe, self.recipe.readout.which
        updates = recipe.explore.updates if learns and recipe.learns else 0
        everyone = torch.ones_like(self.learn)
        first = newest = self.forward(everyone, grad=updates > 0)
        last = before_last = first.plain()
        made: list[Made] = []
        tried: list[Tensor] = []
        nobody = torch.zeros(self.streams, self.rows, dtype=torch.bool, device=self.images.device)
        masks, record = [nobody], first.record
        if updates:
            masks = [self.select(first, ~nobody, self.learn) & self.learn[:, None]]
        active = masks[0].any(1)
        for done in range(1, updates + 1):
            if not bool(active.any()):
                break
            before_last = self._merged(active, newest.plain(), before_last)
            made.append(self._update(newest, masks[-1], active))
            tried.append(active)
            more = done < updates
            if not more and which != "last":
                break
            newest = self.forward(active, round=done, grad=more)
            last = self._merged(active, newest.plain(), last)
            record = {**record, **chosen_rows(active, newest.record, record)}
            if more or not recipe.select_runs_network:
                again = self.select(newest, ~nobody, active) if recipe.explore.reselect else masks[0]
                masks.append(torch.where(active[:, None], again, masks[-1]))
            if more:
                changed = (masks[-1] != masks[-2]).any(1) if recipe.explore.reselect else active
                active = active & masks[-1].any(1) & changed
        answered = {"before-last": before_last, "last": last}.get(which, first.plain())
        return self._finish(first.plain(), last, answered, made, tried, masks, record)

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        counted: Tensor,
        *,
        round: int = 0,
        grad: bool = True,
        theta: Tensor | None = None,
        images: Tensor | None = None,
        mask: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> Pass:
        """One pass of all streams, counted for some: `needed` rows of each, or all."""
        moving = self.arrays.moving
        weights = (moving["theta"] if theta is None else theta).detach().requires_grad_(grad)
        branch = moving["branch"].detach().requires_grad_(grad) if "branch" in moving else None
        network, statistics = self.network, self.recipe.statistics
        shown = self.images if images is None else images
        copies = network.copies(statistics)
        twice = 2 if network.branch is not None and network.doubles is False else 1
        self._count("forwards_computed", counted * (twice * copies * self.rows))
        self._count("forwards", counted * copies * (self.rows if needed is None else needed))
        adapted = weights if weights.shape[1] else None
        with torch.set_grad_enabled(grad):
            heads, run = network.stacked(shown, self.streams, adapted, branch, statistics, self.arrays.memory, mask)
            both = self.recipe.branch if len(heads) == 2 else None
            logits = heads[0] if both is None else vmap(both.together)(*heads)
        return Pass(logits, heads, weights, branch, round, run.record, run.source)

    def _count(self, name: str, rows: Tensor) -> None:
        rows = rows.long()
        self._counts[name] = self._counts[name] + rows if name in self._counts else rows

    def _merged(self, chosen: Tensor, new: Pass, old: Pass) -> Pass:
        """The new pass where a stream is chosen, else the old one; without a graph."""
        rows = chosen[:, None, None]
        heads = tuple(torch.where(rows, one, two) for one, two in zip(new.heads, old.heads, strict=True))
        logits = torch.where(rows, new.logits, old.logits)
        return Pass(logits, heads, new.theta, new.branch, new.round, new.record, new.source)

    def outputs(self, logits: Tensor, heads: Sequence[Tensor], round: int, cache: dict[object, Tensor]) -> Outputs:
        """One stream's outputs, inside a map over streams."""
        batch = Batch(torch.empty(0), torch.Generator(), self._size)
        return Outputs(logits, tuple(heads), batch, round=round, cache=dict(cache))

    def _each(self, function: Callable[..., Any], outputs: Pass, *rest: Any) -> Any:
        """A function of one stream's outputs and of more of its values, for all streams."""
        names, round = list(outputs.cache), outputs.round

        def of_one(logits: Tensor, heads: Sequence[Tensor], cached: Sequence[Tensor], *more: Any) -> Any:
            return function(self.outputs(logits, heads, round, dict(zip(names, cached, strict=True))), *more)

        return vmap(of_one)(outputs.logits, outputs.heads, tuple(outputs.cache.values()), *rest)

    def memory_of(self, place: str) -> Memory:
        """What the part at a place remembers, for all streams; what it measured on source data is the same for all."""
        fixed = inside(self._prepared, place)
        wide = {name: each.expand(self.streams, *each.shape) for name, each in fixed.items()}
        return {**wide, **inside(self.arrays.memory, place)}

    # Selection --------------------------------------------------------------------------------------------------------

    def select(self, outputs: Pass, among: Tensor, counted: Tensor) -> Tensor:
        """Which samples (N, b) are selected."""
        return self._select(self.recipe.select, "select", outputs, among, counted) & among

    def _select(self, part: Select, place: str, outputs: Pass, among: Tensor, counted: Tensor) -> Tensor:
        """One filter; a pass of its own is made for all streams before the filter is asked."""
        if isinstance(part, Both):
            kept = among & self._select(part.first, f"{place}.first", outputs, among, counted)
            return kept & self._select(part.second, f"{place}.second", outputs, kept, counted)
        if isinstance(part, PLPDAbove):
            self._lean(part.destroy, outputs, among, counted)
        found: Tensor = self._each(
            lambda one, among, memory: part(one, among, memory), outputs, among, self.memory_of(place)
        )
        return found

    def _lean(self, destroy: Destroy, outputs: Pass, among: Tensor, counted: Tensor) -> None:
        """PLPD (N, b) into the cache, of a pass over destroyed images with the weights of these outputs."""
        if destroy in outputs.cache:
            return
        now = self.arrays
        moving = {**now.moving, "theta": outputs.theta.detach()}
        self.arrays = Arrays(moving, now.steps, now.memory)
        other = self.forward(counted, grad=False, images=self._destroyed(destroy), mask=among, needed=among.sum(1))
        self.arrays = now
        probs = outputs.logits.detach().log_softmax(2).exp()
        label = probs.argmax(2, keepdim=True)
        outputs.cache[destroy] = (probs.gather(2, label) - other.logits.softmax(2).gather(2, label))[:, :, 0]

    # The update -------------------------------------------------------------------------------------------------------

    def _update(self, outputs: Pass, mask: Tensor, active: Tensor) -> Made:
        """One step for theta and the branch of each active stream."""
        step, arrays = self.recipe.step, self.arrays
        made = self._gradients(outputs, mask, active, final=not step.perturbs)
        if step.perturbs:
            theta = arrays.moving["theta"] + vmap(step.perturbation)(made.gradients["theta"])
            there = self.forward(active, round=outputs.round, theta=theta, needed=mask.sum(1))
            second = self.select(there, mask, active)
            ready = made.applied
            made = self._gradients(there, second, active, final=True)
            made.applied = made.applied & ready
        made.applied = made.applied & active
        for key, gradient in made.gradients.items():
            stepped = step.for_group(key)
            change, memory = vmap(lambda one, held, by=stepped: by(one, self.lr, held))(gradient, arrays.steps[key])
            arrays.moving |= chosen_rows(made.applied, {key: arrays.moving[key] + change}, arrays.moving)
            arrays.steps[key] = {**arrays.steps[key], **chosen_rows(made.applied, memory, arrays.steps[key])}
        self._count("rounds", active)
        self._count("updates", made.applied)
        self._count("taught", made.mask.sum(1) * made.applied)
        return made

    def _gradients(self, outputs: Pass, mask: Tensor, active: Tensor, *, final: bool) -> Made:
        """Losses of all streams and their gradients: a stream's loss depends on its own tensors alone."""
        recipe = self.recipe
        for _, part in recipe.weigh.places:
            if isinstance(part, ByPLPD):
                self._lean(part.destroy, outputs, mask, active)
        source = self._source["theta"]

        def of_one(
            one: Outputs, mask: Tensor, theta: Tensor, weigh: Memory, own: Memory, teach: Memory
        ) -> tuple[Tensor, ...]:
            weights = recipe.weigh(one, mask, weigh).detach()
            selected = Selected(one, mask, weights, theta, source, memory=own, sizes=self.network.theta.sizes)
            found = [recipe.minimise(selected), recipe.minimise.taught(selected)]
            if recipe.branch is not None and final:
                plain = Selected(
                    one, mask, torch.ones_like(weights), theta, source, memory=teach, sizes=self.network.theta.sizes
                )
                found.append(recipe.branch.teach(plain))
            return tuple(found)

        memories = [self.memory_of(place) for place in ("weigh", "minimise", "branch.teach")]
        loss, taught, *teach = self._each(of_one, outputs, mask, outputs.theta, *memories)
        gradients: Memory = {}
        if teach:
            assert outputs.branch is not None
            (gradients["branch"],) = torch.autograd.grad(
                teach[0].sum(), outputs.branch, retain_graph=True, materialize_grads=True
            )
        (gradients["theta"],) = torch.autograd.grad(loss.sum(), outputs.theta, materialize_grads=True)
        sound = [taught.any(1), loss.isfinite(), *(each.isfinite().all(1) for each in gradients.values())]
        copies = self.network.copies(recipe.statistics)
        self._count("backwards", active * copies * taught.sum(1))
        self._count("backwards_computed", active * (copies * self.rows))
        return Made(outputs.plain(), taught, loss.detach(), gradients, torch.stack(sound).all(0))

    # The end of a batch -----------------------------------------------------------------------------------------------

    def _finish(
        self, first: Pass, last: Pass, answered: Pass, made: list[Made], tried: list[Tensor], masks: list[Tensor],
        record: Memory,
    ) -> Round:  # fmt: skip
        """The answers; what learning streams remember; recovery."""
        correct = self.recipe.readout.correct
        answer = self._each(lambda one, memory: correct(one, memory), answered, self.memory_of("readout.correct"))
        counts = self._counts
        counts["reset"] = self._remember(first, last, answered, made, tried, masks, record)
        before, after = (self._each(lambda one: one.entropy, each) for each in (first, last))
        finite = answer.amax(2).isfinite()
        idle = torch.zeros_like(finite.sum(1))
        for each, had in zip(made, tried, strict=True):
            moves = torch.stack([gradient.any(1) for gradient in each.gradients.values()]).any(0)
            idle = idle + (had & each.applied & ~moves).long()
        counts["not_finite"], counts["idle"] = (~finite).sum(1), idle
        loss = gradient = torch.full_like(answer[:, 0, 0], torch.nan)
        for each, had in zip(made, tried, strict=True):
            loss = torch.where(had, each.loss, loss)
            gradient = torch.where(had, each.gradients["theta"].norm(dim=1), gradient)
        return Round(
            answer.detach(), self.arrays, first, masks[0], torch.stack(masks).any(0) & ~masks[0], masks[0] & ~masks[-1],
            (before, after), loss, gradient, counts, made, tried,
        )  # fmt: skip

    def _remember(
        self, first: Pass, last: Pass, answered: Pass, made: list[Made], tried: list[Tensor], masks: list[Tensor],
        record: Memory,
    ) -> Tensor:  # fmt: skip
        """The parts' memory, the statistics', the pull to the source, and which streams (N,) went back to it."""
        recipe, arrays = self.recipe, self.arrays
        finite = last.logits.isfinite().flatten(1).all(1)
        sound = finite
        if made:
            applied = torch.stack([each.applied for each in made]).any(0)
            sound = torch.where(tried[0], applied, finite)
        sound = sound & self.learn
        fresh: Memory = {}
        for place, part in recipe.places:
            if type(part).remember is not Part.remember:
                fresh |= {
                    f"{place}.{k}": v for k, v in self._part(part, place, first, last, answered, made, masks).items()
                }
        memory = {**arrays.memory, **chosen_rows(sound, fresh, arrays.memory)}
        memory |= chosen_rows(sound & finite, record, memory)
        arrays.memory = memory
        resets = torch.zeros_like(self.learn)
        if not recipe.learns:
            return resets
        for key in [key for key in ("theta", "branch") if key in self._source]:
            own, source = f"recover.{key}", self._source[key]

            def pulled(theta: Tensor, held: Memory, source: Tensor = source) -> tuple[Tensor, Memory]:
                return recipe.recover.pulled(theta, source, held, torch.Generator())

            moved, kept = vmap(pulled)(arrays.moving[key], self.memory_of(own))
            arrays.moving |= chosen_rows(sound, {key: moved}, arrays.moving)
            arrays.memory |= chosen_rows(sound, {f"{own}.{name}": value for name, value in kept.items()}, arrays.memory)
        back = recipe.recover.resets(self.memory_of("recover"))  # a comparison of numbers: the same with N in front
        if back is not None:
            resets = back & self.learn
            start = self._start
            arrays.moving = {**arrays.moving, **chosen_rows(resets, start.moving, arrays.moving)}
            arrays.memory = {**arrays.memory, **chosen_rows(resets, start.memory, arrays.memory)}
            for group, fresh_step in start.steps.items():
                arrays.steps[group] = {**arrays.steps[group], **chosen_rows(resets, fresh_step, arrays.steps[group])}
        return resets

    def _part(
        self, part: Part, place: str, first: Pass, last: Pass, answered: Pass, made: list[Made], masks: list[Tensor]
    ) -> Memory:
        """What a part remembers of the batch, for every stream."""
        passes = [first, last, answered, *(each.outputs for each in made)]
        rounds = [each.round for each in passes]

        def of_one(
            shown: list[tuple[Tensor, tuple[Tensor, ...]]], updates: list[tuple[Tensor, ...]], masks: list[Tensor],
            memory: Memory,
        ) -> Memory:  # fmt: skip
            one, two, three, *seen = (
                self.outputs(logits, heads, round, {}) for (logits, heads), round in zip(shown, rounds, strict=True)
            )
            done = [
                Update(outputs, mask, loss, {}, applied)
                for outputs, (mask, loss, applied) in zip(seen, updates, strict=True)
            ]
            return part.remember(Outcome(one, two, done, masks, None, three), memory)

        found: Memory = vmap(of_one)(
            [(each.logits, each.heads) for each in passes], [(each.mask, each.loss, each.applied) for each in made],
            masks, self.memory_of(place),
        )  # fmt: skip
        return found


def destroyed_rows(destroy: Destroy, images: Tensor, draws: Tensor | None) -> Tensor:
    """Rows of destroyed images, each by its own draw (N, b, ...)."""
    drawn: dict[object, Tensor] = {} if draws is None else {destroy: in_rows(draws)}
    batch = Batch(images, torch.Generator(), 1, drawn)
    return destroy(Outputs(images, (images,), batch))
