"""Draw mutants of opendit/, find the tests that reach them, and check whether these tests fail.

    python scripts/mutants.py draw  --tree . --seed 39 --count 150 --output tests/nets/mutants.json
    python scripts/mutants.py cover --tree . --jobs 16 --output coverage.jsonl
    python scripts/mutants.py run   --tree . --mutants tests/nets/mutants.json --coverage coverage.jsonl --jobs 16 \
        --output results.json

A mutant changes one place in one line. `cover` runs each test file by itself and records the lines that it reaches,
also in the processes that it starts. `run` applies each mutant to a copy of the tree and runs the test files that reach
its line until a test fails. `cover` and `run` stop after `--seconds`; call them again to continue. Neither writes to
the tree. Tests that fail without a mutant do not count. `cover` needs the package coverage, 7.10 or newer.

A mutant is red (a test failed, or hung), green (all tests that reach it passed), uncovered (no test reaches it), lost
(its line is gone), unfinished, or unreliable (not red, but a test failed with and without it).
"""

import argparse
import ast
import bisect
import builtins
import fnmatch
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
COMPARE |= {"is": "is not", "is not": "is"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "%", "%": "//"}
OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in"}
OPERATORS |= {ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
OPERATORS |= {ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.And: "and", ast.Or: "or"}
PAIRS = "min max, sum mean, argmin argmax, amin amax, minimum maximum, all any, ceil floor, sin cos, zeros ones"
PAIRS += ", zeros_like ones_like, new_zeros new_ones, startswith endswith, exp log, cummin cummax, lstrip rstrip"
FUNCTIONS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
NOT_IN_TRITON = {"mean", "ones", "ones_like"}  # tl has no such functions

# Code that is not mutated, because it changes texts, speed or appearance but no result: calls in TEXT_CALLS, keywords
# in NEUTRAL, and functions whose names match TEXT_FUNCTIONS, which build messages.
TEXT_CALLS = set("print warn TypeVar dataclass lru_cache sleep settimeout timedelta set_num_threads wait".split())
TEXT_CALLS |= set("rjust ljust center figure savefig legend tight_layout subplots indent dedent wrap fill".split())
TEXT_CALLS |= set("acquire get_close_matches Launch".split())
NEUTRAL = set("help unit metavar title label xlabel ylabel common heading description epilog prog usage".split())
NEUTRAL |= set("timeout encoding errors newline indent sort_keys flush buffering daemon stacklevel maxsize".split())
NEUTRAL |= set("device non_blocking pin_memory persistent_workers prefetch_factor num_warps num_stages warps".split())
NEUTRAL |= set("do_not_specialize is_pure figsize dpi fontsize min_width elem_id patience interval visible".split())
NEUTRAL_OF = {"zip": {"strict"}, "flag": {"group"}, "option": {"group"}, "Slider": {"step"}, "load": {"mmap_mode"}}
NEUTRAL_OF |= {"Figure": {"layout"}, "mkdtemp": {"prefix"}, "TemporaryDirectory": {"prefix"}}
TEXT_FUNCTIONS = r"__(repr|str|format)__|extra_repr|(^|_)(print|announce|describe|message|format|usage|metavar)"
PATH = re.compile(r"path|folder|root|dir(ectory)?$|home|here|parent|base$", re.IGNORECASE)


class Site(NamedTuple):
    """A place where a line can be mutated: bytes `start` to `end` of line `line` become `text`."""

    kind: str
    line: int
    start: int
    end: int
    text: str
    name: str  # qualified name of the enclosing function or class
    first: int  # lines of the enclosing statement, without its body
    last: int


class _Finder:
    """Collects the sites of one source file in the order of its text."""

    def __init__(self, source: str) -> None:
        self.lines = [line.encode() for line in io.StringIO(source)]
        self.sites: list[Site] = []
        self.scope: list[str] = []
        self.returns_none = False  # whether the annotation of the enclosing function allows None
        self.statement = (1, 1)
        self.tokens = [
            (token.start[0], len(self.lines[token.start[0] - 1].decode()[: token.start[1]].encode()), token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]
        self.body(ast.parse(source).body)

    def add(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        self.sites.append(Site(kind, line, start, end, text, ".".join(self.scope) or "<module>", *self.statement))

    def replace(self, kind: str, node: Any, text: str) -> None:
        """Add a site that replaces all of a node that lies on one line."""
        if node.lineno == node.end_lineno:
            self.add(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def source(self, node: Any) -> str:
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def between(self, left: ast.expr, right: ast.expr, operator: str) -> tuple[int, int, int] | None:
        """Return the line, start and end of an operator between two operands."""
        words = operator.split()
        low, high = (left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset)
        inside = self.tokens[bisect.bisect_left(self.tokens, low) : bisect.bisect_left(self.tokens, high)]
        for at in range(len(inside) - len(words) + 1):
            found = inside[at : at + len(words)]
            if [token[2] for token in found] == words and found[0][0] == found[-1][0]:
                return found[0][0], found[0][1], found[-1][1] + len(words[-1])
        return None

    def operator(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        if place := self.between(left, right, old):
            self.add(kind, *place, new)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            inner = [child.lineno for child in ast.walk(statement) if child is not statement and _is_block(child)]
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
            last = statement.end_lineno
            if isinstance(getattr(statement, "body", None), list):
                last = max(first, min(inner, default=last) - 1)
            outer, self.statement = self.statement, (first, last)
            self.visit(statement)
            self.statement = outer

    def children(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.body(value)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                return
            case ast.If(test=test) if "__name__" in ast.unparse(test) or "TYPE_CHECKING" in ast.unparse(test):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.function(node)
                return
            case ast.ClassDef():
                self.scope.append(node.name)
                for child in [*node.bases, *node.decorator_list]:
                    self.visit(child)
                self.body(node.body)
                self.scope.pop()
                return
            case ast.AnnAssign():
                if node.value and ast.unparse(node.annotation).split(".")[-1] != "TypeAlias":
                    self.visit(node.value)
                return
            case ast.Assert():
                self.visit(node.test)
                return
            case ast.Assign(targets=[ast.Name(id=("__all__" | "__slots__"))]):
                return
            case ast.IfExp() if _is_prose(node.body) or _is_prose(node.orelse):
                return
            case ast.Call():
                self.call(node)
                return
            case ast.AugAssign():
                self.replace("update", node, "pass")
            case ast.Return(value=value) if value and self.returns_none and ast.unparse(value) != "None":
                self.replace("return", value, "None")
            case ast.UnaryOp(op=ast.Not()):
                length = len(re.match(rb"not\s*", self.lines[node.lineno - 1][node.col_offset :])[0])
                self.add("negation", node.lineno, node.col_offset, node.col_offset + length, "")
            case ast.Compare():
                for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
                    self.operator("compare", left, right, OPERATORS[type(op)], COMPARE[OPERATORS[type(op)]])
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self.operator("boolean", left, right, old, new)
            case ast.BinOp(op=ast.LShift(), left=ast.Constant()) | ast.BinOp(right=ast.Name(id="MIB" | "GIB")):
                return  # sizes in bytes are limits, too
            case ast.BinOp() if OPERATORS.get(type(node.op)) in ARITHMETIC and _is_arithmetic(node):
                old = OPERATORS[type(node.op)]
                self.operator("arithmetic", node.left, node.right, old, ARITHMETIC[old])
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
                        self.replace("slice", bound, f"{self.source(bound)} + 1")
            case ast.Constant(value=bool()):
                self.replace("flag", node, str(not node.value))
            # Large integers are limits and buffer sizes, for which adding 1 changes nothing. Hexadecimal integers are
            # not.
            case ast.Constant(value=int()) if node.value < 1000 or self.source(node).startswith("0x"):
                self.replace("integer", node, str(node.value + 1))
            case ast.Constant(value=float()) if 1e-4 <= abs(node.value) < float("inf"):  # smaller floats are epsilons
                self.replace("float", node, repr(float(f"{node.value * 1.1:.6g}")))
        tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else getattr(node, "ifs", [])
        for test in tests:
            # `not x` and a single comparison already have an equivalent mutant.
            alone = isinstance(test, ast.UnaryOp | ast.Constant) or (
                isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], _ORDER)
            )
            if not alone:
                self.replace("negation", test, f"not ({self.source(test)})")
        self.children(node)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if re.search(TEXT_FUNCTIONS, node.name):
            return
        self.scope.append(node.name)
        for child in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(child)
        outer = self.returns_none
        self.returns_none = node.returns is not None and _allows_none(node.returns)
        self.body(node.body)
        self.returns_none = outer
        self.scope.pop()

    def call(self, node: ast.Call) -> None:
        *owner, name = ast.unparse(node.func).split(".")
        if name in TEXT_CALLS or owner[-1:] == ["parser"] or name == "Thread":
            return
        if name == "join" and isinstance(node.func, ast.Attribute) and _is_prose(node.func.value):
            return
        is_there = hasattr(builtins, FUNCTIONS.get(name, "")) if not owner else owner != ["tl"]
        if name in FUNCTIONS and (is_there or owner == ["tl"] and FUNCTIONS[name] not in NOT_IN_TRITON):
            end = node.func.end_col_offset
            self.add("function", node.func.end_lineno, end - len(name), end, FUNCTIONS[name])
        self.visit(node.func)
        for argument in node.args:
            # A second -1 in the shape of view() and similar calls would always raise an error.
            if not (name in ("view", "reshape", "expand", "unflatten") and ast.unparse(argument) == "-1"):
                self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in NEUTRAL | NEUTRAL_OF.get(name, set()):
                if keyword.arg and keyword.lineno == keyword.end_lineno:
                    line, end = self.lines[keyword.lineno - 1], keyword.end_col_offset
                    after = len(re.match(rb"\s*,[ ]?|", line[end:])[0])
                    before = 0 if after else len(re.search(rb"(, )?$", line[: keyword.col_offset])[0])
                    self.add("keyword", keyword.lineno, keyword.col_offset - before, end + after, "")
                self.visit(keyword.value)


_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _is_block(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def _allows_none(annotation: ast.expr) -> bool:
    """Return True if an annotation is None or a union with None. (A None deeper inside the annotation does not
    count.)"""
    match annotation:
        case ast.BinOp(op=ast.BitOr()):
            return _allows_none(annotation.left) or _allows_none(annotation.right)
        case ast.Constant(value=str()):
            return _allows_none(ast.parse(annotation.value, mode="eval").body)
    return ast.unparse(annotation).startswith("Optional[") or ast.unparse(annotation) == "None"


def _is_prose(node: ast.AST) -> bool:
    """Return True if an expression is part of a message: it contains a string with a space, an "s" (plural) or ""."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    is_text = isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    return is_text and any(text in ("", "s") or " " in text or "\n" in text for text in texts)


def _is_arithmetic(node: ast.BinOp) -> bool:
    """Return True unless the source shows that an operand is no number but a string, list, set or path."""
    for side in (node.left, node.right):
        match side:
            case ast.Constant(value=str() | bytes()) | ast.JoinedStr() | ast.List() | ast.Tuple() | ast.ListComp():
                return False
            case ast.Set() | ast.SetComp() | ast.Dict() | ast.Call(func=ast.Name(id="str" | "set" | "list" | "Path")):
                return False
            case ast.Call(func=ast.Attribute(attr="join" | "keys" | "tolist" | "format" | "split" | "with_suffix")):
                return False
            case ast.BinOp() if not _is_arithmetic(side):
                return False
    return not (isinstance(node.op, ast.Div) and PATH.search(ast.unparse(node.left)))


def sites(source: str) -> list[Site]:
    """Return all places at which a source text can be mutated."""
    return _Finder(source).sites


def mutate(line: str, site: Site) -> str:
    """Return a line with the replacement of ``site``."""
    raw = line.encode()
    return (raw[: site.start] + site.text.encode() + raw[site.end :]).decode()


def draw(tree: Path, seed: int, count: int, files: str) -> dict[str, Any]:
    """Draw `count` mutants of the files that match the pattern `files`. Each site has the same chance.

    Mutants that do not change the syntax tree, or are not valid Python, are skipped.
    """
    sources = {}
    for path in sorted((tree / "opendit").rglob("*.py")):
        if fnmatch.fnmatch(name := path.relative_to(tree).as_posix(), files):
            sources[name] = path.read_text(encoding="utf-8")
    found = [(name, site) for name, source in sources.items() for site in sites(source)]
    random.Random(seed).shuffle(found)
    mutants: list[dict[str, Any]] = []
    for name, site in found:
        if len(mutants) == count:
            break
        lines = list(io.StringIO(sources[name]))
        before, after = lines[site.line - 1], mutate(lines[site.line - 1], site)
        lines[site.line - 1] = after
        try:
            changed = ast.dump(ast.parse("".join(lines))) != ast.dump(ast.parse(sources[name]))
        except SyntaxError:
            changed = False
        if changed:
            mutants.append(
                {"id": len(mutants) + 1, "kind": site.kind, "file": name, "name": site.name, "line": site.line}
                | {"statement": [site.first, site.last], "before": before.rstrip("\n"), "after": after.rstrip("\n")}
            )
    return {"seed": seed, "files": files, "sites": len(found), "mutants": mutants}


def locate(tree: Path, mutant: dict[str, Any]) -> int | None:
    """Return the number of the line that a mutant changes; None if the tree no longer has the line, or has it twice.

    The line may have moved within its file. If it moved to another file, edit `file` of the mutant's record.
    """
    path = tree / mutant["file"]
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if lines[mutant["line"] - 1 : mutant["line"]] == [mutant["before"]]:
        return mutant["line"]
    same = [number for number, line in enumerate(lines, 1) if line.strip() == mutant["before"].strip()]
    return same[0] if len(same) == 1 else None


def apply(tree: Path, mutant: dict[str, Any], line: int) -> None:
    """Write a mutant into a copy of the tree, and remove the compiled files of its module."""
    path = tree / mutant["file"]
    lines = list(io.StringIO(path.read_text(encoding="utf-8")))
    indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
    lines[line - 1] = indent + mutant["after"].strip() + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


# Content of sitecustomize.py in every copy of the tree. It makes each Python process find the packages, even if a test
# sets PYTHONPATH to the tree only, and it measures coverage if asked. It is also a plugin of pytest that records the
# tests that begin and fail.
SITE = """import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
at = sys.path.index(here) + 1 if here in sys.path else len(sys.path)
sys.path[at:at] = [folder for folder in {packages!r} if folder not in sys.path]
if os.environ.get("COVERAGE_PROCESS_START"):
    import coverage
    coverage.process_startup()
def _write(event, name):
    with open(os.environ["MUTANTS_EVENTS"], "a") as file:
        print(json.dumps([event, name]), file=file)
def pytest_runtest_logstart(nodeid):
    _write("began", nodeid)
def pytest_runtest_logreport(report):
    if report.failed:
        _write("failed", report.nodeid)
def pytest_collectreport(report):
    if report.failed:
        _write("broken", report.nodeid)
"""
COVERAGE = """[run]
parallel = true
include = */opendit/*
patch = _exit
sigterm = true
disable_warnings = no-data-collected,module-not-measured,already-imported,trace-changed,couldnt-parse,no-sysmon
"""


# Outcomes of a run of pytest:
PASSED, FAILED = "passed", "failed"
BROKEN = "broken"  # no tests could be collected, or the process died
TIMEOUT = "timeout"
STOPPED = "stopped"  # by this program
KEPT = (".ci", ".github", ".gitignore", ".pre-commit-config.yaml")  # hidden files that tests read


class Ran(NamedTuple):
    """The result of a run of pytest.

    Attributes:
        failed: tests that failed, or the test that was running when the process ended.
        note: the end of the output.
    """

    outcome: str
    seconds: float
    failed: list[str]
    note: str


class Workshop:
    """A temporary folder with copies of a tree, for running tests until a deadline."""

    def __init__(self, tree: Path, folder: Path, seconds: float) -> None:
        self.tree, self.folder, self.base = tree, folder, folder / "base"
        self.deadline = time.monotonic() + seconds
        packages = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        self.packages = [p for p in packages if Path(p).resolve() != tree.resolve()]

        def ignored(at: str, names: list[str]) -> list[str]:
            top = Path(at) == tree
            return [n for n in names if n in (".git", "__pycache__") or (top and n[0] == "." and n not in KEPT)]

        shutil.copytree(tree, self.base, symlinks=True, ignore=ignored)
        (self.base / "sitecustomize.py").write_text(SITE.format(packages=self.packages))
        (folder / "coveragerc").write_text(COVERAGE)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", "."], cwd=self.base, check=False)
        # Test files that run in Triton's interpreter, one by one. The test that normally starts them skips itself in a
        # copy.
        self.interpreted = re.findall(r'"(test_\w+\.py)"', _text(self.base / "tests/kernels/interpreted.py"))

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def pytest(
        self,
        tree: Path,
        arguments: list[str],
        limit: float,
        stop: Callable[[], bool] = lambda: False,
        read: Callable[[list[Path]], None] | None = None,
    ) -> Ran:
        """Run pytest in a copy of the tree, until `limit` seconds have passed, `stop()` is True or the deadline is
        reached.

        `read` is called with the coverage files of all processes. Without `read` no coverage is measured.
        """
        folder = Path(tempfile.mkdtemp(prefix="r", dir=self.folder))  # a short path, because it contains sockets
        (folder / "tmp").mkdir()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree), *self.packages]),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "MUTANTS_EVENTS": str(folder / "events"),
        }
        if any(f"tests/kernels/{name}" in argument for name in self.interpreted for argument in arguments):
            environment["TRITON_INTERPRET"] = "1"
        if read:
            environment |= {"COVERAGE_PROCESS_START": str(self.folder / "coveragerc")}
            environment |= {"COVERAGE_FILE": str(folder / "lines")}
            if sys.version_info >= (3, 12):
                environment.setdefault("COVERAGE_CORE", "sysmon")  # cheap in files that are not measured
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sitecustomize"]
        command += ["-o", f"timeout={limit:.0f}", "--hypothesis-seed=0", *arguments]
        start, outcome = time.monotonic(), None
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            while process.poll() is None and outcome is None:
                time.sleep(0.1)
                if time.monotonic() - start > limit + 10:  # pytest-timeout, if installed, acts before
                    outcome = TIMEOUT
                elif self.is_over() or stop():
                    outcome = STOPPED
            seconds = time.monotonic() - start
            _end_all(process, str(folder / "events"), patience=5.0 if read and outcome is None else 0.0)
        events = [json.loads(line) for line in _text(folder / "events").splitlines()]
        failed = [name for event, name in events if event != "began"]
        note = _text(folder / "output")[-600:]
        if outcome is None and process.returncode == 0:
            outcome = PASSED
        elif outcome is None and "Timeout (>" in _text(folder / "output"):
            outcome = TIMEOUT
        elif outcome is None:
            usable = process.returncode == 1 and failed and all(event != "broken" for event, _ in events)
            outcome = FAILED if usable else BROKEN
        if not failed and outcome in (TIMEOUT, BROKEN):
            failed = [name for _, name in events[-1:]]
        if read:
            read(sorted(folder.glob("lines.*")))
        shutil.rmtree(folder, ignore_errors=True)
        return Ran(outcome, round(seconds, 1), failed, note if outcome != PASSED else "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _end_all(process: subprocess.Popen, mark: str, patience: float) -> None:
    """Kill the processes of a run: its session, and all processes with `mark` in their environment.

    Before that they get `patience` seconds to end by themselves, because server processes write their coverage at exit.
    """
    until = time.monotonic() + patience
    while True:
        left = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environment.read_bytes():
                    left.append(int(environment.parent.name))
            except OSError:
                continue  # the process has ended, or belongs to another user
        if time.monotonic() >= until or not left:
            break
        time.sleep(0.1)
    for end, number in [(os.killpg, process.pid), *((os.kill, pid) for pid in left)]:
        try:
            end(number, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def _ranges(lines: set[int]) -> str:
    """Format line numbers as ranges: {1, 2, 3, 7} -> "1-3,7"."""
    starts = sorted(line for line in lines if line - 1 not in lines)
    ends = sorted(line for line in lines if line + 1 not in lines)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def _numbers(ranges: str) -> set[int]:
    bounds = [[int(end) for end in part.split("-")] for part in ranges.split(",") if part]
    return {line for bound in bounds for line in range(bound[0], bound[-1] + 1)}


def cover(workshop: Workshop, tests: list[str], jobs: int, limit: float, output: Path) -> None:
    """Run each test file; append a line of JSON to `output` with its time, outcome, failing tests and covered lines."""
    import coverage

    done = {record["test"] for record in _records(output)}
    paths = [path for part in tests for path in sorted(workshop.tree.glob(part))]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    names = [file.relative_to(workshop.tree).as_posix() for file in files]
    text = {name: _text(workshop.tree / name) for name in names if not name.startswith("tests/gpu/")}
    # Start slow test files first: long files, and files that start processes or interpret kernels.
    slow = re.compile(r"ranks|subprocess|interpret|main\(")
    todo = sorted(set(text) - done, key=lambda name: -len(text[name]) * (1 + 2 * len(slow.findall(text[name])) ** 0.5))
    lock = threading.Lock()

    def one(name: str) -> None:
        lines: dict[str, set[int]] = {}

        def read(found: list[Path]) -> None:
            for file in found:
                data = coverage.CoverageData(basename=str(file))
                try:
                    data.read()
                    measured = {path: data.lines(path) or [] for path in data.measured_files()}
                except coverage.CoverageException:
                    continue  # a process was killed while writing
                for path, numbers in measured.items():
                    inside = "opendit/" + path.rpartition("/opendit/")[2]
                    if (workshop.tree / inside).is_file():
                        lines.setdefault(inside, set()).update(numbers)

        if workshop.is_over():
            return
        ran = workshop.pytest(workshop.base, [name], limit, read=read)
        if ran.outcome == STOPPED:
            return
        record = {"test": name} | ran._asdict()
        record["lines"] = {file: _ranges(numbers) for file, numbers in sorted(lines.items()) if numbers}
        with lock, output.open("a") as file:
            file.write(json.dumps(record) + "\n")
            print(f"{ran.outcome:8} {ran.seconds:6.1f} s  {name}", flush=True)

    _in_threads(jobs, [lambda name=name: one(name) for name in todo])
    records = [record for record in _records(output) if record["test"] in text]
    for record in records:
        if record["outcome"] != PASSED:
            print(f"{record['outcome']}: {record['test']} {record['failed']}\n    {record['note'].strip()[-200:]}")
    counts = Counter(record["outcome"] for record in records)
    print(f"{len(records)} of {len(text)} test files are done: {dict(counts)}")


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in _text(path).splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # an earlier call was killed while writing


def _in_threads(jobs: int, calls: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


class Trial:
    """A mutant, and the test files that reach it.

    Test files that cover the most lines of the mutant's file per second come first.
    """

    def __init__(self, mutant: dict[str, Any], line: int | None, coverage: list[dict[str, Any]]) -> None:
        self.mutant, self.line = mutant, line
        self.running, self.copy = 0, None
        self.result: dict[str, Any] = {"outcome": "unfinished", "passed": [], "unreliable": []}
        self.todo: list[dict[str, Any]] = []
        if line is None:
            self.result["outcome"] = "lost"
            return
        moved = line - mutant["line"]
        statement = set(range(mutant["statement"][0] + moved, mutant["statement"][1] + moved + 1))
        reached = [(record, _numbers(record["lines"].get(mutant["file"], ""))) for record in coverage]
        order = [(record["seconds"] / len(lines), record) for record, lines in reached if lines & statement]
        self.todo = [record for _, record in sorted(order, key=lambda pair: pair[0])]
        if not self.todo:
            self.result["outcome"] = "uncovered"

    def resume(self, result: dict[str, Any]) -> None:
        """Take over the result of an earlier call. Tests that were unreliable are run again."""
        if self.todo:
            again = {"outcome": "unfinished"} if result["outcome"] not in ("red", "green") else {}
            self.result = result | again | {"unreliable": []}
            self.todo = [record for record in self.todo if record["test"] not in result["passed"]]

    def is_open(self) -> bool:
        return self.result["outcome"] == "unfinished"


def run(workshop: Workshop, mutants: list[dict[str, Any]], coverage: Path, jobs: int, output: Path) -> None:
    """Run the tests of each mutant until a test turns red. Keep the results up to date in `output`, a JSON object by
    id."""
    records = [r for r in _records(coverage) if r["outcome"] in (PASSED, FAILED)]
    known = json.loads(_text(output) or "{}")
    trials = [Trial(mutant, locate(workshop.tree, mutant), records) for mutant in mutants]
    for trial in trials:
        if before := known.get(str(trial.mutant["id"])):
            trial.resume(before)
    lock = threading.Condition()

    def save() -> None:
        for trial in trials:
            known[str(trial.mutant["id"])] = trial.result
        partial = output.with_name(output.name + ".partial")
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(output)

    def take() -> tuple[Trial, dict[str, Any]] | None:
        """Choose the next test file, from the mutant with the fewest workers."""
        choice = [trial for trial in trials if trial.is_open() and trial.todo]
        if not choice or workshop.is_over():
            return None
        trial = min(choice, key=lambda trial: trial.running)
        trial.running += 1
        if trial.copy is None:
            trial.copy = workshop.folder / f"m{trial.mutant['id']}"
            shutil.copytree(workshop.base, trial.copy, symlinks=True)
            apply(trial.copy, trial.mutant, trial.line)
        return trial, trial.todo.pop(0)

    def judge(trial: Trial, record: dict[str, Any]) -> None:
        limit = 60 + 3 * record["seconds"]
        closed = lambda: not trial.is_open()  # noqa: E731
        spared = [f"--deselect={test}" for test in record["failed"]]
        ran = workshop.pytest(trial.copy, ["-x", *spared, record["test"]], limit, closed)
        guilty, again = (ran.failed or [record["test"]])[0], None
        if ran.outcome not in (PASSED, STOPPED):  # does the test pass without the mutant?
            again = workshop.pytest(workshop.base, ["-x", *spared, guilty], limit, closed).outcome
        with lock:
            if trial.is_open():
                if ran.outcome == PASSED:
                    trial.result["passed"].append(record["test"])
                elif again == PASSED:
                    trial.result |= {"outcome": "red", "test": guilty, "how": ran.outcome}
                elif again not in (None, STOPPED):
                    trial.result["unreliable"].append(record["test"])
                else:  # the deadline is reached
                    trial.todo.append(record)

    def work() -> None:
        while True:
            with lock:
                taken = take()
            if not taken:
                return
            trial, record = taken
            try:
                judge(trial, record)
            finally:
                with lock:
                    trial.running -= 1
                    if trial.is_open() and not trial.todo and not trial.running:
                        trial.result["outcome"] = "unreliable" if trial.result["unreliable"] else "green"
                    if not trial.is_open():
                        print(f"{trial.mutant['id']:4} {trial.result['outcome']}", flush=True)
                        if not trial.running:
                            shutil.rmtree(trial.copy, ignore_errors=True)
                    save()

    save()
    _in_threads(jobs, [work] * jobs)
    save()
    for trial in trials:
        m, result = trial.mutant, trial.result
        print(f"{m['id']:4} {result['outcome']:10} {m['kind']:10} {m['file']}:{m['line']} {m['name']}", end="")
        print(f"  {result['how']}: {result['test']}" if "test" in result else f"  {len(trial.todo)} test files left")
    print(dict(Counter(trial.result["outcome"] for trial in trials)))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing, covering, running = (commands.add_parser(name) for name in ("draw", "cover", "run"))
    for command in (drawing, covering, running):
        command.add_argument("--tree", type=Path, required=True, help="the project's folder")
        command.add_argument("--output", type=Path, required=True)
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=150)
    drawing.add_argument("--files", default="*", help="a pattern of files, opendit/diffusion/*")
    covering.add_argument("--tests", nargs="*", default=["tests"], help="files, folders or patterns below the tree")
    covering.add_argument("--file_seconds", type=float, default=400, help="limit of one test file")
    running.add_argument("--mutants", type=Path, required=True)
    running.add_argument("--coverage", type=Path, required=True)
    running.add_argument("--only", help="ids, separated by commas")
    for command in (covering, running):
        command.add_argument("--jobs", type=int, default=os.cpu_count())
        command.add_argument("--seconds", type=float, default=500, help="stop after this time")
    flags = parser.parse_args(argv)
    tree, output = flags.tree.resolve(), flags.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    if flags.command == "draw":
        drawn = draw(tree, flags.seed, flags.count, flags.files)
        output.write_text(json.dumps(drawn, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(drawn['mutants'])} of {drawn['sites']} sites, seed {flags.seed}:")
        print(dict(Counter(mutant["kind"] for mutant in drawn["mutants"])))
        return
    with tempfile.TemporaryDirectory(prefix="mut", ignore_cleanup_errors=True) as folder:
        workshop = Workshop(tree, Path(folder).resolve(), flags.seconds)
        if flags.command == "cover":
            cover(workshop, flags.tests, flags.jobs, flags.file_seconds, output)
        else:
            mutants = json.loads(flags.mutants.read_text(encoding="utf-8"))["mutants"]
            chosen = {int(each) for each in flags.only.split(",")} if flags.only else None
            mutants = [mutant for mutant in mutants if chosen is None or mutant["id"] in chosen]
            run(workshop, mutants, flags.coverage, flags.jobs, output)


if __name__ == "__main__":
    main(sys.argv[1:])
