"""train.py with --plugin fsdp: LoRA, whose frozen weights are cut and gathered too, against one process."""

import json
from pathlib import Path

import train
from tests.numbers import off_by
from tests.ranks import run_ranks, several_programs

RUN = (
    "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --num_workers 0 --log_every 1 --lr 1e-2 "
    "--sample_every 0 --mixed_precision fp32 --deterministic"
)


def programs(mesh, runs: list[str]) -> None:
    several_programs()
    for flags in runs:
        train.main(f"{RUN} {flags}".split())


def losses(outputs: Path) -> list[float]:
    (log,) = outputs.glob("*/log.jsonl")
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_lora_and_its_resumption_follow_one_process(tmp_path):
    lora = f"--lora 4 --pretrained {tmp_path}/base/000-DiT-Ti-2"
    base = f"--batch_size 4 --max_steps 6 --outputs {tmp_path}/base"
    run_ranks(1, programs, [base, f"{lora} --batch_size 8 --max_steps 8 --outputs {tmp_path}/one"])
    fsdp = f"{lora} --plugin fsdp --outputs {tmp_path}"
    runs = [
        f"{fsdp}/freed --reshard after_forward --batch_size 4 --max_steps 5 --offload average",
        f"{fsdp}/freed --reshard after_forward --batch_size 4 --max_steps 8 --load latest --offload state",
        f"{fsdp}/split --batch_size 2 --grad_accumulation 2 --max_steps 8",
    ]
    run_ranks(2, programs, runs)
    for name in ("freed", "split"):
        assert off_by(losses(tmp_path / name), losses(tmp_path / "one")) < 1e-5, name
