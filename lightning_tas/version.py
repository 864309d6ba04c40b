"""The version, alone in a file that setuptools can read without importing torch."""

__version__ = "0.1.0"
