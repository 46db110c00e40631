"""``--parallel auto`` proposes settings that the run accepts and that fit, and overlooks no faster ones."""

import math
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from benchmarks.random_folder import write_folder
from opendit.config.command_line import parse
from opendit.config.names import RECOMPUTE
from opendit.config.parallel_sizes import ParallelDims
from opendit.config.train import TrainConfig
from opendit.parallel.experts import check_expert_parallel
from opendit.parallel.hardware import GIB, H200
from opendit.parallel.sequence import sequence_shape
from opendit.training import auto_parallel
from opendit.training.auto_parallel import Circumstances, choose, data_of, decide_on_ranks
from opendit.training.data_plan import open_data
from opendit.training.memory import estimate, resolve_sharding
from opendit.training.model_plan import memory_setup, plan_model
from opendit.training.summary import budget
from tests.ranks import run_ranks, several_programs

FAST = "--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel --data_path mock"
PICTURES = f"--model DiT-XL/2 {FAST}"
CLIPS = "--recipe mock_pretrain_7b_256p_joint"  # 8k tokens
LONG = "--recipe mock_pretrain_7b_768p"  # 74k
MODELS = [
    PICTURES,
    f"{PICTURES} --fp8",
    CLIPS,
    f"{CLIPS} --qk_norm --plugin fsdp",
    LONG,
    "--recipe mock_pretrain_28b_256p_joint",
    "--recipe mock_st_dit_xl_256p_joint",
    "--recipe mock_moviegen_5b_256p_joint",
    "--recipe mock_ec_dit_1b",
]


def flags_of(words: str) -> TrainConfig:
    return parse(TrainConfig, [*words.split(), "--parallel", "auto"])


def chosen(words: str, world: int, gib: float = 131.4, node: int = 8, hardware=H200):
    flags = flags_of(f"{words} --dry_run {world} --gpus_per_node {node}")
    where = Circumstances(world, flags.node_size(world), gib * GIB, hardware)
    return choose(flags, data_of(flags, where), where)[0]


def check_as_typed(words: str, world: int, capacity: float, one) -> None:
    """Check that a run with the proposed flags passes all checks and matches the configuration that was priced."""
    plain = "--no_grad_checkpoint --recompute none --reshard auto --grad_accumulation 1"
    flags = parse(TrainConfig, f"{words} {plain} {one.candidate} --dry_run {world}".split())
    flags = replace(flags, given=flags.given & {"image_size"})  # the proposal repeats what the recipe set
    settled, _ = flags.resolve(world, has_gpu=True)
    for name, value in asdict(one.candidate).items():
        assert getattr(settled, name) == value, name
    config = plan_model(settled, open_data(settled)).config
    how = (settled, settled.attention, settled.mixed_precision, config, settled.batch_size)
    sequence_shape(*how, tensor_parallel=settled.tensor_parallel_size)
    sizes = dict(sp=settled.sequence_parallel_size, tp=settled.tensor_parallel_size)
    sizes |= {"ep": settled.expert_parallel_size, "pp": settled.pipeline_parallel_size}
    dims = ParallelDims.fill(world, **sizes, dp_replicate=settled.data_parallel_replicate)
    check_expert_parallel(config, dims)
    assert settled.batch_size * settled.grad_accumulation * dims.size("dp") == one.samples
    setup = resolve_sharding(config, memory_setup(settled, world), settled.batch_size, capacity)
    assert setup == one.setup
    assert estimate(config, setup, settled.batch_size).total == one.memory <= capacity


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.sampled_from(MODELS), st.sampled_from((1, 2, 3, 6, 8, 16, 24)), st.sampled_from((8, 4, 3)),
    st.sampled_from((24.0, 79.0, 131.4)), st.sampled_from((1, 3, 5)),
)  # fmt: skip
def test_what_is_proposed_is_accepted_and_fits(model, world, node, gib, samples):
    words = f"{model} --global_batch_size {samples * world}"
    try:
        found = chosen(words, world, gib, node)
    except ValueError as error:
        assert "nothing fits" in str(error)
        return
    assert found == sorted(found, key=lambda one: one.price) and len(found) <= auto_parallel.SHOWN
    for one in found:
        check_as_typed(words, world, gib * GIB, one)
        sharing = one.candidate.tensor_parallel_size * one.candidate.sequence_parallel_size
        assert min(node, world) % sharing == 0  # groups never span machines
        assert one.samples == samples * world


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """Return the flags for a FLUX.1 model in its published size. The weights are zeros and take no disk space."""
    folder = tmp_path_factory.mktemp("auto") / "flux"
    write_folder("flux", folder, empty=True)
    return f"--pretrained {folder} --image_size 512 {FAST}"


@pytest.mark.parametrize(
    ("more", "world", "gib", "found"),
    [
        ("--lora 16", 1, 40, "--plugin zero2"),
        ("--lora 16", 1, 21, "--plugin zero2 .*--base_precision int8"),
        ("--lora 16 --fp8", 1, 11, r"--offload blocks:\d+ .*--base_precision fp8"),
        ("--lora 16 --base_precision nf4", 1, 21, "--base_precision nf4"),
        ("--lora 16 --offload blocks:20 --base_precision int8", 1, 21, "--offload blocks:20 .*--base_precision int8"),
        ("--lora 16", 2, 11, "--plugin fsdp .*--base_precision int8"),
        ("", 2, 75, "--plugin fsdp .*--offload state"),
        ("", 2, 30, r"--plugin fsdp .*--offload blocks:\d+ "),
    ],
)
def test_small_cards_get_stored_blocks_and_then_blocks_in_host_memory(flux, more, world, gib, found):
    words = f"{flux} --global_batch_size {world} {more}"
    (one, *_) = chosen(words, world, gib)
    assert re.search(found, str(one.candidate)), str(one.candidate)
    assert ("--base_precision" in str(one.candidate)) == ("base_precision" in found)
    assert ("--offload" in str(one.candidate)) == ("offload" in found)
    check_as_typed(words, world, gib * GIB, one)


def test_more_memory_and_faster_links_are_never_slower():
    prices = [chosen(f"{LONG} --global_batch_size 16", 8, gib)[0].price for gib in (60, 79, 100, 131.4, 178)]
    assert prices == sorted(prices, reverse=True) and prices[0] > 1.02 * prices[-1]
    slow = replace(H200, node_link=H200.node_link / 20, gather=tuple((n, rate / 4) for n, rate in H200.gather))
    fast, slowed = (chosen(f"{CLIPS} --global_batch_size 64", 32, hardware=model)[0] for model in (H200, slow))
    assert slowed.price > 1.05 * fast.price


def test_nothing_better_was_left_out():
    """The best choice is the best of all candidates, priced one by one."""
    flags = flags_of(f"{LONG} --dry_run 4 --global_batch_size 8")
    where = Circumstances(4, 4, 100 * GIB, H200)
    search = auto_parallel.Search(flags, data_of(flags, where), where)
    every = [one for form in search.forms("none") for one in search.batches(form) if search.accepts(one)]
    assert len(every) > 200
    best = min(filter(None, map(search.price, every)), key=lambda one: one.price)
    assert choose(flags, data_of(flags, where), where)[0][0] == best


@pytest.mark.parametrize("world", [1, 3, 6, 512])
def test_odd_numbers_of_ranks(world):
    one = chosen(f"{CLIPS} --model vDiT-XL/122", world)[0]  # 1 sample per rank, as in the flags
    assert one.candidate.plugin in auto_parallel.PLUGINS and one.samples == world


def test_what_others_recommend():
    """NeMo's rules of thumb: use sharding alone where it fits, share sequences when they are long, and divide layers
    last, within a machine."""
    simple = chosen(f"{PICTURES} --global_batch_size 1024", 8)[0].candidate
    assert (simple.sequence_parallel_size, simple.tensor_parallel_size, simple.recompute) == (1, 1, "none")
    assert chosen(f"{CLIPS} --global_batch_size 64", 32)[0].candidate.dimensions == 0
    long = chosen(f"{LONG} --global_batch_size 4", 4)[0].candidate
    assert long.sequence_parallel_size > 1 and long.tensor_parallel_size == 1 and not long.grad_checkpoint
    few = chosen(f"{CLIPS} --global_batch_size 2", 8)[0].candidate  # fewer samples than ranks
    assert few.sequence_parallel_size * few.tensor_parallel_size >= 4
    assert chosen("--recipe mock_pretrain_28b_256p_joint --global_batch_size 64", 64)[0].candidate.dimensions == 0


def test_experts_are_divided_where_that_is_asked_for_or_pays():
    found = chosen("--recipe mock_ec_dit_1b --batch_size 64 --plugin fsdp", 8)
    assert {one.candidate.expert_parallel_size for one in found} > {1}
    asked = chosen("--recipe mock_ec_dit_1b --batch_size 64 --plugin fsdp --expert_parallel_size 4", 8)
    assert {one.candidate.expert_parallel_size for one in asked} == {4} and auto_parallel.dims_of(
        asked[0].candidate, 8
    ).ep == 4
    assert chosen(f"{CLIPS} --plugin fsdp", 8)[0].candidate.expert_parallel_size == 1


def test_pipelines_come_last():
    """Pipelines are considered only when requested or when nothing else fits. Their idle time counts."""
    asked = chosen(f"{CLIPS} --global_batch_size 32 --pipeline_parallel_size 2", 16)[0]
    assert asked.candidate.pipeline_parallel_size == 2 and asked.cost.work["bubble"] > 0
    assert asked.cost.traffic["stages"].bytes > 0 and asked.samples == 32
    without = chosen(f"{CLIPS} --global_batch_size 32", 16)[0]
    assert without.candidate.pipeline_parallel_size == 1 and without.price < asked.price
    assert asked.cost.work["products"] < 1.1 * without.cost.work["products"]  # all ranks together do the same work


def test_given_flags_are_kept_and_a_recipe_s_are_not():
    given = "--tensor_parallel_size 2 --plugin fsdp --reshard after_forward --recompute cheap --batch_size 3"
    for one in chosen(f"{CLIPS} --global_batch_size 24 {given}", 8):
        kept = one.candidate
        assert (kept.tensor_parallel_size, kept.plugin, kept.reshard, kept.recompute) == (
            2,
            "fsdp",
            "after_forward",
            "cheap",
        )
        assert kept.batch_size <= 3 and not kept.grad_checkpoint
    # The recipe sets grad_checkpoint.
    assert not chosen(f"{LONG} --global_batch_size 4", 4)[0].candidate.grad_checkpoint
    assert {one.candidate.plugin for one in chosen(f"{CLIPS} --reshard never", 8)} == {"fsdp"}
    across = chosen(f"{LONG} --global_batch_size 4 --sequence_parallel_size 16", 32)[0].candidate
    assert across.sequence_parallel_size == 16  # resolving the flags prints a note about it


def test_the_samples_of_a_step_are_those_of_the_flags():
    assert chosen(f"{CLIPS} --batch_size 2 --sequence_parallel_size 2", 8)[0].samples == 8
    odd = chosen("--recipe pretrain_7b_256p_joint --data_path mock", 6)[0]  # 256 is from the recipe, not from a flag
    ranks = 6 // odd.candidate.sequence_parallel_size
    assert 256 - ranks < odd.samples <= 256 and odd.samples % ranks == 0
    assert chosen(f"{CLIPS} --batch_size 1 --grad_accumulation 4", 4)[0].candidate.grad_accumulation == 4


def test_what_can_t_be_done_is_said():
    with pytest.raises(ValueError, match=r"nothing fits 20.0 GiB a rank; the smallest, --plugin .*, needs \d+"):
        chosen("--recipe mock_pretrain_28b_768p", 8, 20)
    with pytest.raises(ValueError, match="--global_batch_size"):
        chosen(f"{CLIPS} --global_batch_size 7 --sequence_parallel_size 1 --tensor_parallel_size 1", 4)
    with pytest.raises(ValueError, match="tensor_parallel_size 5"):
        chosen(f"{CLIPS} --tensor_parallel_size 5", 5)
    state = chosen("--recipe mock_pretrain_28b_256p_joint --global_batch_size 4", 4, 79)[0].candidate
    assert state.offload == "state"  # nothing fits without it


def test_words_name_the_limit_and_the_bytes():
    one = chosen(f"{CLIPS} --global_batch_size 8", 4)[0]
    flags = flags_of(f"{CLIPS} --dry_run 4")
    where = Circumstances(4, 4, 131.4 * GIB, H200)
    config = auto_parallel.Search(flags, data_of(flags, where), where).config
    head, first = auto_parallel.report([one], config, where, "an H200")
    assert "4 ranks, 131.4 GiB each" in head and "8 samples of 8,192 tokens" in head
    assert first.startswith("1. ") and f"{8 * 8192 / 4 / one.cost.total:,.0f} tokens/s a rank" in first
    assert first.endswith(str(one.candidate)) and "takes" in first
    gradients = 2 * config.parameters() * 3 / 4 / 1e9
    assert f"gradients {gradients:,.2f} GB" in budget(one.cost)


LEVELS = [*((level, False) for level in RECOMPUTE), ("none", True)]
WAN = "--pretrained {wan} --use_video --num_frames 81 --image_size 512 --batch_size 1"


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recomputed") / "wan"
    write_folder("wan-1.3b", folder, empty=True)
    return folder


@pytest.mark.parametrize("gib", [131.4, 74.0, 40.0, 28.0, 20.0])
@pytest.mark.parametrize(
    "words",
    [
        f"{PICTURES} --batch_size 200",
        f"{PICTURES} --batch_size 200 --fp8",
        f"{PICTURES} --global_batch_size 400 --batch_size 100 --optimizer muon",
        f"{WAN} {FAST}",
        f"{WAN} {FAST} --lora 8",
    ],
)
def test_recompute_auto_changes_only_what_is_recomputed(words, gib, wan):
    """Where less recomputation fits, no more is chosen. The reference tries all levels of the plain flags."""
    flags = parse(TrainConfig, f"{words.format(wan=wan)} --recompute auto --dry_run 1".split())
    where = Circumstances(1, 1, gib * GIB, H200)

    def needs(level: str, checkpoint: bool) -> float:
        settled, _ = replace(flags, recompute=level, grad_checkpoint=checkpoint).resolve(1, True)
        config = plan_model(settled, data_of(settled, where)).config
        batch = settled.batch_size
        return estimate(config, resolve_sharding(config, memory_setup(settled, 1), batch, where.capacity), batch).total

    # --fp8 leaves out the levels between
    levels = [level for level in LEVELS if not flags.fp8 or level[0] in ("none", "but_attention")]
    fitting = [level for level in levels if needs(*level) <= where.capacity]
    if not fitting:
        with pytest.raises(ValueError, match=rf"--recompute auto: nothing fits {gib} GiB a rank; .* --grad_checkpoint"):
            auto_parallel.decide(flags, data_of(flags, where), where, "an H200")
        return
    decided, lines = auto_parallel.decide(flags, data_of(flags, where), where, "an H200")
    level, checkpoint = fitting[0]
    assert (decided.recompute, decided.grad_checkpoint) == (level, checkpoint), lines
    expected, _ = replace(flags, recompute=level, grad_checkpoint=checkpoint).resolve(1, True)
    assert replace(decided.resolve(1, True)[0], given=expected.given) == expected
    chosen = "--grad_checkpoint" if checkpoint else f"--recompute {level}"
    memory = f"{needs(level, checkpoint) / GIB:,.2f} of {gib:,.2f} GiB"
    assert lines[0].startswith(f"--recompute auto: {chosen}: {memory} by the estimate, ") and len(lines) == 1


def test_recompute_auto_in_a_run_and_beside_other_flags(tmp_path, capsys):
    train.main([*TINY.split(), "--recompute", "auto", "--outputs", str(tmp_path)])
    said = capsys.readouterr().out
    assert "--recompute auto: --recompute none: " in said and "at H200 speed; this machine has no GPU" in said
    flags = parse(TrainConfig, f"{PICTURES} --parallel auto --recompute auto --dry_run 2 --batch_size 200".split())
    where = Circumstances(2, 8, 74 * GIB, H200)
    assert auto_parallel.decide(flags, data_of(flags, where), where, "")[0].recompute in RECOMPUTE
    with pytest.raises(ValueError, match="--recompute auto: --grad_checkpoint recomputes whole blocks already"):
        parse(TrainConfig, f"{PICTURES} --recompute auto --grad_checkpoint".split()).resolve(1, True)


TINY = (
    "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --max_steps 2 --sample_every 0 "
    "--mixed_precision fp32 --num_workers 0 --log_every 1 --global_batch_size 4 --no_save"
)


def on_ranks(mesh, folder: str) -> tuple:
    several_programs()
    flags = parse(TrainConfig, [*TINY.split(), "--parallel", "auto", "--sequence_parallel_size", "2"])
    decided, divided = decide_on_ranks(flags, mesh)
    try:
        decide_on_ranks(parse(TrainConfig, [*TINY.split(), "--parallel", "auto", "--hardware", "no_such"]), mesh)
        refused = ""
    except ValueError as error:
        refused = str(error)
    words = [*TINY.split(), "--parallel", "auto", "--outputs", folder]
    return asdict(divided.dims), decided.parallel, decided.sequence_parallel_size, refused, str(train.main(words))


def test_ranks_agree_and_train(tmp_path, capfd):
    """Rank 0 decides for all ranks, all ranks raise its error, and the chosen setup trains."""
    found = run_ranks(2, on_ranks, str(tmp_path))
    assert found[0] == found[1]
    dims, parallel, size, refused, _ = found[0]
    assert (dims["sp"], dims["dp_shard"], parallel, size) == (2, 1, "flags", 2)
    assert refused.startswith("--hardware no_such: neither a file")
    assert len((tmp_path / "000-DiT-Ti-2" / "log.jsonl").read_text().splitlines()) == 2
    assert "--parallel auto: 2 ranks, " in capfd.readouterr().out


def test_dry_run_plans_what_is_not_here(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    train.main("--recipe mock_pretrain_28b_256p_joint --dry_run 512 --gpus_per_node 8 --parallel auto".split())
    said = capsys.readouterr().out
    assert "512 ranks, 8 a node" in said and "1. " in said and "received a step" in said and "ms a step" in said
    assert not math.isnan(float(said.split("1. ")[1].split(" ms")[0].replace(",", "")))


def test_groups_that_cross_machines_are_noted(monkeypatch):
    """The size of a machine is torchrun's LOCAL_WORLD_SIZE or --gpus_per_node, and 8 for a dry run."""

    def notes(words: str, world: int) -> list[str]:
        _, said = parse(TrainConfig, f"{CLIPS} {words}".split()).resolve(world, has_gpu=True)
        return [note for note in said if "lie across machines" in note]

    assert notes("--sequence_parallel_size 4 --dry_run 16", 16) == []
    (note,) = notes("--sequence_parallel_size 16 --dry_run 16", 16)
    assert note.startswith("--sequence_parallel_size 16: groups of 16 ranks lie across machines of 8")
    both = notes("--sequence_parallel_size 4 --tensor_parallel_size 4 --dry_run 16", 16)
    assert len(both) == 1 and "--sequence_parallel_size 4 with --tensor_parallel_size 4: groups of 16" in both[0]
    assert len(notes("--tensor_parallel_size 4 --dry_run 16 --gpus_per_node 2", 16)) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # a run on two machines, as torchrun starts it
    assert notes("--tensor_parallel_size 2", 4) == [] and len(notes("--tensor_parallel_size 4", 4)) == 1
    assert notes("--tensor_parallel_size 4 --gpus_per_node 4", 4) == []
