"""Set up Triton's interpreter for the tests that interpreted.py lists.

These tests need TRITON_INTERPRET=1 before triton is imported. This variable would also make the kernels of all other
tests in the process interpreted. So test_interpreter.py runs them in separate processes, one for each tuple of files.
"""

import dataclasses
import functools
import os

import torch

from tests.kernels.interpreted import FILES

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETING else sorted(FILES)


def let_old_interpreters_loop() -> None:
    """Make loops work in Triton 3.6's interpreter. It calls int() on one-element arrays, which numpy 2.4 refuses."""
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
    """Round to bf16 and float8 in Triton's interpreter, which otherwise truncates, and turns float8's NaN into 384."""
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
    """Patch triton.language only once in each launch.

    Triton's interpreter patches a function's module at the start of a launch, and again in every call of a device
    function, although the patch lasts until the launch ends. The repetition took 40 % of the time.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    replace, modules = interpreter._patch_lang, set()

    def patched(function):
        if tl.core.is_builtin(tl.load):  # not patched, so a launch begins
            modules.clear()
        if function.__module__ not in modules:
            modules.add(function.__module__)
            return replace(function)

    interpreter._patch_lang = patched


def leave_overflow_unchecked() -> None:
    """Turn off the overflow checks of Triton's interpreter.

    For each check, an integer sum or product is repeated in 64 bits. This took 40 % of the time, and the indices of the
    small tensors in these tests can't overflow.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Cache the types of results in Triton's interpreter.

    Without the cache, the interpreter builds the shape, size and name of each result's type again, and a table of all
    numpy types. This took a quarter of the time.
    """
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    make, unwrap, numpy_type = core.block_type.__init__, core._unwrap_if_constexpr, interpreter._get_np_dtype
    known, of_element, of_scalar = {}, functools.cache(numpy_type), (core.constexpr(1), core.tuple([]))
    plain = {bool, int, float, core.tensor, core.dtype, core.block_type}

    def block(self, element_ty, shape):
        sizes = tuple(map(unwrapped, shape))
        if any(type(size) is not int for size in sizes):
            return make(self, element_ty, shape)
        key = (id(element_ty), sizes)  # the entry keeps the element alive, so its id is not reused
        if key not in known:
            make(self, element_ty, shape)
            self.of_tensors = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in sizes])
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalar

    def unwrapped(value):
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in plain else unwrap(value)

    def type_in_numpy(kind):
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        return numpy_type(element) if element.is_ptr() else of_element(element)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrapped, type_in_numpy


if INTERPRETING:
    remember_types()
    leave_overflow_unchecked()
    round_as_hardware_does()
    let_old_interpreters_loop()
    replace_the_language_once_a_launch()
