"""Read the fixtures of file formats only through the public interfaces of the programs, and return the results.

``make.py`` records these results with an earlier commit, and ``tests/test_formats.py`` compares them with those of the
current code. So this module imports no submodule of opendit, and reads the programs' output with other libraries. All
functions work in the current folder, where a fixture was unpacked.
"""

import json
import re
import runpy
import sys
import tarfile
from pathlib import Path

import numpy as np
from safetensors import safe_open

if __package__:
    from tests.formats import cases
else:  # imported by make.py, where the package ``tests`` is that of the earlier commit
    import cases


def unpack(fixture: str) -> None:
    """Unpack a fixture into the current folder.

    An index of latents has the absolute path of its text encoder. Create such an encoder here and replace the path.
    """
    with tarfile.open(cases.HERE / f"{fixture}.tar.xz") as tar:
        tar.extractall(".", filter="tar")
    for index in Path().glob("*/index.json"):
        content = index.read_text()
        if found := re.search(r'"(/[^"]*/(clip|t5))"', content):
            from tests.encoders import test_text

            (test_text.save_clip if found[2] == "clip" else test_text.save_t5)(Path(found[2]))
            index.write_text(content.replace(found[1], str(Path(found[2]).resolve())))


def run_of(outputs: Path = Path("runs")) -> Path:
    """Return the folder of the only run."""
    (run,) = outputs.glob("[0-9]*-*")
    return run


def module(name: str, *argv: str) -> None:
    """Run ``python -m NAME ARGV`` in this process. Raises SystemExit if the program fails."""
    before = sys.argv
    sys.argv = [name, *argv]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = before


def trained(flags: list[str]) -> list[dict[str, float]]:
    """Train, and return the last lines of the log, without fields that depend on the machine."""
    import train

    train.main(flags)
    lines = [json.loads(line) for line in (run_of() / "log.jsonl").read_text().splitlines()]
    kept = ("step", "epoch", "loss", "grad_norm", "skipped")
    return [{key: line[key] for key in kept} for line in lines[-cases.STEPS :]]


def exported(ckpt: str | Path, *more: str) -> dict[str, np.ndarray]:
    """Convert a checkpoint, file or pipeline with ``python -m opendit.export opendit``, and return the weights."""
    module("opendit.export", "opendit", "--ckpt", str(ckpt), "--output", "exported.safetensors", *more)
    return tensors_of(Path("exported.safetensors"))


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file."""
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def projection(tensors: dict[str, np.ndarray]) -> float:
    """Return a number that depends on every value, and on each value's tensor name and position."""
    return sum(
        float(np.vdot(cases.pattern("projection", name, value.shape).astype(np.float64), value))
        for name, value in tensors.items()
    )


def latents_of(name: str) -> list[dict]:
    """Draw from the run in the current folder, and return statistics of the latents after every step."""
    import opendit

    what, loading, calling = cases.SAMPLES[name]
    run = str(run_of())
    path = "base.safetensors" if "lora" in loading else run
    loading = {key: run if value == "RUN" else value for key, value in loading.items()}
    found = []

    def note(step: int, latents) -> None:
        values = latents.double().cpu().numpy()
        at = {"step": step, "shape": list(values.shape), "norm": float(np.linalg.norm(values))}
        found.append({**at, "projection": projection({"latents": values}), "first": values.reshape(-1)[:8].tolist()})

    pipe = opendit.load(path, device="cpu", precision="fp32", vae="none", **loading)
    pipe(what, steps=cases.DRAWN_STEPS, seed=3, progress=False, callback=note, **{"guidance": 1.5, **calling})
    return found


def drawn(flags: list[str]) -> np.ndarray:
    """Draw with sample.py, and return the pixels (N, H, W, C) uint8."""
    import sample

    sample.main(flags)
    with np.load(flags[flags.index("--npz") + 1]) as file:
        return file["arr_0"]


def evaluated(samples: str, reference: str, **more: str) -> dict[str, float]:
    """Evaluate pictures with the network net.pt, and return name -> figure."""
    import opendit

    flags = {"samples": samples, "reference": reference, "features": "net.pt", "output": "evaluation"}
    found = opendit.evaluate(opendit.EvaluateConfig(**flags, intervals=False, **more))
    return {row.metric: row.value for row in found}
