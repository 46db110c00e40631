"""Parse command lines strictly with argparse, and format --help by component.

Flags are written with underscores (``--batch_size``); dashes are accepted. A boolean flag ``--x`` also has ``--no_x``.
:func:`parse` converts a command line to a configuration: a recipe's flags override the defaults, a YAML file's flags
override the recipe's, and the command line's flags override all. A mistake ends the program with one line.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, cast

from opendit.config.console import name_of, print_error, should_print
from opendit.config.flags import Value, default_of, flags_of, headings_of, nearest, scalar_type, show, value_of
from opendit.config.recipes import find_recipe, listing

# OpenDiT's flags, the preferred one first -> equivalent flags of other programs.
_OURS = {
    "--ckpt --pretrained": "checkpoint checkpoint_path ckpt_path",
    "--pretrained --ckpt": "base_model base_model_path model_id model_name_or_path model_path pretrained_model "
    "pretrained_model_name_or_path pretrained_model_path transformer_path",
    "--lr": "learning_rate base_lr unet_lr dit_lr transformer_lr",
    "--global_seed --seed": "seed random_seed manual_seed",
    "--image_size": "resolution height width size image_resolution img_size",
    "--mixed_precision": "dtype torch_dtype precision weight_dtype amp",
    "--load": "resume resume_from resume_from_checkpoint resume_checkpoint",
    "--batch_size": "train_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size",
    "--epochs": "num_train_epochs max_train_epochs num_epochs max_epochs",
    "--output --outputs": "output_dir out_dir results_dir save_dir logging_dir",
    "--grad_accumulation": "gradient_accumulation gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "--grad_checkpoint": "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing",
    "--max_steps": "max_train_steps num_train_steps train_steps total_steps train_iters iterations",
    "--lora": "rank lora_rank network_dim network_rank network_module lora_weights lora_path lora_model_path",
    "--lora_alpha": "network_alpha alpha",
    "--lora_targets": "target_modules lora_target_modules lora_layers",
    "--base_precision": "fp8_base base_model_precision quantize quantization",
    "--flow_times": "timestep_sampling weighting_scheme",
    "--flow_shift": "discrete_flow_shift timestep_shift",
    "--min_snr": "min_snr_gamma snr_gamma",
    "--optimizer": "optimizer_type optim",
    "--data_path": "train_data_dir train_data instance_data_dir data_dir data_root dataset "
    "dataset_config dataset_name dataset_path",
    "--num_sampling_steps --sample_steps": "num_inference_steps inference_steps num_steps",
    "--num_sampling_steps --max_steps": "steps",
    "--cfg_scale --sample_cfg_scale": "guidance_scale guidance cfg",
    "--sample_prompts": "validation_prompt validation_prompts sample_prompt",
    "--sample_every": "validation_steps validation_epochs sample_every_n_steps sample_steps_interval",
    "--ckpt_every": "checkpointing_steps save_steps save_every save_every_n_steps save_interval",
    "--ckpt_keep": "checkpoints_total_limit save_total_limit",
    "--lr_schedule": "lr_scheduler lr_scheduler_type",
    "--warmup_steps": "lr_warmup_steps num_warmup_steps",
    "--weight_decay": "adam_weight_decay",
    "--grad_clip": "max_grad_norm gradient_clip_val clip_grad_norm",
    "--num_workers": "dataloader_num_workers max_data_loader_n_workers",
    "--log_to": "report_to log_with logger",
    "--log_every": "logging_steps log_interval",
    "--label_drop": "class_dropout_prob cfg_dropout caption_dropout_rate proportion_empty_prompts",
    "--enable_flashattn": "xformers enable_xformers_memory_efficient_attention use_flash_attn sdpa",
    "--num_samples": "num_images num_images_per_prompt num_videos n_samples",
    "--prompt": "text caption",
    "--prompt --sample_prompts": "prompt_file prompts_file prompts_path from_file",
    "--sampler": "scheduler scheduler_type",
    "--bucket_tokens": "enable_bucket aspect_ratio_bucketing",
    "--caption_prefix": "trigger_word trigger instance_prompt",
    "--caption_column": "text_column",
    "--file_column": "image_column video_column",
}
_NONE_HERE = {
    "cache_latents cache_latents_to_disk cache_text_encoder_outputs": "preprocess.py latents encodes once",
    "lora_scale lora_weight lora_strength": "the weight follows the LoRA: --lora RUN:0.8",
    "repeats num_repeats dataset_repeats": "--data_path A:2,B:1 weights several sources, and epochs repeat them",
    "use_8bit_adam adam_8bit": "--optimizer adamw8bit keeps the moments in 8 bits",
    "save_every_n_epochs": "--ckpt_every counts steps",
    "center_crop": "pictures are cropped at their centre; --random_crop crops elsewhere",
    "use_ema ema": "averaged weights are always kept; --ema_decay sets how",
    "allow_tf32": "what stays in fp32 uses TF32 anyway",
    "with_prior_preservation prior_loss_weight class_data_dir class_prompt num_class_images reg_data_dir": (
        "regularisation pictures are a source of a blend (docs/mixing.md)"
    ),
    "caption_extension": "captions are read from name.txt, name.caption or a table (docs/data.md)",
    "keep_tokens": "--caption_prefix stays in front of shuffled tags",
    "lora_dropout network_dropout": "LoRA has no dropout",
    "text_encoder_lr train_text_encoder network_train_unet_only": "text encoders are never trained",
    "blocks_to_swap block_swap": "--offload blocks:N keeps N blocks in host memory",
    "fps frame_rate": "a clip's rate follows from training; --frame_interval changes it",
    "num_gpus gpus num_devices nproc_per_node num_processes": "torchrun --nproc_per_node starts a process a GPU",
}
_NAMES = {theirs: ours.split() for ours, several in _OURS.items() for theirs in several.split()}
_SENTENCES = {theirs: sentence for several, sentence in _NONE_HERE.items() for theirs in several.split()}


def counterpart(name: str, flags: Collection[str]) -> str | None:
    """Return advice about ``name``, another program's flag without dashes, or None. flags: all flags of this program,
    such as ``--lr``."""
    known = [ours for ours in _NAMES.get(name, ()) if ours in flags]
    return f"here it is {known[0]}" if known else _SENTENCES.get(name)


LEFT = 30  # columns to the left of a flag's description
WIDTHS = (80, 120)  # least and largest line length; the terminal's width is used in between
STARTS = ("python ", "opendit ", "torchrun ")  # first words of an example command
COMMAND = re.compile(rf"\s*({'|'.join(STARTS)})")
REQUIRED = "(required)"
SWITCH_NOTE = "--[no_]x: --x switches x on, --no_x off. In brackets: the default."


@dataclass(frozen=True)
class HelpEntry:
    """A flag, positional argument or command in --help.

    Attributes:
        written: form on a command line, with the value's placeholder.
        values: range and default.
        common: text for the short help. True means the first clause of ``about``; False leaves the entry out.
    """

    name: str
    written: str
    about: str
    values: str = ""
    common: bool | str = False

    def lines(self, width: int) -> list[str]:
        left, text = f"  {self.written}", f"{self.about} {self.values}".rstrip()
        left = f"{left:<{LEFT - 2}}  "
        if len(left) + len(text) <= width:
            return [(left + text).rstrip()]
        wrapped = textwrap.wrap(text, width - LEFT, break_long_words=False, break_on_hyphens=False)
        first = [left.rstrip()] if len(left) > LEFT else [left + wrapped.pop(0)]
        return first + [" " * LEFT + line for line in wrapped]

    def in_short(self) -> "HelpEntry":
        return replace(self, about=self.common if isinstance(self.common, str) else self.about.partition(";")[0])


@dataclass
class Section:
    """A heading of --help, "Title: subject", with its entries."""

    heading: str
    entries: list[HelpEntry] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.heading.partition(": ")[0]

    def lines(self, width: int, entries: Iterable[HelpEntry]) -> list[str]:
        shown = [line for entry in entries for line in entry.lines(width)]
        return [self.heading, *shown] if shown else []


def entry(
    name: str,
    takes: Value | None,
    about: str,
    default: Any,
    *,
    common: bool | str = False,
    alias: str | None = None,
    metavar: str | None = None,
    nargs: str | None = None,
    required: bool = False,
) -> HelpEntry:
    """Create the entry of a flag. takes: allowed values; None for a switch."""
    bare = name.lstrip("-")
    if takes is None:
        state = "" if default is None else f"[{'on' if default else 'off'}]"
        return HelpEntry(bare, f"--[no_]{bare}", about, state, common)
    value = metavar or takes.metavar or bare.upper()
    value = {"?": f"[{value}]", "+": f"{value} ...", "*": f"[{value} ...]"}.get(nargs or "", value)
    names = f"{name}, {alias}" if alias else name
    allowed = takes.allowed()
    values = [f"({allowed})"] * bool(allowed) + [REQUIRED] * required
    values += [] if default in (None, []) else [f"[{default}]"]
    return HelpEntry(bare, f"{names} {value}" if name.startswith("-") else value, about, " ".join(values), common)


def page(
    program: str, usage: str, about: str, sections: Sequence[Section], examples: Sequence[str], topic: str | None
) -> str:
    """Return the text of --help, --help all or --help TOPIC. Raises ValueError for an unknown topic."""
    width = min(max(shutil.get_terminal_size((WIDTHS[1], 24)).columns, WIDTHS[0]), WIDTHS[1])
    sections = [section for section in sections if section.entries]
    total = sum(len(section.entries) for section in sections)
    chosen = {section.title: section.entries for section in sections}
    if topic is None:
        common = {section.title: [one.in_short() for one in section.entries if one.common] for section in sections}
        chosen = common if any(common.values()) else chosen
    elif topic != "all":
        return "\n".join(_topic(topic, sections, width)) + "\n"
    lines = [
        *textwrap.wrap(f"usage: {program} {usage}", width, subsequent_indent=" " * 7),
        "",
        *textwrap.wrap(about, width),
        "",
    ]
    for section in sections:
        lines += section.lines(width, chosen[section.title])
        lines += [""] if topic == "all" and chosen[section.title] else []
    lines += [""] * (lines[-1] != "")
    if any("--[no_]" in one.written for entries in chosen.values() for one in entries):
        lines += [SWITCH_NOTE]
    if (hidden := total - sum(map(len, chosen.values()))) > 0:
        titles = ", ".join(section.title.lower().replace(" ", "_") for section in sections)
        more = f"{hidden} more flags: {program} --help all, or --help HEADING ({titles})."
        lines += textwrap.wrap(more, width, break_on_hyphens=False)
    if examples:
        lines += [""] * (lines[-1] != "")
        lines += ["Examples:", *(f"  {started_as(program, example)}" for example in examples)]
    return "\n".join(lines).rstrip() + "\n"


def started_as(program: str, example: str) -> str:
    """Rewrite an example to the form in which the program was started, such as ``opendit train``."""
    if not program.startswith("opendit "):
        return example
    example = re.sub(r"python (train|sample|preprocess)\.py", r"opendit \1", example)
    example = re.sub(r"(torchrun .*?)(?<![\w./])(train|sample|preprocess)\.py", r"\1-m opendit \2", example)
    return example


def _topic(topic: str, sections: Sequence[Section], width: int) -> list[str]:
    wanted = topic.lstrip("-").lower().replace(" ", "_").replace("-", "_")
    for section in sections:
        if section.title.lower().replace(" ", "_") == wanted:
            return section.lines(width, section.entries)
    for section in sections:
        if found := [one for one in section.entries if one.name.lower() in (wanted, wanted.removeprefix("no_"))]:
            return section.lines(width, found)
    known = ["all", *(section.title.lower().replace(" ", "_") for section in sections)]
    known += [one.name for section in sections for one in section.entries]
    raise ValueError(f"--help {topic}: no such heading or flag; did you mean {nearest(wanted, known)}?")


# Flags about a run's start, not about its training. Setting them does not change a recipe.
NO_CHANGE = {"recipe", "config", "dry_run", "outputs", "load"}


class CommandLine(argparse.ArgumentParser):
    """A parser that prints one line about a mistake, with the flag and the fix, and ends with exit code 2.

    Only the first of several ranks prints the line. In --help, every flag belongs to a heading.

    Args:
        doc: the program's docstring. Its commands are the examples of --help if ``examples`` is None.

    Attributes:
        arguments: (action, allowed values) of every flag and positional argument with a value.
        commands: the parsers of subcommands.
        defaults: the default of every flag. argparse's result contains only the flags on the command line.
        source: prefix of errors about arguments that come from a file.
    """

    def __init__(self, prog: str, doc: str = "", examples: Sequence[str] | None = None, **options: Any):
        # paragraphs without commands describe the program
        about = [part for part in doc.split("\n\n") if not any(map(COMMAND.match, part.splitlines()))]
        described = " ".join(" ".join(about).replace("``", "").split())
        options = {"allow_abbrev": False, "add_help": False, "description": described, **options}
        super().__init__(prog, **options)
        commands = [line.strip() for line in doc.splitlines() if COMMAND.match(line)]
        self.examples = commands if examples is None else examples
        self.add_argument("--help", action=_Help, nargs="?", default=argparse.SUPPRESS, help="show this and end")
        # A word with a single dash is a value, such as -inf or a negative number, because all flags have two dashes.
        self._negative_number_matcher = re.compile("-[^-]")
        self.arguments: list[tuple[argparse.Action, Value]] = []
        self.commands: dict[str, CommandLine] = {}
        self.defaults: dict[str, Any] = {}
        self.sections: list[Section] = []
        self.source = ""

    # ------------------------------------------------------------------------------------------------- declaring

    def heading(self, heading: str) -> None:
        """Start a heading of --help, "Title: subject", for the flags that are added next."""
        if not self.sections or self.sections[-1].title != Section(heading).title:
            self.sections.append(Section(heading))

    def option(
        self,
        name: str,
        takes: Value,
        help: str,
        default: Any = None,
        alias: str | None = None,
        common: bool | str = False,
        **options: Any,
    ) -> None:
        """Add a flag or a positional argument. common: see :func:`opendit.config.flags.flag`. options: further
        arguments of add_argument."""
        shown = {name: options[name] for name in ("nargs", "metavar", "required") if name in options}
        self._show(entry(name, takes, help, default, common=common, alias=alias, **shown))
        options = {"metavar": takes.metavar, "type": takes.read, "help": help.replace("%", "%%"), **options}
        if name.startswith("-"):
            options["default"] = argparse.SUPPRESS
            self.defaults[name.lstrip("-")] = default
        self.arguments.append((self.add_argument(name, *([alias] if alias else []), **options), takes))

    def switch(self, name: str, help: str, default: bool | None = False, common: bool | str = False) -> None:
        """Add a switch ``--x`` and its opposite ``--no_x``."""
        bare = name.lstrip("-")
        self.defaults[bare] = default
        self._show(entry(name, None, help, default, common=common))
        options: dict[str, Any] = dict(action="store_const", dest=bare, default=argparse.SUPPRESS)
        self.add_argument(name, const=True, help=help.replace("%", "%%"), **options)
        self.add_argument(f"--no_{bare}", const=False, help=f"not --{bare}", **options)

    def command(self, name: str, about: str, heading: str = "Commands: what can be done") -> "CommandLine":
        """Add a subcommand and return its parser."""
        if self._subparsers is None:
            self._commands = self.add_subparsers(dest="command", metavar="COMMAND")
        self.heading(heading)
        self._show(HelpEntry(name, name, about))
        described = f"{about[:1].upper()}{about[1:]}."
        self.commands[name] = self._commands.add_parser(name, help=about, description=described)
        self.commands[name].examples = [line for line in self.examples if f" {name} " in f"{line} "]
        return self.commands[name]

    def _show(self, shown: HelpEntry) -> None:
        if not self.sections:
            raise TypeError(f"{shown.written} has no heading: call heading() before")
        self.sections[-1].entries.append(shown)

    def format_help(self, topic: str | None = None) -> str:
        """Return the text of --help for "all", a heading, a flag or a subcommand; the short help for None. Raises
        ValueError for an unknown topic."""
        if topic in self.commands:
            return self.commands[topic].format_help("all")
        entries = [one for section in self.sections for one in section.entries]
        words = [one.written for one in entries if not one.written.startswith("-") or REQUIRED in one.values]
        usage = "COMMAND [FLAG [VALUE]] ..." if self.commands else " ".join([*words, "[FLAG [VALUE]] ..."])
        text = page(self.prog, usage, self.description or "", self.sections, self.examples, topic)
        if self.commands and topic == "all":
            text += "".join(f"\n{command.format_help('all')}" for command in self.commands.values())
        elif self.commands and topic is None:
            text += f"\n{self.prog} COMMAND --help shows a command's flags.\n"
        return text

    # --------------------------------------------------------------------------------------------------- parsing

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
        """Return (values of all flags, names of the flags that are among ``words``)."""
        found = vars(self.parse_args(words))
        chosen = self.commands.get(found.get("command", ""), self)
        return {**chosen.defaults, **found}, set(found)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does. Also accept dashes for underscores in flags, and values that begin with a dash."""
        words = ["--help" if word == "-h" else underscored(word) for word in (sys.argv[1:] if args is None else args)]
        if not self.commands:
            self._check_words(words[: words.index("--")] if "--" in words else words)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does. The error about an unknown flag suggests the most similar flag."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.fail(self._suggest(unknown[0]))
        return found

    def _check_words(self, words: list[str]) -> None:
        """End the program if a flag is unknown or a switch has a value. Print a note for each repeated flag."""
        positional = any(not action.option_strings for action in self._actions)
        for before, word in zip(["", *words], words, strict=False):
            flag_before = self._option_string_actions.get(before)
            if word.startswith("--"):
                if word.partition("=")[0] not in self._option_string_actions:
                    self.fail(self._suggest(word))
            elif flag_before is not None and flag_before.nargs == 0 and not positional:
                self.fail(f"{before} {show(word)}: takes no value; write {self._both(before)}")
        for note in self._repeated(words):
            if should_print(note):
                print(f"note: {self.source}{note}", flush=True)

    def _repeated(self, words: list[str]) -> Iterator[str]:
        """Yield a note for each flag that is repeated with another value, or as its opposite. Repeated flags are no
        error, because users append flags to a script's command line."""
        before: dict[str, list[str]] = {}
        starts = [place for place, word in enumerate(words) if word.startswith("--")]
        for start, stop in itertools.pairwise([*starts, len(words)]):
            name, equals, value = words[start].partition("=")
            flag = [name, *([value] if equals else words[start + 1 : stop])]
            dest = self._option_string_actions[name].dest
            if (earlier := before.get(dest, flag)) != flag:
                yield f"{shlex.join(earlier)}: {shlex.join(flag)} comes later on the command line, and counts"
            before[dest] = flag

    # -------------------------------------------------------------------------------------------------- mistakes

    def error(self, message: str) -> NoReturn:
        """Reword a message of argparse and end the program."""
        message = re.sub(r"^argument ([^:/]+)(/[^:]+)?: ", r"\1: ", message)
        name = message.partition(":")[0]
        if choice := re.match(r"(.+): invalid choice: '(.*)' \(choose from (.+)\)$", message, re.DOTALL):
            names = [name.strip("'\" ") for name in choice[3].split(",")]
            message = f"{choice[2]}: no such {choice[1].lower()}; did you mean {nearest(choice[2], names)}?"
        elif re.search(": expected (at least )?one argument$", message):
            message = f"{name}: no value; give {self._describe(name)}"
        elif missing := re.match(r"the following arguments are required: ([^,\s]+)", message):
            message = f"{missing[1]}: missing; give {self._describe(missing[1])}"
        elif "ignored explicit argument" in message:
            message = f"{name}: takes no value; write {self._both(name)}"
        elif value := re.match(r"(-\S+|[A-Za-z]\S*): (.*)$", message, re.DOTALL):
            message = f"{value[1]} {value[2]}"  # Value.read's message begins with the value
        self.fail(message)

    def fail(self, error: Exception | str) -> NoReturn:
        """End the program with exit code 2 and one line."""
        if should_print(error):
            print_error(f"{self.source}{error}" if self.source else error)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun ends all processes when one ends, so let the first rank print
            time.sleep(5)
        self.exit(2)

    def _describe(self, name: str) -> str:
        for action, takes in self.arguments:
            if name in action.option_strings or name == action.metavar:
                text = takes.kind is str and takes.choices is None
                return f"{name} {action.metavar or 'TEXT'}" if text and name.startswith("-") else takes.describe()
        return "one of " + ", ".join(self.commands)

    def _both(self, name: str) -> str:
        return f"{name}, or --no_{name[2:]}" if f"--no_{name[2:]}" in self._option_string_actions else name

    def _suggest(self, word: str) -> str:
        """Return a message about an unknown flag such as ``optim.lr=1e-4``, with a similar or equivalent flag."""
        flags, shows_all = sorted(self._option_string_actions), f"({self.prog} --help all shows all)"
        name, equals, value = word.partition("=")
        if not word.startswith("-") and not equals:
            return f"{word}: a value without a flag; write --name value {shows_all}"
        bare = name.lstrip("-").split(".")[-1].replace("-", "_")
        ours, like = counterpart(bare, flags), nearest(bare, (flag.lstrip("-") for flag in flags), cutoff=0.6)
        if bare == "data_path" and any(not action.option_strings for action in self._actions):
            ours = "write the path without a flag"
        elif ours is None and like:
            ours = f"did you mean --{like}{'' if word.startswith('-') else f' {value}'}?"
        no_flag = f"{name}: no such flag" if word.startswith("-") else f"{word}: no flag"
        return f"{no_flag}; {ours} {shows_all}" if ours else f"{no_flag}; {shows_all[1:-1]}"


def underscored(word: str) -> str:
    """Convert --data-path=x-y to --data_path=x-y. Other words do not change."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class _Help(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        assert isinstance(parser, CommandLine) and (values is None or isinstance(values, str))
        try:
            print(parser.format_help(values), end="")
        except ValueError as error:
            parser.fail(error)
        parser.exit()


class _OneOrMore(argparse.Action):
    """Argparse action that stores several values as a list, and a single value without a list."""

    def __call__(self, parser, namespace, values, option_string=None):
        assert values  # nargs "+" guarantees a value
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


# ------------------------------------------------------------------------------------------------------ configurations


class ProgramFlags(Protocol):
    """Interface of a program's configuration, a frozen dataclass of components."""

    program: ClassVar[str]  # the name by which the program is started
    examples: ClassVar[tuple[str, ...]]

    def world_size(self) -> int: ...

    def resolve(self, world_size: int, has_gpu: bool) -> Any: ...


P = TypeVar("P", bound=ProgramFlags)


def suggests_flags(cls: type[P]) -> type[P]:
    """Make the TypeError for an unknown keyword of a configuration suggest a flag, as the command line does."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: P, *args: Any, **values: Any) -> None:
        names = [item.name for item in dataclasses.fields(cast(Any, cls))]
        for name in values:
            if name not in names:
                like = nearest(name, names, cutoff=0.6)
                meant = f"did you mean --{like}?" if like else f"{cls.program} --help all shows all"
                advice = counterpart(name, [f"--{each}" for each in names]) or meant
                raise TypeError(f"{cls.__name__}: {name}: no such flag; {advice}")
        construct(self, *args, **values)

    cls.__init__ = __init__
    return cls


def read_flags(cls: type[P], argv: Sequence[str]) -> P:
    """Parse a command line and check all flags as if there were a GPU. A mistake ends the program."""
    flags = parse(cls, argv)
    try:
        flags.resolve(flags.world_size(), has_gpu=True)
    except ValueError as error:
        build_parser(cls).fail(error)
    return flags


def parse(cls: type[P], argv: Sequence[str]) -> P:
    """Parse a command line into a configuration. The field ``given`` names the user's flags, also from the --config
    file, but not the recipe's. ``--recipe list`` prints the recipes and ends the program."""
    parser = build_parser(cls)
    values = _values(parser, argv)
    if (file := values.get("config")) is not None:
        values = {**_values_of_file(cls, parser, file), **values}
    given, name = frozenset(values), values.get("recipe")
    if name == "list":
        print(listing(), end="")
        parser.exit(0)
    if name is not None:
        try:
            recipe = find_recipe(name)
        except ValueError as error:
            parser.fail(error)
        values = {**_values(parser, shlex.split(recipe.flags)), **values}
    if values.get("card") == "none":  # turns a recipe's --card off
        values["card"] = None
    return cast(Callable[..., P], cls)(**values, given=given)


def build_parser(cls: type[ProgramFlags]) -> CommandLine:
    """Return the parser of a configuration's flags. The parsed result contains only flags on the command line."""
    parser = _parser_of(cls, name_of(cls.program))
    parser.source = ""
    return parser


@functools.cache
def _parser_of(cls: type[ProgramFlags], name: str) -> CommandLine:
    parser = CommandLine(name, (cls.__doc__ or "").split("\n\n")[0], cls.examples)
    for heading, items in headings_of(cls).items():
        parser.heading(heading)
        for item in items:
            _add(parser, item)
    if any(item.name == "recipe" for item in flags_of(cls)):
        # nemo_run takes --yes to start without a question. Accept and ignore the flag.
        parser.add_argument("--yes", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add(parser: CommandLine, item: dataclasses.Field[Any]) -> None:
    declared, takes, default = item.metadata, value_of(item), default_of(item)
    if takes is None:
        return parser.switch(f"--{item.name}", declared["help"], default, declared["common"])
    options: dict[str, Any] = {}
    if typing.get_origin(scalar_type(item)) is list:
        options = dict(nargs="+")
    elif declared["several"]:
        options = dict(nargs="+", action=_OneOrMore)
    elif declared["alone"] is not None:
        options = dict(nargs="?", const=declared["alone"])
    alias = f"--{declared['alias']}" if declared["alias"] else None
    texts = declared["help"], default, alias, declared["common"]
    parser.option(f"--{item.name}", takes, *texts, type=takes.convert, **options)


def _values(parser: CommandLine, words: Sequence[str]) -> dict[str, Any]:
    values = vars(parser.parse_args(list(words)))
    values.pop("yes", None)
    return values


def _values_of_file(cls: type[Any], parser: CommandLine, file: str) -> dict[str, Any]:
    """Return the flag values in a YAML file. Its keys are flag names."""
    from opendit.common.yaml_file import read_yaml  # few command lines need this import

    parser.source = f"--config {file}: "
    try:
        content = read_yaml(Path(file).expanduser(), f"--config {file}")
    except (ValueError, OSError) as error:
        parser.source = ""
        parser.fail(error)
    if not isinstance(content, dict) or "config" in content:
        parser.fail("must be flags and their values, as lr: 1e-4, without another config")
    switches = {item.name for item in flags_of(cls) if value_of(item) is None}
    words: list[str] = []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in switches:
            if not isinstance(value, bool):
                parser.fail(f"{key} {show(value)}: a switch; give true or false")
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:  # null keeps the flag's default
            several = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(repr(each) if isinstance(each, float) else str(each) for each in several)]
    values = _values(parser, words)
    parser.source = ""
    return values


def to_yaml(config: Any) -> str:
    """Return a YAML file for --config that repeats a run: its recipe and the user's flags, without ``NO_CHANGE``."""
    import yaml

    named = {"recipe": config.recipe} if config.recipe else {}
    given = {item.name: getattr(config, item.name) for item in flags_of(type(config)) if item.name in config.given}
    kept = {name: "none" if value is None else value for name, value in given.items() if name not in NO_CHANGE}
    return yaml.safe_dump({**named, **kept}, sort_keys=False, allow_unicode=True)


def overridden(config: Any) -> dict[str, tuple[Any, Any]]:
    """Return the flags of a recipe that the user changed: flag -> (the recipe's value, the value in use)."""
    recipe = parse(type(config), ["--recipe", config.recipe])
    pairs = {name: (getattr(recipe, name), getattr(config, name)) for name in sorted(config.given - NO_CHANGE)}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}
