"""The host memory is found, and runs are refused if what --offload keeps there does not fit."""

import os
import re

import pytest

import train
from benchmarks.random_folder import write_folder
from opendit.models.finetuning import Lora
from opendit.models.zoo import model_config
from opendit.training import memory
from opendit.training.memory import GIB, RING, Setup, describe

XL = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)
ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("group", "files", "found"),
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/", {"memory.max": "2000"}, 2000),
        ("0::/elsewhere", {"memory.max": "3000"}, 3000),  # the path is outside of what the container sees
        ("3:cpu:/\n2:memory,pids:/c\n0::/", {"memory/c/memory.limit_in_bytes": "4000"}, 4000),
        ("2:memory:/c", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, ALL),  # no limit
        ("nothing to read", {}, ALL),
        (None, {}, ALL),
    ],
)
def test_a_container_may_have_less_than_its_machine(group, files, found, tmp_path):
    if group is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert memory.host_memory(tmp_path) == found


def test_offload_that_the_machine_has_no_room_for_is_refused(monkeypatch):
    """DiT-XL/2 on 8 ranks, 4 of them here, needs 1.26 GiB for averages, 2.51 for moments and 5.03 for saving."""
    one = 4 * XL.parameters() / 8 * 4 / GIB

    def checked(offload: str, room: float, saves: bool = True) -> str | None:
        monkeypatch.setattr(memory, "host_memory", lambda: room * GIB / memory.USABLE_OF_A_HOST)
        try:
            memory.check_offload(XL, Setup("fsdp", "bf16", 8, offload=offload), 4, 4, saves)
        except ValueError as error:
            return str(error)
        return None

    assert one == pytest.approx(1.257, abs=0.001)
    assert checked("average", 5.01 * one) is None and checked("state", 7.01 * one) is None
    assert checked("state", 3.01 * one, saves=False) is None and checked("none", 0.1) is None
    said = checked("state", 6.9 * one)
    assert said.startswith("--offload state: keeps 3.8 GiB in host memory, saves take 5.0 more, and of the 10.8 GiB")
    assert said.endswith("80% can be used; take --offload average or --offload none or --no_save or more machines")
    said = checked("average", 0.9 * one, saves=False)
    assert said.endswith("take --offload none or more machines") and "saves" not in said
    assert "--no_save" not in checked("state", 2.9 * one)


def test_blocks_that_the_machine_has_no_room_for_are_refused(monkeypatch):
    """Each of two processes keeps 28 frozen blocks in bf16. A block has 43.7 M weights, which are 84 MiB."""
    one = 2 * XL.whole_block_parameters() / GIB

    def checked(offload: str, room: float) -> str | None:
        monkeypatch.setattr(memory, "host_memory", lambda: room * GIB / memory.USABLE_OF_A_HOST)
        setup = Setup(world=2, lora=Lora(4, 4.0, ""), recompute="but_attention", offload=offload)
        try:
            memory.check_offload(XL, setup, 4, 2, saves=False)
        except ValueError as error:
            return str(error)
        return None

    assert checked("blocks", 2 * 28.01 * one) is None and checked("blocks:9", 2 * 9.01 * one) is None
    said = checked("blocks", 2 * 27.9 * one)
    assert said.startswith(f"--offload blocks: keeps {2 * 28 * one:.1f} GiB in host memory and of the ")
    assert said.endswith("can be used; take --offload blocks:27 or --offload none or more machines")
    assert checked("blocks:9", one).endswith("can be used; take --offload none or more machines")


def test_trained_blocks_that_the_machine_has_no_room_for_are_refused(monkeypatch):
    """Each of two processes keeps half of the blocks' master weights, gradients, moments and averages."""
    setup = Setup("fsdp", "bf16", 2, offload="blocks")
    host = memory.estimate(XL, setup, 4).host_total

    def checked(room: float) -> str | None:
        monkeypatch.setattr(memory, "host_memory", lambda: 2 * room / memory.USABLE_OF_A_HOST)
        try:
            memory.check_offload(XL, setup, 4, 2, saves=False)
        except ValueError as error:
            return str(error)
        return None

    assert checked(1.001 * host) is None
    said = checked(0.99 * host)
    assert said.startswith(f"--offload blocks: keeps {2 * host / GIB:.1f} GiB in host memory and of the ")
    assert said.endswith(
        "take --offload blocks:27 or --offload state or --offload average or --offload none or more machines"
    )
    state = memory.estimate(XL, Setup("fsdp", "bf16", 2, offload="state"), 4).host_total
    assert "take --offload state or --offload average" in checked(state * 1.001)  # room for the state, but for no block


@pytest.mark.parametrize(
    ("offload", "room", "kept"), [("average", 0.1, r"0\.1"), ("state", 0.1, r"0\.4"), ("blocks", 10, r"1[12]\.\d")]
)
def test_a_run_without_the_room_ends_in_one_line_before_it_starts(offload, room, kept, tmp_path, monkeypatch, capsys):
    """DiT-S/2's average has 33 M numbers in fp32, its state three times as many. FLUX.1's blocks have 11.8 G weights,
    which take a byte each."""
    monkeypatch.setattr(memory, "host_memory", lambda: room * GIB)
    argv = "--model DiT-S/2 --vae none --image_size 32 --plugin fsdp"
    if offload == "blocks":
        write_folder("flux", tmp_path / "flux", empty=True)
        argv = f"--pretrained {tmp_path}/flux --lora 4 --grad_checkpoint --base_precision fp8"
    argv += f" --data_path mock --batch_size 1 --max_steps 1 --offload {offload} --outputs {tmp_path}/runs"
    with pytest.raises(SystemExit) as stop:
        train.main(argv.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1, said
    assert re.match(f"error: --offload {offload}: keeps {kept} GiB in host memory, saves take ", said), said
    assert f"of the {room:.1f} GiB of this machine 80% can be used; take " in said
    assert not list(tmp_path.glob("runs/*"))


def test_the_line_on_memory_says_what_lies_where():
    setup = Setup("fsdp", "bf16", 8, reshard="never", offload="state")
    share = 4 * XL.parameters() / 8 / GIB
    on_gpu, on_cpu = (describe(XL, setup, 4, capacity) for capacity in (80 * GIB, None))
    ring = RING / GIB  # a CPU has no ring and no CUDA libraries
    assert (
        f"states {share + ring:.2f}, " in on_gpu and f"; in host memory moments and averages {3 * share:.2f}" in on_gpu
    )
    total = float(on_gpu.split(" GiB")[0])
    assert float(on_cpu.split(" GiB")[0]) == pytest.approx(total - 0.18 - ring + 3 * share, abs=0.01)
