"""Every layout can read every other layout's sharded checkpoints bit for bit, without holding more memory."""

import functools
import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.pretrained import load_pretrained
from opendit.checkpoint.save import Checkpoints
from opendit.checkpoint.tensor_set import damage, open_set
from opendit.config.parallel_sizes import ParallelDims
from opendit.models.zoo import build_model, model_config
from opendit.parallel.engines import MOMENTS, Engine, build_engine
from opendit.parallel.mesh import Mesh, init_mesh
from tests.ranks import run_ranks

MODEL = "DiT-Ti/2"
# The label table's 7 rows are uneven among 2 and 4 ranks.
CONFIG = replace(model_config(MODEL, input_size=(8, 8), in_channels=3, num_classes=6), depth=2)
PLUGINS = ("zero2", "ddp", "gemini", "fsdp", "hsdp")  # hsdp is fsdp with two replicas
SETS = ("model", "ema", "ema_0.5", *MOMENTS)
Expected = dict[str, dict[str, torch.Tensor]]


def expected_state() -> Expected:
    """Return random contents for every set of tensors, so that no two elements are equal."""
    torch.manual_seed(3)
    return {which: {name: torch.randn(p.shape) for name, p in build_model(CONFIG).named_parameters()} for which in SETS}


def engine_with(mesh: Mesh, plugin: str, state: Expected | None) -> tuple[Engine, EMA]:
    """Return an engine and its averages, with the given state or a fresh one."""
    torch.manual_seed(mesh.world_size)  # an initialisation that differs from the saved state
    if plugin == "hsdp":
        mesh, plugin = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=min(2, mesh.world_size))), "fsdp"
    engine = build_engine(build_model(CONFIG), mesh, plugin=plugin, precision="bf16")
    ema = EMA(engine, [0.9, 0.5])
    if state is not None:
        for name in engine.shapes:
            engine.load_master(name, state["model"][name])
            engine.load_moments(name, {key: state[key][name] for key in MOMENTS}, step=5)
            for which, key in enumerate(("ema", "ema_0.5")):
                ema.set(which, name, engine.layout.take(name, state[key][name]))
        ema.updates.fill_(5)
        engine.finish_loading()
    return engine, ema


def counters(step: int) -> dict:
    return {"step": step, "epoch": 0, "skipped": 0, "fingerprint": {}}


def save(mesh: Mesh, folder: Path, plugin: str, sharded: bool, state: Expected, step: int = 5, **more) -> Checkpoints:
    engine, ema = engine_with(mesh, plugin, state)
    info = {"model": MODEL, "config": CONFIG.to_dict()}
    with Checkpoints(folder / "checkpoints", engine, ema, info, sharded=sharded, **more) as made:
        made.save(counters(step))
        made.wait()
    assert not made.failures, made.failures
    return made


def loaded(checkpoint: Path, engine: Engine, ema: EMA) -> Expected:
    """Overwrite an engine's state, load a checkpoint, and return every gathered set of tensors."""
    for name in engine.shapes:
        engine.load_master(name, torch.full(engine.shapes[name], -1.0))
        engine.load_moments(name, dict.fromkeys(MOMENTS, torch.full(engine.shapes[name], -1.0)), step=1)
        for which in range(2):
            ema.set(which, name, torch.tensor(-1.0))
    load_checkpoint(find_checkpoint(str(checkpoint), "", MODEL, engine.mesh), engine, ema)
    assert engine.optimizer_steps() == 5 and int(ema.updates) == 5
    gather = engine.layout.gather
    state: Expected = {"model": {n: gather(n, engine.master(n)) for n in engine.shapes}}
    state |= {which: dict(ema.gather(i)) for i, which in enumerate(("ema", "ema_0.5"))}
    state |= {key: {n: gather(n, engine.moments(n)[key]) for n in engine.shapes} for key in MOMENTS}
    return state


def assert_same(one: Expected, other: Expected, where: object) -> None:
    for which in SETS:
        assert one[which].keys() == other[which].keys()
        for name, tensor in one[which].items():
            assert torch.equal(tensor, other[which][name]), (where, which, name)


def save_all(mesh: Mesh, folder: Path) -> None:
    """Save a checkpoint with every plugin and format; a save may hold only as much host memory as a rank's state."""
    state = expected_state()
    for plugin in PLUGINS:
        for sharded in (True, False)[: 1 + (plugin == "zero2")]:
            name = f"{plugin}-{mesh.world_size}-{'sharded' if sharded else 'whole'}"
            made = save(mesh, folder / name, plugin, sharded, state)
            if sharded:
                local = sum(made.engine.layout.local(n).numel for n in made.engine.shapes)
                assert made.host_bytes <= 4 * len(SETS) * local * 1.1
                # State that several ranks hold is divided among them.
                total = sum(math.prod(shape) for shape in made.engine.shapes.values())
                held = torch.tensor(made.host_bytes)
                assert int(mesh.sum(held)) == 4 * len(SETS) * total


def load_all(mesh: Mesh, checkpoints: list[Path]) -> None:
    """Every plugin reads checkpoints of every plugin and number of ranks, though not every combination."""
    state = expected_state()
    for number, plugin in enumerate(PLUGINS):
        engine, ema = engine_with(mesh, plugin, None)
        for checkpoint in checkpoints[(number + mesh.world_size) % 6 :: 6]:
            assert_same(loaded(checkpoint, engine, ema), state, (checkpoint, plugin, mesh.world_size))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[int], Path]:
    """Return a function that returns a folder with 1, 2 or 4 ranks' checkpoints of one state, sharded and whole."""

    @functools.cache
    def by(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"written{world}")
        run_ranks(world, save_all, folder)
        return folder

    return by


@pytest.mark.timeout(600)
def test_any_layout_reads_what_any_other_has_written(written):
    checkpoints = sorted(step for n in (1, 2, 4) for step in written(n).glob("*/checkpoints/step_0000005"))
    assert len(checkpoints) == 3 * (len(PLUGINS) + 1)
    for world in (1, 2, 4):
        run_ranks(world, load_all, checkpoints)


@pytest.mark.parametrize("worlds", [(2,), (1, 4)], ids=str)
def test_its_tensors_are_those_of_the_whole_kind_and_every_reader_takes_them(written, worlds):
    state = expected_state()
    for plugin in PLUGINS:
        for world in worlds:
            folder = written(world)
            step = folder / f"{plugin}-{world}-sharded" / "checkpoints" / "step_0000005"
            assert damage(step) is None
            for which in SETS:
                with open_set(step / f"{which}.shards.json") as tensors:
                    assert len(tensors.index.files) == world
                    for name, tensor in state[which].items():
                        assert torch.equal(tensors[name], tensor)
                    whole = folder / f"zero2-{world}-whole" / "checkpoints" / "step_0000005"
                    if which not in MOMENTS:  # with position tables
                        stored = load_file(whole / f"{which}.safetensors")
                        assert stored.keys() == set(tensors)
                        assert all(torch.equal(tensors[name], stored[name]) for name in stored)
                        with safe_open(whole / f"{which}.safetensors", "pt") as file:
                            assert json.loads(file.metadata()["opendit"]).items() >= {"step": 5, "model": MODEL}.items()
            for which in ("ema", "model"):
                model, weights = load_pretrained(step, which=which)
                assert weights.config == CONFIG and weights.info["step"] == 5
                assert all(torch.equal(p.detach(), state[which][n]) for n, p in model.named_parameters())


def test_nothing_is_written_twice(written):
    folder, state = written(2), expected_state()
    parameters = sum(tensor.numel() for tensor in state["model"].values())
    table = build_model(CONFIG).pos_embed.numel()
    for plugin in PLUGINS:
        step = folder / f"{plugin}-2-sharded" / "checkpoints" / "step_0000005"
        for which in SETS:
            sizes = [path.stat().st_size for path in step.glob(f"{which}-shard-*.safetensors")]
            bytes_of_tensors = 4 * (parameters + (0 if which in MOMENTS else table))
            assert bytes_of_tensors < sum(sizes) < bytes_of_tensors + 4 * 16_000  # headers
            assert max(sizes) < 1.2 * sum(sizes) / 2 + 16_000  # evenly


def peaks(mesh: Mesh, folder: Path) -> tuple[int, float, float]:
    """Return the bytes of this rank's state, and the growth in peak memory during a save and a load."""
    importlib.import_module("opendit.checkpoint.schema")  # a load imports it, with pydantic
    config = replace(CONFIG, hidden_size=384, num_heads=6, depth=5)
    engine = build_engine(build_model(config), mesh, plugin="fsdp", precision="bf16")
    ema = EMA(engine, [0.9, 0.5])
    for name in engine.shapes:
        engine.moments(name)
    local = 4 * len(SETS) * sum(engine.layout.local(name).numel for name in engine.shapes)

    def peak_of(work: Callable) -> int:
        """Return the peak growth of resident memory, including mapped files."""
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        work()
        return resident("VmHWM") - before

    def save_once() -> None:
        info = {"model": MODEL, "config": config.to_dict()}
        with Checkpoints(folder / "checkpoints", engine, ema, info, sharded=True) as made:
            made.save(counters(1))
        assert not made.failures

    def load_once() -> None:
        load_checkpoint(find_checkpoint(str(folder / "checkpoints" / "step_0000001"), "", MODEL, mesh), engine, ema)

    return local, peak_of(save_once), peak_of(load_once)


def resident(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def test_a_save_and_a_load_take_no_more_host_memory_than_a_rank_has_of_the_state(tmp_path):
    # Blocks of the four files that are hashed at a time, one parameter's shards, and late imports.
    more = 48 << 20
    for local, save_peak, load_peak in run_ranks(2, peaks, tmp_path):
        assert local > 100 << 20
        assert 0.9 * local < save_peak < 1.1 * local + (8 << 20), (local, save_peak)
        assert load_peak < 1.1 * local + more, (local, load_peak)
