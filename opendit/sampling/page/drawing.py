"""Draw what browsers request: check their fields, draw one request after another, and store the samples as files."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import math
import os
import secrets
import sys
import tempfile
import threading
import traceback
import zipfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from opendit.checkpoint.run_folders import LOCK, FolderLock
from opendit.common.json_file import MIB
from opendit.common.safe_files import remove, remove_tree, replacing
from opendit.config.checks import check_lora_weight
from opendit.data.base import BadSample
from opendit.data.picture_file import read_picture
from opendit.data.video_files import write_mp4
from opendit.encoders.pictures import one_line
from opendit.sampling.conditioning_frames import note_on_missing_frames
from opendit.sampling.output_files import VideoClip, file_name
from opendit.sampling.page import views
from opendit.sampling.page.catalog import Catalog, ModelCard, WeightsChoice
from opendit.sampling.page.training_queue import TrainingQueue
from opendit.sampling.pipeline import MOST_GUIDANCE, MOST_SEED, MOST_STEPS, DrawSettings, Pipeline

MOST_TEXT = 20_000  # characters in all captions of a request, at most
MOST_CAPTION = 2_000
MOST_LORAS = 8
MOST_PICTURE, PICTURE_S = 800_000, 5.0  # characters of an encoded picture, and seconds to decode it, at most
CACHES = ("taylor:2", "taylor:3", "taylor:4", "first_block:0.06", "first_block:0.1")  # others: docs/sampling.md
MOST_WAITING = 16  # waiting requests, at most
POLL_S = 0.1  # seconds between two checks of a drawing's progress
KEY = "opendit"  # key of the settings in a PNG; an MP4's comment holds them
MOST_BYTES = 512 * MIB
PREFIX = "opendit-page-"  # prefix of sample folders' names


# --------------------------------------------------------------------------------------------------------- the request


@dataclass(frozen=True)
class DrawingRequest:
    """A request to draw samples.

    what: one class or caption per sample, or the number of unconditional samples. image: first picture of clips.
    labels: every sample's class or caption, as text. recorded: settings to write into the samples' files."""

    weights: WeightsChoice
    what: int | tuple[int | str, ...]
    settings: DrawSettings
    image: Image.Image | None = None
    labels: tuple[str, ...] = ()
    recorded: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingsForm:
    """Fields that choose the weights and the sampling settings, as a browser sends them."""

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
    """Fields that choose what to draw, as a browser sends them. ``captions`` has one caption per line. ``picture``, the
    clips' first picture, is a data URL."""

    classes: Any
    captions: Any
    negative: Any
    count: Any
    seed: Any
    picture: Any = ""


def read_forms(
    what: WhatForm, how: SettingsForm, choice: WeightsChoice, card: ModelCard, most_samples: int
) -> DrawingRequest:
    """Convert the two forms to a request. Raises ValueError, with one line for the user, for an invalid field."""
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
        interval, negative, every = None, None, 1  # no effect without guidance
    if card.captions:
        items: list[Any] = _captions(what.captions)
        labels = items
    else:
        negative, items = None, _classes(what.classes, card)
        labels = [card.classes[number] for number in items]
    wanted = tuple(items[i % len(items)] for i in range(count)) if items else count
    picture = _picture(what.picture) if card.begins else None
    drawn = dict(steps=steps, guidance=guidance, seed=seed, sampler=how.sampler, interval=interval, negative=negative)
    drawn |= dict(guidance_every=every, cache=cache)
    recorded = {
        "weights": choice.name,
        "model": card.model,
        "objective": card.objective,
        **drawn,
        "interval": interval and [None if math.isinf(level) else level for level in interval],
        "count": count,
        "lora": [f"{path.name}:{weight:g}" for path, weight in choice.lora],
        "begins with": None if picture is None else "a picture",
    }
    labels = tuple(labels[i % len(labels)] if labels else "no condition" for i in range(count))
    return DrawingRequest(choice, wanted, DrawSettings(**drawn), picture, labels, recorded)


def same_conditions(first: ModelCard, second: ModelCard, what: WhatForm) -> None:
    """Raise ValueError unless both models take captions, or give the chosen classes equal names."""
    if first.captions != second.captions:
        raise ValueError("one of the two models takes captions and the other classes: nothing to compare by")
    for number in [] if first.captions else _classes(what.classes, first):
        names = [card.classes[number] if number < len(card.classes) else "not there" for card in (first, second)]
        if names[0] != names[1]:
            raise ValueError(f"class {number} is {names[0]!r} of the one model and {names[1]!r} of the other")


def _loras(names: Any, weights: Any) -> list[tuple[str, float]]:
    """Return the LoRAs' (name, weight) pairs. If ``weights`` is empty, every weight is 1. Raises ValueError."""
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
    """Decode the picture that a browser sends as a data URL; None if there is none. Raises ValueError."""
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


# ----------------------------------------------------------------------------------------------------------- the queue


@dataclass(eq=False)
class Drawing:
    """A browser's request in the queue. session: the browser. Any thread may read the progress or cancel the request.

    Attributes:
        stage: "waiting", "loading" or "drawing".
        progress: fraction of the sampling steps that are done, from 0 to 1.
        notes: remarks about the weights; empty until the weights are loaded.
        batch, stored: batch token and stored samples, see :meth:`SampleStore.add`.
    """

    request: DrawingRequest
    session: str = ""
    stage: str = "waiting"
    progress: float = 0.0
    notes: list[str] = field(default_factory=list)
    batch: str = ""
    stored: list["StoredSample"] = field(default_factory=list)
    cancelled: bool = False
    future: "Future[list[Any]]" = field(default_factory=Future)

    @property
    def done(self) -> bool:
        return self.cancelled or self.future.done()

    def cancel(self) -> None:
        """End the request now, unless it has ended. A step that has begun is still computed."""
        if not self.future.done():
            self.cancelled = True
            self.future.cancel()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the pictures or clips. Raises the error of the drawing, CancelledError, or TimeoutError."""
        if self.cancelled:
            raise CancelledError
        return self.future.result(timeout)


class DrawingQueue:
    """Draws requests in the order of arrival, ``batch_size`` samples at a time. Only one model is in memory: the queue
    frees the current model before it calls ``load(choice)``."""

    def __init__(
        self, load: Callable[[WeightsChoice], Pipeline], batch_size: int = 32, most_waiting: int = MOST_WAITING
    ):
        self._load, self._batch_size, self._most = load, batch_size, most_waiting
        self._pipe: Pipeline | None = None
        self._choice: WeightsChoice | None = None  # weights of ``_pipe``; None if ``_pipe`` must not be reused
        self._drawings: list[Drawing] = []
        self._lock, self._closed = threading.RLock(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drawing-queue")

    def __enter__(self) -> "DrawingQueue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: DrawingRequest, session: str = "") -> Drawing:
        """Add a request. Raises ValueError if the queue is full or closed."""
        drawing = Drawing(request, session)
        with self._lock:
            if self._closed or sum(each.stage == "waiting" for each in self._drawings) >= self._most:
                raise ValueError("too many requests are waiting: try again in a moment")
            self._drawings.append(drawing)
            drawing.future = self._thread.submit(self._run, drawing)
            drawing.future.add_done_callback(lambda _: self._forget(drawing))
        return drawing

    def before(self, drawing: Drawing) -> int:
        """Return how many waiting requests will be drawn before ``drawing``."""
        with self._lock:
            waiting = [each for each in self._drawings if each.stage == "waiting"]
            return waiting.index(drawing) if drawing in waiting else 0

    def cancel(self, session: str) -> None:
        """Cancel all requests of a browser."""
        with self._lock:
            drawings = [each for each in self._drawings if each.session == session]
        for drawing in drawings:
            drawing.cancel()

    def close(self) -> None:
        """Cancel all requests, end the thread and free the model."""
        with self._lock:
            self._closed = True
        for drawing in self._drawings:
            drawing.cancel()
        self._thread.shutdown()
        self._free()

    def _forget(self, drawing: Drawing) -> None:
        with self._lock:
            self._drawings = [each for each in self._drawings if each is not drawing]

    def _run(self, drawing: Drawing) -> list[Any]:
        try:
            return self._draw(drawing)
        except Exception as error:
            if not isinstance(error, CancelledError | ValueError | OSError):  # a bug, not a message for users
                traceback.print_exc(file=sys.stderr)
                # The GPU may be out of memory, so the next request must load the model again.
                self._choice = None
            raise without_traceback(error) from None

    def _draw(self, drawing: Drawing) -> list[Any]:
        drawing.stage = "loading"
        request, pipe = drawing.request, self._pipeline(drawing.request.weights)
        drawing.notes = [note for note in pipe.notes if not note.startswith(("kernels: ", "attention: "))]
        if request.image is None and not pipe.config.given_beside:
            drawing.notes += note_on_missing_frames(pipe.config)
        count = request.what if isinstance(request.what, int) else len(request.what)
        steps, done = math.ceil(count / self._batch_size) * request.settings.steps, 0

        def after_step(_: int, latents: Tensor) -> None:
            nonlocal done
            if drawing.cancelled:
                raise CancelledError
            done += 1
            drawing.progress = done / steps

        if drawing.cancelled:  # while the model was loaded
            raise CancelledError
        drawing.stage = "drawing"
        what = request.what if isinstance(request.what, int) else list(request.what)
        how = {**vars(request.settings), "batch_size": self._batch_size, "progress": False, "callback": after_step}
        return pipe(what, image=request.image, **how)

    def _pipeline(self, choice: WeightsChoice) -> Pipeline:
        if self._pipe is None or self._choice != choice:
            self._free()
            self._pipe = self._load(choice)
            self._choice = choice
        return self._pipe

    def _free(self) -> None:
        self._pipe = self._choice = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def without_traceback(error: BaseException) -> BaseException:
    """Return the error without tracebacks, because they hold the model and activations."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__, cause = None, cause.__cause__ or cause.__context__
    return error


# ----------------------------------------------------------------------------------------------------------- the files


@dataclass(frozen=True)
class StoredSample:
    """A stored sample. token: last component of the URL. name: file name for downloads. label: class or caption. size:
    height and width in pixels. bytes: size of the file ``path``."""

    token: str
    name: str
    label: str
    size: tuple[int, int]
    is_clip: bool
    path: Path
    bytes: int


class SampleStore:
    """Stores samples in a temporary folder, and deletes the folder on exit. If the samples exceed ``most_bytes``, the
    oldest batches are deleted, but never the newest. The constructor deletes folders that killed pages have left."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        delete_abandoned()
        self._folder, self._most = Path(tempfile.mkdtemp(prefix=PREFIX)), most_bytes  # of mode 0700
        self._in_use = FolderLock(self._folder, "--outputs", "start the page again")
        self._batches: OrderedDict[str, list[StoredSample]] = OrderedDict()
        self._samples: dict[str, StoredSample] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        remove_tree(self._folder)
        self._in_use.release()

    def add(self, samples: list[Any], request: DrawingRequest) -> tuple[str, list[StoredSample]]:
        """Write the samples that a ``Pipeline`` has drawn. Return the batch's token, and the stored samples.

        Every file contains the request's ``recorded`` settings, and the sample's "label" and "number". If writing
        fails, no sample is stored, and OSError is raised."""
        stored: list[StoredSample] = []
        try:
            for number, (sample, label) in enumerate(zip(samples, request.labels, strict=True)):
                settings = {**request.recorded, "label": label, "number": number}
                stored.append(self._write(sample, number, label, settings))
        except BaseException:
            for one in stored:
                remove(one.path)
            raise
        batch = secrets.token_urlsafe(16)
        with self._lock:
            self._batches[batch] = stored
            self._samples |= {one.token: one for one in stored}
            while len(self._batches) > 1 and sum(one.bytes for one in self._samples.values()) > self._most:
                for old in self._batches.popitem(last=False)[1]:
                    del self._samples[old.token]
                    remove(old.path)
        return batch, stored

    def find(self, token: str) -> StoredSample | None:
        """Return a sample; None if the sample is unknown or has been deleted."""
        with self._lock:
            return self._samples.get(token)

    def archive(self, batch: str) -> bytes | None:
        """Return a ZIP archive of a batch's samples; None if the samples have been deleted."""
        with self._lock:
            stored, content = self._batches.get(batch), io.BytesIO()
            if stored is None:
                return None
            with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
                for one in stored:
                    archive.write(one.path, one.name)
        return content.getvalue()

    def _write(self, sample: Any, number: int, label: str, settings: dict[str, Any]) -> StoredSample:
        is_clip, token = isinstance(sample, VideoClip), secrets.token_urlsafe(16)
        path = self._folder / f"{token}.{'mp4' if is_clip else 'png'}"
        text = json.dumps(settings)  # ASCII for any caption
        if is_clip:
            write_mp4(path, sample.frames, sample.fps, comment=text)
            size = sample.frames.shape[1:3]
        else:
            info = PngInfo()
            info.add_text(KEY, text)
            with replacing(path) as file:
                sample.save(file, "PNG", pnginfo=info)
            size = (sample.height, sample.width)
        name = f"{file_name(number, label)}-seed{settings['seed']}{path.suffix}"
        return StoredSample(token, name, label, size, is_clip, path, path.stat().st_size)


def delete_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Another page may be using, creating or deleting the folder.
        with contextlib.suppress(OSError, ValueError):
            owned = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if owned and (folder / LOCK).exists():
                with FolderLock(folder, "--outputs", ""):
                    remove_tree(folder)


# ------------------------------------------------------------------------------------------------------------ the page


@dataclass
class Page:
    """The state of a server, shared by all tabs.

    Attributes:
        cards: the cards of checkpoints without metadata, by name.
        most_samples: maximum number of samples of one request.
        evaluations: folder with the results.jsonl of ``opendit evaluate``.
        training: queue of runs that users start from the page; None if the page can't start runs.
    """

    catalog: Catalog
    queue: DrawingQueue
    store: SampleStore
    cards: dict[str, ModelCard] = field(default_factory=dict)
    most_samples: int = 64
    evaluations: Path | None = None
    training: TrainingQueue | None = None

    def card(self, choice: WeightsChoice) -> ModelCard:
        """Return the card of the chosen weights. Raises ValueError or OSError, with a line for the user, on failure."""
        card = self.cards.get(choice.name) or self.catalog.card(choice)
        if card is None:
            raise ValueError(f"{choice.name} does not say which model it holds; see python -m opendit.export")
        return card

    async def draw(self, session: str, requests: list[DrawingRequest]) -> AsyncIterator[str | list[Drawing]]:
        """Draw and store a browser's requests. Yield the progress as HTML, and at last the finished drawings. If they
        are cancelled or fail, the last value is a message as HTML."""
        drawings: list[Drawing] = []
        try:
            for request in requests:
                drawings.append(self.queue.submit(request, session))
            shown = None
            while not all(drawing.done for drawing in drawings):
                if (status := self._status(drawings)) != shown:
                    yield (shown := status)
                await asyncio.sleep(POLL_S)
            for drawing in drawings:
                samples = drawing.result(0)
                drawing.batch, drawing.stored = await asyncio.to_thread(self.store.add, samples, drawing.request)
            yield drawings
        except CancelledError:
            yield views.message("cancelled")
        except Exception as error:
            yield views.error(views.error_line(error))
        finally:  # also if the browser has disconnected
            for drawing in drawings:
                drawing.cancel()

    def _status(self, drawings: list[Drawing]) -> str:
        open_drawings = ((i, drawing) for i, drawing in enumerate(drawings) if not drawing.done)
        number, now = next(open_drawings, (0, drawings[0]))  # all drawings may have just ended
        share = sum(1.0 if drawing.done else drawing.progress for drawing in drawings) / len(drawings)
        name = f"{'AB'[number]}: " if len(drawings) > 1 else ""
        if now.stage == "waiting":
            before = self.queue.before(now)
            text = f"waiting: {before} before this one" if before else "waiting for what is being drawn"
        elif now.stage == "loading":
            text = f"{name}loading {now.request.weights.name}"
        else:
            text = f"{name}drawing, {100 * now.progress:.0f} %"
        return views.progress(text, share)
