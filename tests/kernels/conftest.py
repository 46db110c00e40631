"""The tests of interpreted.py need TRITON_INTERPRET=1 from before triton's import, which would also turn the kernels of
every other test in the process into interpreted ones. So they run in processes of their own (test_interpreter.py), one
for each tuple."""

import dataclasses
import functools
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


def remember_types() -> None:
    """Triton's interpreter describes the type of every result anew: its shape, number of values and name. For numpy's
    type it makes a table of all. That took a quarter of its time."""
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
        key = (id(element_ty), sizes)  # the element lives as long as its entry, so no other object has its number
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
