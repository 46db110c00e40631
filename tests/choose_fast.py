"""Choose the files of the group ``fast`` by their measured durations, and write tests/fast.txt.

python -m pytest -m "not ranks and not browser and not interpreter and not gpu" --junitxml durations.xml
python -m tests.choose_fast durations.xml

Every folder of tests gets the same share of the time budget. From each folder, the quickest files that fit into the
share are chosen, and at least one. The rest of the budget goes to the quickest remaining files of all folders.
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from tests.markers import FAST, HERE

BUDGET_S = 90.0  # CPU time; two processes then need less than two minutes, including collection and imports
HEAD = f"# The files of the group fast: {BUDGET_S:.0f} s of tests. Written by tests/choose_fast.py.\n"


def durations(report: Path) -> dict[str, float]:
    """Return file -> seconds for every test file in a junit report. Skipped tests count 0."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"] += float(
            case.get("time", 0)
        )
    return {name: spent for name, spent in seconds.items() if (HERE / name).is_file()}


def room_of(name: str) -> str:
    """Return a file's top folder in tests/; "." for a file directly in tests/."""
    return Path(name).parts[0] if len(Path(name).parts) > 1 else "."


def choose(seconds: dict[str, float], budget: float) -> list[str]:
    """Return the files to put into the group."""
    rooms = defaultdict(list)
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        rooms[room_of(name)].append(name)
    chosen: list[str] = []
    for names in rooms.values():
        left = budget / len(rooms)
        for name in names:
            if left >= seconds[name] or name == names[0]:
                chosen.append(name)
                left -= seconds[name]
    left = budget - sum(seconds[name] for name in chosen)
    for name in sorted(set(seconds) - set(chosen), key=lambda name: (seconds[name], name)):
        if (left := left - seconds[name]) < 0:
            break
        chosen.append(name)
    return sorted(chosen)


def main(argv: list[str]) -> None:
    seconds = durations(Path(argv[0]))
    chosen = choose(seconds, BUDGET_S)
    FAST.write_text(HEAD + "\n".join(chosen) + "\n", encoding="utf-8")
    print(f"{FAST}: {len(chosen)} of {len(seconds)} files, {sum(seconds[name] for name in chosen):.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
