"""The part of the package's metadata that needs its address; the rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ADDRESS = "https://example.org/parwrap"
"""The address of the repository, without a slash at its end. This is a placeholder: docs/releases.rst says when to set it."""

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "parwrap" / "__init__.py").read_text("utf-8"))[1]


def with_addresses(readme: str) -> str:
    """The README with whole addresses for its links to files of the repository, as an index needs them.

    Pictures need the file itself, and everything else its page.
    """
    pictures = re.sub(r"(\.\. (?:image|figure):: )(?=docs/)", rf"\g<1>{ADDRESS}/raw/v{VERSION}/", readme)
    return re.sub(r"<((?:docs|examples)/[\w./]+|\w+\.(?:rst|cff))>", rf"<{ADDRESS}/blob/v{VERSION}/\1>", pictures)


setup(
    long_description=with_addresses((HERE / "README.rst").read_text("utf-8")),
    long_description_content_type="text/x-rst",
    project_urls={
        "Homepage": ADDRESS,
        "Documentation": f"{ADDRESS}/blob/v{VERSION}/docs/index.rst",
        "Issues": f"{ADDRESS}/issues",
        "Changes": f"{ADDRESS}/blob/v{VERSION}/CHANGES.rst",
    },
)
