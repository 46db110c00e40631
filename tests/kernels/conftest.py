"""The tests of interpreted.py need TRITON_INTERPRET=1 from before triton's import, which would also turn the kernels of
every other test in the process into interpreted ones. So they run in processes of their own (test_interpreter.py), one
for each tuple."""

import dataclasses
import os

import torch

from tests.kernels.interpreted import FILES

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETING else sorted(FILES)


def let_old_interpreters_loop() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element for a loop's bounds, which numpy 2.4 refuses."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def round_as_hardware_does() -> None:
    """Triton's interpreter cuts numbers of bf16 and float8 off rather than round them; of float8's NaN it makes 384."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16}
    convert = interpreter._convert_float

    def patched(value, source, target, rounding):
        if source != tl.float32 or target not in formats:
            return convert(value, source, target, rounding)
        rounded = torch.from_numpy(value.copy()).to(formats[target])
        return rounded.view(torch.uint8 if rounded.itemsize == 1 else torch.uint16).numpy()

    interpreter._convert_float = patched


def replace_the_language_once_a_launch() -> None:
    """Triton's interpreter replaces what a function's module sees of triton.language at the start of a launch and again
    in every call of a device function, although it stays replaced until the launch ends. That took 40 % of its time."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    replace, modules = interpreter._patch_lang, set()

    def patched(function):
        if tl.core.is_builtin(tl.load):  # not replaced: a launch begins
            modules.clear()
        if function.__module__ not in modules:
            modules.add(function.__module__)
            return replace(function)

    interpreter._patch_lang = patched


def leave_overflow_unchecked() -> None:
    """Triton's interpreter repeats every sum and product of integers in 64 bits to see whether 32 were enough. It took
    40 % of its time; the indices of tensors as small as here don't come near."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if INTERPRETING:
    leave_overflow_unchecked()
    round_as_hardware_does()
    let_old_interpreters_loop()
    replace_the_language_once_a_launch()
