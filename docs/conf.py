"""Sphinx's settings for the documentation site. `make docs` builds it."""

import os
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))
# Before JAX starts: pages show what a program for two devices contains.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from jax_gradops import linen  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]  # the only place with the address of the repository

project = PROJECT["name"]
version = release = PROJECT["version"]
author = copyright = "the jax_gradops authors"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "code_breaks",
    "notebooks",
    "generated",
    "repository_links",
]
exclude_patterns = ["_ext"]

# --- Markdown and notebooks ----------------------------------------------------------------------

nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_url_schemes = {
    "http": None,
    "https": None,
    # `repo:ffi/README.md#words` is a file of the repository. The build checks that it exists.
    "repo": f"{SOURCE}/blob/main/{{{{path}}}}#{{{{fragment}}}}",
}
copybutton_exclude = ".linenos, .gp, .go"

# --- Docstrings ----------------------------------------------------------------------------------

default_role = "py:obj"  # single backticks: a link if the name is documented, else code
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 60
for _name in (
    "DenseGelu",
    "DeferredBiasDense",
):  # autodoc takes a class with another name as an alias
    getattr(linen, _name).__name__ = _name
napoleon_use_rtype = False
napoleon_use_ivar = True

# Links into the pages of other projects need the network. `.github/workflows/docs.yml` asks for it.
if os.environ.get("JAX_GRADOPS_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_timeout = 20
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/latest", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

# --- HTML ----------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": SOURCE,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_source_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the theme's second search button
}
