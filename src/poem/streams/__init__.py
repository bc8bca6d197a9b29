"""Streams of images for an adapter: corruptions, data sets, and the orders in which they arrive.

Corruptions are here; `poem.streams.datasets` opens data (`open_dataset`, `image_folder`, `batches`, `Stream`),
`poem.streams.orders` has the orders (`single`, `continual`, `label_shift`), `poem.streams.card` the protocol card.
"""

from __future__ import annotations

from poem.streams.corruptions import CORRUPTIONS, EXTRA, PROFILES, corrupt, frost_source, profile_of

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "corrupt", "frost_source", "profile_of"]
