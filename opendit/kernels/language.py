"""Import Triton, with stand-ins for type checkers and for machines without Triton."""

from typing import TYPE_CHECKING, Any, TypeAlias

TRITON: bool  # True if Triton is installed
if TYPE_CHECKING:
    # Triton's language has Python's grammar, but not its types. Type checkers would report false errors in kernels and
    # their calls (for example, num_warps is not a declared argument of a kernel). So for type checkers, Triton is Any.
    class _Language(type[Any]):
        def __getattr__(cls, name: str) -> Any: ...

    class triton(metaclass=_Language):
        """Stand-in for the package triton."""

    class tl(metaclass=_Language):
        """Stand-in for triton.language."""

        constexpr: TypeAlias = Any

else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # on CPUs and macOS, only the references work, and kernels_available returns False

        class _MissingTriton:
            constexpr = object

            @staticmethod
            def jit(function=None, **options):
                return function or (lambda f: f)

        triton = tl = _MissingTriton()
        TRITON = False
    else:
        TRITON = True
