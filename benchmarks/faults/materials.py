"""Files for the faults to damage: pictures, and small encoders with random weights."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

from benchmarks.faults.lab import Lab
from benchmarks.faults.processes import environment


def pictures(lab: Lab, count: int = 40) -> Path:
    """Create a folder of two classes of small pictures for this fault."""
    folder, draw = lab.folder / "media", random.Random(0)
    if folder.exists():
        return folder
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            color = tuple(draw.randrange(256) for _ in range(3))
            Image.new("RGB", (20, 16), color).save(folder / name / f"{number:02d}.png")
    return folder


def text_encoder(lab: Lab) -> Path:
    """Return a copy of a small CLIP text encoder and its tokenizer for this fault."""
    return _saved(lab, "clip", "from tests.encoders.test_text import save_clip; save_clip(folder)")


def random_vae(lab: Lab) -> Path:
    """Return a copy of a small AutoencoderKL for this fault."""
    return _saved(lab, "vae", "from tests.encoders.test_vae import small_vae; small_vae().save_pretrained(folder)")


def _saved(lab: Lab, name: str, code: str) -> Path:
    command = [sys.executable, "-c", f"import sys; folder = sys.argv[1]; {code}"]
    made = lab.shared.once(name, lambda folder: subprocess.run([*command, folder], check=True, env=environment()))
    own = lab.folder / name
    return own if own.exists() else Path(shutil.copytree(made, own))
