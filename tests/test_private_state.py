"""Tests go in by the public door: no file of tests reaches for a private name, but for a few of other projects."""

import ast
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
PUBLIC = ("_replace", "_repr_html_")  # of named tuples and of notebooks: documented, with an underscore all the same
LIBRARIES = ("torch.", "sys.", "os.", "tl.", "interpreter.", "ast.")
# File below tests/ -> the private names of other projects that it needs, with the reason. Of ours there are none.
KNOWN = {
    # What a cooked data set decodes by is nowhere to be given; the script runs by hand, beside megatron-energon.
    "data/energon/make_fixtures.py": ["dataset._decoder"],
    # torch sets its handler of SIGCHLD once a process. The test fails by this line if the name vanishes.
    "data/test_loader.py": ["_SIGCHLD_handler_set"],
    # transformers has no other name for the attention that a model was made with.
    "encoders/test_folder.py": [
        "encoder.model.config._attn_implementation",
        "load(copy('t5')).model.config._attn_implementation",
    ],
    # Which arguments an operator of torch writes to, it says nowhere else.
    "sampling/tape.py": ["function._schema"],
}


def private_names(source: str) -> list[str]:
    """The private names that a file reaches for: ``x._y`` but of self or a library, ``from opendit... import _y``,
    and ``monkeypatch.setattr`` of one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("opendit"):
            found += [alias.name for alias in node.names if _private(alias.name)]
        elif isinstance(node, ast.Attribute) and _private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and not f"{owner}.".startswith(LIBRARIES):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
            names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            found += [name for name in names if isinstance(name, str) and _private(name.rpartition(".")[2])]
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def test_no_test_reaches_for_private_state():
    found = {path.relative_to(HERE).as_posix(): private_names(path.read_text()) for path in HERE.rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == KNOWN, "give what you test a public name"


def test_it_finds_them():
    source = "from opendit.x import _a, b\nb._c()\nself._d\ntorch._e\nmonkeypatch.setattr(b, '_f', 1)\n"
    source += "x.__g__\nx._replace(y=1)\n"
    assert Counter(private_names(source)) == Counter(["_a", "b._c", "_f"])
