"""Compare two trees of this project bit for bit: the loss, every gradient and all state of each step.

    git archive COMMIT opendit train.py | tar -x -C .old
    python benchmarks/compare_trees.py --trees .old .                  # the cases for one GPU
    python benchmarks/compare_trees.py --trees .old . --ranks 2        # the cases for two GPUs
    python benchmarks/compare_trees.py --trees .old . --cpu            # small cases, without a GPU

For each case both trees run their own `train.py --deterministic --adam_beta1 0` and save a checkpoint after each step.
With a beta1 of 0 Adam's first moment is the gradient, so the checkpoints hold every gradient. Only the flags and the
names of tensors on disk must be the same in both trees. The exit code is 1 if a number differs.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

COMMON = (
    "--data_path mock --num_workers 0 --log_every 1 --sample_every 0 --validate_every 0 --ckpt_every 1 --adam_beta1 0 "
    "--checkpoint_format whole --deterministic --no_ema_warmup --global_seed 7 --lr 1e-3"
)
FUSED = "--enable_layernorm_kernel --enable_modulate_kernel --enable_flashattn --mixed_precision bf16"
PICTURES = f"--model DiT-S/2 --image_size 256 --batch_size 16 {FUSED}"
CLIPS = f"--model vDiT-S/122 --use_video --num_frames 8 --image_size 128 --batch_size 4 --text_encoder bytes {FUSED}"
FSDP = "--plugin fsdp"
# Name -> (ranks, steps, flags).
CASES = {
    "bf16": (1, 10, PICTURES),
    "bf16, graph": (1, 10, f"{PICTURES} --enable_cuda_graph"),
    "fp8": (1, 10, f"{PICTURES} --fp8"),
    "fp8, graph": (1, 10, f"{PICTURES} --fp8 --enable_cuda_graph"),
    "packs": (1, 10, f"{PICTURES} --data_path {{pictures}} --vae none --image_size 32 --pack_tokens 1024"),
    "clips": (1, 10, CLIPS),
    "DiT-XL/2, recompute": (1, 3, f"{PICTURES} --model DiT-XL/2 --recompute half"),
    "zero2": (2, 10, PICTURES),
    "fsdp": (2, 10, f"{PICTURES} {FSDP}"),
    "fsdp, recompute": (2, 10, f"{PICTURES} {FSDP} --recompute half"),
    "sp": (2, 10, f"{PICTURES} --sequence_parallel_size 2"),
    "sp, ulysses": (2, 10, f"{CLIPS} --sequence_parallel_size 2 --sequence_parallel_type ulysses"),
    "tp": (2, 10, f"{PICTURES} --tensor_parallel_size 2"),
    "pp": (2, 10, f"{PICTURES} --pipeline_parallel_size 2 --grad_accumulation 2 --checkpoint_format sharded"),
    "ep": (2, 10, f"{PICTURES} --model EC-DiT-Ti/2 {FSDP} --expert_parallel_size 2"),
}
TINY = "--model DiT-Ti/2 --image_size 64 --num_classes 10 --batch_size 4 --mixed_precision fp32"
TINY_CLIPS = "--use_video --num_frames 4 --image_size 64 --text_encoder bytes --batch_size 4 --mixed_precision fp32"
ON_CPU = {
    "fp32": (1, 4, TINY),
    "flow, accumulation": (1, 4, f"{TINY} --objective flow --grad_accumulation 2"),
    "edm, recompute": (1, 4, f"{TINY} --objective edm --recompute half"),
    "packs": (1, 4, f"{TINY} --data_path {{pictures}} --vae none --image_size 32 --pack_tokens 512"),
    "buckets": (1, 4, f"{TINY} --data_path {{pictures}} --vae none --image_size 32 --bucket_tokens 256"),
    "clips": (1, 4, f"{TINY_CLIPS} --model vDiT-Ti/122"),
    "ST-DiT": (1, 4, f"{TINY_CLIPS} --model ST-DiT-Ti/122"),
    "MovieGen": (1, 4, f"{TINY_CLIPS} --model MovieGen-Ti/122"),
    "EC-DiT": (1, 4, f"{TINY} --model EC-DiT-Ti/2"),
    "zero2": (2, 4, TINY),
    "fsdp": (2, 4, f"{TINY} {FSDP}"),
    "sp": (2, 4, f"{TINY} --sequence_parallel_size 2"),
    "tp": (2, 4, f"{TINY} --tensor_parallel_size 2"),
    "pp": (2, 4, f"{TINY} --pipeline_parallel_size 2 --grad_accumulation 2 --checkpoint_format sharded"),
    "ep": (2, 4, f"{TINY} --model EC-DiT-Ti/2 {FSDP} --expert_parallel_size 2"),
}


def train(tree: Path, ranks: int, steps: int, flags: str, outputs: Path) -> Path:
    """Run a tree's train.py and return its run folder. Raises RuntimeError with the error that it printed."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["train.py", *shlex.split(f"{COMMON} {flags}"), "--max_steps", str(steps), "--outputs", str(outputs)]
    # The tree comes before an installed opendit. The rest of the path may hold packages that the tree needs.
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *words], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        printed = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(next((line for line in printed if "error: " in line), printed[-1]))
    (folder,) = outputs.glob("*-*")
    return folder


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors by set and name. The set is the file's name without the writing rank."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        name_of_set = re.sub(r"_\d{3}$", "", path.stem)
        with safe_open(path, framework="pt") as file:
            found |= {f"{name_of_set}/{name}": file.get_tensor(name) for name in file.keys()}
    return found


def compare(old: Path, new: Path, steps: int) -> str | None:
    """Return the first difference between two runs in one line, or None if all numbers are the same."""
    lines = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (old, new)]
    for ours, theirs in zip(*lines, strict=True):
        for key in ("step", "loss", "grad_norm", "lr"):
            if ours[key] != theirs[key]:
                return f"step {ours['step']}: {key} {ours[key]} -> {theirs[key]}"
    for step in range(1, steps + 1):
        before, after = (state(run / f"checkpoints/step_{step:07d}") for run in (old, new))
        if before.keys() != after.keys():
            return f"step {step}: other tensors: {sorted(before.keys() ^ after.keys())[:3]}"
        # The first moments "exp_avg.NAME" are the gradients.
        different = [name for name in before if not torch.equal(before[name], after[name])]
        if different:
            largest = max(different, key=lambda name: (before[name] - after[name]).abs().max().item())
            gap = (before[largest] - after[largest]).abs().max().item()
            return f"step {step}: {len(different)} of {len(before)} tensors differ, most {largest}, by {gap:.3g}"
    return None


def make_pictures(folder: Path) -> None:
    """Write 64 pictures of several shapes in four class folders."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(64):
        height, width = random.choice([16, 24, 32, 48], 2)
        target = folder / f"class{number % 4}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, type=Path, required=True, metavar=("OLD", "NEW"))
    parser.add_argument(
        "--ranks", type=int, default=1, choices=(1, 2), help="run the cases of this number of processes"
    )
    parser.add_argument("--cpu", action="store_true", help="run the small cases, of any number of processes")
    parser.add_argument("--only", nargs="+", help="run only these cases")
    arguments = parser.parse_args()
    cases = ON_CPU if arguments.cpu else {name: case for name, case in CASES.items() if case[0] == arguments.ranks}
    if arguments.only:
        cases = {name: cases[name] for name in arguments.only}
    trees, failed = [tree.resolve() for tree in arguments.trees], False
    with tempfile.TemporaryDirectory() as scratch:
        pictures = Path(scratch, "pictures")
        make_pictures(pictures)
        for name, (ranks, steps, flags) in cases.items():
            try:
                old, new = [
                    train(tree, ranks, steps, flags.format(pictures=pictures), Path(scratch, f"run{side}"))
                    for side, tree in enumerate(trees)
                ]
                verdict = compare(old, new, steps)
            except RuntimeError as error:
                verdict = f"did not run: {error}"
            for side in range(2):
                shutil.rmtree(Path(scratch, f"run{side}"), ignore_errors=True)
            failed |= verdict is not None
            print(f"{name:24} {'equal' if verdict is None else verdict}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
