"""Record the results of short runs, so that a test can show that a redesign does not change them.

    python -m tests.recorded_runs              # records all runs; tests/test_recorded_runs.py compares
    python -m tests.recorded_runs MovieGen     # only MovieGen, whose meaning was changed on purpose

train.py makes each run on random latents, in fp32 on a CPU. The record of a run has the loss and the gradient norm of 8
steps, the gradient norm of every parameter in the first step, and the contents of the checkpoint. The gradients come
from the checkpoint of the first step, where Adam's first moment is (1 - beta1) times the gradient. So the record does
not depend on the structure of the program. For every objective and sampler, the record also has the latents that a
model with fixed weights draws.
"""

import json
import math
import os
import platform
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors import safe_open

RECORDED = Path(__file__).with_suffix(".json")
STEPS = 8
COMMON = (
    "--data_path mock --mixed_precision fp32 --batch_size 4 --num_workers 0 --log_every 1 --sample_every 0 "
    "--ckpt_every 0 --grad_clip 0 --lr 1e-3 --global_seed 7 --adam_beta1 0.9 --no_ema_warmup"
)
PICTURES, CLIPS = "--image_size 64", "--image_size 64 --use_video --num_frames 4"
ARCHITECTURES = {
    "DiT": f"--model DiT-Ti/2 {PICTURES} --num_classes 10",
    "vDiT": f"--model vDiT-Ti/122 {CLIPS} --text_encoder bytes",
    "ST-DiT": f"--model ST-DiT-Ti/122 {CLIPS} --text_encoder bytes",
    "MovieGen": f"--model MovieGen-Ti/122 {CLIPS} --text_encoder bytes",
    "EC-DiT": f"--model EC-DiT-Ti/2 {PICTURES} --num_classes 10",
}
OBJECTIVES = {"ddpm": "", "flow": "--objective flow --flow_shift 3", "edm": "--objective edm"}
FOR = {"sp 2": ("DiT", "vDiT"), "recompute": ("DiT", "vDiT")}  # the other architectures do not support these variants
VARIANTS = {
    "accumulation": "--grad_accumulation 2 --batch_size 2",
    "recompute": "--recompute half",
    "grad_checkpoint": "--grad_checkpoint",
    "sp 2": "--sequence_parallel_size 2",
    "lora": "--lora 4 --pretrained {base}",
}


def training_cases() -> dict[str, str]:
    """Return name -> train.py's flags for every architecture with every objective, and with every variant of ddpm."""
    cases = {f"{a}, {o}": f"{ARCHITECTURES[a]} {OBJECTIVES[o]}" for a in ARCHITECTURES for o in OBJECTIVES}
    for variant, flags in VARIANTS.items():
        cases |= {f"{a}, {variant}": f"{ARCHITECTURES[a]} {flags}" for a in FOR.get(variant, ARCHITECTURES)}
    return {name: f"{COMMON} {flags}" for name, flags in cases.items()}


def record_training(flags: str, folder: Path) -> dict | None:
    """Train with these flags for 1 and for STEPS steps. Return the results on rank 0, and None on other ranks."""
    import train

    if "{base}" in flags:
        base = flags.split(" --lora")[0]
        train.main([*base.split(), "--max_steps", "1", "--outputs", str(folder / "base")])
        flags = flags.format(base=_only(folder / "base"))
    for steps in (1, STEPS):
        train.main([*flags.split(), "--max_steps", str(steps), "--outputs", str(folder / str(steps))])
    if int(os.environ.get("RANK", "0")):
        return None
    lines = [json.loads(line) for line in (_only(folder / str(STEPS)) / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    first = _only(folder / "1") / "checkpoints" / "latest"
    files = sorted(first.resolve().glob("*.safetensors"))
    return {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "first_gradients": _first_gradients(files),
        "checkpoint": {path.name: _contents(path) for path in files if not path.name.startswith("optimizer")},
        "files": sorted(path.name for path in first.resolve().iterdir()),
    }


def _only(outputs: Path) -> Path:
    (run,) = outputs.glob("*-*")
    return run


def _first_gradients(files: list[Path]) -> dict[str, float]:
    norms = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name.startswith("exp_avg."):
                    norm = file.get_tensor(name).double().norm().item() / (1 - 0.9)
                    norms[name.removeprefix("exp_avg.")] = norm
    return dict(sorted(norms.items()))


def _contents(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def record_sampling() -> dict[str, list[float]]:
    """Return "objective, sampler" -> first 32 elements and norm of the latents that a DiT with fixed weights draws."""
    from opendit.diffusion.objectives import OBJECTIVES as KINDS
    from opendit.diffusion.objectives.base import sample_latents
    from opendit.models.zoo import build_model, model_config

    drawn = {}
    for name in OBJECTIVES:  # objectives that existed when the file was recorded
        objective = KINDS[name]()
        shape = dict(input_size=(4, 6), in_channels=3, num_classes=5, learn_sigma=objective.learn_sigma)
        model = build_model(model_config("DiT-Ti/2", **shape)).eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():  # not the initial values, because zeros ignore the input
            parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
        y, null = torch.tensor([0, 3]), torch.tensor([5])
        for sampler in objective.samplers:
            settings = dict(objective=objective, sampler=sampler, seed=3, steps=5, cfg_scale=2.0)
            latents = sample_latents(model, y, null, torch.arange(2), **settings).double()
            drawn[f"{name}, {sampler}"] = [*latents.flatten()[:32].tolist(), latents.norm().item()]
    return drawn


def machine() -> dict[str, str]:
    """Return properties that affect rounding, because another machine or torch may add in another order."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "arch": platform.machine()}


def record_case(name: str) -> dict:
    """Run one of ``training_cases()`` on the number of processes that it needs, and return the results."""
    from tests.ranks import run_ranks

    flags = training_cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        world = 2 if "--sequence_parallel_size 2" in flags else 1
        return run_ranks(world, _on_a_rank, flags, folder)[0]


def _on_a_rank(mesh, flags: str, folder: str) -> dict | None:
    from tests.ranks import several_programs

    several_programs()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return record_training(flags, Path(folder))


def main(asked: list[str]) -> None:
    """Record the cases whose names begin with one of ``asked`` ("MovieGen" "DiT, lora"), or all. Others stay."""
    torch.set_num_threads(1)
    content = json.loads(RECORDED.read_text()) if asked else {"training": {}}
    content |= {"machine": machine(), "sampling": record_sampling()}
    for name in training_cases():
        if not asked or any(name.startswith(beginning) for beginning in asked):
            content["training"][name] = record_case(name)
            losses = content["training"][name]["loss"]
            print(f"{name}: {losses[0]:.6f} to {losses[-1]:.6f}", flush=True)
    RECORDED.write_text(json.dumps(content, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{RECORDED}: {RECORDED.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
