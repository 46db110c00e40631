"""Test an installed OpenDiT for scripts/try_packaging.sh: run its commands, and draw samples in a shell and Python."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path


def run(*words: str, code: int = 0) -> str:
    """Run a command and return its output. The command must end with the exit code ``code`` and without a traceback."""
    done = subprocess.run(words, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in told, f"{' '.join(words)}: {done.returncode}\n{told}"
    return told


before = time.perf_counter()
import opendit  # noqa: E402

seconds = time.perf_counter() - before
where = Path(opendit.__file__).parent
assert "site-packages" in where.parts, f"{where} is no installation"
assert "torch" not in sys.modules and (where / "py.typed").is_file()
print(f"import opendit: {1000 * seconds:.0f} ms, version {opendit.__version__}, Python {sys.version.split()[0]}")

from opendit.cli.command import COMMANDS  # noqa: E402

for command in COMMANDS:
    assert f"usage: opendit {command} " in run("opendit", command, "--help"), command
assert "digits" in run("opendit", "train", "--recipe", "list")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

config = opendit.model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=3)
model = opendit.build_model(config, seed=0)
torch.nn.init.normal_(model.final_layer.linear.weight)
info = {"model": "DiT-Ti/2", "config": config.to_dict(), "vae": "none", "image_size": 8}
save_file(model.state_dict(), "tiny.safetensors", metadata={"opendit": json.dumps(info)})

flags = "--ckpt tiny.safetensors --class_labels 0 1 2 --num_sampling_steps 4 --sampler ddim --seed 1".split()
assert "Done" in run("opendit", "sample", *flags, "--output", "drawn", "--npz", "drawn.npz", "--profile")
assert json.loads(Path("drawn", "profile.json").read_text())["stages"]
drawn = np.load("drawn.npz")["arr_0"]
pictures = opendit.load("tiny.safetensors", device="cpu")([0, 1, 2], steps=4, sampler="ddim", seed=1, progress=False)
if not torch.cuda.is_available():  # sample.py draws in bf16 on a GPU
    assert all(np.array_equal(np.asarray(mine), its) for mine, its in zip(pictures, drawn, strict=True))
assert Image.open("drawn/000000-0.png").size == (8, 8) and drawn.std() > 1
assert "wrote" in run("opendit", "export", "meta", "--ckpt", "tiny.safetensors", "--output", "tiny.pt")
assert "demo.csv" in run("opendit", "preprocess", "demo", "--clips", "2", "--size", "16")
if importlib.util.find_spec("gradio") is None:
    told = run("opendit", "page", "--ckpt", "tiny.safetensors", "--outputs", ".", code=2)
    assert "pip install 'opendit[page]'" in told, told
told = run("opendit", "train", "--recipe", "digits", "--data_path", "mock", "--max_steps", "1", code=2)
assert "pip install --no-deps colossalai" in told and told.strip().splitlines()[-1].startswith("error: "), told
print(f"train says what is missing: {told.strip().splitlines()[-1]}")
