"""Requests that schemathesis makes of the page of routes, valid and not: each answer is one that the page describes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("schemathesis", reason="pip install schemathesis")

from served import running

from poem.serve.client import Client

pytestmark = pytest.mark.slow
STREAMS, TOKEN = ("door", "yard", "gate"), "a-long-secret"
OPAQUE = ("POST /v1/streams/{stream}/predict", "PUT /v1/streams/{stream}/state")
"""These take bytes, of which a schema cannot say that they are an image or a state."""


def generated(folder: Path, url: str, token: str, *options: str) -> int:
    """Run schemathesis with these options; how many requests it made. None of its checks may fail."""
    header = ("--header", f"Authorization: Bearer {token}") if token else ()
    run = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--max-examples", "40",
            "--generation-deterministic", "--continue-on-failure", "--no-color", *header, *options,
        ],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    made = re.search(r"(\d+) generated", run.stdout)
    assert made is not None, run.stdout[-2000:]
    return int(made[1])


@pytest.mark.parametrize("token", ["", TOKEN], ids=["open", "token"])
def test_every_answer_is_one_that_the_page_of_routes_describes(token: str, tmp_path: Path) -> None:
    tokens = (token,) if token else ()
    limits = {"batch_size": 8, "max_body": 1 << 20, "max_state": 1 << 20}
    array = np.random.default_rng(0).random((4, 3, 32, 32)).astype(np.float32)
    with running(tmp_path, *tokens, **limits) as url, Client(url, token=token or None) as client:
        for stream in STREAMS:
            before = client.predict(stream, array)
        others = [option for name in OPAQUE for option in ("--exclude-name", name)]
        named = [option for name in OPAQUE for option in ("--include-name", name)]
        made = generated(tmp_path, url, token, *named, "--exclude-checks", "positive_data_acceptance")
        made += generated(tmp_path, url, token, *others)
        assert made >= 300
        assert client.ready()
        assert client.predict("a-new-one", array).answers == before.answers, "a fresh stream answers as the first did"
