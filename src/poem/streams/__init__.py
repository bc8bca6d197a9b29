"""What arrives at the adapter: corruptions, data sets and orders.

Corruptions are here; `poem.streams.datasets` opens data (`open_dataset`, `image_folder`, `batches`, `Stream`),
`poem.streams.orders` says what comes when (`single`, `continual`, `label_shift`), `poem.streams.card` what it was.
"""

from __future__ import annotations

from poem.streams.corruptions import CORRUPTIONS, EXTRA, PROFILES, corrupt, frost_source, profile_of

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "corrupt", "frost_source", "profile_of"]
