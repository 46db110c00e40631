"""Test DiT against an independent implementation, Meta's parameter names, and errors for bad configurations."""

import argparse
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.plain_dit import PlainDiT
from opendit.checkpoint.pretrained import load_pretrained, read_weights
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import PLAIN, TORCH_OPS, BlockOps, Options, modulation, timestep_embedding
from opendit.models.positions import sincos_position_table
from opendit.models.zoo import model_config

# The keys of Meta's DiT-XL-2-256x256.pt, with those of one block.
META_TOP = """
    pos_embed x_embedder.proj.weight x_embedder.proj.bias t_embedder.mlp.0.weight t_embedder.mlp.0.bias
    t_embedder.mlp.2.weight t_embedder.mlp.2.bias y_embedder.embedding_table.weight final_layer.linear.weight
    final_layer.linear.bias final_layer.adaLN_modulation.1.weight final_layer.adaLN_modulation.1.bias
""".split()
META_BLOCK = """
    attn.qkv.weight attn.qkv.bias attn.proj.weight attn.proj.bias mlp.fc1.weight mlp.fc1.bias mlp.fc2.weight
    mlp.fc2.bias adaLN_modulation.1.weight adaLN_modulation.1.bias
""".split()


def randomised(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Randomise zero-initialised layers, so that comparisons do not compare zeros with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def plain_of(config: DiTConfig) -> PlainDiT:
    return PlainDiT(
        config.input_size,
        config.patch_size,
        config.in_channels,
        config.hidden_size,
        config.depth,
        config.num_heads,
        config.num_classes,
    )


@pytest.mark.parametrize(
    "size,patch,channels,hidden,heads", [((8, 8), 2, 4, 48, 4), ((4, 12), 4, 3, 36, 3), ((10, 6), 2, 1, 72, 1)]
)
def test_output_and_every_gradient_equal_the_independent_model(size, patch, channels, hidden, heads):
    config = DiTConfig(size, patch, channels, hidden, 3, heads, num_classes=7)
    ours, plain = randomised(DiT(config)).double(), plain_of(config).double()
    plain.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(5, channels, *size, dtype=torch.float64)
    t, y = torch.tensor([0, 3, 500, 998, 999]), torch.tensor([0, 7, 2, 6, 1])
    weights = torch.randn(5, 2 * channels, *size, dtype=torch.float64)
    results = []
    for model in (ours, plain):
        output = model(x, t, y)
        (output * weights).sum().backward()
        results.append((output, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (a, grads_a), (b, grads_b) = results
    # Both compute the timestep sinusoids in fp32.
    assert (a - b).norm() / b.norm() < 1e-9 and b.std() > 0.05
    assert grads_a.keys() == grads_b.keys()
    for name in grads_b:
        if name.endswith("qkv.bias"):  # the part for the keys is only rounding error
            assert torch.allclose(grads_a[name], grads_b[name], atol=1e-9 * grads_b[name].norm().item())
        else:
            assert grads_b[name].norm() > 0
            assert (grads_a[name] - grads_b[name]).norm() / grads_b[name].norm() < 1e-9, name


def test_gradient_checkpointing_changes_nothing():
    config = DiTConfig((4, 4), 2, 2, 32, 3, 2, num_classes=3)
    model = randomised(DiT(config))
    x, t, y = torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3])
    grads = []
    for checkpointed in (False, True):
        model.grad_checkpoint = checkpointed
        model.zero_grad()
        model(x, t, y).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("checkpointed", (False, True))
def test_blocks_are_joined_with_the_next(checkpointed):
    """A fused residual and norm is used between blocks, with the same results. Recomputed blocks are not fused."""
    calls = []

    def joined(x, gate, z, linear, shift, scale):
        h = TORCH_OPS.linear_gate_residual(x, gate, z, linear)
        calls.append((shift, scale))
        return h, TORCH_OPS.layernorm_modulate(h, shift, scale)

    model = randomised(DiT(DiTConfig((4, 4), 2, 2, 32, 3, 2, num_classes=3)))
    model.grad_checkpoint = checkpointed
    x, t, y = torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3])
    results = []
    for ops in (TORCH_OPS, BlockOps(linear_gate_residual_layernorm_modulate=joined)):
        model.use(ops=ops).zero_grad()
        output = model(x, t, y)
        output.square().mean().backward()
        results.append([output, *(p.grad.clone() for p in model.parameters())])
    assert len(calls) == (2 * 3 if checkpointed else 2 * 3 - 1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_hidden_layer_is_not_held_by_the_next_block():
    hidden, alive = [], []

    def linear_gelu(x, linear):
        z = TORCH_OPS.linear_gelu(x, linear)
        hidden.append(weakref.ref(z))
        return z

    def linear_heads(x, linear, num_heads):
        alive.append(sum(z() is not None for z in hidden))
        return TORCH_OPS.linear_heads(x, linear, num_heads)

    model = DiT(DiTConfig((4, 4), 2, 2, 32, 3, 2, num_classes=3))
    model.use(ops=BlockOps(linear_gelu=linear_gelu, linear_heads=linear_heads))
    with torch.no_grad():
        model(torch.randn(3, 2, 4, 4), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 3]))
    assert len(hidden) == 3 and alive == [0, 0, 0]


def test_meta_keys_load_strictly_into_dit_s_2(tmp_path):
    """A DiT-S/2 loads Meta's parameters from a release file and from a training checkpoint."""
    config = model_config("DiT-S/2", input_size=(32, 32), in_channels=4, num_classes=1000)
    model = DiT(config)
    keys = set(META_TOP) | {f"blocks.{i}.{key}" for i in range(12) for key in META_BLOCK}
    assert set(model.state_dict()) == keys
    state = randomised(model).state_dict()
    torch.save(state, tmp_path / "release.pt")
    other = {k: torch.zeros_like(v) for k, v in state.items()}
    torch.save(
        {"model": other, "ema": state, "opt": {"lr": 1e-4}, "args": argparse.Namespace(model="DiT-S/2")},
        tmp_path / "training.pt",
    )
    x, t, y = torch.randn(2, 4, 32, 32), torch.tensor([10, 900]), torch.tensor([0, 1000])
    for file in ("release.pt", "training.pt"):
        loaded, weights = load_pretrained(tmp_path / file, "DiT-S/2")
        assert weights.config is None and loaded.config == config
        output = loaded(x, t, y)
        assert output.shape == (2, 8, 32, 32)
        assert output.isfinite().all() and output.std() > 0.01
        assert torch.equal(output, model(x, t, y))


def test_wrong_files_are_refused_by_name(tmp_path):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10)
    state = DiT(config).state_dict()
    torch.save(state, tmp_path / "ti.pt")
    with pytest.raises(ValueError, match="use --model DiT-Ti/2"):
        load_pretrained(tmp_path / "ti.pt", "DiT-XL/2")
    with pytest.raises(ValueError, match="name it with --model"):
        load_pretrained(tmp_path / "ti.pt")
    del state["blocks.3.mlp.fc1.bias"]
    torch.save(state, tmp_path / "short.pt")
    with pytest.raises(ValueError, match="blocks.3.mlp.fc1.bias"):
        load_pretrained(tmp_path / "short.pt", "DiT-Ti/2")
    torch.save({"weights": [1, 2]}, tmp_path / "list.pt")
    with pytest.raises(ValueError, match="no state dict"):
        load_pretrained(tmp_path / "list.pt", "DiT-Ti/2")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not hold a DiT"):
        load_pretrained(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        load_pretrained(tmp_path / "nowhere")


class Bomb:
    def __reduce__(self):
        return (open, ("/tmp/opendit-test-bomb", "w"))


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    import os

    torch.save({"x": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(ValueError, match="refused"):
        read_weights(tmp_path / "bomb.pt")
    assert not os.path.exists("/tmp/opendit-test-bomb")


def test_names_and_sizes_that_do_not_exist():
    with pytest.raises(ValueError, match="did you mean DiT-XL/2"):
        model_config("DiT-XXL/2", input_size=(32, 32), in_channels=4, num_classes=10)
    with pytest.raises(ValueError, match="don't divide"):
        model_config("DiT-S/8", input_size=(36, 32), in_channels=4, num_classes=10)


def test_published_sizes():
    """Compare with the paper's parameter counts, for 1000 classes and 256 px, and with the FLOPs of XL/2."""
    published = {"DiT-S/2": 33.0, "DiT-B/2": 130.5, "DiT-L/2": 458.1, "DiT-XL/2": 675.1}
    for name, millions in published.items():
        config = model_config(name, input_size=(32, 32), in_channels=4, num_classes=1000)
        table = config.tokens * config.hidden_size  # the paper counts the fixed position table
        assert (config.parameters() + table) / 1e6 == pytest.approx(millions, abs=0.35)
    # the paper gives 118.6 Gflops and counts a multiply-add as one
    assert config.forward_flops() / 2e9 == pytest.approx(118.6, abs=0.1)


@pytest.mark.parametrize("options", (PLAIN, Options(adaln_lora=3), Options(bias=False)))
@pytest.mark.parametrize("samples", (1, 2))
def test_modulation_is_its_layers_for_one_sample_too(samples, options):
    torch.manual_seed(0)
    layer, c = modulation(5, 6, options).double(), torch.randn(samples, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(samples, 30, dtype=torch.float64)
    leaves, want = [c, *layer.parameters()], torch.nn.Sequential(*layer)(c)
    found = layer(c)
    got, exact = ([y, *torch.autograd.grad(y, leaves, weights)] for y in (found, want))
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_timestep_embedding_closed_form():
    t = torch.tensor([0, 1, 999])
    got = timestep_embedding(t, 6).double().numpy()
    freqs = 10000.0 ** (-np.arange(3) / 3)
    angles = t.numpy()[:, None] * freqs
    assert np.abs(got - np.concatenate([np.cos(angles), np.sin(angles)], 1)).max() < 1e-4


def test_timesteps_are_not_rounded_by_half_precision_weights():
    """In bf16, 999 and 998 are the same number, but their embeddings must differ."""
    config = DiTConfig((4, 4), 2, 2, 32, 1, 2, num_classes=3)
    embedder = randomised(DiT(config)).bfloat16().t_embedder
    a, b = embedder(torch.tensor([998.0, 999.0]))
    assert not torch.equal(a, b)


def test_position_table_tells_rows_from_columns():
    table = sincos_position_table(8, 2, 3)
    assert torch.equal(table[0, :4], table[3, :4])  # same column
    assert torch.equal(table[0, 4:], table[2, 4:])  # same row
    assert len(torch.unique(table, dim=0)) == 6
    with pytest.raises(ValueError, match="divisible by 4"):
        sincos_position_table(6, 2, 2)


def test_patches_go_through_a_bottleneck_of_two_products():
    config = DiTConfig((8, 12), 4, 3, 36, 1, 3, num_classes=7, patch_bottleneck=5)
    assert (
        DiTConfig.from_dict(config.to_dict()) == config
        and "patch_bottleneck" not in DiTConfig((8, 12), 4, 3, 36, 1, 3, num_classes=7).to_dict()
    )
    embedder, x = randomised(DiT(config)).x_embedder.double(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    narrow = torch.nn.functional.conv2d(x, embedder.proj.weight, embedder.proj.bias, stride=4)
    assert narrow.shape == (2, 5, 2, 3)
    torch.testing.assert_close(embedder(x), embedder.expand(narrow.flatten(2).transpose(1, 2)))
    for wrong in (36, 48, 0):
        with pytest.raises(ValueError, match=f"--patch_bottleneck {wrong}: .*48, .*36"):
            DiTConfig((8, 12), 4, 3, 36, 1, 3, num_classes=7, patch_bottleneck=wrong).check()
