"""A hook of mkdocs: links from docs/ to files of the repository outside it, which the site does not hold, lead to the
repository's page of them; pictures outside it are copied into the site."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
PICTURES = "assets"


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """mkdocs' own event: the text of a page before it is rendered."""
    depth = len(Path(page.file.src_uri).parts) - 1

    def replaced(found: re.Match) -> str:
        picture, text, up, path, anchor = found.groups()
        if up.count("../") <= depth:  # of another folder of docs/
            return found[0]
        if not (ROOT / path).exists():
            raise ValueError(f"docs/{page.file.src_uri}: {up}{path} doesn't exist")
        if picture:
            return f"![{text}]({up.removeprefix('../')}{path})"
        return f"[{text}]({config['repo_url']}/blob/main/{path}{anchor or ''})"

    return OUTSIDE.sub(replaced, markdown)


def on_files(files, config, **_):
    """mkdocs' own event: adds the pictures of the repository to the site's files."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / PICTURES).glob("*")):
        files.append(File(f"{PICTURES}/{path.name}", str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files
