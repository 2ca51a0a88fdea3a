"""The release, also of a checkout on the path that nobody installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hfkvq")
except PackageNotFoundError:
    __version__ = "0.1.0"
