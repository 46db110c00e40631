"""Hook of mkdocs for links from docs/ to files outside docs/, which are not part of the site.

Such links lead to the file's page in the repository. Pictures outside docs/ are copied into the site.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")
PICTURES = "assets"


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Replace a page's links before mkdocs renders it. mkdocs requires this name."""
    depth = len(Path(page.file.src_uri).parts) - 1

    def replaced(found: re.Match) -> str:
        picture, text, up, path, anchor = found.groups()
        if up.count("../") <= depth:  # a link within docs/
            return found[0]
        if not (ROOT / path).exists():
            raise ValueError(f"docs/{page.file.src_uri}: {up}{path} doesn't exist")
        if picture:
            return f"![{text}]({up.removeprefix('../')}{path})"
        return f"[{text}]({config['repo_url']}/blob/main/{path}{anchor or ''})"

    return OUTSIDE.sub(replaced, markdown)


def on_files(files, config, **_):
    """Add the repository's pictures to the site's files. mkdocs requires this name."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / PICTURES).glob("*")):
        files.append(File(f"{PICTURES}/{path.name}", str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files
