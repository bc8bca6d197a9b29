"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch

# Tiny nets: threads cost more than they bring, and workers share two cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
