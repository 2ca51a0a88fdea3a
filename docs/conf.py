"""The site that `make docs` builds: the documents of the repository as they are, and the API reference.

The repository itself is the source folder, so that relative links work on the site as they do where the files are read.
"""

import re
from pathlib import Path

from hfkvq import __version__

ROOT = Path(__file__).resolve().parents[1]

# The contents, by heading. They stand here, since the README is to be readable where nothing builds it.
PAGES = {
    "Guides": [
        *("docs/choosing", "docs/schemes", "docs/models", "docs/saved_prompts", "docs/serving", "docs/vllm"),
        *("docs/speed", "docs/agents", "docs/tuning", "docs/evaluation"),
    ],
    "Reference": ["docs/api"],
    "Measurements": ["docs/results", "docs/real_model", "docs/papers", "evals/README"],
    "Project": [
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
        "DECISIONS",
        "notebooks/README",
        "docs/history/decisions-2026-11",
        "docs/history/results-2026-11",
        "docs/history/let-go-2026-11",
    ],
}

project = "hfkvq"
author = copyright = "The hfkvq authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"{project} {__version__}"

root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/history/*.md",
    "evals/*.md",
    "evals/reference/*.md",
    "evals/tasks/*.md",
    "notebooks/*.md",
]
myst_heading_anchors = 4
# Linked from other pages, but not in the contents.
suppress_warnings = ["toc.not_included"]

# In docstrings names stand between single backticks.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
# Extras that the reference can do without.
autodoc_mock_imports = ["optuna", "scipy"]
# Else fields of dataclasses would stand there twice.
napoleon_use_ivar = True


def adapt(app, name, source):
    """Appends the contents to the first page, and has links to a folder lead to its README, as GitHub has."""

    def link(match):
        folder = (ROOT / name).parent / match[1]
        return f"]({match[1].rstrip('/')}/README.md)" if (folder / "README.md").is_file() else match[0]

    source[0] = re.sub(r"\]\(([\w./-]+)\)", link, source[0])
    if name == root_doc:
        for heading, pages in PAGES.items():
            source[0] += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```\n"])


def escape(app, what, name, obj, options, lines):
    """A bar is an absolute value in docstrings; reStructuredText would look for a substitution."""
    lines[:] = [re.sub(r"``.*?``|(\|)", lambda found: r"\|" if found[1] else found[0], line) for line in lines]


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", escape)
    app.connect("source-read", adapt)
