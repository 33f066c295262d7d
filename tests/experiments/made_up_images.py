"""Made-up images in the files of Fashion-MNIST: the same bytes everywhere, and classes that can be learned."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write_images(folder: Path, num_train: int = 600, num_test: int = 150) -> Path:
    """Writes the four files; an image is a pattern of its class, 7 by 7 squares of 4 by 4 pixels, and noise."""
    rng = np.random.default_rng(1)
    labels = np.arange(num_train + num_test) % 10
    of_class = rng.integers(0, 256, (10, 7, 7))
    small = np.clip(of_class[labels] + rng.integers(-60, 61, (len(labels), 7, 7)), 0, 255)
    images = small.repeat(4, axis=-2).repeat(4, axis=-1)
    for split, part in (("train", slice(num_train)), ("t10k", slice(num_train, None))):
        for kind, values in (("images", images[part]), ("labels", labels[part])):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            content = header + values.astype(np.uint8).tobytes()
            (folder / f"{split}-{kind}-idx{values.ndim}-ubyte.gz").write_bytes(gzip.compress(content, mtime=0))
    return folder
