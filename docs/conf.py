"""The site of parwrap: ``python -m sphinx -W -n --keep-going docs build/site`` builds it.

``nox -s docs`` builds and opens it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the extension ``site_pages``, and parwrap

import parwrap  # noqa: E402

project = "parwrap"
author = "the parwrap authors"
release = version = parwrap.__version__
html_title = f"parwrap {release}"

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx_copybutton", "sphinx_design"),
    "site_pages",
]
exclude_patterns = ["_static"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "default", "monokai"
highlight_language = "default"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "class"
napoleon_custom_sections = ["Without parwrap"]

# The inventory in the repository has the names that the pages use, so that a build needs no network.
# PARWRAP_DOCS_ONLINE=1 reads that of torch.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable", None if os.environ.get("PARWRAP_DOCS_ONLINE") else "inventories/torch.inv"),
}
