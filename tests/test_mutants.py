"""scripts/mutants.py: each kind of mutant on a line of source, what is left out, and a full round on a small tree."""

import ast
import json
from pathlib import Path

import pytest

from scripts import mutants

# kind, source, all mutated lines of this kind
KINDS = [
    ("compare", "a = b < c", {"a = b <= c"}),
    ("compare", "a = (b) not in (c)", {"a = (b) in (c)"}),
    ("compare", "a = b is None", {"a = b is not None"}),
    ("compare", "a = b == c <= d", {"a = b != c <= d", "a = b == c < d"}),
    ("arithmetic", "a = 'é', b + c * d", {"a = 'é', b - c * d", "a = 'é', b + c / d"}),
    ("arithmetic", "a = b // c % d", {"a = b % c % d", "a = b // c // d"}),
    ("boolean", "a = b and c or d", {"a = b or c or d", "a = b and c and d"}),
    ("negation", "a = not b", {"a = b"}),
    ("negation", "if a < b: c()", {"if not (a < b): c()"}),
    ("negation", "a = [b for b in c if b]", {"a = [b for b in c if not (b)]"}),
    ("integer", "a = b[-1]", {"a = b[-2]"}),
    ("integer", "a = 0x10", {"a = 17"}),
    ("float", "a = 0.5", {"a = 0.55"}),
    ("flag", "a = f(b, True)", {"a = f(b, False)"}),
    ("function", "a = min(b)", {"a = max(b)"}),
    ("function", "a = b.c.sum(d)", {"a = b.c.mean(d)"}),
    ("slice", "a = b[c : len(d)]", {"a = b[c + 1 : len(d)]", "a = b[c : len(d) + 1]"}),
    ("keyword", "a = f(b, c=d, e=g)", {"a = f(b, e=g)", "a = f(b, c=d)"}),
    ("return", "def f() -> int | None: return a", {"def f() -> int | None: return None"}),
    ("update", "a += b", {"pass"}),
]
LEFT_OUT = [
    '"""At most 3."""',
    "print(1, a + b)",
    "raise ValueError(f'{a + 1} of 3')",
    "a: Literal[3]",
    "def f(a: tuple[int, 3]) -> Literal[4]: ...",
    "def f() -> tuple[int, int | None]: return a",
    "__all__ = ['a', 'b'][:3]",
    "if __name__ == '__main__': f(1)",
    "def __repr__(self): return self.a + 1",
    "a = 'b' + c",
    "a = folder / name",
    "a = zip(b, c, strict=True)",
    "a = flag(b, help='of 3', unit='steps')",
    "a = 's' if b == c else ''",
    "a = 1 << 20",
    "a = sum(b)",
    "a = b.view(-1)",
    "a = 1e-6",
]


@pytest.mark.parametrize(("kind", "source", "expected"), KINDS)
def test_each_kind(kind, source, expected):
    found = [site for site in mutants.sites(source + "\n") if site.kind == kind]
    lines = [mutants.mutate(source + "\n", site) for site in found]
    assert sorted(lines) == sorted(line + "\n" for line in expected)
    assert all(ast.dump(ast.parse(line)) != ast.dump(ast.parse(source)) for line in lines)


@pytest.mark.parametrize("source", LEFT_OUT)
def test_left_out(source):
    assert mutants.sites(source + "\n") == []


def test_names_and_statements_of_sites():
    source = "class A:\n    @f(\n        1)\n    def g(self, a=2):\n        if a:\n         return f(\n          3)\n"
    found = {(site.text, site.name, site.first, site.last) for site in mutants.sites(source) if site.kind == "integer"}
    assert found == {("2", "A.g", 2, 4), ("3", "A.g", 2, 4), ("4", "A.g", 6, 7)}


def test_the_list_is_of_whole_lines_that_parse():
    """Each listed mutant differs from its line and keeps the indentation."""
    listed = json.loads((Path(__file__).parent / "nets" / "mutants.json").read_text(encoding="utf-8"))["mutants"]
    assert len(listed) == 150 == len({(m["file"], m["line"], m["after"]) for m in listed})
    for m in listed:
        before, after = m["before"], m["after"]
        assert before != after and m["statement"][0] <= m["line"] <= m["statement"][1]
        assert after.startswith(before[: len(before) - len(before.lstrip())])


@pytest.fixture
def tree(tmp_path):
    """Return a project with three test files: one fails in part, one starts a process, one can't be imported."""
    for name, text in {
        "opendit/__init__.py": "",
        "opendit/a.py": "def more(x):\n    return x + 3\n\n\ndef unused(x):\n    return x - 5\n",
        "opendit/b.py": "print(7 - int(input()))\n",
        "tests/test_a.py": "from opendit.a import more\n\n\ndef test_wrong():\n    assert more(0) == 9\n\n\n"
        "def test_more():\n    assert more(0) == 3\n",
        "tests/test_b.py": "import subprocess, sys\n\n\ndef test_b():\n"
        "    command = [sys.executable, '-m', 'opendit.b']\n"
        "    assert subprocess.run(command, input='2', capture_output=True, text=True).stdout\n",
        "tests/test_broken.py": "import there_is_no_such_module\nfrom opendit import a\n",
    }.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


def test_draws_the_same_mutants_and_finds_them_again(tree):
    drawn = mutants.draw(tree, 1, 20, "*/a.py")
    assert drawn == mutants.draw(tree, 1, 20, "*/a.py") and len(drawn["mutants"]) == drawn["sites"] == 4
    source = (tree / "opendit/a.py").read_text()
    mutant = next(m for m in drawn["mutants"] if m["after"] == "    return x - 3")
    assert mutants.locate(tree, mutant) == 2 and mutant["name"] == "more"
    (tree / "opendit/a.py").write_text("# moved\n" + source)
    assert mutants.locate(tree, mutant) == 3
    mutants.apply(tree, mutant, 3)
    assert (tree / "opendit/a.py").read_text() == "# moved\n" + source.replace("x + 3", "x - 3")
    assert mutants.locate(tree, mutant) is None


def test_cover(tree, tmp_path, monkeypatch):
    coverage = pytest.importorskip("coverage")
    monkeypatch.setenv("PYTHONPATH", str(Path(coverage.__file__).parents[1]))
    lines = tmp_path / "coverage.jsonl"
    for _ in range(2):  # the second has nothing left to do
        mutants.main(f"cover --tree {tree} --jobs 3 --output {lines}".split())
        records = {record["test"]: record for record in map(json.loads, lines.read_text().splitlines())}
        assert len(lines.read_text().splitlines()) == len(records) == 3
    outcomes = [records[f"tests/test_{name}.py"]["outcome"] for name in ("a", "b", "broken")]
    assert outcomes == ["failed", "passed", "broken"]
    assert records["tests/test_a.py"]["failed"] == ["tests/test_a.py::test_wrong"]
    assert records["tests/test_a.py"]["lines"]["opendit/a.py"] == "1-2,5"
    assert records["tests/test_b.py"]["lines"]["opendit/b.py"] == "1"


def test_run(tree, tmp_path):
    """The test that fails without a mutant is ignored. The other test detects mutants in the line it reaches."""
    listed, lines, results = tmp_path / "mutants.json", tmp_path / "coverage.jsonl", tmp_path / "results.json"
    record = {"test": "tests/test_a.py", "outcome": "failed", "seconds": 1, "failed": ["tests/test_a.py::test_wrong"]}
    lines.write_text(json.dumps(record | {"lines": {"opendit/a.py": "1-2,5"}}) + "\n")
    mutants.main(f"draw --tree {tree} --seed 1 --count 20 --output {listed}".split())
    drawn = json.loads(listed.read_text())
    drawn["mutants"].append(drawn["mutants"][0] | {"id": 5, "before": "gone"})
    # No test can see this change.
    drawn["mutants"].append(
        next(m for m in drawn["mutants"] if "x + " in m["before"]) | {"id": 6, "after": "return 3+x"}
    )
    listed.write_text(json.dumps(drawn))
    found = f"run --tree {tree} --mutants {listed} --coverage {lines} --jobs 3 --output {results}".split()
    mutants.main([*found, "--seconds", "0"])
    assert json.loads(results.read_text())["6"]["outcome"] == "unfinished"
    mutants.main(found)
    outcomes = json.loads(results.read_text())
    assert {m["after"].strip(): outcomes[str(m["id"])]["outcome"] for m in drawn["mutants"] if m["id"] != 5} == {
        "return x - 3": "red",
        "return x + 4": "red",
        "return x + 5": "uncovered",
        "return x - 6": "uncovered",
        "return 3+x": "green",
    }
    assert outcomes["5"]["outcome"] == "lost"
    red = [result for result in outcomes.values() if result["outcome"] == "red"]
    assert {(result["test"], result["how"]) for result in red} == {("tests/test_a.py::test_more", "failed")}
