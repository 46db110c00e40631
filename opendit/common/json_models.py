"""Base classes of pydantic models that check JSON files. The models are strict, frozen, and refuse unknown keys.

The functions check a JSON value and return the value itself, because callers often write it to a file again.
"""

import functools
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, MaxLen
from pydantic import BaseModel, ConfigDict, FailFast, Field, InstanceOf, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from opendit.common.json_file import LARGEST, parse_json, read_json, within
from opendit.common.utils import shown

Count = Annotated[int, Interval(ge=0, le=LARGEST)]
Positive = Annotated[int, Interval(ge=1, le=LARGEST)]
# InstanceOf accepts file names that are not UTF-8. pydantic's str would reject them.
Text = Annotated[InstanceOf[str], MaxLen(1 << 16)]
Name = Annotated[InstanceOf[str], MaxLen(4096)]
Word = Annotated[InstanceOf[str], MaxLen(64)]
PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_FILE, _SHA256 = rf"^{PLAIN_NAME}\z", r"^[0-9a-f]{64}\z"
_WORDS = {_FILE: "the plain name of a file in the same folder", _SHA256: "a SHA-256 in 64 hexadecimal digits"}
FileName = Annotated[str, Field(pattern=_FILE)]
Sha256 = Annotated[str, Field(pattern=_SHA256)]
Texts = Annotated[list[Text], FailFast(), MaxLen(10_000_000)]


def absent() -> Any:
    """Return the default for a field that may be missing but must not be null."""
    return Field(None)


class JsonObject(BaseModel):
    """A JSON object. A field without a default is required. null is accepted only if the field's type allows None."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        """Raise an error at the first unknown key. pydantic itself would list all unknown keys, perhaps a million."""
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for key in value:
                if key not in known:
                    raise PydanticCustomError("unknown_key", "{name}", {"name": within("", key)})
        return value


class OpenJsonObject(JsonObject):
    """A JSON object that another program or a person writes. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class FileKind:
    """A kind of JSON file: content type and maximum size in bytes."""

    def __init__(self, content: Any, most_bytes: int):
        self._content, self.most_bytes = content, most_bytes

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        model = isinstance(self._content, type) and issubclass(self._content, BaseModel)
        return TypeAdapter(self._content, config=None if model else ConfigDict(strict=True, allow_inf_nan=False))


def checked(value: Any, kind: FileKind, source: Path | str) -> Any:
    """Return ``value`` unchanged. Raise ValueError, naming the source and the field, if it is not of ``kind``."""
    try:
        kind.adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{source}: {_first_problem(error, value)}") from error
    return value


def read_file(path: Path, kind: FileKind) -> Any:
    """Return the content of a JSON file. Raises OSError, or ValueError with one line that names the file and the wrong
    field."""
    return checked(read_json(path, kind.most_bytes), kind, path)


def parse_text(text: str, kind: FileKind, source: Path | str) -> Any:
    """Parse and check JSON text from a safetensors file's metadata. Raises ValueError."""
    if len(text) > kind.most_bytes:
        raise ValueError(f"{source} has metadata of {len(text):,} characters; at most {kind.most_bytes:,} are read")
    return checked(parse_json(text, f"the metadata of {source}"), kind, source)


def _first_problem(error: ValidationError, value: Any) -> str:
    found: dict[str, Any] = dict(error.errors(include_url=False)[0])
    place = ""
    for step in found["loc"]:  # ``loc`` also contains union members' names and "[key]"
        if isinstance(value, dict) and step in value or isinstance(value, list) and isinstance(step, int):
            value = value[step]
            place = within(place, step)
    if found["type"] == "missing":
        return f"{within(place, found['loc'][-1])} is missing"
    if found["type"] == "unknown_key":
        name = found["ctx"]["name"]
        return f"{place}.{name} is not known to this version of OpenDiT".lstrip(".")
    message = found["msg"].replace("Input should", "it should")[:300]
    if found["type"] == "value_error":  # raised by one of OpenDiT's validators
        return f"{place}: {message.removeprefix('Value error, ')}".removeprefix(": ")
    if found["type"] == "model_type":
        message = "it should be an object"
    elif found["type"] == "string_pattern_mismatch":
        pattern = found["ctx"]["pattern"]
        message = f"it should be {_WORDS.get(pattern, f'text that matches {pattern}')}"
    return f"{place or 'the content'} is {shown(found['input'])}: {message}"
