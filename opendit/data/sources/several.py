"""Several sources in one run: a YAML file, or A:0.7,B:0.3."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from opendit.common.utils import shown as short
from opendit.common.yaml_file import read_yaml
from opendit.config.data_sources import inline_sources, is_address, named_sources
from opendit.data.blend import BlendedDataset
from opendit.data.energon.prepared import is_prepared
from opendit.data.files import expanded, printable
from opendit.data.mock import MockDataset
from opendit.data.sources.base import Request

MOST = 1_000  # sources, and changes
LONGEST = 4096  # characters of a path
EXAMPLE = "sources: [{path: pictures, weight: 0.7}, {path: more.csv, weight: 0.3}]"


def open_source(asked: Request) -> BlendedDataset | None:
    if asked.located.is_dir() or asked.located.suffix.lower() not in (".yaml", ".yml"):
        return None
    return _open(read_yaml(asked.located, asked.shown), asked, asked.located.parent)


def open_inline(sources: list[tuple[str, str]], asked: Request) -> BlendedDataset:
    """The sources of ``A:0.7,B:0.3``: (path, weight) each."""
    return _open({"sources": [{"path": path, "weight": _number(weight)} for path, weight in sources]}, asked, Path())


def _number(text: str) -> Any:
    try:
        return float(text) if not text.isdigit() else int(text)
    except ValueError:
        return text


def _open(content: Any, asked: Request, folder: Path) -> BlendedDataset:
    from opendit.data.resolve import build_dataset  # which opens this source

    shown = asked.shown
    _check(isinstance(content, dict), shown, f"must be like {EXAMPLE}")
    _known(content, ("sources", "changes", "classes"), shown)
    sources, changes = content.get("sources"), content.get("changes", [])
    _check(isinstance(sources, list) and sources, shown, f"needs a list of sources, like {EXAMPLE}")
    _check(isinstance(changes, list), shown, "changes must be a list of {step: ..., weights: {...}}")
    union = content.get("classes")
    _check(len(sources) <= MOST and len(changes) <= MOST, shown, f"has more than {MOST:,} sources or changes")
    _check(union in (None, "union"), shown, "classes can only be union here; a source has its own classes: {...}")
    names, paths = [], []
    for source in sources:
        right = isinstance(source, dict) and isinstance(source.get("path"), str) and 0 < len(source["path"]) <= LONGEST
        right = right and "\0" not in source["path"]
        _check(right, shown, f"a source is like {EXAMPLE}")
        _known(source, ("path", "name", "weight", "epochs", "classes"), shown)
        mapped = source.get("classes", {})
        right = isinstance(mapped, dict) and all(isinstance(name, str) for name in mapped.values())
        _check(right, shown, f"classes of {printable(source['path'])} must be its names: the blend's, all texts")
        name = source.get("name", source["path"])
        right = isinstance(name, str) and 0 < len(name) <= LONGEST or type(name) is int
        _check(right, shown, f"name must be a text, not {short(name)}; put quotes around it")
        names.append(str(name))
        named = source["path"] in named_sources() or is_address(source["path"])
        try:
            paths.append(source["path"] if named else str(folder / expanded(source["path"])))
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
    for values, what in ((names, "name"), ([os.path.realpath(path) for path in paths], "path")):
        counts = Counter(values)
        twice = next((name for name, value in zip(names, values, strict=True) if counts[value] > 1), "")
        again = f"names the source {printable(twice)} twice (by {what}); give it once, with a larger weight"
        _check(len(counts) == len(values), shown, again)
    given = [key for key in ("weight", "epochs") if any(key in source for source in sources)]
    _check(len(given) == 1, shown, "give every source a weight, or every source epochs")
    pairs = zip(sources, names, strict=True)
    amounts = [_positive(source.get(given[0]), f"{given[0]} of {name}", shown) for source, name in pairs]
    parts = []
    for path in paths:
        suffix = Path(path).suffix.lower()
        blend = suffix in (".yaml", ".yml") or inline_sources(path) is not None
        _check(not blend, shown, f"can't hold another blend, {printable(path)}: list its sources here")
        cooker = asked.energon_cooker if is_prepared(Path(path)) else None
        parts.append(build_dataset(**_options(replace(asked, data_path=path, energon_cooker=cooker))))
        _check(not isinstance(parts[-1], MockDataset), shown, "can't hold mock, whose latents are random")
    if asked.energon_cooker and not any(is_prepared(Path(path)) for path in paths):
        raise ValueError(
            f"--energon_cooker {asked.energon_cooker}: no source of {shown} was prepared by Energon; leave it out"
        )
    return BlendedDataset(
        names,
        parts,
        [(0, amounts), *_changes(changes, names, shown)],
        shown=shown,
        epochs=amounts if given == ["epochs"] else None,
        classes=[source.get("classes", {}) for source in sources],
        union=union == "union",
    )


def _options(asked: Request) -> dict[str, Any]:
    return {name: value for name, value in vars(asked).items() if name != "path"}


def _changes(changes: list[Any], names: list[str], shown: str) -> list[tuple[int, list[Fraction]]]:
    stages, last, nothing = [], 0, Fraction(0)
    for change in changes:
        _check(isinstance(change, dict), shown, "a change is {step: 10000, weights: {NAME: 0.2, ...}}")
        _known(change, ("step", "weights"), shown)
        step, weights = change.get("step"), change.get("weights")
        _check(type(step) is int and step > last, shown, f"changes need rising steps above 0, not {short(step)}")
        _check(isinstance(weights, dict) and weights, shown, f"the change at step {step} needs weights: {{NAME: 0.2}}")
        _known(weights, names, shown)
        stages.append(
            (step, [_positive(weights[n], f"weight of {n}", shown) if n in weights else nothing for n in names])
        )
        last = step
    return stages


def _positive(value: Any, what: str, shown: str) -> Fraction:
    number = type(value) in (int, float) and 1e-15 < value < 1e15
    found = repr(value) if type(value) is float else short(value)
    _check(number, shown, f"{what} must be a number above 0, not {found}; leave the source out to train without it")
    return Fraction(str(value))


def _known(found: dict[str, Any], known: Sequence[str], shown: str) -> None:
    unknown = sorted(found.keys() - set(known))
    _check(
        not unknown, shown, f"has the unknown key {short(unknown and unknown[0])}; known here: {', '.join(known[:20])}"
    )


def _check(true: Any, shown: str, message: str) -> None:
    if not true:
        raise ValueError(f"{shown}: {message}")
