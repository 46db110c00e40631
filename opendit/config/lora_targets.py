"""The values of --lora_targets."""

import re


def parse_target(text: str) -> tuple[str, int | None]:
    """Split PATTERN[:RANK] of --lora_targets: a pattern of layers' names, and the rank of their LoRA (None: --lora's).

    Raises:
        ValueError: the text is neither.
    """
    found = re.fullmatch(r"([\w*]+(?:\.[\w*]+)*)(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None:
        raise ValueError(f"--lora_targets {text}: no layer's name; give one as qkv, attn.*, or fc1:4 for rank 4")
    return found[1], None if found[2] is None else int(found[2])
