"""The version of the package, in a module of its own so that printing it does not import the public API."""

__version__ = "0.1.0"
