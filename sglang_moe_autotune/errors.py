"""The errors that this package raises on purpose.

    AutotuneError
    ├── StoreError          a file of the store cannot be read as what it should be
    ├── ExportError         an export would overwrite, break or mislead; nothing was written
    ├── LandscapeError      a recording is not in the format that ``simulate`` reads
    ├── ServerError         a server's address gives no usable answer
    ├── ImportedError       a file to import or merge is not what it should be, or fits nothing here
    └── ShapeNotFoundError  no stored shape has the name that was asked for

Each message is one sentence or two: the rule, the value that broke it, and the cure. What a server meets
while it runs (a full disk, a broken file) is a warning and a state, not one of these.
"""

from __future__ import annotations


class AutotuneError(Exception):
    """Base of all of them: the shell turns it into one line and an exit code."""


class StoreError(AutotuneError):
    """A file of the store cannot be read as what it should be."""


class ExportError(AutotuneError):
    """An export would overwrite, break or mislead; nothing was written."""


class LandscapeError(AutotuneError):
    """A recording is not in the format that ``simulate`` reads."""


class ShapeNotFoundError(AutotuneError):
    """No stored shape has the name that was asked for."""


class ServerError(AutotuneError):
    """A server's address gives no usable answer."""


class ImportedError(AutotuneError):
    """A file to import or merge is not what it should be, or fits nothing here."""
