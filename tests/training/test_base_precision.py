"""LoRA with frozen blocks stored in fewer bits: training on several ranks, resuming, sampling and export."""

import contextlib
import json
import os
import signal
from functools import cache
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException

import train
from opendit.export.__main__ import main as export
from opendit.kernels.base_precision import base_layers
from opendit.parallel import host_memory
from opendit.parallel.host_memory import StreamedBlocks
from opendit.training import build
from tests.encoders.published_folders import write_pipeline
from tests.memory import peak_bytes
from tests.numbers import off_by
from tests.ranks import context, run_ranks, several_programs
from tests.training.test_public_lora import LORA
from tests.training.test_public_training import losses, run, sizes, write_folders  # noqa: F401 (sizes is a fixture)

KINDS = ("fp8", "int8", "nf4")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
# The largest relative difference between a loss and that of a run with unquantized weights.
OFF = {"fp8": 0.03, "int8": 0.01, "nf4": 0.15}
COPIES = 17  # block copies before the one that a signal interrupts, in the third step's backward pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a small FLUX.1 pipeline and with pictures."""
    return write_folders(tmp_path_factory.mktemp("public"), ["flux"])


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    """Return a function that trains with the frozen blocks in a precision, once per precision."""
    return cache(lambda kind: run(folders, "flux", tmp_path_factory.mktemp(kind), *LORA, "--base_precision", kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_whole_weights_within_the_precisions_error(trained, kind):
    assert 0 < off_by(losses(trained(kind)), losses(trained("bf16"))) < OFF[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit(folders, trained, kind, tmp_path):
    half = run(folders, "flux", tmp_path, *LORA, "--base_precision", kind, steps=2)
    run(folders, "flux", tmp_path, *LORA[4:], "--load", str(half), load=True)  # the checkpoint knows its precision, too
    assert losses(half) == losses(trained(kind))
    for file in ("model", "ema", "optimizer_000"):
        one, other = (load_file(each / f"checkpoints/latest/{file}.safetensors") for each in (trained(kind), half))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), file


def on_ranks(mesh, folders, outputs, plugins, kinds) -> None:
    several_programs()
    for plugin in plugins:
        for kind in kinds:
            more = ["--plugin", plugin, "--base_precision", kind, "--sample_every", "4", "--sample_steps", "2"]
            more += [] if plugin == "fsdp" else ["--offload", "blocks", "--grad_checkpoint"]
            run(folders, "flux", outputs / f"{kind} {plugin}", *LORA[:-1], "4", *more)


@pytest.mark.parametrize(
    ("plugins", "kinds"),
    ((("fsdp",), ("fp8", "nf4")), (("fsdp",), ("int8",)), (("zero2", "ddp"), KINDS)),
    ids=("fsdp", "fsdp-int8", "others"),
)
def test_two_ranks_have_the_curve_of_one_and_draw(folders, trained, tmp_path, plugins, kinds):
    run_ranks(2, on_ranks, folders, tmp_path, plugins, kinds)
    for way in tmp_path.iterdir():
        (found,) = way.glob("0*")
        assert off_by(losses(found), losses(trained(way.name.split()[0]))) < 2e-5, way.name
        assert (found / "samples/0000004.png").is_file()


def loaded(mesh, folder, outputs, plugin) -> list[tuple[int, int, int]]:
    """Return for each kind the bytes of this rank's parameters, the peak allocation while they are loaded, and the
    numbers in this rank's largest slice of a stored weight."""
    several_programs()
    build_engine, found = build.build_model_and_engine, []

    def measured(run):
        build_engine(run)  # imports and caches
        made = []
        peak = peak_bytes(lambda: made.append(build_engine(run)))
        module = made[0].module
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
        largest = max(layer.in_features * layer.out_features for _, layer in base_layers(module))
        ranks = mesh.world_size if plugin == "fsdp" else 1
        found.append((sum(part.nbytes for part in parts), peak, largest // ranks))
        return made[0]

    argv = f"--pretrained {folder} --outputs {outputs} --plugin {plugin} --data_path mock --image_size 32 --lora 2 "
    argv += "--batch_size 1 --max_steps 1 --no_save --sample_every 0 --num_workers 0 --mixed_precision fp32"
    with mock.patch.object(build, "build_model_and_engine", measured):
        for kind in KINDS:
            train.main([*argv.split(), "--base_precision", kind])
    return found


@pytest.mark.parametrize(("ranks", "plugin"), [(1, "zero2"), (2, "fsdp")])
def test_loading_holds_one_slice_beside_the_stored_ones(ranks, plugin, tmp_path):
    """The blocks have 10 M weights, at most 0.4 M in a matrix. Quantisation makes up to four fp32 copies of a slice."""
    folder = write_pipeline(tmp_path / "flux", "flux", num_layers=1, num_single_layers=8, num_attention_heads=32)
    whole = sum(tensor.nbytes for tensor in load_file(folder / WEIGHTS).values())
    for found in run_ranks(ranks, loaded, folder, tmp_path, plugin):
        for kind, (held, peak, largest) in zip(KINDS, found, strict=True):
            assert held < (0.2 if kind == "nf4" else 0.31) * whole / (ranks if plugin == "fsdp" else 1), kind
            assert peak < held + 4 * 4 * largest + 1_000_000, (kind, peak - held, largest)


def test_its_lora_is_merged_into_the_folders_own_weights(folders, trained, tmp_path):
    file, merged = tmp_path / "style.safetensors", tmp_path / "merged"
    export(["lora", "--ckpt", str(trained("nf4")), "--output", str(file)])
    export(["diffusers", "--ckpt", str(trained("nf4")), "--base", str(folders / "flux"), "--output", str(merged)])
    before, after = load_file(folders / "flux" / WEIGHTS), load_file(merged / WEIGHTS)
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    layers = {key.split(".lora_")[0].removeprefix("transformer.") for key in load_file(file)}
    assert changed == {f"{layer}.weight" for layer in layers}
    key = next(key for key in sorted(changed) if "to_out" in key)
    added = torch.linalg.svdvals((after[key] - before[key]).double())
    assert added[2] < 1e-5 * added[0]  # rank 2, added to the folder's weights and not to the quantized ones


@pytest.mark.parametrize(
    ("more", "message"),
    (
        ("--base_precision nf4 --compile", "--base_precision nf4: does not work with --compile, which can't follow"),
        ("--offload blocks", "--offload blocks: only recomputed blocks can be in host memory; add --recompute but_"),
        ("--offload block", "--offload block: not known; give one of none, average, state, blocks;"),
        ("--offload blocks --plugin fsdp", "--offload blocks: only recomputed blocks can be in host memory; add"),
        ("--base_precision int8 --sequence_parallel_size 2", "--sequence_parallel_size, whose ranks send"),
    ),
)
def test_refusals(folders, more, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(folders, "flux", tmp_path, *LORA, *more.split())
    assert message in capsys.readouterr().err


def test_the_kind_is_recorded(trained):
    assert json.loads((trained("nf4") / "config.json").read_text())["flags"]["base_precision"] == "nf4"


@pytest.mark.parametrize(("offload", "plugin"), (("blocks", "zero2"), ("blocks:2", "ddp")))
def test_blocks_in_host_memory_change_no_bit(folders, tmp_path, capsys, offload, plugin):
    """Runs with recomputed blocks match, samples included, whether or not blocks are kept in host memory."""
    more = ("--grad_checkpoint", "--base_precision", "nf4", "--sample_every", "4", "--sample_steps", "2")
    resident = run(folders, "flux", tmp_path / "resident", *LORA, *more)
    found = run(folders, "flux", tmp_path / plugin, *LORA, *more, "--offload", offload, "--plugin", plugin)
    assert "in host memory, copied when due" in capsys.readouterr().out
    assert off_by(losses(found), losses(resident)) < 1e-6
    if plugin == "zero2":
        assert losses(found) == losses(resident)
        for file in ("checkpoints/latest/model.safetensors", "samples/0000004.png"):
            assert (found / file).read_bytes() == (resident / file).read_bytes(), file


def train_until(number: int, folders, outputs, more: list[str]) -> None:
    """Train, and get a signal while a block is half copied into the ring, in the third step's backward pass."""
    copy, copies = vars(StreamedBlocks)["_copy"], iter(range(10**6))

    def interrupted(self, block: int) -> None:
        if next(copies) == COPIES:
            self.slots[0][: len(self.slots[0]) // 2].fill_(255)
            os.kill(os.getpid(), number)
        copy(self, block)

    # The ring has one slot, so each of the model's four blocks is copied again in every pass.
    with mock.patch.object(StreamedBlocks, "_copy", interrupted), mock.patch.object(host_memory, "AHEAD", 0):
        run(folders, "flux", outputs, *LORA, *more)


WHOLE = "--lr 1e-3 --ema_decay 0.1 --no_ema_warmup --batch_size 4 --plugin fsdp".split()
FROZEN = (*LORA[:-1], "4", "--plugin", "fsdp")
GATHERS = 380  # shards gathered, 140 a step, before the one that a signal interrupts, in the third backward pass


def on_two(mesh, folders, outputs, how, number, more) -> None:
    """Train on two ranks. Both get the signal ``number``, unless it is 0, while a shard is gathered in step three."""
    several_programs()
    inputs, gathers = vars(FSDPParam)["all_gather_inputs"], iter(range(10**6))

    def interrupted(self):
        found = inputs.fget(self)
        if self.offload_to_cpu and next(gathers) == GATHERS:
            os.kill(os.getpid(), number)
        return found

    patched = mock.patch.object(FSDPParam, "all_gather_inputs", property(interrupted))
    with patched if number else contextlib.nullcontext():
        run(folders, "flux", outputs, *how, *more, load="--load" in more)


@pytest.mark.parametrize(
    "how", [WHOLE, FROZEN, (*FROZEN, "--base_precision", "nf4")], ids=["all weights", "LoRA", "nf4"]
)
def test_shards_in_host_memory_change_no_bit_of_a_run(folders, tmp_path, how):
    """Under fsdp on two ranks, a run is the same with all shards on the device and with some in host memory. The same
    holds if the run is killed or stopped while a block is copied, and resumed."""

    def trained(name, number, *more):
        run_ranks(2, on_two, folders, tmp_path / name, how, number, ["--ckpt_every", "1", *more])
        return sorted((tmp_path / name).glob("0*"))[-1]

    offload = ["--offload", "blocks"]
    resident, ways = (
        trained("resident", 0),
        [trained("blocks", 0, *offload), trained("one", 0, "--offload", "blocks:1")],
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        name = number.name
        with contextlib.nullcontext() if number == signal.SIGTERM else pytest.raises(ProcessExitedException):
            trained(name, number, *offload)
        (stopped,) = (tmp_path / name).glob("0*")
        assert len(losses(stopped)) == (3 if number == signal.SIGTERM else 2)
        trained(name, 0, *offload, "--load", str(stopped))
        ways.append(stopped)
    for found in ways:
        assert losses(found) == losses(resident)
        for file in (resident / "checkpoints/latest").glob("*.safetensors"):
            other = found / "checkpoints/latest" / file.name
            assert other.read_bytes() == file.read_bytes(), (found, file.name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_while_a_block_travels_costs_no_bit(folders, tmp_path, number):
    more = ["--grad_checkpoint", "--offload", "blocks", "--ckpt_every", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = context().Process(target=train_until, args=(number, folders, parts, more))
    process.start()
    process.join(120)
    assert process.exitcode == (-number if number == signal.SIGKILL else 0)
    (stopped,) = parts.glob("0*")
    assert len(losses(stopped)) == (2 if number == signal.SIGKILL else 3)
    run(folders, "flux", parts, *LORA[4:], *more, "--load", str(stopped), load=True)
    undisturbed = run(folders, "flux", whole, *LORA, *more)
    assert losses(stopped) == losses(undisturbed)
    for file in ("model", "ema", "optimizer_000"):
        name = f"checkpoints/latest/{file}.safetensors"
        assert (stopped / name).read_bytes() == (undisturbed / name).read_bytes(), file
