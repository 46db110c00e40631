"""Convert the fields that a browser sends into a drawing request. This module or the ``Pipeline`` checks every
field."""

import base64
import math
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

from opendit.config.checks import check_lora_weight
from opendit.data.base import BadSample
from opendit.data.picture_file import read_picture
from opendit.encoders.pictures import one_line
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice
from opendit.sampling.page.drawing_queue import DrawingRequest, LabelledRequest
from opendit.sampling.pipeline import MOST_GUIDANCE, MOST_SEED, MOST_STEPS, DrawSettings

MOST_TEXT = 20_000  # maximum number of characters of all captions together
MOST_CAPTION = 2_000
MOST_LORAS = 8
# maximum number of characters of a picture, which the browser has reduced before; seconds allowed to decode it
MOST_PICTURE, PICTURE_S = 800_000, 5.0
CACHES = (
    "taylor:2",
    "taylor:3",
    "taylor:4",
    "first_block:0.06",
    "first_block:0.1",
)  # other caches are described in docs/sampling.md


@dataclass(frozen=True)
class SettingsForm:
    """Fields that choose the weights and the sampling settings."""

    source: Any
    checkpoint: Any
    average: Any
    sampler: Any
    steps: Any
    guidance: Any
    interval: Any
    cache: Any = "exact"
    guidance_every: Any = 1
    loras: Any = None
    lora_weights: Any = ""

    def choice(self, catalog: Catalog) -> WeightsChoice:
        """Return the chosen weights. Raises ValueError for a name that the catalog does not list."""
        choice = catalog.weights(text_of(self.source), text_of(self.checkpoint), text_of(self.average))
        return catalog.with_loras(choice, _loras(self.loras, self.lora_weights))


@dataclass(frozen=True)
class WhatForm:
    """Fields that choose what to draw.

    Attributes:
        classes: class numbers.
        captions: captions, one per line.
        negative: a caption to guide away from.
        count: number of samples.
        seed: the seed.
        picture: the picture that clips begin with, as a data URL.
    """

    classes: Any
    captions: Any
    negative: Any
    count: Any
    seed: Any
    picture: Any = ""


def read_forms(
    what: WhatForm, how: SettingsForm, choice: WeightsChoice, card: ModelCard, most_samples: int
) -> LabelledRequest:
    """Return the request that the two forms describe. Raises ValueError, with a line for the user, for a bad field."""
    count = number_in("count", what.count, 1, most_samples, whole=True)
    seed = number_in("seed", what.seed, 0, MOST_SEED, whole=True)
    steps = number_in("steps", how.steps, 1, MOST_STEPS, whole=True)
    guidance = number_in("guidance", how.guidance, 0, MOST_GUIDANCE)
    if how.sampler not in card.samplers:
        raise ValueError(f"this model's samplers are {', '.join(card.samplers)}: choose one of them")
    interval = _interval(how.interval)
    negative = _caption(what.negative or "") or None
    every = number_in("guide every so many steps", how.guidance_every, 1, MOST_STEPS, whole=True)
    if how.cache not in ("exact", *CACHES):
        raise ValueError(f"blocks left out: choose exact or one of {', '.join(CACHES)}")
    cache = None if how.cache == "exact" else how.cache
    if not card.guided:
        guidance = 1.0
    if guidance == 1:
        interval, negative, every = None, None, 1  # without guidance, these settings have no effect
    if card.captions:
        items: list[Any] = _captions(what.captions)
        labels = items
    else:
        negative, items = None, _classes(what.classes, card)
        labels = [card.classes[number] for number in items]
    labels = [labels[i % len(labels)] for i in range(count)] if items else ["no condition"] * count
    wanted = tuple(items[i % len(items)] for i in range(count)) if items else count
    drawn = DrawSettings(
        steps=steps,
        guidance=guidance,
        seed=seed,
        sampler=how.sampler,
        interval=interval,
        negative=negative,
        guidance_every=every,
        cache=cache,
    )
    picture = _picture(what.picture) if card.begins else None
    request = DrawingRequest(choice, wanted, drawn, picture)
    settings = {
        "weights": choice.name,
        "model": card.model,
        "objective": card.objective,
        "sampler": how.sampler,
        "steps": steps,
        "guidance": guidance,
        "interval": interval and [None if math.isinf(level) else level for level in interval],
        "negative": negative,
        "guidance_every": every,
        "cache": cache,
        "seed": seed,
        "count": count,
        "lora": [f"{path.name}:{weight:g}" for path, weight in choice.lora],
        "begins with": None if picture is None else "a picture",
    }
    return LabelledRequest(request, labels, settings)


def same_conditions(first: ModelCard, second: ModelCard, what: WhatForm) -> None:
    """Raise ValueError unless both models take captions, or have the same names for the chosen classes."""
    if first.captions != second.captions:
        raise ValueError("one of the two models takes captions and the other classes: nothing to compare by")
    for number in [] if first.captions else _classes(what.classes, first):
        names = [card.classes[number] if number < len(card.classes) else "not there" for card in (first, second)]
        if names[0] != names[1]:
            raise ValueError(f"class {number} is {names[0]!r} of the one model and {names[1]!r} of the other")


def another_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def _loras(names: Any, weights: Any) -> list[tuple[str, float]]:
    """Return the names and weights of the LoRAs. If no weights are set, every weight is 1."""
    names = names if isinstance(names, list) else []
    words = text_of(weights).replace(",", " ").split()
    if len(names) > MOST_LORAS or (words and len(words) != len(names)):
        raise ValueError(f"LoRAs: at most {MOST_LORAS}, and as many weights as LoRAs, or none")
    try:
        found = [(text_of(name), float(word)) for name, word in zip(names, words or ["1"] * len(names), strict=True)]
        for name, weight in found:
            check_lora_weight(name, weight)
    except ValueError:
        raise ValueError("weights of LoRAs: numbers such as 0.8 0.5, in the order of the LoRAs") from None
    return found


def _picture(url: Any) -> Image.Image | None:
    """Return the picture that a browser sends as a data URL; None if there is no picture."""
    kind, _, content = (text_of(url) if url is not None else "").partition(";base64,")
    if not kind:
        return None
    if kind not in ("data:image/png", "data:image/jpeg") or len(content) > MOST_PICTURE:
        raise ValueError("the picture can't be read: choose a PNG or JPEG file")
    try:
        return read_picture("the picture", PICTURE_S, base64.b64decode(content, validate=True))
    except (ValueError, BadSample):
        raise ValueError("the picture can't be read: choose another file") from None


def _classes(chosen: Any, card: ModelCard) -> list[int]:
    numbers = chosen if isinstance(chosen, list) else []
    for number in numbers:
        if type(number) is not int or not 0 <= number < len(card.classes):
            raise ValueError("a class that this model does not have: choose among those of the list")
    return numbers


def _captions(text: Any) -> list[str]:
    text = text_of(text)
    if len(text) > MOST_TEXT:
        raise ValueError(f"captions of {len(text):,} characters: at most {MOST_TEXT:,}, one caption a line")
    return [caption for line in text.splitlines() if (caption := _caption(line))]


def _caption(line: Any) -> str:
    """Return a caption without lone surrogates and control characters."""
    line = text_of(line)
    if len(line) > MOST_CAPTION:
        raise ValueError(f"a caption of {len(line):,} characters: at most {MOST_CAPTION:,}")
    return one_line(line)


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text was expected")
    return value


def _interval(written: Any) -> tuple[float, float] | None:
    """Parse two noise levels, such as "0.3 5" or "0.3 inf". Return None for an empty text."""
    words = text_of(written).replace(",", " ").split()
    if not words:
        return None
    try:
        low, high = map(float, words)
        fits = 0 <= low < high
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("noise levels with guidance: two numbers, from 0 on, the lower one first; or nothing")
    return low, high


def number_in(name: str, value: Any, low: float, high: float, whole: bool = False) -> Any:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or (whole and value != int(value)):
        raise ValueError(f"{name}: {'a whole number' if whole else 'a number'} from {low:,} to {high:,}")
    return int(value) if whole else float(value)
