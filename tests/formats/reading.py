"""Read the fixtures of formats through the programs' public doors alone, and return what came of it.

``make.py`` records these values with an earlier commit, and ``tests/test_formats.py`` compares them with today's. So
nothing here imports a module below opendit, and files that a program writes are read by other libraries. All functions
work in the current folder, where a fixture was unpacked.
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
else:  # of make.py, beside which the tests of the earlier commit lie
    import cases


def unpack(fixture: str) -> None:
    """Unpack a fixture into the current folder. An index of latents names their text encoder by its absolute path: it
    gets the path of one that is made here."""
    with tarfile.open(cases.HERE / f"{fixture}.tar.xz") as tar:
        tar.extractall(".", filter="tar")
    for index in Path().glob("*/index.json"):
        content = index.read_text()
        if found := re.search(r'"(/[^"]*/(clip|t5))"', content):
            from tests.encoders import test_text

            (test_text.save_clip if found[2] == "clip" else test_text.save_t5)(Path(found[2]))
            index.write_text(content.replace(found[1], str(Path(found[2]).resolve())))


def run_of(outputs: Path = Path("runs")) -> Path:
    """Return the only run's folder."""
    (run,) = outputs.glob("[0-9]*-*")
    return run


def module(name: str, *argv: str) -> None:
    """Run ``python -m NAME ARGV`` in this process. Raises SystemExit as it does."""
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
    """Train, and return the last lines of the log, without what depends on the machine."""
    import train

    train.main(flags)
    lines = [json.loads(line) for line in (run_of() / "log.jsonl").read_text().splitlines()]
    kept = ("step", "epoch", "loss", "grad_norm", "skipped")
    return [{key: line[key] for key in kept} for line in lines[-cases.STEPS :]]


def exported(ckpt: str | Path, *more: str) -> dict[str, np.ndarray]:
    """Return the weights that ``python -m opendit.export opendit`` writes of a checkpoint, file or pipeline."""
    module("opendit.export", "opendit", "--ckpt", str(ckpt), "--output", "exported.safetensors", *more)
    return tensors_of(Path("exported.safetensors"))


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file."""
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def projection(tensors: dict[str, np.ndarray]) -> float:
    """Return one number that depends on every value and on the name and place where it is."""
    return sum(
        float(np.vdot(cases.pattern("projection", name, value.shape).astype(np.float64), value))
        for name, value in tensors.items()
    )


def latents_of(name: str) -> list[dict]:
    """Draw from the run in the current folder, and return what the latents are after every step."""
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
    """Draw by sample.py, and return the pixels (N, H, W, C) uint8."""
    import sample

    sample.main(flags)
    with np.load(flags[flags.index("--npz") + 1]) as file:
        return file["arr_0"]


def evaluated(samples: str, reference: str, **more: str) -> dict[str, float]:
    """Evaluate pictures by the network net.pt, and return the figures by name."""
    import opendit

    flags = {"samples": samples, "reference": reference, "features": "net.pt", "output": "evaluation"}
    found = opendit.evaluate(opendit.EvaluateConfig(**flags, intervals=False, **more))
    return {row.metric: row.value for row in found}
