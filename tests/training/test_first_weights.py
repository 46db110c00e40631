"""With --pretrained and --lora, all plugins get a full model's weights, and with fsdp no rank allocates all."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from opendit.checkpoint.pretrained import METADATA_KEY, read_newest
from opendit.checkpoint.tensor_set import ShardedTensor, ShardIndex, index_text, shard_file
from opendit.config.parallel_sizes import ParallelDims
from opendit.models.attention import local_attention
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import Lora, add_lora
from opendit.models.initialization import initialize
from opendit.models.layers import TORCH_OPS
from opendit.models.zoo import Weights, build_model, model_config
from opendit.parallel.engines import Engine
from opendit.parallel.fsdp import Sharding
from opendit.parallel.layout import Layout, dim_cut
from opendit.parallel.mesh import Mesh
from opendit.training.build import build_model_and_engine
from opendit.training.run import Run
from tests.first_weights import taken_over
from tests.memory import peak_bytes
from tests.models.test_dit import randomised
from tests.parallel.test_layout import mesh_of
from tests.ranks import run_ranks

SEED = 5
SIZES = dict(input_size=(8, 8), in_channels=2)


def of(name: str = "DiT-Ti/2", **options) -> DiTConfig:
    options = SIZES | ({} if "text" in options else {"num_classes": 5}) | options
    return replace(model_config(name, **options), depth=1)


BYTES = TextConfig("bytes", 32, 9, cross_attention=True)
LEARNED = dict(positions="learned", input_size=(8, 12))


@dataclass(frozen=True)
class Case:
    """A model to start from, the model to build, and the kind of file."""

    found: DiTConfig
    wanted: DiTConfig
    file: str = "whole"
    dtype: torch.dtype = torch.float32
    before: str = ""  # classes, one letter each
    after: str = ""
    lora: int = 0

    @property
    def model(self) -> str:
        return "DiT-Ti/2" if self.found.kind == DiTConfig.kind else "MovieGen-Ti/2"


CASES = {
    "the same model": Case(of(), of(), file="sharded"),
    "other classes": Case(of(), of(num_classes=4), before="abcde", after="xdya", dtype=torch.bfloat16),
    "another text encoder": Case(of(), of(text=BYTES), file="parts"),
    "another size and objective": Case(of(), of(input_size=(12, 16), learn_sigma=False), file="pt"),
    "learned positions": Case(of(**LEARNED), of(positions="learned", input_size=(12, 10)), file="sharded"),
    "a clip model from a picture model": Case(of(), of("vDiT-Ti/222", frames=6), dtype=torch.float16),
    "other positions of clips": Case(of("MovieGen-Ti/2", **LEARNED), of("MovieGen-Ti/122", frames=4, **LEARNED)),
    "LoRA": Case(of(), of(num_classes=3), file="sharded", lora=3),
    "LoRA on half precision": Case(of(), of(), file="parts", dtype=torch.float16, lora=2),
}


def stored(case: Case, folder: Path, *spoilt: str) -> Path:
    """Write the pretrained weights of a case and return their file. The ``spoilt`` tensors end with a NaN."""
    folder.mkdir()
    torch.manual_seed(3)
    model = randomised(build_model(case.found))
    for table in model.buffers():  # tables are computed, whatever a file holds
        table += 0.125
    state = {n: t.to(case.dtype).contiguous() for n, t in model.state_dict().items()}
    for name in spoilt:
        state[name].view(-1)[-1] = float("nan")
    if case.file == "pt":
        torch.save(state, folder / "w.pt")
        return folder / "w.pt"
    info = {"model": case.model, "config": case.found.to_dict(), "class_names": list(case.before)}
    metadata = {METADATA_KEY: json.dumps(info)}
    if case.file == "whole":
        save_file(state, folder / "w.safetensors", metadata)
        return folder / "w.safetensors"
    if case.file == "parts":
        names = {"a.safetensors": list(state)[::2], "b.safetensors": list(state)[1::2]}
        for file, held in names.items():
            save_file({name: state[name] for name in held}, folder / file, metadata)
        index = {"weight_map": {name: file for file, held in names.items() for name in held}}
        (folder / "w.safetensors.index.json").write_text(json.dumps(index))
        return folder / "w.safetensors.index.json"
    ranks, tensors = 4, {}  # not the number of ranks that read them
    for name, tensor in state.items():
        cut, shape = [dim_cut("world", 0, len(tensor), ranks)], tuple(tensor.shape)
        layouts = [Layout(mesh_of(ParallelDims(dp_shard=ranks), r), {name: shape}, {name: cut}) for r in range(ranks)]
        shards = {shard_file("ema", r, ranks): made.local(name) for r, made in enumerate(layouts)}
        tensors[name] = ShardedTensor("F32", shape, {file: shard for file, shard in shards.items() if shard.numel})
    index = ShardIndex("ema", 3, tensors, metadata)
    for file in index.files:
        held = {name: tensor.shards[file].take(state[name]).clone() for name, tensor in index.held_by(file).items()}
        save_file(held, folder / file, index.metadata_of(file))
    (folder / "ema.shards.json").write_text(index_text(index))
    return folder / "ema.shards.json"


def specification(mesh: Mesh, case: Case, weights: Weights, plugin: str, precision: str) -> Run:
    flags = SimpleNamespace(
        plugin=plugin,
        mixed_precision=precision,
        global_seed=SEED,
        recompute="none",
        grad_checkpoint=False,
        checkpointed=False,
        recompute_blocks=None,
        lr=1e-4,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        grad_clip=1.0,
        grad_accumulation=1,
        offload="none",
        base_precision="bf16",
        optimizer="adamw",
        streamed_blocks=0,
        offloaded_state="none",
    )
    run = Run.__new__(Run)
    vars(run).update(
        flags=flags,
        mesh=mesh,
        model_config=case.wanted,
        initial=weights,
        initial_config=case.found,
        dataset=SimpleNamespace(describe=lambda: SimpleNamespace(class_names=list(case.after))),
        lora=Lora(case.lora, 4.0, "base") if case.lora else None,
        kernels=SimpleNamespace(ops=TORCH_OPS, attend=local_attention, varlen=None),
        sequence=None,
        stages=None,
        why_not_compiled="off",
        sharding=Sharding(keep_gathered=False),
        notes=[],
    )
    return run


def expected(case: Case, path: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Return all values of a full model by the run's names, and the names of the trained weights."""
    with torch.device("meta"):
        model = build_model(case.wanted)
    model = model.to_empty(device="cpu")
    model.fill_tables()
    initialize(model, SEED)
    start = taken_over(model, read_newest(path), case.found, list(case.after))
    if case.lora:
        add_lora(model, Lora(case.lora, 4.0, "base"), start.untrained, SEED)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, trained


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def values_of(engine: Engine) -> dict[str, str]:
    """Return digests of the full fp32 master weights, the frozen weights in their stored precision, and the tables."""
    values = {name: engine.layout.gather(name, engine.master(name)) for name in engine.shapes}
    for name, parameter in engine.module.named_parameters():
        if name not in engine.shapes:
            values[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return {name: digest(value) for name, value in {**values, **dict(engine.module.named_buffers())}.items()}


def runs_of(world: int) -> list[tuple[str, str, str]]:
    """Return (case, plugin, precision) for every case: fsdp on several ranks, and another plugin once."""
    runs = []
    for number, (name, case) in enumerate(CASES.items()):
        if world > 1:
            runs.append((name, "fsdp", "bf16" if case.lora == 3 else "fp32"))
        if number % 3 == world % 3:
            several = "zero2" if case.lora else ("gemini", "ddp")[number % 2]
            other = ("fsdp", "zero2", "ddp")[number // 3] if world == 1 else several
            runs.append((name, other, "bf16" if other == "gemini" else "fp32"))
    return runs


def built(mesh: Mesh, files: dict[str, Path], runs: list[tuple[str, str, str]]) -> list[tuple]:
    made = []
    for name, plugin, precision in runs:
        case, weights = CASES[name], read_newest(files[name], mesh=mesh)
        spec = specification(mesh, case, weights, plugin, precision)
        engine = build_model_and_engine(spec)
        if plugin == "fsdp" and mesh.world_size > 1:
            assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
        made.append((values_of(engine), set(engine.shapes), spec.notes))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {name: stored(case, folder / str(number)) for number, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def whole(files) -> dict[str, tuple[dict[str, Tensor], set[str]]]:
    return {name: expected(case, files[name]) for name, case in CASES.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_are_those_of_a_whole_model(world, files, whole):
    runs = runs_of(world)
    for rank in run_ranks(world, built, files, runs):
        for (name, plugin, precision), (found, trained, notes) in zip(runs, rank, strict=True):
            values, trainable = whole[name]
            assert trained == trainable and notes and all(note.startswith("--pretrained: ") for note in notes)
            kept = torch.bfloat16 if precision == "bf16" else torch.float32
            frozen = values.keys() - trainable - {n for n in values if n.endswith("embed")}
            frozen = {n for n in frozen if n.endswith((".weight", ".bias"))}
            assert found == {n: digest(v.to(kept) if n in frozen else v) for n, v in values.items()}, (name, plugin)


WIDE = replace(of(), hidden_size=384, num_heads=6, depth=2)
LARGE = {  # one of each kind of file
    "whole": Case(WIDE, WIDE, lora=4),
    "sharded": Case(WIDE, replace(WIDE, num_classes=7), file="sharded"),
    "pt": Case(WIDE, WIDE, file="pt"),
}


def peaks(mesh: Mesh, small: Path, large: dict[str, Path], spoilt: list[Path]) -> tuple[list, list[str]]:
    """Return, for every file, a rank's bytes of weights and its peak allocation while it built them, and the messages
    that refuse the spoilt files."""
    refusals = []
    for path in spoilt:
        with pytest.raises(ValueError) as refusal:
            read_newest(path, mesh=mesh)
        refusals.append(str(refusal.value))
    build_model_and_engine(specification(mesh, CASES["LoRA"], read_newest(small, mesh=mesh), "fsdp", "fp32"))
    found = []
    for kind, case in LARGE.items():
        spec, made = specification(mesh, case, read_newest(large[kind], mesh=mesh), "fsdp", "fp32"), []
        peak = peak_bytes(lambda: made.append(build_model_and_engine(spec)))  # noqa: B023 (it is called here)
        held = [parameter.to_local().numel() for parameter in made[0].module.parameters()]
        found.append((4 * sum(held), peak))
    return found, refusals


def test_no_rank_allocates_a_large_weight_whole_and_all_refuse_what_one_finds(files, tmp_path):
    large = {kind: stored(case, tmp_path / kind) for kind, case in LARGE.items()}
    names = ("x_embedder.proj.weight", "x_embedder.proj.bias", "final_layer.linear.weight")  # from both ranks' shares
    kinds = [(kind, name) for kind in ("whole", "sharded", "parts", "pt") for name in names]
    spoilt = [stored(Case(of(), of(), file=k), tmp_path / f"{k}-{n}", n) for k, n in kinds]
    largest, total = 4 * 384 * 6 * 384, 4 * WIDE.parameters()  # a block's modulation
    for found, refusals in run_ranks(2, peaks, files["LoRA"], large, spoilt):
        for message, path, (_, name) in zip(refusals, spoilt, kinds, strict=True):
            assert message.startswith(f"{path}: {name} holds values that are not finite"), message
        for held, peak in found:
            assert held < 0.6 * total and peak < held + 0.6 * largest, (held, peak)  # a shard is being read
