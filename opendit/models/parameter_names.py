"""The names of parameters: a checkpoint has the model's own, whatever is wrapped around its modules."""

WRAPPERS = frozenset(("base_layer", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that LoRA, torch.compile and others put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
