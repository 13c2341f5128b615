"""What mkdocs adds to the pages: the tables of configuration.md, of all keys, and the examples' pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ("loss_curve.png", "offload.png", "optimizers.png", "schedules.svg", "longcontext.png", "plan.png")
MARK = "<!-- keys -->"


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of the examples."""
    from mkdocs.structure.files import File

    for name in PICTURES:
        files.append(File(name, str(ROOT / "examples"), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Put the tables where the page wants them."""
    return markdown.replace(MARK, "\n".join(tables())) if MARK in markdown else markdown


# -- the configuration -------------------------------------------------------------------------------------------------


def tables() -> Iterator[str]:
    """The keys of each section as Markdown: first the top level, then the sections in the order in which it has them."""
    from zerorun.config.keys import key_tables

    for table in key_tables():
        yield f"### {f'`{table.path}`' if table.path else 'Top level'}\n\n{table.meaning}\n"
        if table.keys:
            yield from ("| key | type | default | meaning |", "|---|---|---|---|")
            for key in table.keys:
                meaning = key.meaning.replace("|", "\\|")
                yield f"| `{key.name}` | {key.type} | {key.default} | {meaning} |"
            yield ""
