"""Take the result home: a checkpoint for your own class, torch.export, and ONNX with a batch of any size.

Run it: python examples/06_export.py. The last part needs the extra `export` (onnx, onnxscript, onnxruntime).
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import poem


class Small(nn.Module):
    """A model of yours."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.body(self.stem(x)).mean((2, 3)))
        return logits


def main() -> None:
    """Adapt, freeze the statistics, and run the result without the library."""
    torch.manual_seed(0)
    adapter = poem.adapt(Small().eval(), "tent", lr=0.01)
    stream = torch.rand(4, 32, 3, 32, 32)
    for images in stream:
        adapter(images)
    plain = adapter.export(statistics="frozen", stream=list(stream))  # without stream=: of the last batch

    mine = Small().eval()
    mine.load_state_dict(plain.state_dict())  # the very keys of your class
    images = torch.rand(5, 3, 32, 32)
    with torch.no_grad():
        wanted = mine(images)
        alone = torch.cat([plain(image[None]) for image in images])
    print("own class:", torch.equal(wanted, plain(images)), "- one by one:", torch.allclose(wanted, alone, atol=1e-5))

    any_size = {"images": {0: torch.export.Dim("batch")}}
    program = torch.export.export(plain, (stream[0],), dynamic_shapes=any_size, strict=False)
    print("torch.export:", torch.allclose(program.module()(images), wanted, atol=1e-5))

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"ONNX: needs {', '.join(missing)}; pip install 'poem-tta[export]'")
        return
    import onnxruntime

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "adapted.onnx"
        torch.onnx.export(
            program, (), path, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False
        )
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = [torch.from_numpy(session.run(None, {"images": piece.numpy()})[0]) for piece in (images, images[:1])]
    same = torch.allclose(found[0], wanted, atol=1e-4) and torch.allclose(found[1], wanted[:1], atol=1e-4)
    print("onnxruntime, a batch of five and of one:", same)


if __name__ == "__main__":
    main()
