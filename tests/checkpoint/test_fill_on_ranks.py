"""Ranks read exactly their parts of a public model's files under every plugin and division."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from opendit.checkpoint import matched
from opendit.checkpoint.matched import DeviceReader, MatchedTensors, fill
from opendit.checkpoint.tensor_set import open_set
from opendit.models.dit import DiTConfig
from opendit.models.zoo import empty_model, model_shapes
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import Mesh, ParallelDims, init_mesh
from opendit.parallel.pipeline import mesh_stages
from opendit.parallel.tensor import allocate, divide, layout_of, tensor_group
from tests.ranks import run_ranks

CONFIG = DiTConfig(input_size=(4, 6), patch_size=2, in_channels=3, hidden_size=36, depth=3, num_heads=6, num_classes=5)
PLANS = [("ddp", {}), ("zero2", {}), ("fsdp", {}), ("fsdp", {"tp": 2}), ("zero2", {"tp": 2}), ("fsdp", {"pp": 2})]


def weights() -> dict[str, torch.Tensor]:
    """Return CONFIG's weights under OpenDiT's names, in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes, _ = model_shapes(CONFIG)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def split(name: str) -> tuple[tuple[str, ...], int]:
    """Return a weight's published names, and the dimension along which they are joined."""
    if ".attn.qkv." in name:
        return tuple(name.replace("qkv", part) for part in "qkv"), 0
    if name.endswith("mlp.fc2.weight"):
        return (f"{name}.left", f"{name}.right"), 1
    return (name,), 0


def opened(path: Path) -> MatchedTensors:
    pairs = [((name,), *split(name)) for name in weights()]
    return MatchedTensors(open_set(path), pairs, model_shapes(CONFIG)[0], path)


def masters(mesh: Mesh, path: Path) -> list:
    """Return for each plan the masters that are wrong, and the numbers of elements read and held."""
    found, expected, read = [], weights(), 0

    class Counted(matched.Reading):
        def view(self):
            nonlocal read
            seen = super().view()
            read += 0 if seen is None else seen.numel()
            return seen

        def copy_to(self, out, start=0):
            nonlocal read
            read += out.numel()
            super().copy_to(out, start)

    matched.Reading = Counted
    for plugin, sizes in PLANS:
        mesh = init_mesh(dims=ParallelDims.fill(2, **sizes))
        for pieces in (False, True):
            cut = plugin == "fsdp" and mesh.dims.size("loss") > 1
            model, read = empty_model(CONFIG, parameters=not cut and not sizes), 0
            apply_parallel(model, tensor=tensor_group(mesh), stages=mesh_stages(mesh, CONFIG, "1f1b"))
            if not cut:
                allocate(model, mesh.device)
            reader = DeviceReader(opened(path), "cpu", buffer_bytes=64)
            engine = build_engine(model, mesh, plugin=plugin, initial=reader.copied if pieces else reader)
            held = {name: engine.held(name) for name in engine.shapes}
            masters = {name: (engine.master(name), engine.layout.take(name, expected[name])) for name in held}
            wrong = [n for n, (m, e) in masters.items() if m.dtype != torch.float32 or not torch.equal(m, e.float())]
            found.append((plugin, sizes, wrong, read, sum(shard.numel for shard in held.values())))
    return found


def test_the_masters_of_every_plan_are_the_published_weights_in_fp32(tmp_path):
    whole = sum(tensor.numel() for tensor in weights().values())
    for rank in run_ranks(2, masters, write(tmp_path / "x.safetensors")):
        for plugin, sizes, wrong, read, held in rank:
            assert not wrong and read == held, (plugin, sizes, wrong, read, held)
            assert held == whole if plugin == "ddp" else held < 0.8 * whole, (plugin, sizes)


def write(path: Path) -> Path:
    stored = {}
    for name, tensor in weights().items():
        names, dim = split(name)
        stored |= {part: t.contiguous() for part, t in zip(names, tensor.chunk(len(names), dim), strict=True)}
    save_file(stored, path)
    return path


def parts(mesh: Mesh, path: Path) -> list[str]:
    mesh = init_mesh(dims=ParallelDims.fill(2, tp=2))
    model = empty_model(CONFIG, parameters=False)
    divide(model, tensor_group(mesh))
    layout = layout_of(model, mesh)
    fill(model, opened(path), "cpu", torch.bfloat16, layout)
    expected = weights()
    return [n for n, p in model.named_parameters() if not torch.equal(p, layout.take(n, expected[n]))]


def test_ranks_that_divide_layers_to_sample_are_filled(tmp_path):
    assert run_ranks(2, parts, write(tmp_path / "x.safetensors")) == [[], []]
