"""Parse the values of --lora_targets."""

import re


def parse_target(text: str) -> tuple[str, int | None]:
    """Split PATTERN[:RANK] of --lora_targets into a pattern of layer names and a LoRA rank (None: the rank of --lora).

    Raises:
        ValueError: the text has another form.
    """
    found = re.fullmatch(r"([\w*]+(?:\.[\w*]+)*)(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None:
        raise ValueError(f"--lora_targets {text}: no layer's name; give one as qkv, attn.*, or fc1:4 for rank 4")
    return found[1], None if found[2] is None else int(found[2])
