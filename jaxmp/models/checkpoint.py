"""`open_checkpoint`: a pretrained model in a folder of Hugging Face's layout or in a GGUF file."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from jaxmp.models import gpt2_file
from jaxmp.models.described import Checkpoint
from jaxmp.models.gguf_file import open_gguf
from jaxmp.models.safetensors_file import open_folder


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file.

    Raises:
      FileNotFoundError: if there is none, or a file that its index names is missing.
      ValueError: if a file is damaged or cut off.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == '.gguf':
        return open_gguf(place)
    checkpoint = open_folder(place)
    return gpt2_file.renamed(checkpoint) if gpt2_file.is_gpt2(checkpoint) else checkpoint


@functools.cache
def digest(path: str) -> str:
    """The SHA-256 of a file, or of a folder's ``*.safetensors``: 12 digits; ``''`` without any."""
    place = Path(path).expanduser() if path else Path()
    files = [place] if place.is_file() else sorted(place.glob('*.safetensors')) if path else []
    total = hashlib.sha256()
    for file in files:
        with file.open('rb') as stream:
            while part := stream.read(2**24):
                total.update(part)
    return total.hexdigest()[:12] if files else ''
