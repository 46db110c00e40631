"""Only opendit/common/safe_files.py opens, makes, renames or removes files, because it follows no symbolic links."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAFE = "opendit/common/safe_files.py"
# Methods that write, on paths or on modules, whatever the object's name.
METHODS = {"write_text", "write_bytes", "mkdir", "makedirs", "rename", "renames", "symlink", "symlink_to", "link"}
METHODS |= {"hardlink_to", "unlink", "rmdir", "removedirs", "rmtree", "truncate", "utime", "touch", "chmod", "mkfifo"}
METHODS |= {"copyfile", "copy2", "copytree", "save_file", "save_pretrained", "export_chrome_trace", "tofile"}
METHODS |= {"mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "FileHandler"}
METHODS |= {"SummaryWriter", "extractall"}
OF_MODULES = {"os.replace", "os.remove", "os.mknod", "shutil.copy", "shutil.move", "torch.save"}
OF_MODULES |= {"np.save", "np.savez", "np.savez_compressed", "np.savetxt"}
LAST_WORDS = {each.rpartition(".")[2] for each in OF_MODULES}
OPENERS = {"open", "ZipFile", "fdopen", "GzipFile"}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}
# (file, call) -> why it is allowed. Remove an entry when its call is gone.
ALLOWED = {
    ("opendit/config/checks.py", "mkdir"): "makes the folder that a flag names, to see whether that can be done",
    ("opendit/config/checks.py", "TemporaryFile"): "a file without a name, in the folder that a flag names",
    ("opendit/config/console.py", "open"): "/dev/null in the place of a closed stream",
    ("opendit/data/processes.py", "open"): "/dev/null",
    ("opendit/data/clips.py", "NamedTemporaryFile"): "a file of this process's in the system's temporary folder",
    ("opendit/data/clips.py", "open"): "a file in memory",
    ("opendit/data/clips.py", "truncate"): "of that file",
    ("opendit/training/build.py", "write_text"): "the temporary file of the script that has started the run",
    ("opendit/data/shards/store.py", "mkdtemp"): "a folder of this process's in the system's temporary folder",
    ("opendit/data/row_arrays.py", "mkdtemp"): "a new folder with a random name in the cache",
    ("opendit/data/video_files.py", "TemporaryDirectory"): "a folder of this process's",
    ("opendit/evaluation/program.py", "TemporaryDirectory"): "a folder of this process's",
    ("opendit/sampling/output_files.py", "TemporaryDirectory"): "a folder of this process's",
    ("opendit/sampling/page/drawing.py", "mkdtemp"): "a folder of this process's",
    ("opendit/parallel/mesh.py", "open"): "/dev/null",
    ("opendit/parallel/supervisor.py", "open"): "the file that torchrun names, for its report",
    ("opendit/export/conversion.py", "TemporaryDirectory"): "a new folder with a random name in the output",
    ("opendit/export/conversion.py", "save_pretrained"): "into that folder",
    ("opendit/checkpoint/run_folders.py", "mkdir"): "a new folder in the user's own; mkdir follows no link at its end",
    ("opendit/checkpoint/run_folders.py", "rename"): "of that folder, likewise",
    ("opendit/checkpoint/run_folders.py", "rmdir"): "of that folder, likewise",
    ("opendit/training/profiling.py", "TemporaryDirectory"): "a folder of this process's",
    ("opendit/training/profiling.py", "export_chrome_trace"): "into that folder",
}
GIVING = {"replacing", "creating", "open_to_write", "open_to_append", "path_of", "BytesIO", "StringIO"}


def writes(source: str) -> set[str]:
    """Return the names of the calls in a module that write."""
    tree = ast.parse(source)
    safe = {name.asname or name.name for node in ast.walk(tree) if _imports_safe(node) for name in node.names}
    given = _given(tree)
    return {_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _writes(node, safe, given)}


def _imports_safe(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "opendit.common.safe_files"


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _given(tree: ast.AST) -> set[str]:
    """Return the variables for files from safe_files.py, for buffers, and for objects opened from either."""
    pairs = [(node.context_expr, node.optional_vars) for node in ast.walk(tree) if isinstance(node, ast.withitem)]
    pairs += [(node.value, node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    several = [(value, to) for value, to in pairs if isinstance(value, ast.Tuple) and isinstance(to, ast.Tuple)]
    pairs += [pair for value, to in several for pair in zip(value.elts, to.elts, strict=True)]
    given: set[str] = set()
    for _ in range(3):
        given |= {
            variable.id
            for value, variable in pairs
            if isinstance(variable, ast.Name) and isinstance(value, ast.Call)
            and (_name(value) in GIVING or (value.args and _is_given(value.args[0], given)))
        }  # fmt: skip
    return given


def _is_given(argument: ast.expr, given: set[str]) -> bool:
    if isinstance(argument, ast.Call):
        return _name(argument) in GIVING
    return isinstance(argument, ast.Name) and argument.id in given


def _writes(call: ast.Call, safe: set[str], given: set[str]) -> bool:
    name, of = _name(call), call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(call.func, ast.Name) and name in safe:
        return False
    if isinstance(of, ast.Name) and of.id == "safe_files":
        return False
    dotted = ast.unparse(call.func) if name in LAST_WORDS else ""  # ast.unparse is slow
    to = call.args[1:2] if dotted == "torch.save" else call.args[:1]
    if (to and _is_given(to[0], given)) or (of is not None and _is_given(of, given)):
        return False
    if name in METHODS or dotted in OF_MODULES:
        return True
    if name in OPENERS:
        return _opens_to_write(call)
    if name in ("save", "savefig"):  # pictures are saved with a format or options
        texts = [word for word in call.args[1:] if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return of is not None and bool(texts or call.keywords)
    return name == "replace" and of is not None and len(call.args) == 1 and not call.keywords  # str.replace takes two


def _opens_to_write(call: ast.Call) -> bool:
    if any(flag in ast.unparse(call) for flag in WRITING_FLAGS):
        return True
    modes = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return any(len(mode) <= 3 and set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in texts)


def modules() -> list[str]:
    paths = [*(ROOT / "opendit").rglob("*.py"), *(ROOT / f"{name}.py" for name in ("train", "sample", "preprocess"))]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_no_module_writes_by_itself():
    found = {(name, call) for name in modules() if name != SAFE for call in writes((ROOT / name).read_text())}
    assert sorted(found - ALLOWED.keys()) == [], "write through opendit/common/safe_files.py"
    assert sorted(ALLOWED.keys() - found) == [], "no longer needed"


@pytest.mark.parametrize(
    "line",
    [
        'open(path, "w")', 'open(path, mode="ab")', 'path.open("r+")', 'os.open(path, os.O_RDWR)', "path.write_text(x)",
        "os.replace(a, b)", "partial.replace(path)", "path.rename(other)", 'np.savez(path, x=x)', "torch.save(x, path)",
        'image.save(path, "PNG")', 'figure.savefig(path, format="png")', "shutil.rmtree(path)", "path.unlink()",
        'zipfile.ZipFile(path, "w")', "os.utime(path)", "path.symlink_to(x)", "path.mkdir()", "os.truncate(path, 0)",
        "shutil.copyfile(a, b)", 'gzip.open(path, "wb")', "tempfile.mkdtemp()", 'av.open(name, "w", format="mp4")',
        "model.save_pretrained(folder)", "profile.export_chrome_trace(path)",
    ],
)  # fmt: skip
def test_what_writes_is_seen(line):
    assert writes(line)


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        'open(path, "rb")',
        "safe_files.rename(a, b)",
        'text.replace("a", "b")',
        "replace(flags, lr=1)",
        "os.open(p, os.O_RDONLY)",
    ],
)
def test_what_reads_is_not(line):
    assert not writes(line)
