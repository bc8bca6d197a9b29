"""A stream: a data set in an order, batch by batch, with its protocol card."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from poem.streams.card import Card
from poem.streams.images import Images, Labels
from poem.streams.loading.batches import Batches, OnError, segment_batches, shift_to_apply
from poem.streams.loading.load_batch import BatchLoader
from poem.streams.loading.pixels import PixelBatch, to_float
from poem.streams.orders import Order, Segment
from poem.streams.shift import CLEAN, Shift


@dataclass(frozen=True)
class Domains:
    """Opens each shift of a data set that is stored once per corruption, and its clean counterpart.

    `Stream(data=Domains("imagenet-c", "/data"), ...)` reads the folder of each corruption; `settings` go to
    `open_dataset`, for the clean counterpart too.
    """

    name: str
    root: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    def __call__(self, shift: Shift) -> Images:
        """Open the data set of one shift."""
        from poem.streams.datasets import DATASETS, canonical, open_dataset
        from poem.streams.datasets.named_sets import CLEAN_COUNTERPARTS

        name, settings = canonical(self.name), dict(self.settings)
        if shift != CLEAN:
            return open_dataset(name, self.root, corruption=shift.corruption, severity=shift.severity, **settings)
        clean = CLEAN_COUNTERPARTS.get(name, name)
        unsupported = (
            sorted(set(settings) - set(inspect.signature(DATASETS[clean]).parameters)) if clean != name else []
        )
        if unsupported:
            raise ValueError(
                f"the clean counterpart of {name} is {clean}, which takes no {', '.join(unsupported)}; for clean "
                "images of the same choice pass Stream(data=...) a function from shift to data set"
            )
        return open_dataset(clean, self.root, **settings)


class StreamBatch(NamedTuple):
    """One batch of a stream."""

    images: Tensor
    labels: Tensor
    segment: Segment
    """Its segment of the order: shifts, indices, and whether the adapter is reset before it."""


@dataclass(kw_only=True)
class Stream:
    """A data set in an order: iterate over its batches; `card()` describes it.

    Args:
        data: Clean images, corrupted on the fly as the order asks; or a function from shift to data set (`Domains`).
            Any `torch.utils.data.Dataset` of (image, label) pairs will do, its images before normalisation.
        order: Which domains come when, and how their images are arranged.
        batch_size: Images per batch, unless the order prescribes it.
        seed: Seed of corruptions made on the fly; by default the order's.
        profile: Constants of corruptions made on the fly; by default chosen by image size.
        workers: Loader processes; those of the next domain are started while the last batches of one are used.
        on_error: As in `batches`; `failures` collects over the whole stream.
    """

    data: Images | Callable[[Shift], Images]
    order: Order
    batch_size: int | None = None
    seed: int | None = None
    profile: str | None = None
    workers: int = 0
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        asked, prescribed = self.batch_size, self.order.batch_size
        if asked is not None and prescribed is not None and asked != prescribed:
            raise ValueError(f"{self.order.name} prescribes batch size {prescribed}, got {asked}")
        from poem.streams.datasets.own_sets import as_images, is_images  # which is of a package that imports this one

        if not is_images(self.data) and not callable(self.data):
            self.data = as_images(self.data, name=type(self.data).__name__)
        self.size = asked or prescribed or 64
        self.failures: list[str] = []

    def __iter__(self) -> Iterator[StreamBatch]:
        for images, labels, segment in self.pixels():
            yield StreamBatch(to_float(images), labels, segment)

    def pixels(self) -> Iterator[PixelBatch]:
        """The batches with their images as uint8, which are valid until the next batch is asked for."""
        self.failures = []
        labels = self._first_domain().labels
        coming = (self._batches(segment, labels) for segment in self.order.over(labels))
        found = next(coming, None)
        while found is not None:
            following: Batches | Exception | None = None
            last = max(len(found) - 2 * self.workers, 0)  # from then on loader processes have nothing more to begin
            for at, batch in enumerate(found.pixels()):
                if at == last and self.workers:
                    following = _started(coming)
                yield batch
            self.failures += found.failures
            if isinstance(following, Exception):
                raise following
            found = next(coming, None) if following is None else following

    def _batches(self, segment: Segment, labels: Labels) -> Batches:
        """The batches of a segment of the order."""
        sources = [self._domain(shift) for shift in segment.shifts]
        for shift, source in zip(segment.shifts, sources, strict=True):
            if not np.array_equal(source.labels, labels):
                raise ValueError(f"expected the same images in every domain; {shift} has other labels than the first")
        shifts = [shift_to_apply(*pair, exact=True) for pair in zip(sources, segment.shifts, strict=True)]
        seed = self.order.seed if self.seed is None else self.seed
        loader = BatchLoader(sources, shifts, seed, self.profile)
        return segment_batches(loader, segment, self.size, self.workers, self.on_error)

    def card(self, *, base: str = "not stated", normalisation: str = "not stated", source_access: str = "none") -> Card:
        """The protocol card of this stream; the caller adds what concerns the model and the method."""
        first = self._first_domain()
        about, order = first.describe(), self.order.describe()
        made = Shift(about["corruption"], about["severity"]) == CLEAN and order["corruptions"] != ("clean",)
        provenance = about["provenance"]
        if made:
            from poem.streams import corruptions

            seed = self.order.seed if self.seed is None else self.seed
            profile = self.profile or corruptions.profile_of(min(first[0].shape[1:]))
            provenance = f"made on the fly by poem.corrupt (seed {seed}, profile {profile}) from: {provenance}"
            if "frost" in order["corruptions"]:
                provenance += f"; frost textures: {corruptions.frost_source()}"
        return Card(
            data=about["data"],
            n=about["n"],
            total=self.order.count(about["n"], len(np.unique(first.labels))),
            subset=about["subset"],
            classes=about["classes"],
            batch_size=self.size,
            base=base,
            normalisation=normalisation,
            source_access=source_access,
            provenance=provenance,
            preparation=about["preparation"],
            **order,
        )

    def _domain(self, shift: Shift) -> Images:
        return self.data(shift) if callable(self.data) else self.data

    def _first_domain(self) -> Images:
        return self._domain(self.order.visits[0].shifts[0])


def _started(coming: Iterator[Batches]) -> Batches | Exception | None:
    """The batches of the next segment, their processes started; an error is returned, to be raised in its place."""
    try:
        found = next(coming, None)
        if found is not None:
            found.start()
    except Exception as error:
        return error
    return found
