"""Choose flags that fit the hardware: --parallel auto (the fastest step) and --card (LoRA within a GPU's memory).

Memory and time are estimated, not measured. Each candidate must pass the checks of a run. Flags on the command line
keep their values.
"""

import bisect
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from opendit.config.names import AUTO, BLOCKS, BUT_ATTENTION, RECOMPUTE
from opendit.config.parallel_sizes import ParallelDims, environment_node_size, parse_offload
from opendit.config.train import TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.kernels.common import missing
from opendit.models.configuration import DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.models.zoo import plan_of
from opendit.parallel.experts import check_expert_parallel
from opendit.parallel.hardware import CARDS, HardwareModel, find_hardware, of_card
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence import sequence_shape
from opendit.training.data_plan import fit_captions, open_data, samples_at_once, text_before
from opendit.training.memory import (
    GIB,
    OFFLOADED,
    USABLE,
    USABLE_OF_A_HOST,
    Estimate,
    Setup,
    card_memory,
    estimate,
    host_memory,
    parts,
    resolve_sharding,
    trained_count,
)
from opendit.training.model_plan import encoder_bytes, memory_setup, plan_model
from opendit.training.step_cost import StepCost, step_cost, tokens_per_second

PLUGINS = ("zero2", "fsdp")  # other plugins are considered only if --plugin names them
SHOWN = 5
PARTS = 4  # --offload is tried in steps of 1 / PARTS of the blocks
ONE_BYTE = {False: "int8", True: "fp8"}  # --fp8 -> storage with one byte per weight: int8 is more exact, FP8 faster
BATCHES = 3  # number of micro-batch sizes to try: the largest that fits, then smaller ones
# One more kind of parallelism must save this fraction of the time. It causes waits that step_cost.py ignores.
MARGIN = 0.01


def storages(depth: int) -> list[tuple[str, str]]:
    """Return pairs (storage of frozen blocks, --offload), the most exact and fastest first, the smallest last. The
    storage "one" takes one byte per weight."""
    offloads = ["none", *parts_of_blocks(depth)]
    # bf16 blocks are not offloaded: copying them would take twice as long
    return [("bf16", "none"), *itertools.product(("one", "nf4"), offloads)]


def parts_of_blocks(depth: int) -> list[str]:
    return [f"{BLOCKS}:{-(-depth * part // PARTS)}" for part in range(1, PARTS + 1)]


def dims_of(sizes: "Candidate | TrainConfig", world: int) -> ParallelDims:
    """Return the sizes of the mesh for ``world`` ranks."""
    # tensor-parallel ranks already divide the experts
    experts = sizes.expert_parallel_size if sizes.tensor_parallel_size == 1 else 1
    return ParallelDims.fill(
        world,
        pp=sizes.pipeline_parallel_size,
        dp_replicate=sizes.data_parallel_replicate,
        sp=sizes.sequence_parallel_size,
        tp=sizes.tensor_parallel_size,
        ep=experts,
    )


@dataclass(frozen=True)
class Candidate:
    """One combination of values for the flags that --parallel auto chooses."""

    plugin: str
    data_parallel_replicate: int
    reshard: str
    offload: str
    sequence_parallel_size: int
    tensor_parallel_size: int
    expert_parallel_size: int
    pipeline_parallel_size: int
    recompute: str
    grad_checkpoint: bool
    base_precision: str = "bf16"
    batch_size: int = 1
    grad_accumulation: int = 1

    @property
    def product(self) -> tuple[Any, ...]:
        """Return the settings that identify a candidate in the report: plugin, sharding, offloading and sizes."""
        sizes = (self.data_parallel_replicate, self.sequence_parallel_size, self.tensor_parallel_size)
        return self.plugin, self.reshard, self.offload, *sizes, self.expert_parallel_size, self.pipeline_parallel_size

    @property
    def sharing(self) -> int:
        """Number of ranks that share each sample."""
        return self.sequence_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def dimensions(self) -> int:
        """Number of kinds of parallelism in use, besides sharded data parallelism."""
        return sum(size > 1 for size in self.product if isinstance(size, int))

    def on(self, flags: TrainConfig) -> TrainConfig:
        """Return ``flags`` with the values of this candidate."""
        return replace(flags, parallel="flags", **asdict(self))

    def __str__(self) -> str:
        plain = TrainConfig()
        words = [f"--plugin {self.plugin}"]
        for name, value in asdict(self).items():
            if name == "batch_size" or (name != "plugin" and value != getattr(plain, name)):
                words.append(f"--{name}" if value is True else f"--{name} {value}")
        return " ".join(words)


@dataclass(frozen=True)
class Priced:
    """A candidate with its estimates: bytes of memory per rank, a step's cost, and a step's number of samples."""

    candidate: Candidate
    setup: Setup
    memory: float
    cost: StepCost
    samples: int

    @property
    def price(self) -> float:
        """Return the seconds per sample, increased by ``MARGIN`` for each kind of parallelism in use."""
        return self.cost.total / self.samples * (1 + MARGIN * self.candidate.dimensions)

    def limit(self) -> str:
        """Name the largest cost besides products and attention, with its fraction of the time. Return "products and
        attention alone" if that fraction is at most 0.5 %."""
        work, total = self.cost.work, self.cost.total
        found = {f"communication of {kind}": traffic.exposed for kind, traffic in self.cost.traffic.items()}
        found |= {
            "memory: recomputing": work.get("recomputed", 0),
            "the optimizer's step": work.get("update", 0),
            "the host": self.cost.waiting,
            "the pipeline's bubble": work.get("bubble", 0),
        }
        name, seconds = max(found.items(), key=lambda item: item[1])
        return f"{name} takes {seconds / total:.0%}" if seconds > 0.005 * total else "products and attention alone"


@dataclass(frozen=True)
class Circumstances:
    """A run's hardware: ``world`` ranks, ``node`` ranks per machine, and ``capacity`` bytes of memory per rank."""

    world: int
    node: int
    capacity: float
    hardware: HardwareModel
    has_gpu: bool = True

    def memory(self, needs: Estimate) -> float:
        """Return a rank's bytes, to compare with ``capacity``. On a CPU, they include the bytes in host memory."""
        return needs.total if self.has_gpu else needs.total + needs.host_total


class Search:
    """Search over all candidates that the flags allow, for one data set. held: flags that keep their values although
    the user did not give them."""

    def __init__(self, flags: TrainConfig, dataset: MediaDataset, where: Circumstances, held: Collection[str] = ()):
        self.dataset, self.where, self.fixed = dataset, where, flags.given | set(held)
        resolved, _ = flags.resolve(where.world, where.has_gpu)
        self.asked, _ = fit_captions(resolved, dataset, text_before(resolved))
        self.flags = replace(flags, max_text_tokens=self.asked.max_text_tokens)
        self.config: DiTConfig = plan_model(self.asked, dataset).config
        self.encoders = encoder_bytes(self.asked, self.config, dataset)
        self.types = self.asked.sequence_types(self.config.sequence_types, resolved.attention)
        self.refusal: ValueError | None = None
        self.taken: dict[Candidate, bool] = {}
        self.least: tuple[float, Candidate] | None = None

    def options(self, name: str, others: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try for a flag: the user's value, or ``others`` if there is none."""
        return (getattr(self.flags, name),) if name in self.fixed else others

    def storages(self) -> list[tuple[str, str]]:
        """Return pairs (--base_precision, --offload) to try, the most exact and fastest first, the smallest last."""
        flags, depth = self.flags, self.config.depth
        found = [("bf16", offload) for offload in OFFLOADED]
        if flags.lora is None:
            found += [("bf16", blocks) for blocks in parts_of_blocks(depth)]
        elif isinstance(self.config, PublicConfig):
            found += [(ONE_BYTE[flags.fp8] if base == "one" else base, blocks) for base, blocks in storages(depth)]
        if "base_precision" in self.fixed:
            found = [(flags.base_precision, offload) for _, offload in found]
        if "offload" in self.fixed:
            found = [(base, flags.offload) for base, _ in found]
        return list(dict.fromkeys(found))

    def forms(self, offload: str, pipelines: bool = False, base_precision: str = "bf16") -> Iterator[Candidate]:
        """Yield candidates; :meth:`batches` adds their micro-batch sizes. With ``pipelines``, a pipeline's stages lie
        on different machines, unless a flag sets the number of stages."""
        world, node = self.where.world, self.where.node
        here = [size for size in range(1, min(world, node) + 1) if min(world, node) % size == 0 and world % size == 0]
        groups = itertools.product(
            self.options("tensor_parallel_size", here), self.options("sequence_parallel_size", here)
        )
        # the user may ask for groups that span machines
        given = {"tensor_parallel_size", "sequence_parallel_size"} & self.fixed
        machines = [n for n in range(2, world // node + 1) if world % (node * n) == 0]
        stages = self.options("pipeline_parallel_size", machines if pipelines else [1])
        for (tensor, sequence), pipeline in itertools.product(groups, stages):
            sharing = tensor * sequence * pipeline
            if world % sharing or (not given and min(world, node) % (tensor * sequence)):
                continue
            for plugin in self.options("plugin", PLUGINS):
                if parse_offload(offload, self.flags.lora is not None)[0] != "none" and plugin != "fsdp":
                    continue
                for replicate, reshard in self.shards(plugin, sharing, sequence):
                    sizes = sequence, tensor, 1, pipeline
                    form = Candidate(plugin, replicate, reshard, offload, *sizes, "none", False, base_precision)
                    for experts, (recompute, checkpoint) in itertools.product(self.experts(form), self.levels()):
                        yield replace(
                            form, expert_parallel_size=experts, recompute=recompute, grad_checkpoint=checkpoint
                        )  # fmt: skip

    def experts(self, form: Candidate) -> Sequence[int]:
        """Return the values of --expert_parallel_size to try. Groups span machines only if the flag asks for it."""
        numbers = plan_of(self.config).divisible(self.config).get("ep")
        here = [1]
        if numbers and form.plugin == "fsdp" and form.tensor_parallel_size == 1:
            copies = form.data_parallel_replicate * form.pipeline_parallel_size
            node, copy = min(self.where.world, self.where.node), self.where.world // copies
            whole = [copy, node, *numbers.values()]
            here += [size for size in range(2, node + 1) if all(number % size == 0 for number in whole)]
        return self.options("expert_parallel_size", here)

    def levels(self) -> Iterator[tuple[str, bool]]:
        """Yield pairs (--recompute, --grad_checkpoint), from no recomputation to all blocks."""
        for checkpoint in self.options("grad_checkpoint", (False, True)):
            for recompute in self.options("recompute", ("none",) if checkpoint else RECOMPUTE):
                yield recompute, checkpoint

    def shards(self, plugin: str, sharing: int, sequence: int) -> Iterator[tuple[int, str]]:
        """Yield pairs (--data_parallel_replicate, --reshard) to try. A copy of the model fills complete machines."""
        if plugin != "fsdp":
            yield self.flags.data_parallel_replicate, self.flags.reshard
            return
        world, node = self.where.world, self.where.node
        copies = [n for n in range(2, world // node + 1) if (world // sharing) % n == 0 and world // n % node == 0]
        for replicate in self.options("data_parallel_replicate", [1, *copies]):
            alone = world // (sharing * replicate) * sequence == 1
            for reshard in self.options("reshard", ("never",) if alone else ("never", "after_forward")):
                yield replicate, reshard

    def batches(self, form: Candidate) -> Iterator[Candidate]:
        """Yield ``form`` with each micro-batch size that divides a rank's samples, the largest first."""
        flags, ranks = self.flags, self.where.world // form.sharing
        samples = self.samples()
        if samples < ranks or (samples % ranks and "global_batch_size" in self.fixed):
            return
        share = samples // ranks
        most = flags.batch_size if "batch_size" in self.fixed else share
        for size in range(min(share, most), 0, -1):
            if share % size == 0 and share // size in self.options("grad_accumulation", (share // size,)):
                yield replace(form, batch_size=size, grad_accumulation=share // size)

    def samples(self) -> int:
        """Return the number of samples in a step."""
        flags = self.flags
        if flags.global_batch_size is not None and "grad_accumulation" not in self.fixed:
            return flags.global_batch_size
        return flags.batch_size * flags.grad_accumulation * (self.where.world // flags.sharing)

    def accepts(self, candidate: Candidate, open: Sequence[str] = ()) -> bool:
        """Return True if the run would accept the candidate's flags unchanged, except those named in ``open``.
        :attr:`refusal` keeps the first error."""
        try:
            resolved, _ = candidate.on(self.flags).resolve(self.where.world, self.where.has_gpu)
            plan_model(resolved, self.dataset)
            check_expert_parallel(self.config, dims_of(candidate, self.where.world))
            tensor = candidate.tensor_parallel_size
            how = (resolved, resolved.attention, resolved.mixed_precision, self.config, candidate.batch_size)
            sequence_shape(*how, tensor_parallel=tensor, lora=resolved.lora is not None)
        except ValueError as error:
            self.refusal = self.refusal or error
            return False
        return all(getattr(resolved, name) == value for name, value in asdict(candidate).items() if name not in open)

    def setup(self, flags: TrainConfig, batch: int) -> Setup:
        """Return the settings for a memory estimate of a run with these flags and ``batch`` samples at once."""
        setup = memory_setup(flags, self.where.world, self.encoders)
        return resolve_sharding(self.config, setup, batch, self.where.capacity)

    def price(self, candidate: Candidate) -> Priced | None:
        """Estimate a candidate's memory and time. Return None if the candidate does not fit or is refused."""
        where, flags = self.where, candidate.on(self.asked)
        batch = samples_at_once(flags, self.config)
        setup = self.setup(flags, batch)
        memory = where.memory(estimate(self.config, setup, batch))
        if memory > where.capacity:
            if self.least is None or memory < self.least[0]:
                self.least = memory, candidate
            return None
        ranks = where.world // candidate.sharing
        try:
            cost = step_cost(
                self.config,
                setup,
                batch,
                candidate.grad_accumulation,
                where.hardware,
                where.node,
                sequence_type=flags.sequence_parallel_type,
                sequence_types=self.types,
                graph=flags.enable_cuda_graph,
            )
        except ValueError as error:
            self.refusal = self.refusal or error
            return None
        return Priced(candidate, setup, memory, cost, batch * candidate.grad_accumulation * ranks)

    def best(self, offload: str, pipelines: bool = False, base_precision: str = "bf16") -> list[Priced]:
        """Return the best candidate for each :attr:`Candidate.product`, the fastest first."""
        found: dict[tuple[Any, ...], Priced] = {}
        enough: dict[tuple[Any, ...], int] = {}  # product -> largest batch size that fits with less recomputation
        for form in self.forms(offload, pipelines, base_precision):
            if not self.takes(form):
                continue
            product = form.product
            # In a pipeline, small micro-batches may be faster: they leave stages idle for less time.
            least = 0 if form.pipeline_parallel_size > 1 else enough.get(product, 0)
            larger = (one for one in self.batches(form) if one.batch_size > least)
            fitting = filter(None, map(self.price, larger))
            for one in itertools.islice(fitting, BATCHES):
                enough[product] = max(enough.get(product, 0), one.candidate.batch_size)
                if product not in found or one.price < found[product].price:
                    found[product] = one
        return sorted(found.values(), key=lambda one: one.price)

    def takes(self, form: Candidate) -> bool:
        """Return True if the run would accept ``form`` with some micro-batch size."""
        plain = replace(form, data_parallel_replicate=self.flags.data_parallel_replicate, reshard=self.flags.reshard)
        if plain not in self.taken:
            self.taken[plain] = self.accepts(plain, open=("batch_size", "grad_accumulation"))
        return self.taken[plain]


def choose(
    flags: TrainConfig, dataset: MediaDataset, where: Circumstances, shown: int = SHOWN, held: Collection[str] = ()
) -> tuple[list[Priced], DiTConfig]:
    """Return the best candidates, the fastest first, and the model's configuration.

    At most ``shown`` candidates are returned, with different values of :attr:`Candidate.product`. If nothing fits,
    smaller storage is tried, and then pipelines. Raises ValueError with advice if nothing fits or all are refused.
    For ``held`` see :class:`Search`.
    """
    search = Search(flags, dataset, where, held)
    pipelines = (False, True) if "pipeline_parallel_size" not in search.fixed else (False,)
    for (base, offload), cut in itertools.product(search.storages(), pipelines):
        chosen = [one for one in search.best(offload, cut, base) if search.accepts(one.candidate)][:shown]
        if chosen:
            return chosen, search.config
    flag = "--recompute auto" if held else "--parallel auto"
    if search.least is not None:
        memory, candidate = search.least
        raise ValueError(
            f"{flag}: nothing fits {where.capacity / GIB:,.1f} GiB a rank; the smallest, {candidate}, "
            f"needs {memory / GIB:,.1f}; take more GPUs, a smaller --model, or fewer of the flags that were given"
        )
    if search.refusal is not None:
        raise search.refusal
    raise ValueError(
        f"{flag}: {search.samples()} samples a step can't be shared by {where.world} ranks evenly; change "
        "--global_batch_size"
    )


def decide(
    flags: TrainConfig, dataset: MediaDataset, where: Circumstances, origin: str
) -> tuple[TrainConfig, list[str]]:
    """Return the flags with the values that --parallel auto, --card or --recompute auto chooses, and lines that explain
    the choice. origin: source of the hardware's measurements. For errors see :func:`choose` and :func:`fit`."""
    held = set[str]()
    if flags.recompute == AUTO:
        needed = BUT_ATTENTION if flags.streamed_blocks and flags.plugin != "fsdp" else "none"
        flags = replace(flags, recompute=needed, given=flags.given - {"recompute"})
        if flags.parallel != AUTO and flags.card is None:
            held = {each.name for each in fields(Candidate)} - {"recompute", "grad_checkpoint"}
            resolved, _ = flags.resolve(where.world, where.has_gpu)
            sizes = {"batch_size": resolved.batch_size, "grad_accumulation": resolved.grad_accumulation}
            flags = replace(flags, **sizes)
    if flags.parallel != AUTO and not held:
        return fit(flags, dataset, where)
    chosen, config = choose(flags, dataset, where, held=held)
    lines, one = report(chosen, config, where, origin), chosen[0]
    if held:
        words = "--grad_checkpoint" if one.candidate.grad_checkpoint else f"--recompute {one.candidate.recompute}"
        used = f"{one.memory / GIB:,.2f} of {where.capacity / GIB:,.2f} GiB by the estimate"
        speed = f"{1e3 * one.cost.total:,.0f} ms a step predicted at {origin.partition(':')[0]} speed"
        other = "" if where.has_gpu or flags.hardware else "; this machine has no GPU"
        lines = [f"--recompute auto: {words}: {used}, {speed}{other}"]
    return one.candidate.on(flags), lines


def decide_on_ranks(flags: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, Mesh]:
    """Choose values on rank 0 by :func:`decide`, and print why. Every rank gets the flags and its new mesh, or raises
    rank 0's error. All ranks must call this."""
    where, origin = circumstances(flags, mesh)
    found = flags, None
    if mesh.is_main:
        try:
            decided, lines = decide(flags, data_of(flags, where), where, origin)
            print("\n".join(lines), flush=True)
            found = decided, None
        except (ValueError, OSError, DataError) as error:
            found = flags, error
    decided, error = mesh.broadcast_object(found)
    if error is not None:
        raise error
    dims = dims_of(decided, mesh.world_size)
    return decided, mesh if dims == mesh.dims else mesh.divided(dims)


def circumstances(flags: TrainConfig, mesh: Mesh) -> tuple[Circumstances, str]:
    """Return the run's hardware, and the source of its measurements. All ranks must call this.

    The capacity comes from --card. Without --card, it is the smallest GPU's usable memory, or a rank's share of host
    memory if there are no GPUs. Raises ValueError for a wrong --hardware or --card.
    """
    has_gpu = mesh.device.type == "cuda"
    card = torch.cuda.get_device_name(mesh.device) if has_gpu else None
    memory = card_memory(mesh.device)
    here = environment_node_size() or mesh.world_size
    usable = mesh.least(USABLE_OF_A_HOST * host_memory() / here if memory is None else USABLE * memory)
    hardware, origin = find_hardware(flags.hardware, card)
    if not has_gpu and flags.hardware is None:
        origin += "; this machine has no GPU"
    if flags.card not in (None, AUTO):
        hardware, origin = on_card(flags.card, hardware, origin)
        usable = USABLE * hardware.capacity
    return Circumstances(mesh.world_size, flags.node_size(mesh.world_size), usable, hardware, has_gpu), origin


def data_of(flags: TrainConfig, where: Circumstances) -> MediaDataset:
    """Open the data set. The flags are resolved first, because --pretrained may set the samples' size."""
    return open_data(flags.resolve(where.world, where.has_gpu)[0])


def report(chosen: list[Priced], config: DiTConfig, where: Circumstances, origin: str) -> list[str]:
    """Return lines that list the best candidates, their estimates, and the largest cost of each."""
    nodes = f", {where.node} a node" if where.world > where.node else ""
    lines = [
        f"--parallel auto: {where.world} ranks{nodes}, {where.capacity / GIB:,.1f} GiB each, figures of {origin}; "
        f"{chosen[0].samples:,} samples of {config.tokens:,} tokens a step; taken: the first"
    ]
    for number, one in enumerate(chosen, 1):
        cost, candidate = one.cost, one.candidate
        rate = tokens_per_second(config, one.setup, candidate.batch_size, candidate.grad_accumulation, cost.total)
        lines.append(
            f"{number}. {1e3 * cost.total:,.0f} ms, {rate:,.0f} tokens/s a rank, {one.memory / GIB:,.1f} GiB; "
            f"{one.limit()}: {candidate}"
        )
    return lines


RANKS = (16, 4)  # LoRA ranks to try, in this order
CARD_BATCHES = (4, 2, 1)
FLOAT8 = ("H100", "H200")  # cards for which FP8 kernels exist


def on_card(card: str, hardware: HardwareModel, origin: str) -> tuple[HardwareModel, str]:
    """Return the hardware to plan for, and the origin of its rates. Raises ValueError for an unknown card.

    Args:
        card: a known card's name, a number of GiB, or "auto" for ``hardware`` itself.
        hardware: rates of a card of which only the GiB are known. origin: origin of these rates.
    """
    if card == AUTO:
        return hardware, origin
    if (known := of_card(card)) is not None:
        return known, f"{known.name}: {known.origin}"
    try:
        memory = float(card)
    except ValueError:
        raise ValueError(f"--card {card}: not known; give its GiB, or one of auto, none, {', '.join(CARDS)}") from None
    if not 1 <= memory <= 10_000:
        raise ValueError(f"--card {card}: out of range; give GiB from 1 to 10,000")
    return replace(hardware, name=f"a card of {card} GiB", capacity=memory * GIB), origin


def candidates(search: Search, float8: bool) -> Iterator[dict[str, Any]]:
    """Yield dictionaries flag -> value, the most exact and fastest first, those with the least memory last."""
    flags, options = search.flags, search.options
    # fsdp needs less memory than zero2: it also shards the frozen weights
    plugins = options("plugin", PLUGINS if search.where.world > 1 else ("zero2",))
    public, stored = isinstance(search.config, PublicConfig), [("bf16", flags.offload)]
    levels = [(level, False) for level in options("recompute", RECOMPUTE)]
    levels += [("none", True)] if "none" in options("recompute", RECOMPUTE) else []
    if public:
        asked = [name in flags.given for name in ("base_precision", "offload")]
        given = flags.base_precision, flags.offload
        plans = storages(search.config.depth)
        own = ([g if a else s for a, g, s in zip(asked, given, plan, strict=True)] for plan in plans)
        stored = list(dict.fromkeys((base, offload) for base, offload in own))
    for rank, (base, offload), plugin, (recompute, checkpoint), fp8, size in itertools.product(
        options("lora", RANKS),
        stored,
        plugins,
        levels,
        options("fp8", (False, True) if float8 else (False,)),
        options("batch_size", CARD_BATCHES),
    ):
        _, streamed = parse_offload(offload, frozen=True)
        sharded = plugin == "fsdp" and search.where.world > 1
        if streamed and not sharded and not (checkpoint or recompute == BUT_ATTENTION):
            continue
        base = ONE_BYTE[fp8] if base == "one" else base
        chosen = {"base_precision": base, "offload": offload} if public else {}
        if checkpoint in options("grad_checkpoint", (False, True)):
            yield chosen | {
                "lora": rank, "plugin": plugin, "recompute": recompute, "grad_checkpoint": checkpoint, "fp8": fp8,
                "batch_size": size,
            }  # fmt: skip


def fit(flags: TrainConfig, dataset: MediaDataset, where: Circumstances) -> tuple[TrainConfig, list[str]]:
    """Return the flags with the first fitting candidate's values, and lines that explain the choice. Raises ValueError
    with advice if no candidate fits or all are refused."""
    search = Search(flags, dataset, where)
    config = search.config
    refusal: ValueError | None = None
    too_large: list[tuple[float, str]] = []
    float8 = missing("float8") is None if where.has_gpu and flags.dry_run is None else where.hardware.name in FLOAT8
    for candidate in candidates(search, float8):
        changed = replace(search.flags, **candidate)
        try:
            resolved, _ = changed.resolve(where.world, where.has_gpu)
            config.check_speed(resolved.fp8, resolved.recompute)
        except ValueError as error:
            refusal = refusal or error
            continue
        if any(getattr(resolved, name) != candidate[name] for name in ("fp8", "recompute")):
            continue  # the run would override this value
        batch = samples_at_once(resolved, config)
        setup = search.setup(resolved, batch)
        if (count := _fewest_recomputed(changed, config, setup, batch, where)) < config.depth:
            changed, resolved = (replace(each, recompute_blocks=count) for each in (changed, resolved))
            setup = replace(setup, recompute_blocks=count)
        needs = estimate(config, setup, batch)
        memory = where.memory(needs)
        words = _words(resolved)
        if memory > where.capacity:
            too_large.append((memory, words))
            continue
        place = where.hardware.name if where.has_gpu else "host memory"
        layers = f"at {' '.join(flags.lora_targets) or 'all linear layers of attention and MLPs'}"
        lines = [
            f"--card {flags.card}: {words}",
            f"  {memory / GIB:,.2f} of {where.capacity / GIB:,.2f} GiB ({place}) by the estimate: {parts(needs)}",
            f"  {trained_count(config, setup) / 1e6:,.1f} M trained weights, {layers}",
        ]
        lines += [f"  gives up: {what}" for what in _given_up(resolved, config, setup, needs)]
        if too_large:
            more, before = min(too_large)
            lines.append(f"  faster, if it fitted: {before}, {more / GIB:,.2f} GiB")
        return changed, lines
    if too_large:
        memory, words = min(too_large)
        encoders = search.encoders
        hint = f"cache latents ({encoders / GIB:,.1f} GiB are encoders; preprocess.py latents), " if encoders else ""
        hint += "add --text_precision nf4, " if encoders and flags.text_precision != "nf4" else ""
        raise ValueError(
            f"--card {flags.card}: {where.capacity / GIB:,.1f} GiB can be used, and {words} needs {memory / GIB:,.1f}; "
            f"{hint}take more GPUs, a smaller --image_size, or fewer of the flags that were given"
        )
    assert refusal is not None, "every candidate was refused or measured"
    raise refusal


def _fewest_recomputed(flags: TrainConfig, config: DiTConfig, setup: Setup, batch: int, where: Circumstances) -> int:
    """Return the smallest number of recomputed blocks with which a step fits; all blocks if flags fix the number."""
    depth = config.depth
    chosen = {"recompute", "grad_checkpoint", "recompute_blocks"} & flags.given or setup.pipeline_parallel > 1
    if not setup.checkpointed or chosen:
        return depth

    def fits(count: int) -> bool:
        return where.memory(estimate(config, replace(setup, recompute_blocks=count), batch)) <= where.capacity

    fewest = max(1, min(depth, setup.streamed_blocks))  # streamed blocks are recomputed
    return fewest + bisect.bisect_left(range(fewest, depth), True, key=fits)


def _words(flags: TrainConfig) -> str:
    found = [f"--lora {flags.lora}", f"--mixed_precision {flags.mixed_precision}", *(["--fp8"] if flags.fp8 else [])]
    if flags.base_precision != "bf16":
        found.append(f"--base_precision {flags.base_precision}")
    if flags.streamed_blocks:
        found.append(f"--offload {flags.offload}")
    found += ["--grad_checkpoint"] if flags.grad_checkpoint else [f"--recompute {flags.recompute}"]
    found += [] if flags.recompute_blocks is None else [f"--recompute_blocks {flags.recompute_blocks}"]
    found += [f"--batch_size {flags.batch_size}", f"--grad_accumulation {flags.grad_accumulation}"]
    return " ".join([*found, f"--plugin {flags.plugin}"])


# Values of --recompute in words.
RECOMPUTED = {
    "norms": "norms are",
    "cheap": "norms and activations are",
    "half": "norms, activations and every other MLP's first product are",
    "mlp": "norms, activations and the MLPs' first product are",
}
# Relative errors of LoRA's gradients, measured by benchmarks/bench_base_precision.py on a small model.
ERRORS = {"fp8": "about 5 %", "int8": "about 1 %", "nf4": "about 17 %"}


def _given_up(flags: TrainConfig, config: DiTConfig, setup: Setup, needs: Estimate) -> Iterator[str]:
    """Yield a line for each loss of accuracy or time that the flags cause."""
    if flags.base_precision != "bf16":
        kind = flags.base_precision
        yield f"exact frozen weights: stored in {kind}, LoRA's gradients are off by {ERRORS[kind]}"
    if setup.checkpointed:
        again = config.depth - setup.kept_blocks(config.depth)
        yield f"time: {again} of {config.depth} blocks are computed again in the backward pass"
    elif flags.recompute != "none":
        yield f"time: {RECOMPUTED[flags.recompute]} computed again in the backward pass"
    if blocks := needs.host.get("blocks"):
        yield f"time, if the link is slow: {blocks / GIB:,.1f} GiB of blocks come from host memory, twice a step"
