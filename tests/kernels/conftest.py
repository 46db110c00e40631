"""The tests of INTERPRETED need TRITON_INTERPRET=1 from before triton's import, which would also turn the kernels of
every other test in the process into interpreted ones. So they run in a process of their own (test_interpreter.py)."""

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = ["test_operators.py", "test_split_heads.py", "test_kernels_in_models.py"]
collect_ignore = [] if INTERPRETING else INTERPRETED


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


if INTERPRETING:
    let_old_interpreters_loop()
