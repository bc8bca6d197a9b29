"""A service with two streams, and a client: what one stream sends changes no other's answers.

Run it: python examples/07_serve.py. It needs the extra `serve` (fastapi, uvicorn, prometheus-client, python-multipart).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import poem
from poem.streams.datasets import Stream, open_dataset
from poem.streams.orders import single

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "PIL")


def main() -> None:
    """Start `poem serve`, send images to two streams, read their status, and stop it."""
    if any(find_spec(name) is None for name in NEEDED):
        print("this example needs the extra serve: pip install 'poem-tta[serve]'")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "poem",
            "serve",
            "digits-bn",
            "--port",
            "0",
            "--state",
            str(Path(folder) / "s"),
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://[\d.:]+", server.stdout.readline())
            assert found is not None, "the server says where it listens"
            use(poem.Client(found[0]))
        finally:
            server.send_signal(signal.SIGTERM)  # answers what waits, and saves every stream
            print("the server ended with", server.wait(60))


def use(client: poem.Client) -> None:
    """Two streams of the same digits: one as they are, one in fog."""
    digits = open_dataset("digits-test")
    for name, shift in (("door", "clean"), ("yard", "fog")):
        right = count = 0
        for images, labels, _ in islice(Stream(data=digits, order=single([shift]), batch_size=32), 20):
            answer = client.predict(name, images.numpy(), deadline_ms=5000)  # or the source's answer, marked `late`
            right += sum(a == b for a, b in zip(answer.labels, labels.tolist(), strict=True))
            count += len(labels)
        status = client.status(name)
        print(f"{name}: {right / count:.0%} right; {status['verdict']} answers; agreement with the source", end=" ")
        print(f"{1 - status['signals']['disagreement']:.0%} in the last of {status['batches']} batches")
    client.load_state("copy", client.state("door"))  # a stream that goes on from another's state
    client.delete("copy")
    print("streams:", ", ".join(sorted(each["stream"] for each in client.streams())))


if __name__ == "__main__":
    main()
