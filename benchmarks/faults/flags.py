"""Faults: flags that make no sense. The program must print one line and exit with code 2 before slow imports.

Each fault runs in a new interpreter, so the seconds are what a user waits.
"""

import shlex
import sys
from collections.abc import Callable

from benchmarks.faults.lab import ENDS_WITHIN, Lab, add, fault
from benchmarks.faults.processes import ROOT

AT_ONCE = 6.0  # seconds; on two idle cores an answer takes less than 1.5


LOOKS = ("text_encoder_on_classes", "cfg_channels_99")  # need torch, to open data or a checkpoint first


def refused(program: str, flags: str, says: str, within: float) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        start = [sys.executable, ROOT / program] if program.endswith(".py") else [sys.executable, "-m", program]
        lab.now()
        ended = lab.programs.run(*start, *shlex.split(flags))
        lab.ends(ended, {2}, f"error: .*({says})", within=within)
        lines = [line for line in ended.stderr.read_text().splitlines() if line.strip()]
        lab.require(len(lines) == 1, f"{len(lines)} lines")
        files = (path for path in lab.programs.folder.rglob("*") if path.is_file())
        made = sorted(path.name for path in files if path.suffix not in (".stdout", ".stderr"))
        lab.require(not made, f"made {made}")

    return make


WRONG = {
    "unknown_flag": ("train.py", "--batch_sise 4", "--batch_size"),
    "sample_steps_5000": ("train.py", "--sample_steps 5000", "--sample_steps"),
    "global_seed_2_to_70": ("train.py", f"--global_seed {2**70}", "--global_seed"),
    "image_size_million": ("train.py", "--image_size 1000000", "--image_size"),
    "num_classes_trillion": ("train.py", f"--num_classes {10**12}", "--num_classes"),
    "num_workers_5000": ("train.py", "--num_workers 5000", "--num_workers"),
    "batch_size_0": ("train.py", "--batch_size 0", "--batch_size"),
    "lr_nan": ("train.py", "--lr nan", "--lr"),
    "lr_minus": ("train.py", "--lr -1", "--lr"),
    "ema_decay_2": ("train.py", "--ema_decay 2", "--ema_decay"),
    "ema_decay_twice": ("train.py", "--ema_decay 0.9 0.9", "--ema_decay"),
    "load_empty": ("train.py", '--load ""', "--load"),
    "outputs_empty": ("train.py", '--outputs ""', "--outputs"),
    "model_unknown": ("train.py", "--model DiT-XXL/2", "DiT-XL/2"),
    "lora_alpha_alone": ("train.py", "--lora_alpha 8", "--lora"),
    "text_encoder_on_classes": ("train.py", "--text_encoder t5", "--text_encoder"),
    "flow_shift_of_ddpm": ("train.py", "--flow_shift 3", "--flow_shift"),
    "accumulation_1e18": ("train.py", f"--grad_accumulation {10**18}", "--grad_accumulation"),
    "cfg_channels_99": ("sample.py", "--cfg_channels 99", "--cfg_channels|no run"),
    "num_samples_trillion": ("sample.py", f"--num_samples {10**12}", "--num_samples"),
    "cfg_scale_inf": ("sample.py", "--cfg_scale inf", "--cfg_scale"),
    "seed_2_to_70": ("sample.py", f"--seed {2**70}", "--seed"),
    "output_empty": ("sample.py", '--output ""', "--output"),
    "npz_is_a_folder": ("sample.py", "--npz /", "--npz"),
    "demo_size": ("preprocess.py", "demo --size 100000", "--size"),
    "latents_workers": (
        "preprocess.py",
        "latents --data_path x --output y --num_workers -3",
        "--num_workers",
    ),
    "no_command": ("preprocess.py", "latent --data_path x", "latents"),
    "export_nowhere": ("opendit.export", "meta --ckpt x --output /no/such/folder/x.pt", "--output|--ckpt"),
}
for _name, (_program, _flags, _says) in WRONG.items():
    _shown = _flags if len(_flags) < 60 else f"{_flags[:57]}..."
    _judge = refused(_program, _flags, _says, ENDS_WITHIN if _name in LOOKS else AT_ONCE)
    add(_name, "flags", f"{_program} {_shown}", _judge)


@fault("train.py --help: how long it takes")
def help_at_once(lab: Lab) -> None:
    for program in ("train.py", "sample.py"):
        lab.now()
        lab.ends(lab.programs.run(sys.executable, ROOT / program, "--help"), {0}, within=AT_ONCE)


@fault("the log of a run in a file: its progress takes lines, few of them")
def progress_in_a_file(lab: Lab) -> None:
    programs = lab.train()
    lab.goes_on(programs, 0)
    lab.require("\r" not in lab.said, "carriage returns in a file")
    lab.same_weights()
