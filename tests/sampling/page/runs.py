"""Create a folder of runs for the page: small random models, logs, grids, and files that must not be read."""

import json
import shutil
from pathlib import Path

from PIL import Image

from opendit.diffusion.objectives import FlowObjective
from tests.sampling.small import BYTES, write

NAMES = ["zero", "one", "two", "<b>three</b>", "four"]
DIGITS, CLIPS, BROKEN, LINK, LINKED_FILE, CUT = (
    "000-DiT-Ti-2",
    "001-vDiT-Ti-222",
    "002-DiT-Ti-2",
    "003-DiT-Ti-2",
    "004-DiT-Ti-2",
    "005-DiT-Ti-2",
)
FLOW = {"objective": FlowObjective().to_dict(), "frame_interval": 3}


def make(folder: Path) -> Path:
    """Create the folder ``outputs`` with six runs, and the folder ``elsewhere``, the target of some links."""
    outputs, elsewhere = folder / "outputs", folder / "elsewhere"
    digits = outputs / DIGITS
    for step, seed in ((10, 1), (20, 2)):
        for number, name in enumerate(("ema", "ema_0.9", "model")):
            path = digits / "checkpoints" / f"step_{step:07d}" / f"{name}.safetensors"
            write(path, seed=10 * seed + number, info={"class_names": NAMES})
    (digits / "checkpoints" / "latest").symlink_to("step_0000020")
    grids = digits / "samples"
    grids.mkdir()
    for number, step in enumerate((10, 20, 30)):
        Image.new("RGB", (20 + number, 10)).save(grids / f"{step:07d}.png")
    lines = [{"step": step, "loss": 1 / step, "grad_norm": 2.0, "samples_per_s": 100.0} for step in range(1, 31)]
    log(digits, [*lines, {"step": 31, "loss": None, "grad_norm": float("nan")}])
    flags = {"model": "DiT-Ti/2", "lr": 1e-4, "class_labels": [], "<i>": "<script>alert(1)</script>"}
    first = {"time": "2026-01-01T10:00:00+00:00", "host": "here", "world_size": 2, "first_step": 0, "flags": flags}
    changes = ["resume: --lr 0.0001 -> 0.001: the curve is another from here on"]
    second = {**first, "first_step": 20, "flags": {**flags, "lr": 1e-3}, "changes": changes}
    (digits / "config.json").write_text(json.dumps({**second, "starts": [first, second]}))

    clips = outputs / CLIPS / "checkpoints" / "step_0000005" / "ema.safetensors"
    write(clips, "vDiT-Ti/222", info=FLOW, frames=4, input_size=(16, 16), text=BYTES, learn_sigma=False)
    log(outputs / CLIPS, [{"step": 5, "loss": 0.5, "grad_norm": 1.0, "samples_per_s": 3.0}])

    broken = outputs / BROKEN / "checkpoints" / "step_0000001"
    broken.mkdir(parents=True)
    (broken / "ema.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json and no tensors")
    (outputs / BROKEN / "config.json").write_text("{")

    other = elsewhere / "run"
    write(other / "checkpoints" / "step_0000001" / "ema.safetensors")
    Image.new("RGB", (5, 5)).save(elsewhere / "0000040.png")
    log(other, [{"step": 1, "loss": 1234.5}])
    (outputs / LINK).symlink_to(other)
    (grids / "0000040.png").symlink_to(elsewhere / "0000040.png")
    (elsewhere / "secret.txt").write_text("secret")
    (elsewhere / "results.jsonl").write_text('{"metric": "fid", "value": 1}')

    inside = outputs / LINKED_FILE / "checkpoints" / "step_0000001"
    inside.mkdir(parents=True)
    (inside / "ema.safetensors").symlink_to(other / "checkpoints" / "step_0000001" / "ema.safetensors")
    (outputs / LINKED_FILE / "log.jsonl").symlink_to(other / "log.jsonl")
    (outputs / LINKED_FILE / "config.json").symlink_to(elsewhere / "secret.txt")
    (outputs / LINKED_FILE / "samples").symlink_to(elsewhere)
    (outputs / LINKED_FILE / "results.jsonl").symlink_to(elsewhere / "results.jsonl")
    (outputs / DIGITS / "results.jsonl").write_text('{"metric": "<i>fid</i>", "value": 12.25, "count": 1000}')

    cut = outputs / CUT / "checkpoints" / "step_0000001" / "ema.safetensors"  # complete header, truncated tensors
    cut.parent.mkdir(parents=True)
    whole = digits / "checkpoints" / "step_0000010" / "ema.safetensors"
    shutil.copy(whole, cut)
    with open(cut, "r+b") as file:
        file.truncate(whole.stat().st_size - 1000)
    return outputs


def log(run: Path, lines: list[dict]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "lo')
